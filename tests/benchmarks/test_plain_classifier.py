"""The classifier of plain transformers, and the encoder cut short, that exits are measured against."""

import sys
from pathlib import Path

import pytest
import torch

from benchmarks.plain_classifier import main
from models.network import load_backbone
from tests.tiny_backbones import save_tiny, tiny_model
from training.classifier import load_classifier
from training.retrofit import read_texts


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("backbone"), tiny_model("bert"))


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["plain_classifier.py", *arguments])
    main()


def test_an_encoder_cut_short_keeps_its_first_layers(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(monkeypatch, "cut", "--backbone", str(backbone), "--layers", "2", "--output", str(tmp_path / "cut"))
    whole, short = load_backbone(str(backbone)), load_backbone(str(tmp_path / "cut"))
    assert (whole.num_layers, short.num_layers) == (3, 2)
    assert all(torch.equal(weight, whole.weights[name]) for name, weight in short.weights.items())
    with pytest.raises(SystemExit, match="--layers must lie between 1 and 3, not 4"):
        command(monkeypatch, "cut", "--backbone", str(backbone), "--layers", "4", "--output", str(tmp_path / "no"))


def test_a_classifier_is_trained_that_a_retrofit_takes_and_texts_that_it_has_not_seen(
    backbone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for file, rows in (("train.tsv", 4000), ("dev.tsv", 20)):
        lines = [f"src\t{i % 2}\t\tw{i % 60} w{i % 59} w{i % 53}" for i in range(rows)]
        (tmp_path / file).write_text("\n".join(lines) + "\n")
    texts, output = tmp_path / "texts.txt", tmp_path / "plain"
    where = ["--backbone", str(backbone), "--data-dir", str(tmp_path), "--output", str(output), "--texts", str(texts)]
    command(monkeypatch, "train", "--task", "cola", "--examples", "64", "--epochs", "1", "--texts-count", "50", *where)
    assert "64 examples; accuracy on the evaluation file" in capsys.readouterr().out
    assert load_classifier(str(output)).labels == ("unacceptable", "acceptable")
    assert len(list(read_texts(texts, pairs=False))) == 50
