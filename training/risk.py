"""Risk control: which thresholds may carry a promise. Pure functions on arrays, no network in sight.

The promise of a tier ``quality: q`` is P(early label ≠ last exit's label) ≤ ε = 1 − q, and all served tiers hold at
once with probability ≥ 1 − δ over the draw of the risk split.

Sources
- Learn then Test: Angelopoulos, Bates, Candès, Jordan, Lei 2021 (arXiv 2110.01052), fixed-sequence testing;
  for early exit: Jazbec et al. 2024 (arXiv 2405.20915), whose published code returns the first threshold that *fails*;
  here the one before it is kept, and a simulation in ``tests/training/test_risk.py`` shows the difference.
- Exact binomial p-value: Clopper and Pearson 1934; Bates et al. 2021 (arXiv 2101.02703).
- Betting bound for bounded losses: Waudby-Smith and Ramdas 2024 (arXiv 2010.09686); in this form Bates et al. 2021.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import bdtr

from models.exits import Criterion

QUALITIES: tuple[float, ...] = (0.90, 0.95, 0.97, 0.98, 0.99, 0.995)
DELTA = 0.05


def clopper_pearson_p_value(disagreements: ArrayLike, n: int, epsilon: float) -> NDArray[np.float64]:
    """P-value ``[...]`` of the hypothesis "the risk is above ε", given ``disagreements [...]`` of ``n`` texts.

    ``BinomCDF(k; n, ε)``: how likely so few disagreements are if the risk were exactly ε. Exact, not asymptotic.
    Raises ValueError where a count lies outside 0..n, or ε outside (0, 1).
    """
    counts = np.asarray(disagreements)
    _check_open_unit("epsilon", epsilon)
    if n < 1:
        raise ValueError(f"n must be at least 1, not {n}")
    if counts.size and (counts.min() < 0 or counts.max() > n):
        raise ValueError(f"disagreements must lie between 0 and n = {n}")
    return np.asarray(bdtr(counts, n, epsilon), dtype=np.float64)


def fixed_sequence(p_values: ArrayLike, level: float) -> int | None:
    """Index of the boldest threshold that fixed-sequence testing lets through, or ``None`` where even the first fails.

    ``p_values [T]`` run from the safest threshold to the boldest, an order fixed before the data were seen. Testing
    stops at the first p-value above ``level``, and the threshold *before* it is kept: everything up to there has been
    rejected at ``level``, so the chance that any of it is false is ≤ ``level`` without a correction for T. What comes
    after the first failure is never looked at, however small its p-value.
    """
    failed = ~(np.asarray(p_values, dtype=np.float64) <= level)  # NaN fails
    stop = int(np.argmax(failed)) if failed.any() else failed.size
    return stop - 1 if stop else None


def _wsr_log_capital(
    losses: NDArray[np.float64], mean: NDArray[np.float64], delta: float, low: float, high: float
) -> NDArray[np.float64]:
    """Largest log capital ``[...]`` over time of betting that ``losses [..., N]`` have a mean below ``mean [...]``."""
    n = losses.shape[-1]
    steps = np.arange(1, n + 1)
    running_mean = ((low + high) / 2 + np.cumsum(losses, axis=-1)) / (steps + 1)
    variance = ((high - low) ** 2 / 4 + np.cumsum((losses - running_mean) ** 2, axis=-1)) / (steps + 1)
    # The stake at step i may only know the steps before it.
    start = np.full((*losses.shape[:-1], 1), (high - low) ** 2 / 4)
    known = np.concatenate([start, variance[..., :-1]], axis=-1)
    stake = np.minimum(np.sqrt(2 * np.log(1 / delta) / (n * known)), 1 / (high - low))
    with np.errstate(divide="ignore"):
        capital = np.cumsum(np.log1p(-stake * (losses - mean[..., None])), axis=-1)
    return np.asarray(capital.max(axis=-1, initial=0.0))


def _check_losses(losses: ArrayLike, low: float, high: float) -> NDArray[np.float64]:
    values = np.asarray(losses, dtype=np.float64)
    if values.shape[-1:] in ((), (0,)):
        raise ValueError("losses must hold at least one text")
    if not (values.min() >= low and values.max() <= high):
        raise ValueError(f"losses must lie between {low:g} and {high:g}")
    return values


def wsr_p_value(
    losses: ArrayLike, epsilon: float, delta: float = DELTA, *, low: float = -1.0, high: float = 1.0
) -> NDArray[np.float64]:
    """P-value ``[...]`` of "the mean of the losses is above ``epsilon``", for bounded ``losses [..., N]`` in any order
    that does not depend on them.

    One over the largest capital of the betting martingale (Ville's inequality). ``delta`` only tunes the stakes: the
    p-value is valid whatever it is, and sharpest near ``delta``. Rejecting at ``delta`` is the same as
    :func:`wsr_upper_bound` ≤ ``epsilon``.
    """
    values = _check_losses(losses, low, high)
    _check_open_unit("delta", delta)
    at = np.full(values.shape[:-1], min(max(epsilon, low), high))
    return np.asarray(np.exp(-_wsr_log_capital(values, at, delta, low, high)))


def wsr_upper_bound(
    losses: ArrayLike, delta: float = DELTA, *, low: float = -1.0, high: float = 1.0
) -> NDArray[np.float64]:
    """Upper bound ``[...]`` on the mean of bounded ``losses [..., N]``, valid with probability ≥ 1 − ``delta``.

    The accuracy gap of leaving early, 1[early wrong] − 1[last wrong], lies in [−1, 1]; it may be negative, where early
    exits are right more often. Waudby-Smith and Ramdas' betting bound with running mean and variance as in Bates et al.
    2021, their constants ½ and ¼ moved from [0, 1] to [``low``, ``high``].
    """
    values = _check_losses(losses, low, high)
    _check_open_unit("delta", delta)
    needed = np.log(1 / delta)
    below = np.full(values.shape[:-1], low)
    above = np.full(values.shape[:-1], high)
    # The capital grows with the mean that is bet against, so bisection finds the edge; 40 halvings reach 2e-12.
    for _ in range(40):
        middle = (below + above) / 2
        rejected = _wsr_log_capital(values, middle, delta, low, high) >= needed
        above = np.where(rejected, middle, above)
        below = np.where(rejected, below, middle)
    return np.asarray(above)


def n_needed(epsilon: float, delta: float = DELTA, risk: float = 0.0) -> int:
    """Texts from which on a threshold whose disagreements are ``floor(n · risk)`` passes at ε and δ.

    At ε = .01, δ = .05: 299 where none disagrees, 473 at ε/4, 1,049 at ε/2. Raises ValueError where ``risk ≥ ε``: no
    number of texts certifies what does not hold.
    """
    _check_open_unit("epsilon", epsilon)
    _check_open_unit("delta", delta)
    if not 0 <= risk < epsilon:
        raise ValueError(f"risk {risk:g} must lie between 0 and epsilon {epsilon:g}: what does not hold needs no n")
    divergence = (1 - risk) * math.log((1 - risk) / (1 - epsilon))
    if risk > 0:
        divergence += risk * math.log(risk / epsilon)
    # Chernoff: BinomCDF(n·risk; n, ε) ≤ exp(−n·kl(risk‖ε)), so beyond this n nothing fails any more.
    enough = math.ceil(math.log(1 / delta) / divergence) + 1
    n = np.arange(1, enough + 1)
    # 1e-9: 400 · 0.0025 must count as 1.
    failing = bdtr(np.floor(n * risk + 1e-9), n, epsilon) > delta
    return int(n[failing][-1]) + 1 if failing.any() else 1


@dataclass(frozen=True, slots=True)
class Passed:
    """Tier ``quality`` holds for ``criterion`` at threshold number ``index`` of its sequence: ``disagreements`` of
    ``n`` texts, ``p_value`` ≤ the level of one test."""

    quality: float
    criterion: Criterion
    index: int
    n: int
    disagreements: int
    p_value: float


@dataclass(frozen=True, slots=True)
class Refused:
    """Tier ``quality`` cannot be promised; ``why`` says it in one sentence; ``n_needed`` texts would be the fewest."""

    quality: float
    why: str
    n_needed: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """What :func:`certify` found: ``level`` is δ after Bonferroni; ``passed`` may hold a quality once per criterion."""

    level: float
    passed: tuple[Passed, ...]
    refused: tuple[Refused, ...]


def certify(
    disagreements: Mapping[Criterion, ArrayLike],
    n: int,
    qualities: Sequence[float] = QUALITIES,
    delta: float = DELTA,
) -> Certificate:
    """Tests every tier for every criterion on the risk split, so that all tiers that pass hold at once.

    ``disagreements`` gives per criterion the counts ``[T]`` among the ``n`` texts, thresholds from the safest to the
    boldest. Each (tier, criterion) pair runs its own fixed sequence at ``delta / (tiers · criteria)`` (Bonferroni).
    Which criteria stand here must have been settled on other data than these ``n`` texts.
    """
    if not disagreements or not qualities:
        raise ValueError("certify needs at least one criterion and one quality")
    _check_open_unit("delta", delta)
    for quality in qualities:
        _check_open_unit("quality", quality)
    if len(set(qualities)) != len(qualities):
        raise ValueError("qualities repeat")
    level = delta / (len(qualities) * len(disagreements))
    passed: list[Passed] = []
    refused: list[Refused] = []
    for quality in sorted(qualities, reverse=True):
        epsilon = _epsilon(quality)
        found = []
        for criterion, raw in disagreements.items():
            counts = np.asarray(raw, dtype=np.int64)
            p_values = clopper_pearson_p_value(counts, n, epsilon)
            index = fixed_sequence(p_values, level)
            if index is not None:
                found.append(Passed(quality, criterion, index, n, int(counts[index]), float(p_values[index])))
        passed += found
        if not found:
            refused.append(_refuse(quality, n, level, [np.asarray(raw) for raw in disagreements.values()]))
    return Certificate(level, tuple(passed), tuple(refused))


def _refuse(quality: float, n: int, level: float, counts: Sequence[NDArray[np.int64]]) -> Refused:
    needed = n_needed(_epsilon(quality), level)
    if n < needed:
        why = (
            f"the risk split has {n} texts; quality {quality:g} needs at least {needed} "
            f"even if none disagrees (level {level:.2g})"
        )
    else:
        fewest = min(int(count[0]) for count in counts)
        why = f"the safest threshold already disagrees with the last exit on {fewest} of {n} texts"
        # With as many disagreements as were seen, this many texts would do, if there are that many at all.
        if fewest / n < _epsilon(quality):
            needed = n_needed(_epsilon(quality), level, fewest / n)
    return Refused(quality, why, needed)


def _epsilon(quality: float) -> float:
    """ε = 1 − ``quality``, without the float's dust (1 − 0.99 is 0.010000000000000009)."""
    return round(1 - quality, 12)


def _check_open_unit(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise ValueError(f"{name} must lie between 0 and 1, not {value:g}")
