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
    h, i, s = architecture.hidden_size, architecture.intermediate_size, tokens
    unit = layer_cost(architecture, tokens)
    keys_values = 2 * s * h * h
    row = 2 * h * h + 2 * h * i + 2 * s * h  # query and output projection, feed-forward, attention of one row
    head = h * h + h * architecture.num_labels
    costs, spent, depth = [], 0.0, 0
    if architecture.embedding_size != h:
        spent += s * architecture.embedding_size * h
    peeked = False
    for spec in architecture.exits:
        spent += (spec.after_layer - depth) * unit
        if peeked:
            spent -= keys_values
        if spec.number == len(architecture.exits) and spec.head == "cls" and spec.after_layer > depth:
            spent += keys_values + row - unit
        depth, peeked = spec.after_layer, spec.head == "peek"
        spent += head
        if peeked:
            spent += keys_values + row
        elif spec.head == "attention":
            spent += 2 * s * h
        costs.append(spent / unit)
    return np.asarray(costs)
