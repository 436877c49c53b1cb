"""What a tracker is told of a run; TensorBoard's files are read with its own reader."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.training.toy import toy_data, toy_network
from training.pipeline import Observer
from training.tracking import TRACKERS, tracked
from training.trainer import EpochReport, StepReport, TrainingSettings, train


@contextmanager
def alone() -> Iterator[None]:
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def test_tensorboard_gets_every_step_and_every_epoch(tmp_path: Path) -> None:
    steps: list[StepReport] = []
    epochs: list[EpochReport] = []
    settings = TrainingSettings(method="acl-cl", epochs=2, batch_size=20, learning_rate=2e-3)
    with (
        alone(),
        tracked(Observer(step=steps.append, epoch=epochs.append), "tensorboard", tmp_path, {"seed": 0}) as told,
    ):
        train(
            toy_network(), toy_data(40, 0), toy_data(20, 1), settings, tmp_path / "run",
            on_step=told.step, on_epoch=told.epoch,
        )  # fmt: skip
    found = EventAccumulator(str(tmp_path / "logs" / "offramp")).Reload()
    logged = {name: [(e.step, e.value) for e in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert logged["step/cross_entropy"] == [(s.step, pytest.approx(s.loss, rel=1e-5)) for s in steps]
    assert logged["step/angle"] == [(s.step, pytest.approx(s.angle, rel=1e-5)) for s in steps]
    assert logged["validation/exit_2"] == [
        (step, pytest.approx(e.per_exit[2], rel=1e-5)) for step, e in zip((2, 4), epochs, strict=True)
    ]


def test_what_a_method_does_not_have_is_not_logged(tmp_path: Path) -> None:
    with alone(), tracked(Observer(), "tensorboard", tmp_path, {}) as told:
        told.step(StepReport(1, 1, 2, 0.7, float("nan"), float("nan"), 10.0))
    found = EventAccumulator(str(tmp_path / "logs" / "offramp")).Reload()
    assert set(found.Tags()["scalars"]) == {"step/cross_entropy", "step/examples_per_second"}


def test_without_a_tracker_nothing_stands_between() -> None:
    observer = Observer()
    with tracked(observer, None, Path("nowhere"), {}) as told:
        assert told is observer


def test_an_unknown_tracker_and_a_missing_package_are_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"track must be one of .*tensorboard.*, not 'paper'"),
        tracked(Observer(), "paper", tmp_path, {}),
    ):
        pass
    assert "wandb" in TRACKERS
    with (
        alone(),
        pytest.raises(ValueError, match="track: the package of 'wandb' is not installed"),
        tracked(Observer(), "wandb", tmp_path, {}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
