"""A run's numbers as they come, in TensorBoard or in another tracker that accelerate knows."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.tracking import get_available_trackers
from accelerate.utils import LoggerType

from training.pipeline import Observer
from training.trainer import EpochReport, StepReport

TRACKERS = tuple(str(kind) for kind in LoggerType if kind != LoggerType.ALL)


@contextmanager
def tracked(
    observer: Observer, tracker: str | None, folder: Path, settings: Mapping[str, bool | str | float | int | None]
) -> Iterator[Observer]:
    """``observer``, told to ``tracker`` too (None: to none), which logs below ``folder/logs`` where it logs to files.

    Per step: cross-entropy, contrastive part, angle, examples per second; per epoch: every exit's validation score.
    Raises ValueError for a tracker that accelerate does not know or whose package is missing.
    """
    if tracker is None:
        yield observer
        return
    if tracker not in TRACKERS:
        raise ValueError(f"track must be one of {', '.join(TRACKERS)}, not {tracker!r}")
    # accelerate itself leaves out what it cannot import.
    if tracker not in map(str, get_available_trackers()):
        raise ValueError(f"track: the package of {tracker!r} is not installed")
    accelerator = Accelerator(log_with=tracker, project_dir=str(folder / "logs"))
    folder.mkdir(parents=True, exist_ok=True)
    accelerator.init_trackers("offramp", config=dict(settings))
    latest = 0

    def step(report: StepReport) -> None:
        nonlocal latest
        latest = report.step
        values = {
            "step/cross_entropy": report.loss,
            "step/contrastive": report.contrastive,
            "step/angle": report.angle,
            "step/examples_per_second": report.examples_per_second,
        }
        accelerator.log({name: value for name, value in values.items() if not math.isnan(value)}, step=report.step)
        observer.step(report)

    def epoch(report: EpochReport) -> None:
        values = {f"validation/exit_{number}": value for number, value in report.per_exit.items()}
        values |= {"validation/mean": report.score, "epoch/share_of_conflicts": report.share_of_conflicts}
        accelerator.log({name: value for name, value in values.items() if not math.isnan(value)}, step=latest)
        observer.epoch(report)

    try:
        yield replace(observer, step=step, epoch=epoch)
    finally:
        accelerator.end_training()
