"""From a file of labelled texts to a bundle that loads: the whole road, with a tiny backbone."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle
from tests.tiny_backbones import save_tiny, tiny_model
from training import pipeline
from training.data import DataError, read_table
from training.evaluate import evaluate_bundle, run_bundle
from training.pipeline import DataSettings, PipelineError, RunSettings
from training.trainer import TrainingSettings

HAPPY = [f"w{i}" for i in range(10, 30)]
SAD = [f"w{i}" for i in range(40, 60)]


def write_texts(
    path: Path, rows: int, *, seed: int = 0, pairs: bool = False, labels: tuple[Any, Any] = ("no", "yes")
) -> Path:
    """Texts whose label says which of two sets of words most of theirs come from."""
    rng = np.random.default_rng(seed)
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["text", "other", "label"] if pairs else ["text", "label"])
        for row in range(rows):
            label = row % 2
            words = [*rng.choice(HAPPY if label else SAD, size=rng.integers(2, 7)), f"w{rng.integers(60, 90)}"]
            text = " ".join(rng.permutation(words).tolist())
            writer.writerow([text, "w5 w6", labels[label]] if pairs else [text, labels[label]])
    return path


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("backbone"), tiny_model("bert"))


def settings_for(backbone: Path, train_file: Path, **changes: Any) -> RunSettings:
    training = TrainingSettings(method="acl-cl", epochs=2, batch_size=16, learning_rate=3e-3)
    settings = RunSettings(
        data=DataSettings(train_file=str(train_file)), training=training, backbone=str(backbone), name="tiny"
    )
    return replace(settings, **changes)


@pytest.fixture(scope="module")
def finished(backbone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    data = write_texts(folder / "texts.csv", 600)
    pipeline.run(settings_for(backbone, data), folder / "run")
    return folder / "run"


def test_one_run_ends_with_a_bundle_that_loads_and_has_learned(finished: Path) -> None:
    bundle = Bundle.load(finished / "bundle")
    assert bundle.manifest.labels == ("no", "yes")
    assert set(bundle.manifest.precisions) == {"fp32", "int8"}
    table = read_table(write_texts(finished / "fresh.csv", 200, seed=9))
    found = evaluate_bundle(bundle, table)["precisions"]["fp32"]
    assert found["full_depth"] > 0.9
    assert found["n"] == 200


def test_the_card_and_the_plot_stand_in_the_bundle(finished: Path) -> None:
    card = (finished / "bundle" / "README.md").read_text(encoding="utf-8")
    assert card.startswith("# tiny")
    assert (finished / "bundle" / "quality_speed.png").read_bytes().startswith(b"\x89PNG")


def test_scores_in_the_manifest_are_those_of_the_graphs_on_the_validation_split(finished: Path) -> None:
    bundle = Bundle.load(finished / "bundle")
    prepared = pipeline.prepare(pipeline.read_run(finished).data, seed=0)
    scores = bundle.manifest.scores[0]
    assert scores.n == len(prepared.splits.validation)
    again = evaluate_bundle(bundle, pipeline.Table("validation", prepared.splits.validation))
    for precision, per_exit in scores.per_exit.items():
        expected = [e["metrics"]["accuracy"] for e in again["precisions"][precision]["per_exit"]]
        assert [s.metrics["accuracy"] for s in per_exit] == pytest.approx(expected, abs=1e-6)


def test_a_stopped_run_resumes_to_the_weights_of_an_unbroken_one(
    backbone: Path, finished: Path, tmp_path: Path
) -> None:
    class Stopped(Exception):
        pass

    def stop(report: Any) -> None:
        if report.step == 37:
            raise Stopped

    settings = pipeline.read_run(finished)
    settings = replace(settings, training=replace(settings.training, checkpoint_minutes=0.0))
    with pytest.raises(Stopped):
        pipeline.run(settings, tmp_path / "run", observer=pipeline.Observer(step=stop))
    assert not (tmp_path / "run" / "bundle").exists()
    pipeline.run(settings, tmp_path / "run", resume=True)
    graphs = [p.relative_to(finished / "bundle") for p in sorted((finished / "bundle" / "graphs").rglob("*.onnx"))]
    assert graphs
    for graph in graphs:
        assert (tmp_path / "run" / "bundle" / graph).read_bytes() == (finished / "bundle" / graph).read_bytes()


def test_a_folder_with_a_run_is_not_overwritten(backbone: Path, finished: Path) -> None:
    settings = pipeline.read_run(finished)
    with pytest.raises(PipelineError, match="holds a run already"):
        pipeline.run(settings, finished)
    other = replace(settings, training=replace(settings.training, learning_rate=1e-4))
    with pytest.raises(PipelineError, match=r"training\.learning_rate"):
        pipeline.run(other, finished, resume=True)


def test_exporting_fewer_exits_merges_the_layers_between(finished: Path, tmp_path: Path) -> None:
    whole = Bundle.load(finished / "bundle")
    fewer = pipeline.export_run(finished, [0, 2], tmp_path / "fewer")
    assert [e.after_layer for e in fewer.manifest.architecture.exits] == [0, 2]
    for precision in whole.manifest.precisions:
        scores = {b: b.manifest.scores[0].per_exit[precision] for b in (whole, fewer)}
        assert [s.metrics for s in scores[fewer]] == [scores[whole][i].metrics for i in (0, 2)]
    # The row of the exit that is gone is not paid for any more.
    assert fewer.manifest.exit_costs[-1] < whole.manifest.exit_costs[-1]


def test_the_exits_proposed_are_timed_on_the_run_s_own_graphs_and_can_be_exported(
    finished: Path, tmp_path: Path
) -> None:
    proposal = pipeline.propose_exits(finished, 0.9, most_texts=5)
    assert proposal.layers == (0, 1, 2)
    assert proposal.texts == 5
    assert len(proposal.sets) == 4
    assert all(seconds > 0 for seconds in proposal.timings.segments)
    made = pipeline.export_run(finished, proposal.best, tmp_path / "best")
    assert tuple(e.after_layer for e in made.manifest.architecture.exits) == proposal.best


def test_a_quality_that_is_none_is_refused_before_anything_is_timed(finished: Path) -> None:
    with pytest.raises(PipelineError, match="quality must lie between 0 and 1"):
        pipeline.propose_exits(finished, 1.0)


def test_export_of_an_unfinished_run_says_so(backbone: Path, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"run\.json is missing"):
        pipeline.export_run(tmp_path, None, tmp_path / "bundle")


def test_recalibration_changes_promises_and_keeps_graphs(finished: Path, tmp_path: Path) -> None:
    table = read_table(write_texts(tmp_path / "traffic.csv", 900, seed=4))
    made = pipeline.recalibrate(finished / "bundle", table, tmp_path / "new", validation_share=0.25, seed=0)
    old = Bundle.load(finished / "bundle")
    assert made.manifest.precisions == old.manifest.precisions
    assert made.calibration.data_sha256 != old.calibration.data_sha256
    assert made.calibration.n_risk + made.calibration.n_validation == 900
    assert made.manifest.provenance["calibrated_on"] == "traffic.csv"


def test_recalibration_can_add_graphs_for_a_gpu_with_promises_of_their_own(finished: Path, tmp_path: Path) -> None:
    table = read_table(write_texts(tmp_path / "traffic.csv", 400, seed=4))
    made = pipeline.recalibrate(
        finished / "bundle", table, tmp_path / "new", validation_share=0.25, seed=0, add_precision="fp16"
    )
    old = Bundle.load(finished / "bundle")
    assert set(made.manifest.precisions) == {*old.manifest.precisions, "fp16"}
    assert made.manifest.default_precision == old.manifest.default_precision
    halves, exact = made.calibration.precisions["fp16"], made.calibration.precisions["fp32"]
    np.testing.assert_allclose(halves.temperatures, exact.temperatures, rtol=0.05)
    texts = [made.encoder.encode(example.text) for example in table.examples[:40]]
    found, wanted = (run_bundle(made, precision, texts, threads=1) for precision in ("fp16", "fp32"))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-2)


def test_a_text_that_makes_up_half_of_the_traffic_makes_up_half_of_what_certifies(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certified_on: list[tuple[str, ...]] = []
    hashed = pipeline._data_hash

    def note(examples: Any) -> str:
        certified_on.append(tuple(e.text for e in examples))
        return hashed(examples)

    monkeypatch.setattr(pipeline, "_data_hash", note)
    path = write_texts(tmp_path / "traffic.csv", 200, seed=4)
    with path.open("a", encoding="utf-8") as stream:
        stream.write("w10 w11 w60,yes\n" * 200)
    pipeline.recalibrate(finished / "bundle", read_table(path), tmp_path / "new", validation_share=0.5, seed=0)
    (texts,) = certified_on
    assert len(texts) == 200
    assert 70 < texts.count("w10 w11 w60") < 130


@pytest.mark.parametrize("share", [0.01, 0.99])
def test_a_share_that_leaves_a_side_too_few_texts_is_refused(finished: Path, tmp_path: Path, share: float) -> None:
    table = read_table(write_texts(tmp_path / "traffic.csv", 20))
    with pytest.raises(PipelineError, match="20 rows are too few to split by"):
        pipeline.recalibrate(finished / "bundle", table, tmp_path / "new", validation_share=share, seed=0)


def test_the_smallest_file_still_leaves_two_texts_to_validate_on(tmp_path: Path) -> None:
    prepared = pipeline.prepare(DataSettings(train_file=str(write_texts(tmp_path / "train.csv", 12))), seed=0)
    assert len(prepared.splits.validation) == 2
    one = DataSettings(train_file=str(tmp_path / "train.csv"), validation_size=1)
    with pytest.raises(PipelineError, match="validation_size at least 2"):
        pipeline.prepare(one, seed=0)


def test_recalibration_names_the_row_of_a_label_that_training_did_not_see(finished: Path, tmp_path: Path) -> None:
    path = write_texts(tmp_path / "traffic.csv", 20, labels=("no", "maybe"))
    with pytest.raises(DataError, match=r"row 3: label 'maybe'"):
        pipeline.recalibrate(finished / "bundle", read_table(path), tmp_path / "new", validation_share=0.5, seed=0)
    assert not (tmp_path / "new").exists()


def test_pairs_and_labels_of_any_type(backbone: Path, tmp_path: Path) -> None:
    rows = [{"a": f"w{10 + i % 20} w{i % 7}", "b": "w1", "y": bool(i % 2)} for i in range(120)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = DataSettings(train_file=str(path), text_column="a", pair_column="b", label_column="y")
    settings = settings_for(backbone, path, data=data, precisions=("fp32",), head="mean", exit_layers=(1, 3))
    bundle = pipeline.run(settings, tmp_path / "run")
    assert bundle.manifest.takes_pairs
    assert bundle.manifest.labels == ("false", "true")
    assert [e.head for e in bundle.manifest.architecture.exits] == ["mean", "mean"]


def test_an_evaluation_file_with_a_new_label_names_its_row(backbone: Path, tmp_path: Path) -> None:
    data = DataSettings(
        train_file=str(write_texts(tmp_path / "train.csv", 60)),
        eval_file=str(write_texts(tmp_path / "eval.csv", 6, labels=("no", "perhaps"))),
    )
    with pytest.raises(DataError, match=r"eval\.csv, row 3: label 'perhaps'"):
        pipeline.prepare(data, seed=0)


def test_sst2_keeps_fragments_of_held_out_sentences_from_training(tmp_path: Path) -> None:
    with (tmp_path / "train.tsv").open("w", encoding="utf-8") as stream:
        stream.write("sentence\tlabel\n")
        for number in range(60):
            words = [f"s{number}x{i}" for i in range(8)]
            for start, stop in ((0, 8), (0, 4), (4, 8), (2, 5)):
                stream.write(f"{' '.join(words[start:stop])} \t{number % 2}\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\nw1 w2\t0\nw3\t1\n", encoding="utf-8")
    data = DataSettings(task="sst2", data_dir=str(tmp_path), calibration_size=10, validation_size=5)
    prepared = pipeline.prepare(data, seed=3)
    assert prepared.splits.labels == ("negative", "positive")
    held = {e.text.split()[0].split("x")[0] for e in (*prepared.splits.calibration, *prepared.splits.validation)}
    assert len(held) == 15
    assert len(prepared.splits.train) == (60 - 15) * 4
    assert not held & {e.text.split()[0].split("x")[0] for e in prepared.splits.train}
    assert all(len(e.text.split()) == 8 for e in prepared.splits.calibration)


def test_int8_is_the_default_only_where_no_exit_loses_more_than_half_a_point() -> None:
    labels = np.zeros(1000, dtype=np.int64)
    right = np.tile(np.array([1.0, 0.0]), (2, 1000, 1))
    close, far = right.copy(), right.copy()
    close[1, :5] = [0.0, 1.0]
    far[1, :6] = [0.0, 1.0]
    assert pipeline.default_precision({"fp32": right, "int8": close}, labels) == "int8"
    assert pipeline.default_precision({"fp32": right, "int8": far}, labels) == "fp32"
    assert pipeline.default_precision({"int8": far}, labels) == "int8"
    assert pipeline.default_precision({"fp16": right, "int8": far}, labels) == "int8"
    assert pipeline.default_precision({"fp16": right}, labels) == "fp16"


@pytest.mark.parametrize(
    ("head", "layers", "last", "expected"),
    [
        ("peek", None, None, [(0, "peek"), (1, "peek"), (2, "peek")]),
        ("mean", None, None, [(1, "mean"), (2, "mean"), (3, "mean")]),
        ("mean", (0, 3), None, [(0, "mean"), (3, "mean")]),
        ("peek", (0, 1), "attention", [(0, "peek"), (1, "peek"), (3, "attention")]),
        ("mean", (1, 3), "cls", [(1, "mean"), (3, "cls")]),
    ],
)
def test_where_exits_stand(head: Any, layers: Any, last: Any, expected: list[tuple[int, str]]) -> None:
    specs = pipeline.exit_specs(head, 3, layers, last)
    assert [(s.after_layer, s.head) for s in specs] == expected


@pytest.mark.parametrize(
    ("head", "layers"), [("peek", (0, 3)), ("mean", (2, 1)), ("mean", (1, 1)), ("cls", (-1, 2)), ("cls", ())]
)
def test_exits_that_cannot_stand_there_are_refused(head: Any, layers: Any) -> None:
    with pytest.raises(ValueError, match="exit layers must ascend"):
        pipeline.exit_specs(head, 3, layers)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataSettings(), "either a task or a train_file"),
        (DataSettings(task="sst2", train_file="x.csv"), "either a task or a train_file"),
        (
            DataSettings(task="sst3", data_dir="."),
            "task must be one of cola, sst2, .*rte, not 'sst3'",
        ),
        (DataSettings(task="sst2"), "needs data_dir"),
    ],
)
def test_data_settings_that_make_no_sense_are_refused(data: DataSettings, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        pipeline.prepare(data, seed=0)
