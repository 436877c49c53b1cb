"""Several processes take the steps that one would take on the whole batch."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from models.network import ExitOutput
from tests.training.two_processes import KILLED_AT, toy_run
from training.checkpoint import Checkpoint
from training.parallel import Processes


def launch(folder: Path, what: str) -> int:
    """``accelerate launch`` on two CPU processes (gloo); returns the exit code."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--num_cpu_threads_per_process", "1", "--mixed_precision", "no"]
    command += ["--dynamo_backend", "no", "--main_process_port", "0"]
    command += ["-m", "tests.training.two_processes", str(folder), what]
    here = Path(__file__).parents[2]
    return subprocess.run(command, cwd=here, check=False, capture_output=True, timeout=900).returncode


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    assert launch(folder, "whole") == 0
    return folder


def steps(folder: Path) -> list[dict[str, float]]:
    with (folder / "steps.csv").open(encoding="utf-8") as stream:
        return [{name: float(cell) for name, cell in row.items()} for row in csv.DictReader(stream)]


def test_two_processes_end_with_the_weights_of_one_on_the_whole_batch(two: Path, tmp_path: Path) -> None:
    toy_run(tmp_path, 0.0)
    ours, theirs = (load_file(folder / "kept" / "network.safetensors") for folder in (tmp_path, two / "exact"))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.allclose(tensor, theirs[name], atol=2e-5), name


def test_two_processes_see_the_losses_and_angles_of_one(two: Path, tmp_path: Path) -> None:
    toy_run(tmp_path, 0.0)
    alone, together = steps(tmp_path), steps(two / "exact")
    assert len(alone) == len(together) == 10
    for a, b in zip(alone, together, strict=True):
        for name in ("step", "epoch", "cross_entropy", "contrastive", "angle"):
            assert b[name] == pytest.approx(a[name], rel=1e-3), name


def test_two_processes_that_were_killed_resume_to_the_same_weights(two: Path) -> None:
    assert launch(two, "killed") != 0
    assert len(steps(two / "stopped")) < KILLED_AT
    # Each process drops out in its own way, and goes on doing so.
    first, second = Checkpoint.load(two / "stopped" / "checkpoint.pt").random_states
    assert not torch.equal(first["cpu"], second["cpu"])
    assert launch(two, "resumed") == 0
    weights = [(two / name / "kept" / "network.safetensors").read_bytes() for name in ("dropout", "stopped")]
    assert weights[0] == weights[1]


def test_the_parts_of_a_batch_are_the_batch_in_order() -> None:
    rows = [7, 3, 9, 1, 4]
    assert [Processes(rank, 2).part(rows) for rank in range(2)] == [[7, 3], [9, 1, 4]]
    assert Processes().part(rows) == rows


def test_a_process_for_which_no_row_is_left_computes_one_all_the_same() -> None:
    assert [Processes(rank, 3).part([8, 5]) for rank in range(3)] == [[8], [8], [5]]


def test_one_process_communicates_with_nobody() -> None:
    alone = Processes()
    outputs = {1: ExitOutput(torch.ones(2, 3), torch.ones(2, 4))}
    gradient = torch.ones(3)
    assert alone.whole(outputs, 2) == outputs
    assert alone.mean([gradient, None]) == [gradient, None]
    assert alone.gather(5) == [5] and alone.agree(True) and not alone.agree(False)
    assert alone.is_main and not Processes(1, 2).is_main
