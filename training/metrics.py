"""The task metrics, from predictions and labels as class indices ``[N]``."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


def accuracy(predicted: Ints, labels: Ints) -> float:
    """Share of right answers, 0 to 1."""
    return float(np.mean(predicted == labels))


def f1(predicted: Ints, labels: Ints) -> float:
    """F1 of class 1 where the labels hold two classes, as GLUE counts it for MRPC and QQP; else the mean over classes.

    0 for a class that is neither predicted nor there.
    """
    classes = int(labels.max()) + 1
    if classes <= 2:
        return _f1_of(1, predicted, labels)
    return float(np.mean([_f1_of(c, predicted, labels) for c in range(classes)]))


def _f1_of(which: int, predicted: Ints, labels: Ints) -> float:
    right = float(np.sum((predicted == which) & (labels == which)))
    wrong = float(np.sum((predicted == which) != (labels == which)))
    return 2 * right / (2 * right + wrong) if right else 0.0


def matthews(predicted: Ints, labels: Ints) -> float:
    """Matthews correlation (Gorodkin's form for any number of classes), -1 to 1; 0 where either side is constant."""
    classes = int(max(predicted.max(), labels.max())) + 1
    table = np.zeros((classes, classes))
    np.add.at(table, (labels, predicted), 1)
    true, guessed, n = table.sum(1), table.sum(0), table.sum()
    above = np.trace(table) * n - true @ guessed
    below = np.sqrt((n * n - guessed @ guessed) * (n * n - true @ true))
    return float(above / below) if below else 0.0


# ``agreement`` is the share of right answers where a model's own answers are the labels (offramp retrofit).
METRICS: dict[str, Callable[[Ints, Ints], float]] = {
    "accuracy": accuracy,
    "f1": f1,
    "matthews": matthews,
    "agreement": accuracy,
}


def metric_value(name: str, predicted: Ints, labels: Ints) -> float:
    """The metric called ``name``; raises ValueError naming those there are."""
    if name not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {name!r}")
    return METRICS[name](predicted, labels)
