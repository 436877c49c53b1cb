"""What the processes of one server know of each other, by files in a folder that they share.

Nobody waits for anybody here: each writes what is its own, and a process that hangs or dies takes nothing with it.
"""

import fcntl
import json
import logging
import mmap
import os
import shutil
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

logger = logging.getLogger("offramp")

PREFIX = "offramp-metrics-"
"""What the names of such folders begin with."""

_CONNECTIONS = "connections"
# A folder younger than this may be one that its processes have not come to yet.
_YOUNG_SECONDS = 60.0
# Where a process serves nobody.
_ABSENT = -1
# The files that prometheus_client maps for a process, one for each type of metric and way to join it, and the KiB that
# they get for each model: the shipped one needs 98 for histograms and 29 for counters.
_MAPPED = {"counter": 64, "histogram": 128, "gauge_livesum": 32, "gauge_livemax": 32, "gauge_livemin": 32}


@dataclass(frozen=True, slots=True)
class Shared:
    """The folder of the processes of one server, and which of them this is, from 1 on.

    A process that takes a dead one's place takes its number and goes on with what that has counted.
    """

    folder: Path
    number: int

    def reserve(self, models: int) -> None:
        """Takes the room that the metrics of so many ``models`` need, before this process starts: where a disk is full
        as it writes to a mapped page that has none, it is killed (SIGBUS). Raises ``OSError``."""
        self.folder.mkdir(mode=0o700, exist_ok=True)
        for name, kib in _MAPPED.items():
            file = self.folder / f"{name}_{self.number}.db"
            if not file.exists():
                _replace(file, bytes(1024 * kib * (1 + models)))

    def leave(self) -> None:
        """Takes the files of this process away, and with the last one the folder: its parent, which does so else, has
        been killed."""
        for file in self.folder.glob(f"*_{self.number}.*"):
            file.unlink(missing_ok=True)
        # Another that leaves at the same time may have done so already.
        with suppress(OSError):
            if not [file for file in self.folder.iterdir() if file.name != _CONNECTIONS]:
                (self.folder / _CONNECTIONS).unlink(missing_ok=True)
                self.folder.rmdir()


class Connections:
    """How many connections each process has, so that a new one goes to whoever has fewest. Mapped memory, one number
    for each process: reading it costs less than a microsecond."""

    def __init__(self, folder: Path, count: int) -> None:
        """``count`` processes; whoever comes first makes the file, in which none serves."""
        absent = struct.pack(f"{count}q", *[_ABSENT] * count)
        # Kept open, and locked by all: as long as one of them lives the folder is in use.
        self._file = open(os.open(folder / _CONNECTIONS, os.O_RDWR | os.O_CREAT, 0o600), "r+b")  # noqa: SIM115
        fcntl.flock(self._file, fcntl.LOCK_SH)
        if os.fstat(self._file.fileno()).st_size < len(absent):
            # Written, and not only mapped, so that a full disk is an error here and no SIGBUS later.
            self._file.write(absent)
            self._file.flush()
        self._numbers = memoryview(mmap.mmap(self._file.fileno(), len(absent))).cast("q")

    def set(self, number: int, connections: int) -> None:
        """The process with this ``number`` has so many."""
        self._numbers[number - 1] = connections

    def leave(self, number: int) -> None:
        """The process with this ``number`` takes none."""
        self._numbers[number - 1] = _ABSENT

    def fewer_elsewhere(self, number: int) -> bool:
        """Whether another process that serves has fewer than the one with this ``number``."""
        own = self._numbers[number - 1]
        return any(_ABSENT < others < own for others in self._numbers)


def sweep(place: Path) -> None:
    """Takes away the folders in ``place`` whose processes were all killed."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if time.time() - folder.stat().st_mtime < _YOUNG_SECONDS:
                continue
            with open(folder / _CONNECTIONS, "rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


Counts = dict[float, list[int]]
"""For each certified quality the answers under it that were checked, and of these those that disagreed."""


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a process has counted of the version that it serves. ``load`` tells a version from itself before a reload:
    another calibration may come under the same name."""

    version: str
    load: int
    counts: Counts

    def same(self, other: "_Kept") -> bool:
        return (self.version, self.load) == (other.version, other.load)


class SharedChecks:
    """The shadow checks of all processes: a promise is the server's, and so is the evidence against it."""

    def __init__(self, shared: Shared) -> None:
        self._folder = shared.folder
        self._file = _checks_file(shared.folder, shared.number)
        self._left = _read(self._file) or {}
        self._own: dict[str, _Kept] = {}
        self._written = ""
        self._failing = False
        self._others: dict[Path, dict[str, _Kept]] = {}

    def begin(self, model: str, version: str) -> Counts:
        """Where this process counts from here on, for a version that begins to serve. It is empty, but for the first
        one of a process that took a dead one's place, which goes on with what that had counted of it."""
        # What goes wrong here is the next refresh's to say: the version serves.
        with suppress(OSError):
            self._read_others()
        # All are reloaded one after the other: whoever comes later joins those before. One whose reload was refused
        # stays behind, until the next.
        load = max((one[model].load for one in self._others.values() if model in one), default=0)
        left = self._left.pop(model, None)
        if model in self._own:
            load = max(load, self._own[model].load + 1)
        elif left is not None:
            load = max(load, left.load)
        new = _Kept(version, load, {})
        self._own[model] = left if left is not None and left.same(new) else new
        with suppress(OSError):
            self._write()
        return self._own[model].counts

    def others(self, model: str, tier: float) -> tuple[int, int]:
        """What all other processes have counted of the version that this one serves, at the last :meth:`refresh`."""
        found = [
            kept
            for one in self._others.values()
            if (kept := one.get(model)) is not None and kept.same(self._own[model])
        ]
        counts = [kept.counts[tier] for kept in found if tier in kept.counts]
        return sum(checks for checks, _ in counts), sum(disagreements for _, disagreements in counts)

    def refresh(self) -> None:
        """Writes down what this process has counted, and reads what the others have. Where that fails (a full disk, no
        file to spare) it is logged, and the next time may do better: requests do not depend on it."""
        try:
            self._write()
            self._read_others()
        except OSError as error:
            if not self._failing:
                logger.error("shadow checks are not counted with those of other processes: %s", error)
            self._failing = True
        else:
            self._failing = False

    def _write(self) -> None:
        text = json.dumps(
            {model: [kept.version, kept.load, list(kept.counts.items())] for model, kept in self._own.items()}
        )
        if text != self._written:
            _replace(self._file, text.encode())
            self._written = text

    def _read_others(self) -> None:
        files = set(self._folder.glob("checks_*.json")) - {self._file}
        self._others = {file: _read(file) or self._others.get(file, {}) for file in files}


_KEPT = TypeAdapter(dict[str, tuple[str, int, list[tuple[float, tuple[int, int]]]]])


def _replace(file: Path, content: bytes) -> None:
    """Writes all of ``file`` at once: others may be reading it, and a disk that is full leaves what was there."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    new.replace(file)


def _checks_file(folder: Path, number: int) -> Path:
    return folder / f"checks_{number}.json"


def _read(file: Path) -> dict[str, _Kept] | None:
    """What ``file`` says; ``None`` where it is not there, or says nothing that we would have written. Raises
    ``OSError``."""
    try:
        found = _KEPT.validate_json(file.read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return {
        model: _Kept(version, load, {tier: [*both] for tier, both in counts})
        for model, (version, load, counts) in found.items()
    }
