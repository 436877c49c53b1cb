"""The task metrics, from predictions and labels as class indices ``[N]``."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.integer]


def accuracy(predicted: Ints, labels: Ints) -> float:
    """Share of right answers, 0 to 1."""
    return float(np.mean(predicted == labels))


def f1(predicted: Ints, labels: Ints) -> float:
    """F1 of class 1, as GLUE counts it for MRPC and QQP; 0 where class 1 is neither predicted nor there."""
    right = float(np.sum((predicted == 1) & (labels == 1)))
    wrong = float(np.sum((predicted == 1) != (labels == 1)))
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


METRICS: dict[str, Callable[[Ints, Ints], float]] = {"accuracy": accuracy, "f1": f1, "matthews": matthews}


def metric_value(name: str, predicted: Ints, labels: Ints) -> float:
    """The metric called ``name``; raises ValueError naming those there are."""
    if name not in METRICS:
        raise ValueError(f"metric must be one of {', '.join(METRICS)}, not {name!r}")
    return METRICS[name](predicted, labels)
