"""Calibration: temperatures, curves and the certified table, from the logits of the exported graphs.

Splits that no weight was fitted on, each with its use, so that no promise is judged by the texts that chose it:
- ``temperature``, where there is one, fits the temperature of each exit; else the validation split does, cross-fitted;
- ``validation`` says whether the temperature helps, fits those of the criterion ``agreement``, gives the threshold
  grids, and picks the criterion;
- ``risk`` certifies (section "Certified quality" of the design). Afterwards it also gives the curves, which carry no
  promise: it is the largest of the splits. By what it showed only the precision is chosen, which δ allows for.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp

from models.architecture import Architecture
from models.bundle import Calibration, CurvePoint, Precision, PrecisionCalibration, RefusedTier, Tier
from models.exits import CRITERIA, Criterion, Judged, Policy, leave_at, softmax
from training.evaluate import Measured, curve, measure
from training.risk import DELTA, QUALITIES, certify

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

# A temperature outside this range says that the split is too small or separable, not that the network is that unsure.
TEMPERATURE_RANGE = (0.05, 20.0)
GRID = 120
BINS = 15


@dataclass(frozen=True, slots=True)
class Split:
    """The texts of one split: true ``labels [N]`` and ``tokens [N]``, special tokens included."""

    labels: Ints
    tokens: Ints

    def __post_init__(self) -> None:
        if len(self.labels) != len(self.tokens):
            raise ValueError(f"a split of {len(self.labels)} labels and {len(self.tokens)} token counts")
        if not len(self.labels):
            raise ValueError("a split holds no texts")


@dataclass(frozen=True, slots=True)
class SplitLogits:
    """What one precision's graphs said: logits ``[E, N, K]`` on each split."""

    validation: NDArray[np.floating]
    risk: NDArray[np.floating]
    temperature: NDArray[np.floating] | None = None


# --- temperature -----------------------------------------------------------------------------------------------------


def negative_log_likelihood(logits: NDArray[np.floating], labels: Ints, temperature: float = 1.0) -> float:
    """Mean negative log-likelihood in nats of ``labels [N]`` under ``logits [N, K]`` divided by ``temperature``.

    Texts with a logit that is not finite are left out: no temperature helps them. NaN where none is left."""
    finite = np.isfinite(logits).all(axis=-1)
    if not finite.any():
        return float("nan")
    scaled = np.asarray(logits[finite], dtype=np.float64) / temperature
    chosen = scaled[np.arange(len(scaled)), labels[finite]]
    return float((logsumexp(scaled, axis=-1) - chosen).mean())


def fit_temperature(logits: NDArray[np.floating], labels: Ints) -> float:
    """Temperature that minimises the NLL of ``logits [N, K]`` (Guo et al. 2017, arXiv 1706.04599, section 4.2).

    The NLL is convex in 1/T, so one bounded search in log T finds it."""
    low, high = np.log(TEMPERATURE_RANGE)
    found = minimize_scalar(
        lambda log_t: negative_log_likelihood(logits, labels, float(np.exp(log_t))),
        bounds=(low, high),
        method="bounded",
    )
    temperature = float(np.exp(found.x))
    return temperature if np.isfinite(found.fun) else 1.0


@dataclass(frozen=True, slots=True)
class Temperatures:
    """``values [E]``; expected calibration error ``[E]`` before and after, on texts that did not fit them."""

    values: tuple[float, ...]
    error_before: tuple[float, ...]
    error_after: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Fold:
    """Rows that fit a temperature and rows that judge it."""

    fit_logits: NDArray[np.floating]
    fit_labels: Ints
    held_logits: NDArray[np.floating]
    held_labels: Ints


def choose_temperatures(
    fit_logits: NDArray[np.floating], fit_labels: Ints, held_logits: NDArray[np.floating], held_labels: Ints
) -> Temperatures:
    """Temperature per exit from ``fit_logits [E, N, K]``; 1.0 where it does not lower the NLL on ``held_logits``
    ``[E, N', K]``, which must be other texts."""
    return _judged_temperatures([_Fold(fit_logits, fit_labels, held_logits, held_labels)], fit_logits, fit_labels)


def cross_fit_temperatures(logits: NDArray[np.floating], labels: Ints) -> Temperatures:
    """Temperature per exit from one split, ``logits [E, N, K]``; 1.0 where it does not help.

    Whether it helps is judged by halves: each half's NLL and calibration error under the temperature of the other
    half. What is returned is fitted on all of it. A single text is too little to halve: its temperature is 1.
    """
    halves = [np.arange(start, len(labels), 2) for start in (0, 1)]
    folds = [
        _Fold(logits[:, fit], labels[fit], logits[:, held], labels[held])
        for fit, held in (halves, halves[::-1])
        if len(fit) and len(held)
    ]
    return _judged_temperatures(folds, logits, labels)


def _judged_temperatures(folds: Sequence[_Fold], logits: NDArray[np.floating], labels: Ints) -> Temperatures:
    values, before, after = [], [], []
    held_labels = np.concatenate([labels[:0], *(fold.held_labels for fold in folds)])
    for index in range(len(logits)):
        plain = np.concatenate([logits[index, :0], *(fold.held_logits[index] for fold in folds)])
        # Dividing by the other half's temperature leaves logits that are right as they are, at temperature 1.
        mended = np.concatenate(
            [
                logits[index, :0],
                *(fold.held_logits[index] / fit_temperature(fold.fit_logits[index], fold.fit_labels) for fold in folds),
            ]
        )
        helps = negative_log_likelihood(mended, held_labels) < negative_log_likelihood(plain, held_labels)
        values.append(round(fit_temperature(logits[index], labels), 6) if helps else 1.0)
        before.append(round(expected_calibration_error(plain, held_labels), 6))
        after.append(round(expected_calibration_error(mended if helps else plain, held_labels), 6))
    return Temperatures(tuple(values), tuple(before), tuple(after))


def expected_calibration_error(
    logits: NDArray[np.floating], labels: Ints, temperature: float = 1.0, bins: int = BINS
) -> float:
    """Mean gap between confidence and accuracy over ``bins`` equal-width bins of confidence, weighted by their texts
    (Guo et al. 2017, equation 3), of ``logits [N, K]``. Texts whose logits are not finite are left out."""
    finite = np.isfinite(logits).all(axis=-1)
    if not finite.any():
        return float("nan")
    probabilities = softmax(logits[finite], temperature)
    confidence = probabilities.max(axis=-1)
    right = probabilities.argmax(axis=-1) == labels[finite]
    # Bins are (low, high], as in the paper.
    place = np.clip(np.ceil(confidence * bins).astype(np.int64) - 1, 0, bins - 1)
    gap = np.bincount(place, weights=right - confidence, minlength=bins)
    return float(np.abs(gap).sum() / len(confidence))


def agreement_temperatures(logits: NDArray[np.floating]) -> tuple[float, ...]:
    """Temperature per exit at which its confidence is the chance to say what the last exit says, from ``logits
    [E, N, K]``: :func:`fit_temperature` with the last exit's labels for the true ones. 1 for the last exit itself.

    An exit is often wrong exactly where the last exit is wrong too. Confidence that is right about the truth then asks
    for more depth than the promise, which is about agreement, needs: docs/decisions/0006.
    """
    known = np.isfinite(logits[-1]).all(axis=-1)
    last = logits[-1, known].argmax(axis=-1)
    return (*(round(fit_temperature(early[known], last), 6) for early in logits[:-1]), 1.0)


# --- thresholds ------------------------------------------------------------------------------------------------------


def threshold_grid(judged: Judged, criterion: Criterion, classes: int, points: int = GRID) -> tuple[float, ...]:
    """Thresholds from the safest to the boldest, spaced by the quantiles of what the early exits of ``judged`` said.

    Quantiles put the thresholds where texts are: a fixed step would spend most of the grid where nothing changes and
    jump over the confident end. Ends are fixed: confidence and agreement 1 (only certainty leaves) to 1/K (all leave at
    the first exit), entropy 0 to 1, patience ``E - 1`` (nobody leaves) to 1. ``judged`` must not be the risk split.
    """
    exits = len(judged.labels)
    if criterion == "patience":
        return tuple(float(steps) for steps in range(max(exits - 1, 1), 0, -1))
    scores = {"agreement": judged.agreement, "confidence": judged.confidence, "entropy": 1 - judged.entropy}[criterion]
    ends = np.array([1.0, 0.0 if criterion == "entropy" else 1 / classes])
    early = scores[:-1][judged.finite[:-1]]
    levels = np.quantile(early, np.linspace(0, 1, points)) if early.size else np.empty(0)
    # Six digits from the safe end, so that 0.99999731 does not become 1.
    distance = 1 - np.concatenate([levels, ends])
    rounded = np.array([float(f"{value:.5e}") for value in np.clip(distance, 0, ends[0] - ends[1])])
    rounded = np.unique(np.where(rounded < 1e-9, 0.0, rounded))
    if criterion == "entropy":
        return tuple(float(value) for value in rounded)
    grid = [round(1 - float(value), 12) for value in rounded]
    # The boldest is rounded down, never up: at 1/K every text must leave.
    return (*grid[:-1], math.floor(1e6 / classes) / 1e6)


# --- the whole -------------------------------------------------------------------------------------------------------


def choose_criterion(curves: Mapping[Criterion, Sequence[CurvePoint]], qualities: Sequence[float]) -> Criterion:
    """The criterion that is cheapest at equal agreement, on the split that the curves come from.

    For each quality the boldest point before the agreement first falls below it, as certification walks; the lowest
    mean of those costs over the qualities wins, ties by the order of ``CRITERIA``.
    """
    totals = {
        criterion: sum(_cheapest_path(curves[criterion], quality) for quality in qualities)
        for criterion in CRITERIA
        if criterion in curves
    }
    return min(totals, key=lambda criterion: totals[criterion])


def _cheapest_path(points: Sequence[CurvePoint], quality: float) -> float:
    cost = points[0].mean_cost
    for point in points:
        if point.agreement < quality:
            break
        cost = point.mean_cost
    return cost


def disagreeing(judged: Judged, criterion: Criterion, thresholds: Sequence[float]) -> NDArray[np.bool_]:
    """Which texts of ``judged [E, N]`` would be answered otherwise than by the last exit, per threshold ``[T, N]``."""
    texts = np.arange(judged.labels.shape[1])
    chosen = (leave_at(judged, Policy(criterion, threshold)) for threshold in thresholds)
    return np.stack([judged.labels[exits, texts] != judged.labels[-1] for exits in chosen])


def calibrate_precision(
    logits: SplitLogits,
    architecture: Architecture,
    *,
    validation: Split,
    risk: Split,
    metric: str,
    temperature: Split | None = None,
    delta: float = DELTA,
    qualities: Sequence[float] = QUALITIES,
    criteria: Sequence[Criterion] | None = None,
    points: int = GRID,
) -> PrecisionCalibration:
    """Calibrates one precision. ``criteria`` to certify; ``None`` lets the validation split choose one.

    Where several are certified, all their tiers hold at once (Bonferroni), and each quality is served by the one that
    is cheapest on the validation split. Curves and tiers' ``mean_cost`` and ``speedup`` are those of the risk split.
    """
    if (temperature is None) != (logits.temperature is None):
        raise ValueError("a temperature split needs both its labels and its logits")
    if temperature is None or logits.temperature is None:
        temperatures = cross_fit_temperatures(logits.validation, validation.labels)
    else:
        temperatures = choose_temperatures(logits.temperature, temperature.labels, logits.validation, validation.labels)
    own = (temperatures.values, agreement_temperatures(logits.validation))
    seen: Measured = measure(logits.validation, *own, validation.labels, validation.tokens, architecture, metric)
    grids = {
        criterion: threshold_grid(seen.judged, criterion, architecture.num_labels, points) for criterion in CRITERIA
    }
    choosing = {criterion: curve(seen, criterion, grid) for criterion, grid in grids.items()}
    to_certify = tuple(criteria) if criteria else (choose_criterion(choosing, qualities),)

    certifying = measure(logits.risk, *own, risk.labels, risk.tokens, architecture, metric)
    certificate = certify(
        {c: disagreeing(certifying.judged, c, grids[c]).sum(axis=1) for c in to_certify},
        len(risk.labels),
        qualities,
        delta,
    )
    curves = {criterion: curve(certifying, criterion, grid) for criterion, grid in grids.items()}
    tiers: dict[float, Tier] = {}
    cheapest: dict[float, float] = {}
    for passed in certificate.passed:
        cost = choosing[passed.criterion][passed.index].mean_cost
        point = curves[passed.criterion][passed.index]
        if cost < cheapest.get(passed.quality, math.inf):
            cheapest[passed.quality] = cost
            tiers[passed.quality] = Tier(
                quality=passed.quality,
                criterion=passed.criterion,
                threshold=point.threshold,
                n=passed.n,
                disagreements=passed.disagreements,
                p_value=float(f"{passed.p_value:.4g}"),
                mean_cost=point.mean_cost,
                speedup=point.speedup,
            )
    return PrecisionCalibration(
        temperatures=own[0],
        agreement_temperatures=own[1],
        calibration_error_before=temperatures.error_before,
        calibration_error_after=temperatures.error_after,
        curves=curves,
        certified=tuple(tiers[quality] for quality in sorted(tiers, reverse=True)),
        refused=tuple(RefusedTier(quality=r.quality, why=r.why, n_needed=r.n_needed) for r in certificate.refused),
    )


def calibrate(
    logits: Mapping[Precision, SplitLogits],
    architecture: Architecture,
    *,
    validation: Split,
    risk: Split,
    metric: str,
    data_sha256: str,
    temperature: Split | None = None,
    delta: float = DELTA,
    qualities: Sequence[float] = QUALITIES,
    criteria: Sequence[Criterion] | None = None,
    points: int = GRID,
) -> Calibration:
    """Calibrates every precision of a bundle on its own logits. ``data_sha256`` identifies the risk split.

    δ covers all tiers of all precisions together (Bonferroni): which precision a server runs in is chosen by what the
    risk split showed, by :func:`training.pipeline.default_precision` or by whoever reads the table.
    """
    return Calibration(
        metric=metric,
        delta=delta,
        n_temperature=0 if temperature is None else len(temperature.labels),
        n_risk=len(risk.labels),
        n_validation=len(validation.labels),
        data_sha256=data_sha256,
        precisions={
            precision: calibrate_precision(
                of_splits,
                architecture,
                validation=validation,
                risk=risk,
                metric=metric,
                temperature=temperature,
                delta=delta / len(logits),
                qualities=qualities,
                criteria=criteria,
                points=points,
            )
            for precision, of_splits in logits.items()
        },
    )
