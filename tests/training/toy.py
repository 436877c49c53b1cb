"""A task that a network of two tiny layers learns in seconds: which of three kinds of words a text holds more of."""

import numpy as np
import torch

from models.architecture import Architecture, Head
from models.network import Backbone, MultiExitNetwork
from models.tokenization import TextEncoder
from tests.tiny_backbones import exits, tiny_tokenizer
from training.data import Example, Tokenized, tokenize

LABELS = ("0", "1", "2")


def toy_examples(count: int, seed: int) -> tuple[Example, ...]:
    """Texts of 3 to 12 words; words of class k are w(k), w(k+3), ...; the label's kind is the most frequent."""
    rng = np.random.default_rng(seed)
    made = []
    for row in range(count):
        label = int(rng.integers(3))
        kinds = np.where(rng.random(rng.integers(3, 13)) < 0.75, label, rng.integers(3))
        text = " ".join(f"w{kind + 3 * rng.integers(20)}" for kind in kinds)
        made.append(Example(text, None, LABELS[label], row + 2))
    return tuple(made)


def toy_data(count: int, seed: int) -> Tokenized:
    return tokenize(toy_examples(count, seed), LABELS, TextEncoder(tiny_tokenizer("bert"), 16))


def tiny_architecture(head: Head = "mean", layers: int = 2) -> Architecture:
    return Architecture(
        backbone="tiny",
        num_layers=layers,
        hidden_size=32,
        embedding_size=32,
        num_heads=2,
        intermediate_size=32,
        vocab_size=100,
        max_length=16,
        layer_norm_eps=1e-12,
        num_labels=3,
        exits=tuple(exits(*((depth if head != "peek" else depth - 1, head) for depth in range(1, layers + 1)))),
    )


def tiny_architecture_network() -> MultiExitNetwork:
    """Three exits, three labels."""
    architecture = tiny_architecture().model_copy(update={"exits": tuple(exits((0, "mean"), (1, "mean"), (2, "mean")))})
    torch.manual_seed(0)
    return MultiExitNetwork(architecture, position_rows=16)


def toy_network(seed: int = 0, head: Head = "mean", dropout: float = 0.1) -> MultiExitNetwork:
    torch.manual_seed(seed)
    return MultiExitNetwork(tiny_architecture(head), position_rows=16, dropout=dropout, attention_dropout=dropout)


def toy_backbone(seed: int = 0) -> Backbone:
    """The same sizes as a backbone without exits, as ``load_backbone`` would give it."""
    network = toy_network(seed)
    return Backbone(
        name="toy",
        weights={n: p.detach().clone() for n, p in network.named_parameters() if not n.startswith("exits.")},
        tokenizer_json=tiny_tokenizer("bert").to_str(),
        config={
            "num_hidden_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "layer_norm_eps": 1e-12,
            "hidden_act": "gelu",
        },
        position_offset=0,
        dropout=0.1,
        attention_dropout=0.1,
    )
