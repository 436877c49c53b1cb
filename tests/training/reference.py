"""What the graph tests compare against: random weights, a literal network, and a runner of segments.

The network here is slow and plain on purpose: one text at a time, one head at a time, float64, straight from the
formulas, so nothing in it can share a mistake with the batched graphs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray
from scipy.special import erf

from models.architecture import Architecture, ExitSpec, Head
from models.bundle import segment_io, state_names

Weights = dict[str, NDArray[np.float32]]
Floats = NDArray[np.float64]


def small_architecture(exits: Sequence[tuple[int, Head]], **changes: Any) -> Architecture:
    """Four layers of width 32; ``exits`` as (after_layer, head)."""
    sizes: dict[str, Any] = {
        "backbone": "random",
        "num_layers": 4,
        "hidden_size": 32,
        "embedding_size": 32,
        "num_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 100,
        "max_length": 24,
        "layer_norm_eps": 1e-12,
        "num_labels": 3,
    }
    specs = tuple(ExitSpec(number=n, after_layer=a, head=h) for n, (a, h) in enumerate(exits, start=1))
    return Architecture(**{**sizes, **changes}, exits=specs)


def random_weights(architecture: Architecture, seed: int = 0) -> Weights:
    """Canonical weights, large enough that attention is far from uniform and GELU sees both of its sides."""
    draw = np.random.default_rng(seed)
    weights: Weights = {}
    hidden, inner, embedding = architecture.hidden_size, architecture.intermediate_size, architecture.embedding_size

    def normal(*shape: int, scale: float = 1.0) -> NDArray[np.float32]:
        return (draw.standard_normal(shape) * scale).astype(np.float32)

    def linear(name: str, out: int, into: int) -> None:
        weights[f"{name}.weight"] = normal(out, into, scale=1.5 / math.sqrt(into))
        weights[f"{name}.bias"] = normal(out, scale=0.3)

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = 1 + normal(width, scale=0.2)
        weights[f"{name}.bias"] = normal(width, scale=0.2)

    weights["embeddings.word"] = normal(architecture.vocab_size, embedding)
    weights["embeddings.position"] = normal(architecture.max_length + architecture.position_offset, embedding)
    if architecture.uses_token_type_ids:
        weights["embeddings.token_type"] = normal(2, embedding)
    norm("embeddings.norm", embedding)
    if embedding != hidden:
        linear("embeddings.projection", hidden, embedding)
    for layer in range(architecture.num_layers):
        for part in ("query", "key", "value", "attention_output"):
            linear(f"layers.{layer}.{part}", hidden, hidden)
        linear(f"layers.{layer}.intermediate", inner, hidden)
        linear(f"layers.{layer}.output", hidden, inner)
        norm(f"layers.{layer}.attention_norm", hidden)
        norm(f"layers.{layer}.output_norm", hidden)
    for spec in architecture.exits:
        if spec.head == "attention":
            weights[f"exits.{spec.number}.pool_query"] = normal(architecture.num_heads, architecture.head_size)
        linear(f"exits.{spec.number}.dense", hidden, hidden)
        linear(f"exits.{spec.number}.classifier", architecture.num_labels, hidden)
    return weights


def softmax(scores: Floats) -> Floats:
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=-1, keepdims=True))


class LiteralNetwork:
    """One text at a time through the network, in float64."""

    def __init__(self, architecture: Architecture, weights: Mapping[str, NDArray[Any]]) -> None:
        self.architecture = architecture
        self.weights = {name: np.asarray(array, dtype=np.float64) for name, array in weights.items()}

    def logits(self, ids: Sequence[int], types: Sequence[int]) -> list[Floats]:
        """Logits ``[K]`` at every exit."""
        hidden = self.embeddings(ids, types)
        found, depth = [], 0
        for spec in self.architecture.exits:
            for layer in range(depth, spec.after_layer):
                hidden = self.rows_through(layer, hidden, hidden)
            depth = spec.after_layer
            found.append(self.head(spec, hidden))
        return found

    def embeddings(self, ids: Sequence[int], types: Sequence[int]) -> Floats:
        positions = self.architecture.position_offset + np.arange(len(ids))
        total = self.weights["embeddings.word"][list(ids)] + self.weights["embeddings.position"][positions]
        if self.architecture.uses_token_type_ids:
            total = total + self.weights["embeddings.token_type"][list(types)]
        hidden = self.norm("embeddings.norm", total)
        if self.architecture.embedding_size != self.architecture.hidden_size:
            hidden = self.linear("embeddings.projection", hidden)
        return hidden

    def rows_through(self, layer: int, rows: Floats, hidden: Floats) -> Floats:
        """``rows [N, H]`` through layer ``layer`` as queries against the keys and values of ``hidden [S, H]``."""
        name = f"layers.{layer}"
        query, key, value = (
            self.linear(f"{name}.{part}", source)
            for part, source in (("query", rows), ("key", hidden), ("value", hidden))
        )
        heads = []
        for head in range(self.architecture.num_heads):
            columns = slice(head * self.architecture.head_size, (head + 1) * self.architecture.head_size)
            scores = query[:, columns] @ key[:, columns].T / math.sqrt(self.architecture.head_size)
            heads.append(softmax(scores) @ value[:, columns])
        attended = self.linear(f"{name}.attention_output", np.concatenate(heads, axis=1))
        between = self.norm(f"{name}.attention_norm", attended + rows)
        inner = self.linear(f"{name}.intermediate", between)
        if self.architecture.activation == "gelu":
            inner = inner * 0.5 * (1 + erf(inner / math.sqrt(2)))
        else:
            inner = np.maximum(inner, 0)
        return self.norm(f"{name}.output_norm", self.linear(f"{name}.output", inner) + between)

    def head(self, spec: ExitSpec, hidden: Floats) -> Floats:
        if spec.head == "cls":
            pooled = hidden[0]
        elif spec.head == "mean":
            pooled = hidden.mean(axis=0)
        elif spec.head == "attention":
            parts = []
            for head, query in enumerate(self.weights[f"exits.{spec.number}.pool_query"]):
                own = hidden[:, head * self.architecture.head_size : (head + 1) * self.architecture.head_size]
                parts.append(softmax(own @ query / math.sqrt(self.architecture.head_size)) @ own)
            pooled = np.concatenate(parts)
        else:
            pooled = self.rows_through(spec.after_layer, hidden.mean(axis=0, keepdims=True), hidden)[0]
        name = f"exits.{spec.number}"
        return self.linear(f"{name}.classifier", np.tanh(self.linear(f"{name}.dense", pooled)))

    def linear(self, name: str, tensor: Floats) -> Floats:
        return tensor @ self.weights[f"{name}.weight"].T + self.weights[f"{name}.bias"]

    def norm(self, name: str, tensor: Floats) -> Floats:
        mean = tensor.mean(axis=-1, keepdims=True)
        variance = ((tensor - mean) ** 2).mean(axis=-1, keepdims=True)
        scaled = (tensor - mean) / np.sqrt(variance + self.architecture.layer_norm_eps)
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


@dataclass(frozen=True)
class Text:
    ids: list[int]
    types: list[int]


def random_texts(lengths: Sequence[int], vocab_size: int = 100, seed: int = 1) -> list[Text]:
    """Texts of these lengths in tokens; the second half of each has token type 1, as in a pair."""
    draw = np.random.default_rng(seed)
    return [
        Text(draw.integers(1, vocab_size, length).tolist(), [0] * (length - length // 2) + [1] * (length // 2))
        for length in lengths
    ]


class SegmentRunner:
    """Runs the segments one after the other, carrying the state; returns the logits of every exit."""

    def __init__(self, architecture: Architecture, paths: Sequence[Path], threads: int = 1) -> None:
        self.architecture = architecture
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        self.sessions = [
            onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]) for path in paths
        ]

    def run(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[np.float32]]:
        state = dict(feed)
        logits = []
        for number, session in enumerate(self.sessions, start=1):
            inputs, outputs = segment_io(self.architecture, number)
            found = session.run(list(outputs), {name: state[name] for name in inputs})
            logits.append(found[0])
            state = {"attention_mask": feed["attention_mask"]}
            if number < len(self.sessions):
                state |= dict(zip(state_names(self.architecture, number), found[1:], strict=True))
        return logits

    def alone(self, texts: Sequence[Text]) -> list[NDArray[np.float32]]:
        """Every text in a run of its own, ``[N, K]`` per exit."""
        single = [self.run(padded_feed(self.architecture, [text])) for text in texts]
        return [np.concatenate(rows) for rows in zip(*single, strict=True)]

    def padded(self, texts: Sequence[Text]) -> list[NDArray[np.float32]]:
        return self.run(padded_feed(self.architecture, texts))

    def packed(self, texts: Sequence[Text]) -> list[NDArray[np.float32]]:
        return self.run(packed_feed(self.architecture, texts))


def padded_feed(architecture: Architecture, texts: Sequence[Text], extra: int = 0) -> dict[str, NDArray[Any]]:
    """One text per row, 0 behind its end, ``extra`` columns of padding more than the longest text needs."""
    width = max(len(text.ids) for text in texts) + extra
    feed = {name: np.zeros((len(texts), width), np.int64) for name in ("input_ids", "attention_mask", "token_type_ids")}
    for row, text in enumerate(texts):
        feed["input_ids"][row, : len(text.ids)] = text.ids
        feed["attention_mask"][row, : len(text.ids)] = 1
        feed["token_type_ids"][row, : len(text.ids)] = text.types
    feed["position_ids"] = np.tile(
        architecture.position_offset + np.arange(width) % architecture.max_length, (len(texts), 1)
    )
    return feed


def packed_feed(architecture: Architecture, texts: Sequence[Text]) -> dict[str, NDArray[Any]]:
    """All texts side by side in one row, numbered 1, 2, ..., positions starting anew with each."""
    columns = {
        "input_ids": [token for text in texts for token in text.ids],
        "attention_mask": [number for number, text in enumerate(texts, start=1) for _ in text.ids],
        "token_type_ids": [kind for text in texts for kind in text.types],
        "position_ids": [architecture.position_offset + place for text in texts for place in range(len(text.ids))],
    }
    return {name: np.asarray([values], dtype=np.int64) for name, values in columns.items()}
