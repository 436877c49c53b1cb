"""Weights to graphs: one ONNX graph per exit, built op by op from plain NumPy arrays.

``torch.onnx.export`` and ONNX Runtime's optimiser leave the attention of today's ``transformers`` unfused, and a cut
through the middle of a layer (the ``peek`` exit) is no module that could be exported. BERT-family layers share one
structure, so the graphs are written directly, with ONNX Runtime's fused operators.

Layout. Between the operators a batch ``[B, S]`` is one list of tokens ``[T, H]``, ``T = B * S``: everything but
attention works on single tokens. Attention and pooling work on *texts*: the sequence numbers of ``attention_mask``
say which tokens belong together, and those are gathered into ``[G, M, H]``: G texts of up to M tokens, each starting at
slot 0. So a packed row costs no more attention than its texts, no text can see (or poison) another, and each text's
sums run over its own tokens in its own order. That is what makes int8 the same alone, padded and packed: a difference
in the last bit flips a rounding now and then, and after a few layers the flips are as large as the quantisation noise.

Names of initializers (``{name}`` is the canonical weight name without ``.weight``), from which
:func:`training.export.dequantised_weights` reads the weights back:

- ``{name}.weight.T`` float ``[in, out]``, or in int8 ``{name}.weight.T.int8`` and ``{name}.weight.T.scale`` ``[out]``;
- ``{name}.table`` float ``[rows, E]``, or in int8 ``{name}.table.int8`` and ``{name}.table.scale`` ``[rows]``;
- ``layers.{i}.query_key_value.bias`` ``[3H]``; every other weight under its canonical name;
- ``constant.*`` hold no weights.

Passing. What only an exit's logits need (pooling, a row through the next layer, the head) stands inside an ``If`` that
asks ``read``, an input that is true unless it is given: a text that may not leave here anyway, such as one on its way
to full depth, is spared a peek's half of a layer's time.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from models.architecture import Architecture, ExitSpec
from models.bundle import READ, Precision, segment_io
from models.store import keeps_state_in_store
from training.device_graphs import device_segment
from training.graph_format import FUSED, Shape, Weights, graph_model

# What the rows of a two-dimensional tensor are: every token [T, ...], or one row per text [G, ...].
Rows = Literal["tokens", "texts"]

# AVX2 without VNNI multiplies u8 by s8 and adds neighbouring products in 16 bits, saturating. 255 * 63 * 2 = 32,130
# fits, 255 * 127 * 2 does not: with weights to ±127 the sums would silently clip.
WEIGHT_LEVELS = 63
# Look-up tables are only scaled back, never multiplied in integers, so they use all of int8.
TABLE_LEVELS = 127
# Row maxima are divided by, so they are kept above zero: a row of zeros stays zeros.
TINY = 1e-30
# Activations are u8 around this zero point: signed ones ran four times slower.
ZERO_POINT = 128
ACTIVATION_LEVELS = 127


@dataclass(frozen=True, slots=True)
class Quantised:
    """``values`` times ``scale`` (one per row) stand for the array they were made of."""

    values: NDArray[np.int8]
    scale: NDArray[np.float32]


def quantise_rows(array: NDArray[Any], levels: int) -> Quantised:
    """``[R, C]`` to int8 within ±``levels``, each row scaled by its own largest magnitude; zeros stay zeros."""
    exact = np.asarray(array, dtype=np.float32)
    largest = np.abs(exact).max(axis=1)
    scale = np.where(largest > 0, largest / np.float32(levels), np.float32(1)).astype(np.float32)
    values = np.clip(np.rint(exact / scale[:, None]), -levels, levels).astype(np.int8)
    return Quantised(values, scale)


def build_segments(architecture: Architecture, weights: Weights, precision: Precision, folder: Path) -> list[Path]:
    """Writes ``segment_<n>.onnx`` for every exit into ``folder`` (made if missing) and returns the paths in order.

    ``weights`` are the canonical float arrays, linear weights ``[out, in]``. Same weights, same bytes. Raises what
    :func:`check_weights` raises, before anything is written.
    """
    check_weights(architecture, weights)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for spec in architecture.exits:
        path = folder / f"segment_{spec.number}.onnx"
        model = _segment_model(architecture, weights, precision, spec.number)
        path.write_bytes(model.SerializeToString(deterministic=True))
        paths.append(path)
    return paths


def _segment_model(architecture: Architecture, weights: Weights, precision: Precision, number: int) -> onnx.ModelProto:
    """The graph from the exit before (or from the token ids) to exit ``number``; see :func:`build_segments`."""
    if keeps_state_in_store(precision):
        return device_segment(architecture, weights, number)
    return _Segment(architecture, weights, precision, number).model()


def check_weights(architecture: Architecture, weights: Weights) -> None:
    """Raises ``ValueError``, naming the weight, where one is missing, not of its shape, or not finite.

    Tables may have more rows than the architecture uses. Weights that no exit needs are not looked at.
    """
    for name, shape in weight_shapes(architecture).items():
        if name not in weights:
            raise ValueError(f"weight {name} is missing")
        array = weights[name]
        table = name in ("embeddings.word", "embeddings.position", "embeddings.token_type")
        fits = array.ndim == len(shape) and (
            array.shape[0] >= shape[0] and array.shape[1:] == shape[1:] if table else array.shape == shape
        )
        if not fits:
            raise ValueError(f"weight {name} has shape {list(array.shape)}, not {list(shape)}")
        if not np.isfinite(array).all():
            raise ValueError(f"weight {name} holds values that are not finite")


def weight_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Canonical name and shape of every weight that some exit needs."""
    hidden, inner, embedding = architecture.hidden_size, architecture.intermediate_size, architecture.embedding_size
    linear = {}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.word": (architecture.vocab_size, embedding),
        "embeddings.position": (architecture.position_offset + architecture.max_length, embedding),
        "embeddings.norm.weight": (embedding,),
        "embeddings.norm.bias": (embedding,),
    }
    if architecture.uses_token_type_ids:
        shapes["embeddings.token_type"] = (1, embedding)
    if embedding != hidden:
        linear["embeddings.projection"] = (hidden, embedding)
    deepest = architecture.exits[-1]
    for layer in range(deepest.after_layer + (1 if deepest.head == "peek" else 0)):
        for part in ("query", "key", "value", "attention_output"):
            linear[f"layers.{layer}.{part}"] = (hidden, hidden)
        linear[f"layers.{layer}.intermediate"] = (inner, hidden)
        linear[f"layers.{layer}.output"] = (hidden, inner)
        for norm in ("attention_norm", "output_norm"):
            shapes[f"layers.{layer}.{norm}.weight"] = shapes[f"layers.{layer}.{norm}.bias"] = (hidden,)
    for spec in architecture.exits:
        linear[f"exits.{spec.number}.dense"] = (hidden, hidden)
        linear[f"exits.{spec.number}.classifier"] = (architecture.num_labels, hidden)
        if spec.head == "attention":
            shapes[f"exits.{spec.number}.pool_query"] = (architecture.num_heads, architecture.head_size)
    for name, (out, into) in linear.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (out, into), (out,)
    return shapes


@dataclass(frozen=True, slots=True)
class _Activation:
    """What linear layers multiply: ``tensor [N, C]``, in int8 with the ``scale [N, 1]`` of its rows."""

    tensor: str
    scale: str = ""


@dataclass(frozen=True, slots=True)
class _Texts:
    """Where texts lie among the tokens, as tensor names.

    ``first [G]``: each text's first token. ``lengths [G]``: its tokens, int32. ``slots [G, M]``: the token in each
    slot; beyond its end a text repeats its last token, and attention masks the repeats. ``slot_of_token [T]``: a slot
    (of G * M) that holds the token; for padding any slot.
    """

    first: str
    lengths: str
    slots: str
    slot_of_token: str


@dataclass(slots=True)
class _Segment:
    """One graph in the making."""

    architecture: Architecture
    weights: Weights
    precision: Precision
    number: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, NDArray[Any]] = field(default_factory=dict)
    zero_points: dict[Rows, str] = field(default_factory=dict)

    # --- from end to end ---

    def model(self) -> onnx.ModelProto:
        exits = self.architecture.exits
        spec = exits[self.number - 1]
        last = self.number == len(exits)
        texts = self._texts()
        if self.number == 1:
            start, hidden, key_value = 0, self._embeddings(), None
        else:
            start = exits[self.number - 2].after_layer
            flat = self._ints(-1, self.architecture.hidden_size)
            inputs = segment_io(self.architecture, self.number)[0]
            hidden = self._node("Reshape", "hidden", flat)
            key_value = None
            if "key" in inputs:
                key_value = (self._node("Reshape", "key", flat), self._node("Reshape", "value", flat))
        # Nothing reads the other tokens of a last [CLS] exit's layer, so only the texts' first tokens go through it.
        rows_only = last and spec.head == "cls"
        for layer in range(start, spec.after_layer - (1 if rows_only else 0)):
            hidden = self._whole_layer(layer, hidden, key_value, texts)
            key_value = None
        if spec.head == "peek":
            key_value = self._key_value(spec.after_layer, hidden)
        if not last:
            shape = self._node("Concat", self._node("Shape", "attention_mask"), self._ints(-1), axis=0)
            state = (hidden, *key_value) if spec.head == "peek" and key_value else (hidden,)
            for name, tensor in zip(segment_io(self.architecture, self.number)[1][1:], state, strict=True):
                self._node("Reshape", tensor, shape, output=name)
        passing = len(self.nodes)
        if spec.head == "cls":
            pooled = self._node("Gather", hidden, texts.first)
            if rows_only and spec.after_layer > 0:
                layer = spec.after_layer - 1
                pooled = self._rows_layer(layer, pooled, key_value or self._key_value(layer, hidden), texts)
        elif spec.head == "mean":
            pooled = self._mean(hidden, texts)
        elif spec.head == "attention":
            pooled = self._attention_pool(spec, hidden, texts)
        else:
            assert key_value is not None
            pooled = self._rows_layer(spec.after_layer, self._mean(hidden, texts), key_value, texts)
        self._head(spec, pooled)
        if not last:
            self._only_if_read(passing)
        return self._finish()

    def _only_if_read(self, first: int) -> None:
        """Puts the nodes from ``first`` on, which end in the logits, into an ``If``; all weights stay outside."""
        outside, inside = self.nodes[:first], self.nodes[first:]
        inside[-1].output[0] = "read_logits"
        classes = self.architecture.num_labels
        none = numpy_helper.from_array(np.zeros((0, classes), np.float32))
        logits = helper.make_tensor_value_info("read_logits", TensorProto.FLOAT, ["texts", classes])
        nothing = helper.make_tensor_value_info("no_logits", TensorProto.FLOAT, [0, classes])
        pass_by = helper.make_node("Constant", [], ["no_logits"], name="no_logits", value=none)
        self.nodes = outside
        self._node(
            "If",
            READ,
            output="logits",
            then_branch=helper.make_graph(inside, "reading", [], [logits]),
            else_branch=helper.make_graph([pass_by], "passing", [], [nothing]),
        )
        self._constant(READ, np.array(True))

    def _finish(self) -> onnx.ModelProto:
        inputs, outputs = segment_io(self.architecture, self.number)
        width = self.architecture.hidden_size
        shapes: dict[str, Shape] = {"logits": (TensorProto.FLOAT, ["texts", self.architecture.num_labels])}
        for name in ("hidden", "key", "value"):
            shapes[name] = shapes[f"next_{name}"] = (TensorProto.FLOAT, ["batch", "tokens", width])
        shapes[READ] = (TensorProto.BOOL, [])
        whole_numbers: Shape = (TensorProto.INT64, ["batch", "tokens"])
        # An input that is an initializer too need not be given.
        inputs += tuple(name for name in (READ,) if name in self.initializers)
        return graph_model(
            self.number,
            self.nodes,
            {name: shapes.get(name, whole_numbers) for name in inputs},
            {name: shapes[name] for name in outputs},
            self.initializers,
        )

    # --- where the texts lie ---

    def _texts(self) -> _Texts:
        """Reads the sequence numbers ``attention_mask [B, S]``; texts are counted row by row, R to a row."""
        axis, last_axis = self._ints(1), self._ints(-1)
        zero, one = self._int(0), self._int(1)
        per_row = self._node("ReduceMax", "attention_mask", keepdims=0)
        numbers = self._node("Range", one, self._node("Add", per_row, one), one)
        own = self._node(
            "Equal",
            self._node("Unsqueeze", "attention_mask", axis),
            self._node("Unsqueeze", numbers, axis),
        )
        own = self._node("Cast", own, to=TensorProto.INT32)
        lengths = self._node("ReduceSum", own, self._ints(2), keepdims=0)
        lengths = self._node("Reshape", lengths, last_axis, output="text_lengths")
        # A text's tokens are neighbours, so its first one and its length say where it lies. Of equals ArgMax gives the
        # first.
        first = self._node("ArgMax", own, axis=2, keepdims=0)
        tokens = self._node("Size", "attention_mask")
        row = self._node("Gather", self._node("Shape", "attention_mask"), one)
        rows = self._node("Unsqueeze", self._node("Range", zero, tokens, row), axis)
        first = self._node("Reshape", self._node("Add", first, rows), last_axis, output="text_first")
        # A text that a row doesn't have (all of them, in a row of padding) has length 0 and gets the row's first token.
        length = self._node("Max", self._node("Cast", lengths, to=TensorProto.INT64), one)
        longest = self._node("ReduceMax", length, keepdims=0)
        final = self._node("Unsqueeze", self._node("Sub", length, one), axis)
        slots = self._node("Min", self._node("Range", zero, longest, one), final)
        slots = self._node("Add", slots, self._node("Unsqueeze", first, axis), output="slots")
        # A token's smallest slot is its own: repeats lie behind it, and a missing text behind the row's text 1.
        count = self._node("Size", slots)
        anywhere = self._node("Expand", self._node("Sub", count, one), self._node("Unsqueeze", tokens, self._ints(0)))
        flat = self._node("Reshape", slots, last_axis)
        places = self._node("Range", zero, count, one)
        slot_of_token = self._node("ScatterElements", anywhere, flat, places, output="slot_of_token", reduction="min")
        return _Texts(first, lengths, slots, slot_of_token)

    # --- the network ---

    def _embeddings(self) -> str:
        """Hidden states ``[T, H]`` before the first layer."""
        flat = self._ints(-1)
        word = self._look_up("embeddings.word", self._node("Reshape", "input_ids", flat))
        other = self._look_up("embeddings.position", self._node("Reshape", "position_ids", flat))
        if self.architecture.uses_token_type_ids:
            kind = self._look_up("embeddings.token_type", self._node("Reshape", "token_type_ids", flat))
            other = self._node("Add", other, kind)
        hidden = self._residual_norm("embeddings.norm", word, other)
        if self.architecture.embedding_size != self.architecture.hidden_size:
            hidden = self._biased_linear("embeddings.projection", self._activation(hidden, "tokens"))
        return hidden

    def _whole_layer(self, layer: int, hidden: str, key_value: tuple[str, str] | None, texts: _Texts) -> str:
        """``hidden [T, H]`` through layer ``layer`` (from 0); ``key_value`` where the segment before made them."""
        name = f"layers.{layer}"
        activation = self._activation(hidden, "tokens")
        query = self._linear(f"{name}.query", activation)
        if key_value is None:
            key_value = (self._linear(f"{name}.key", activation), self._linear(f"{name}.value", activation))
        attended = self._attend(layer, self._node("Gather", query, texts.slots), key_value, texts)
        flat = self._node("Reshape", attended, self._ints(-1, self.architecture.hidden_size))
        return self._rest_of_layer(layer, self._node("Gather", flat, texts.slot_of_token), hidden, "tokens")

    def _key_value(self, layer: int, hidden: str) -> tuple[str, str]:
        """Keys and values ``[T, H]`` of layer ``layer``, before their bias (attention adds it)."""
        activation = self._activation(hidden, "tokens")
        return self._linear(f"layers.{layer}.key", activation), self._linear(f"layers.{layer}.value", activation)

    def _rows_layer(self, layer: int, rows: str, key_value: tuple[str, str], texts: _Texts) -> str:
        """One row per text, ``rows [G, H]``, through layer ``layer`` as an extra query against its text's tokens."""
        query = self._linear(f"layers.{layer}.query", self._activation(rows, "texts"))
        attended = self._attend(layer, self._node("Unsqueeze", query, self._ints(1)), key_value, texts)
        return self._rest_of_layer(layer, self._node("Squeeze", attended, self._ints(1)), rows, "texts")

    def _attend(self, layer: int, query: str, key_value: tuple[str, str], texts: _Texts) -> str:
        """Attention ``[G, Q, H]`` of ``query [G, Q, H]`` to the keys and values ``[T, H]`` of each one's own text."""
        key, value = (self._node("Gather", tensor, texts.slots) for tensor in key_value)
        bias = np.concatenate([self._array(f"layers.{layer}.{part}.bias") for part in ("query", "key", "value")])
        bias_name = self._constant(f"layers.{layer}.query_key_value.bias", bias)
        return self._node(
            "MultiHeadAttention",
            query,
            key,
            value,
            bias_name,
            texts.lengths,
            domain=FUSED,
            num_heads=self.architecture.num_heads,
        )

    def _rest_of_layer(self, layer: int, attended: str, residual: str, rows: Rows) -> str:
        """What follows the attention in layer ``layer``, ``[N, H]``, whatever its rows are."""
        name = f"layers.{layer}"
        projected = self._biased_linear(f"{name}.attention_output", self._activation(attended, rows))
        hidden = self._residual_norm(f"{name}.attention_norm", projected, residual)
        inner = self._linear(f"{name}.intermediate", self._activation(hidden, rows))
        bias = self._weight(f"{name}.intermediate.bias")
        if self.architecture.activation == "gelu":
            inner = self._node("BiasGelu", inner, bias, domain=FUSED)
        else:
            inner = self._node("Relu", self._node("Add", inner, bias))
        outer = self._biased_linear(f"{name}.output", self._activation(inner, rows))
        return self._residual_norm(f"{name}.output_norm", outer, hidden)

    def _residual_norm(self, name: str, tensor: str, residual: str) -> str:
        """LayerNorm(tensor + residual) of ``[N, C]``.

        ``SkipLayerNormalization`` would be one node, but its CPU kernel is a scalar loop with a division per element:
        68 µs for [25, 384] where Add and LayerNormalization take 11. Two dimensions, not three, also keep ONNX
        Runtime's optimiser from fusing them.
        """
        gain, shift = self._weight(f"{name}.weight"), self._weight(f"{name}.bias")
        total = self._node("Add", tensor, residual)
        return self._node("LayerNormalization", total, gain, shift, epsilon=self.architecture.layer_norm_eps)

    # --- pooling and heads ---

    def _mean(self, hidden: str, texts: _Texts) -> str:
        """Mean ``[G, H]`` of each text's tokens: attention with a query of zeros looks at all of them alike."""
        return self._pool(hidden, np.zeros(self.architecture.hidden_size, np.float32), "constant.zero_query", texts)

    def _attention_pool(self, spec: ExitSpec, hidden: str, texts: _Texts) -> str:
        name = f"exits.{spec.number}.pool_query"
        return self._pool(hidden, self._array(name).reshape(-1), name, texts)

    def _pool(self, hidden: str, query: NDArray[Any], name: str, texts: _Texts) -> str:
        tokens = self._node("Gather", hidden, texts.slots)
        count = self._node("Concat", self._node("Shape", texts.lengths), self._ints(1, 1), axis=0)
        queries = self._node("Expand", self._constant(name, query.reshape(1, 1, -1)), count)
        heads = self.architecture.num_heads
        pooled = self._node(
            "MultiHeadAttention", queries, tokens, tokens, "", texts.lengths, domain=FUSED, num_heads=heads
        )
        return self._node("Squeeze", pooled, self._ints(1))

    def _head(self, spec: ExitSpec, pooled: str) -> None:
        """``logits = classifier(tanh(dense(pooled)))``."""
        name = f"exits.{spec.number}"
        dense = self._node("Tanh", self._biased_linear(f"{name}.dense", self._activation(pooled, "texts")))
        # K rows of H are too few to be worth integers.
        classifier = self._transposed(f"{name}.classifier")
        self._node("Gemm", dense, classifier, self._weight(f"{name}.classifier.bias"), output="logits")

    # --- products and look-ups, in either precision ---

    def _activation(self, tensor: str, rows: Rows) -> _Activation:
        """``tensor [N, C]`` made ready for linear layers; in int8 each row is scaled by its own maximum to ±127.

        ``QuantizeLinear`` along rows is one pass over the tensor; Div, Round, Add and Cast are four, and took twice the
        time or more. It wants as many zero points as scales, so they are laid out once per segment.
        """
        if self.precision == "fp32":
            return _Activation(tensor)
        largest = self._node("ReduceMax", self._node("Abs", tensor), self._ints(1), keepdims=0)
        largest = self._node("Max", largest, self._float("tiny", TINY))
        scale = self._node("Mul", largest, self._float("step", 1 / ACTIVATION_LEVELS))
        if rows not in self.zero_points:
            self.zero_points[rows] = self._node("Expand", self._zero_point(), self._node("Shape", scale))
        values = self._node("QuantizeLinear", tensor, scale, self.zero_points[rows], axis=0)
        return _Activation(values, self._node("Unsqueeze", scale, self._ints(1)))

    def _zero_point(self) -> str:
        return self._constant("constant.zero_point", np.array(ZERO_POINT, np.uint8))

    def _linear(self, name: str, activation: _Activation) -> str:
        """``activation @ weight.T`` ``[N, out]``, without the bias: whatever comes next adds it."""
        if self.precision == "fp32":
            return self._node("MatMul", activation.tensor, self._transposed(name))
        quantised = quantise_rows(self._array(f"{name}.weight"), WEIGHT_LEVELS)
        product = self._node(
            "MatMulIntegerToFloat",
            activation.tensor,
            self._constant(f"{name}.weight.T.int8", np.ascontiguousarray(quantised.values.T)),
            self._float("one", 1.0),
            self._constant(f"{name}.weight.T.scale", quantised.scale),
            self._zero_point(),
            domain=FUSED,
        )
        return self._node("Mul", product, activation.scale)

    def _biased_linear(self, name: str, activation: _Activation) -> str:
        """``activation @ weight.T + bias`` ``[N, out]``."""
        bias = self._weight(f"{name}.bias")
        if self.precision == "fp32":
            return self._node("Gemm", activation.tensor, self._transposed(name), bias)
        return self._node("Add", self._linear(name, activation), bias)

    def _transposed(self, name: str) -> str:
        return self._constant(f"{name}.weight.T", np.ascontiguousarray(self._array(f"{name}.weight").T))

    def _look_up(self, name: str, ids: str) -> str:
        """Rows ``[T, E]`` of the table ``name`` for ``ids [T]``."""
        if self.precision == "fp32":
            return self._node("Gather", self._constant(f"{name}.table", self._array(name)), ids)
        quantised = quantise_rows(self._array(name), TABLE_LEVELS)
        rows = self._node("Gather", self._constant(f"{name}.table.int8", quantised.values), ids)
        scales = self._node("Gather", self._constant(f"{name}.table.scale", quantised.scale), ids)
        return self._node("DequantizeLinear", rows, scales, axis=0)

    # --- nodes and constants ---

    def _node(self, op: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        name = output or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, domain=domain, **attributes))
        return name

    def _constant(self, name: str, array: NDArray[Any]) -> str:
        self.initializers.setdefault(name, array)
        return name

    def _weight(self, name: str) -> str:
        return self._constant(name, self._array(name))

    def _array(self, name: str) -> NDArray[np.float32]:
        return np.asarray(self.weights[name], dtype=np.float32)

    def _ints(self, *values: int) -> str:
        return self._constant("constant.ints_" + "_".join(map(str, values)), np.array(values, np.int64))

    def _int(self, value: int) -> str:
        return self._constant(f"constant.int_{value}", np.array(value, np.int64))

    def _float(self, name: str, value: float) -> str:
        return self._constant(f"constant.{name}", np.array(value, np.float32))
