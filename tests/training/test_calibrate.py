"""Temperatures, curves and the certified table from saved logits."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy.special import log_softmax

from models.bundle import Calibration, CurvePoint
from models.costs import exit_costs, reading_costs
from models.exits import CRITERIA, Criterion, Policy, first_exit, judge_all
from tests.training.synthetic import architecture, draw
from training.calibrate import (
    Split,
    SplitLogits,
    agreement_temperatures,
    calibrate,
    calibrate_precision,
    choose_criterion,
    choose_temperatures,
    cross_fit_temperatures,
    disagreeing,
    expected_calibration_error,
    fit_temperature,
    negative_log_likelihood,
    threshold_grid,
)
from training.evaluate import curve, measure
from training.risk import QUALITIES, n_needed

SHAPE = architecture()


def data(n: int, seed: int) -> tuple[np.ndarray, Split]:
    logits, labels, tokens = draw(n, seed=seed, sharpness=1.5)
    return logits, Split(labels, tokens)


@pytest.fixture(scope="module")
def splits() -> dict[str, tuple[np.ndarray, Split]]:
    return {name: data(n, seed) for seed, (name, n) in enumerate((("temperature", 600), ("risk", 1300), ("val", 900)))}


def logits_of(splits: dict[str, tuple[np.ndarray, Split]]) -> SplitLogits:
    return SplitLogits(splits["val"][0], splits["risk"][0], splits["temperature"][0])


def labels_of(splits: dict[str, tuple[np.ndarray, Split]]) -> dict[str, Any]:
    return {
        "validation": splits["val"][1],
        "risk": splits["risk"][1],
        "temperature": splits["temperature"][1],
        "metric": "accuracy",
    }


@pytest.fixture(scope="module")
def calibration(splits: dict[str, tuple[np.ndarray, Split]]) -> Calibration:
    logits = logits_of(splits)
    return calibrate(
        {"fp32": logits, "int8": replace(logits, risk=logits.risk[:, :1300:2].repeat(2, axis=1))},
        SHAPE,
        **labels_of(splits),
        data_sha256="ab" * 32,
        points=40,
    )


# --- temperature -----------------------------------------------------------------------------------------------------


def test_the_loss_is_the_mean_negative_log_probability_of_the_label() -> None:
    logits, labels, _ = draw(50, classes=3)
    literal = np.mean([-log_softmax(row / 1.7)[label] for row, label in zip(logits[0], labels, strict=True)])
    assert negative_log_likelihood(logits[0], labels, 1.7) == pytest.approx(literal, rel=1e-6)


def test_the_fitted_temperature_is_the_one_of_a_fine_grid() -> None:
    logits, labels, _ = draw(2000, sharpness=2.0)
    grid = np.exp(np.linspace(-1, 2, 601))
    best = grid[np.argmin([negative_log_likelihood(logits[2], labels, t) for t in grid])]
    assert fit_temperature(logits[2], labels) == pytest.approx(best, rel=0.01)


def test_logits_scaled_by_three_get_three_times_the_temperature() -> None:
    logits, labels, _ = draw(1000)
    assert fit_temperature(3 * logits[0], labels) == pytest.approx(3 * fit_temperature(logits[0], labels), rel=1e-3)


def test_a_temperature_that_does_not_help_on_other_texts_is_not_kept() -> None:
    overconfident, labels, _ = draw(800, seed=1, sharpness=3.0)
    fitted = fit_temperature(overconfident[0], labels)
    other, other_labels, _ = draw(800, seed=2, sharpness=3.0)
    # Divided already, the held-out logits only get worse.
    mended = other / np.float32(fitted)
    kept, refused = choose_temperatures(
        np.stack([overconfident[0]] * 2), labels, np.stack([other[0], mended[0]]), other_labels
    ).values
    assert kept == pytest.approx(fitted, rel=1e-4)
    assert refused == 1.0


def test_without_texts_of_its_own_each_half_of_a_split_judges_the_temperature_of_the_other() -> None:
    logits, labels, _ = draw(1000, seed=3, sharpness=3.0)
    found = cross_fit_temperatures(logits, labels)
    even, odd = slice(0, None, 2), slice(1, None, 2)
    for index, (temperature, after) in enumerate(zip(found.values, found.error_after, strict=True)):
        assert temperature == pytest.approx(fit_temperature(logits[index], labels), rel=1e-4)
        crossed = [
            logits[index, odd] / fit_temperature(logits[index, even], labels[even]),
            logits[index, even] / fit_temperature(logits[index, odd], labels[odd]),
        ]
        judged = expected_calibration_error(np.concatenate(crossed), np.concatenate([labels[odd], labels[even]]))
        assert after == pytest.approx(judged, abs=1e-4)


def test_a_temperature_that_only_fits_its_own_half_is_not_kept() -> None:
    # Even texts call for a high temperature, odd ones for a low one: what one half learns harms the other.
    logits = np.tile(np.array([[2.0, 0.0], [2.0, 0.0]]), (50, 1))[None]
    labels = np.tile(np.array([0, 1, 0, 0, 0, 1, 0, 0]), 13)[:100]
    assert cross_fit_temperatures(logits, labels).values == (1.0,)


def test_one_text_is_too_few_for_a_temperature() -> None:
    logits, labels, _ = draw(1)
    assert cross_fit_temperatures(logits, labels).values == (1.0,) * 6


def test_agreement_is_fitted_to_what_the_last_exit_says_and_not_to_the_truth() -> None:
    logits, labels, _ = draw(1000, seed=4, sharpness=3.0)
    last = logits[-1].argmax(-1)
    found = agreement_temperatures(logits)
    assert found[-1] == 1.0
    for early, temperature in zip(logits[:-1], found, strict=False):
        assert temperature == pytest.approx(fit_temperature(early, last), rel=1e-4)
        # Exits that err together agree more often than they are right.
        assert temperature < fit_temperature(early, labels)
        by_agreement = expected_calibration_error(early, last, temperature)
        assert by_agreement < expected_calibration_error(early, last, fit_temperature(early, labels))


def test_a_text_whose_last_exit_is_not_finite_teaches_no_agreement() -> None:
    logits, _, _ = draw(500, seed=5)
    broken = np.concatenate([logits, logits[:, :1]], axis=1)
    broken[-1, -1] = np.nan
    assert agreement_temperatures(broken) == agreement_temperatures(logits)


def test_logits_that_are_not_finite_do_not_spoil_the_temperature() -> None:
    logits, labels, _ = draw(500)
    broken = logits[0].copy()
    broken[7] = np.nan
    assert fit_temperature(broken, labels) == pytest.approx(
        fit_temperature(np.delete(logits[0], 7, 0), np.delete(labels, 7))
    )
    assert fit_temperature(np.full((5, 2), np.nan), labels[:5]) == 1.0


def test_separable_logits_do_not_send_the_temperature_to_zero() -> None:
    logits = np.array([[5.0, 0.0], [0.0, 5.0]])
    assert fit_temperature(logits, np.array([0, 1])) >= 0.05


def test_calibration_error_is_the_weighted_gap_between_confidence_and_accuracy() -> None:
    rng = np.random.default_rng(0)
    logits, labels = rng.normal(size=(300, 4)) * 2, rng.integers(4, size=300)
    p = np.exp(log_softmax(logits, axis=-1))
    confidence, right = p.max(axis=-1), p.argmax(axis=-1) == labels
    literal = 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            literal += inside.sum() / 300 * abs(right[inside].mean() - confidence[inside].mean())
    assert expected_calibration_error(logits, labels) == pytest.approx(literal)


def test_answers_as_sure_as_they_are_right_have_no_calibration_error() -> None:
    sure = np.log(np.array([[0.75, 0.25]] * 4))
    assert expected_calibration_error(sure, np.array([0, 0, 0, 1])) == pytest.approx(0.0, abs=1e-12)
    assert expected_calibration_error(sure, np.array([1, 1, 1, 1])) == pytest.approx(0.75)


# --- thresholds and curves -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 3, 6, 7, 77])
@pytest.mark.parametrize("criterion", ["confidence", "entropy"])
def test_a_grid_runs_from_certainty_to_everyone_leaving_at_once(criterion: Criterion, classes: int) -> None:
    logits, _, _ = draw(300, classes=classes, exits=4)
    logits[0, 0] = 0.0  # as unsure as can be
    judged = judge_all(logits, [1.0] * 4, [1.0] * 4)
    grid = threshold_grid(judged, criterion, classes, 50)
    steps = np.diff(grid)
    assert (steps < 0).all() if criterion == "confidence" else (steps > 0).all()
    assert grid[0] == (1.0 if criterion == "confidence" else 0.0)
    assert len(grid) <= 53
    assert not disagreeing(judged, criterion, grid[:1]).any()
    assert (first_exit(logits, [1.0] * 4, [1.0] * 4, Policy(criterion, grid[-1])) == 0).all()


def test_grids_follow_the_texts_so_that_the_confident_end_is_fine() -> None:
    logits, _, _ = draw(2000, sharpness=4.0)
    grid = np.array(threshold_grid(judge_all(logits, [1.0] * 6, [1.0] * 6), "confidence", 2, 100))
    # Half of all answers of these exits are surer than .999, so about half of the grid is as well.
    assert 40 <= (grid > 0.999).sum() <= 75
    assert len(np.unique(grid)) == len(grid)


def test_patience_runs_from_one_less_than_the_exits_down_to_one() -> None:
    logits, _, _ = draw(50)
    judged = judge_all(logits, [1.0] * 6, [1.0] * 6)
    assert threshold_grid(judged, "patience", 2) == (5.0, 4.0, 3.0, 2.0, 1.0)
    assert not disagreeing(judged, "patience", [5.0]).any()


def test_one_exit_alone_has_grids_too() -> None:
    logits, labels, tokens = draw(60, exits=1)
    single = architecture(exits=1)
    split = Split(labels, tokens)
    one = calibrate_precision(
        SplitLogits(logits, logits), single, validation=split, risk=split, metric="accuracy", qualities=(0.9,)
    )
    assert [tier.speedup for tier in one.certified] == [1.0]


def test_a_curve_says_what_each_threshold_gives_text_by_text() -> None:
    logits, labels, tokens = draw(200, seed=4)
    seen = measure(logits, [1.3] * 6, [1.3] * 6, labels, tokens, SHAPE, "accuracy")
    for point in curve(seen, "confidence", (0.95, 0.8, 0.6)):
        right = same = cost = full = 0.0
        shares = [0] * 6
        chosen = first_exit(logits, [1.3] * 6, [1.3] * 6, Policy("confidence", point.threshold))
        for text, left in enumerate(chosen):
            answer, last = logits[left, text].argmax(), logits[-1, text].argmax()
            right += answer == labels[text]
            same += answer == last
            cost += exit_costs(SHAPE, int(tokens[text]))[left]
            full += exit_costs(SHAPE, int(tokens[text]))[-1] - sum(reading_costs(SHAPE, int(tokens[text]))[:-1])
            shares[left] += 1
        assert point.metric == pytest.approx(right / 200, abs=1e-6)
        assert point.agreement == pytest.approx(same / 200, abs=1e-6)
        assert point.mean_cost == pytest.approx(cost / 200, abs=1e-6)
        assert point.speedup == pytest.approx(full / cost, abs=1e-6)
        assert point.exit_shares == pytest.approx([share / 200 for share in shares], abs=1e-6)


def path(*pairs: tuple[float, float]) -> tuple[CurvePoint, ...]:
    """A curve from (agreement, mean cost) pairs."""
    return tuple(
        CurvePoint(threshold=t, metric=0.9, agreement=a, mean_cost=c, speedup=6 / c, exit_shares=(1.0,))
        for t, (a, c) in enumerate(pairs)
    )


def test_the_cheapest_criterion_at_equal_agreement_is_chosen() -> None:
    curves: dict[Criterion, tuple[CurvePoint, ...]] = {
        "confidence": path((1.0, 6.0), (0.99, 3.0), (0.95, 2.0)),
        "patience": path((1.0, 6.0), (0.99, 2.5), (0.95, 2.0)),
    }
    assert choose_criterion(curves, (0.99, 0.95)) == "patience"


def test_a_cheap_point_beyond_the_first_disagreement_does_not_count() -> None:
    # Certification would stop at .90, so what comes after is out of its reach.
    curves: dict[Criterion, tuple[CurvePoint, ...]] = {
        "confidence": path((1.0, 6.0), (0.99, 4.0)),
        "entropy": path((1.0, 6.0), (0.90, 5.0), (0.99, 1.0)),
    }
    assert choose_criterion(curves, (0.99,)) == "confidence"


def test_ties_go_to_confidence() -> None:
    same = path((1.0, 6.0), (0.99, 4.0))
    assert choose_criterion({"patience": same, "entropy": same, "confidence": same}, (0.99,)) == "confidence"


# --- the whole -------------------------------------------------------------------------------------------------------


def test_every_precision_is_calibrated_on_its_own_logits(calibration: Calibration) -> None:
    assert set(calibration.precisions) == {"fp32", "int8"}
    # The int8 logits of the fixture differ on the risk split alone, and so must what is certified, alone.
    fp32, int8 = calibration.precisions["fp32"], calibration.precisions["int8"]
    assert {c: [p.threshold for p in points] for c, points in fp32.curves.items()} == {
        c: [p.threshold for p in points] for c, points in int8.curves.items()
    }
    assert fp32.curves != int8.curves
    assert [tier.disagreements for tier in fp32.certified] != [tier.disagreements for tier in int8.certified]
    assert all(tier.disagreements % 2 == 0 for tier in int8.certified)
    assert (calibration.n_temperature, calibration.n_risk, calibration.n_validation) == (600, 1300, 900)


def test_temperatures_mend_overconfident_exits(calibration: Calibration) -> None:
    precision = calibration.precisions["fp32"]
    assert all(temperature > 1 for temperature in precision.temperatures)
    assert all(
        after < before
        for before, after in zip(precision.calibration_error_before, precision.calibration_error_after, strict=True)
    )


def test_tiers_are_the_counts_of_the_risk_split_at_their_threshold(
    calibration: Calibration, splits: dict[str, tuple[np.ndarray, Split]]
) -> None:
    precision = calibration.precisions["fp32"]
    logits = splits["risk"][0]
    assert [tier.quality for tier in precision.certified] == sorted(QUALITIES, reverse=True)
    for tier in precision.certified:
        chosen = first_exit(
            logits, precision.temperatures, precision.agreement_temperatures, Policy(tier.criterion, tier.threshold)
        )
        answers = logits[chosen, np.arange(1300)].argmax(axis=-1)
        assert tier.disagreements == (answers != logits[-1].argmax(axis=-1)).sum()
        assert tier.n == 1300


def test_delta_covers_the_tiers_of_all_precisions_together(
    calibration: Calibration, splits: dict[str, tuple[np.ndarray, Split]]
) -> None:
    tiers = [tier for precision in calibration.precisions.values() for tier in precision.certified]
    assert all(tier.p_value <= 0.05 / (2 * len(QUALITIES)) for tier in tiers)
    alone = calibrate_precision(logits_of(splits), SHAPE, **labels_of(splits), delta=0.05 / 2, points=40)
    two = {p: logits_of(splits) for p in ("fp32", "int8")}
    both = calibrate(two, SHAPE, **labels_of(splits), data_sha256="ab" * 32, points=40)
    assert both.precisions["fp32"] == both.precisions["int8"] == alone


def test_a_lower_quality_is_never_slower(calibration: Calibration) -> None:
    speedups = [tier.speedup for tier in calibration.precisions["fp32"].certified]
    assert speedups == sorted(speedups)
    assert speedups[-1] > speedups[0] > 1


def test_curves_run_from_full_depth_to_the_boldest(calibration: Calibration) -> None:
    for criterion in CRITERIA:
        points = calibration.precisions["fp32"].curves[criterion]
        assert points[0].agreement == 1.0
        # All go to the last exit, and pay for the reading of those before it.
        assert 0.9 < points[0].speedup < 1.0
        speedups = [point.speedup for point in points]
        assert speedups == sorted(speedups)
        assert all(sum(point.exit_shares) == pytest.approx(1, abs=1e-5) for point in points)


def test_one_criterion_is_certified_and_the_risk_split_has_no_say_in_which(
    splits: dict[str, tuple[np.ndarray, Split]],
) -> None:
    def chosen(risk_logits: np.ndarray) -> set[str]:
        logits = replace(logits_of(splits), risk=risk_logits)
        result = calibrate_precision(logits, SHAPE, **labels_of(splits), points=20)
        return {tier.criterion for tier in result.certified}

    risk = splits["risk"][0]
    # Here the first exit is sure of the wrong label and the others agree: patience would win by far.
    deceptive = np.stack([-5 * np.sign(risk[-1] - risk[-1].mean(axis=-1, keepdims=True)), *[risk[-1]] * 5])
    assert chosen(risk) == chosen(deceptive) == {"agreement"}


def test_several_criteria_share_delta_and_the_cheapest_serves(splits: dict[str, tuple[np.ndarray, Split]]) -> None:
    logits, labels = logits_of(splits), labels_of(splits)
    several = calibrate_precision(logits, SHAPE, **labels, criteria=("patience", "confidence"), points=40)
    patience = calibrate_precision(logits, SHAPE, **labels, criteria=("patience",), points=40)
    assert all(tier.p_value <= 0.05 / (2 * len(QUALITIES)) for tier in several.certified)
    slow = {tier.quality: tier.mean_cost for tier in patience.certified}
    assert {tier.criterion for tier in several.certified} == {"confidence"}
    assert all(tier.mean_cost <= slow[tier.quality] for tier in several.certified)
    assert len({tier.quality for tier in several.certified}) == len(several.certified)


def test_too_few_texts_are_refused_with_the_number_needed(splits: dict[str, tuple[np.ndarray, Split]]) -> None:
    risk_logits, risk = splits["risk"]
    few = Split(risk.labels[:277], risk.tokens[:277])
    logits = replace(logits_of(splits), risk=risk_logits[:, :277])
    result = calibrate_precision(logits, SHAPE, **{**labels_of(splits), "risk": few}, points=20)
    refused = {tier.quality: tier.n_needed for tier in result.refused}
    assert refused == {0.995: n_needed(0.005, 0.05 / 6), 0.99: n_needed(0.01, 0.05 / 6)}
    assert {tier.quality for tier in result.certified} == {0.98, 0.97, 0.95, 0.9}


def test_without_a_temperature_split_the_validation_split_does_its_work(
    calibration: Calibration, splits: dict[str, tuple[np.ndarray, Split]]
) -> None:
    two = calibrate(
        {"fp32": replace(logits_of(splits), temperature=None)},
        SHAPE,
        **{**labels_of(splits), "temperature": None},
        data_sha256="ab" * 32,
        points=40,
    )
    assert two.n_temperature == 0
    assert two.precisions["fp32"].temperatures == pytest.approx(calibration.precisions["fp32"].temperatures, rel=0.2)
    assert len(two.precisions["fp32"].certified) == len(QUALITIES)


def test_a_calibration_survives_its_own_file(calibration: Calibration) -> None:
    assert Calibration.model_validate_json(calibration.model_dump_json()) == calibration


def test_splits_that_do_not_fit_their_logits_are_refused(splits: dict[str, tuple[np.ndarray, Split]]) -> None:
    logits, labels = logits_of(splits), labels_of(splits)
    with pytest.raises(ValueError, match=r"logits have shape \(6, 900, 2\), not \(6, 1300, 2\)"):
        calibrate_precision(replace(logits, risk=logits.validation), SHAPE, **labels, points=10)
    with pytest.raises(ValueError, match="needs both its labels and its logits"):
        calibrate_precision(replace(logits, temperature=None), SHAPE, **labels, points=10)
    with pytest.raises(ValueError, match="a split of 2 labels and 3 token counts"):
        Split(np.zeros(2, dtype=np.int64), np.ones(3, dtype=np.int64))
    with pytest.raises(ValueError, match="holds no texts"):
        Split(np.zeros(0, dtype=np.int64), np.ones(0, dtype=np.int64))
