"""From trained weights to the graphs of a bundle, and back."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from models.architecture import Architecture
from models.bundle import READ, Precision
from training.graph_format import Weights
from training.graphs import build_segments

_EXIT = re.compile(r"exits\.(\d+)\.(.+)")
_LAYER = re.compile(r"layers\.(\d+)\.")


def select_exits(
    architecture: Architecture, weights: Weights, keep: Sequence[int]
) -> tuple[Architecture, dict[str, NDArray[Any]]]:
    """Keeps only the exits numbered ``keep`` (as trained), in order of depth, and renumbers them 1, 2, ...

    The layers between two kept exits become one segment. Layers beyond the deepest kept exit are dropped, and
    ``num_layers`` with them. Raises ``ValueError`` where ``keep`` is empty, repeats a number or names no exit.
    """
    known = [spec.number for spec in architecture.exits]
    if not keep:
        raise ValueError("exits: at least one must be kept")
    for number in keep:
        if number not in known:
            raise ValueError(f"exits: {number} is not one of the trained exits {known[0]} to {known[-1]}")
        if list(keep).count(number) > 1:
            raise ValueError(f"exits: {number} is named twice")
    kept = [spec for spec in architecture.exits if spec.number in keep]
    renumbered = {spec.number: new for new, spec in enumerate(kept, start=1)}
    depth = max(1, kept[-1].after_layer + (1 if kept[-1].head == "peek" else 0))
    fields = architecture.model_dump()
    fields["num_layers"] = depth
    fields["exits"] = [{**spec.model_dump(), "number": renumbered[spec.number]} for spec in kept]
    selected: dict[str, NDArray[Any]] = {}
    for name, array in weights.items():
        layer, of_exit = _LAYER.match(name), _EXIT.fullmatch(name)
        if of_exit and int(of_exit[1]) in renumbered:
            selected[f"exits.{renumbered[int(of_exit[1])]}.{of_exit[2]}"] = array
        elif not of_exit and not (layer and int(layer[1]) >= depth):
            selected[name] = array
    return Architecture.model_validate(fields), selected


def export_graphs(
    architecture: Architecture,
    weights: Weights,
    folder: Path,
    precisions: Sequence[Precision] = ("fp32", "int8"),
) -> dict[Precision, list[Path]]:
    """Writes ``<folder>/<precision>/segment_<n>.onnx`` and returns the paths of each precision in order of segments."""
    return {name: build_segments(architecture, weights, name, folder / name) for name in precisions}


def dequantised_weights(architecture: Architecture, segments: Sequence[Path]) -> dict[str, NDArray[np.float32]]:
    """Reads canonical float weights back from a bundle's graphs, whatever their precision.

    From fp32 graphs they are the exported weights, bit by bit, and from fp16 graphs those rounded to halves; from int8
    graphs they are what the integers stand for, so building int8 graphs from them gives the same integers again. Names:
    see :mod:`training.graphs`.
    """
    stored: dict[str, NDArray[Any]] = {}
    for path in segments:
        for tensor in onnx.load(path).graph.initializer:
            if not tensor.name.startswith("constant.") and tensor.name != READ:
                stored[tensor.name] = numpy_helper.to_array(tensor)
    weights: dict[str, NDArray[np.float32]] = {}
    for name, array in _floats(stored).items():
        if name.endswith(".weight.T"):
            weights[name.removesuffix(".T")] = np.ascontiguousarray(array.T)
        elif name.endswith(".table"):
            weights[name.removesuffix(".table")] = array
        elif name.endswith(".query_key_value.bias"):
            stem = name.removesuffix("query_key_value.bias")
            for part, values in zip(("query", "key", "value"), np.split(array, 3), strict=True):
                weights[f"{stem}{part}.bias"] = values
        elif name.endswith(".pool_query"):
            weights[name] = array.reshape(architecture.num_heads, architecture.head_size)
        else:
            weights[name] = array
    return weights


def _floats(stored: dict[str, NDArray[Any]]) -> dict[str, NDArray[np.float32]]:
    """Multiplies integers with their scales; what was stored as float stays as it is."""
    floats = {}
    for name, array in stored.items():
        if name.endswith(".int8"):
            plain = name.removesuffix(".int8")
            scale = stored[f"{plain}.scale"]
            # A scale belongs to a row of a table, but to a column of a transposed weight.
            floats[plain] = array.astype(np.float32) * (scale[:, None] if plain.endswith(".table") else scale)
        elif not name.endswith(".scale"):
            floats[name] = array.astype(np.float32, copy=False)
    return floats
