"""What a server may use of the machine: affinity and cgroup limits, not what the host has; and turns on it."""

import math
import os
import threading
import time
from pathlib import Path

import pytest

from server.machine import (
    BYTES_OF_A_PROCESS,
    MACS_OF_A_CPU,
    MOST_PROCESSES,
    Turns,
    cpu_allowance,
    cpu_quota,
    fit_processes,
    memory_allowance,
    most_lone_threads,
    split_cpus,
)


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


def test_a_quota_of_less_than_a_cpu_is_told(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("25000 100000\n")
    assert cpu_quota(tmp_path, tmp_path / "none") == 0.25
    assert cpu_quota(tmp_path / "elsewhere", tmp_path / "none") == math.inf


@pytest.mark.parametrize(("cpus", "threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (8, 4), (64, 8)])
def test_a_run_alone_leaves_half_of_the_cpus_to_the_event_loop_and_its_clients(cpus: int, threads: int) -> None:
    assert most_lone_threads(cpus) == threads


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


def test_turns_are_given_to_so_many_at_once_and_in_the_order_they_were_asked_for() -> None:
    turns, release = Turns(1), threading.Event()
    order: list[int] = []

    def run(number: int) -> None:
        with turns.turn():
            order.append(number)
            assert release.wait(30)

    threads = []
    for number in range(4):
        threads.append(threading.Thread(target=run, args=(number,)))
        threads[-1].start()
        while len(order) + len(turns._waiting) <= number:
            time.sleep(0.001)
    assert order == [0]
    release.set()
    for thread in threads:
        thread.join(30)
    assert order == [0, 1, 2, 3]


def test_a_turn_knows_whether_it_is_the_only_one() -> None:
    turns = Turns(2)
    with turns.turn() as first, turns.turn() as second:
        assert (first, second) == (True, False)
    with turns.turn() as again:
        assert again


def test_a_run_that_fails_gives_its_turn_back() -> None:
    turns = Turns(1)
    with pytest.raises(ZeroDivisionError), turns.turn():
        raise ZeroDivisionError
    with turns.turn() as lone:
        assert lone


MEMINFO = "MemTotal:       32000000 kB\nMemFree:         1000000 kB\nMemAvailable:   20000000 kB\n"


@pytest.mark.parametrize(
    ("file", "content", "line", "expected"),
    [
        ("pod/memory.max", "1073741824\n", "0::/pod/container", 2**30),
        ("pod/container/memory.max", "max\n", "0::/pod/container", 20_000_000 * 1024),
        ("memory/docker/memory.limit_in_bytes", "536870912\n", "9:memory:/docker", 2**29),
        ("memory/docker/memory.limit_in_bytes", "9223372036854771712\n", "9:memory:/docker", 20_000_000 * 1024),
        ("memory/docker/memory.limit_in_bytes", "536870912\n", "4:cpu,cpuacct:/docker", 20_000_000 * 1024),
    ],
)
def test_the_tightest_limit_of_memory_counts(tmp_path: Path, file: str, content: str, line: str, expected: int) -> None:
    limit = tmp_path / "root" / file
    limit.parent.mkdir(parents=True)
    limit.write_text(content)
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    assert memory_allowance(tmp_path / "root", _self(tmp_path, line), meminfo) == expected


def test_without_any_limit_memory_is_endless(tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    assert memory_allowance(nothing, nothing, nothing) == math.inf


@pytest.mark.parametrize(
    ("cpus", "memory", "size", "expected"),
    [
        (1, math.inf, 1.0, 1),
        (2, math.inf, 1.0, 2),
        (4, math.inf, 1.0, 4),
        (4, math.inf, 0.01, 4),
        (4, math.inf, 2.0, 2),
        (5, math.inf, 2.0, 3),
        (8, math.inf, 8.0, 1),
        (16, math.inf, 8.0, 2),
        (64, math.inf, 1.0, MOST_PROCESSES),
        (8, 4 * BYTES_OF_A_PROCESS, 1.0, 3),
        (8, BYTES_OF_A_PROCESS / 2, 1.0, 1),
    ],
)
def test_small_networks_get_a_process_for_each_cpu_as_far_as_memory_goes(
    cpus: int, memory: float, size: float, expected: int
) -> None:
    assert fit_processes(cpus, memory, size * MACS_OF_A_CPU, 0) == expected


def test_large_graphs_need_more_memory_a_process() -> None:
    assert fit_processes(8, 4e9, MACS_OF_A_CPU, 10**6) > fit_processes(8, 4e9, MACS_OF_A_CPU, 10**8) >= 1
