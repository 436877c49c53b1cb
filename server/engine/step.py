"""One step of a worker: a segment runs on a micro-batch, and its exit parts those who leave from those who go on."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from models.exits import CRITERIA, Reason, agree, decide, judge
from server.engine.request import Answer, Batch, Failure, Item, Outcome, Output, Reading, Run, SegmentRunner

logger = logging.getLogger("offramp.engine")

_Judged = tuple[list[Reading | None], list[int], list[Reason | None]]
"""Of each text: the reading (``None``: its logits are not finite), the streak of agreeing labels that the exit makes,
and the reason to leave, if there is one."""


@dataclass(frozen=True, slots=True)
class Ran:
    """What has become of the texts of a micro-batch that ran ``segment``."""

    segment: int
    leavers: list[tuple[Item, Outcome]]
    survivors: list[Item]

    @property
    def answers(self) -> int:
        """Texts that were sure enough to leave; shadow checks are none, they run on where others like them leave."""
        return sum(isinstance(outcome, Answer) and item.check is None for item, outcome in self.leavers)


class RunObserver(Protocol):
    """Who is told of each run, on the thread that it was on."""

    def segment_ran(self, segment: int, texts: int, seconds: float) -> None: ...


class Stepper:
    """Takes the steps of one model. Called from several threads at once, each with micro-batches of its own."""

    def __init__(
        self,
        *,
        runner: SegmentRunner,
        temperatures: Sequence[tuple[float, float]],
        observer: RunObserver,
        clock: Callable[[], float],
    ) -> None:
        """``temperatures`` are an exit's own and that of its agreement, for each exit."""
        self._runner = runner
        self._temperatures = temperatures
        self._last_exit = len(temperatures)
        self._observer = observer
        self._clock = clock

    def take(self, batch: Batch, *, lone: bool) -> Ran:
        """Runs ``batch``. Raises what the runner raises; its texts are then as before, and can be run again."""
        segment, items = batch.segment, batch.items
        reads = [item.every_reading or item.policy.reads(segment, self._last_exit) for item in items]
        read = any(reads)
        started = self._clock()
        output = self._runner.run(segment, items, lone=lone, read=read)
        seconds = self._clock() - started
        readings, streaks, reasons = self._judge(segment, items, output, seconds) if read else _nothing(len(items))
        # Whoever passes does not even look at scores that are not finite, and does the same in any company.
        stays = [reasons[row] is None and (readings[row] is not None or not reads[row]) for row in range(len(items))]
        carried = [
            row
            for row, item in enumerate(items)
            if stays[row] or (item.audit_tier is not None and reasons[row] in CRITERIA)
        ]
        states = dict(zip(carried, output.carry(carried), strict=True))
        # Nothing below raises: a text that is run again after a failure must not have half a run behind it.
        _note(items, segment, started, seconds)
        leavers: list[tuple[Item, Outcome]] = []
        for row, (item, reading, reason) in enumerate(zip(items, readings, reasons, strict=True)):
            item.queue_seconds += started - item.waiting_since
            item.inference_seconds += seconds
            if row in states:
                item.segment, item.state = segment + 1, states[row]
            if not reads[row]:
                continue
            if reading is None:
                leavers.append((item, Failure("nonfinite")))
                continue
            item.readings.append(reading)
            if reason is None:
                item.previous_label, item.streak = reading.label, streaks[row]
            else:
                leavers.append((item, item.answer(reason)))
        self._observe(segment, len(items), seconds)
        return Ran(segment, leavers, [item for item, staying in zip(items, stays, strict=True) if staying])

    def _judge(self, segment: int, items: Sequence[Item], output: Output, seconds: float) -> _Judged:
        logits = output.logits.astype(np.float64)
        verdict = judge(logits, *self._temperatures[segment - 1])
        finite, labels = verdict.finite.tolist(), verdict.labels.tolist()
        confidences, entropies = verdict.confidence.tolist(), verdict.entropy.tolist()
        # The last exit agrees with itself.
        agreements = verdict.agreement.tolist() if segment < self._last_exit else [1.0] * len(items)
        streaks = [agree(label, item.previous_label, item.streak) for label, item in zip(labels, items, strict=True)]
        reasons = decide(verdict, streaks, [item.policy for item in items], segment, self._last_exit)
        readings = [
            Reading(
                exit=segment,
                logits=logits[row],
                probabilities=verdict.probabilities[row],
                label=labels[row],
                confidence=confidences[row],
                entropy=entropies[row],
                agreement=agreements[row],
                seconds=seconds,
            )
            if finite[row]
            else None
            for row in range(len(items))
        ]
        return readings, streaks, reasons

    def _observe(self, segment: int, texts: int, seconds: float) -> None:
        try:
            self._observer.segment_ran(segment, texts, seconds)
        except Exception:
            logger.exception("an observer failed")


def _nothing(texts: int) -> _Judged:
    """What an exit says that nobody reads."""
    return [None] * texts, [0] * texts, [None] * texts


def _note(items: Sequence[Item], segment: int, started: float, seconds: float) -> None:
    """Adds a run to the timelines of those texts that have one."""
    run: Run | None = None
    for item in items:
        if item.runs is not None:
            if run is None:
                run = Run(segment, started, started + seconds, len(items), sum(one.tokens for one in items))
            item.runs.append((item.waiting_since, run))
