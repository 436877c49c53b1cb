"""How many CPUs this process may use, and how to spend them.

ONNX Runtime counts the host's cores, whatever the container may use; so the count is made here, from the scheduler
affinity and the cgroup quota, and every session is told.
"""

import math
import os
from pathlib import Path


def cpu_allowance(cgroup_root: Path = Path("/sys/fs/cgroup"), self_cgroup: Path = Path("/proc/self/cgroup")) -> int:
    """Whole CPUs that this process may use, at least 1: its affinity, or its cgroup quota (rounded up) if less."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = _cgroup_quota(cgroup_root, self_cgroup)
    return max(1, affinity if quota is None else min(affinity, math.ceil(quota)))


def split_cpus(cpus: int, workers: int | None, threads: int | None) -> tuple[int, int]:
    """``(workers, threads)`` for ``cpus`` CPUs; what is given is kept, the rest fits into the allowance.

    Two threads inside a run take a lone request through in 10.3 ms where one takes 17.0 (design.md section 5), so the
    default is two threads a run and as many workers as that leaves room for.
    """
    if threads is None:
        threads = max(1, min(2, cpus // workers if workers else cpus))
    if workers is None:
        workers = max(1, cpus // threads)
    return workers, threads


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
