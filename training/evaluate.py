"""Running exported graphs over a split, and what comes out: per-exit scores and what each policy gives.

Everything is measured on the graphs that will serve, with ONNX Runtime on the CPU, never on the torch network.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import Bundle, CurvePoint, ExitScore, Precision, PrecisionCalibration, segment_io
from models.costs import exit_costs, full_depth_cost
from models.exits import Criterion, Judged, Policy, judge_all, leave_at
from models.store import CLEAN_ROW, FIRST_ROW, starts_of, store_io
from models.tokenization import Encoded
from training.data import DataError, Table, check_labels, tokenize
from training.metrics import metric_value
from training.risk import wsr_upper_bound

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# Padded tokens of one batch: bounds memory, and a batch of short texts is still large enough to feed two cores.
BATCH_TOKENS = 2048


class GraphError(Exception):
    """A graph that cannot be run as the architecture says; the message names the file."""


# --- metrics ---------------------------------------------------------------------------------------------------------


def score(name: str, predictions: Ints, labels: Ints) -> float:
    """The task metric ``name`` of ``predictions [N]``, where -1 (logits that were not finite) is no class, so wrong."""
    _same_length(predictions, labels)
    nothing = max(int(predictions.max()), int(labels.max())) + 2
    return metric_value(name, np.where(predictions < 0, nothing, predictions), labels)


def standard_error(name: str, predictions: Ints, labels: Ints) -> float:
    """Sampling error of the metric: √(p(1 − p)/n) of a share, else the bootstrap's (200 resamples, fixed seed)."""
    n = len(labels)
    if name in ("accuracy", "agreement"):
        share = score(name, predictions, labels)
        return float(np.sqrt(share * (1 - share) / n))
    rows = np.random.default_rng(0).integers(n, size=(200, n))
    return float(np.std([score(name, predictions[row], labels[row]) for row in rows], ddof=1))


# --- running the graphs ----------------------------------------------------------------------------------------------


def run_bundle(
    bundle: Bundle,
    precision: Precision,
    encoded: Sequence[Encoded],
    *,
    threads: int = 0,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """:func:`run_graphs` on the graphs of a bundle."""
    architecture = bundle.manifest.architecture
    paths = [bundle.graph(segment, precision) for segment in range(1, len(architecture.exits) + 1)]
    return run_graphs(paths, architecture, encoded, threads=threads, progress=progress)


def run_graphs(
    paths: Sequence[Path],
    architecture: Architecture,
    encoded: Sequence[Encoded],
    *,
    threads: int = 0,
    batch_tokens: int = BATCH_TOKENS,
    progress: Callable[[int], None] | None = None,
) -> NDArray[np.float32]:
    """Logits ``[E, N, K]`` of every exit for every text, in the order given.

    ``paths`` are the graphs of segments 1, 2, ...; texts are grouped by length into padded batches of at most
    ``batch_tokens`` tokens. ``threads`` of one operator (0: as many as this process may use); ``progress`` is called
    with the number of texts just finished. Raises :class:`GraphError` where a graph is not what the architecture says.
    """
    runner = GraphRunner(paths, architecture, threads=threads)
    logits = np.empty((len(paths), len(encoded), architecture.num_labels), dtype=np.float32)
    for rows in length_batches([len(text) for text in encoded], batch_tokens):
        for index, answer in enumerate(runner.run([encoded[row] for row in rows])):
            logits[index, rows] = answer
        if progress is not None:
            progress(len(rows))
    return logits


class GraphRunner:
    """The graphs of all segments, one after the other on the same batch."""

    def __init__(self, paths: Sequence[Path], architecture: Architecture, *, threads: int = 0) -> None:
        """Opens ``paths``, the graphs of segments 1, 2, ...; raises :class:`GraphError` as :func:`run_graphs` does."""
        if len(paths) != len(architecture.exits):
            raise GraphError(f"{len(paths)} graphs for {len(architecture.exits)} exits")
        self._architecture = architecture
        self._paths = list(paths)
        self._sessions = [_open(path, threads) for path in paths]
        self._in_store = any(node.name == "rows" for node in self._sessions[0].get_inputs())
        names = store_io if self._in_store else segment_io
        self._names = [names(architecture, spec.number) for spec in architecture.exits]
        for session, path, wanted in zip(self._sessions, self._paths, self._names, strict=True):
            _check_names(session, path, wanted)

    def run(self, texts: Sequence[Encoded]) -> Iterator[NDArray[np.float32]]:
        """Logits ``[B, K]`` of each exit for one padded batch, as soon as its segment has run."""
        arrays = _first_inputs(self._architecture, texts)
        if self._in_store:
            arrays = _store_inputs(self._architecture, arrays)
        wanted = (len(texts), self._architecture.num_labels)
        for session, path, (inputs, names) in zip(self._sessions, self._paths, self._names, strict=True):
            feeds = {name: arrays["store" if name.startswith("into_") else name] for name in inputs}
            outputs = dict(zip(names, session.run(list(names), feeds), strict=True))
            answer = outputs.pop("logits")
            if answer.shape != wanted:
                raise GraphError(f"{path}: logits of shape {list(answer.shape)}, not {list(wanted)}")
            yield answer
            arrays |= {name.removeprefix("next_"): array for name, array in outputs.items()}


def length_batches(lengths: Sequence[int], batch_tokens: int) -> list[Ints]:
    """Indices of texts in batches of like length, shortest first: each batch, padded to its longest, holds at most
    ``batch_tokens`` tokens (a longer text goes alone)."""
    order = np.argsort(np.asarray(lengths, dtype=np.int64), kind="stable")
    batches, start = [], 0
    for stop in range(1, len(order) + 1):
        # Ascending, so the text that would join is the longest of the batch.
        full = stop < len(order) and (stop - start + 1) * lengths[order[stop]] > batch_tokens
        if full or stop == len(order):
            batches.append(order[start:stop])
            start = stop
    return batches


def _first_inputs(architecture: Architecture, texts: Sequence[Encoded]) -> dict[str, NDArray[Any]]:
    longest = max(len(text) for text in texts)
    shape = (len(texts), longest)
    # Padding is masked, so any id in range will do; 0 is in every vocabulary.
    feeds = {
        "input_ids": np.zeros(shape, dtype=np.int64),
        "position_ids": np.tile(np.arange(longest, dtype=np.int64) + architecture.position_offset, (len(texts), 1)),
        "attention_mask": np.zeros(shape, dtype=np.int64),
    }
    if architecture.uses_token_type_ids:
        feeds["token_type_ids"] = np.zeros(shape, dtype=np.int64)
    for row, text in enumerate(texts):
        feeds["input_ids"][row, : len(text)] = text.ids
        feeds["attention_mask"][row, : len(text)] = 1
        if architecture.uses_token_type_ids:
            feeds["token_type_ids"][row, : len(text)] = text.type_ids
    return feeds


def _store_inputs(architecture: Architecture, padded: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What fp16 graphs take in place of ``padded`` inputs, and an empty store for their state (see
    :mod:`models.store`)."""
    mask = padded["attention_mask"] > 0
    rows = np.where(mask, FIRST_ROW + np.arange(mask.size).reshape(mask.shape), CLEAN_ROW)
    numbers = {name: array for name, array in padded.items() if name != "attention_mask"}
    numbers |= {"rows": rows, "lengths": mask.sum(axis=1), "position_ids": padded["position_ids"][:1]}
    return {name: array.astype(np.int32) for name, array in numbers.items()} | {
        "starts": starts_of(*mask.shape),
        "store": np.zeros((FIRST_ROW + mask.size, architecture.hidden_size), np.float16),
    }


def _open(path: Path, threads: int) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    # Sessions in a row spin against each other: segments took 7 times the monolith's time with spinning on.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # Else it warns that an optional input is no constant.
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own exceptions share no base but this
        raise GraphError(f"{path}: ONNX Runtime cannot open it ({error})") from error


def _check_names(
    session: onnxruntime.InferenceSession, path: Path, names: tuple[tuple[str, ...], tuple[str, ...]]
) -> None:
    found = (
        {node.name for node in session.get_inputs()},
        {node.name for node in session.get_outputs()},
    )
    for kind, ours, wanted in zip(("inputs", "outputs"), found, names, strict=True):
        if ours != set(wanted):
            raise GraphError(f"{path}: {kind} are {sorted(ours)}, not {sorted(wanted)}")


# --- what a split says -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Measured:
    """A split as policies see it: ``judged [E, N]``, true ``labels [N]``, ``costs [E, N]`` in layers at each text's own
    length, ``full_costs [N]`` of full depth with no exit read on the way, and the task's ``metric``."""

    judged: Judged
    labels: Ints
    costs: Floats
    full_costs: Floats
    metric: str

    @property
    def last_labels(self) -> Ints:
        """What the last exit answers, ``[N]``."""
        return self.judged.labels[-1]

    def answers(self, policy: Policy) -> Ints:
        """What the exits answer under ``policy``, ``[N]``."""
        return self.judged.labels[leave_at(self.judged, policy), np.arange(len(self.labels))]


def _for_each_text(cost: Callable[[int], Any], tokens: Ints) -> Floats:
    """``cost`` of each text ``[..., N]``, asked once for each number of ``tokens [N]`` that occurs."""
    lengths, place = np.unique(tokens, return_inverse=True)
    return np.stack([np.asarray(cost(int(length))) for length in lengths], axis=-1)[..., place]


def text_costs(architecture: Architecture, tokens: Ints) -> Floats:
    """Cost ``[E, N]`` of leaving at each exit for texts of ``tokens [N]`` tokens, in layers at that length."""
    return _for_each_text(lambda length: exit_costs(architecture, length), tokens)


def full_depth_costs(architecture: Architecture, tokens: Ints) -> Floats:
    """Cost ``[N]`` of full depth, no exit on the way read, for texts of ``tokens [N]`` tokens."""
    return _for_each_text(lambda length: full_depth_cost(architecture, length), tokens)


def measure(
    logits: NDArray[np.floating],
    temperatures: Sequence[float] | Floats,
    agreement_temperatures: Sequence[float] | Floats,
    labels: Ints,
    tokens: Ints,
    architecture: Architecture,
    metric_name: str,
) -> Measured:
    """Judges ``logits [E, N, K]`` once, for any number of policies. ``tokens [N]`` counts special tokens too."""
    labels, tokens = np.asarray(labels, dtype=np.int64), np.asarray(tokens, dtype=np.int64)
    _same_length(labels, tokens)
    expected = (len(architecture.exits), len(labels), architecture.num_labels)
    if np.shape(logits) != expected:
        raise ValueError(f"logits have shape {np.shape(logits)}, not {expected} (exits, texts, labels)")
    if not len(labels):
        raise ValueError("the split holds no texts")
    judged = judge_all(logits, temperatures, agreement_temperatures)
    costs, full = text_costs(architecture, tokens), full_depth_costs(architecture, tokens)
    return Measured(judged, labels, costs, full, metric_name)


def curve_point(split: Measured, policy: Policy) -> CurvePoint:
    """What ``policy`` gives on ``split``; costs are means over texts, the speed-up is the ratio of mean costs, full
    depth's to the policy's."""
    texts = np.arange(len(split.labels))
    chosen = leave_at(split.judged, policy)
    answers = split.judged.labels[chosen, texts]
    mean_cost = float(split.costs[chosen, texts].mean())
    shares = np.bincount(chosen, minlength=len(split.costs)) / len(texts)
    return CurvePoint(
        threshold=policy.threshold,
        metric=_rounded(score(split.metric, answers, split.labels)),
        agreement=_rounded(float((answers == split.last_labels).mean())),
        mean_cost=_rounded(mean_cost),
        speedup=_rounded(float(split.full_costs.mean()) / mean_cost),
        exit_shares=tuple(_rounded(float(share)) for share in shares),
    )


def curve(split: Measured, criterion: Criterion, thresholds: Sequence[float]) -> tuple[CurvePoint, ...]:
    """:func:`curve_point` of every threshold, in the order given."""
    return tuple(curve_point(split, Policy(criterion, threshold)) for threshold in thresholds)


def exit_scores(split: Measured, metrics: Sequence[str] | None = None) -> tuple[ExitScore, ...]:
    """Every exit by itself: all texts leave there. ``metrics`` defaults to the task's and, where there are true
    labels, accuracy."""
    default = ("agreement",) if split.metric == "agreement" else (split.metric, "accuracy")
    names = list(dict.fromkeys(metrics or default))
    scores = []
    for index, answers in enumerate(split.judged.labels):
        scores.append(
            ExitScore(
                exit=index + 1,
                cost_in_layers=_rounded(float(split.costs[index].mean())),
                metrics={name: _rounded(score(name, answers, split.labels)) for name in names},
                standard_errors={name: _rounded(standard_error(name, answers, split.labels)) for name in names},
            )
        )
    return tuple(scores)


def accuracy_gap(split: Measured, policy: Policy) -> Floats:
    """What leaving early costs each text, ``[N]``: 1[early wrong] − 1[last wrong], in {−1, 0, 1}."""
    early = (split.answers(policy) != split.labels).astype(np.float64)
    return np.asarray(early - (split.last_labels != split.labels))


def evaluate(split: Measured, calibration: PrecisionCalibration, delta: float = 0.05) -> dict[str, Any]:
    """Summary of a split for ``--json`` and the model card, JSON types only.

    ``per_exit`` (metrics, standard errors, cost), ``full_depth``, ``curves`` by criterion at the calibration's
    thresholds, and ``tiers``: what each certified threshold gives here, with the share of the metric kept and the upper
    bound (Waudby-Smith and Ramdas, at ``delta``, each by itself) on the accuracy lost by leaving early.
    """
    full = score(split.metric, split.last_labels, split.labels)
    tiers = []
    for tier in calibration.certified:
        policy = Policy(tier.criterion, tier.threshold)
        point = curve_point(split, policy)
        gap = accuracy_gap(split, policy)
        tiers.append(
            {
                "quality": tier.quality,
                "criterion": tier.criterion,
                **point.model_dump(mode="json"),
                "metric_kept": _rounded(point.metric / full) if full > 0 else None,
                "accuracy_gap": _rounded(float(gap.mean())),
                "accuracy_gap_upper_bound": _rounded(float(wsr_upper_bound(gap, delta))),
            }
        )
    return {
        "metric": split.metric,
        "n": len(split.labels),
        "full_depth": _rounded(full),
        "per_exit": [score.model_dump(mode="json") for score in exit_scores(split)],
        "curves": {
            criterion: [
                curve_point(split, Policy(criterion, point.threshold)).model_dump(mode="json") for point in points
            ]
            for criterion, points in calibration.curves.items()
        },
        "tiers": tiers,
    }


def evaluate_bundle(
    bundle: Bundle | str | Path,
    table: Table,
    *,
    precisions: Sequence[Precision] | None = None,
    progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """:func:`evaluate` of a bundle on labelled texts, by precision (None: all it has), JSON types only.

    Raises :class:`training.data.DataError` for a label that the bundle does not know and for pairs where it takes
    single texts, or the other way round.
    """
    if not isinstance(bundle, Bundle):
        bundle = Bundle.load(bundle)
    manifest = bundle.manifest
    check_labels(table.examples, manifest.labels, table.source)
    if (table.examples[0].pair is not None) != manifest.takes_pairs:
        raise DataError(f"{table.source}: {manifest.name} takes {'pairs' if manifest.takes_pairs else 'single texts'}")
    texts = tokenize(table.examples, manifest.labels, bundle.encoder)
    tokens = np.asarray([len(text) for text in texts.texts], dtype=np.int64)
    # Labels of a file are what is true, not what a model said.
    metric = "accuracy" if bundle.calibration.metric == "agreement" else bundle.calibration.metric
    found = {}
    for precision in precisions or tuple(manifest.precisions):
        logits = run_bundle(bundle, precision, texts.texts, progress=progress)
        calibration = bundle.calibration.precisions[precision]
        split = measure(
            logits,
            calibration.temperatures,
            calibration.agreement_temperatures,
            texts.labels,
            tokens,
            manifest.architecture,
            metric,
        )
        found[precision] = evaluate(split, calibration, bundle.calibration.delta)
    return {"name": manifest.name, "version": manifest.version, "source": table.source, "precisions": found}


def _same_length(first: Ints, second: Ints) -> None:
    if len(first) != len(second):
        raise ValueError(f"arrays of one split differ in length: {len(first)} and {len(second)}")


def _rounded(value: float) -> float:
    """Six decimals: a tenth of what one text in 100,000 weighs, and files that can be read and compared."""
    return round(value, 6)
