"""The graphs for GPUs: the network of the other graphs, in another layout and with operators that CUDA has."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from models.architecture import Architecture
from models.store import CLEAN_ROW, FIRST_ROW, SPARE_ROW, starts_of, store_io
from models.tokenization import Encoded
from tests.training.reference import (
    LiteralNetwork,
    Text,
    Weights,
    random_texts,
    random_weights,
    small_architecture,
)
from tests.training.test_graphs import CUTS, EVERY_CUT, LENGTHS
from training.device_graphs import device_segment
from training.evaluate import GraphRunner
from training.export import dequantised_weights
from training.graphs import build_segments

# Operators of these graphs: each has a CUDA kernel for the types used here (ONNX Runtime, docs/OperatorKernels.md) that
# can be captured.
ON_CUDA = set(
    "Add BiasGelu Cast Concat Gather Gemm LayerNormalization MatMul Max MultiHeadAttention Relu ScatterND "
    "SkipLayerNormalization Squeeze Sub Tanh Unsqueeze".split()
)


def logits(architecture: Architecture, paths: Sequence[Path], texts: Sequence[Text]) -> np.ndarray:
    """Logits ``[E, N, K]`` of texts that run together."""
    encoded = [Encoded(text.ids, text.types, len(text.ids)) for text in texts]
    return np.stack(list(GraphRunner(paths, architecture, threads=1).run(encoded)))


def expected(architecture: Architecture, weights: Weights, texts: Sequence[Text]) -> np.ndarray:
    network = LiteralNetwork(architecture, weights)
    return np.stack([network.logits(text.ids, text.types) for text in texts], axis=1)


@EVERY_CUT
def test_every_exit_gives_the_logits_of_the_formulas(cut: str, family: dict[str, object], tmp_path: Path) -> None:
    architecture = small_architecture(CUTS[cut], **family)
    weights = random_weights(architecture)
    texts = random_texts(LENGTHS)
    wanted = expected(architecture, weights, texts)
    # The layout is exact; the rest is the rounding of halves, on weights drawn larger than a trained network's.
    model = [device_segment(architecture, weights, spec.number, "float32") for spec in architecture.exits]
    np.testing.assert_allclose(run_models(model, architecture, texts), wanted, rtol=0, atol=1e-5)
    halves = logits(architecture, build_segments(architecture, weights, "fp16", tmp_path), texts)
    assert halves.dtype == np.float32
    np.testing.assert_allclose(halves, wanted, rtol=0, atol=3e-2)


def run_models(models: Sequence[onnx.ModelProto], architecture: Architecture, texts: Sequence[Text]) -> np.ndarray:
    """Logits ``[E, N, K]`` in float32, the texts in places longer than any of them and one place empty."""
    longest, places = max(len(text.ids) for text in texts) + 2, len(texts) + 1
    rows, ids, types = (np.zeros((places, longest), np.int32) for _ in range(3))
    at = FIRST_ROW
    for row, text in enumerate(texts):
        length = len(text.ids)
        rows[row, :length] = np.arange(at, at + length)
        ids[row, :length], types[row, :length] = text.ids, text.types
        at += length
    store = np.zeros((at, architecture.hidden_size), np.float32)
    arrays = {
        "rows": rows,
        "lengths": np.array([len(text.ids) for text in texts] + [1], np.int32),
        "starts": starts_of(places, longest),
        "input_ids": ids,
        "token_type_ids": types,
        "position_ids": np.minimum(
            np.arange(longest, dtype=np.int32)[None] + architecture.position_offset,
            architecture.position_offset + architecture.max_length - 1,
        ).astype(np.int32),
    }
    found = []
    for number, model in enumerate(models, start=1):
        inputs, outputs = store_io(architecture, number)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        feeds = {name: store if name.startswith("into_") else arrays[name] for name in inputs}
        answer, *state = session.run(list(outputs), feeds)
        for name, array in zip(outputs[1:], state, strict=True):
            assert not array[CLEAN_ROW].any()
            arrays[name.removeprefix("next_")] = array
        found.append(answer[: len(texts)])
    return np.stack(found)


def test_a_text_is_the_same_alone_and_in_longer_company(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    paths = build_segments(architecture, random_weights(architecture), "fp16", tmp_path)
    texts = random_texts(LENGTHS)
    together = logits(architecture, paths, texts)
    for row, text in enumerate(texts):
        np.testing.assert_allclose(logits(architecture, paths, [text])[:, 0], together[:, row], rtol=0, atol=1e-3)


def test_a_poisoned_text_stays_alone_even_in_the_padding(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    weights = random_weights(architecture)
    clean = [device_segment(architecture, weights, spec.number, "float32") for spec in architecture.exits]
    texts = random_texts((7, 12, 3))
    poisoned = texts[2].ids[1]
    weights["embeddings.word"][poisoned] = np.nan
    broken = device_segment_with_nan(architecture, weights)
    others = [text for text in texts if poisoned not in text.ids]
    assert len(others) == 2
    found = run_models([broken, *clean[1:]], architecture, [texts[2], *others])
    assert np.isnan(found[:, 0]).all()
    np.testing.assert_allclose(found[:, 1:], run_models(clean, architecture, others), rtol=0, atol=1e-6)


def device_segment_with_nan(architecture: Architecture, weights: Weights) -> onnx.ModelProto:
    """Weights that are not finite are refused, so they are put into the finished graph."""
    table = weights["embeddings.word"]
    model = device_segment(architecture, {**weights, "embeddings.word": np.nan_to_num(table)}, 1, "float32")
    for tensor in model.graph.initializer:
        if tensor.name == "embeddings.word.table":
            tensor.CopyFrom(onnx.numpy_helper.from_array(table, tensor.name))
    return model


def test_they_are_valid_and_have_the_names_of_the_contract(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    paths = build_segments(architecture, random_weights(architecture), "fp16", tmp_path)
    for number, path in enumerate(paths, start=1):
        model = onnx.load(path)
        onnx.checker.check_model(model)
        names = tuple(e.name for e in model.graph.input), tuple(e.name for e in model.graph.output)
        assert names == store_io(architecture, number)


@pytest.mark.parametrize("cut", CUTS)
def test_all_operators_have_cuda_kernels_and_none_branches(cut: str, tmp_path: Path) -> None:
    architecture = small_architecture(CUTS[cut])
    for path in build_segments(architecture, random_weights(architecture), "fp16", tmp_path):
        assert {node.op_type for node in onnx.load(path).graph.node} <= ON_CUDA


def test_a_weight_beyond_the_range_of_halves_is_named(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["cls"])
    weights = random_weights(architecture)
    weights["layers.1.output.weight"][3, 4] = 1e5
    with pytest.raises(ValueError, match=r"^weight layers\.1\.output\.weight .*float16's range$"):
        build_segments(architecture, weights, "fp16", tmp_path)


def test_weights_come_back_from_fp16_graphs_rounded_to_halves(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    weights = random_weights(architecture)
    back = dequantised_weights(architecture, build_segments(architecture, weights, "fp16", tmp_path))
    assert back.keys() == weights.keys()
    for name, array in back.items():
        assert array.dtype == np.float32
        np.testing.assert_allclose(array, weights[name], rtol=1e-3, atol=1e-7)


def test_rows_for_padding_are_those_before_the_first_text() -> None:
    assert sorted({CLEAN_ROW, SPARE_ROW}) == list(range(FIRST_ROW))
