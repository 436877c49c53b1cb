"""The bundle: what training hands to the server, as files on disk.

    <bundle>/manifest.json  tokenizer.json  calibration.json  README.md  graphs/<precision>/segment_<n>.onnx

A bundle is written to a temporary folder beside its target and renamed, so a half-written one is never visible.
Loading checks the format version, the schema and every sha256; nothing in a bundle is unpickled. Whether a graph's
inputs and outputs are those of the manifest is checked by whoever opens it, with :func:`segment_io`.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from models.architecture import Architecture
from models.exits import Criterion, Policy
from models.tokenization import TextEncoder

FORMAT_VERSION = 1
# Served, classified and inspected with where no other is named.
SHIPPED_BUNDLE = Path(__file__).resolve().parent / "zoo" / "sst2-minilm-l6"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$"
"""Names of models travel in URLs, metrics and file names."""
_M = TypeVar("_M", bound=BaseModel)
Precision = Literal["fp32", "fp16", "int8"]


class BundleError(Exception):
    """A bundle that cannot be used; the message names the file and what is wrong with it."""


_Share = Annotated[float, Field(ge=0, le=1)]
_Positive = Annotated[float, Field(gt=0)]
# Training keeps to 0.05 to 20. What lies far beyond makes probabilities that are not numbers.
_Temperature = Annotated[float, Field(ge=1e-3, le=1e3)]


class _Record(BaseModel):
    # No NaN and no infinity: JSON has none, and no comparison with one means anything.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GraphFile(_Record):
    """One segment's graph: path inside the bundle, hex sha256, size in bytes."""

    file: str
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    bytes: int = Field(ge=1)


class ExitScore(_Record):
    """An exit by itself on the evaluation split, where every text leaves there. Metrics lie in [0, 1] (Matthews in
    [-1, 1])."""

    exit: int
    cost_in_layers: float = Field(description="mean over the evaluation split, units of one whole layer")
    metrics: dict[str, float]
    standard_errors: dict[str, float] = Field(default={}, description="sampling error of each metric on that split")


class CurvePoint(_Record):
    """What one threshold gave on a split.

    ``agreement`` is the share of texts whose answer is the last exit's; ``mean_cost`` is in layers; ``speedup`` is the
    last exit's mean cost divided by it; ``exit_shares`` sums to 1 over the exits.
    """

    threshold: float
    metric: float = Field(ge=-1, le=1)
    agreement: _Share
    mean_cost: _Positive
    speedup: _Positive
    exit_shares: tuple[_Share, ...]


class Scores(_Record):
    """What an evaluation ``split`` of ``n`` texts gave, by precision: ``per_exit``, and ``curves`` at the calibration's
    thresholds (empty where the bundle was calibrated anew since)."""

    split: str
    n: int
    per_exit: dict[Precision, tuple[ExitScore, ...]]
    curves: dict[Precision, dict[Criterion, tuple[CurvePoint, ...]]] = {}

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        for curves in self.curves.values():
            _check_thresholds(curves)
        return self


class Manifest(_Record):
    format_version: int
    name: str = Field(pattern=NAME_PATTERN)
    version: str = Field(min_length=1)
    task: str
    labels: tuple[str, ...] = Field(min_length=2)
    takes_pairs: bool
    architecture: Architecture
    exit_costs: tuple[_Positive, ...] = Field(description="cost_in_layers of each exit at mean_tokens tokens")
    mean_tokens: float = Field(gt=0, description="mean tokens of a text in the calibration split")
    precisions: dict[Precision, tuple[GraphFile, ...]] = Field(min_length=1)
    default_precision: Precision
    files: dict[str, str] = Field(description="sha256 of tokenizer.json and calibration.json")
    scores: tuple[Scores, ...]
    provenance: dict[str, Any]
    licence: str

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.architecture.num_labels != len(self.labels):
            raise ValueError(f"{len(self.labels)} labels, but logits of width {self.architecture.num_labels}")
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels repeat")
        if any(not label.strip() for label in self.labels):
            raise ValueError("a label is blank")
        exits = len(self.architecture.exits)
        if len(self.exit_costs) != exits:
            raise ValueError(f"exit_costs has {len(self.exit_costs)} entries for {exits} exits")
        if sorted(set(self.exit_costs)) != list(self.exit_costs):
            raise ValueError("exit_costs must rise from exit to exit")
        for precision, graphs in self.precisions.items():
            if len(graphs) != exits:
                raise ValueError(f"precision {precision} has {len(graphs)} graphs for {exits} exits")
        if self.default_precision not in self.precisions:
            raise ValueError(f"default_precision {self.default_precision} is not among precisions")
        return self


class Tier(_Record):
    """A certified promise: with probability ≥ 1 - δ over the calibration draw, answers agree with the last exit with
    probability ≥ ``quality``. ``disagreements`` of ``n`` were seen on the risk split; ``p_value`` is the exact binomial
    one of the chosen threshold."""

    quality: float = Field(gt=0, lt=1)
    criterion: Criterion
    threshold: float
    n: int = Field(ge=1)
    disagreements: int = Field(ge=0)
    p_value: _Share
    mean_cost: _Positive
    speedup: _Positive

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        Policy(self.criterion, self.threshold)
        if self.disagreements > self.n:
            raise ValueError(f"{self.disagreements} disagreements in {self.n} texts")
        return self


class RefusedTier(_Record):
    """A quality that this bundle cannot promise, and why (for instance: too few calibration texts)."""

    quality: float
    why: str
    n_needed: int


class PrecisionCalibration(_Record):
    """``temperatures`` per exit are those of the scores; at ``agreement_temperatures`` its confidence is the chance
    that the last exit says the same (1 for the last exit itself). ``calibration_error`` is the expected calibration
    error (15 bins) per exit before and after the temperature, on data that did not fit it; ``curves`` by criterion on
    the risk split, from the safest threshold to the boldest."""

    temperatures: tuple[_Temperature, ...]
    agreement_temperatures: tuple[_Temperature, ...]
    calibration_error_before: tuple[float, ...]
    calibration_error_after: tuple[float, ...]
    curves: dict[Criterion, tuple[CurvePoint, ...]]
    certified: tuple[Tier, ...] = Field(description="by quality, highest first")
    refused: tuple[RefusedTier, ...] = ()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_thresholds(self.curves)
        qualities = [tier.quality for tier in self.certified]
        if qualities != sorted(qualities, reverse=True):
            raise ValueError("certified tiers must stand by quality, highest first")
        return self


class Calibration(_Record):
    """``metric`` names the task metric in the curves. Splits are counted in texts; ``delta`` is δ of all tiers of all
    precisions together; ``data_sha256`` identifies the risk split. ``n_temperature`` is 0 where the temperatures had no
    split of their own and were cross-fitted on the validation split."""

    metric: str
    delta: float = Field(gt=0, lt=1)
    n_temperature: int = Field(ge=0)
    n_risk: int = Field(ge=0)
    n_validation: int = Field(ge=0)
    data_sha256: str
    precisions: dict[Precision, PrecisionCalibration]


def _check_thresholds(curves: Mapping[Criterion, tuple[CurvePoint, ...]]) -> None:
    """Raises :class:`ValueError` for a threshold that no request could run under."""
    for criterion, points in curves.items():
        for point in points:
            Policy(criterion, point.threshold)


READ = "read"
"""A segment's optional input, boolean: whether its logits are wanted. Where they are not, they have no rows. True
unless given; graphs without it always compute them."""


def segment_io(architecture: Architecture, segment: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs and outputs of segment ``segment`` (1 = first; it ends in the exit of that number).

    State that crosses from one segment to the next is ``hidden [B, S, H]``, and ``key``, ``value`` ``[B, S, H]`` of the
    next layer where the exit before was a ``peek``. One ONNX graph can't use a name twice, so state leaves as
    ``next_hidden``, ``next_key``, ``next_value`` and enters the next segment without the prefix; the order is the same.
    """
    exits = architecture.exits
    if segment == 1:
        inputs: tuple[str, ...] = ("input_ids", "position_ids", "attention_mask")
        if architecture.uses_token_type_ids:
            inputs += ("token_type_ids",)
    else:
        inputs = (*state_names(architecture, segment - 1), "attention_mask")
    outputs: tuple[str, ...] = ("logits",)
    if segment < len(exits):
        outputs += tuple(f"next_{name}" for name in state_names(architecture, segment))
    return inputs, outputs


def state_names(architecture: Architecture, segment: int) -> tuple[str, ...]:
    """Names under which the state that segment ``segment`` leaves enters the next one."""
    peeked = architecture.exits[segment - 1].head == "peek"
    return ("hidden", "key", "value") if peeked else ("hidden",)


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


class Bundle:
    """A verified bundle on disk. Build one with :meth:`load` or :func:`write_bundle`."""

    def __init__(self, path: Path, manifest: Manifest, calibration: Calibration, encoder: TextEncoder) -> None:
        self.path = path
        self.manifest = manifest
        self.calibration = calibration
        self.encoder = encoder

    @classmethod
    def load(cls, path: str | Path) -> "Bundle":
        """Reads and verifies the bundle at ``path``.

        Raises :class:`BundleError`, naming the file, where anything is missing, altered or of another format.
        """
        root = Path(path)
        try:
            return cls._load(root)
        except OSError as error:
            raise BundleError(f"{error.filename or root}: {error.strerror or error}") from error

    @classmethod
    def _load(cls, root: Path) -> "Bundle":
        if not root.is_dir():
            raise BundleError(f"{root}: no such bundle folder")
        document = _read_json(root / "manifest.json")
        version = document.get("format_version") if isinstance(document, dict) else None
        if type(version) is not int or version != FORMAT_VERSION:
            raise BundleError(
                f"{root / 'manifest.json'}: format_version {version!r} is not {FORMAT_VERSION}, "
                "the one that this version of Offramp reads"
            )
        manifest = _validate(Manifest, document, root / "manifest.json")
        for graphs in manifest.precisions.values():
            for graph in graphs:
                _verify(root, graph.file, graph.sha256)
                if (root / graph.file).stat().st_size != graph.bytes:
                    raise BundleError(f"{root / 'manifest.json'}: {graph.file} does not have {graph.bytes} bytes")
        for name in ("tokenizer.json", "calibration.json"):
            if name not in manifest.files:
                raise BundleError(f"{root / 'manifest.json'}: no sha256 for {name}")
        for name, digest in manifest.files.items():
            _verify(root, name, digest)
        calibration = _validate(Calibration, _read_json(root / "calibration.json"), root / "calibration.json")
        for precision in manifest.precisions:
            if precision not in calibration.precisions:
                raise BundleError(f"{root / 'calibration.json'}: precision {precision} is not calibrated")
            _check_exits(calibration.precisions[precision], len(manifest.architecture.exits), precision, root)
        return cls(root, manifest, calibration, _encoder(root, manifest))

    def in_place(self) -> bool:
        """Whether its folder holds this bundle, every file of it, and not another one that is or was put there."""
        try:
            return Bundle.load(self.path).manifest == self.manifest
        except BundleError:
            return False

    def graph(self, segment: int, precision: Precision | None = None) -> Path:
        """Path of the graph of segment ``segment`` (1 = first)."""
        graphs = self.manifest.precisions[precision or self.manifest.default_precision]
        return self.path / graphs[segment - 1].file


def write_bundle(
    target: str | Path,
    *,
    manifest: Mapping[str, Any],
    calibration: Calibration,
    tokenizer_json: str,
    graphs: Mapping[Precision, list[Path]],
    readme: str,
    extra: Mapping[str, bytes] | None = None,
    replace: bool = False,
) -> Bundle:
    """Writes a bundle at ``target`` in one step and returns it loaded (so verified).

    ``manifest`` holds :class:`Manifest`'s fields but ``format_version``, ``precisions`` and ``files``, which are filled
    in here; ``graphs`` gives for each precision the files of segments 1, 2, ...; ``extra`` holds further files (plots
    of the model card) by relative path. Raises :class:`BundleError` where ``target`` exists and ``replace`` is false,
    or ``target`` is something else than a bundle.
    """
    target = Path(target)
    if target.exists() and not replace:
        raise BundleError(f"{target}: exists already")
    if target.exists() and not _may_replace(target):
        raise BundleError(f"{target}: is no bundle, so it is not replaced by one")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        # mkdtemp makes 0700; the bundle is read by whoever serves it.
        work.chmod(0o755)
        precisions: dict[str, list[dict[str, Any]]] = {}
        for precision, files in graphs.items():
            folder = work / "graphs" / precision
            folder.mkdir(parents=True)
            precisions[precision] = []
            for number, source in enumerate(files, start=1):
                file = folder / f"segment_{number}.onnx"
                shutil.copyfile(source, file)
                precisions[precision].append(
                    {
                        "file": file.relative_to(work).as_posix(),
                        "sha256": sha256_of(file),
                        "bytes": file.stat().st_size,
                    }
                )
        (work / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        (work / "calibration.json").write_text(calibration.model_dump_json(indent=1) + "\n", encoding="utf-8")
        (work / "README.md").write_text(readme, encoding="utf-8")
        for name, content in (extra or {}).items():
            (work / name).parent.mkdir(parents=True, exist_ok=True)
            (work / name).write_bytes(content)
        sums = {name: sha256_of(work / name) for name in ("tokenizer.json", "calibration.json")}
        document = {"format_version": FORMAT_VERSION, **manifest, "precisions": precisions, "files": sums}
        checked = _validate(Manifest, document, target / "manifest.json")
        (work / "manifest.json").write_text(checked.model_dump_json(indent=1) + "\n", encoding="utf-8")
        Bundle.load(work)
        _swap(work, target)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
    return Bundle.load(target)


def _may_replace(target: Path) -> bool:
    """Whether nothing but a bundle would be lost: ``--output`` may name a folder of data by mistake."""
    if not target.is_dir():
        return False
    return all((target / name).is_file() for name in ("manifest.json", "calibration.json")) or not any(target.iterdir())


def _swap(work: Path, target: Path) -> None:
    """Puts ``work`` in ``target``'s place. A rename cannot replace a filled folder, so the old one steps aside."""
    if not target.exists():
        os.rename(work, target)
        return
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
    try:
        os.rename(target, aside / "bundle")
        try:
            os.rename(work, target)
        except BaseException:
            os.rename(aside / "bundle", target)
            raise
    except BaseException:
        # rmdir, not rmtree: an old bundle that could not be put back must not be deleted.
        with suppress(OSError):
            aside.rmdir()
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _check_exits(calibration: PrecisionCalibration, exits: int, precision: Precision, root: Path) -> None:
    """Raises :class:`BundleError` where ``calibration`` is for another number of exits."""
    found = [
        ("temperatures", len(calibration.temperatures)),
        ("agreement temperatures", len(calibration.agreement_temperatures)),
        ("calibration errors before", len(calibration.calibration_error_before)),
        ("calibration errors after", len(calibration.calibration_error_after)),
    ]
    for criterion, points in calibration.curves.items():
        found += [(f"exit shares of {criterion}", len(point.exit_shares)) for point in points]
    for what, count in found:
        if count != exits:
            raise BundleError(f"{root / 'calibration.json'}: {count} {what} for {exits} exits ({precision})")


def _encoder(root: Path, manifest: Manifest) -> TextEncoder:
    """The tokenizer, once it is known to give only what the model's embeddings hold."""
    path, architecture = root / "tokenizer.json", manifest.architecture
    try:
        encoder = TextEncoder.from_file(path, architecture.max_length)
    except Exception as error:  # tokenizers raises plain Exception
        raise BundleError(f"{path}: not a tokenizer ({' '.join(str(error).split())})") from error
    special = encoder.special_tokens(pair=manifest.takes_pairs)
    if special >= architecture.max_length:
        raise BundleError(f"{path}: adds {special} special tokens, but max_length is {architecture.max_length}")
    largest = encoder.largest_id
    if largest >= architecture.vocab_size:
        raise BundleError(f"{path}: has token id {largest}, but the model's vocab_size is {architecture.vocab_size}")
    return encoder


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BundleError(f"{path}: missing") from None
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # ValueError: not UTF-8, and integers of thousands of digits, too
        raise BundleError(f"{path}: not readable as JSON ({error})") from error


def _validate(model: type[_M], document: Any, path: Path) -> _M:
    try:
        # Through JSON, so that strictness is JSON's: tuples come as arrays.
        checked = model.model_validate_json(json.dumps(document), strict=True)
        json.dumps(document, allow_nan=False)  # fields that take anything take NaN, too, and JSON has none
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "document"
        raise BundleError(f"{path}: {where}: {' '.join(first['msg'].split())}") from error
    except ValueError:
        raise BundleError(f"{path}: holds NaN or infinity, which JSON does not have") from None
    return checked


def _verify(root: Path, name: str, expected: str) -> None:
    path = root / name
    if "\0" in name or any(len(part.encode(errors="replace")) > 255 for part in path.parts):
        raise BundleError(f"{root / 'manifest.json'}: {name[:40]!r} cannot be the name of a file")
    # A manifest may only name files of its own bundle. Not Path.resolve, which raises for links that lead in a circle.
    if not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(root)):
        raise BundleError(f"{root / 'manifest.json'}: {name} lies outside the bundle")
    if not path.is_file():
        raise BundleError(f"{path}: missing")
    if sha256_of(path) != expected:
        raise BundleError(f"{path}: sha256 is not the manifest's; the file has been changed or cut short")
