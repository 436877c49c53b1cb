"""Who runs next: a queue per segment, and the choice of the next micro-batch.

Pure data and decisions: no I/O, no ONNX Runtime, no asyncio, no clock (time comes in as an argument) and no locks
(the caller holds one).
"""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Generic, Protocol, TypeVar

from server.engine.latency import LatencyTable
from server.engine.order import Chances, Order, Queue, oldest
from server.engine.request import Picked


class Waiting(Protocol):
    """What the scheduler needs to know of a text; :class:`server.engine.request.Item` is one.

    ``arrival`` is its own and orders texts by age. ``segment`` is the one to run next and must not change while the
    text waits. ``done`` means that nobody waits for it any more. ``queued`` and ``waiting_since`` belong to the
    scheduler.
    """

    queued: bool
    waiting_since: float

    @property
    def arrival(self) -> int: ...
    @property
    def segment(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def deadline(self) -> float | None: ...
    @property
    def done(self) -> bool: ...


W = TypeVar("W", bound=Waiting)

# Attention gathers a micro-batch to [texts, longest] (docs/decisions/0003): a text of 400 tokens among 31 of 3 takes
# 12,800 slots for its 493 tokens. So texts × longest is bounded too, to this multiple of max_batch_tokens.
SLOTS_PER_TOKEN = 4
# Of a longer queue only so many of the oldest are looked at for company of like length (twice as many as a micro-batch
# may have, where that is more).
WINDOW = 64

_arrival: Callable[[Any], int] = attrgetter("arrival")
_deadline: Callable[[Any], float] = attrgetter("deadline")


class Scheduler(Generic[W]):
    """Queues of waiting texts by segment; a free worker takes a micro-batch at once and never waits for more to come.

    A micro-batch is the oldest text of a segment and others that wait there, whoever they came with before: at most
    ``max_batch_texts`` with at most ``max_batch_tokens`` tokens in all; a text longer than that runs alone. Company is
    the next in age; where ``latency`` says that different lengths cost time, it is those of like length, and only
    while that takes less than a run of their own. Which segment is ``order``'s choice, with two exceptions:

    - No starvation: where the oldest text of a queue has waited in it for more than ``max_wait_seconds``, the oldest
      of such goes next. The oldest text of all is always the first of its queue, so it moves on within that bound.
    - Earliest deadline first when slack is short: a text that would miss its deadline if it waited for one more run
      goes next, those without any answer first. Texts that can't make it anyway are not preferred.

    Whoever is added behind runs alone, once nobody else waits or after ``max_wait_seconds``, and is no work that a
    newcomer is told of.

    Deadlines are looked after, waits predicted and costs known only with a ``latency`` table. ``workers`` is how many
    runs go on at once; texts that wait are shared out among those of them that are free, if :meth:`ran` is told when
    a run ends.
    """

    def __init__(
        self,
        segments: int,
        *,
        max_batch_tokens: int,
        max_batch_texts: int,
        order: Order = oldest,
        latency: LatencyTable | None = None,
        chances: Chances | None = None,
        workers: int = 1,
        max_wait_seconds: float = 1.0,
    ) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_texts = max_batch_texts
        self._window = max(WINDOW, 2 * max_batch_texts)
        self._order = order
        self._latency = latency
        self._chances = chances or Chances(segments)
        self._workers = workers
        self._max_wait = max_wait_seconds
        self._queues: list[_Queue[W]] = [_Queue() for _ in range(segments)]
        self._waiting = 0
        self._behind: deque[W] = deque()
        # (segment, texts, when its end is expected) of what runs; bounded, should nobody tell when runs end.
        self._running: deque[tuple[int, int, float]] = deque(maxlen=workers)
        self._looks_at_lengths = latency is not None and latency.padding > 0.0

    def shrink(self, max_batch_tokens: int) -> None:
        """From here on micro-batches have at most so many tokens; a longer text still runs alone."""
        self._max_batch_tokens = max(1, min(self._max_batch_tokens, max_batch_tokens))

    def add(self, items: Iterable[W], now: float) -> None:
        """Puts texts into the queue of their ``segment``; those that are done are not taken."""
        for item in items:
            if item.done:
                continue
            item.queued, item.waiting_since = True, now
            self._queues[item.segment - 1].add(item)
            self._waiting += 1

    def add_behind(self, item: W, now: float) -> None:
        """Has a text wait behind all others: nobody waits for its answer."""
        item.waiting_since = now
        self._behind.append(item)

    def remove(self, item: W) -> None:
        """Forgets a waiting text (nobody waits for its answer any more). Texts that run or have left are no matter."""
        if item.queued:
            item.queued = False
            self._queues[item.segment - 1].remove(item)
            self._waiting -= 1

    def pick(self, now: float) -> Picked[W] | None:
        """Takes the next micro-batch out of the queues, or ``None`` where nobody waits.

        Texts that are done, or whose deadline has passed at ``now``, are taken out and not run.
        """
        busy = []
        for place, queue in enumerate(self._queues):
            while queue.by_age and (dead := queue.dead(now)) is not None:
                self.remove(dead)
            if queue.by_age:
                busy.append(place)
        if self._behind and (not busy or now - self._behind[0].waiting_since > self._max_wait):
            last = self._behind.popleft()
            # Of no text: what becomes of it afterwards is no work either.
            self._running.append((last.segment, 0, now + self._estimate(last.segment, [last.tokens])))
            return Picked(last.segment, [last])
        if not busy:
            return None
        place, first = self._next(now, busy)
        items = self._take(self._queues[place], place + 1, first, now)
        if not items:
            # Whoever waits may become done at any moment, and all that were looked at just have.
            return self.pick(now)
        for item in items:
            self.remove(item)
        seconds = self._estimate(place + 1, [item.tokens for item in items])
        self._running.append((place + 1, len(items), now + seconds))
        return Picked(place + 1, items)

    def ran(self, segment: int, texts: int, left: int) -> None:
        """A run of ``segment`` has ended: of its ``texts`` texts ``left`` were sure enough to leave.

        From this the chances to leave are learned, and who is free is known. A run that failed counts as
        ``(segment, 0, 0)``.
        """
        for place, run in enumerate(self._running):
            if run[0] == segment:
                del self._running[place]
                break
        if texts:
            self._chances.ran(segment, texts, left)

    @property
    def waiting(self) -> int:
        """Texts that wait in any queue (who waits behind is in none)."""
        return self._waiting

    def depth(self, segment: int) -> int:
        """Texts that wait for ``segment`` (1 = first)."""
        return len(self._queues[segment - 1].by_age)

    # Admission: what a newcomer may expect. All in seconds, from the latency table; 0 without one.

    def predicted_wait(self, now: float) -> float:
        """Seconds until all that waits and runs now is answered: what a newcomer waits for if it is served in turn."""
        if self._latency is None:
            return 0.0
        work = sum(max(0.0, end - now) + texts * self._after(segment) for segment, texts, end in self._running)
        for place, queue in enumerate(self._queues):
            if queue.by_age:
                view = self._view(place)
                work += view.waiting * self._chain(view.segment, view.batch)
        return work / self._workers

    def first_exit_in(self, now: float, deadline: float, tokens: int) -> float:
        """Seconds until a newcomer of ``tokens`` tokens passes its first exit, served by its ``deadline``: a worker
        gets free, texts without an answer whose deadline is earlier run, then it does."""
        if self._latency is None:
            return 0.0
        free = max(0.0, min(end for *_, end in self._running) - now) if len(self._running) >= self._workers else 0.0
        own = self._latency.seconds_of(1, 1, tokens)
        queue = self._queues[0]
        ahead = bisect_right(queue.by_deadline, deadline, key=_deadline)
        # Who can't make it any more is not preferred to anybody.
        ahead -= bisect_left(queue.by_deadline, now + own, hi=ahead, key=_deadline)
        if ahead <= 0:
            return free + own
        view = self._view(0)
        return free + ahead * view.seconds / view.batch / self._workers + own

    def would_be_late(self, now: float, deadline: float, tokens: int) -> bool:
        """Whether a newcomer could not even pass its first exit before its ``deadline``, and so get no answer."""
        return now + self.first_exit_in(now, deadline, tokens) > deadline

    # The choice.

    def _next(self, now: float, busy: Sequence[int]) -> tuple[int, int | None]:
        """Which of the ``busy`` queues' places to serve, and the place in its ``by_deadline`` of the text that must not
        wait, if there is one."""
        if len(busy) > 1:
            queues = self._queues
            fronts = [(queues[place].by_age[0], place) for place in busy]
            starving = [(item.arrival, place) for item, place in fronts if now - item.waiting_since > self._max_wait]
            if starving:
                return min(starving)[1], None
        if (urgent := self._urgent(now, busy)) is not None:
            return urgent
        if len(busy) == 1:
            return busy[0], None
        return self._order([self._view(place) for place in busy]).segment - 1, None

    def _urgent(self, now: float, busy: Sequence[int]) -> tuple[int, int] | None:
        hurried = [place for place in busy if self._queues[place].by_deadline]
        if self._latency is None or not hurried:
            return None
        one_more_run = max(self._view(place).seconds for place in busy)
        found = []
        for place in hurried:
            queue = self._queues[place]
            # Alone, as short as can be: who can't make it even so is left to its turn.
            soonest = now + self._latency.seconds_of(place + 1, 1, queue.tokens / len(queue.by_age))
            reachable = bisect_left(queue.by_deadline, soonest, key=_deadline)
            if reachable == len(queue.by_deadline):
                continue
            deadline = _deadline(queue.by_deadline[reachable])
            if deadline - soonest < one_more_run:
                found.append((place > 0, deadline, place, reachable))
        return min(found)[2:] if found else None

    def _view(self, place: int) -> Queue:
        queue = self._queues[place]
        waiting = len(queue.by_age)
        mean = queue.tokens / waiting
        batch = min(self._share(waiting), max(1, int(self._max_batch_tokens / mean)))
        return Queue(
            segment=place + 1,
            waiting=waiting,
            oldest=queue.by_age[0].arrival,
            batch=batch,
            tokens=round(batch * mean),
            chance=self._chances[place + 1],
            latency=self._latency,
        )

    def _share(self, waiting: int) -> int:
        """How many of ``waiting`` texts one worker takes at most."""
        free = max(1, self._workers - len(self._running))
        return min(self._max_batch_texts, -(-waiting // free))

    def _seconds(self, segment: int, texts: int, tokens: float) -> float:
        # Without a table every segment counts alike, in proportion to its texts.
        return float(texts) if self._latency is None else self._latency.seconds_of(segment, texts, tokens)

    def _estimate(self, segment: int, lengths: Sequence[int]) -> float:
        return float(len(lengths)) if self._latency is None else self._latency.estimate(segment, lengths)

    def _take(self, queue: "_Queue[W]", segment: int, first: int | None, now: float) -> list[W]:
        """The texts of the next micro-batch."""
        texts = self._share(len(queue.by_age))
        until = None if first is None else _deadline(queue.by_deadline[first])
        items: list[W] = []
        lengths: list[int] = []
        tokens, longest, seconds = 0, 0, 0.0
        for item in self._company(queue, first):
            if len(items) == texts:
                break
            if item.done or (first is not None and item in items):
                continue
            slots = (len(items) + 1) * max(item.tokens, longest)
            if items and (
                tokens + item.tokens > self._max_batch_tokens or slots > SLOTS_PER_TOKEN * self._max_batch_tokens
            ):
                break
            if self._looks_at_lengths or until is not None:
                together = self._estimate(segment, [*lengths, item.tokens])
                # Company must not make the one late that goes first because it would be.
                if items and until is not None and now + together > until:
                    break
                # Nor is it worth while where another run of its own would take less.
                if items and together > seconds + self._estimate(segment, [item.tokens]):
                    continue
                seconds = together
            items.append(item)
            lengths.append(item.tokens)
            tokens += item.tokens
            longest = max(longest, item.tokens)
        return items

    def _company(self, queue: "_Queue[W]", first: int | None) -> Sequence[W]:
        """Who may go in the next micro-batch, the one that must first."""
        if first is not None:
            return [*queue.by_deadline[first : first + self._window], *queue.by_age[: self._window]]
        if not self._looks_at_lengths or len(queue.by_age) < 3:
            return queue.by_age
        leader, *others = queue.by_age[: self._window]
        return [leader, *sorted(others, key=lambda item: abs(item.tokens - leader.tokens))]

    # Predictions.

    def _after(self, segment: int) -> float:
        """Expected seconds of a text beyond ``segment``, in company as full as can be."""
        return self._chain(segment + 1, self._max_batch_texts) * (1.0 - self._chances[segment])

    def _chain(self, segment: int, batch: int) -> float:
        """Expected seconds of a text that runs ``segment`` and on to its exit, its share of micro-batches of
        ``batch``."""
        tokens = self._mean_tokens()
        batch = max(1, min(batch, int(self._max_batch_tokens / tokens)))
        reach, total = 1.0, 0.0
        for number in range(segment, len(self._queues) + 1):
            total += reach * self._seconds(number, batch, batch * tokens) / batch
            reach *= 1.0 - self._chances[number]
        return total

    def _mean_tokens(self) -> float:
        # Where nobody waits, a text of middle length: what runs is not remembered text by text.
        return sum(queue.tokens for queue in self._queues) / self._waiting if self._waiting else 32.0


class _Queue(Generic[W]):
    """The texts that wait for one segment, by age and by deadline.

    Sorted lists: a removal moves pointers (a microsecond for a thousand), so nothing stale is ever held.
    """

    def __init__(self) -> None:
        self.by_age: list[W] = []
        self.by_deadline: list[W] = []
        self.tokens = 0

    def add(self, item: W) -> None:
        insort(self.by_age, item, key=_arrival)
        if item.deadline is not None:
            insort(self.by_deadline, item, key=_deadline)
        self.tokens += item.tokens

    def remove(self, item: W) -> None:
        _delete(self.by_age, item, item.arrival, _arrival)
        if item.deadline is not None:
            _delete(self.by_deadline, item, item.deadline, _deadline)
        self.tokens -= item.tokens

    def dead(self, now: float) -> W | None:
        """A text that must not run: any whose deadline has passed, or the oldest if it is done."""
        if self.by_deadline and _deadline(self.by_deadline[0]) <= now:
            return self.by_deadline[0]
        if self.by_age and self.by_age[0].done:
            return self.by_age[0]
        return None


def _delete(items: list[W], item: W, key: float, key_of: Callable[[Any], float]) -> None:
    place = bisect_left(items, key, key=key_of)
    while items[place] is not item:
        place += 1
    del items[place]
