"""Weights to the graphs that run on a GPU: fp16, state in a store on the device (:mod:`models.store`).

The formulas are those of :mod:`training.graphs`, in a padded layout ``[G, M, H]`` and with operators that ONNX Runtime
has CUDA kernels for (its ``docs/OperatorKernels.md``), all of them fit for capture as a CUDA graph: no ``If``, no shape
arithmetic, no operator that stages host memory (``GatherND`` did until 1.32). LayerNormalization and softmax sum in
fp32 inside their kernels (the former when the session asks for its strict mode), and the classifier is fp32.

Names of initializers are those of :mod:`training.graphs`, so weights are read back the same way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper

from models.architecture import Architecture, ExitSpec
from models.store import SPARE_ROW, store_io
from training.graph_format import FUSED, Shape, Weights, graph_model

_KeyValue = tuple[str, str]


def device_segment(
    architecture: Architecture, weights: Weights, number: int, dtype: Literal["float16", "float32"] = "float16"
) -> onnx.ModelProto:
    """The graph from the exit before (or from the token ids) to exit ``number``, with :func:`models.store.store_io`.

    ``weights`` are the canonical float arrays, checked already. float32 is for comparing layouts.
    """
    return _DeviceSegment(architecture, weights, number, np.dtype(dtype)).model()


@dataclass(slots=True)
class _DeviceSegment:
    """One graph in the making."""

    architecture: Architecture
    weights: Weights
    number: int
    dtype: np.dtype[Any]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, NDArray[Any]] = field(default_factory=dict)

    # --- from end to end ---

    def model(self) -> onnx.ModelProto:
        exits = self.architecture.exits
        spec = exits[self.number - 1]
        last = self.number == len(exits)
        inputs, outputs = store_io(self.architecture, self.number)
        self._node("Concat", "lengths", "starts", output="mask", axis=0)
        key_value: _KeyValue | None = None
        if self.number == 1:
            start, hidden = 0, self._embeddings()
        else:
            start = exits[self.number - 2].after_layer
            hidden = self._node("Gather", "hidden", "rows")
            if "key" in inputs:
                key_value = (self._node("Gather", "key", "rows"), self._node("Gather", "value", "rows"))
        # Nothing reads the other tokens of a last [CLS] exit's layer, so only the texts' first tokens go through it.
        rows_only = last and spec.head == "cls" and spec.after_layer > 0
        for layer in range(start, spec.after_layer - (1 if rows_only else 0)):
            key_value = key_value or self._key_value(layer, hidden)
            hidden = self._layer(layer, hidden, hidden, key_value, "mask")
            key_value = None
        if rows_only:
            layer = spec.after_layer - 1
            key_value = key_value or self._key_value(layer, hidden)
            pooled = self._layer(layer, self._first(hidden), self._first(hidden), key_value, "lengths")
        elif spec.head == "peek":
            key_value = self._key_value(spec.after_layer, hidden)
            row = self._mean(hidden)
            pooled = self._layer(spec.after_layer, row, row, key_value, "lengths")
        elif spec.head == "cls":
            pooled = self._first(hidden)
        elif spec.head == "mean":
            pooled = self._mean(hidden)
        else:
            pooled = self._attention_pool(spec, hidden)
        if not last:
            self._store((hidden, *(key_value or ())), outputs[1:])
        self._head(spec, self._node("Squeeze", pooled, self._ints(1)))
        return self._finish(inputs, outputs)

    def _store(self, tensors: Sequence[str], outputs: Sequence[str]) -> None:
        """Scatters ``tensors [G, M, H]`` to the rows of their stores; padding goes to the spare one."""
        spare = self._constant("constant.spare_row", np.array(SPARE_ROW, np.int32))
        rows = self._node("Cast", self._node("Max", "rows", spare), to=TensorProto.INT64)
        places = self._node("Unsqueeze", rows, self._ints(-1))
        # The spare row is named many times over, which leaves anything in it, and nothing reads it.
        for tensor, output in zip(tensors, outputs, strict=True):
            self._node("ScatterND", output.replace("next_", "into_"), places, tensor, output=output)

    def _finish(self, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
        element = helper.np_dtype_to_tensor_dtype(self.dtype)
        store: Shape = (element, ["store", self.architecture.hidden_size])
        shapes: dict[str, Shape] = {
            "rows": (TensorProto.INT32, ["texts", "longest"]),
            "input_ids": (TensorProto.INT32, ["texts", "longest"]),
            "token_type_ids": (TensorProto.INT32, ["texts", "longest"]),
            "position_ids": (TensorProto.INT32, [1, "longest"]),
            "lengths": (TensorProto.INT32, ["texts"]),
            "starts": (TensorProto.INT32, ["starts"]),
            "logits": (TensorProto.FLOAT, ["texts", self.architecture.num_labels]),
        }
        return graph_model(
            self.number,
            self.nodes,
            {name: shapes.get(name, store) for name in inputs},
            {name: shapes.get(name, store) for name in outputs},
            self.initializers,
        )

    # --- the network ---

    def _embeddings(self) -> str:
        """Hidden states ``[G, M, H]`` before the first layer."""
        word = self._look_up("embeddings.word", "input_ids")
        other = self._look_up("embeddings.position", "position_ids")
        if self.architecture.uses_token_type_ids:
            other = self._node("Add", self._look_up("embeddings.token_type", "token_type_ids"), other)
        gain, shift = self._weight("embeddings.norm.weight"), self._weight("embeddings.norm.bias")
        total = self._node("Add", word, other)
        hidden = self._node("LayerNormalization", total, gain, shift, epsilon=self.architecture.layer_norm_eps)
        if self.architecture.embedding_size != self.architecture.hidden_size:
            projected = self._linear("embeddings.projection", hidden)
            hidden = self._node("Add", projected, self._weight("embeddings.projection.bias"))
        return hidden

    def _key_value(self, layer: int, hidden: str) -> _KeyValue:
        """Keys and values ``[G, M, H]`` of layer ``layer`` (from 0), before their bias (attention adds it)."""
        return self._linear(f"layers.{layer}.key", hidden), self._linear(f"layers.{layer}.value", hidden)

    def _layer(self, layer: int, queries: str, residual: str, key_value: _KeyValue, mask: str) -> str:
        """``queries [G, Q, H]`` through layer ``layer``, each against the keys and values of its own text."""
        name = f"layers.{layer}"
        query = self._linear(f"{name}.query", queries)
        bias = np.concatenate([self._array(f"{name}.{part}.bias") for part in ("query", "key", "value")])
        attended = self._attend(query, *key_value, self._constant(f"{name}.query_key_value.bias", bias), mask)
        attended = self._linear(f"{name}.attention_output", attended)
        hidden = self._residual_norm(name, "attention_norm", "attention_output", attended, residual)
        inner, bias_name = self._linear(f"{name}.intermediate", hidden), self._weight(f"{name}.intermediate.bias")
        if self.architecture.activation == "gelu":
            inner = self._node("BiasGelu", inner, bias_name, domain=FUSED)
        else:
            inner = self._node("Relu", self._node("Add", inner, bias_name))
        return self._residual_norm(name, "output_norm", "output", self._linear(f"{name}.output", inner), hidden)

    def _attend(self, query: str, key: str, value: str, bias: str, mask: str) -> str:
        heads = self.architecture.num_heads
        return self._node("MultiHeadAttention", query, key, value, bias, mask, domain=FUSED, num_heads=heads)

    def _residual_norm(self, layer: str, norm: str, linear: str, product: str, residual: str) -> str:
        """LayerNorm(product + bias + residual); on CUDA one kernel."""
        gain, shift = self._weight(f"{layer}.{norm}.weight"), self._weight(f"{layer}.{norm}.bias")
        bias, epsilon = self._weight(f"{layer}.{linear}.bias"), self.architecture.layer_norm_eps
        return self._node("SkipLayerNormalization", product, residual, gain, shift, bias, domain=FUSED, epsilon=epsilon)

    # --- pooling and heads, all to [G, 1, H] ---

    def _first(self, hidden: str) -> str:
        return self._node("Gather", hidden, self._ints(0), axis=1)

    def _mean(self, hidden: str) -> str:
        """Attention with a query of zeros looks at all of a text's tokens alike, in fp32 sums."""
        return self._pool(hidden, "constant.zero_query", np.zeros(self.architecture.hidden_size, np.float32))

    def _attention_pool(self, spec: ExitSpec, hidden: str) -> str:
        name = f"exits.{spec.number}.pool_query"
        return self._pool(hidden, name, self._array(name))

    def _pool(self, hidden: str, name: str, query: NDArray[Any]) -> str:
        table = self._constant(name, query.reshape(1, -1).astype(self.dtype))
        # The same query for every text: row 0 of a table of one, taken G times.
        zeros = self._node("Unsqueeze", self._node("Sub", "lengths", "lengths"), self._ints(1))
        return self._attend(self._node("Gather", table, zeros), hidden, hidden, "", "lengths")

    def _head(self, spec: ExitSpec, pooled: str) -> None:
        """``logits = classifier(tanh(dense(pooled)))``, ``pooled [G, H]``."""
        name = f"exits.{spec.number}"
        dense = self._node("Gemm", pooled, self._transposed(f"{name}.dense"), self._weight(f"{name}.dense.bias"))
        exact = self._node("Cast", self._node("Tanh", dense), to=TensorProto.FLOAT)
        weight = np.ascontiguousarray(np.asarray(self.weights[f"{name}.classifier.weight"], np.float32).T)
        bias = np.asarray(self.weights[f"{name}.classifier.bias"], np.float32)
        classifier = self._constant(f"{name}.classifier.weight.T", weight)
        self._node("Gemm", exact, classifier, self._constant(f"{name}.classifier.bias", bias), output="logits")

    # --- products, look-ups, nodes and constants ---

    def _linear(self, name: str, tensor: str) -> str:
        """``tensor @ weight.T``, without the bias: whatever comes next adds it."""
        return self._node("MatMul", tensor, self._transposed(name))

    def _look_up(self, name: str, ids: str) -> str:
        return self._node("Gather", self._constant(f"{name}.table", self._array(name)), ids)

    def _transposed(self, name: str) -> str:
        return self._constant(f"{name}.weight.T", np.ascontiguousarray(self._array(f"{name}.weight").T))

    def _weight(self, name: str) -> str:
        return self._constant(name, self._array(name))

    def _array(self, name: str) -> NDArray[Any]:
        with np.errstate(over="ignore"):
            array = np.asarray(self.weights[name]).astype(self.dtype)
        if not np.isfinite(array).all():
            raise ValueError(f"weight {name} holds values beyond {self.dtype}'s range")
        return array

    def _ints(self, value: int) -> str:
        return self._constant(f"constant.ints_{value}", np.array([value], np.int64))

    def _constant(self, name: str, array: NDArray[Any]) -> str:
        self.initializers.setdefault(name, array)
        return name

    def _node(self, op: str, *inputs: str, output: str = "", domain: str = "", **attributes: Any) -> str:
        name = output or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=name, domain=domain, **attributes))
        return name
