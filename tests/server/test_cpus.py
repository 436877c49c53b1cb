"""CPU allowance: affinity and cgroup quota, not the host's cores."""

import os
from pathlib import Path

import pytest

from server.cpus import cpu_allowance, split_cpus


@pytest.fixture
def sixteen_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))


def _self(tmp_path: Path, line: str) -> Path:
    file = tmp_path / "cgroup"
    file.write_text(line + "\n")
    return file


@pytest.mark.usefixtures("sixteen_cores")
@pytest.mark.parametrize(
    ("quota", "cpus"), [("200000 100000", 2), ("150000 100000", 2), ("10000 100000", 1), ("max 100000", 16)]
)
def test_the_quota_of_cgroup_v2_counts_rounded_up(tmp_path: Path, quota: str, cpus: int) -> None:
    folder = tmp_path / "root" / "pod"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text(quota)
    assert cpu_allowance(tmp_path / "root", _self(tmp_path, "0::/pod")) == cpus


@pytest.mark.usefixtures("sixteen_cores")
def test_a_parents_tighter_quota_counts(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "pod" / "container"
    folder.mkdir(parents=True)
    (folder / "cpu.max").write_text("800000 100000")
    (folder.parent / "cpu.max").write_text("300000 100000")
    assert cpu_allowance(tmp_path / "root", _self(tmp_path, "0::/pod/container")) == 3


@pytest.mark.usefixtures("sixteen_cores")
def test_the_quota_of_cgroup_v1_counts(tmp_path: Path) -> None:
    folder = tmp_path / "root" / "cpu" / "docker"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text("400000")
    (folder / "cpu.cfs_period_us").write_text("100000")
    assert cpu_allowance(tmp_path / "root", _self(tmp_path, "4:cpu,cpuacct:/docker")) == 4


@pytest.mark.usefixtures("sixteen_cores")
def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert cpu_allowance(tmp_path / "none", tmp_path / "none") == 16


@pytest.mark.parametrize(
    ("cpus", "runs", "threads", "expected"),
    [
        (1, None, None, (1, 1)),
        (2, None, None, (2, 1)),
        (8, None, None, (8, 1)),
        (8, None, 2, (4, 2)),
        (64, None, None, (16, 4)),
        (8, 8, None, (8, 1)),
        (8, None, 1, (8, 1)),
        (2, 4, 3, (4, 3)),
        (2, 4, None, (4, 1)),
    ],
)
def test_runs_and_threads_fill_the_allowance(
    cpus: int, runs: int | None, threads: int | None, expected: tuple[int, int]
) -> None:
    assert split_cpus(cpus, runs, threads) == expected
