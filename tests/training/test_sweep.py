"""A grid of runs that can be stopped, continued and summed up."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import training.sweep
from models.costs import exit_costs
from models.network import MultiExitNetwork
from models.tokenization import TextEncoder
from tests.tiny_backbones import tiny_tokenizer
from tests.training.toy import LABELS, tiny_architecture, toy_backbone, toy_examples
from training.data import tokenize
from training.sweep import ANSWERS_NAME, Cell, read_results, run_cell, summary, training_part
from training.trainer import StepReport, TrainingError, TrainingSettings, exit_metrics

SETTINGS = TrainingSettings(epochs=2, batch_size=32, learning_rate=2e-3, checkpoint_minutes=0.0)
PARTS = [toy_examples(count, seed) for count, seed in ((80, 1), (30, 2), (40, 3))]


def run(folder: Path, cell: Cell, settings: TrainingSettings = SETTINGS, **options: Any) -> dict[str, Any]:
    return run_cell(cell, toy_backbone(), *PARTS, LABELS, settings, folder, max_length=16, **options)


def test_a_cell_scores_every_exit_on_the_evaluation_part(tmp_path: Path) -> None:
    cell = Cell("jt", "peek", 3)
    result = run(tmp_path, cell)
    assert result == json.loads((tmp_path / "jt-peek-seed3" / "result.json").read_text())
    assert (result["method"], result["head"], result["seed"]) == ("jt", "peek", 3)
    assert (result["settings"]["method"], result["settings"]["seed"]) == ("jt", 3)
    assert (result["examples"], result["evaluated_on"]) == (80, 40)
    validation, evaluation = (tokenize(p, LABELS, TextEncoder(tiny_tokenizer("bert"), 16)) for p in PARTS[1:])
    network = MultiExitNetwork.load(tmp_path / cell.name / "kept")
    validated, scores = (exit_metrics(network, part, "accuracy") for part in (validation, evaluation))
    costs = exit_costs(tiny_architecture("peek"), round(np.mean([len(t) for t in evaluation.texts])))
    assert [(e["number"], e["after_layer"]) for e in result["exits"]] == [(1, 0), (2, 1)]
    assert [e["score"] for e in result["exits"]] == [scores[1], scores[2]]
    assert [e["validation_score"] for e in result["exits"]] == [validated[1], validated[2]]
    assert [e["cost"] for e in result["exits"]] == pytest.approx(costs, abs=1e-4)
    assert result["angle_by_epoch"] == result["conflicts_by_epoch"] == [None, None]


def test_a_cell_keeps_what_a_report_needs(tmp_path: Path) -> None:
    cell = Cell("jt", "mean", 0)
    result = run(tmp_path, cell, replace(SETTINGS, epochs=1))
    with np.load(tmp_path / cell.name / ANSWERS_NAME) as found:
        kept = dict(found)
    for part, examples, key in (("validation", PARTS[1], "validation_score"), ("evaluation", PARTS[2], "score")):
        encoded = tokenize(examples, LABELS, TextEncoder(tiny_tokenizer("bert"), 16))
        assert kept[f"{part}_labels"].tolist() == encoded.labels.tolist()
        assert kept[f"{part}_tokens"].tolist() == [len(t) for t in encoded.texts]
        right = (kept[f"{part}_logits"].argmax(-1) == encoded.labels).mean(-1)
        assert right.tolist() == pytest.approx([e[key] for e in result["exits"]])
    # The classifier's weights on the features are the logits, but for its bias.
    head = MultiExitNetwork.load(tmp_path / cell.name / "kept").exits["2"].classifier
    logits = kept["features"][1].astype(np.float32) @ kept["label_embeddings"][1].T + head.bias.detach().numpy()
    assert np.allclose(logits, kept["evaluation_logits"][1], atol=2e-2)


def test_a_weight_that_is_not_the_default_has_cells_of_its_own(tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=1)
    assert Cell("acl", "mean", 0).name == "acl-mean-seed0"
    result = run(tmp_path, Cell("acl", "mean", 0, contrast_weight=0.7), settings)
    assert result["settings"]["contrast"]["weight"] == 0.7
    assert (tmp_path / "acl-mean-weight0.7-seed0" / "result.json").exists()


def test_a_cell_depends_on_its_seed_alone(tmp_path: Path) -> None:
    settings = replace(SETTINGS, epochs=1)
    first = run(tmp_path / "a", Cell("acl-cl", "mean", 1), settings)
    run(tmp_path / "b", Cell("jt", "cls", 0), settings)
    again = run(tmp_path / "b", Cell("acl-cl", "mean", 1), settings)
    weights = [(tmp_path / d / "acl-cl-mean-seed1/kept/network.safetensors").read_bytes() for d in "ab"]
    assert weights[0] == weights[1]
    assert first["angle_by_epoch"] == again["angle_by_epoch"]
    assert 0 < first["angle_by_epoch"][0] < 180


def test_a_cell_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    cell = Cell("acl-cl", "mean", 0)
    first = run(tmp_path, cell)
    steps: list[StepReport] = []
    assert run(tmp_path, cell, replace(SETTINGS, checkpoint_minutes=9.0), on_step=steps.append) == first
    assert steps == []


def test_a_done_cell_of_other_settings_is_not_passed_off_as_this_one(tmp_path: Path) -> None:
    cell = Cell("acl-cl", "mean", 0)
    run(tmp_path, cell, replace(SETTINGS, epochs=1))
    with pytest.raises(TrainingError, match=r"result\.json: was made with other epochs; use another folder"):
        run(tmp_path, cell, SETTINGS)
    with pytest.raises(TrainingError, match="other examples, evaluated_on;"):
        run_cell(cell, toy_backbone(), PARTS[1], PARTS[1], PARTS[1], LABELS, replace(SETTINGS, epochs=1), tmp_path)


def test_a_stopped_cell_goes_on_where_it_was(tmp_path: Path) -> None:
    class Killed(Exception):
        pass

    def kill(report: StepReport) -> None:
        if report.step == 4:
            raise Killed

    cell = Cell("acl-cl", "mean", 0)
    with pytest.raises(Killed):
        run(tmp_path / "a", cell, on_step=kill)
    assert read_results(tmp_path / "a") == []
    steps: list[StepReport] = []
    resumed = run(tmp_path / "a", cell, on_step=steps.append)
    assert steps[0].step == 4
    whole = run(tmp_path / "b", cell)
    assert {k: v for k, v in resumed.items() if k != "seconds"} == {k: v for k, v in whole.items() if k != "seconds"}


def test_a_cell_killed_while_it_was_scored_is_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    cell = Cell("jt", "mean", 0)
    with monkeypatch.context() as patch:
        patch.setattr(training.sweep, "exit_logits", killed)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, cell)
    steps: list[StepReport] = []
    run(tmp_path, cell, on_step=steps.append)
    assert steps == []
    assert len(read_results(tmp_path)) == 1


def result(
    method: str, head: str, seed: int, scores: list[float], angle: float | None = None, weight: float = 0.2
) -> dict[str, Any]:
    return {
        "settings": {"contrast": {"weight": weight}},
        "method": method,
        "head": head,
        "seed": seed,
        "examples": 8000,
        "evaluated_on": 872,
        "metric": "accuracy",
        "exits": [
            {"number": i, "after_layer": i, "cost": i + 0.014, "score": s} for i, s in enumerate(scores, start=1)
        ],
        "angle_by_epoch": [80.0, angle],
        "conflicts_by_epoch": [0.5, None if angle is None else 0.034],
    }


def grid(folder: Path, method: str) -> str:
    return training.sweep.run_grid(
        folder,
        task="sst2",
        data_dir=folder,
        methods=[method],
        heads=["mean"],
        seeds=[0],
        examples=None,
        backbone="",
        settings=SETTINGS,
    )


def test_a_grid_in_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="offramp sweep runs in one process"):
        grid(tmp_path, "jt")


@pytest.mark.parametrize("method", ["exits-only", "bert"])
def test_a_grid_trains_only_what_begins_from_a_backbone(tmp_path: Path, method: str) -> None:
    with pytest.raises(ValueError, match=rf"method must be one of ce, .*acl-cl, not '{method}'"):
        grid(tmp_path, method)


def test_the_summary_gives_mean_and_deviation_over_seeds() -> None:
    table = summary(
        [
            result("acl-cl", "mean", 0, [0.70, 0.90], angle=40.0),
            result("acl-cl", "mean", 1, [0.74, 0.92], angle=50.0),
            result("acl-cl", "mean", 2, [0.72, 0.91], angle=60.0),
            result("jt", "peek", 0, [0.5, 0.6]),
        ]
    ).splitlines()
    assert table[1] == "acl-cl, mean, 3 seeds, 8000 examples, n = 872"
    assert table[3] == "| cost in layers | 1.01 | 2.01 | mean of exits |"
    assert table[4] == "|---|---|---|---|"
    # 70, 74, 72: mean 72, deviation (n - 1) 2; 90, 92, 91: 91, 1; means of exits 80, 83, 81.5: 81.5, 1.5.
    assert table[5] == "| accuracy, % | 72.0 ± 2.0 | 91.0 ± 1.0 | 81.50 ± 1.50 |"
    assert table[7] == "Angle in the last epoch: mean 50°, above the limit in 3.4 % of batches."
    # One seed has no deviation, and joint training no angle.
    assert table[9] == "jt, peek, 1 seeds, 8000 examples, n = 872"
    assert table[-1] == "| accuracy, % | 50.0 ± nan | 60.0 ± nan | 55.00 ± nan |"


def test_runs_of_another_weight_have_a_table_of_their_own() -> None:
    table = summary([result("acl", "mean", 0, [0.7]), result("acl", "mean", 0, [0.6], weight=0.7)])
    assert "\nacl, mean, 1 seeds, 8000 examples, n = 872\n" in table
    assert "\nacl, mean, λ = 0.7, 1 seeds, 8000 examples, n = 872\n" in table


def test_the_summary_of_nothing_says_so(tmp_path: Path) -> None:
    assert summary(read_results(tmp_path)) == "no finished runs\n"


def test_the_training_part_is_shared_by_all_cells_of_a_seed() -> None:
    examples = toy_examples(90, 0)
    assert training_part(examples, None, 1) == examples
    assert training_part(examples, 30, 1) == training_part(examples, 30, 1)
    assert training_part(examples, 30, 1) != training_part(examples, 30, 2)
