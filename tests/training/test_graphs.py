"""The graphs say what the network says, in every layout a batch can have."""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import numpy_helper

from models.architecture import Architecture, ExitSpec, Head
from models.bundle import READ, Precision, segment_io, state_names
from tests.training.reference import (
    LiteralNetwork,
    SegmentRunner,
    Text,
    Weights,
    packed_feed,
    padded_feed,
    random_texts,
    random_weights,
    small_architecture,
)
from training.graphs import TABLE_LEVELS, WEIGHT_LEVELS, build_segments, quantise_rows

# From one token to the maximum of 24, none sorted.
LENGTHS = (7, 1, 24, 2, 13, 3)

CUTS: dict[str, list[tuple[int, Head]]] = {
    "cls": [(1, "cls"), (2, "cls"), (4, "cls")],
    "mean": [(0, "mean"), (1, "mean"), (3, "mean"), (4, "mean")],
    "attention": [(0, "attention"), (2, "attention"), (4, "attention")],
    "peek": [(0, "peek"), (1, "peek"), (2, "peek"), (3, "peek")],
    "mixed": [(0, "peek"), (1, "cls"), (2, "peek"), (3, "attention"), (4, "mean")],
    "peek then the last row": [(0, "cls"), (3, "peek"), (4, "cls")],
    "merged": [(2, "mean"), (4, "cls")],
    "one exit": [(4, "cls")],
    "no layer": [(0, "cls")],
}
BERT: dict[str, object] = {}
ROBERTA: dict[str, object] = {"position_offset": 2, "uses_token_type_ids": False, "layer_norm_eps": 1e-5}
ELECTRA: dict[str, object] = {"embedding_size": 16}
EVERY_CUT = pytest.mark.parametrize(
    ("cut", "family"),
    [*((cut, BERT) for cut in CUTS), ("cls", ROBERTA), ("mixed", ROBERTA), ("mixed", ELECTRA)],
    ids=[*CUTS, "cls roberta", "mixed roberta", "mixed electra"],
)


def runner(architecture: Architecture, weights: Weights, precision: Precision, folder: Path) -> SegmentRunner:
    return SegmentRunner(architecture, build_segments(architecture, weights, precision, folder))


def expected(architecture: Architecture, weights: Weights, texts: Sequence[Text]) -> list[np.ndarray]:
    network = LiteralNetwork(architecture, weights)
    return [np.stack(rows) for rows in zip(*(network.logits(t.ids, t.types) for t in texts), strict=True)]


def assert_close(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray], tolerance: float) -> None:
    assert len(found) == len(wanted)
    for number, (ours, theirs) in enumerate(zip(found, wanted, strict=True), start=1):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=tolerance, err_msg=f"exit {number}")


@EVERY_CUT
def test_every_exit_gives_the_logits_of_the_formulas(cut: str, family: dict[str, object], tmp_path: Path) -> None:
    architecture = small_architecture(CUTS[cut], **family)
    weights = random_weights(architecture)
    texts = random_texts(LENGTHS)
    run = runner(architecture, weights, "fp32", tmp_path)
    wanted = expected(architecture, weights, texts)
    assert_close(run.alone(texts), wanted, 1e-5)
    assert_close(run.padded(texts), wanted, 1e-5)
    assert_close(run.packed(texts), wanted, 1e-5)


def test_relu_networks_are_exported_too(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"], activation="relu")
    weights, texts = random_weights(architecture), random_texts(LENGTHS)
    wanted = expected(architecture, weights, texts)
    assert_close(runner(architecture, weights, "fp32", tmp_path / "fp32").padded(texts), wanted, 1e-5)
    in_integers = runner(architecture, weights, "int8", tmp_path / "int8")
    assert_close(in_integers.padded(texts), wanted, 0.5)
    assert_close(in_integers.packed(texts), in_integers.alone(texts), 1e-6)


@pytest.mark.parametrize("cut", CUTS)
def test_int8_gives_a_text_the_same_logits_alone_padded_and_packed(cut: str, tmp_path: Path) -> None:
    # Not nearly the same: a last bit that differs flips roundings, and the flips grow from layer to layer. Only the
    # classifier's float sums may differ, by a last bit of the logits.
    architecture = small_architecture(CUTS[cut])
    run = runner(architecture, random_weights(architecture), "int8", tmp_path)
    texts = random_texts(LENGTHS)
    alone = run.alone(texts)
    assert_close(run.padded(texts), alone, 1e-6)
    assert_close(run.packed(texts), alone, 1e-6)


@pytest.fixture(scope="module")
def mixed_int8(tmp_path_factory: pytest.TempPathFactory) -> SegmentRunner:
    architecture = small_architecture(CUTS["mixed"])
    return runner(architecture, random_weights(architecture), "int8", tmp_path_factory.mktemp("mixed"))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(lengths=st.lists(st.integers(1, 24), min_size=1, max_size=7), seed=st.integers(0, 1000))
def test_no_company_changes_a_text(mixed_int8: SegmentRunner, lengths: list[int], seed: int) -> None:
    texts = random_texts(lengths, seed=seed)
    alone = mixed_int8.alone(texts)
    assert_close(mixed_int8.packed(texts), alone, 1e-6)
    assert_close(mixed_int8.padded(texts), alone, 1e-6)


def test_int8_at_real_head_widths_is_the_same_in_any_company(tmp_path: Path) -> None:
    # Kernels change with sizes: heads of 32 and texts beyond 128 tokens, where matrix products are cut into blocks.
    architecture = small_architecture(
        [(0, "peek"), (1, "mean"), (2, "cls")],
        num_layers=2,
        hidden_size=128,
        embedding_size=128,
        intermediate_size=256,
        max_length=300,
    )
    run = runner(architecture, random_weights(architecture), "int8", tmp_path)
    texts = random_texts((300, 5, 131, 64, 17))
    alone = run.alone(texts)
    assert_close(run.padded(texts), alone, 1e-6)
    assert_close(run.packed(texts), alone, 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_several_packed_rows_work_too(precision: Precision, tmp_path: Path) -> None:
    # Row 1 holds two texts, row 2 one: text 2 of row 2 is missing, and its logits mean nothing.
    architecture = small_architecture(CUTS["mixed"])
    run = runner(architecture, random_weights(architecture), precision, tmp_path)
    texts = random_texts((5, 9, 11))
    rows = [packed_feed(architecture, texts[:2]), packed_feed(architecture, texts[2:])]
    feed = {
        name: np.concatenate([np.pad(row[name], ((0, 0), (0, 14 - row[name].shape[1]))) for row in rows])
        for name in rows[0]
    }
    logits = run.run(feed)
    assert all(np.isfinite(found).all() for found in logits)
    assert_close([found[:3] for found in logits], run.alone(texts), 1e-6)


def test_columns_of_padding_only_change_nothing(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    texts = random_texts(LENGTHS)
    for precision in ("fp32", "int8"):
        run = runner(architecture, random_weights(architecture), precision, tmp_path / precision)
        assert_close(run.run(padded_feed(architecture, texts, extra=9)), run.padded(texts), 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_row_of_padding_only_is_finite_and_leaves_the_others_alone(precision: Precision, tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    run = runner(architecture, random_weights(architecture), precision, tmp_path)
    texts = random_texts((5, 9, 4))
    for empty in range(3):
        feed = padded_feed(architecture, texts)
        feed["attention_mask"][empty] = 0
        others = [row for row in range(3) if row != empty]
        logits = run.run(feed)
        assert all(np.isfinite(rows).all() for rows in logits)
        assert_close([rows[others] for rows in logits], [rows[others] for rows in run.padded(texts)], 1e-6)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_poisoned_text_stays_alone(precision: Precision, tmp_path: Path) -> None:
    # The state of one text turns NaN between two segments (in life: an overflow); its neighbours' doesn't.
    architecture = small_architecture([(1, "mean"), (4, "mean")])
    run = runner(architecture, random_weights(architecture), precision, tmp_path)
    texts = random_texts((5, 9, 4))
    clean = run.packed(texts)[1]
    feed = packed_feed(architecture, texts)
    hidden = run.sessions[0].run(["next_hidden"], feed)[0]
    hidden[0, feed["attention_mask"][0] == 2] = np.nan
    poisoned = run.sessions[1].run(["logits"], {"hidden": hidden, "attention_mask": feed["attention_mask"]})[0]
    np.testing.assert_allclose(poisoned[[0, 2]], clean[[0, 2]], rtol=0, atol=1e-6)


def test_int8_stays_close_to_the_exact_network(tmp_path: Path) -> None:
    # Random weights are the hard case: nothing trained them to have margins. Every exit must agree on at least 90 % of
    # labels, and the mean error of its logits stay below a tenth of their spread.
    architecture = small_architecture(CUTS["mixed"], hidden_size=64, embedding_size=64, intermediate_size=256)
    weights = random_weights(architecture)
    texts = random_texts([3 + n % 22 for n in range(120)])
    exact = runner(architecture, weights, "fp32", tmp_path / "fp32").padded(texts)
    integers = runner(architecture, weights, "int8", tmp_path / "int8").padded(texts)
    for wanted, found in zip(exact, integers, strict=True):
        assert (wanted.argmax(1) == found.argmax(1)).mean() >= 0.9
        assert np.abs(wanted - found).mean() < 0.1 * wanted.std()
        assert not np.array_equal(wanted, found)


def test_rows_of_zeros_are_not_divided_by_zero(tmp_path: Path) -> None:
    # Norms without gain and shift turn every hidden state into zeros, the attention's output included.
    architecture = small_architecture(CUTS["mixed"])
    weights = random_weights(architecture)
    for name in weights:
        if "norm" in name or name.endswith((".value.bias", ".pool_query")):
            weights[name] = np.zeros_like(weights[name])
    texts = random_texts((5, 9))
    wanted = expected(architecture, weights, texts)
    found = runner(architecture, weights, "int8", tmp_path).padded(texts)
    assert_close(found, wanted, 0.02)


def test_integer_products_do_not_saturate(tmp_path: Path) -> None:
    # Every activation and every weight at its extreme: sums of two products must still fit into 16 bits. One class sums
    # all inputs, the other the same with the opposite sign.
    architecture = small_architecture([(0, "cls")], hidden_size=64, embedding_size=64, intermediate_size=64)
    weights = random_weights(architecture)
    weights["embeddings.norm.weight"] = np.zeros(64, np.float32)
    weights["embeddings.norm.bias"] = np.ones(64, np.float32)
    signs = np.where(np.arange(64) % 2, 1, -1)[:, None]
    weights["exits.1.dense.weight"] = (signs * np.full((64, 64), 0.01)).astype(np.float32)
    weights["exits.1.dense.bias"] = np.zeros(64, np.float32)
    texts = random_texts((4,))
    assert_close(
        runner(architecture, weights, "int8", tmp_path).alone(texts), expected(architecture, weights, texts), 1e-4
    )


def ops(path: Path) -> Counter[str]:
    """Operators of a graph, those of its branches included."""
    nodes = list(onnx.load(path).graph.node)
    for node in nodes:
        nodes.extend(inner for attribute in node.attribute for inner in attribute.g.node)
    return Counter(node.op_type for node in nodes)


def test_attention_norms_and_gelu_are_fused(tmp_path: Path) -> None:
    # Segment 1 is peek exit 0 (one row through layer 1), segment 2 the rest of layer 1 for all tokens and a [CLS] row,
    # segment 3 layers 2 to 4 with the last one for one row only.
    architecture = small_architecture([(0, "peek"), (1, "cls"), (4, "cls")])
    fp32 = build_segments(architecture, random_weights(architecture), "fp32", tmp_path / "fp32")
    int8 = build_segments(architecture, random_weights(architecture), "int8", tmp_path / "int8")
    for paths in (fp32, int8):
        found = [ops(path) for path in paths]
        # The mean of a peek is one attention with a query of zeros.
        assert [count["MultiHeadAttention"] for count in found] == [2, 1, 3]
        assert [count["BiasGelu"] for count in found] == [1, 1, 3]
        assert [count["LayerNormalization"] for count in found] == [3, 2, 6]
        assert not any(count["Softmax"] or count["Erf"] or count["Sqrt"] for count in found)
    # Linear layers: query, key, value, output, two of the feed-forward, each once per layer; dense and classifier.
    assert [ops(path)["MatMul"] + ops(path)["Gemm"] for path in fp32] == [6 + 2, 4 + 2, 18 + 2]
    assert [ops(path)["MatMulIntegerToFloat"] for path in int8] == [6 + 1, 4 + 1, 18 + 1]
    # Query, key and value share one quantised activation: 4 to a layer, 1 of the head (and 1 more of a peek's row).
    assert [ops(path)["QuantizeLinear"] for path in int8] == [5 + 1, 4 + 1, 13 + 1]


def test_the_optimiser_leaves_norms_unfused(tmp_path: Path) -> None:
    # On CPUs SkipLayerNormalization takes six times the time of Add and LayerNormalization.
    architecture = small_architecture([(4, "cls")])
    (path,) = build_segments(architecture, random_weights(architecture), "fp32", tmp_path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    assert ops(tmp_path / "optimised.onnx")["LayerNormalization"] == 9


@pytest.mark.parametrize(("cut", "layer"), [("cls", 3), ("peek", 3), ("peek then the last row", 3)])
def test_the_last_exit_computes_one_row_of_its_last_layer(cut: str, layer: int, tmp_path: Path) -> None:
    architecture = small_architecture(CUTS[cut])
    path = build_segments(architecture, random_weights(architecture), "fp32", tmp_path)[-1]
    model = onnx.load(path)
    products = [n for n in model.graph.node if f"layers.{layer}.intermediate.weight.T" in n.input]
    assert len(products) == 1
    model.graph.output.append(onnx.helper.make_empty_tensor_value_info(products[0].output[0]))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    draw = np.random.default_rng(0)
    feed = {
        entry.name: np.ones((2, 6), np.int64)
        if entry.name == "attention_mask"
        else draw.standard_normal((2, 6, 32)).astype(np.float32)
        for entry in session.get_inputs()
    }
    assert session.run([products[0].output[0]], feed)[0].shape == (2, 64)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_graphs_are_valid_and_have_the_names_of_the_contract(precision: Precision, tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    paths = build_segments(architecture, random_weights(architecture), precision, tmp_path)
    assert [path.name for path in paths] == [f"segment_{number}.onnx" for number in range(1, 6)]
    for number, path in enumerate(paths, start=1):
        model = onnx.load(path)
        onnx.checker.check_model(model)
        names = tuple(e.name for e in model.graph.input), tuple(e.name for e in model.graph.output)
        inputs, outputs = segment_io(architecture, number)
        optional = () if number == 5 else (READ,)
        assert names == (inputs + optional, outputs)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
@pytest.mark.parametrize("cut", CUTS)
def test_an_exit_passed_unread_leaves_the_same_state_and_no_logits(
    cut: str, precision: Precision, tmp_path: Path
) -> None:
    architecture = small_architecture(CUTS[cut])
    paths = build_segments(architecture, random_weights(architecture), precision, tmp_path)
    draw, mask = np.random.default_rng(0), np.array([[1, 1, 1, 2, 2]])
    state: dict[str, Any] = {
        "input_ids": draw.integers(0, architecture.vocab_size, (1, 5)),
        "position_ids": np.array([[0, 1, 2, 0, 1]]) + architecture.position_offset,
        "token_type_ids": np.zeros((1, 5), np.int64),
    }
    for number, path in enumerate(paths[:-1], start=1):
        inputs, outputs = segment_io(architecture, number)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        feed = {name: mask if name == "attention_mask" else state[name] for name in inputs}
        logits, *read = session.run(list(outputs), feed)
        nothing, *passed = session.run(list(outputs), feed | {READ: np.array(False)})
        assert logits.shape == (2, architecture.num_labels)
        assert nothing.shape == (0, architecture.num_labels)
        for one, other in zip(read, passed, strict=True):
            np.testing.assert_array_equal(one, other)
        state = dict(zip(state_names(architecture, number), read, strict=True))


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_same_weights_same_bytes(precision: Precision, tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    first, second = (
        [
            path.read_bytes()
            for path in build_segments(architecture, random_weights(architecture), precision, tmp_path / name)
        ]
        for name in ("first", "second")
    )
    assert first == second


def test_integers_keep_within_their_levels(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    largest: dict[str, int] = {}
    for path in build_segments(architecture, random_weights(architecture), "int8", tmp_path):
        for tensor in onnx.load(path).graph.initializer:
            if tensor.name.endswith(".int8"):
                array = numpy_helper.to_array(tensor).astype(int)
                kind = "table" if tensor.name.endswith("table.int8") else "weight"
                largest[kind] = max(largest.get(kind, 0), int(np.abs(array).max()))
    assert largest == {"weight": WEIGHT_LEVELS, "table": TABLE_LEVELS}
    assert np.iinfo(np.int16).max >= 255 * WEIGHT_LEVELS * 2


def test_quantised_rows_are_within_half_a_step() -> None:
    array = np.random.default_rng(0).standard_normal((6, 50)).astype(np.float32)
    array[2] = 0
    quantised = quantise_rows(array, 63)
    error = np.abs(quantised.values * quantised.scale[:, None] - array)
    assert (error <= quantised.scale[:, None] * 0.5001).all()
    assert (quantised.values[2] == 0).all()
    assert np.isfinite(quantised.scale).all()


def test_minilm_in_int8_takes_23_megabytes(tmp_path: Path) -> None:
    architecture = minilm([(1, "mean"), (2, "mean"), (3, "mean"), (4, "mean"), (5, "mean"), (6, "cls")])
    paths = build_segments(architecture, random_weights(architecture), "int8", tmp_path)
    # 22.6 million parameters and six heads of 0.15 million.
    assert 22e6 < sum(path.stat().st_size for path in paths) < 24e6


def minilm(exits: list[tuple[int, Head]]) -> Architecture:
    return small_architecture(
        exits,
        num_layers=6,
        hidden_size=384,
        embedding_size=384,
        num_heads=12,
        intermediate_size=1536,
        vocab_size=30522,
        max_length=512,
        num_labels=2,
    )


def test_a_weight_that_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    good = random_weights(architecture)
    without = {name: array for name, array in good.items() if name != "layers.1.key.bias"}
    with pytest.raises(ValueError, match=r"^weight layers\.1\.key\.bias is missing$"):
        build_segments(architecture, without, "fp32", tmp_path)
    turned = {**good, "layers.0.intermediate.weight": good["layers.0.intermediate.weight"].T}
    with pytest.raises(
        ValueError, match=r"^weight layers\.0\.intermediate\.weight has shape \[32, 64\], not \[64, 32\]$"
    ):
        build_segments(architecture, turned, "int8", tmp_path)
    short = {**good, "embeddings.position": good["embeddings.position"][:20]}
    with pytest.raises(ValueError, match=r"^weight embeddings\.position has shape \[20, 32\], not \[24, 32\]$"):
        build_segments(architecture, short, "int8", tmp_path)
    broken = {**good, "exits.2.dense.bias": np.full(32, np.nan, np.float32)}
    with pytest.raises(ValueError, match=r"^weight exits\.2\.dense\.bias holds values that are not finite$"):
        build_segments(architecture, broken, "int8", tmp_path)
    assert not list(tmp_path.iterdir())


# --- against torch and transformers -----------------------------------------------------------------------------------


@pytest.fixture
def one_torch_thread() -> Iterator[None]:
    # Tensors this small gain nothing from a second thread, which on a busy machine costs seconds.
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("family", [BERT, ROBERTA, ELECTRA], ids=["bert", "roberta", "electra"])
def test_every_exit_gives_the_logits_of_the_torch_network(family: dict[str, object], tmp_path: Path) -> None:
    from models.network import MultiExitNetwork

    architecture = small_architecture(CUTS["mixed"], **family)
    torch.manual_seed(0)
    network = MultiExitNetwork(architecture, position_rows=architecture.max_length + architecture.position_offset)
    network.eval()
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.endswith("pool_query"):
                parameter.normal_()
            elif name.endswith("classifier.weight"):
                parameter.normal_(std=0.2)
    texts = random_texts(LENGTHS)
    feed = padded_feed(architecture, texts)
    with torch.no_grad():
        found = network(*(torch.tensor(feed[n]) for n in ("input_ids", "attention_mask", "token_type_ids")))
    wanted = [found[spec.number].logits.numpy() for spec in architecture.exits]
    weights = network.numpy_weights()
    assert_close(runner(architecture, weights, "fp32", tmp_path / "fp32").padded(texts), wanted, 1e-5)
    in_integers = runner(architecture, weights, "int8", tmp_path / "int8")
    assert_close(in_integers.padded(texts), wanted, 0.1)
    assert_close(in_integers.packed(texts), in_integers.alone(texts), 1e-6)


@pytest.mark.usefixtures("one_torch_thread")
@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_hidden_states_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    from transformers import BertConfig, BertModel, RobertaConfig, RobertaModel

    from models.network import canonical_weights

    sizes = {
        "vocab_size": 100,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "initializer_range": 0.3,
    }
    torch.manual_seed(0)
    if kind == "bert":
        model = BertModel(BertConfig(**sizes, max_position_embeddings=24)).eval()
        offset = 0
    else:
        config = RobertaConfig(**sizes, max_position_embeddings=26, pad_token_id=1, type_vocab_size=1)
        model = RobertaModel(config).eval()
        offset = 2
    state = canonical_weights(dict(model.state_dict()))
    weights: Weights = {
        name.removesuffix(".weight") if name.startswith("embeddings.") and "norm" not in name else name: array.numpy()
        for name, array in state.items()
    }
    uses_types = kind == "bert"
    if not uses_types:
        weights["embeddings.position"] = weights["embeddings.position"] + weights.pop("embeddings.token_type")[0]
    exits = tuple(ExitSpec(number=n, after_layer=n - 1, head="mean") for n in range(1, 5))
    architecture = small_architecture(
        [(0, "mean")], num_layers=3, position_offset=offset, uses_token_type_ids=uses_types
    ).model_copy(update={"exits": exits})
    heads = random_weights(architecture)
    weights |= {name: array for name, array in heads.items() if name.startswith("exits.")}
    run = runner(architecture, weights, "fp32", tmp_path)

    texts = [Text([2 + token % 98 for token in text.ids], text.types) for text in random_texts(LENGTHS)]
    feed = padded_feed(architecture, texts)
    real = feed["attention_mask"].astype(bool)
    ids = np.where(real, feed["input_ids"], 1)
    inputs = {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(feed["attention_mask"])}
    if uses_types:
        inputs["token_type_ids"] = torch.tensor(feed["token_type_ids"])
    with torch.no_grad():
        theirs = [state.numpy() for state in model(**inputs, output_hidden_states=True).hidden_states]

    state = dict(feed)
    for number, session in enumerate(run.sessions[:-1], start=1):
        inputs_of = segment_io(architecture, number)[0]
        hidden = session.run(["next_hidden"], {name: state[name] for name in inputs_of})[0]
        np.testing.assert_allclose(hidden[real], theirs[number - 1][real], rtol=0, atol=1e-5)
        state["hidden"] = hidden


def test_threads_change_nothing_that_can_be_seen(tmp_path: Path) -> None:
    architecture = small_architecture(CUTS["mixed"])
    paths = build_segments(architecture, random_weights(architecture), "int8", tmp_path)
    texts = random_texts(LENGTHS)
    one, two = SegmentRunner(architecture, paths, threads=1), SegmentRunner(architecture, paths, threads=2)
    assert_close(two.packed(texts), one.alone(texts), 1e-6)


def test_every_combination_of_neighbouring_heads_passes_its_state_on(tmp_path: Path) -> None:
    heads: tuple[Head, ...] = ("cls", "mean", "attention", "peek")
    texts = random_texts((5, 3))
    for first, second in itertools.product(heads, repeat=2):
        architecture = small_architecture([(0, first), (1, second), (2, "mean")], num_layers=2)
        weights = random_weights(architecture)
        run = runner(architecture, weights, "fp32", tmp_path / f"{first}-{second}")
        assert_close(run.padded(texts), expected(architecture, weights, texts), 1e-5)
