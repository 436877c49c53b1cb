"""How many CPUs this process may use, and how to spend them.

ONNX Runtime counts the host's cores, whatever the container may use; so the count is made here, from the scheduler
affinity and the cgroup quota, and every session is told.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Between two runs a thread holds Python's lock for about 0.1 ms, and a run takes 0.5 ms or more (docs/decisions/0008).
MOST_RUNS = 16


def cpu_allowance(cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs that this process may use, at least 1: its affinity, or its cgroup quota (rounded up) if less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, cpu_quota(cgroup_root, self_cgroup))))


def cpu_quota(cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs that the cgroup quota allows this process, which may be less than one; infinite without a quota."""
    quota = _cgroup_quota(cgroup_root, self_cgroup)
    return math.inf if quota is None else quota


def most_lone_threads(cpus: int) -> int:
    """Of ``cpus`` CPUs those that a run may take which has the machine to itself: the event loop, the client and
    whoever comes meanwhile need the others (docs/decisions/0008). More than 8 never helped."""
    return max(1, min(cpus // 2, 8))


def split_cpus(cpus: int, runs: int | None, threads: int | None) -> tuple[int, int]:
    """``(runs, threads)``: how many runs at once, on how many threads each, under load for ``cpus`` CPUs; what is given
    is kept, the rest fits into the allowance.

    One thread per run: 8 to 12 % more texts a second than half as many runs on two threads each (docs/decisions/0008).
    More runs than ``MOST_RUNS`` would wait for Python's lock, so then they get more threads.
    """
    if runs is None:
        runs = max(1, cpus // threads) if threads else min(cpus, MOST_RUNS)
    if threads is None:
        threads = max(1, cpus // runs)
    return runs, threads


class Turns:
    """Lets runs of several models go on ``at_once`` at a time, in the order in which they asked.

    So each model may use all CPUs while the others are idle, and together they never run more threads than there are
    CPUs: each run would take longer, and answers come no sooner.
    """

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._running = 0
        self._waiting: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[bool]:
        """Waits for a turn; says whether nobody else runs as it begins."""
        yours: threading.Event | None = None
        with self._lock:
            if self._running < self._at_once:
                self._running += 1
            else:
                yours = threading.Event()
                self._waiting.append(yours)
            lone = self._running == 1 and yours is None
        if yours is not None:
            yours.wait()
        try:
            yield lone
        finally:
            with self._lock:
                # A place goes straight to whoever waits longest: who comes back at once would take it again and again.
                if self._waiting:
                    self._waiting.popleft().set()
                else:
                    self._running -= 1


def _cgroup_quota(root: Path, self_cgroup: Path) -> float | None:
    """CPUs allowed by the tightest quota on this process's way up the cgroup tree, or ``None`` where there is none."""
    quotas = [quota for folder in _own_folders(root, self_cgroup) if (quota := _quota_of(folder)) is not None]
    return min(quotas, default=None)


def _own_folders(root: Path, self_cgroup: Path) -> list[Path]:
    """The cgroup folders that bind this process: its own and every parent, for cgroup v2 and v1's cpu controller."""
    folders = [root, root / "cpu"]
    try:
        lines = self_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        folder = (root / "cpu" if controllers else root) / path.strip("/")
        folders += [folder, *(parent for parent in folder.parents if parent.is_relative_to(root))]
    return folders


def _quota_of(folder: Path) -> float | None:
    try:
        limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()[:2]
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        pass
    try:
        limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
        period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return None if int(limit) <= 0 else int(limit) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
