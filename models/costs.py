"""What it costs to leave at each exit, in units of one whole layer.

Costs count multiply-accumulates of the matrix products (norms, activations and look-ups are left out), for one text
of ``tokens`` tokens, heads, pooled rows and an embedding projection included. A layer of width H and feed-forward
width I costs ``S(4H² + 2HI) + 2S²H``: query, key, value and output projections, the feed-forward pair, scores and
weighted values.
"""

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture


def layer_cost(architecture: Architecture, tokens: int) -> float:
    """Multiply-accumulates of one whole layer at ``tokens`` tokens."""
    h, i, s = architecture.hidden_size, architecture.intermediate_size, tokens
    return float(s * (4 * h * h + 2 * h * i) + 2 * s * s * h)


def exit_costs(architecture: Architecture, tokens: int) -> NDArray[np.float64]:
    """Cost until each exit, ``[E]``, in units of one whole layer at ``tokens`` tokens.

    Every exit on the way is paid for: a text that leaves at exit 3 has also run the heads and rows of exits 1 and 2.
    A ``peek`` exit pays the keys and values of the next layer when it peeks; they are not paid again when the text
    goes on into that layer. Where the last exit is ``cls``, its last layer computes keys and values of all tokens and
    the rest of one row, as the exported graph does.
    """
    h, s = architecture.hidden_size, tokens
    unit = layer_cost(architecture, tokens)
    keys_values = 2 * s * h * h
    reading = reading_costs(architecture, tokens) * unit
    costs, spent, depth = [], 0.0, 0
    if architecture.embedding_size != h:
        spent += s * architecture.embedding_size * h
    peeked = False
    for spec in architecture.exits:
        spent += (spec.after_layer - depth) * unit
        if peeked:
            spent -= keys_values
        if spec.number == len(architecture.exits) and spec.head == "cls" and spec.after_layer > depth:
            spent += keys_values + _row(architecture, tokens) - unit
        depth, peeked = spec.after_layer, spec.head == "peek"
        spent += reading[spec.number - 1]
        if peeked:
            spent += keys_values
        costs.append(spent / unit)
    return np.asarray(costs)


def reading_costs(architecture: Architecture, tokens: int) -> NDArray[np.float64]:
    """The part of :func:`exit_costs` ``[E]`` that a text is spared at an exit that it passes unread: the head, and the
    row of a ``peek``."""
    h = architecture.hidden_size
    head = h * h + h * architecture.num_labels
    pooling = {"peek": _row(architecture, tokens), "attention": 2 * tokens * h}
    reading = [head + pooling.get(spec.head, 0) for spec in architecture.exits]
    return np.asarray(reading) / layer_cost(architecture, tokens)


def full_depth_cost(architecture: Architecture, tokens: int) -> float:
    """Cost until the last exit where all others are passed unread, in units of one whole layer: what early exits save
    is counted against it."""
    return float(exit_costs(architecture, tokens)[-1] - reading_costs(architecture, tokens)[:-1].sum())


def attention_share(architecture: Architecture, tokens: int) -> float:
    """The part of a layer's cost that grows with the square of a text's ``tokens``: what an empty place costs where
    only attention puts texts side by side in rows of ``tokens`` places, in units of a token."""
    return 2.0 * tokens * tokens * architecture.hidden_size / layer_cost(architecture, tokens)


def _row(architecture: Architecture, tokens: int) -> int:
    """One row through a layer: query and output projection, feed-forward, attention to ``tokens`` tokens."""
    h, i = architecture.hidden_size, architecture.intermediate_size
    return 2 * h * h + 2 * h * i + 2 * tokens * h
