"""The metrics against their textbook formulas."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.metrics import accuracy, f1, matthews, metric_value

pairs = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40)
binary = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=1, max_size=40)


def arrays(rows: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([p for p, _ in rows]), np.array([y for _, y in rows])


@given(pairs)
def test_accuracy_is_the_share_of_right_answers(rows: list[tuple[int, int]]) -> None:
    assert accuracy(*arrays(rows)) == pytest.approx(sum(p == y for p, y in rows) / len(rows))


@given(binary)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(rows: list[tuple[int, int]]) -> None:
    right = sum(p == y == 1 for p, y in rows)
    guessed, true = sum(p for p, _ in rows), sum(y for _, y in rows)
    if right:
        precision, recall = right / guessed, right / true
        assert f1(*arrays(rows)) == pytest.approx(2 / (1 / precision + 1 / recall))
    else:
        assert f1(*arrays(rows)) == 0.0


@given(pairs)
def test_matthews_is_the_correlation_of_one_hot_answers(rows: list[tuple[int, int]]) -> None:
    """Gorodkin 2004: the covariance of both one-hot matrices over the root of their variances' product."""
    predicted, labels = (np.eye(4)[a] for a in arrays(rows))

    def covariance(a: np.ndarray, b: np.ndarray) -> float:
        return float(sum(np.mean((a[:, k] - a[:, k].mean()) * (b[:, k] - b[:, k].mean())) for k in range(4)))

    below = math.sqrt(covariance(predicted, predicted) * covariance(labels, labels))
    expected = covariance(predicted, labels) / below if below > 1e-12 else 0.0
    assert matthews(*arrays(rows)) == pytest.approx(expected, abs=1e-9)


@given(binary)
def test_matthews_of_two_classes_is_the_four_cell_formula(rows: list[tuple[int, int]]) -> None:
    tp, tn = sum(p == y == 1 for p, y in rows), sum(p == y == 0 for p, y in rows)
    fp, fn = sum(p > y for p, y in rows), sum(p < y for p, y in rows)
    below = math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert matthews(*arrays(rows)) == pytest.approx((tp * tn - fp * fn) / below if below else 0.0, abs=1e-9)


def test_known_values() -> None:
    predicted, labels = np.array([1, 1, 0, 0, 1]), np.array([1, 0, 0, 1, 1])
    assert accuracy(predicted, labels) == pytest.approx(3 / 5)
    assert f1(predicted, labels) == pytest.approx(2 / 3)
    assert matthews(predicted, labels) == pytest.approx(1 / 6)
    assert matthews(labels, labels) == pytest.approx(1.0)
    assert matthews(1 - labels, labels) == pytest.approx(-1.0)


def test_matthews_survives_as_many_rows_as_a_data_set_has() -> None:
    labels = np.arange(300_000) % 2
    assert matthews(labels, labels) == pytest.approx(1.0)


def test_a_metric_is_found_by_name_and_an_unknown_one_names_those_there_are() -> None:
    predicted, labels = np.array([1, 0]), np.array([1, 1])
    assert metric_value("accuracy", predicted, labels) == 0.5
    with pytest.raises(ValueError, match="metric must be one of accuracy, f1, matthews, agreement, not 'bleu'"):
        metric_value("bleu", predicted, labels)


def test_f1_of_more_than_two_classes_is_the_mean_over_classes() -> None:
    predicted, labels = np.array([0, 0, 1, 2, 2, 2]), np.array([0, 1, 1, 2, 2, 0])
    # Per class 2·right / (2·right + wrong): 2/4, 2/3, 4/5.
    assert f1(predicted, labels) == pytest.approx((2 / 4 + 2 / 3 + 4 / 5) / 3)
