"""From labelled texts to a servable bundle: train, export, calibrate, evaluate, write.

A run lives in one folder: ``run.json`` (its settings), ``training/`` (checkpoint, logs, best weights), ``bundle/``.
Each step reads what the step before left there, so a run that was stopped goes on where it was, and one that is done
can be exported again with other exits.
"""

import hashlib
import json
import platform
import re
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer

from models.architecture import Architecture, ExitSpec, Head
from models.bundle import NAME_PATTERN, Bundle, Calibration, Precision, Scores, write_bundle
from models.costs import exit_costs
from models.network import Backbone, MultiExitNetwork, build_network, load_backbone
from models.tokenization import TextEncoder
from training.calibrate import Split, SplitLogits, calibrate
from training.checkpoint import replace_text
from training.classifier import load_classifier
from training.data import (
    Example,
    Splits,
    Table,
    Tokenized,
    check_labels,
    read_table,
    same_text,
    split,
    subset,
    tokenize,
)
from training.evaluate import Measured, curve, exit_scores, measure, run_graphs
from training.export import dequantised_weights, export_graphs, select_exits
from training.graphs import build_segments
from training.methods import Contrast, Distillation
from training.parallel import launched_rank
from training.report import PLOT_NAME, VALIDATION_SPLIT, bundle_plot, model_card
from training.tasks import TASKS
from training.trainer import EpochReport, StepReport, TrainingSettings, train
from training.worth import ExitSet, Timings, exit_sets, measure_timings

# int8 is what a bundle serves by default where no exit loses more than this share of the metric against fp32.
PRECISION_TOLERANCE = 0.005
# A data_dir that begins so names a data set of the hub.
HUB = "hf:"


class PipelineError(Exception):
    """A run that cannot go on; the message says which setting or file and what would help."""


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Where the texts come from: a known ``task`` and its ``data_dir``, or ``train_file`` with its columns.

    ``data_dir`` is a folder, or ``hf:`` and the name of a data set on the hub.

    ``calibration_size`` and ``validation_size`` are counted in texts (None: the task's, or 20 % and 10 % of the file,
    at most 2,000 and 1,000). ``examples`` trains on a part only, drawn with the run's seed. ``labels`` are the classes
    of ``train_file`` in order (None: those found in it), ``source`` says where it comes from (None: its name).
    """

    task: str | None = None
    data_dir: str | None = None
    train_file: str | None = None
    eval_file: str | None = None
    text_column: str = "text"
    pair_column: str | None = None
    label_column: str = "label"
    metric: str = "accuracy"
    labels: tuple[str, ...] | None = None
    source: str | None = None
    calibration_size: int | None = None
    validation_size: int | None = None
    examples: int | None = None


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Everything that decides what a run produces; kept in ``run.json``.

    ``exit_layers`` lists after how many whole layers exits stand (None: after every layer that the head can read).
    ``last_head`` gives the last exit another head than ``head``, after the whole encoder.
    """

    data: DataSettings
    training: TrainingSettings = field(default_factory=TrainingSettings)
    backbone: str = "minilm-l6"
    head: Head = "peek"
    exit_layers: tuple[int, ...] | None = None
    last_head: Head | None = None
    max_length: int = 128
    precisions: tuple[Precision, ...] = ("fp32", "int8")
    name: str = "model"
    version: str = "1"
    licence: str = "not stated"

    def __post_init__(self) -> None:
        # The manifest would refuse it too, but only after hours of training.
        if not re.fullmatch(NAME_PATTERN, self.name):
            raise ValueError(
                f"name must be of letters, digits, '.', '_' and '-', begin with one of the first two and have at most "
                f"128 characters, not {self.name!r}"
            )
        if not self.version:
            raise ValueError("version must not be empty")


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run's data: disjoint splits, and ``evaluations`` by name (files of their own, or else the validation split)."""

    splits: Splits
    evaluations: dict[str, tuple[Example, ...]]
    takes_pairs: bool
    source: str
    metric: str

    @property
    def evaluation(self) -> tuple[Example, ...]:
        """The first of them, which stands for all where one number must."""
        return next(iter(self.evaluations.values()))


@dataclass(frozen=True, slots=True)
class Observer:
    """What a run tells while it works: ``stage`` names it, ``step`` and ``epoch`` report training, ``advance`` counts
    texts done of ``total`` in the stage."""

    stage: Callable[[str, int], None] = lambda name, total: None
    advance: Callable[[int], None] = lambda texts: None
    step: Callable[[StepReport], None] = lambda report: None
    epoch: Callable[[EpochReport], None] = lambda report: None


def prepare(settings: DataSettings, seed: int) -> Prepared:
    """Reads and splits the data; raises :class:`DataError` or :class:`PipelineError` naming file, row or setting."""
    if (settings.task is None) == (settings.train_file is None):
        raise PipelineError("give either a task or a train_file, not both and not neither")
    if settings.task is not None:
        return _prepare_task(settings, seed)
    assert settings.train_file is not None
    columns = (settings.text_column, settings.label_column, settings.pair_column)
    table = read_table(settings.train_file, *columns)
    evaluations = [read_table(settings.eval_file, *columns)] if settings.eval_file else []
    size = len(table)
    parts = split(
        table,
        calibration=_size(settings.calibration_size, min(2000, size // 5)),
        validation=_size(settings.validation_size, min(1000, max(2, size // 10))),
        seed=seed,
        grouping=same_text,
        labels=settings.labels,
    )
    source = settings.source or Path(settings.train_file).name
    return _prepared(parts, evaluations, settings, seed, source, settings.metric)


def _prepare_task(settings: DataSettings, seed: int) -> Prepared:
    assert settings.task is not None
    task = TASKS.get(settings.task)
    if task is None:
        raise PipelineError(f"task must be one of {', '.join(TASKS)}, not {settings.task!r}")
    if settings.data_dir is None:
        raise PipelineError(
            f"task {task.name!r} needs data_dir, the folder with {', '.join((task.train_file, *task.eval_files))} in "
            f"GLUE's layout (https://gluebenchmark.com/tasks), or {HUB}NAME to read it from the hub ({HUB}nyu-mll/glue)"
        )
    if settings.data_dir.startswith(HUB):
        repository = settings.data_dir.removeprefix(HUB)
        whole, *evaluations = (task.read_hub(repository, part) for part in ("train", *task.hub_splits))
    else:
        folder = Path(settings.data_dir)
        whole, *evaluations = (task.read(folder, file) for file in (task.train_file, *task.eval_files))
    parts = split(
        whole,
        calibration=_size(settings.calibration_size, task.calibration),
        validation=_size(settings.validation_size, task.validation),
        seed=seed,
        grouping=task.grouping,
        # In the order that the metric counts by: F1 is that of class 1.
        labels=tuple(task.labels.values()),
    )
    return _prepared(parts, evaluations, settings, seed, f"{task.name}: {task.source}", task.metric)


def _size(asked: int | None, default: int) -> int:
    return default if asked is None else asked


def _prepared(
    parts: Splits, evaluations: Sequence[Table], settings: DataSettings, seed: int, source: str, metric: str
) -> Prepared:
    # Two: one half of the validation split judges the temperatures of the other.
    if not parts.calibration or len(parts.validation) < 2:
        raise PipelineError("calibration_size must be at least 1 text and validation_size at least 2")
    for table in evaluations:
        check_labels(table.examples, parts.labels, table.source)
    if settings.examples is not None:
        parts = replace(parts, train=subset(parts.train, settings.examples, seed))
    named = {Path(table.source).name: table.examples for table in evaluations}
    return Prepared(
        splits=parts,
        evaluations=named or {VALIDATION_SPLIT: parts.validation},
        takes_pairs=parts.train[0].pair is not None,
        source=source,
        metric=metric,
    )


def exit_specs(
    head: Head, num_layers: int, exit_layers: Sequence[int] | None = None, last_head: Head | None = None
) -> tuple[ExitSpec, ...]:
    """An exit with ``head`` after each of ``exit_layers``; by default ``peek`` after 0 .. L-1, the others after 1 .. L.

    ``last_head`` adds an exit of that kind after the whole encoder (``peek``: after layer L-1), in the place of one
    that ``exit_layers`` has there. Raises ValueError for layers that do not ascend or that the head cannot read.
    """
    deepest = num_layers - 1 if head == "peek" else num_layers
    layers = list(range(0 if head == "peek" else 1, deepest + 1)) if exit_layers is None else list(exit_layers)
    if not layers or layers != sorted(set(layers)) or layers[0] < 0 or layers[-1] > deepest:
        raise ValueError(f"exit layers must ascend within 0 .. {deepest} for head {head!r}, not {layers}")
    heads: dict[int, Head] = dict.fromkeys(layers, head)
    if last_head is not None:
        heads[num_layers - 1 if last_head == "peek" else num_layers] = last_head
    return tuple(
        ExitSpec(number=number, after_layer=layer, head=heads[layer]) for number, layer in enumerate(sorted(heads), 1)
    )


def run(settings: RunSettings, folder: Path, *, resume: bool = False, observer: Observer = Observer()) -> Bundle | None:
    """Trains, exports, calibrates and evaluates; returns the bundle written at ``folder/bundle``.

    Of several processes the main one does so; the work of the others ends with training, and they return None. Raises
    :class:`PipelineError` where ``folder`` holds another run, or one that ``resume`` was not given for.
    """
    prepared = prepare(settings.data, settings.training.seed)
    network, tokenizer_json, seconds = fit(settings, prepared, folder, resume=resume, observer=observer)
    if launched_rank() > 0:
        return None
    provenance = _provenance(settings, prepared, seconds)
    return make_bundle(
        network.architecture,
        network.numpy_weights(),
        tokenizer_json,
        prepared,
        settings,
        provenance,
        folder / "bundle",
        observer=observer,
    )


def fit(
    settings: RunSettings, prepared: Prepared, folder: Path, *, resume: bool, observer: Observer = Observer()
) -> tuple[MultiExitNetwork, str, float]:
    """Trains the network of a run; returns it, its tokenizer as JSON, and the seconds that training took here.

    For ``exits-only`` the backbone is a classifier, whose own head becomes the last exit.
    """
    # Before the heads are drawn: a run is the same from its first random number on.
    torch.manual_seed(settings.training.seed)
    classifier = load_classifier(settings.backbone) if settings.training.method == "exits-only" else None
    backbone: Backbone = load_backbone(settings.backbone) if classifier is None else classifier.backbone
    specs = exit_specs(settings.head, backbone.num_layers, settings.exit_layers, settings.last_head)
    if classifier is None:
        network = build_network(
            backbone, num_labels=len(prepared.splits.labels), exits=specs, max_length=settings.max_length
        )
    else:
        network = classifier.network(specs, settings.max_length)
    encoder = _encoder(backbone.tokenizer_json, network.architecture)
    # Only now: settings that no network can be built from must not hold the folder against those that mend them.
    if launched_rank() == 0:
        _claim(folder, settings, resume=resume)
    observer.stage("tokenize", len(prepared.splits.train) + len(prepared.splits.validation))
    train_data, validation_data = (
        tokenize(part, prepared.splits.labels, encoder) for part in (prepared.splits.train, prepared.splits.validation)
    )
    observer.stage("train", len(train_data) * settings.training.all_epochs)
    start = time.monotonic()
    network = train(
        network,
        train_data,
        validation_data,
        replace(settings.training, metric=prepared.metric),
        folder / "training",
        resume=resume,
        on_step=observer.step,
        on_epoch=observer.epoch,
    )
    seconds = time.monotonic() - start
    if launched_rank() == 0:
        (folder / "tokenizer.json").write_text(backbone.tokenizer_json, encoding="utf-8")
    return network, backbone.tokenizer_json, seconds


@dataclass(frozen=True, slots=True)
class Proposal:
    """What each set of exits of a run would cost here, cheapest first; ``layers`` after which every exit of the run
    stands, and the ``precision`` and number of ``texts`` that were timed."""

    sets: tuple[ExitSet, ...]
    timings: Timings
    layers: tuple[int, ...]
    precision: Precision
    texts: int

    @property
    def best(self) -> tuple[int, ...]:
        """Layers of the cheapest set."""
        return tuple(self.layers[index] for index in self.sets[0].kept)


def propose_exits(folder: Path, quality: float, *, most_texts: int = 100, observer: Observer = Observer()) -> Proposal:
    """Which exits of the finished run in ``folder`` earn their cost on this machine, at agreement ``quality``.

    Times the graphs on up to ``most_texts`` texts of the validation split and judges all of that split; the risk split
    is not looked at, so what is exported can be certified as ever. Raises :class:`PipelineError` as
    :func:`export_run` does, and for a quality outside 0 to 1.
    """
    if not 0 < quality < 1:
        raise PipelineError(f"quality must lie between 0 and 1, not {quality:g}")
    settings, network = _finished(folder)
    architecture, weights = network.architecture, network.numpy_weights()
    prepared = prepare(settings.data, settings.training.seed)
    precision: Precision = "int8" if "int8" in settings.precisions else settings.precisions[0]
    encoder = _encoder((folder / "tokenizer.json").read_text(encoding="utf-8"), architecture)
    validation = tokenize(prepared.splits.validation, prepared.splits.labels, encoder)
    last = architecture.exits[-1].number
    with tempfile.TemporaryDirectory(prefix="offramp-export-") as scratch:
        observer.stage("export", 0)
        graphs = export_graphs(architecture, weights, Path(scratch) / "all", (precision,))[precision]
        alone, its_weights = select_exits(architecture, weights, [last])
        whole = export_graphs(alone, its_weights, Path(scratch) / "last", (precision,))[precision][0]
        observer.stage("run the graphs", len(validation))
        logits = run_graphs(graphs, architecture, validation.texts, progress=observer.advance)
        observer.stage("time the graphs", 0)
        timings = measure_timings(graphs, whole, architecture, alone, validation.texts[:most_texts])
    try:
        sets = exit_sets(logits, timings, quality)
    except ValueError as error:
        raise PipelineError(f"{folder}: {error}") from None
    layers = tuple(spec.after_layer for spec in architecture.exits)
    return Proposal(tuple(sets), timings, layers, precision, min(most_texts, len(validation)))


def _finished(folder: Path) -> tuple[RunSettings, MultiExitNetwork]:
    settings = read_run(folder)
    kept = folder / "training" / "kept"
    if not (kept / "network.safetensors").exists() or not (folder / "tokenizer.json").exists():
        raise PipelineError(f"{folder}: no finished training in it; go on with offramp train --resume")
    return settings, MultiExitNetwork.load(kept)


def export_run(
    folder: Path,
    layers: Sequence[int] | None,
    target: Path,
    *,
    precisions: Sequence[Precision] | None = None,
    observer: Observer = Observer(),
) -> Bundle:
    """Makes a bundle at ``target`` from the finished run in ``folder``, keeping only the exits after ``layers`` layers,
    with graphs in ``precisions`` (``None``: those of the run).

    Fewer exits are calibrated anew, on the same splits. Raises :class:`PipelineError` for a run that is not finished.
    """
    settings, network = _finished(folder)
    if precisions is not None:
        settings = replace(settings, precisions=tuple(precisions))
    architecture, weights = network.architecture, network.numpy_weights()
    if layers is not None:
        numbers = {e.after_layer: e.number for e in architecture.exits}
        if unknown := [layer for layer in layers if layer not in numbers]:
            raise PipelineError(
                f"{folder}: no exit after layer {unknown[0]}; there are exits after {', '.join(map(str, numbers))}"
            )
        architecture, weights = select_exits(architecture, weights, [numbers[layer] for layer in layers])
    prepared = prepare(settings.data, settings.training.seed)
    provenance = {**_provenance(settings, prepared, None), "exits_kept_after_layers": list(layers) if layers else "all"}
    tokenizer_json = (folder / "tokenizer.json").read_text(encoding="utf-8")
    return make_bundle(architecture, weights, tokenizer_json, prepared, settings, provenance, target, observer=observer)


def make_bundle(
    architecture: Architecture,
    weights: Mapping[str, np.ndarray],
    tokenizer_json: str,
    prepared: Prepared,
    settings: RunSettings,
    provenance: Mapping[str, Any],
    target: Path,
    *,
    observer: Observer = Observer(),
) -> Bundle:
    """Exports graphs, runs them on the held-out splits, calibrates each precision and writes the bundle."""
    encoder = _encoder(tokenizer_json, architecture)
    labels = prepared.splits.labels
    validation, risk, *evaluations = (
        tokenize(part, labels, encoder)
        for part in (prepared.splits.validation, prepared.splits.calibration, *prepared.evaluations.values())
    )
    with tempfile.TemporaryDirectory(prefix="offramp-export-") as scratch:
        observer.stage("export", 0)
        graphs = export_graphs(architecture, weights, Path(scratch), settings.precisions)
        observer.stage("run the graphs", sum(map(len, (validation, risk, *evaluations))) * len(graphs))
        logits: dict[Precision, tuple[np.ndarray, ...]] = {
            precision: tuple(
                run_graphs(files, architecture, part.texts, progress=observer.advance)
                for part in (validation, risk, *evaluations)
            )
            for precision, files in graphs.items()
        }
        observer.stage("calibrate", 0)
        calibration = calibrate(
            {p: SplitLogits(validation=v, risk=r) for p, (v, r, *_) in logits.items()},
            architecture,
            validation=_split(validation),
            risk=_split(risk),
            metric=prepared.metric,
            data_sha256=_data_hash(prepared.splits.calibration),
        )
        scores = [
            _scores(
                name,
                part,
                {p: arrays[2 + index] for p, arrays in logits.items()},
                calibration,
                architecture,
                prepared.metric,
            )
            for index, (name, part) in enumerate(zip(prepared.evaluations, evaluations, strict=True))
        ]
        mean_tokens = float(np.mean([len(t) for t in risk.texts]))
        manifest: dict[str, Any] = {
            "name": settings.name,
            "version": settings.version,
            "task": settings.data.task or "custom",
            "labels": list(labels),
            "takes_pairs": prepared.takes_pairs,
            "architecture": architecture.model_dump(mode="json"),
            "exit_costs": [round(float(c), 4) for c in exit_costs(architecture, round(mean_tokens))],
            "mean_tokens": round(mean_tokens, 2),
            "default_precision": default_precision({p: r for p, (_, r, *_) in logits.items()}, risk.labels),
            "scores": [entry.model_dump(mode="json") for entry in scores],
            "provenance": dict(provenance),
            "licence": settings.licence,
        }
        return write_bundle(
            target,
            manifest=manifest,
            calibration=calibration,
            tokenizer_json=tokenizer_json,
            graphs=graphs,
            readme=model_card(manifest, calibration),
            extra={PLOT_NAME: bundle_plot(manifest, calibration)},
            replace=True,
        )


# Where weights are read back from, the most exact first.
_BY_EXACTNESS: tuple[Precision, ...] = ("fp32", "fp16", "int8")


def recalibrate(
    bundle_path: Path,
    table: Table,
    target: Path,
    *,
    validation_share: float,
    seed: int,
    add_precision: Precision | None = None,
    observer: Observer = Observer(),
) -> Bundle:
    """Calibrates a bundle on other labelled texts (the traffic it meets) and writes it at ``target``, with graphs in
    ``add_precision`` too (built from the bundle's own most exact ones) where it has none.

    ``validation_share`` of the rows, drawn at random, fits temperatures and picks the criterion, the rest certifies.
    Row by row, though one text may then stand on both sides: rows are taken as independent draws from the traffic, and
    kept together a text that makes up a third of it would be missing from the certificate, or be all that it knows.
    Graphs, tokenizer and the scores of each exit stay as they are. Raises :class:`PipelineError` for a share that
    leaves fewer than two rows to validate on, or none to certify on.
    """
    if not 0 < validation_share < 1:
        raise PipelineError(f"validation_share must lie between 0 and 1, not {validation_share:g}")
    bundle = Bundle.load(bundle_path)
    manifest, architecture = bundle.manifest, bundle.manifest.architecture
    check_labels(table.examples, manifest.labels, table.source)
    if manifest.takes_pairs != (table.examples[0].pair is not None):
        needed = "a pair column" if manifest.takes_pairs else "no pair column"
        raise PipelineError(f"{bundle_path}: this bundle needs {needed}")
    order = np.random.default_rng(seed).permutation(len(table)).tolist()
    cut = round(len(order) * validation_share)
    parts = [tuple(table.examples[row] for row in rows) for rows in (order[:cut], order[cut:])]
    if len(parts[0]) < 2 or not parts[1]:
        raise PipelineError(f"{table.source}: {len(table)} rows are too few to split by {validation_share:g}")
    validation, risk = (tokenize(part, manifest.labels, bundle.encoder) for part in parts)
    graphs = {
        precision: [bundle.graph(n, precision) for n in range(1, len(architecture.exits) + 1)]
        for precision in manifest.precisions
    }
    with tempfile.TemporaryDirectory(prefix="offramp-export-") as scratch:
        if add_precision is not None and add_precision not in graphs:
            exact = next(precision for precision in _BY_EXACTNESS if precision in graphs)
            weights = dequantised_weights(architecture, graphs[exact])
            graphs[add_precision] = build_segments(architecture, weights, add_precision, Path(scratch))
        observer.stage("run the graphs", len(table) * len(graphs))
        logits = {
            precision: SplitLogits(
                *(run_graphs(files, architecture, part.texts, progress=observer.advance) for part in (validation, risk))
            )
            for precision, files in graphs.items()
        }
        calibration = calibrate(
            logits,
            architecture,
            validation=_split(validation),
            risk=_split(risk),
            metric=bundle.calibration.metric,
            data_sha256=_data_hash(parts[1]),
        )
        document = manifest.model_dump(mode="json", exclude={"format_version", "precisions", "files"})
        document["provenance"] = {**document["provenance"], "calibrated_on": Path(table.source).name}
        # Those curves were drawn at the old thresholds.
        document["scores"] = [{**scores, "curves": {}} for scores in document["scores"]]
        document["mean_tokens"] = round(float(np.mean([len(t) for t in risk.texts])), 2)
        document["exit_costs"] = [round(float(c), 4) for c in exit_costs(architecture, round(document["mean_tokens"]))]
        return write_bundle(
            target,
            manifest=document,
            calibration=calibration,
            tokenizer_json=(bundle.path / "tokenizer.json").read_text(encoding="utf-8"),
            graphs=graphs,
            readme=model_card(document, calibration),
            extra={PLOT_NAME: bundle_plot(document, calibration)},
            replace=True,
        )


def default_precision(logits: Mapping[Precision, np.ndarray], labels: np.ndarray) -> Precision:
    """int8 where each exit's accuracy on held-out texts is within :data:`PRECISION_TOLERANCE` of fp32's, else fp32.

    ``logits [E, N, K]`` by precision. Where only one of them was exported, that one; fp16 is for GPUs, and the default
    only where it is alone.
    """
    if "fp32" not in logits or "int8" not in logits:
        return next((precision for precision in logits if precision != "fp16"), "fp16")
    right = {p: (array.argmax(-1) == labels).mean(-1) for p, array in logits.items()}
    # 1e-9: 1 - 0.995 is a hair over 0.005.
    return "int8" if (right["fp32"] - right["int8"]).max() <= PRECISION_TOLERANCE + 1e-9 else "fp32"


def read_run(folder: Path) -> RunSettings:
    """The settings in ``folder/run.json``; raises :class:`PipelineError` where there is no such run."""
    path = folder / "run.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PipelineError(f"{folder}: no run in it (run.json is missing)") from None
    except (OSError, ValueError) as error:
        raise PipelineError(f"{path}: not readable ({error})") from None
    return settings_from(document)


def settings_from(document: Mapping[str, Any]) -> RunSettings:
    """:class:`RunSettings` from their JSON form."""
    values, data = dict(document), dict(document["data"])
    training = dict(values.pop("training"))
    contrast = Contrast(**training.pop("contrast"))
    # A run of before distillation had none.
    distillation = Distillation(**training.pop("distillation", {}))
    del values["data"]
    for part, name in ((values, "exit_layers"), (values, "precisions"), (data, "labels")):
        if part.get(name) is not None:
            part[name] = tuple(part[name])
    return RunSettings(
        data=DataSettings(**data),
        training=TrainingSettings(contrast=contrast, distillation=distillation, **training),
        **values,
    )


def _claim(folder: Path, settings: RunSettings, *, resume: bool) -> None:
    """Writes ``run.json``, or checks that the run already there is this one."""
    path = folder / "run.json"
    document = json.loads(json.dumps(asdict(settings)))
    if path.exists():
        if not resume:
            raise PipelineError(f"{folder}: holds a run already; go on with --resume, or choose another output")
        found = flat(json.loads(json.dumps(asdict(read_run(folder)))))
        differing = sorted(name for name, value in flat(document).items() if found.get(name) != value)
        if differing:
            raise PipelineError(f"{folder}: the run there has other settings: {', '.join(differing)}")
        return
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(path, json.dumps(document, indent=1) + "\n")


def flat(document: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as one level, names joined by dots."""
    level: dict[str, Any] = {}
    for name, value in document.items():
        level |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return level


def _encoder(tokenizer_json: str, architecture: Architecture) -> TextEncoder:
    return TextEncoder(Tokenizer.from_str(tokenizer_json), architecture.max_length)


def _split(data: Tokenized) -> Split:
    return Split(labels=data.labels, tokens=np.asarray([len(t) for t in data.texts], dtype=np.int64))


def _scores(
    name: str,
    data: Tokenized,
    logits: Mapping[Precision, np.ndarray],
    calibration: Calibration,
    architecture: Architecture,
    metric: str,
) -> Scores:
    """What every exit and every threshold of the calibration gives on one evaluation file."""
    measured = {p: _measured(array, calibration, p, data, architecture, metric) for p, array in logits.items()}
    return Scores(
        split=name,
        n=len(data),
        per_exit={p: exit_scores(m) for p, m in measured.items()},
        curves={
            p: {c: curve(m, c, [x.threshold for x in points]) for c, points in calibration.precisions[p].curves.items()}
            for p, m in measured.items()
        },
    )


def _measured(
    logits: np.ndarray,
    calibration: Calibration,
    precision: Precision,
    data: Tokenized,
    architecture: Architecture,
    metric: str,
) -> Measured:
    own, part = calibration.precisions[precision], _split(data)
    return measure(
        logits,
        own.temperatures,
        own.agreement_temperatures,
        part.labels,
        part.tokens,
        architecture,
        metric,
    )


def _data_hash(examples: Sequence[Example]) -> str:
    digest = hashlib.sha256()
    for e in examples:
        digest.update(json.dumps([e.text, e.pair, e.label]).encode())
    return digest.hexdigest()


def _provenance(settings: RunSettings, prepared: Prepared, seconds: float | None) -> dict[str, Any]:
    training = asdict(replace(settings.training, metric=prepared.metric))
    training.pop("checkpoint_minutes")
    splits = prepared.splits
    return {
        "backbone": settings.backbone,
        "head": settings.head,
        "training": training,
        "data": {
            "source": prepared.source,
            "train": len(splits.train),
            "validation": len(splits.validation),
            "calibration": len(splits.calibration),
            "evaluation": ", ".join(prepared.evaluations),
        },
        **({"training_seconds": round(seconds)} if seconds is not None else {}),
        "versions": {
            "python": platform.python_version(),
            **{p: metadata.version(p) for p in ("torch", "transformers", "onnx", "tokenizers", "numpy")},
        },
    }
