"""When a text leaves: the promises of models/exits.py, for any logits."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from models.exits import (
    CRITERIA,
    Policy,
    agree,
    decide,
    first_exit,
    full_depth,
    judge,
    judge_all,
    leave_at,
    softmax,
)

FINITE = st.floats(-30, 30, width=32)
ANY = st.floats(width=32)


@st.composite
def logits(draw: st.DrawFn, elements: st.SearchStrategy[float] = FINITE) -> np.ndarray:
    """``[E, N, K]`` of a few exits, texts and classes."""
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(2, 4)))
    return draw(npst.arrays(np.float32, shape, elements=elements))


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    criterion = draw(st.sampled_from(CRITERIA))
    threshold = float(draw(st.integers(1, 4))) if criterion == "patience" else draw(st.floats(0, 1))
    low = draw(st.integers(1, 6))
    high = draw(st.none() | st.integers(low, 7))
    return Policy(criterion, threshold, low, high)


def temperatures(of: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For the scores and for the agreement, different at every exit."""
    return np.linspace(0.5, 2.0, len(of)), np.linspace(1.5, 0.7, len(of))


def test_agreement_is_confidence_at_a_temperature_of_its_own() -> None:
    said = np.array([[1.0, 0.0], [3.0, 0.0]])
    verdict = judge(said, 1.0, 0.5)
    assert verdict.agreement == pytest.approx(1 / (1 + np.exp([-2.0, -6.0])))
    assert verdict.confidence == pytest.approx(1 / (1 + np.exp([-1.0, -3.0])))
    streak = np.zeros(2, dtype=np.int64)
    assert decide(verdict, streak, [Policy("agreement", 0.85)] * 2, 1, 2) == ["agreement", "agreement"]
    assert decide(verdict, streak, [Policy("confidence", 0.85)] * 2, 1, 2) == [None, "confidence"]


def test_an_estimated_agreement_is_never_certain() -> None:
    sure = np.tile(np.array([[1e4, 0.0]]), (2, 1, 1))
    assert first_exit(sure, np.ones(2), np.ones(2), Policy("agreement", 1.0)) == [1]
    assert first_exit(sure, np.ones(2), np.ones(2), Policy("agreement", 0.999)) == [0]


@given(logits(), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_agreement_never_leaves_earlier(values: np.ndarray, one: float, other: float) -> None:
    bold = first_exit(values, *temperatures(values), Policy("agreement", min(one, other)))
    safe = first_exit(values, *temperatures(values), Policy("agreement", max(one, other)))
    assert (bold <= safe).all()


@given(logits(), st.floats(0, 1), st.floats(0, 1))
def test_a_lower_confidence_threshold_never_leaves_later(values: np.ndarray, one: float, other: float) -> None:
    bold = first_exit(values, *temperatures(values), Policy("confidence", min(one, other)))
    safe = first_exit(values, *temperatures(values), Policy("confidence", max(one, other)))
    assert (bold <= safe).all()


@given(logits(), st.floats(0, 1), st.floats(0, 1))
def test_a_higher_entropy_threshold_never_leaves_later(values: np.ndarray, one: float, other: float) -> None:
    bold = first_exit(values, *temperatures(values), Policy("entropy", max(one, other)))
    safe = first_exit(values, *temperatures(values), Policy("entropy", min(one, other)))
    assert (bold <= safe).all()


@given(logits(), st.integers(1, 5))
def test_more_patience_never_leaves_earlier(values: np.ndarray, steps: int) -> None:
    bold = first_exit(values, *temperatures(values), Policy("patience", steps))
    safe = first_exit(values, *temperatures(values), Policy("patience", steps + 1))
    assert (bold <= safe).all()


@given(logits(), st.integers(1, 4))
def test_patience_leaves_at_the_first_exit_whose_label_has_held_for_that_many_steps(
    values: np.ndarray, steps: int
) -> None:
    labels = values.argmax(axis=-1)
    for text, left in enumerate(first_exit(values, *temperatures(values), Policy("patience", steps))):
        held = [
            end
            for end in range(steps, len(values))
            if all(labels[end - back, text] == labels[end - back - 1, text] for back in range(steps))
        ]
        assert left == (held[0] if held else len(values) - 1)


@given(logits(ANY), policies())
def test_logits_that_are_not_finite_never_leave_early_by_a_criterion(values: np.ndarray, policy: Policy) -> None:
    chosen = first_exit(values, *temperatures(values), policy)
    for text, left in enumerate(chosen):
        forced = policy.max_exit is not None and left + 1 >= policy.max_exit
        if left < len(values) - 1 and not forced:
            assert np.isfinite(values[left, text]).all()


@given(policies())
def test_a_text_without_one_finite_exit_goes_to_the_end(policy: Policy) -> None:
    values = np.full((4, 2, 3), np.nan, dtype=np.float32)
    last = 3 if policy.max_exit is None else min(policy.max_exit, 4) - 1
    assert (first_exit(values, np.ones(4), np.ones(4), policy) == last).all()


def test_an_infinite_logit_is_not_a_certain_answer() -> None:
    verdict = judge(np.array([[np.inf, 0.0], [0.0, 1.0]], dtype=np.float32), 1.0, 1.0)
    assert verdict.labels.tolist() == [-1, 1]
    assert decide(verdict, [0, 0], [Policy("confidence", 0.0)] * 2, 1, 2) == [None, "confidence"]


@given(logits(), st.data())
def test_a_row_is_judged_the_same_whoever_else_is_broken(values: np.ndarray, data: st.DataObject) -> None:
    clean = judge(values[0], 1.5, 2.0)
    broken = values[0].copy()
    row = data.draw(st.integers(0, len(broken) - 1))
    broken[row, 0] = data.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    verdict = judge(broken, 1.5, 2.0)
    assert verdict.labels[row] == -1
    assert np.isnan(
        [verdict.confidence[row], verdict.entropy[row], verdict.agreement[row], *verdict.probabilities[row]]
    ).all()
    others = np.arange(len(broken)) != row
    for name in ("probabilities", "labels", "confidence", "entropy", "agreement", "finite"):
        assert (getattr(verdict, name)[others] == getattr(clean, name)[others]).all()


@given(logits(), policies())
def test_nobody_leaves_before_min_exit_or_after_max_exit(values: np.ndarray, policy: Policy) -> None:
    left = first_exit(values, *temperatures(values), policy) + 1
    assert (left >= min(policy.min_exit, len(values))).all()
    assert (left <= min(policy.max_exit or len(values), len(values))).all()


@given(logits(ANY), st.data())
def test_deciding_exit_by_exit_is_what_first_exit_says(values: np.ndarray, data: st.DataObject) -> None:
    exits, texts = values.shape[:2]
    mixed = [data.draw(policies()) for _ in range(texts)]
    previous, streak = np.full(texts, -1, dtype=np.int64), np.zeros(texts, dtype=np.int64)
    left: dict[int, tuple[int, Any]] = {}
    for number in range(1, exits + 1):
        verdict = judge(values[number - 1], *(float(of[number - 1]) for of in temperatures(values)))
        streak = agree(verdict.labels, previous, streak)
        previous = verdict.labels
        for text, reason in enumerate(decide(verdict, streak, mixed, number, exits)):
            if reason is not None and text not in left:
                left[text] = (number - 1, reason)
    for text, policy in enumerate(mixed):
        assert left[text][0] == first_exit(values, *temperatures(values), policy)[text]
        if left[text][0] == exits - 1:
            assert left[text][1] == "final"
        else:
            assert left[text][1] in (policy.criterion, "max_exit")


@given(logits(), policies())
def test_judging_once_gives_what_judging_for_each_policy_gives(values: np.ndarray, policy: Policy) -> None:
    judged = judge_all(values, *temperatures(values))
    before = judged.confidence.copy()
    assert (leave_at(judged, policy) == first_exit(values, *temperatures(values), policy)).all()
    assert (judged.confidence == before).all()


@given(logits(ANY))
def test_entropy_lies_between_certain_and_uniform(values: np.ndarray) -> None:
    verdict = judge(values[0], 1.0, 1.0)
    entropy = verdict.entropy[verdict.finite]
    assert ((entropy >= 0) & (entropy <= 1)).all()
    assert np.isnan(verdict.entropy[~verdict.finite]).all()


def test_entropy_is_zero_when_certain_and_one_when_uniform() -> None:
    assert judge(np.array([[1e4, 0.0, 0.0]]), 1.0, 1.0).entropy == 0.0
    assert judge(np.ones((1, 77)), 1.0, 1.0).entropy == pytest.approx(1.0)


@given(logits(), st.floats(0.1, 10))
def test_confidence_and_entropy_are_those_of_the_formulas(values: np.ndarray, temperature: float) -> None:
    verdict = judge(values[0], temperature, 1.0)
    for row, p in enumerate(softmax(values[0], temperature)):
        assert verdict.probabilities[row] == pytest.approx(p)
        assert verdict.confidence[row] == pytest.approx(max(p))
        assert verdict.entropy[row] == pytest.approx(
            -sum(x * np.log(x) for x in p if x > 0) / np.log(len(p)), abs=1e-12
        )


@given(policies(), st.integers(1, 6), logits())
def test_an_exit_that_a_policy_does_not_read_never_lets_anybody_leave(
    policy: Policy, number: int, values: np.ndarray
) -> None:
    last = 6
    if not policy.reads(number, last):
        verdict = judge(values[0], 1.0, 1.0)
        texts = len(verdict.labels)
        assert decide(verdict, [9] * texts, [policy] * texts, number, last) == [None] * texts
    assert policy.reads(last, last)


@settings(max_examples=50)
@given(logits(), st.floats(0.1, 10))
def test_temperature_changes_how_sure_an_answer_is_but_not_which_one(values: np.ndarray, temperature: float) -> None:
    warm, plain = judge(values[0], temperature, 1.0), judge(values[0], 1.0, 1.0)
    assert (warm.labels == plain.labels).all()
    tie_free = np.abs(warm.confidence - plain.confidence) > 1e-9
    assert ((warm.confidence < plain.confidence) == (temperature > 1))[tie_free].all()


@given(logits())
def test_probabilities_sum_to_one_and_a_shift_of_the_logits_changes_nothing(values: np.ndarray) -> None:
    assert softmax(values).sum(axis=-1) == pytest.approx(1)
    assert softmax(values.astype(np.float64) + 50) == pytest.approx(softmax(values), abs=1e-12)


def test_full_depth_means_the_last_exit_however_sure_the_first_is() -> None:
    certain = np.tile(np.array([[[1000.0, 0.0]]], dtype=np.float32), (6, 3, 1))
    assert (first_exit(certain, np.ones(6), np.ones(6), full_depth(6)) == 5).all()


def test_the_answer_of_a_max_exit_that_is_also_sure_is_named_after_the_criterion() -> None:
    verdict = judge(np.array([[9.0, 0.0], [0.1, 0.0]]), 1.0, 1.0)
    limited = [Policy("confidence", 0.9, max_exit=2)] * 2
    assert decide(verdict, np.zeros(2, dtype=np.int64), limited, 2, 6) == ["confidence", "max_exit"]


def test_a_streak_begins_anew_after_another_label_and_after_logits_that_were_not_finite() -> None:
    streak = np.array([3, 3, 3], dtype=np.int64)
    assert agree(np.array([1, 0, -1]), np.array([1, 1, -1]), streak).tolist() == [4, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"criterion": "certainty", "threshold": 0.5},
            "criterion must be one of agreement, confidence, entropy, patience",
        ),
        ({"criterion": "confidence", "threshold": 1.01}, "threshold of confidence must lie between 0 and 1"),
        ({"criterion": "entropy", "threshold": -0.1}, "threshold of entropy must lie between 0 and 1"),
        ({"criterion": "confidence", "threshold": float("nan")}, "threshold must be a finite number"),
        ({"criterion": "patience", "threshold": 1.5}, "threshold of patience must be a whole number"),
        ({"criterion": "patience", "threshold": 0}, "threshold of patience must be a whole number of at least 1"),
        ({"criterion": "confidence", "threshold": 0.5, "min_exit": 0}, "min_exit must be at least 1"),
        ({"criterion": "confidence", "threshold": 0.5, "min_exit": 3, "max_exit": 2}, "max_exit 2 lies before"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Policy(**arguments)


def test_as_many_temperatures_as_exits_are_asked_for() -> None:
    with pytest.raises(ValueError, match="2 temperatures for 3 exits"):
        judge_all(np.zeros((3, 1, 2)), [1.0, 1.0], [1.0] * 3)
