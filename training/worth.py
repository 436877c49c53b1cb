"""Which exits earn their cost, measured on this machine and on texts that certify nothing.

An exit on the way costs every text that passes it: its head, and for ``peek`` a row that reads all weights of the next
layer once more. One that answers few texts is better left out of the export.
"""

import itertools
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.exits import Policy, judge_all, leave_at
from models.tokenization import Encoded
from training.calibrate import agreement_temperatures, threshold_grid
from training.evaluate import GraphRunner

Floats = NDArray[np.float64]

# Sets double with every exit: 4,096 at twelve.
MOST_EXITS = 12


@dataclass(frozen=True, slots=True)
class Timings:
    """Mean seconds of a text alone on one thread: ``segments [E]``, and ``head``, what one exit on the way adds."""

    segments: tuple[float, ...]
    head: float

    def until(self, kept: Sequence[int]) -> Floats:
        """Seconds until each exit of ``kept`` (indices from 0, ascending), the heads of all others left out."""
        spent, dropped, seconds = 0.0, 0, []
        for index, segment in enumerate(self.segments):
            spent += segment
            if index in kept:
                seconds.append(spent - dropped * self.head)
            else:
                dropped += 1
        return np.asarray(seconds)


@dataclass(frozen=True, slots=True)
class ExitSet:
    """A set of exits (``kept``, indices from 0): mean seconds a text, agreement with the last exit, and the share of
    texts that leaves at each, at the boldest threshold whose agreement stays at the quality asked for."""

    kept: tuple[int, ...]
    seconds: float
    agreement: float
    shares: tuple[float, ...]


def exit_sets(logits: NDArray[np.floating], timings: Timings, quality: float) -> list[ExitSet]:
    """Every set of exits that holds the last one, cheapest first, from ``logits [E, N, K]`` of one split.

    Texts leave by the criterion ``agreement``; of sets that cost the same the one with fewer exits comes first. The
    split may be the validation split, never the risk split: what is chosen here must not have seen what certifies it.
    Raises ``ValueError`` for more than ``MOST_EXITS`` early exits.
    """
    early = range(len(logits) - 1)
    if len(early) > MOST_EXITS:
        raise ValueError(f"{len(early)} early exits are too many to try all sets of them; at most {MOST_EXITS}")
    temperatures = np.asarray(agreement_temperatures(logits))
    found = [
        _at_quality(logits, temperatures, (*kept, len(logits) - 1), timings, quality)
        for size in range(len(logits))
        for kept in itertools.combinations(early, size)
    ]
    return sorted(found, key=lambda one: (one.seconds, len(one.kept)))


def _at_quality(
    logits: NDArray[np.floating], temperatures: Floats, kept: tuple[int, ...], timings: Timings, quality: float
) -> ExitSet:
    own = temperatures[list(kept)]
    judged = judge_all(logits[list(kept)], own, own)
    texts = np.arange(logits.shape[1])
    seconds = timings.until(kept)
    chosen = np.full(len(texts), len(kept) - 1)
    agreement = 1.0
    for threshold in threshold_grid(judged, "agreement", logits.shape[-1]):
        bolder = leave_at(judged, Policy("agreement", threshold))
        reached = float((judged.labels[bolder, texts] == judged.labels[-1]).mean())
        # As certification walks: from the safest on, to the first that fails.
        if reached < quality:
            break
        chosen, agreement = bolder, reached
    shares = np.bincount(chosen, minlength=len(kept)) / len(texts)
    return ExitSet(kept, float(seconds[chosen].mean()), agreement, tuple(map(float, shares)))


def measure_timings(
    paths: Sequence[Path],
    whole: Path,
    architecture: Architecture,
    whole_architecture: Architecture,
    texts: Iterable[Encoded],
    *,
    rounds: int = 5,
) -> Timings:
    """Times the graphs ``paths`` of all exits, and ``whole``, the same network with its last exit only.

    Every text runs alone on one thread, ``rounds`` times through both in turn; the quickest of a text's runs counts,
    since whatever else the machine does only ever adds.
    """
    runner = GraphRunner(paths, architecture, threads=1)
    single = GraphRunner([whole], whole_architecture, threads=1)
    spent, alone = [], []
    for text in texts:
        taken = [(_seconds(runner, text), _seconds(single, text)) for _ in range(rounds)]
        spent.append(np.min([segments for segments, _ in taken], axis=0))
        alone.append(min(one[0] for _, one in taken))
    if not spent:
        raise ValueError("timings need at least one text")
    segments = np.mean(spent, axis=0)
    added = float(segments.sum() - np.mean(alone))
    return Timings(tuple(map(float, segments)), max(0.0, added / max(1, len(paths) - 1)))


def _seconds(runner: GraphRunner, text: Encoded) -> list[float]:
    start = time.perf_counter()
    ends = [start, *(time.perf_counter() for _ in runner.run([text]))]
    return [after - before for before, after in itertools.pairwise(ends)]
