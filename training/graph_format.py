"""What all graphs of a bundle have in common, whatever their layout: versions, and how one is put together."""

from collections.abc import Mapping, Sequence
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

Weights = Mapping[str, NDArray[Any]]
# Element type and dimensions of a graph's input or output.
Shape = tuple[int, list[int | str]]

OPSET = 21
IR_VERSION = 10
FUSED = "com.microsoft"


def graph_model(
    number: int,
    nodes: Sequence[onnx.NodeProto],
    inputs: Mapping[str, Shape],
    outputs: Mapping[str, Shape],
    initializers: Mapping[str, NDArray[Any]],
) -> onnx.ModelProto:
    """Segment ``number``'s model from its ``nodes`` in order, by name what goes in and out, and its weights."""
    graph = helper.make_graph(
        nodes,
        f"segment_{number}",
        [helper.make_tensor_value_info(name, *shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, *shape) for name, shape in outputs.items()],
        [numpy_helper.from_array(array, name) for name, array in initializers.items()],
    )
    return helper.make_model(
        graph,
        producer_name="offramp",
        ir_version=IR_VERSION,
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(FUSED, 1)],
    )
