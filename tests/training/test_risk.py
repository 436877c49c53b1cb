"""The promise holds as often as it says: formulas against literal sums, and coverage by simulation."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.exits import CRITERIA, Criterion, judge_all
from tests.training.synthetic import draw
from training.calibrate import disagreeing, threshold_grid
from training.risk import (
    QUALITIES,
    certify,
    clopper_pearson_p_value,
    fixed_sequence,
    n_needed,
    wsr_p_value,
    wsr_upper_bound,
)

DELTA = 0.05
RESAMPLES = 1000
# Three standard errors of the share of violations over the resamples, were it exactly δ: 0.0207.
SLACK = 3 * math.sqrt(DELTA * (1 - DELTA) / RESAMPLES)


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("k", "n", "epsilon"), [(0, 299, 0.01), (3, 50, 0.1), (7, 1300, 0.01), (20, 20, 0.5)])
def test_the_p_value_is_the_chance_of_so_few_disagreements_at_epsilon(k: int, n: int, epsilon: float) -> None:
    literal = sum(math.comb(n, j) * epsilon**j * (1 - epsilon) ** (n - j) for j in range(k + 1))
    assert clopper_pearson_p_value(k, n, epsilon) == pytest.approx(literal, rel=1e-9)


@pytest.mark.parametrize(
    ("k", "n", "epsilon", "message"),
    [
        (5, 4, 0.1, "disagreements must lie between 0 and n = 4"),
        (-1, 4, 0.1, "disagreements must lie between 0 and n = 4"),
        (0, 0, 0.1, "n must be at least 1"),
        (0, 4, 0.0, "epsilon must lie between 0 and 1"),
    ],
)
def test_counts_that_cannot_be_are_refused(k: int, n: int, epsilon: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        clopper_pearson_p_value(k, n, epsilon)


def test_testing_stops_at_the_first_failure_and_keeps_the_one_before() -> None:
    assert fixed_sequence([0.001, 0.01, 0.2, 0.001], 0.05) == 1


def test_nothing_is_kept_where_even_the_safest_fails() -> None:
    assert fixed_sequence([0.06, 0.001], 0.05) is None
    assert fixed_sequence([float("nan"), 0.001], 0.05) is None
    assert fixed_sequence([], 0.05) is None


def test_the_boldest_is_kept_where_all_pass() -> None:
    assert fixed_sequence([0.05, 0.05, 0.05], 0.05) == 2


@given(st.lists(st.floats(0, 1), max_size=12), st.floats(0, 1))
def test_everything_up_to_the_kept_threshold_passed_and_the_next_did_not(p_values: list[float], level: float) -> None:
    index = fixed_sequence(p_values, level)
    kept = -1 if index is None else index
    assert all(p <= level for p in p_values[: kept + 1])
    assert kept + 1 == len(p_values) or p_values[kept + 1] > level


@pytest.mark.parametrize(
    ("epsilon", "counts"), [(0.05, (59, 93, 208)), (0.02, (149, 236, 523)), (0.01, (299, 473, 1049))]
)
def test_texts_needed_with_no_disagreement_with_a_quarter_and_with_half_of_epsilon(
    epsilon: float, counts: tuple[int, int, int]
) -> None:
    assert tuple(n_needed(epsilon, 0.05, epsilon * share) for share in (0, 0.25, 0.5)) == counts


@settings(max_examples=40)
@given(st.floats(0.005, 0.3), st.floats(0.001, 0.2), st.floats(0, 0.7))
def test_one_text_fewer_than_needed_fails_and_from_there_on_none_does(
    epsilon: float, delta: float, share: float
) -> None:
    risk = epsilon * share
    needed = n_needed(epsilon, delta, risk)
    for n in range(needed, needed + 300):
        assert clopper_pearson_p_value(math.floor(n * risk + 1e-9), n, epsilon) <= delta
    if needed > 1:
        assert clopper_pearson_p_value(math.floor((needed - 1) * risk + 1e-9), needed - 1, epsilon) > delta


def test_no_number_of_texts_certifies_what_does_not_hold() -> None:
    with pytest.raises(ValueError, match=r"risk 0\.02 must lie between 0 and epsilon 0\.01"):
        n_needed(0.01, 0.05, 0.02)


# --- the bound on the accuracy gap -----------------------------------------------------------------------------------


def literal_capital(losses: list[float], mean: float, delta: float) -> float:
    """Largest capital of the betting martingale on losses in [-1, 1], step by step."""
    n, capital, best = len(losses), 1.0, 1.0
    total, squares, variance = 0.0, 0.0, 1.0
    for i, loss in enumerate(losses, start=1):
        stake = min(math.sqrt(2 * math.log(1 / delta) / (n * variance)), 0.5)
        capital *= 1 - stake * (loss - mean)
        best = max(best, capital)
        total += loss
        squares += (loss - total / (i + 1)) ** 2
        variance = (1 + squares) / (i + 1)
    return best


@settings(max_examples=40)
@given(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=20), st.floats(0.01, 0.3))
def test_the_bound_is_where_the_literal_capital_reaches_one_over_delta(losses: list[float], delta: float) -> None:
    # Many texts with the same mix: the stakes of a short split all hit their cap.
    losses = losses * 12
    bound = float(wsr_upper_bound(losses, delta))
    if bound < 1:
        assert literal_capital(losses, bound + 1e-6, delta) >= 1 / delta
    assert literal_capital(losses, bound - 1e-6, delta) <= 1 / delta


def test_the_p_value_is_at_most_delta_exactly_above_the_bound() -> None:
    losses = np.random.default_rng(3).choice([1.0, 0.0, -1.0], p=[0.02, 0.965, 0.015], size=800)
    bound = float(wsr_upper_bound(losses, DELTA))
    assert wsr_p_value(losses, bound + 1e-6, DELTA) <= DELTA < wsr_p_value(losses, bound - 1e-6, DELTA)


def test_the_bound_holds_as_often_as_it_says_and_tightens_with_n() -> None:
    rng = np.random.default_rng(0)
    means = []
    for n in (200, 800):
        losses = rng.choice([1.0, 0.0, -1.0], p=[0.02, 0.965, 0.015], size=(RESAMPLES, n))
        # The bound lies below the true mean, .005, where that mean is rejected.
        assert (wsr_p_value(losses, 0.005, DELTA) <= DELTA).mean() <= DELTA + SLACK
        means.append(wsr_upper_bound(losses[:100], DELTA).mean())
    assert means[0] < 0.05
    assert means[1] < 0.025


def test_early_exits_that_are_right_more_often_get_a_bound_below_zero() -> None:
    losses = np.random.default_rng(1).choice([0.0, -1.0], p=[0.9, 0.1], size=1000)
    assert wsr_upper_bound(losses) < 0


@pytest.mark.parametrize("losses", [[], [0.0, 1.5], [float("nan")]])
def test_losses_out_of_bounds_are_refused(losses: list[float]) -> None:
    with pytest.raises(ValueError, match="losses must"):
        wsr_upper_bound(losses)


# --- certification ---------------------------------------------------------------------------------------------------


def test_each_tier_and_criterion_is_tested_at_its_share_of_delta() -> None:
    counts = {"confidence": [0, 3, 9, 40], "patience": [0, 30]}
    one = certify({"confidence": counts["confidence"]}, 1300, (0.9, 0.99), 0.05)
    both = certify(counts, 1300, (0.9, 0.99), 0.05)  # type: ignore[arg-type]
    assert one.level == 0.025
    assert both.level == 0.0125
    assert [(p.quality, p.criterion, p.index, p.disagreements) for p in both.passed] == [
        (0.99, "confidence", 1, 3),
        (0.99, "patience", 0, 0),
        (0.9, "confidence", 3, 40),
        (0.9, "patience", 1, 30),
    ]
    assert all(p.p_value <= both.level for p in both.passed)


def test_too_few_texts_refuse_a_tier_and_say_how_many_are_needed() -> None:
    certificate = certify({"confidence": [0, 1, 2]}, 277, QUALITIES, 0.05)
    refused = {r.quality: r for r in certificate.refused}
    assert set(refused) == {0.995, 0.99}
    assert refused[0.99].n_needed == n_needed(0.01, 0.05 / 6) == 477
    assert "the risk split has 277 texts; quality 0.99 needs at least 477" in refused[0.99].why
    assert {p.quality for p in certificate.passed} == {0.98, 0.97, 0.95, 0.9}


def test_a_safest_threshold_that_disagrees_refuses_the_tier_for_that() -> None:
    certificate = certify({"confidence": [20, 30]}, 2000, (0.99,), 0.05)
    assert certificate.passed == ()
    assert "already disagrees with the last exit on 20 of 2000 texts" in certificate.refused[0].why


@pytest.mark.parametrize(
    ("qualities", "message"),
    [((), "at least one criterion and one quality"), ((0.9, 0.9), "repeat"), ((1.0,), "quality must lie")],
)
def test_tiers_that_make_no_sense_are_refused(qualities: tuple[float, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        certify({"confidence": [0]}, 100, qualities)


# --- coverage by simulation ------------------------------------------------------------------------------------------


class Population:
    """Texts whose true risk per threshold is known, because they are all there are."""

    def __init__(self, points: int, size: int = 3000) -> None:
        logits, _, _ = draw(size, seed=11)
        grid_logits, _, _ = draw(400, seed=12)
        self.disagrees: dict[Criterion, np.ndarray] = {}
        judged, for_grid = judge_all(logits, [1.0] * 6, [1.0] * 6), judge_all(grid_logits, [1.0] * 6, [1.0] * 6)
        for criterion in CRITERIA:
            grid = threshold_grid(for_grid, criterion, 2, points)
            self.disagrees[criterion] = disagreeing(judged, criterion, grid)
        self.size = size

    def risk(self, criterion: Criterion) -> np.ndarray:
        """True risk ``[T]``."""
        return self.disagrees[criterion].mean(axis=1)

    def resample(self, n: int, seed: int = 0) -> dict[Criterion, np.ndarray]:
        """Disagreements ``[RESAMPLES, T]`` in risk splits of ``n`` texts drawn with replacement."""
        rng = np.random.default_rng(seed)
        drawn = rng.integers(self.size, size=(RESAMPLES, n)) + self.size * np.arange(RESAMPLES)[:, None]
        times = np.bincount(drawn.ravel(), minlength=self.size * RESAMPLES).reshape(RESAMPLES, self.size)
        return {
            criterion: np.rint(times.astype(np.float32) @ disagrees.T.astype(np.float32)).astype(np.int64)
            for criterion, disagrees in self.disagrees.items()
        }


@pytest.fixture(scope="module")
def fine() -> Population:
    return Population(points=60)


@pytest.fixture(scope="module")
def coarse() -> Population:
    return Population(points=8)


def violations(
    counts: np.ndarray, risk: np.ndarray, n: int, epsilon: float, rule: Callable[[np.ndarray], int | None]
) -> float:
    """Share of resamples in which ``rule``, given the p-values ``[T]``, serves a threshold of true risk above ε."""
    p_values = clopper_pearson_p_value(counts, n, epsilon)
    kept = [rule(row) for row in p_values]
    return float(np.mean([index is not None and risk[index] > epsilon for index in kept]))


def right_rule(p_values: np.ndarray) -> int | None:
    return fixed_sequence(p_values, DELTA)


def first_failing(p_values: np.ndarray) -> int | None:
    """The deliberate mistake: the first threshold that fails, not the one before it."""
    index = fixed_sequence(p_values, DELTA)
    return min(0 if index is None else index + 1, len(p_values) - 1)


@pytest.mark.parametrize("epsilon", [0.02, 0.05, 0.10])
def test_a_served_tier_breaks_its_promise_no_more_often_than_delta(
    fine: Population, coarse: Population, epsilon: float
) -> None:
    for population in (fine, coarse):
        counts = population.resample(1200)["confidence"]
        assert violations(counts, population.risk("confidence"), 1200, epsilon, right_rule) <= DELTA + SLACK


def test_a_threshold_a_hair_above_epsilon_is_served_about_as_often_as_delta_allows() -> None:
    # The worst case: everything is safe but the last threshold. Here a rule too careless by half would be found out.
    rng = np.random.default_rng(6)
    risk = np.array([0.0, 0.01, 0.0501])
    counts = rng.binomial(1200, risk, size=(RESAMPLES, 3))
    share = violations(counts, risk, 1200, 0.05, right_rule)
    assert DELTA - SLACK <= share <= DELTA + SLACK
    assert violations(counts, risk, 1200, 0.05, lambda p: fixed_sequence(p, 2 * DELTA)) > DELTA + SLACK


def test_keeping_the_first_failing_threshold_breaks_the_promise(coarse: Population) -> None:
    counts = coarse.resample(1200)["confidence"]
    share = violations(counts, coarse.risk("confidence"), 1200, 0.05, first_failing)
    assert share > DELTA + SLACK
    assert share > 0.9


def test_trusting_the_observed_risk_breaks_the_promise(fine: Population) -> None:
    counts = fine.resample(1200)["confidence"]

    def observed(p_values: np.ndarray) -> int | None:
        # BinomCDF(nε; n, ε) is about one half: "at most ε was seen".
        return fixed_sequence(p_values, 0.5)

    assert violations(counts, fine.risk("confidence"), 1200, 0.05, observed) > DELTA + SLACK


def test_looking_past_the_first_failure_breaks_the_promise() -> None:
    # Sixty thresholds whose disagreements have nothing to do with each other, each a hair above ε.
    rng = np.random.default_rng(5)
    risk = np.full(60, 0.0501)
    counts = rng.binomial(1200, risk, size=(RESAMPLES, 60))

    def best_of_all(p_values: np.ndarray) -> int | None:
        passing = np.flatnonzero(p_values <= DELTA)
        return int(passing[-1]) if len(passing) else None

    assert violations(counts, risk, 1200, 0.05, best_of_all) > 0.9
    assert violations(counts, risk, 1200, 0.05, right_rule) <= DELTA + SLACK


@pytest.mark.parametrize("criteria", [("confidence",), CRITERIA], ids=["one criterion", "three criteria"])
def test_all_served_tiers_hold_at_once(fine: Population, criteria: tuple[Criterion, ...]) -> None:
    n = 1300
    counts = fine.resample(n, seed=2)
    risks = {criterion: fine.risk(criterion) for criterion in criteria}
    broken, served = 0, dict.fromkeys(QUALITIES, 0)
    for draw_number in range(RESAMPLES):
        certificate = certify({c: counts[c][draw_number] for c in criteria}, n)
        broken += any(risks[p.criterion][p.index] > 1 - p.quality for p in certificate.passed)
        for quality in {p.quality for p in certificate.passed}:
            served[quality] += 1
    assert broken / RESAMPLES <= DELTA + SLACK
    # A rule that never serves would keep every promise.
    assert all(count == RESAMPLES for quality, count in served.items() if quality <= 0.99)
