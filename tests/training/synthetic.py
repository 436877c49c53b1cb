"""A synthetic multi-exit classifier: logits whose exits grow surer with depth and mostly agree. No network needed."""

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture, ExitSpec, Head


def architecture(
    exits: int = 6, labels: int = 2, head: Head = "peek", layers: int = 6, max_length: int = 64
) -> Architecture:
    """MiniLM-sized: exit n after layer n - 1, so that ``peek`` has a layer to look into."""
    return Architecture(
        backbone="synthetic",
        num_layers=layers,
        hidden_size=384,
        embedding_size=384,
        num_heads=12,
        intermediate_size=1536,
        vocab_size=30522,
        max_length=max_length,
        layer_norm_eps=1e-12,
        num_labels=labels,
        exits=tuple(ExitSpec(number=n, after_layer=n - 1, head=head) for n in range(1, exits + 1)),
    )


def draw(
    n: int, *, exits: int = 6, classes: int = 2, seed: int = 0, sharpness: float = 1.0
) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Logits ``[E, N, K]``, labels ``[N]`` and token counts ``[N]``.

    Every text has a signal for its class and a noise that fades with depth but is shared between neighbouring exits,
    so that early exits err more often and agree with the last one mostly. ``sharpness`` scales the logits: above 1 they
    are overconfident, as fine-tuned networks are.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(classes, size=n)
    signal = rng.gamma(4.0, 0.6, size=n)
    shared = rng.normal(size=(n, classes))
    logits = np.empty((exits, n, classes))
    for index in range(exits):
        depth = (index + 1) / exits
        own = rng.normal(size=(n, classes))
        noise = shared * 0.9 + own * 0.9 * (1 - depth)
        logits[index] = noise
        logits[index, np.arange(n), labels] += signal * (0.45 + 0.75 * depth)
    tokens = np.clip(rng.poisson(22, size=n), 3, 64)
    return (logits * 2 * sharpness).astype(np.float32), labels.astype(np.int64), tokens.astype(np.int64)
