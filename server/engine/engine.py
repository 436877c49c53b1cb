"""The engine: texts in, answers out, each text leaving at the first exit that is sure enough for its policy.

The event loop's thread tokenizes short texts, admits, and settles outcomes. Worker threads take micro-batches from the
scheduler, take a step (:mod:`server.engine.step`), send the leavers' answers off at once and put the survivors into the
next segment's queue, where they are regrouped with whoever waits. The first segment of a short text that finds the
engine idle runs on the event loop's thread.

Of the state below, workers and the event loop share the scheduler and the count of busy workers, under one lock, and
the items, each of which is one worker's while it runs. All else is the event loop's alone.
"""

import asyncio
import functools
import itertools
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from models.exits import CRITERIA, Policy, Reason, full_depth
from models.tokenization import Encoded, TextEncoder
from server.engine.admission import Admission, Overloaded
from server.engine.latency import LatencyTable
from server.engine.order import Order, oldest
from server.engine.request import (
    Answer,
    Batch,
    Check,
    Failure,
    Item,
    Outcome,
    OutOfMemory,
    SegmentRunner,
    Submission,
    Text,
    Timeline,
)
from server.engine.scheduler import Scheduler
from server.engine.step import Ran, Stepper
from server.logs import FIELDS

logger = logging.getLogger("offramp.engine")

# Tokenizing costs about a microsecond a character. Up to this many characters that is less than the hop to a thread
# and back may cost under load; beyond it, it would hold up every other request on the loop.
INLINE_CHARACTERS = 2_000
# A run that is predicted to take no longer than this goes on the loop's own thread where nothing else is in work: two
# wake-ups less, and whoever comes meanwhile waits no longer than for a long text's tokens.
INLINE_SECONDS = 0.002
# Checks in work at once; beyond it answers go unchecked. Checks wait for everybody else, and must not become work that
# newcomers are refused for.
MOST_CHECKS = 8


class NotRunning(Exception):
    """The engine has not been started, or is closing."""


class TooLong(Exception):
    """Text ``index`` has more tokens than are read of it, and was not to be truncated."""

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        super().__init__(f"{tokens} tokens, but at most {limit} are read")
        self.index, self.tokens, self.limit = index, tokens, limit


class NoTokens(Exception):
    """Nothing is left of text ``index`` after tokenization."""

    def __init__(self, index: int) -> None:
        super().__init__("no token is left of the text after normalisation")
        self.index = index


class Observer(Protocol):
    """Who is told what happens: once for each run of a segment (on the thread that it was on), and from the event
    loop's thread exactly once for each admitted text, and once for each shadow check."""

    def segment_ran(self, segment: int, texts: int, seconds: float) -> None: ...
    def answered(self, answer: Answer) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def cancelled(self) -> None: ...
    def checked(self, tier: float, agrees: bool) -> None: ...


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
        max_wait_seconds: float = math.inf,
        max_batch_tokens: int,
        max_batch_texts: int,
        latency: LatencyTable | None = None,
        order: Order = oldest,
        shadow_rate: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Temperatures have one entry per exit; ``max_queue`` bounds the texts admitted and not yet settled, and
        ``max_wait_seconds`` how long a newcomer may expect to wait. ``shadow_rate`` is the share of the answers
        under a certified quality that are checked against the last exit: early ones run on to it once they are given.

        Without a ``latency`` table nobody is refused for a wait, or for being late before it is tried.
        """
        self._stepper = Stepper(
            runner=runner,
            temperatures=list(zip(temperatures, agreement_temperatures, strict=True)),
            observer=observer,
            clock=clock,
        )
        self._encoder = encoder
        self._blank_tokens = len(encoder.encode("")), len(encoder.encode("", ""))
        self._last_exit = len(temperatures)
        self._observer = observer
        self._latency = latency
        self._clock = clock
        self._arrivals = itertools.count()
        self._shadow_rate = shadow_rate
        self._checks = 0
        # Admitted, and neither settled nor abandoned: who must be told, should the engine break.
        self._open: set[Item] = set()
        self._accepting = False
        self._broken = False
        self._stopping = False
        self._scheduler: Scheduler[Item] = Scheduler(
            self._last_exit,
            max_batch_tokens=max_batch_tokens,
            max_batch_texts=max_batch_texts,
            latency=latency,
            order=order,
            workers=workers,
        )
        # Guards the scheduler and the count of busy workers; waited on by idle workers.
        self._work = threading.Condition()
        self._admission = Admission(
            max_texts=max_queue,
            max_wait_seconds=max_wait_seconds,
            # No method of this engine: a cycle would keep all of its memory after a reload.
            predicted_wait=functools.partial(_predicted_wait, self._work, self._scheduler),
            clock=clock,
        )
        self._busy = workers
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
    def broken(self) -> bool:
        """Whether a worker has died, so that nothing is accepted any more."""
        return self._broken

    @property
    def healthy(self) -> bool:
        """Whether the engine accepts work and all its workers live."""
        return self._accepting and all(worker.is_alive() for worker in self._workers)

    @property
    def idle(self) -> bool:
        """Whether nothing is in work."""
        return self._busy == 0 and not self._admission.texts

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
        every_reading: bool = True,
        tier: float | None = None,
        request_id: str = "",
        timeline: Timeline | None = None,
    ) -> Submitted:
        """Classifies ``texts``, each under the policy at its place, and returns an outcome for each.

        At ``deadline_seconds`` from now, texts still on their way are answered from their latest exit, or fail where
        they have passed none. Without ``every_reading`` exits at which a text may not leave anyway are not read, which
        saves their rows; with a deadline they are. ``tier`` is the certified quality that the policies stand for; it
        makes the texts candidates for shadow checks. ``request_id`` is what the log says of texts that break;
        ``timeline`` is filled in on the way. Cancelling this coroutine abandons the texts: they are dropped before
        their next segment.

        Raises :class:`Overloaded`, :class:`NotRunning`, :class:`TooLong` (only without ``truncate``) or
        :class:`NoTokens`; then none of the texts was admitted.
        """
        if not self._accepting:
            raise NotRunning
        started = self._clock()
        self.check_room(len(texts))
        deadline = None if deadline_seconds is None else started + deadline_seconds
        with self._admission.request():
            items: list[Item] = []
            submission = Submission(len(texts), self._loop.create_future(), request_id)
            self._admit(len(texts))
            try:
                encoded = await self._encode(texts, truncate)
                tokenized = self._clock()
                if timeline is not None:
                    timeline.tokenizing, timeline.tokenized = started, tokenized
                    timeline.runs = [[] for _ in texts]
                if deadline is not None:
                    self._check_deadline(deadline, tokenized, sum(len(one) for one in encoded))
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
                        every_reading=every_reading or deadline is not None,
                        audit_tier=tier if random.random() < self._shadow_rate else None,
                        runs=None if timeline is None else timeline.runs[index],
                    )
                    for index, (one, policy) in enumerate(zip(encoded, policies, strict=True))
                ]
            finally:
                # From here on each item gives its own place back, when it is settled or abandoned.
                self._open.update(items)
                self._release(len(texts) - len(items))
            if items:
                await self._outcomes(items, submission, tokenized, deadline)
        outcomes = [outcome for outcome in submission.outcomes if outcome is not None]
        return Submitted(outcomes, tokenized - started)

    async def _outcomes(
        self, items: Sequence[Item], submission: Submission, tokenized: float, deadline: float | None
    ) -> None:
        """Sends admitted ``items`` on their way and returns once all are settled; if cancelled it abandons them."""
        timer = None
        try:
            if self._broken:
                # While these were tokenized; nobody would run them.
                raise NotRunning
            predicted = self._admission.predicted() if self._admission.crowded else 0.0
            self._set_out(items, tokenized)
            if deadline is not None:
                timer = self._loop.call_later(max(0.0, deadline - self._clock()), self._expire, items)
            await submission.future
            if deadline is None:
                # A deadline has its own turn, and its own end of waiting.
                self._admission.learn(predicted, self._clock() - tokenized)
        finally:
            if timer is not None:
                timer.cancel()
            self._abandon(items)

    def check_room(self, texts: int) -> None:
        """Raises :class:`Overloaded` where a newcomer with so many ``texts`` would find no room, or wait too long."""
        self._admission.check(texts)

    def pressure(self) -> float:
        """The load, from 0 to 1, by which depth is lowered where a request consents."""
        return self._admission.pressure()

    def _check_deadline(self, deadline: float, now: float, tokens: int) -> None:
        with self._work:
            late = self._scheduler.would_be_late(now, deadline, tokens)
        if late:
            raise Overloaded("late", self._admission.wait())

    def _set_out(self, items: Sequence[Item], now: float) -> None:
        """Hands admitted ``items`` to the workers, or runs the first segment at once where that is sooner."""
        with self._work:
            self._scheduler.add(items, now)
            alone = self._busy == 0 and self._scheduler.waiting == 1
            if not alone or self._first_run(items[0].tokens) > INLINE_SECONDS:
                self._work.notify()
                return
            batch = self._scheduler.pick(now)
        if batch is None:
            return
        ran = self._step(batch, lone=True)
        with self._work:
            self._take_in(ran)
            if ran.survivors:
                self._work.notify()
        self._settle(ran.leavers)

    def _first_run(self, tokens: int) -> float:
        """Predicted seconds of segment 1 on one text of ``tokens`` tokens; without a table nothing is known."""
        return math.inf if self._latency is None else self._latency.seconds_of(1, 1, tokens)

    def _take_in(self, ran: Ran) -> None:
        """Tells the scheduler what has become of a micro-batch."""
        now = self._clock()
        # Of shadow checks nothing is learned.
        texts = [item for item in ran.survivors if item.check is None]
        self._scheduler.ran(ran.segment, ran.answers + len(texts), ran.answers)
        self._scheduler.add(texts, now)
        for item in ran.survivors:
            if item.check is not None:
                self._scheduler.add_behind(item, now)

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
        self._admission.texts += texts
        self._idle.clear()

    def _release(self, texts: int) -> None:
        self._admission.texts -= texts
        if not self._admission.texts:
            self._idle.set()

    def _settle(self, outcomes: Sequence[tuple[Item, Outcome]]) -> None:
        fresh = [(item, outcome) for item, outcome in outcomes if not item.done]
        for item, outcome in fresh:
            self._finish(item)
            if item.submission is not None:
                item.submission.settle(item.index, outcome)
        # Only now: whatever an observer raises, every text has its outcome.
        for item, outcome in fresh:
            if item.check is not None:
                if isinstance(outcome, Answer):
                    self._observer.checked(item.check.tier, outcome.left.label == item.check.label)
            elif isinstance(outcome, Answer):
                self._observer.answered(outcome)
                self._shadow(item, outcome)
            else:
                self._observer.failed(outcome)

    def _finish(self, item: Item) -> None:
        item.done = True
        if item.check is not None:
            self._checks -= 1
            return
        self._open.discard(item)
        self._release(1)

    def _shadow(self, item: Item, answer: Answer) -> None:
        """Checks an answer against the last exit, if it is to be checked and there is room: a text that has left early
        is sent on."""
        if item.audit_tier is None or self._checks >= MOST_CHECKS or self._stopping:
            return
        if answer.reason not in CRITERIA:
            # The promise is over all texts under the tier, so the sample must be of all of them: those that left early
            # disagree more often. The last exit agrees with itself, and a deadline's answer promises nothing to break.
            self._observer.checked(item.audit_tier, True)
            return
        self._checks += 1
        follower = replace(
            item,
            policy=full_depth(self._last_exit),
            submission=None,
            deadline=None,
            every_reading=False,
            audit_tier=None,
            check=Check(item.audit_tier, answer.left.label),
            readings=[],
            runs=None,
            queued=False,
            done=False,
        )
        with self._work:
            self._scheduler.add_behind(follower, self._clock())
            self._work.notify()

    def _break(self) -> None:
        """Nothing can be relied on any more: accepts nothing, and fails what waits or runs, so that nobody hangs."""
        self._accepting = False
        self._broken = True
        with self._work:
            self._stopping = True
            self._work.notify_all()
        self._settle([(item, Failure("internal")) for item in list(self._open)])

    def _expire(self, items: Sequence[Item]) -> None:
        """The deadline of ``items`` is here: whoever has passed an exit is answered from the latest one."""
        late = [item for item in items if not item.done]
        self._settle([(item, self._at_deadline(item)) for item in late])
        self._forget(late)

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
        for item in left:
            self._finish(item)
        self._forget(left)
        for _ in left:
            self._observer.cancelled()

    def _forget(self, items: Sequence[Item]) -> None:
        if items:
            with self._work:
                for item in items:
                    self._scheduler.remove(item)

    # On worker threads.

    def _serve(self) -> None:
        try:
            ran: Ran | None = None
            while (picked := self._exchange(ran)) is not None:
                ran = self._step(*picked)
                if ran.leavers:
                    self._send(self._settle, ran.leavers)
        except BaseException:
            # A micro-batch that fails ends nothing (see _step). This is the scheduler, or the interpreter's end.
            logger.exception("a worker died; the engine stops")
            self._send(self._break)

    def _exchange(self, ran: Ran | None) -> tuple[Batch, bool] | None:
        """Hands over what a worker ran and takes its next micro-batch, once there is one, and whether it has the
        machine to itself; ``None`` when the engine stops."""
        with self._work:
            if ran is not None:
                self._take_in(ran)
            while not self._stopping:
                batch = self._scheduler.pick(self._clock())
                if batch is not None:
                    more = self._scheduler.waiting > 0
                    if more:
                        self._work.notify()
                    return batch, self._busy == 1 and not more
                self._busy -= 1
                self._work.wait()
                self._busy += 1
        return None

    def _step(self, batch: Batch, lone: bool) -> Ran:
        """Runs one segment: those that leave with their outcomes, and those that go on.

        Never raises: where the micro-batch breaks, each of its texts gets a run of its own, so that whichever broke it
        fails alone. Where memory was too short for it, its halves run, and no micro-batch is as large from then on.
        """
        items = batch.items
        part = 1
        try:
            return self._stepper.take(batch, lone=lone)
        except OutOfMemory:
            part = (len(items) + 1) // 2
            self._shrink(items)
        except Exception:
            ids = sorted({item.submission.request_id for item in items if item.submission is not None})
            logger.exception(
                "segment %d failed for %d texts of requests: %s",
                batch.segment,
                len(items),
                ", ".join(ids) or "none, shadow checks",
                extra={FIELDS: {"request_id": ids[0]} if len(ids) == 1 else {"request_ids": ids}},
            )
        if len(items) == 1:
            return Ran(batch.segment, [(items[0], Failure("internal"))], [])
        parts = [
            self._step(replace(batch, items=items[start : start + part]), lone) for start in range(0, len(items), part)
        ]
        leavers = [leaver for ran in parts for leaver in ran.leavers]
        return Ran(batch.segment, leavers, [item for ran in parts for item in ran.survivors])

    def _shrink(self, items: Sequence[Item]) -> None:
        tokens = sum(item.tokens for item in items)
        logger.warning("no memory for %d texts of %d tokens in all", len(items), tokens)
        if len(items) > 1:
            with self._work:
                self._scheduler.shrink(tokens // 2)

    def _send(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            # The loop was closed without closing the engine: nobody is left to be told.
            logger.debug("the event loop is closed; %s dropped", call.__name__)


def _predicted_wait(work: threading.Condition, scheduler: Scheduler[Item], now: float) -> float:
    with work:
        return scheduler.predicted_wait(now)
