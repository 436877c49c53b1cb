"""Choosing exits, writing graphs, and reading weights back from them."""

from pathlib import Path

import numpy as np
import pytest

from models.architecture import Head
from tests.training.reference import (
    LiteralNetwork,
    SegmentRunner,
    random_texts,
    random_weights,
    small_architecture,
)
from training.export import dequantised_weights, export_graphs, select_exits

EXITS: list[tuple[int, Head]] = [(0, "peek"), (1, "cls"), (2, "peek"), (3, "attention"), (4, "mean")]


@pytest.mark.parametrize("keep", [[2, 4], [5], [1, 3], [5, 1, 3], [1, 2, 3, 4, 5]])
def test_kept_exits_answer_as_before(keep: list[int], tmp_path: Path) -> None:
    architecture = small_architecture(EXITS)
    weights = random_weights(architecture)
    chosen, chosen_weights = select_exits(architecture, weights, keep)
    assert [spec.number for spec in chosen.exits] == list(range(1, len(keep) + 1))
    paths = export_graphs(chosen, chosen_weights, tmp_path, ["fp32"])["fp32"]
    text = random_texts((11,))[0]
    everything = LiteralNetwork(architecture, weights).logits(text.ids, text.types)
    for number, logits in zip(sorted(keep), SegmentRunner(chosen, paths).alone([text]), strict=True):
        np.testing.assert_allclose(logits[0], everything[number - 1], rtol=0, atol=1e-5)


def test_layers_beyond_the_deepest_kept_exit_are_dropped() -> None:
    architecture = small_architecture(EXITS)
    weights = random_weights(architecture)
    # The peek after layer 2 looks into layer 3 (index 2), so that one stays.
    chosen, chosen_weights = select_exits(architecture, weights, [1, 3])
    assert chosen.num_layers == 3
    assert "layers.2.output.weight" in chosen_weights
    assert not any(name.startswith("layers.3") for name in chosen_weights)
    assert {name.split(".")[1] for name in chosen_weights if name.startswith("exits")} == {"1", "2"}
    assert chosen_weights["exits.2.dense.weight"] is weights["exits.3.dense.weight"]


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ([], "at least one"),
        ([2, 6], "6 is not one of the trained exits 1 to 5"),
        ([0], "0 is not one of the trained exits 1 to 5"),
        ([2, 2], "2 is named twice"),
    ],
)
def test_exits_that_are_not_there_are_refused(keep: list[int], message: str) -> None:
    architecture = small_architecture(EXITS)
    with pytest.raises(ValueError, match=message):
        select_exits(architecture, random_weights(architecture), keep)


def test_each_precision_has_its_own_folder(tmp_path: Path) -> None:
    architecture = small_architecture(EXITS)
    paths = export_graphs(architecture, random_weights(architecture), tmp_path)
    assert paths == {
        name: [tmp_path / name / f"segment_{number}.onnx" for number in range(1, 6)] for name in ("fp32", "int8")
    }
    assert all(path.is_file() for files in paths.values() for path in files)


def test_weights_come_back_from_fp32_graphs_bit_by_bit(tmp_path: Path) -> None:
    architecture = small_architecture(EXITS, embedding_size=16)
    weights = random_weights(architecture)
    back = dequantised_weights(architecture, export_graphs(architecture, weights, tmp_path, ["fp32"])["fp32"])
    assert back.keys() == weights.keys()
    assert all(np.array_equal(back[name], weights[name]) for name in weights)


def test_weights_from_int8_graphs_build_the_same_int8_network_again(tmp_path: Path) -> None:
    architecture = small_architecture(EXITS)
    weights = random_weights(architecture)
    first = export_graphs(architecture, weights, tmp_path / "first", ["int8"])["int8"]
    back = dequantised_weights(architecture, first)
    assert back.keys() == weights.keys()
    for name in weights:
        step = np.abs(weights[name]).max() / 63
        np.testing.assert_allclose(back[name], weights[name], rtol=0, atol=0.51 * step)
    again = export_graphs(architecture, back, tmp_path / "again", ["int8"])["int8"]
    texts = random_texts((7, 12, 3))
    for one, other in zip(
        SegmentRunner(architecture, first).padded(texts), SegmentRunner(architecture, again).padded(texts), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-4)
