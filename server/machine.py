"""How many CPUs and how much memory a server may use, and how to spend them.

ONNX Runtime counts the host's cores, whatever the container may use; so the count is made here, from the scheduler
affinity and the cgroup quota, and every session is told.
"""

import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# An event loop takes 1.2 ms of Python for a short request, and while it has the interpreter's lock, runs that are over
# wait for it. Where a text costs little, a process for each CPU answers most; where it costs more, one for several is
# as good and spares memory (docs/decisions/0013). In multiply-accumulates of a text of 32 tokens at full depth:
# MiniLM-L6 has 0.35e9 and was measured, BERT-base 2.8e9.
MACS_OF_A_CPU = 0.35e9
# A process of the server before it has loaded a model.
BYTES_OF_A_PROCESS = 150_000_000
# Bytes of memory for a byte of graphs: weights as they run, copies for lone runs, a version and its successor.
BYTES_OF_A_GRAPH_BYTE = 4
# More were never measured; whoever has the CPUs for them can ask for them.
MOST_PROCESSES = 16

# Between two runs a thread holds Python's lock for about 0.1 ms, and a run takes 0.5 ms or more (docs/decisions/0008).
MOST_RUNS = 16


def cpu_allowance(cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs that this process may use, at least 1: its affinity, or its cgroup quota (rounded up) if less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min(affinity, cpu_quota(cgroup_root, self_cgroup))))


def cpu_quota(cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> float:
    """CPUs that the cgroup quota allows this process, which may be less than one; infinite without a quota."""
    return min(_limits(cgroup_root, self_cgroup, "cpu", _quota_of), default=math.inf)


def memory_allowance(
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    self_cgroup: Path = Path("/proc/self/cgroup"),
    meminfo: Path = Path("/proc/meminfo"),
) -> float:
    """Bytes of memory that this process may use: what the machine has available, or its cgroup's limit if less;
    infinite where neither is known."""
    limits = [*_limits(cgroup_root, self_cgroup, "memory", _memory_limit_of), math.inf]
    with suppress(OSError, StopIteration, ValueError):
        lines = meminfo.read_text(encoding="ascii").splitlines()
        limits.append(1024 * int(next(line for line in lines if line.startswith("MemAvailable:")).split()[1]))
    return min(limits)


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


def fit_processes(cpus: int, memory: float, macs: float, graph_bytes: int) -> int:
    """Processes of a server that has ``cpus`` CPUs and ``memory`` bytes for models of ``graph_bytes`` bytes in all, the
    cheapest of which takes ``macs`` multiply-accumulates for a short text.

    They are to need no more than three quarters of the memory: the rest is for requests.
    """
    by_cpus = math.ceil(cpus / max(1, round(macs / MACS_OF_A_CPU)))
    by_memory = 0.75 * memory / (BYTES_OF_A_PROCESS + BYTES_OF_A_GRAPH_BYTE * graph_bytes)
    return int(max(1, min(by_cpus, by_memory, MOST_PROCESSES)))


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


def _limits(root: Path, self_cgroup: Path, controller: str, limit_of: Callable[[Path], float | None]) -> list[float]:
    """What ``limit_of`` finds on this process's way up the cgroup tree."""
    folders = _own_folders(root, self_cgroup, controller)
    return [limit for folder in folders if (limit := limit_of(folder)) is not None]


def _own_folders(root: Path, self_cgroup: Path, controller: str) -> list[Path]:
    """The cgroup folders that bind this process: its own and every parent, for cgroup v2 and v1's ``controller``."""
    folders = [root, root / controller]
    try:
        lines = self_cgroup.read_text(encoding="utf-8").splitlines()
    except OSError:
        return folders
    for line in lines:
        _, controllers, path = ([*line.split(":", 2), "", ""])[:3]
        if controllers and controller not in controllers.split(","):
            continue
        folder = (root / controller if controllers else root) / path.strip("/")
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


def _memory_limit_of(folder: Path) -> float | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        # "max" is no number, and v1 says none by one that no machine has.
        with suppress(OSError, ValueError):
            return int((folder / name).read_text(encoding="utf-8"))
    return None
