"""The scheduler under a discrete-event clock: what a machine would do that is described by a latency table.

Workers, arrivals and exits are simulated, the scheduler is the server's own. A run lasts as long as the table says, and
each text leaves at the exit that its profile says.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from server.engine.latency import LatencyTable
from server.engine.scheduler import Scheduler

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Profile:
    """Texts as they come: ``tokens [N]``, and ``exits [N]``, the exit (1 = first) that each leaves at."""

    tokens: Ints
    exits: Ints

    def __post_init__(self) -> None:
        if not len(self.tokens) or self.tokens.shape != self.exits.shape or self.tokens.ndim != 1:
            raise ValueError(f"{len(self.tokens)} lengths for {len(self.exits)} exits")
        if self.tokens.min() < 1 or self.exits.min() < 1:
            raise ValueError("tokens and exits must be at least 1")

    @classmethod
    def from_document(cls, document: Mapping[str, Any], quality: str) -> "Profile":
        """From ``{"tokens": [...], "exits": {quality: [...]}}``. Raises :class:`ValueError` where it is no such."""
        try:
            exits = document["exits"]
            if quality not in exits:
                raise ValueError(f"no exits for quality {quality}; there are those for {', '.join(exits)}")
            return cls(np.array(document["tokens"], dtype=np.int64), np.array(exits[quality], dtype=np.int64))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a profile: {error}") from None


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When texts come: ``rate`` a second, each at random (Poisson); or from ``clients`` that each send the next text
    when the last one is answered (closed loop); or at the given ``times`` (increasing, in seconds)."""

    rate: float | None = None
    clients: int | None = None
    times: Sequence[float] | None = None

    def __post_init__(self) -> None:
        if sum(way is not None for way in (self.rate, self.clients, self.times)) != 1:
            raise ValueError("arrivals are one of rate, clients and times")


@dataclass(frozen=True, slots=True)
class Service:
    """What surrounds the scheduler: how many texts run at once, ``front_seconds`` that the one event loop spends on
    each text before it is queued, and what may be refused (``max_queue`` texts in the house, or predicted late).

    The event loop and the workers share ``cpus`` evenly where there are fewer of them (None: nobody waits for a CPU).
    """

    workers: int
    front_seconds: float = 0.0
    cpus: float | None = None
    max_queue: int | None = None
    deadline_seconds: float | None = None

    def __post_init__(self) -> None:
        if self.cpus is not None and not self.cpus > 0:
            raise ValueError(f"cpus must be more than 0, not {self.cpus:g}")


@dataclass(frozen=True, eq=False)
class Simulated:
    """What happened. ``seconds [N]`` from arrival to answer, NaN for texts without one; ``passed [N]`` the exit whose
    answer each got (0 for none); ``refused`` texts never came in. ``runs [E]`` and ``ran [E]`` are runs and texts of
    each segment, ``busy`` the seconds of all workers, ``elapsed`` the time of the last event; ``events`` were arrivals
    and ends of runs."""

    seconds: Floats
    passed: Ints
    refused: int
    runs: Ints
    ran: Ints
    busy: float
    elapsed: float
    events: int

    def quantile(self, share: float, warm_up: float = 0.1) -> float:
        """Seconds that ``share`` of the answers took at most; the first ``warm_up`` of all texts left out."""
        rest = self.seconds[int(warm_up * len(self.seconds)) :]
        rest = rest[np.isfinite(rest)]
        return float(np.quantile(rest, share)) if len(rest) else float("nan")

    @property
    def throughput(self) -> float:
        """Answers a second."""
        return float(np.isfinite(self.seconds).sum() / self.elapsed)


class _Text:
    __slots__ = ("arrival", "deadline", "done", "leaves", "queued", "segment", "started", "tokens", "waiting_since")

    def __init__(self, arrival: int, tokens: int, leaves: int, started: float, deadline: float | None) -> None:
        self.arrival = arrival
        self.tokens = tokens
        self.leaves = leaves
        self.started = started
        self.deadline = deadline
        self.segment = 1
        self.queued = self.done = False
        self.waiting_since = 0.0


def simulate(
    scheduler: "Scheduler[Any]",
    latency: LatencyTable,
    profile: Profile,
    arrivals: Arrivals,
    service: Service,
    *,
    texts: int,
    seed: int = 0,
) -> Simulated:
    """Sends ``texts`` texts, drawn from ``profile`` with replacement, through a new ``scheduler``.

    Whoever reaches its deadline after an exit is answered from it then; a text that has passed none gets no answer.
    Raises :class:`ValueError` where clients are to wait for texts that have deadlines.
    """
    if arrivals.clients is not None and (service.deadline_seconds is not None or service.max_queue is not None):
        raise ValueError("closed loop knows neither deadlines nor refusals")
    if arrivals.times is not None and len(arrivals.times) != texts:
        raise ValueError(f"{len(arrivals.times)} times for {texts} texts")
    draw = np.random.default_rng(seed)
    chosen = draw.integers(len(profile.tokens), size=texts)
    tokens, exits = profile.tokens[chosen].tolist(), profile.exits[chosen].tolist()
    if profile.exits.max() > latency.segments:
        raise ValueError(f"the profile has {profile.exits.max()} exits, the latency table {latency.segments} segments")
    coming = _Coming(arrivals, texts, draw, service.front_seconds)
    clock = _Clock(service.cpus)
    seconds, passed = np.full(texts, np.nan), np.zeros(texts, dtype=np.int64)
    runs, ran = [0] * latency.segments, [0] * latency.segments
    ending: list[tuple[float, int, int, Sequence[_Text]]] = []
    expiring: deque[Any] = deque()
    number = itertools.count()
    refused = inside = events = 0
    free, busy = service.workers, 0.0

    while True:
        clock.share(service.workers - free + coming.working)
        ends = clock.when(ending[0][0]) if ending else np.inf
        comes = clock.when(coming.ends) if coming.working else np.inf
        now = min(coming.starts, comes, ends)
        if now == np.inf:
            break
        clock.move_to(max(clock.now, now))
        if now == coming.starts:
            coming.start(clock.work)
            continue
        while expiring and expiring[0].deadline < now:
            late = expiring.popleft()
            if not late.done:
                late.done = True
                inside -= 1
                scheduler.remove(late)
        if comes <= ends:
            arrival, started = coming.take()
            deadline = None if service.deadline_seconds is None else started + service.deadline_seconds
            if (service.max_queue is not None and inside >= service.max_queue) or (
                deadline is not None and scheduler.would_be_late(now, deadline, tokens[arrival])
            ):
                refused += 1
            else:
                inside += 1
                text = _Text(arrival, tokens[arrival], exits[arrival], started, deadline)
                if deadline is not None:
                    expiring.append(text)
                scheduler.add([text], now)
        else:
            _, _, segment, batch = heapq.heappop(ending)
            free += 1
            left = 0
            survivors = []
            for text in batch:
                leaves = text.leaves <= segment
                left += leaves
                if text.done:
                    continue
                if leaves:
                    text.done = True
                    inside -= 1
                    seconds[text.arrival], passed[text.arrival] = now - text.started, segment
                    coming.answered(now)
                else:
                    if text.deadline is not None:
                        # What it gets if it comes no further.
                        seconds[text.arrival], passed[text.arrival] = text.deadline - text.started, segment
                    text.segment = segment + 1
                    survivors.append(text)
            scheduler.ran(segment, len(batch), left)
            if survivors:
                scheduler.add(survivors, now)
        events += 1
        while free and (picked := scheduler.pick(now)) is not None:
            free -= 1
            lasts = latency.estimate(picked.segment, [text.tokens for text in picked.items])
            busy += lasts
            runs[picked.segment - 1] += 1
            ran[picked.segment - 1] += len(picked.items)
            heapq.heappush(ending, (clock.work + lasts, next(number), picked.segment, picked.items))
    return Simulated(seconds, passed, refused, np.array(runs), np.array(ran), busy, clock.now, events)


class _Clock:
    """The time ``now``, and the seconds of ``work`` that whoever works has done by then: fewer where several share a
    CPU. All share alike, so one count of work tells of each when it is done."""

    def __init__(self, cpus: float | None) -> None:
        self.now = self.work = 0.0
        self._cpus = cpus
        self._rate = 1.0

    def share(self, working: int) -> None:
        """From now on so many work at once."""
        self._rate = 1.0 if self._cpus is None or working <= self._cpus else self._cpus / working

    def when(self, work: float) -> float:
        """When as much ``work`` will be done, if nothing changes until then."""
        return self.now + (work - self.work) / self._rate

    def move_to(self, time: float) -> None:
        self.work += (time - self.now) * self._rate
        self.now = time


class _Coming:
    """Texts that were sent; the event loop takes them one by one, in that order."""

    def __init__(self, arrivals: Arrivals, texts: int, draw: np.random.Generator, front_seconds: float) -> None:
        if arrivals.rate is not None:
            sent = np.cumsum(draw.exponential(1 / arrivals.rate, texts)).tolist()
        elif arrivals.times is not None:
            sent = arrivals.times
        else:
            sent = [0.0] * min(texts, arrivals.clients or 0)
        self._sent = deque(sent)
        # How many texts clients still send, each when it has its answer.
        self._more = texts - len(self._sent)
        self._front = front_seconds
        self._taken = 0
        self.working = False
        # By the count of work: when the event loop will be done with the text that it works on.
        self.ends = 0.0

    @property
    def starts(self) -> float:
        """When the event loop takes up the next text, as far as is known."""
        return self._sent[0] if self._sent and not self.working else np.inf

    def start(self, work: float) -> None:
        """The event loop takes up the next text, ``work`` having been done by now."""
        self.working, self.ends = True, work + self._front

    def take(self) -> tuple[int, float]:
        """Number and sending time of the text that the event loop is done with."""
        self.working = False
        self._taken += 1
        return self._taken - 1, self._sent.popleft()

    def answered(self, now: float) -> None:
        """An answer went out at ``now``: where clients wait for answers, one sends its next text."""
        if self._more:
            self._more -= 1
            self._sent.append(now)


def batching_like(latency: LatencyTable, gain: float, *, tokens: int, largest: int) -> LatencyTable:
    """The table of a machine whose run of one text of ``tokens`` tokens takes as long as ``latency`` says, and whose
    largest batches serve ``gain`` times as many texts a second: a run of n texts takes 1 + (n - 1) / gain times that.
    """
    ones = np.array([latency.seconds_of(segment, 1, tokens) for segment in range(1, latency.segments + 1)])
    factors = np.array([1.0, 1.0 + (largest - 1) / gain])
    return LatencyTable(
        np.array([1], dtype=np.int64),
        np.array([tokens, largest * tokens], dtype=np.int64),
        ones[:, None, None] * factors[None, None, :],
    )
