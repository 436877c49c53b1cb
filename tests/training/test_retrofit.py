"""Exits for a classifier of transformers: it stays what it was, and the exits learn its answers without labels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.bundle import Bundle
from offramp import run
from tests.tiny_backbones import randomise, save_tiny, tiny_model
from training.classifier import Classifier, load_classifier
from training.data import DataError
from training.evaluate import run_graphs
from training.pipeline import exit_specs, export_run
from training.retrofit import answer, read_texts

FAMILIES = ["bert", "roberta"]


def tiny_classifier(folder: Path, family: str, **config: Any) -> Path:
    """A random sequence classifier of ``family`` with three classes, saved as transformers does."""
    from transformers import AutoModelForSequenceClassification

    settings = {"num_labels": 3, "id2label": {0: "bad", 1: "fine", 2: "good"}, **config}
    model: nn.Module = AutoModelForSequenceClassification.from_config(
        type(tiny_model(family).config)(**{**tiny_model(family).config.to_dict(), **settings})
    )
    # Large weights, and no class that wins everywhere: answers must differ from text to text.
    randomise(model, seed=3, std=0.3)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    ids = torch.randint(5, 80, (64, 8), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        last.bias -= model.eval()(input_ids=ids).logits.mean(0)
    return save_tiny(folder, model)


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_classifier(tmp_path_factory.mktemp("classifier"), request.param)


def texts(count: int, seed: int = 0) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(f"w{i}" for i in rng.integers(0, 80, rng.integers(1, 12))) for _ in range(count)]


def theirs(folder: Path, lines: list[str]) -> np.ndarray:
    """The logits that transformers itself gives, text by text."""
    from transformers import AutoModelForSequenceClassification

    classifier = load_classifier(str(folder))
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    encoded = [encoder_of(classifier).encode(line) for line in lines]
    with torch.inference_mode():
        return np.concatenate([model(input_ids=torch.tensor([list(e.ids)])).logits.numpy() for e in encoded])


def encoder_of(classifier: Classifier) -> Any:
    from tokenizers import Tokenizer

    from models.tokenization import TextEncoder

    return TextEncoder(Tokenizer.from_str(classifier.backbone.tokenizer_json), 32)


def test_the_last_exit_gives_the_logits_of_the_classifier(family: Path) -> None:
    classifier = load_classifier(str(family))
    assert classifier.labels == ("bad", "fine", "good")
    network = classifier.network(exit_specs("peek", 3, None, "cls"), 32).eval()
    lines = texts(20)
    expected = theirs(family, lines)
    assert expected.std(0).min() > 0.01
    for line, logits in zip(lines, expected, strict=True):
        ids = torch.tensor([list(encoder_of(classifier).encode(line).ids)])
        with torch.inference_mode():
            ours = network(ids, torch.ones_like(ids))
        assert list(ours) == [1, 2, 3, 4]
        assert np.abs(ours[4].logits.numpy()[0] - logits).max() < 1e-5


def test_the_classifier_answers_the_texts(family: Path) -> None:
    lines = texts(30)
    chosen = answer(load_classifier(str(family)), [(line, None) for line in lines], 32)
    assert chosen == theirs(family, lines).argmax(-1).tolist()
    assert len(set(chosen)) > 1


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A retrofitted tiny BERT; its folder holds ``classifier/``, ``texts.txt`` and ``run/``."""
    folder = tmp_path_factory.mktemp("retrofit")
    tiny_classifier(folder / "classifier", "bert")
    (folder / "texts.txt").write_text("\n".join([*texts(400), "", "  "]), encoding="utf-8")
    assert run(command(folder, "run")) == 0
    return folder


def command(folder: Path, output: str, *more: str) -> list[str]:
    return [
        *("retrofit", str(folder / "classifier"), "--texts", str(folder / "texts.txt")),
        *("--output", str(folder / output), "--epochs", "3", "--batch-size", "32", "--threads", "1", *more),
    ]


def test_the_bundle_answers_as_the_classifier_at_its_last_exit(made: Path) -> None:
    bundle = Bundle.load(made / "run" / "bundle")
    graphs = [bundle.graph(n, "fp32") for n in range(1, len(bundle.manifest.architecture.exits) + 1)]
    lines = texts(25, seed=8)
    ours = run_graphs(graphs, bundle.manifest.architecture, [bundle.encoder.encode(line) for line in lines])
    assert np.abs(ours[-1] - theirs(made / "classifier", lines)).max() < 1e-5


def test_scores_are_agreement_and_that_of_the_last_exit_is_perfect(made: Path) -> None:
    bundle = Bundle.load(made / "run" / "bundle")
    assert bundle.calibration.metric == "agreement"
    assert bundle.manifest.labels == ("bad", "fine", "good")
    exits = bundle.manifest.scores[0].per_exit["fp32"]
    assert set(exits[0].metrics) == {"agreement"}
    assert exits[-1].metrics["agreement"] == 1.0
    answers = [json.loads(row)["label"] for row in (made / "run" / "answers.jsonl").read_text().splitlines()]
    assert len(answers) == 400
    most = max(answers.count(label) for label in set(answers)) / len(answers)
    assert exits[-2].metrics["agreement"] > most


def test_the_card_says_whose_answers_they_are(made: Path) -> None:
    card = (made / "run" / "bundle" / "README.md").read_text(encoding="utf-8")
    assert f"texts.txt, answered by {made / 'classifier'}" in card
    assert "agreement" in card and "exits-only" in card
    assert "accuracy" not in card.split("## Data and provenance")[0].split("## What each exit knows")[1]


def test_a_finished_retrofit_resumes_and_exports_fewer_exits(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    graph = made / "run" / "bundle" / "graphs" / "fp32" / "segment_1.onnx"
    before = graph.read_bytes()
    assert run(command(made, "run")) == 2
    assert "holds a run already" in capsys.readouterr().err
    assert run(command(made, "run", "--resume")) == 0
    assert graph.read_bytes() == before
    fewer = export_run(made / "run", [1, 3], made / "fewer")
    assert [(e.after_layer, e.head) for e in fewer.manifest.architecture.exits] == [(1, "peek"), (3, "cls")]
    assert fewer.manifest.scores[0].per_exit["fp32"][-1].metrics["agreement"] == 1.0


def test_classes_may_be_renamed_in_their_order(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--labels", "sad, so-so,glad", "--precisions", "fp32", "--epochs", "1", "--exits", "1"]
    assert run(command(made, "renamed", *more)) == 0
    bundle = Bundle.load(made / "renamed" / "bundle")
    assert bundle.manifest.labels == ("sad", "so-so", "glad")
    assert [(e.after_layer, e.head) for e in bundle.manifest.architecture.exits] == [(1, "peek"), (3, "cls")]
    capsys.readouterr()
    assert run(command(made, "other", "--labels", "a,b")) == 2
    assert "labels must be 3 different names, one for each of bad, fine, good, not a, b" in capsys.readouterr().err


def test_pairs_stand_on_one_line_with_a_tab_between(made: Path) -> None:
    lines = [f"{a}\t{b}" for a, b in zip(texts(120), texts(120, seed=1), strict=True)]
    (made / "pairs.txt").write_text("\n".join(lines), encoding="utf-8")
    more = ["--texts", str(made / "pairs.txt"), "--pairs", "--precisions", "fp32", "--epochs", "1"]
    assert run(command(made, "paired", *more)) == 0
    assert Bundle.load(made / "paired" / "bundle").manifest.takes_pairs


# Refused.


@pytest.mark.parametrize(
    ("content", "pairs", "message"),
    [
        (b"\n \n", False, "no texts"),
        (b"good\n\xff\xfe\n", False, "line 2: not UTF-8"),
        (b"a\tb\n\nonly one\n", True, "line 3: must be two texts with one tab between"),
        (b"a\tb\tc\n", True, "line 1: must be two texts"),
    ],
)
def test_texts_that_are_none_are_named(tmp_path: Path, content: bytes, pairs: bool, message: str) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        list(read_texts(path, pairs=pairs))


def test_lines_are_texts_whatever_their_ends_and_marks(tmp_path: Path) -> None:
    path = tmp_path / "texts.txt"
    path.write_bytes("\ufeffone\r\n\r\ntwo\twords \n\u2028three".encode())
    assert list(read_texts(path, pairs=False)) == [("one", None), ("two\twords", None), ("three", None)]


def test_several_processes_are_refused(
    made: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(command(made, "parallel")) == 2
    assert "offramp retrofit runs in one process" in capsys.readouterr().err


def test_an_encoder_without_a_trained_classifier_is_refused(tmp_path: Path) -> None:
    save_tiny(tmp_path, tiny_model("bert"))
    with pytest.raises(ValueError, match=r"is no fine-tuned classifier: its checkpoint has no classifier\."):
        load_classifier(str(tmp_path))


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"num_labels": 1, "id2label": {0: "score"}}, "regression"),
        ({"problem_type": "multi_label_classification"}, "multi_label_classification"),
    ],
)
def test_what_is_no_choice_among_classes_is_refused(tmp_path: Path, config: dict[str, Any], kind: str) -> None:
    tiny_classifier(tmp_path, "bert", **config)
    with pytest.raises(ValueError, match=f"must answer with one of at least two classes; this one does {kind}"):
        load_classifier(str(tmp_path))


def test_a_head_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    # ELECTRA's head has RoBERTa's names, and GELU where that has tanh.
    tiny_classifier(tmp_path, "electra")
    with pytest.raises(ValueError, match="computes logits that differ by up to"):
        load_classifier(str(tmp_path))
