"""What test_parallel.py starts with ``accelerate launch``: toy runs, one process or several.

``python -m tests.training.two_processes FOLDER whole|killed|resumed``
"""

import os
import sys
from pathlib import Path

from tests.training.toy import toy_data, toy_network
from training.trainer import StepReport, TrainingSettings, train

# 150 rows in batches of 31: the parts of two processes are not equal, and the last batch is smaller.
SETTINGS = TrainingSettings(
    epochs=2, batch_size=31, learning_rate=1e-3, head_learning_rate_factor=2.0, checkpoint_minutes=0.0
)
KILLED_AT = 7


def toy_run(folder: Path, dropout: float, *, kill_at: int | None = None, resume: bool = False) -> None:
    def on_step(report: StepReport) -> None:
        if report.step == kill_at:
            os._exit(9)

    data, validation = toy_data(150, seed=1), toy_data(40, seed=2)
    train(toy_network(0, dropout=dropout), data, validation, SETTINGS, folder, resume=resume, on_step=on_step)


if __name__ == "__main__":
    target, what = Path(sys.argv[1]), sys.argv[2]
    if what == "whole":
        toy_run(target / "exact", 0.0)
        toy_run(target / "dropout", 0.1)
    else:
        toy_run(target / "stopped", 0.1, kill_at=KILLED_AT if what == "killed" else None, resume=what == "resumed")
