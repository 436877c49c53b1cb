"""Admission: whether there is room for a newcomer, and how long it would wait.

Pure decisions on counts and predictions. An engine's event loop alone touches it, so it needs no lock.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

# Shares of the longest wait between which the load lowers depth where a request consents.
LOWER_FROM, LOWEST_FROM = 0.1, 0.6
# How old a predicted wait may be: under overload predicting anew for everyone who is refused would take a fifth of the
# event loop's time.
PREDICTION_SECONDS = 0.005
# What waits turn out to be, in units of those predicted, is learned from waits that were expected to be long enough to
# tell: this long, or half of what a newcomer may wait, if that is less. Such are admitted whatever has been learned, so
# it can be unlearned.
WORTH_LEARNING_SECONDS = 0.05
LEARNING_RATE = 0.02
MOST_SLOWNESS = 10.0
# So few requests are never refused because of how long they would wait: a handful of clients that send large batches
# wants the throughput, and max_texts bounds them.
FEW_REQUESTS = 32
MOST_RETRY_AFTER = 60

Refusal = Literal["queue_full", "wait", "late"]
_WHY: dict[Refusal, str] = {
    "queue_full": "too many texts are waiting",
    "wait": "what waits already would take too long",
    "late": "the deadline would pass before the first exit",
}


class Overloaded(Exception):
    """The bounded queue is full, its work would take too long, or the deadline would pass before the first exit; try
    again in ``retry_after`` whole seconds, which are 1 to 60."""

    def __init__(self, reason: Refusal, wait: float) -> None:
        """``wait``: seconds until what waits now is done."""
        self.reason = reason
        self.retry_after = max(1, math.ceil(min(wait, MOST_RETRY_AFTER)))
        super().__init__(f"{_WHY[reason]}; try again in {self.retry_after} s")


class Admission:
    """Counts what is in work: ``texts`` admitted and not yet settled, and ``requests`` whose answers are waited for."""

    def __init__(
        self,
        *,
        max_texts: int,
        max_wait_seconds: float,
        predicted_wait: Callable[[float], float],
        clock: Callable[[], float],
    ) -> None:
        """``predicted_wait(now)``: seconds of runs before a newcomer (0 where nothing is known)."""
        self.texts = 0
        self.requests = 0
        self._max_texts = max_texts
        self._max_wait = max_wait_seconds
        self._predict = predicted_wait
        self._clock = clock
        self._predicted, self._predicted_at = 0.0, -math.inf
        self._slowness = 1.0

    def check(self, texts: int) -> None:
        """Raises :class:`Overloaded` where a newcomer with so many ``texts`` would find no room, or wait too long."""
        if self.texts + texts > self._max_texts:
            raise Overloaded("queue_full", self.wait())
        if self.crowded and (wait := self.wait()) > self._max_wait:
            raise Overloaded("wait", wait)

    @contextmanager
    def request(self) -> Iterator[None]:
        """Counts a request meanwhile."""
        self.requests += 1
        try:
            yield
        finally:
            self.requests -= 1

    @property
    def crowded(self) -> bool:
        """Whether so many requests are in work that the next one's wait matters."""
        return self.requests > FEW_REQUESTS

    def wait(self) -> float:
        """Seconds that a newcomer may expect to wait."""
        return self._slowness * self.predicted()

    def pressure(self) -> float:
        """The load, from 0 to 1: where a newcomer's wait lies between a tenth of what it may be and six tenths."""
        share = self.wait() / self._max_wait
        return min(1.0, max(0.0, (share - LOWER_FROM) / (LOWEST_FROM - LOWER_FROM)))

    def predicted(self) -> float:
        """Seconds of runs before a newcomer, at most :data:`PREDICTION_SECONDS` old."""
        now = self._clock()
        if now - self._predicted_at > PREDICTION_SECONDS:
            self._predicted, self._predicted_at = self._predict(now), now
        return self._predicted

    def learn(self, predicted: float, taken: float) -> None:
        """A text before which there were ``predicted`` seconds of runs was answered ``taken`` seconds later: runs share
        the CPUs with the event loop, and with whoever else there is."""
        if self._slowness * predicted > min(WORTH_LEARNING_SECONDS, self._max_wait / 2):
            self._slowness += LEARNING_RATE * (min(taken / predicted, MOST_SLOWNESS) - self._slowness)
