"""Exported graphs run as the server runs them, and what a split says is what a loop over its texts says."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx import numpy_helper
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from models.architecture import Architecture, ExitSpec
from models.bundle import Bundle, PrecisionCalibration, Tier, write_bundle
from models.costs import exit_costs
from models.exits import Policy, first_exit
from models.tokenization import Encoded, TextEncoder
from tests.training.reference import random_weights, small_architecture
from tests.training.synthetic import architecture, draw
from training.calibrate import Split, SplitLogits, calibrate
from training.data import DataError, Example, Table, tokenize
from training.evaluate import (
    GraphError,
    accuracy_gap,
    curve,
    evaluate,
    evaluate_bundle,
    exit_scores,
    length_batches,
    measure,
    run_bundle,
    run_graphs,
    score,
    standard_error,
)
from training.export import export_graphs

HIDDEN, LABELS, VOCAB, LENGTH = 8, 3, 20, 12
TINY = Architecture(
    backbone="tiny",
    num_layers=2,
    hidden_size=HIDDEN,
    embedding_size=HIDDEN,
    num_heads=2,
    intermediate_size=16,
    vocab_size=VOCAB,
    max_length=LENGTH,
    layer_norm_eps=1e-12,
    position_offset=2,
    num_labels=LABELS,
    exits=(ExitSpec(number=1, after_layer=0, head="mean"), ExitSpec(number=2, after_layer=1, head="mean")),
)


# --- metrics ---------------------------------------------------------------------------------------------------------


def correlation(one: np.ndarray, other: np.ndarray, classes: int) -> float:
    """Gorodkin's R_K: the correlation of the indicator vectors, class by class, summed."""
    x, y = np.eye(classes)[one], np.eye(classes)[other]

    def covariance(a: np.ndarray, b: np.ndarray) -> float:
        return float(((a - a.mean(axis=0)) * (b - b.mean(axis=0))).sum())

    return covariance(x, y) / np.sqrt(covariance(x, x) * covariance(y, y))


def test_an_answer_from_logits_that_were_not_finite_is_wrong_and_no_class() -> None:
    labels, predictions = np.array([0, 1, 1, 0]), np.array([0, 1, -1, -1])
    assert score("accuracy", predictions, labels) == pytest.approx(0.5)
    assert score("f1", predictions, labels) == pytest.approx(2 / 3)
    # A third answer that is never right.
    assert score("matthews", predictions, labels) == pytest.approx(correlation(np.array([0, 1, 2, 2]), labels, 3))


def test_the_standard_error_is_what_resampling_the_texts_gives() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(2, size=500)
    predictions = np.where(rng.random(500) < 0.8, labels, 1 - labels)
    for name in ("accuracy", "matthews", "f1"):
        resampled = [score(name, predictions[i], labels[i]) for i in rng.integers(500, size=(1000, 500))]
        assert standard_error(name, predictions, labels) == pytest.approx(np.std(resampled), rel=0.15)


def test_arrays_of_different_length_have_no_score() -> None:
    with pytest.raises(ValueError, match="differ in length: 3 and 2"):
        score("accuracy", np.zeros(3, dtype=np.int64), np.array([0, 1]))


# --- running graphs --------------------------------------------------------------------------------------------------


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    shapes = {
        "word": (VOCAB, HIDDEN),
        "position": (LENGTH + 2, HIDDEN),
        "type": (2, HIDDEN),
        "mix": (HIDDEN, HIDDEN),
        "head": (HIDDEN, LABELS),
    }
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


POOL = """
    mask_float = Cast <to = 1> (attention_mask)
    mask = Unsqueeze (mask_float, two)
    kept = Mul (STATE, mask)
    total = ReduceSum <keepdims = 0> (kept, one)
    count = ReduceSum <keepdims = 0> (mask, one)
    pooled = Div (total, count)
    logits = MatMul (pooled, head)
"""
FIRST = """<ir_version: 9, opset_import: ["": 17]>
first (int64[B, S] input_ids, int64[B, S] position_ids, int64[B, S] attention_mask, int64[B, S] token_type_ids)
    => (float[B, K] logits, float[B, S, H] next_hidden) {
    w = Gather (word, input_ids)
    p = Gather (position, position_ids)
    t = Gather (type, token_type_ids)
    next_hidden = Sum (w, p, t)
"""
SECOND = """<ir_version: 9, opset_import: ["": 17]>
second (float[B, S, H] hidden, int64[B, S] attention_mask) => (float[B, K] logits) {
    mixed = MatMul (hidden, mix)
    deeper = Tanh (mixed)
"""


def save_graphs(folder: Path, head: np.ndarray | None = None) -> list[Path]:
    """Two segments with the seams of a real model: embeddings, then a layer, each with a mean head."""
    values = weights() | {"one": np.array([1]), "two": np.array([2])}
    if head is not None:
        values["head"] = head
    paths = []
    for number, text in enumerate(
        (FIRST + POOL.replace("STATE", "next_hidden"), SECOND + POOL.replace("STATE", "deeper")), 1
    ):
        model = onnx.parser.parse_model(text + "}")
        used = {name for node in model.graph.node for name in node.input}
        model.graph.initializer.extend(numpy_helper.from_array(v, n) for n, v in values.items() if n in used)
        onnx.checker.check_model(model)
        paths.append(folder / f"segment_{number}.onnx")
        onnx.save(model, str(paths[-1]))
    return paths


def by_hand(text: Encoded) -> np.ndarray:
    """Logits ``[E, K]`` of one text alone, in NumPy."""
    w = weights()
    places = TINY.position_offset + np.arange(len(text))
    hidden = w["word"][text.ids] + w["position"][places] + w["type"][text.type_ids]
    return np.stack([hidden.mean(axis=0) @ w["head"], np.tanh(hidden @ w["mix"]).mean(axis=0) @ w["head"]])


def some_texts(n: int = 40) -> list[Encoded]:
    rng = np.random.default_rng(1)
    texts = []
    for length in rng.integers(1, LENGTH + 1, size=n):
        first = int(rng.integers(0, length + 1))
        types = [0] * first + [1] * (int(length) - first)
        texts.append(Encoded(rng.integers(VOCAB, size=length).tolist(), types, int(length)))
    return texts


@pytest.mark.parametrize("batch_tokens", [1, 30, 2048], ids=["alone", "small batches", "one batch"])
def test_every_text_gets_its_own_logits_in_the_order_given_in_any_company(tmp_path: Path, batch_tokens: int) -> None:
    texts = some_texts()
    finished: list[int] = []
    logits = run_graphs(
        save_graphs(tmp_path), TINY, texts, threads=1, batch_tokens=batch_tokens, progress=finished.append
    )
    assert logits.shape == (2, 40, LABELS)
    assert logits == pytest.approx(np.stack([by_hand(text) for text in texts], axis=1), abs=1e-5)
    assert sum(finished) == 40
    assert len(finished) == {1: 40, 2048: 1}.get(batch_tokens, len(finished))


def test_no_texts_give_no_logits(tmp_path: Path) -> None:
    assert run_graphs(save_graphs(tmp_path), TINY, []).shape == (2, 0, LABELS)


def test_batches_hold_like_lengths_and_stay_within_the_budget() -> None:
    lengths = np.random.default_rng(0).integers(1, 60, size=300).tolist()
    batches = length_batches(lengths, 256)
    assert sorted(np.concatenate(batches).tolist()) == list(range(300))
    sizes = [max(lengths[i] for i in batch) * len(batch) for batch in batches]
    assert max(sizes) <= 256
    padding = sum(sizes) - sum(lengths)
    assert padding < 0.1 * sum(lengths)
    assert [batch.tolist() for batch in length_batches([500, 3], 256)] == [[1], [0]]


def test_a_graph_that_is_not_the_one_of_its_segment_is_named(tmp_path: Path) -> None:
    paths = save_graphs(tmp_path)
    with pytest.raises(GraphError, match=r"segment_2\.onnx: inputs are \['attention_mask', 'hidden'\], not"):
        run_graphs(paths[::-1], TINY, some_texts(2))
    with pytest.raises(GraphError, match="1 graphs for 2 exits"):
        run_graphs(paths[:1], TINY, some_texts(2))
    paths[1].write_bytes(b"no graph at all")
    with pytest.raises(GraphError, match=r"segment_2\.onnx: ONNX Runtime cannot open it"):
        run_graphs(paths, TINY, some_texts(2))


def test_logits_of_another_width_are_found(tmp_path: Path) -> None:
    paths = save_graphs(tmp_path, head=np.zeros((HIDDEN, 5), dtype=np.float32))
    with pytest.raises(GraphError, match=r"segment_1\.onnx: logits of shape \[2, 5\], not \[2, 3\]"):
        run_graphs(paths, TINY, some_texts(2))


# --- a bundle of real graphs ----------------------------------------------------------------------------------------


WORDS = [f"w{number}" for number in range(97)]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Random weights, four layers, three exits, both precisions, calibrated on random texts."""
    folder = tmp_path_factory.mktemp("real")
    shape = small_architecture([(0, "peek"), (2, "mean"), (3, "peek")])
    tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(["[UNK]", "[CLS]", "[SEP]", *WORDS])}, "[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    graphs = export_graphs(shape, random_weights(shape), folder / "graphs", ("fp32", "int8"))
    encoder = TextEncoder(tokenizer, shape.max_length)
    splits = {name: tokenize(table(120, seed).examples, ("a", "b", "c"), encoder) for seed, name in enumerate("vr")}
    logits = {
        precision: SplitLogits(*(run_graphs(paths, shape, splits[name].texts, threads=1) for name in "vr"))
        for precision, paths in graphs.items()
    }
    parts = {name: Split(split.labels, np.array([len(text) for text in split.texts])) for name, split in splits.items()}
    manifest = {
        "name": "random",
        "version": "1",
        "task": "none",
        "labels": ["a", "b", "c"],
        "takes_pairs": False,
        "architecture": shape.model_dump(mode="json"),
        "exit_costs": [1.0, 2.0, 3.0],
        "mean_tokens": 8.0,
        "default_precision": "int8",
        "scores": [],
        "provenance": {},
        "licence": "none",
    }
    return write_bundle(
        folder / "bundle",
        manifest=manifest,
        calibration=calibrate(
            logits,
            shape,
            validation=parts["v"],
            risk=parts["r"],
            metric="accuracy",
            data_sha256="0" * 64,
            qualities=(0.5, 0.7),
            points=12,
        ),
        tokenizer_json=tokenizer.to_str(),
        graphs=graphs,
        readme="",
    )


def table(n: int, seed: int) -> Table:
    rng = np.random.default_rng(seed)
    texts = [" ".join(rng.choice(WORDS, size=rng.integers(1, 30))) for _ in range(n)]
    examples = tuple(
        Example(text=text, pair=None, label=str(rng.choice(["a", "b", "c"])), row=row)
        for row, text in enumerate(texts, start=1)
    )
    return Table(source="texts.csv", examples=examples)


def test_a_text_has_the_same_fp32_logits_alone_and_in_a_batch_of_real_graphs(bundle: Bundle) -> None:
    texts = [bundle.encoder.encode(example.text) for example in table(12, 5).examples]
    together = run_bundle(bundle, "fp32", texts, threads=1)
    alone = np.concatenate([run_bundle(bundle, "fp32", [text], threads=1) for text in texts], axis=1)
    assert together == pytest.approx(alone, abs=1e-4)


def test_labels_of_a_file_are_the_truth_also_where_the_metric_of_a_bundle_is_agreement(
    bundle: Bundle,
) -> None:
    retrofitted = bundle.calibration.model_copy(update={"metric": "agreement"})
    of_labels, of_answers = (
        evaluate_bundle(Bundle(bundle.path, bundle.manifest, calibration, bundle.encoder), table(60, 9))["precisions"]
        for calibration in (bundle.calibration, retrofitted)
    )
    assert of_labels["fp32"]["metric"] == of_answers["fp32"]["metric"] == "accuracy"
    assert of_labels == of_answers


def test_a_bundle_is_evaluated_in_each_precision_by_its_own_calibration(bundle: Bundle) -> None:
    labelled = table(60, 9)
    found = evaluate_bundle(bundle.path, labelled)
    assert list(found["precisions"]) == ["fp32", "int8"]
    encoded = [bundle.encoder.encode(example.text) for example in labelled.examples]
    labels = np.array(["abc".index(example.label) for example in labelled.examples])
    for precision, summary in found["precisions"].items():
        calibration = bundle.calibration.precisions[precision]
        logits = run_bundle(bundle, precision, encoded, threads=1)
        accuracies = [row["metrics"]["accuracy"] for row in summary["per_exit"]]
        assert accuracies == pytest.approx((logits.argmax(axis=-1) == labels).mean(axis=-1), abs=1e-6)
        assert len(summary["tiers"]) == len(calibration.certified) > 0
        for tier, row in zip(calibration.certified, summary["tiers"], strict=True):
            chosen = first_exit(
                logits,
                calibration.temperatures,
                calibration.agreement_temperatures,
                Policy(tier.criterion, tier.threshold),
            )
            answers = logits[chosen, np.arange(60)].argmax(axis=-1)
            assert row["agreement"] == pytest.approx((answers == logits[-1].argmax(axis=-1)).mean(), abs=1e-6)
    json.dumps(found)


def test_texts_that_a_bundle_cannot_take_are_refused_by_row_or_by_kind(bundle: Bundle) -> None:
    fine = table(2, 1)
    strange = replace(fine, examples=(fine.examples[0], replace(fine.examples[1], label="d")))
    with pytest.raises(DataError, match=r"texts\.csv, row 2: label 'd' is not among"):
        evaluate_bundle(bundle, strange)
    pairs = replace(fine, examples=tuple(replace(example, pair="w1") for example in fine.examples))
    with pytest.raises(DataError, match=r"texts\.csv: random takes single texts"):
        evaluate_bundle(bundle, pairs)


# --- what a split says -----------------------------------------------------------------------------------------------


def test_scores_are_those_of_leaving_every_text_at_one_exit() -> None:
    logits, labels, tokens = draw(300)
    shape = architecture()
    scores = exit_scores(measure(logits, [2.0] * 6, [2.0] * 6, labels, tokens, shape, "matthews"))
    for index, row in enumerate(scores):
        answers = logits[index].argmax(axis=-1)
        assert row.exit == index + 1
        assert row.metrics["accuracy"] == pytest.approx((answers == labels).mean(), abs=1e-6)
        assert row.metrics["matthews"] == pytest.approx(correlation(labels, answers, 2), abs=1e-6)
        p = row.metrics["accuracy"]
        assert row.standard_errors["accuracy"] == pytest.approx(np.sqrt(p * (1 - p) / 300), abs=1e-6)
        literal = np.mean([exit_costs(shape, int(count))[index] for count in tokens])
        assert row.cost_in_layers == pytest.approx(literal, abs=1e-6)


def test_the_accuracy_gap_counts_what_was_lost_and_what_was_won_by_leaving_early() -> None:
    logits, labels, tokens = draw(300)
    policy = Policy("confidence", 0.7)
    gap = accuracy_gap(measure(logits, [1.0] * 6, [1.0] * 6, labels, tokens, architecture(), "accuracy"), policy)
    chosen = first_exit(logits, [1.0] * 6, [1.0] * 6, policy)
    early = logits[chosen, np.arange(300)].argmax(axis=-1) == labels
    last = logits[-1].argmax(axis=-1) == labels
    assert gap.mean() == pytest.approx(last.mean() - early.mean())
    assert set(gap.tolist()) == {-1.0, 0.0, 1.0}


def test_the_summary_gives_the_certified_tiers_on_the_texts_at_hand() -> None:
    logits, labels, tokens = draw(400, seed=9)
    split = measure(logits, [1.0] * 6, [1.0] * 6, labels, tokens, architecture(), "accuracy")
    tier = Tier(
        quality=0.97,
        criterion="entropy",
        threshold=0.3,
        n=1300,
        disagreements=10,
        p_value=1e-6,
        mean_cost=9.0,
        speedup=9.0,
    )
    calibration = PrecisionCalibration(
        temperatures=(1.0,) * 6,
        agreement_temperatures=(1.0,) * 6,
        calibration_error_before=(0.0,) * 6,
        calibration_error_after=(0.0,) * 6,
        curves={"entropy": curve(split, "entropy", (0.0, 0.3, 1.0)), "patience": curve(split, "patience", (5, 1))},
        certified=(tier,),
    )
    summary = evaluate(split, calibration)
    expected = curve(split, "entropy", (0.3,))[0]
    (found,) = summary["tiers"]
    assert (found["quality"], found["criterion"], found["threshold"]) == (0.97, "entropy", 0.3)
    # Of these texts, not the certificate's own numbers.
    assert (found["mean_cost"], found["agreement"]) == (expected.mean_cost, expected.agreement)
    assert found["metric_kept"] == pytest.approx(expected.metric / summary["full_depth"], abs=1e-6)
    assert found["accuracy_gap"] == pytest.approx(summary["full_depth"] - expected.metric, abs=1e-5)
    assert found["accuracy_gap_upper_bound"] > found["accuracy_gap"]
    assert summary["full_depth"] == summary["per_exit"][-1]["metrics"]["accuracy"]
    assert [len(points) for points in summary["curves"].values()] == [3, 2]
    assert summary["n"] == 400


def test_arrays_that_do_not_belong_together_are_refused() -> None:
    logits, labels, tokens = draw(20)
    with pytest.raises(ValueError, match=r"logits have shape \(6, 20, 2\), not \(6, 19, 2\)"):
        measure(logits, [1.0] * 6, [1.0] * 6, labels[:19], tokens[:19], architecture(), "accuracy")
    with pytest.raises(ValueError, match="differ in length: 20 and 19"):
        measure(logits, [1.0] * 6, [1.0] * 6, labels, tokens[:19], architecture(), "accuracy")
    with pytest.raises(ValueError, match="the split holds no texts"):
        measure(logits[:, :0], [1.0] * 6, [1.0] * 6, labels[:0], tokens[:0], architecture(), "accuracy")
