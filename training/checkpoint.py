"""What a training run keeps on disk while it goes on, written so that a kill at any moment leaves it whole."""

import csv
import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from training.data import Tokenized


class TrainingError(Exception):
    """Training that cannot go on; the message says why and what would help."""


def digest(data: Tokenized) -> str:
    """SHA-256 of token ids, type ids and labels."""
    total = hashlib.sha256(data.labels.tobytes())
    for text in data.texts:
        total.update(repr((text.ids, text.type_ids)).encode())
    return total.hexdigest()


def require_same(path: Path, theirs: Mapping[str, Any], ours: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raises :class:`TrainingError` naming what differs; what ``theirs`` lacks stood at ``defaults``."""
    theirs = {**defaults, **theirs}
    differing = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
    if differing:
        raise TrainingError(f"{path}: was written with other {', '.join(differing)}; it cannot be resumed")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything that decides how training goes on. ``random_states`` are those of each process, by rank."""

    identity: dict[str, Any]
    progress: dict[str, Any]
    network: dict[str, Any]
    optimizer: dict[str, Any]
    schedule: dict[str, Any]
    random_states: list[dict[str, torch.Tensor]]

    def save(self, path: Path) -> None:
        partial = path.with_suffix(".partial")
        torch.save({f.name: getattr(self, f.name) for f in fields(self)}, partial)
        os.replace(partial, path)

    @classmethod
    def load(cls, path: Path) -> "Checkpoint":
        """Raises :class:`TrainingError` for a file that is damaged or of another version."""
        try:
            return cls(**torch.load(path, map_location="cpu", weights_only=True))
        except (OSError, RuntimeError, EOFError, TypeError, pickle.UnpicklingError) as error:
            raise TrainingError(f"{path}: not a whole checkpoint; remove it to train from the start") from error


def random_state() -> dict[str, torch.Tensor]:
    """torch's generators of this process: the CPU's, and that of its GPU."""
    states = {"cpu": torch.get_rng_state()}
    return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def set_random_state(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])


def replace_text(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


def replace_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Writes a folder beside ``target`` and swaps it in, so a kill leaves the old one or the new one."""
    partial, old = target.with_name(target.name + ".partial"), target.with_name(target.name + ".old")
    for leftover in (partial, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write(partial)
    if target.exists():
        os.replace(target, old)
    os.replace(partial, target)
    shutil.rmtree(old, ignore_errors=True)


class StepLog:
    """Appends rows to a CSV with a header."""

    def __init__(self, path: Path, header: Sequence[str]) -> None:
        fresh = not path.exists()
        self._stream = path.open("a", newline="", encoding="utf-8")
        self._writer = csv.writer(self._stream)
        if fresh:
            self._writer.writerow(header)

    def __enter__(self) -> "StepLog":
        return self

    def __exit__(self, *exc: object) -> None:
        self._stream.close()

    def write(self, row: Sequence[object]) -> None:
        self._writer.writerow([f"{c:.6g}" if isinstance(c, float) else c for c in row])

    def flush(self) -> None:
        self._stream.flush()


def rows(path: Path) -> Iterator[dict[str, str]]:
    if path.exists():
        with path.open(newline="", encoding="utf-8") as stream:
            yield from csv.DictReader(stream)


def trim_log(path: Path, step: int) -> None:
    """Drops rows that were written after the checkpoint: those steps are done again.

    The last row may be torn, and half of its step's number is a smaller number: it counts only if it is whole.
    """
    kept = [r for r in rows(path) if None not in r.values() and int(r["step"]) <= step]
    if not kept:
        path.unlink(missing_ok=True)
        return
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, kept[0].keys())
        writer.writeheader()
        writer.writerows(kept)
