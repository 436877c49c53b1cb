"""Training learns, keeps its best epoch, and can be killed anywhere without changing what comes out."""

import csv
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import training.trainer
from models.network import MultiExitNetwork
from tests.tiny_backbones import exits
from tests.training.toy import tiny_architecture, toy_data, toy_network
from training.data import Tokenized
from training.methods import METHODS, Contrast, Distillation
from training.trainer import (
    EpochReport,
    StepReport,
    TrainingError,
    TrainingSettings,
    exit_logits,
    exit_metrics,
    parameter_groups,
    train,
)

TRAIN, VALIDATION = toy_data(150, seed=1), toy_data(60, seed=2)
STEPS = 5  # per epoch of TRAIN in batches of 32
QUICK = TrainingSettings(epochs=3, batch_size=32, learning_rate=2e-3, head_learning_rate_factor=2.0, warmup=0.1)


class Killed(Exception):
    """Stands for a kill: whatever is not on disk by then is lost."""


def kill_at_step(step: int) -> Callable[[StepReport], None]:
    def on_step(report: StepReport) -> None:
        if report.step == step:
            raise Killed

    return on_step


def kill_at_epoch(epoch: int) -> Callable[[EpochReport], None]:
    def on_epoch(report: EpochReport) -> None:
        if report.epoch == epoch:
            raise Killed

    return on_epoch


def run(folder: Path, settings: TrainingSettings = QUICK, seed: int = 0, **options: Any) -> MultiExitNetwork:
    return train(toy_network(seed), TRAIN, VALIDATION, settings, folder, **options)


def weights(network: MultiExitNetwork) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in network.state_dict().items()}


def same_weights(a: MultiExitNetwork, b: MultiExitNetwork) -> bool:
    return all(torch.equal(x, y) for x, y in zip(weights(a).values(), weights(b).values(), strict=True))


def log(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as stream:
        return list(csv.DictReader(stream))


def names(folder: Path) -> set[str]:
    return {p.name for p in folder.iterdir()}


FINISHED = {"kept", "done.json", "epochs.csv", "steps.csv"}


# Learning.


@pytest.mark.parametrize("method", ["ce", "ce+scl", "acl", "jt", "2st", "alt", "jt+scl", "acl-embed", "acl-cl"])
def test_the_loss_falls_and_the_exits_rise_above_chance(tmp_path: Path, method: Any) -> None:
    steps: list[StepReport] = []
    settings = replace(QUICK, method=method, epochs=8, learning_rate=5e-3)
    network = run(tmp_path, settings, on_step=steps.append)
    stages = len(METHODS[method].stages)
    losses = [s.loss for s in steps]
    assert len(losses) == 8 * STEPS * stages
    # Whole epochs of even length: alt's steps have one loss and two by turns.
    for stage in range(stages):
        part = losses[stage * 8 * STEPS : (stage + 1) * 8 * STEPS]
        assert np.mean(part[-2 * STEPS :]) < 0.8 * np.mean(part[: 2 * STEPS])
    scores = exit_metrics(network, VALIDATION, "accuracy")
    trained = [scores[2]] if method in ("ce", "ce+scl", "acl") else scores.values()
    assert min(trained) > 0.6  # chance: 1/3
    assert not network.training


def test_ce_leaves_the_other_exits_as_they_were(tmp_path: Path) -> None:
    before, after = toy_network(0), run(tmp_path, replace(QUICK, method="ce", epochs=1))
    assert torch.equal(before.label_embeddings(1), after.label_embeddings(1))
    assert not torch.equal(before.label_embeddings(2), after.label_embeddings(2))


@pytest.mark.parametrize("head", ["cls", "mean", "attention", "peek"])
def test_every_kind_of_head_trains(tmp_path: Path, head: Any) -> None:
    settings = replace(QUICK, epochs=1)
    before = toy_network(0, head)
    after = train(toy_network(0, head), TRAIN, VALIDATION, settings, tmp_path)
    unmoved = [n for n, p in before.named_parameters() if torch.equal(p, after.state_dict()[n])]
    assert unmoved == []


def test_a_seed_gives_the_same_weights_and_another_seed_others(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1)
    first, again = run(tmp_path / "a", settings), run(tmp_path / "b", settings)
    assert same_weights(first, again)
    # The network is the same: what differs is the order of batches and the dropout.
    assert not same_weights(first, run(tmp_path / "c", replace(settings, seed=1)))


def test_step_reports_say_where_training_stands(tmp_path: Path) -> None:
    steps: list[StepReport] = []
    run(tmp_path, replace(QUICK, epochs=2), on_step=steps.append)
    assert [s.step for s in steps] == list(range(1, 2 * STEPS + 1))
    assert {s.steps for s in steps} == {2 * STEPS}
    assert [s.epoch for s in steps] == [1] * STEPS + [2] * STEPS
    assert all(s.examples_per_second > 0 and 0 <= s.angle <= 180 and s.contrastive > 0 for s in steps)


def test_methods_without_contrast_report_no_angle(tmp_path: Path) -> None:
    steps: list[StepReport] = []
    run(tmp_path, replace(QUICK, method="jt", epochs=1), on_step=steps.append)
    assert all(math.isnan(s.angle) and math.isnan(s.contrastive) for s in steps)
    (epoch,) = log(tmp_path / "epochs.csv")
    assert epoch["mean_angle"] == epoch["share_of_conflicts"] == "nan"


def test_distillation_brings_the_other_exits_nearer_to_the_deepest(tmp_path: Path) -> None:
    def apart(network: MultiExitNetwork) -> float:
        first, last = (torch.from_numpy(x).softmax(-1) for x in exit_logits(network, VALIDATION).values())
        return float((first - last).abs().mean())

    settings = replace(QUICK, method="jt", epochs=6, learning_rate=5e-3, keep="last")
    plain = run(tmp_path / "a", settings)
    taught = run(tmp_path / "b", replace(settings, distillation=Distillation(weight=5.0, temperature=1.0)))
    assert apart(taught) < 0.8 * apart(plain)
    first, *_, last = log(tmp_path / "b" / "steps.csv")
    assert float(first["distilled"]) > 0 and float(last["distilled"]) > 0
    assert log(tmp_path / "a" / "steps.csv")[0]["distilled"] == "nan"


def test_weights_by_depth_change_what_is_learned(tmp_path: Path) -> None:
    settings = replace(QUICK, method="jt", epochs=1)
    assert not same_weights(run(tmp_path / "a", settings), run(tmp_path / "b", replace(settings, exit_weights="depth")))


def test_a_run_from_before_a_setting_existed_is_resumed_at_the_settings_default(tmp_path: Path) -> None:
    run(tmp_path, replace(QUICK, epochs=1))
    done = tmp_path / "done.json"
    document = json.loads(done.read_text())
    del document["distillation"], document["exit_weights"]
    done.write_text(json.dumps(document))
    run(tmp_path, replace(QUICK, epochs=1), resume=True)
    with pytest.raises(TrainingError, match="other exit_weights;"):
        run(tmp_path, replace(QUICK, epochs=1, exit_weights="depth"), resume=True)


def test_the_angle_is_compared_on_every_nth_batch_only(tmp_path: Path) -> None:
    steps: list[StepReport] = []
    run(tmp_path, replace(QUICK, epochs=2, angle_every=3), on_step=steps.append)
    # Step 1 is compared, then 4, 7, 10; across the epoch's end.
    assert [s.step for s in steps if not math.isnan(s.angle)] == [1, 4, 7, 10]


def test_a_batch_that_is_not_compared_takes_the_contrast_as_agreeing(tmp_path: Path) -> None:
    # A limit of 0° shuts every compared batch out, so only the uncompared ones feel the contrast.
    shut = Contrast(weight=1.0, max_angle=0.0)
    never = run(tmp_path / "a", replace(QUICK, epochs=1, contrast=shut))
    assert same_weights(never, run(tmp_path / "b", replace(QUICK, epochs=1, contrast=Contrast(weight=0.0))))
    sometimes = run(tmp_path / "c", replace(QUICK, epochs=1, contrast=shut, angle_every=2))
    assert not same_weights(never, sometimes)


def test_open_limits_give_the_same_step_with_one_backward_pass_or_two(tmp_path: Path) -> None:
    open_limit = replace(QUICK, epochs=1, contrast=Contrast(weight=0.5, max_angle=180.0))
    two = weights(run(tmp_path / "a", open_limit))
    one = weights(run(tmp_path / "b", replace(open_limit, angle_every=1000)))
    assert all(torch.allclose(two[n], one[n], atol=2e-4) for n in two)


def test_scl_is_weighed_whatever_the_angle_which_is_logged_all_the_same(tmp_path: Path) -> None:
    shut = Contrast(weight=0.5, max_angle=0.0)
    settings = replace(QUICK, epochs=1, method="jt+scl", contrast=shut)
    run(tmp_path / "a", settings)
    assert all(0 < float(r["angle"]) < 180 for r in log(tmp_path / "a" / "steps.csv"))
    # The same step in one backward pass; with ACL-Grad the limit of 0° would have dropped the contrast.
    two, one = (
        weights(run(tmp_path / name, replace(settings, angle_every=every))) for name, every in (("b", 1), ("c", 1000))
    )
    assert all(torch.allclose(two[n], one[n], atol=2e-4) for n in two)
    no_contrast = weights(run(tmp_path / "d", replace(settings, contrast=Contrast(weight=0.0))))
    assert not all(torch.allclose(two[n], no_contrast[n], atol=2e-4) for n in two)


def test_alternating_steps_move_the_other_exits_every_second_time(tmp_path: Path) -> None:
    class Watch:
        def __init__(self, network: MultiExitNetwork) -> None:
            self.network, self.seen = network, [network.label_embeddings(1).detach().clone()]

        def __call__(self, report: StepReport) -> None:
            self.seen.append(self.network.label_embeddings(1).detach().clone())

    network = toy_network(0)
    watch = Watch(network)
    train(network, TRAIN, VALIDATION, replace(QUICK, epochs=1, method="alt"), tmp_path, on_step=watch)
    moved = [not torch.equal(a, b) for a, b in itertools.pairwise(watch.seen)]
    assert moved == [False, True, False, True, False]


TWO_STAGES = replace(QUICK, method="2st", epochs=2)


def test_two_stages_train_the_last_exit_as_ce_would_and_then_only_the_others(tmp_path: Path) -> None:
    first = run(tmp_path / "ce", replace(TWO_STAGES, method="ce"))
    both = run(tmp_path / "2st", TWO_STAGES)
    for name, tensor in weights(both).items():
        assert torch.equal(tensor, weights(first)[name]) == (not name.startswith("exits.1.")), name
    epochs = log(tmp_path / "2st" / "epochs.csv")
    assert [(e["epoch"], e["stage"]) for e in epochs] == [("1", "1"), ("2", "1"), ("3", "2"), ("4", "2")]
    # The first stage is judged by the last exit, whose score the second cannot change.
    assert [e["exit_1"] == "" for e in epochs] == [True, True, False, False]
    assert epochs[0]["score"] == epochs[0]["exit_2"]
    assert epochs[2]["exit_2"] == epochs[3]["exit_2"] == max(e["exit_2"] for e in epochs[:2])


def test_the_second_stage_learns_from_the_best_epoch_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted_scores(monkeypatch, 0.9, 0.1, 0.2, 0.3)
    both = run(tmp_path / "2st", TWO_STAGES)
    scripted_scores(monkeypatch, 0.9, 0.1)
    first = run(tmp_path / "ce", replace(TWO_STAGES, method="ce"))
    assert torch.equal(both.label_embeddings(2), first.label_embeddings(2))


def test_early_stopping_ends_one_stage_and_not_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_scores(monkeypatch, 0.9, 0.8, 0.1, 0.2, 0.3)
    run(tmp_path, replace(TWO_STAGES, epochs=3, stop_after=1))
    assert [e["stage"] for e in log(tmp_path / "epochs.csv")] == ["1", "1", "2", "2", "2"]


def test_a_finished_network_keeps_every_weight_that_its_last_exit_reads(tmp_path: Path) -> None:
    before = weights(toy_network(0))
    settings = replace(QUICK, method="exits-only", epochs=1, distillation=Distillation(1.0))
    after = weights(run(tmp_path, settings))
    assert {n for n in before if not torch.equal(before[n], after[n])} == {n for n in before if "exits.1." in n}


def test_frozen_embeddings_stay_as_they_were_and_the_rest_learns(tmp_path: Path) -> None:
    before, after = toy_network(0), run(tmp_path, replace(QUICK, epochs=1, freeze_embeddings=True))
    for name, tensor in weights(after).items():
        assert torch.equal(tensor, before.state_dict()[name]) == name.startswith("embeddings."), name
    assert all(p.requires_grad for p in after.parameters())


def test_conflicts_are_counted_against_the_limit(tmp_path: Path) -> None:
    run(tmp_path, replace(QUICK, epochs=1, contrast=Contrast(max_angle=0.0)))
    (epoch,) = log(tmp_path / "epochs.csv")
    assert float(epoch["share_of_conflicts"]) == 1.0
    angles = [float(r["angle"]) for r in log(tmp_path / "steps.csv")]
    assert float(epoch["mean_angle"]) == pytest.approx(np.mean(angles), abs=1e-3)


def test_the_learning_rate_rises_then_falls_to_zero_and_exits_learn_faster() -> None:
    optimizer = torch.optim.AdamW(parameter_groups(toy_network(), QUICK))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, training.trainer._linear(100, 0.1))
    rates = []
    for _ in range(100):
        rates.append([g["lr"] for g in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    encoder, heads = [r[0] for r in rates], [r[-1] for r in rates]
    assert encoder[0] == pytest.approx(QUICK.learning_rate / 10)
    assert max(encoder) == pytest.approx(QUICK.learning_rate)
    assert encoder.index(max(encoder)) in (9, 10)
    assert encoder[-1] == pytest.approx(QUICK.learning_rate / 90)
    assert encoder[10:] == sorted(encoder[10:], reverse=True)
    assert heads == pytest.approx([2 * r for r in encoder])


def test_norms_and_biases_do_not_decay() -> None:
    network = toy_network()
    name_of = {id(p): n for n, p in network.named_parameters()}
    grouped = [(name_of[id(p)], g["weight_decay"]) for g in parameter_groups(network, QUICK) for p in g["params"]]
    assert sorted(n for n, _ in grouped) == sorted(name_of.values())
    for name, decay in grouped:
        assert (decay == 0.0) == (name.endswith("bias") or "norm" in name), name


# Scores.


def test_logits_come_in_the_order_of_the_data_whatever_the_batches(tmp_path: Path) -> None:
    network = toy_network().train()
    whole, small = exit_logits(network, VALIDATION), exit_logits(network, VALIDATION, batch_size=7)
    assert network.training
    assert set(whole) == {1, 2}
    for number, logits in whole.items():
        assert logits.shape == (60, 3)
        assert np.abs(logits - small[number]).max() < 1e-5
    network.eval()
    text = VALIDATION.texts[13]
    with torch.inference_mode():
        alone = network(torch.tensor([text.ids]), torch.ones(1, len(text), dtype=torch.long))
    assert np.abs(whole[2][13] - alone[2].logits[0].numpy()).max() < 1e-5


def test_exit_metrics_score_each_exit_by_itself() -> None:
    network = toy_network()
    logits = exit_logits(network, VALIDATION)
    scores = exit_metrics(network, VALIDATION, "accuracy")
    for number in (1, 2):
        right = sum(int(np.argmax(row)) == label for row, label in zip(logits[number], VALIDATION.labels, strict=True))
        assert scores[number] == pytest.approx(right / 60)


# The best epoch.


def scripted_scores(monkeypatch: pytest.MonkeyPatch, *scores: float) -> None:
    """Validation gives ``scores``, one an epoch, so that the best epoch is known."""
    left = list(scores)
    monkeypatch.setattr(
        training.trainer, "exit_metrics", lambda network, data, metric: dict.fromkeys((1, 2), left.pop(0))
    )


def test_the_best_epoch_is_returned_not_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_scores(monkeypatch, 0.4, 0.9, 0.8)
    network, seen = toy_network(0), []

    def on_epoch(report: EpochReport) -> None:
        seen.append((report.epoch, report.score, report.best, weights(network)))

    returned = train(network, TRAIN, VALIDATION, QUICK, tmp_path, on_epoch=on_epoch)
    assert [s[:3] for s in seen] == [(1, 0.4, True), (2, 0.9, True), (3, 0.8, False)]
    assert all(torch.equal(seen[1][3][n], t) for n, t in weights(returned).items())
    assert not all(torch.equal(seen[2][3][n], t) for n, t in weights(returned).items())
    assert same_weights(returned, MultiExitNetwork.load(tmp_path / "kept"))
    assert [float(e["score"]) for e in log(tmp_path / "epochs.csv")] == [0.4, 0.9, 0.8]


def test_the_last_epoch_is_returned_where_it_is_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_scores(monkeypatch, 0.4, 0.9, 0.8)
    network, seen = toy_network(0), []
    settings = replace(QUICK, keep="last")
    returned = train(
        network, TRAIN, VALIDATION, settings, tmp_path, on_epoch=lambda report: seen.append(weights(network))
    )
    assert all(torch.equal(seen[2][n], t) for n, t in weights(returned).items())
    assert not all(torch.equal(seen[1][n], t) for n, t in weights(returned).items())
    assert same_weights(returned, MultiExitNetwork.load(tmp_path / "kept"))


def test_of_equal_epochs_the_first_is_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_scores(monkeypatch, 0.5, 0.5)
    reports: list[EpochReport] = []
    run(tmp_path, replace(QUICK, epochs=2), on_epoch=reports.append)
    assert [r.best for r in reports] == [True, False]


def test_the_score_is_the_mean_over_the_trained_exits(tmp_path: Path) -> None:
    reports: list[EpochReport] = []
    run(tmp_path / "jt", replace(QUICK, epochs=1, method="jt"), on_epoch=reports.append)
    run(tmp_path / "ce", replace(QUICK, epochs=1, method="ce"), on_epoch=reports.append)
    assert set(reports[0].per_exit) == {1, 2}
    assert reports[0].score == pytest.approx(sum(reports[0].per_exit.values()) / 2)
    assert set(reports[1].per_exit) == {2}
    assert reports[1].score == reports[1].per_exit[2]


def test_training_stops_after_epochs_without_a_better_score(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted_scores(monkeypatch, 0.5, 0.6, 0.6, 0.4, 0.9)
    reports: list[EpochReport] = []
    run(tmp_path, replace(QUICK, epochs=5, stop_after=2), on_epoch=reports.append)
    assert [r.epoch for r in reports] == [1, 2, 3, 4]
    assert names(tmp_path) == FINISHED


# Killed and resumed.

EAGER = replace(QUICK, checkpoint_minutes=0.0)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[MultiExitNetwork, Path]:
    folder = tmp_path_factory.mktemp("unbroken")
    return run(folder), folder


def assert_same_run(network: MultiExitNetwork, folder: Path, unbroken: tuple[MultiExitNetwork, Path]) -> None:
    assert same_weights(network, unbroken[0])
    for name in ("steps.csv", "epochs.csv", "kept/network.safetensors"):
        assert (folder / name).read_bytes() == (unbroken[1] / name).read_bytes(), name
    assert names(folder) == FINISHED


@pytest.mark.parametrize("step", [2, STEPS, STEPS + 3, 3 * STEPS])
def test_a_run_killed_within_an_epoch_ends_as_if_it_had_not_been(
    tmp_path: Path, unbroken: tuple[MultiExitNetwork, Path], step: int
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, EAGER, on_step=kill_at_step(step))
    # The checkpoint is one step old: on_step comes first. A network with other weights must not matter.
    resumed: list[StepReport] = []
    network = run(tmp_path, EAGER, seed=9, resume=True, on_step=resumed.append)
    assert [s.step for s in resumed] == list(range(step, 3 * STEPS + 1))
    assert_same_run(network, tmp_path, unbroken)


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_run_killed_between_epochs_ends_as_if_it_had_not_been(
    tmp_path: Path, unbroken: tuple[MultiExitNetwork, Path], epoch: int
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, on_epoch=kill_at_epoch(epoch))
    assert_same_run(run(tmp_path, seed=9, resume=True), tmp_path, unbroken)


def test_a_run_killed_long_after_its_checkpoint_does_those_steps_again(
    tmp_path: Path, unbroken: tuple[MultiExitNetwork, Path]
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, on_step=kill_at_step(2 * STEPS - 1))
    assert len(log(tmp_path / "steps.csv")) == 2 * STEPS - 1
    resumed: list[StepReport] = []
    network = run(tmp_path, seed=9, resume=True, on_step=resumed.append)
    assert resumed[0].step == STEPS + 1
    assert_same_run(network, tmp_path, unbroken)


@pytest.fixture(scope="module")
def unbroken_stages(tmp_path_factory: pytest.TempPathFactory) -> tuple[MultiExitNetwork, Path]:
    folder = tmp_path_factory.mktemp("unbroken_stages")
    return run(folder, TWO_STAGES), folder


@pytest.mark.parametrize("step", [STEPS + 2, 2 * STEPS, 2 * STEPS + 1, 3 * STEPS + 2])
@pytest.mark.parametrize("minutes", [0.0, 5.0])
def test_a_run_of_two_stages_can_be_killed_in_either(
    tmp_path: Path, unbroken_stages: tuple[MultiExitNetwork, Path], step: int, minutes: float
) -> None:
    settings = replace(TWO_STAGES, checkpoint_minutes=minutes)
    with pytest.raises(Killed):
        run(tmp_path, settings, on_step=kill_at_step(step))
    assert_same_run(run(tmp_path, settings, seed=9, resume=True), tmp_path, unbroken_stages)


def test_a_run_killed_between_its_stages_ends_as_if_it_had_not_been(
    tmp_path: Path, unbroken_stages: tuple[MultiExitNetwork, Path]
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, TWO_STAGES, on_epoch=kill_at_epoch(2))
    assert_same_run(run(tmp_path, TWO_STAGES, seed=9, resume=True), tmp_path, unbroken_stages)


def test_a_kill_between_the_kept_weights_and_the_checkpoint_does_not_mix_stages(
    tmp_path: Path, unbroken_stages: tuple[MultiExitNetwork, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training.trainer._log_epoch

    def killed(path: Path, report: EpochReport) -> None:
        if report.epoch == 3:
            raise Killed
        real(path, report)

    with monkeypatch.context() as patch:
        patch.setattr(training.trainer, "_log_epoch", killed)
        with pytest.raises(Killed):
            run(tmp_path, TWO_STAGES)
    assert_same_run(run(tmp_path, TWO_STAGES, seed=9, resume=True), tmp_path, unbroken_stages)


def test_a_run_killed_twice_ends_as_if_it_had_not_been(tmp_path: Path, unbroken: tuple[MultiExitNetwork, Path]) -> None:
    with pytest.raises(Killed):
        run(tmp_path, EAGER, on_step=kill_at_step(3))
    with pytest.raises(Killed):
        run(tmp_path, EAGER, resume=True, on_step=kill_at_step(3 * STEPS - 2))
    assert_same_run(run(tmp_path, EAGER, resume=True), tmp_path, unbroken)


def test_a_torn_last_row_of_the_log_is_dropped(tmp_path: Path, unbroken: tuple[MultiExitNetwork, Path]) -> None:
    with pytest.raises(Killed):
        run(tmp_path, EAGER, on_step=kill_at_step(STEPS + 2))
    with (tmp_path / "steps.csv").open("a", encoding="utf-8") as stream:
        stream.write("1")  # the beginning of row 12, cut off by the kill
    assert_same_run(run(tmp_path, EAGER, resume=True), tmp_path, unbroken)


def test_a_run_killed_before_its_first_checkpoint_starts_over(
    tmp_path: Path, unbroken: tuple[MultiExitNetwork, Path]
) -> None:
    with pytest.raises(Killed):
        run(tmp_path, on_step=kill_at_step(2))
    assert_same_run(run(tmp_path, resume=True), tmp_path, unbroken)


def test_a_run_killed_right_after_it_stopped_early_does_not_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = replace(QUICK, epochs=4, stop_after=1)
    scripted_scores(monkeypatch, 0.5, 0.4, 0.9, 0.9)
    with pytest.raises(Killed):
        run(tmp_path, settings, on_epoch=kill_at_epoch(2))
    steps: list[StepReport] = []
    run(tmp_path, settings, resume=True, on_step=steps.append)
    assert steps == []
    assert [e["epoch"] for e in log(tmp_path / "epochs.csv")] == ["1", "2"]


def test_patience_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(QUICK, epochs=6, stop_after=2)
    scripted_scores(monkeypatch, 0.5, 0.4, 0.3, 0.9, 0.9, 0.9)
    with pytest.raises(Killed):
        run(tmp_path, settings, on_epoch=kill_at_epoch(2))
    run(tmp_path, settings, resume=True)
    assert [e["epoch"] for e in log(tmp_path / "epochs.csv")] == ["1", "2", "3"]


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1)
    first = run(tmp_path, settings)
    steps: list[StepReport] = []
    again = run(tmp_path, settings, seed=9, resume=True, on_step=steps.append)
    assert steps == []
    assert same_weights(first, again)
    assert not again.training


def test_without_resume_a_finished_folder_is_trained_anew(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1)
    run(tmp_path, settings)
    steps: list[StepReport] = []
    with pytest.raises(Killed):
        run(tmp_path, settings, on_step=lambda s: (steps.append(s), kill_at_step(2)(s))[0])
    assert [s.step for s in steps] == [1, 2]
    # And nothing of the earlier run is left that a resume could take for this one's.
    assert names(tmp_path) == {"steps.csv"}


def test_without_resume_an_older_checkpoint_is_not_left_for_a_later_resume(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, on_epoch=kill_at_epoch(2))
    with pytest.raises(Killed):
        run(tmp_path, on_step=kill_at_step(2))
    steps: list[StepReport] = []
    run(tmp_path, resume=True, on_step=steps.append)
    assert steps[0].step == 1


@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"learning_rate": 1e-3}, "learning_rate"),
        ({"seed": 5, "batch_size": 16}, "batch_size, seed"),
        ({"contrast": Contrast(weight=0.9)}, "contrast"),
        ({"epochs": 2}, "epochs"),
    ],
)
def test_other_settings_are_not_resumed_and_are_named(
    tmp_path: Path, finished: bool, changes: dict[str, Any], named: str
) -> None:
    settings = replace(QUICK, epochs=1, method="jt")
    if finished:
        run(tmp_path, settings)
    else:
        with pytest.raises(Killed):
            run(tmp_path, settings, on_epoch=kill_at_epoch(1))
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    file = "done.json" if finished else "checkpoint.pt"
    with pytest.raises(TrainingError, match=rf"{file}: was written with other {named}; it cannot be resumed"):
        run(tmp_path, replace(settings, **changes), resume=True)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before


def test_another_network_or_other_data_are_not_resumed(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1, method="jt")
    run(tmp_path, settings)
    with pytest.raises(TrainingError, match="other architecture;"):
        train(toy_network(0, "peek"), TRAIN, VALIDATION, settings, tmp_path, resume=True)
    with pytest.raises(TrainingError, match="other training data;"):
        train(toy_network(0), toy_data(150, seed=3), VALIDATION, settings, tmp_path, resume=True)
    relabelled = Tokenized(VALIDATION.texts, VALIDATION.labels[::-1].copy())
    with pytest.raises(TrainingError, match="other validation data;"):
        train(toy_network(0), TRAIN, relabelled, settings, tmp_path, resume=True)


def test_how_often_checkpoints_are_written_may_change(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1)
    with pytest.raises(Killed):
        run(tmp_path, replace(settings, checkpoint_minutes=0.0), on_step=kill_at_step(3))
    steps: list[StepReport] = []
    run(tmp_path, replace(settings, checkpoint_minutes=7.0), resume=True, on_step=steps.append)
    assert steps[0].step == 3


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(tmp_path, on_epoch=kill_at_epoch(1))
    checkpoint = tmp_path / "checkpoint.pt"
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    with pytest.raises(TrainingError, match=r"checkpoint\.pt: not a whole checkpoint; remove it"):
        run(tmp_path, resume=True)


# What ends at once.


def test_nothing_but_the_result_is_left_at_the_end(unbroken: tuple[MultiExitNetwork, Path]) -> None:
    _, folder = unbroken
    assert names(folder) == FINISHED
    assert names(folder / "kept") == {"network.safetensors", "architecture.json"}
    assert json.loads((folder / "done.json").read_text())["epochs"] == 3
    assert [r["step"] for r in log(folder / "steps.csv")] == [str(i) for i in range(1, 3 * STEPS + 1)]
    assert [r["epoch"] for r in log(folder / "epochs.csv")] == ["1", "2", "3"]


@pytest.mark.parametrize("place", ["classifier", "features"])
def test_a_loss_that_is_not_finite_ends_training_before_it_spoils_weights(tmp_path: Path, place: str) -> None:
    network = toy_network(0, dropout=0.0)
    with torch.no_grad():
        if place == "classifier":
            network.exits["1"].classifier.bias[0] = math.nan
        else:
            # tanh keeps the logits finite; a label embedding of no length does not turn the contrast into a NaN.
            network.exits["1"].classifier.weight[0] = math.inf
    before = weights(network)
    with pytest.raises(TrainingError, match=r"at step 1; a lower learning_rate than 0\.002 may help"):
        train(network, TRAIN, VALIDATION, QUICK, tmp_path)
    assert all(torch.equal(before[n].nan_to_num(), t.nan_to_num()) for n, t in weights(network).items())


def test_a_contrastive_loss_that_is_not_a_number_ends_training_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = training.trainer.objective

    def poisoned(*arguments: Any, **options: Any) -> Any:
        goal = real(*arguments, **options)
        return replace(goal, contrastive=goal.contrastive * math.nan)

    monkeypatch.setattr(training.trainer, "objective", poisoned)
    with pytest.raises(TrainingError, match=r"\(contrastive: nan\) at step 1"):
        run(tmp_path)


def test_a_learning_rate_far_too_high_is_reported_rather_than_saved(tmp_path: Path) -> None:
    network = toy_network(0)
    with torch.no_grad():
        network.embeddings.word.weight.mul_(1e38)
    with pytest.raises(TrainingError, match="the loss is"):
        train(network, TRAIN, VALIDATION, QUICK, tmp_path)
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("training_rows", "validation_rows", "name"), [(0, 5, "training"), (1, 5, "training"), (9, 0, "validation")]
)
def test_too_few_examples_are_refused(tmp_path: Path, training_rows: int, validation_rows: int, name: str) -> None:
    def first(count: int) -> Tokenized:
        return Tokenized(TRAIN.texts[:count], TRAIN.labels[:count])

    with pytest.raises(TrainingError, match=f"{name} needs at least"):
        train(toy_network(), first(training_rows), first(validation_rows), QUICK, tmp_path)


def test_two_stages_need_two_exits(tmp_path: Path) -> None:
    one = tiny_architecture().model_copy(update={"exits": tuple(exits((2, "mean")))})
    with pytest.raises(TrainingError, match="method '2st' needs at least two exits, and there is one"):
        train(MultiExitNetwork(one, position_rows=16), TRAIN, VALIDATION, TWO_STAGES, tmp_path)


def test_two_examples_are_enough_to_train(tmp_path: Path) -> None:
    two = Tokenized(TRAIN.texts[:2], TRAIN.labels[:2])
    train(toy_network(), two, two, replace(QUICK, epochs=1), tmp_path)
    assert len(log(tmp_path / "steps.csv")) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "bert"}, r"method must be one of ce, ce\+scl, acl, jt, 2st, .*, not 'bert'"),
        ({"epochs": 0}, "epochs must be at least 1, not 0"),
        ({"batch_size": 1}, "batch_size must be at least 2, not 1"),
        ({"angle_every": 0}, "angle_every must be at least 1, not 0"),
        ({"learning_rate": 0.0}, "learning_rate must lie between 0 and 1, not 0.0"),
        ({"learning_rate": math.nan}, "learning_rate"),
        ({"warmup": 1.0}, r"warmup must lie in \[0, 1\), not 1.0"),
        ({"stop_after": 0}, "stop_after must be at least 1, not 0"),
        ({"metric": "bleu"}, "metric must be one of accuracy, f1, matthews, agreement, not 'bleu'"),
        ({"exit_weights": "deep"}, "exit_weights must be one of uniform, depth, not 'deep'"),
        ({"method": "ce", "distillation": Distillation(1.0)}, "distillation needs a method that trains several exits"),
        ({"method": "ce+scl", "contrast": Contrast(weight=1.5)}, "contrast weight must be at most 1 for 'ce\\+scl'"),
        ({"mixed_precision": "fp8"}, "mixed_precision must be one of no, bf16, not 'fp8'"),
        ({"weight_decay": -1.0}, "weight_decay must be a number of at least 0, not -1.0"),
        ({"checkpoint_minutes": -1.0}, "checkpoint_minutes must be a number of at least 0"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm must be a number above 0, not 0.0"),
        ({"head_learning_rate_factor": math.nan}, "head_learning_rate_factor must be a number above 0, not nan"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingSettings(**changes)


def test_mixed_precision_trains_and_one_process_may_use_both(tmp_path: Path) -> None:
    settings = replace(QUICK, epochs=1)
    exact = run(tmp_path / "a", settings)
    mixed = run(tmp_path / "b", replace(settings, mixed_precision="bf16"))
    assert {p.dtype for p in mixed.parameters()} == {torch.float32}
    assert not same_weights(exact, mixed)
    difference = max(float((x - y).abs().max()) for x, y in zip(exact.parameters(), mixed.parameters(), strict=True))
    assert difference < 0.1
