"""Backbones and tasks by their names on the hub, from a cache and a data set as the hub lays them out; no network."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest

from tests.tiny_backbones import save_tiny, tiny_model
from training.data import DataError
from training.pipeline import DataSettings, PipelineError, Prepared, prepare
from training.tasks import TASKS

# Columns and classes of nyu-mll/glue, each class at its number there.
GLUE = {
    "sst2": (("sentence",), ("negative", "positive")),
    "mrpc": (("sentence1", "sentence2"), ("not_equivalent", "equivalent")),
    "rte": (("sentence1", "sentence2"), ("entailment", "not_entailment")),
    "mnli": (("premise", "hypothesis"), ("entailment", "neutral", "contradiction")),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def save_task(folder: Path, name: str, *, classes: tuple[str, ...] | None = None) -> Path:
    """A data set of one configuration, as files of the hub: Parquet, and a README that says which is which split."""
    columns, own = GLUE[name]
    kinds = datasets.Features(
        {**{c: datasets.Value("string") for c in columns}, "label": datasets.ClassLabel(names=list(classes or own))}
    )
    splits = ("train", *TASKS[name].hub_splits)
    for split in splits:
        count = 60 if split == "train" else 4
        rows = [{**{c: f"{c} {split} {i}" for c in columns}, "label": i % len(own)} for i in range(count)]
        (folder / name).mkdir(parents=True, exist_ok=True)
        datasets.Dataset.from_list(rows, features=kinds).to_parquet(folder / name / f"{split}-00000-of-00001.parquet")
    files = "".join(f"  - split: {s}\n    path: {name}/{s}-*\n" for s in splits)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n")
    return folder


def prepared(folder: Path, name: str) -> Prepared:
    return prepare(DataSettings(task=name, data_dir=f"hf:{folder}", calibration_size=6, validation_size=4), seed=0)


@pytest.mark.parametrize("name", GLUE)
def test_a_task_is_read_with_the_classes_of_the_hub_by_name(tmp_path: Path, name: str) -> None:
    columns, classes = GLUE[name]
    found = prepared(save_task(tmp_path / "glue", name), name)
    assert found.splits.labels == tuple(TASKS[name].labels.values())
    assert list(found.evaluations) == list(TASKS[name].hub_splits)
    for split, examples in found.evaluations.items():
        for i, example in enumerate(examples):
            texts = [t for t in (example.text, example.pair) if t is not None]
            assert texts == [f"{c} {split} {i}" for c in columns]
            assert example.label == classes[i % len(classes)]


def test_classes_that_the_task_does_not_have_are_named(tmp_path: Path) -> None:
    folder = save_task(tmp_path / "glue", "sst2", classes=("bad", "good"))
    with pytest.raises(DataError, match=r"glue/train, row 2: label 'bad' is not among"):
        prepared(folder, "sst2")


def test_a_data_set_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere, sst2, train: could not be read \(.+\)"):
        prepared(tmp_path / "nowhere", "sst2")


def test_without_the_package_the_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="reading from the hub needs the package datasets: pip install it"):
        prepared(tmp_path, "sst2")


def test_a_task_without_a_place_says_where_it_could_come_from() -> None:
    with pytest.raises(PipelineError, match=r"train\.tsv, dev\.tsv in GLUE's layout .* or hf:NAME .*hf:nyu-mll/glue"):
        prepare(DataSettings(task="sst2"), seed=0)


def load_from_cache(home: Path, name: str) -> subprocess.CompletedProcess[str]:
    code = f"from models.network import load_backbone; print(load_backbone({name!r}).num_layers)"
    environment = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1"}
    # transformers reads both once, when it is imported.
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_backbone_is_found_by_its_hub_name_in_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--someone--tiny"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.parent.mkdir(parents=True)
    shutil.move(save_tiny(tmp_path / "made", tiny_model("bert")), snapshot)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    done = load_from_cache(tmp_path, "someone/tiny")
    assert done.stdout.split() == ["3"], done.stderr
    missing = load_from_cache(tmp_path, "someone/else")
    assert missing.returncode != 0
    assert "ValueError: backbone 'someone/else' could not be loaded: " in missing.stderr
