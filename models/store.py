"""The layout of fp16 graphs, which keep what texts carry on the device (docs/decisions/0012).

A *store* is a tensor ``[P, H]`` of rows, one row for each token of each text under way; there is one for each name of
:func:`models.bundle.state_names`. A segment gathers the rows of its texts from one set of stores and scatters what it
leaves to the same rows of another set, so survivors of any micro-batches are joined by naming their rows, and only
logits ever need to leave the device. A text's rows stay its own from its first segment to its exit.

Inside, a micro-batch is padded: ``[G, M, H]``, G texts in places of M tokens each. There is no control flow and no
shape is computed, so that a run can be captured as a CUDA graph.
"""

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import Precision, state_names

# Padding is read from a row that nothing is ever written to, and written to one that nothing is ever read from: what a
# poisoned text leaves in its padding would else reach its neighbours, for even a weight of zero times NaN is NaN.
CLEAN_ROW = 0
SPARE_ROW = 1
FIRST_ROW = 2


def keeps_state_in_store(precision: Precision) -> bool:
    """Whether graphs of ``precision`` have this layout; the others have that of :func:`models.bundle.segment_io`."""
    return precision == "fp16"


def store_io(architecture: Architecture, segment: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the inputs and outputs of fp16 segment ``segment`` (1 = first).

    int32 inputs: ``rows [G, M]``, each token's row (:data:`CLEAN_ROW` for padding); ``lengths [G]`` in tokens (1 for a
    place without a text); ``starts`` as :func:`starts_of` makes it; and for segment 1 ``input_ids [G, M]``,
    ``position_ids [1, M]`` and ``token_type_ids [G, M]``.
    Then the stores, ``[P, H]`` each: those read from (``hidden``, ``key``, ``value``) and those written to
    (``into_hidden``, ...), which come out as ``next_hidden``, ... Bound to the same memory they are written in place.
    ``logits [G, K]`` are float32 whatever the precision.
    """
    inputs: tuple[str, ...] = ("rows", "lengths", "starts")
    if segment == 1:
        inputs += ("input_ids", "position_ids")
        inputs += ("token_type_ids",) if architecture.uses_token_type_ids else ()
    else:
        inputs += state_names(architecture, segment - 1)
    outputs: tuple[str, ...] = ("logits",)
    if segment < len(architecture.exits):
        names = state_names(architecture, segment)
        inputs += tuple(f"into_{name}" for name in names)
        outputs += tuple(f"next_{name}" for name in names)
    return inputs, outputs


def starts_of(texts: int, longest: int) -> NDArray[np.int32]:
    """``[2 * (texts + 1)]``: where the queries of each text begin and the last one's end, then the same of the keys.

    Behind ``lengths`` this is the mask that CUDA's memory-efficient attention takes (``[3 * G + 2]``); with lengths
    alone it would fall back to an attention that writes all scores to memory.
    """
    starts = np.arange(texts + 1, dtype=np.int32) * np.int32(longest)
    return np.concatenate([starts, starts])
