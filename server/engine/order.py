"""Which queue a free worker serves next: one small pure function of the queues, several to choose from.

An order only chooses among segments. Inside a queue the oldest text goes first, and the scheduler overrides any order
for texts that would starve or miss their deadline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from server.engine.latency import LatencyTable


@dataclass(frozen=True, slots=True)
class Queue:
    """What an order sees of the texts that wait for one segment; there is at least one.

    ``oldest`` is the smallest arrival number, ``batch`` and ``tokens`` what the next micro-batch would take, ``chance``
    the learned probability that a text leaves at this segment's exit. Without a ``latency`` table every segment costs
    alike, in proportion to its texts.
    """

    segment: int
    waiting: int
    oldest: int
    batch: int
    tokens: int
    chance: float
    latency: LatencyTable | None = None

    @property
    def seconds(self) -> float:
        """Of the run that the next micro-batch would be."""
        return (
            float(self.batch)
            if self.latency is None
            else self.latency.seconds_of(self.segment, self.batch, self.tokens)
        )


Order = Callable[[Sequence[Queue]], Queue]
"""Chooses one of the queues that it is given (at least one)."""


def oldest(queues: Sequence[Queue]) -> Queue:
    """First come, first served, over all segments."""
    return min(queues, key=lambda queue: queue.oldest)


def deepest(queues: Sequence[Queue]) -> Queue:
    """Whoever has come furthest: finish what was begun, keep little state."""
    return max(queues, key=lambda queue: queue.segment)


def gittins(queues: Sequence[Queue]) -> Queue:
    """Most answers a second: chance to leave at the next exit × texts of the batch / seconds of the run.

    The Gittins index of a job with a hazard h(a) at attained service a is the best ratio of completion probability to
    expected service over all ways to go on (Gittins 1979; Aalto, Ayesta, Righter 2009); here over the next exit alone,
    and of a micro-batch in place of a job. Ties go to the older.
    """
    return max(queues, key=lambda queue: (queue.chance * queue.batch / queue.seconds, -queue.oldest))


def fullest(queues: Sequence[Queue]) -> Queue:
    """The largest micro-batch: a text costs the less the more run with it. Ties go to the older."""
    return max(queues, key=lambda queue: (queue.batch, -queue.oldest))


OrderName = Literal["oldest", "deepest", "gittins", "fullest"]
ORDERS: Mapping[str, Order] = {"oldest": oldest, "deepest": deepest, "gittins": gittins, "fullest": fullest}


class Chances:
    """How probable it is that a text that runs a segment leaves at its exit, learned from what ran.

    A weighted mean of ``prior [E]`` (counted as ``weight`` texts) and of the runs so far, of which those longer than
    about ``memory`` texts ago are forgotten, so that it follows the traffic. The last exit is always 1.
    """

    def __init__(
        self, segments: int, prior: Sequence[float] | None = None, *, weight: float = 16.0, memory: int = 4096
    ) -> None:
        """``prior`` defaults to one half at every exit. Raises :class:`ValueError` where it has not one probability
        for each segment."""
        self._prior = [0.5] * segments if prior is None else list(prior)
        if len(self._prior) != segments or not all(0.0 <= chance <= 1.0 for chance in self._prior):
            raise ValueError(f"prior must have {segments} probabilities, not {self._prior}")
        self._weight = weight
        self._memory = memory
        self._ran = [0.0] * segments
        self._left = [0.0] * segments
        self._chances = [*self._prior[:-1], 1.0]

    def ran(self, segment: int, texts: int, left: int) -> None:
        """Of ``texts`` texts that ran ``segment`` (1 = first), ``left`` left at its exit."""
        place = segment - 1
        if place == len(self._prior) - 1:
            return
        kept = max(0.0, 1.0 - texts / self._memory)
        self._ran[place] = kept * self._ran[place] + texts
        self._left[place] = kept * self._left[place] + left
        self._chances[place] = (self._weight * self._prior[place] + self._left[place]) / (
            self._weight + self._ran[place]
        )

    def __getitem__(self, segment: int) -> float:
        """Of ``segment`` (1 = first)."""
        return self._chances[segment - 1]
