"""The engine: texts in, answers out, each text leaving at the first exit that is sure enough for its policy.

The event loop's thread tokenizes short texts, admits, and settles outcomes. Worker threads take micro-batches from the
scheduler, run one segment, judge its exit, send the leavers' answers off at once and put the survivors into the next
segment's queue, where they are regrouped with whoever waits.
"""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from models.exits import Policy, Reason, agree, decide, judge
from models.tokenization import Encoded, TextEncoder
from server.engine.request import Answer, Batch, Failure, Item, Outcome, Reading, Submission, Text
from server.engine.runner import SegmentRunner
from server.engine.scheduler import Scheduler

logger = logging.getLogger("offramp.engine")

# Tokenizing costs about a microsecond a character. Up to this many characters that is less than the hop to a thread
# and back may cost under load; beyond it, it would hold up every other request on the loop.
INLINE_CHARACTERS = 2_000


class Overloaded(Exception):
    """The bounded queue is full; try again in ``retry_after`` seconds."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"too many texts are waiting; try again in {retry_after} s")
        self.retry_after = retry_after


class NotRunning(Exception):
    """The engine has not been started, or is closing."""


class TooLong(Exception):
    """Text ``index`` has more tokens than the model takes, and was not to be truncated."""

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        super().__init__(f"{tokens} tokens, but the model takes at most {limit}")
        self.index, self.tokens, self.limit = index, tokens, limit


class NoTokens(Exception):
    """Nothing is left of text ``index`` after tokenization."""

    def __init__(self, index: int) -> None:
        super().__init__("no token is left of the text after normalisation")
        self.index = index


class Observer(Protocol):
    """Who is told what happens: once for each run of a segment (from worker threads), and exactly once for each
    admitted text (from the event loop's thread)."""

    def segment_ran(self, segment: int, texts: int, seconds: float) -> None: ...
    def answered(self, answer: Answer) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def cancelled(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Submitted:
    """Outcomes in the order of the texts, and the seconds that tokenizing all of them took."""

    outcomes: list[Outcome]
    tokenize_seconds: float


class Engine:
    """Runs one model: ``start`` it on an event loop, ``submit`` to it and ``close`` it from there."""

    def __init__(
        self,
        *,
        runner: SegmentRunner,
        encoder: TextEncoder,
        temperatures: Sequence[float],
        agreement_temperatures: Sequence[float],
        observer: Observer,
        workers: int,
        max_queue: int,
        max_batch_tokens: int,
        max_batch_texts: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Temperatures have one entry per exit; ``max_queue`` bounds the texts admitted and not yet settled."""
        self._runner = runner
        self._encoder = encoder
        self._blank_tokens = len(encoder.encode("")), len(encoder.encode("", ""))
        self._temperatures = list(zip(temperatures, agreement_temperatures, strict=True))
        self._last_exit = len(self._temperatures)
        self._observer = observer
        self._max_queue = max_queue
        self._clock = clock
        self._arrivals = itertools.count()
        self._admitted = 0
        self._accepting = False
        self._stopping = False
        self._scheduler = Scheduler(self._last_exit, max_batch_tokens=max_batch_tokens, max_batch_texts=max_batch_texts)
        # Guards the scheduler; waited on by idle workers.
        self._work = threading.Condition()
        self._workers = [
            threading.Thread(target=self._serve, name=f"offramp-worker-{number}", daemon=True)
            for number in range(1, workers + 1)
        ]
        self._tokenizer_pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="offramp-tokenizer")

    async def start(self) -> None:
        """Starts the workers; from here on :meth:`submit` works, on this event loop."""
        self._loop = asyncio.get_running_loop()
        self._idle = asyncio.Event()
        self._idle.set()
        for worker in self._workers:
            worker.start()
        self._accepting = True

    async def close(self) -> None:
        """Accepts nothing more, finishes all that was admitted, and ends the workers."""
        self._accepting = False
        if not self._workers[0].ident:
            return
        await self._idle.wait()
        with self._work:
            self._stopping = True
            self._work.notify_all()
        for worker in self._workers:
            await asyncio.to_thread(worker.join)
        self._tokenizer_pool.shutdown(wait=False)

    @property
    def healthy(self) -> bool:
        """Whether the engine accepts work and all its workers live."""
        return self._accepting and all(worker.is_alive() for worker in self._workers)

    def queue_depth(self, segment: int) -> int:
        """Texts that wait for ``segment`` (1 = first)."""
        return self._scheduler.depth(segment)

    async def submit(
        self,
        texts: Sequence[Text],
        policies: Sequence[Policy],
        *,
        truncate: bool = True,
        deadline_seconds: float | None = None,
    ) -> Submitted:
        """Classifies ``texts``, each under the policy at its place, and returns an outcome for each.

        At ``deadline_seconds`` from now, texts still on their way are answered from their latest exit, or fail where
        they have passed none. Cancelling this coroutine abandons the texts: they are dropped before their next segment.

        Raises :class:`Overloaded`, :class:`NotRunning`, :class:`TooLong` (only without ``truncate``) or
        :class:`NoTokens`; then none of the texts was admitted.
        """
        if not self._accepting:
            raise NotRunning
        started = self._clock()
        if self._admitted + len(texts) > self._max_queue:
            raise Overloaded(retry_after=1)
        self._admit(len(texts))
        items: list[Item] = []
        submission = Submission(len(texts), self._loop.create_future())
        try:
            encoded = await self._encode(texts, truncate)
            tokenized = self._clock()
            deadline = None if deadline_seconds is None else started + deadline_seconds
            items = [
                Item(
                    arrival=next(self._arrivals),
                    ids=np.asarray(one.ids, dtype=np.int64),
                    type_ids=np.asarray(one.type_ids, dtype=np.int64),
                    policy=policy,
                    truncated=one.truncated,
                    submission=submission,
                    index=index,
                    deadline=deadline,
                )
                for index, (one, policy) in enumerate(zip(encoded, policies, strict=True))
            ]
        finally:
            # From here on each item gives its own place back, when it is settled or abandoned.
            self._release(len(texts) - len(items))
        if not items:
            return Submitted([], tokenized - started)
        with self._work:
            self._scheduler.add(items, tokenized)
            self._work.notify()
        timer = None
        if deadline is not None:
            timer = self._loop.call_later(max(0.0, deadline - tokenized), self._expire, items)
        try:
            await submission.future
        finally:
            if timer is not None:
                timer.cancel()
            self._abandon(items)
        return Submitted([outcome for outcome in submission.outcomes if outcome is not None], tokenized - started)

    async def _encode(self, texts: Sequence[Text], truncate: bool) -> list[Encoded]:
        characters = sum(len(one.text) + len(one.pair or "") for one in texts)
        if characters <= INLINE_CHARACTERS:
            encoded = self._encode_all(texts)
        else:
            encoded = await self._loop.run_in_executor(self._tokenizer_pool, self._encode_all, texts)
        for index, (one, text) in enumerate(zip(encoded, texts, strict=True)):
            if one.tokens_before <= self._blank_tokens[text.pair is not None]:
                raise NoTokens(index)
            if one.truncated and not truncate:
                raise TooLong(index, one.tokens_before, self._encoder.max_length)
        return encoded

    def _encode_all(self, texts: Sequence[Text]) -> list[Encoded]:
        return [self._encoder.encode(one.text, one.pair) for one in texts]

    # On the event loop's thread: admission and outcomes. Each item is settled or abandoned exactly once.

    def _admit(self, texts: int) -> None:
        self._admitted += texts
        self._idle.clear()

    def _release(self, texts: int) -> None:
        self._admitted -= texts
        if not self._admitted:
            self._idle.set()

    def _settle(self, outcomes: Sequence[tuple[Item, Outcome]]) -> None:
        fresh = [(item, outcome) for item, outcome in outcomes if not item.done]
        for item, outcome in fresh:
            item.done = True
            self._release(1)
            item.submission.settle(item.index, outcome)
        # Only now: whatever an observer raises, every text has its outcome.
        for _, outcome in fresh:
            if isinstance(outcome, Answer):
                self._observer.answered(outcome)
            else:
                self._observer.failed(outcome)

    def _expire(self, items: Sequence[Item]) -> None:
        """The deadline of ``items`` is here: whoever has passed an exit is answered from the latest one."""
        late = [item for item in items if not item.done]
        self._forget(late)
        self._settle([(item, self._at_deadline(item)) for item in late])

    def _at_deadline(self, item: Item) -> Outcome:
        # Once: a worker that runs a segment of it may add a reading meanwhile.
        readings = tuple(item.readings)
        if not readings:
            return Failure("deadline")
        # The last exit's answer, already on its way here, was not cut short.
        reason: Reason = "final" if readings[-1].exit == self._last_exit else "deadline"
        return replace(item.answer(reason), readings=readings)

    def _abandon(self, items: Sequence[Item]) -> None:
        """Nobody waits for ``items`` any more (none of them where all were settled)."""
        left = [item for item in items if not item.done]
        self._forget(left)
        for item in left:
            item.done = True
            self._release(1)
            self._observer.cancelled()

    def _forget(self, items: Sequence[Item]) -> None:
        if items:
            with self._work:
                for item in items:
                    self._scheduler.remove(item)

    # On worker threads.

    def _serve(self) -> None:
        while (batch := self._next()) is not None:
            leavers, survivors = self._step(batch)
            if leavers:
                self._send(leavers)
            if survivors:
                with self._work:
                    self._scheduler.add(survivors, self._clock())

    def _next(self) -> Batch | None:
        """The next micro-batch, once there is one; ``None`` when the engine stops."""
        with self._work:
            while not self._stopping:
                batch = self._scheduler.pick(self._clock())
                if batch is not None:
                    if self._scheduler.waiting:
                        self._work.notify()
                    return batch
                self._work.wait()
        return None

    def _step(self, batch: Batch) -> tuple[list[tuple[Item, Outcome]], list[Item]]:
        """Runs one segment: those that leave with their outcomes, and those that go on.

        Never raises: whatever goes wrong fails this batch's items and nobody else's.
        """
        try:
            return self._run(batch)
        except Exception:
            logger.exception("segment %d failed for %d texts", batch.segment, len(batch.items))
            return [(item, Failure("internal")) for item in batch.items], []

    def _run(self, batch: Batch) -> tuple[list[tuple[Item, Outcome]], list[Item]]:
        segment, items = batch.segment, batch.items
        started = self._clock()
        output = self._runner.run(segment, items)
        seconds = self._clock() - started
        verdict = judge(output.logits, *self._temperatures[segment - 1])
        streaks = agree(
            verdict.labels,
            np.fromiter((item.previous_label for item in items), np.int64, len(items)),
            np.fromiter((item.streak for item in items), np.int64, len(items)),
        )
        reasons = decide(verdict, streaks, [item.policy for item in items], segment, self._last_exit)
        leavers: list[tuple[Item, Outcome]] = []
        survivors: list[Item] = []
        for row, (item, reason) in enumerate(zip(items, reasons, strict=True)):
            item.queue_seconds += started - item.waiting_since
            item.inference_seconds += seconds
            if not verdict.finite[row]:
                leavers.append((item, Failure("nonfinite")))
                continue
            label = int(verdict.labels[row])
            item.readings.append(
                Reading(
                    exit=segment,
                    logits=output.logits[row].astype(np.float64),
                    probabilities=verdict.probabilities[row],
                    label=label,
                    confidence=float(verdict.confidence[row]),
                    entropy=float(verdict.entropy[row]),
                    # The last exit agrees with itself.
                    agreement=1.0 if segment == self._last_exit else float(verdict.agreement[row]),
                )
            )
            if reason is not None:
                leavers.append((item, item.answer(reason)))
            else:
                item.previous_label, item.streak = label, int(streaks[row])
                item.segment, item.state = segment + 1, output.states[row]
                survivors.append(item)
        self._observer.segment_ran(segment, len(items), seconds)
        return leavers, survivors

    def _send(self, outcomes: list[tuple[Item, Outcome]]) -> None:
        try:
            self._loop.call_soon_threadsafe(self._settle, outcomes)
        except RuntimeError:
            # The loop was closed without closing the engine: nobody is left to be told.
            logger.debug("the event loop is closed; %d outcomes dropped", len(outcomes))
