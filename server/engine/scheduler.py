"""Who runs next: a queue per segment, and the choice of the next micro-batch.

Pure data and decisions: no I/O, no ONNX Runtime, no asyncio, no clock (time comes in as an argument) and no locks
(the caller holds one).
"""

import heapq
from collections.abc import Iterable

from server.engine.request import Batch, Item

# Texts of one micro-batch are padded to its longest, so only texts whose lengths fall into one bucket go together.
BUCKET_TOKENS = 16


class Scheduler:
    """Queues of waiting items by segment and length bucket, oldest first.

    The oldest waiting item always goes next, whatever its segment, so nobody starves; whoever waits for the same
    segment with a similar length goes with it, oldest first, while the padded batch stays within ``max_batch_tokens``
    and ``max_batch_texts``. An item longer than the token budget runs alone.
    """

    def __init__(self, segments: int, *, max_batch_tokens: int, max_batch_texts: int) -> None:
        self._max_batch_tokens = max_batch_tokens
        self._max_batch_texts = max_batch_texts
        self._queues: dict[tuple[int, int], list[tuple[int, Item]]] = {}
        self._depth = [0] * (segments + 1)
        self._abandoned = 0

    def add(self, items: Iterable[Item], now: float) -> None:
        """Puts items into the queue of their ``segment``."""
        for item in items:
            if item.done:
                continue
            item.queued, item.waiting_since = True, now
            key = (item.segment, -(-item.tokens // BUCKET_TOKENS))
            heapq.heappush(self._queues.setdefault(key, []), (item.arrival, item))
            self._depth[item.segment] += 1

    def remove(self, item: Item) -> None:
        """Forgets a waiting item (nobody waits for its answer any more). Items that run or have left are no matter."""
        if not item.queued:
            return
        item.queued = False
        self._depth[item.segment] -= 1
        # A removed item stays in its heap until it comes up or until half of all entries are such; then all are swept.
        # So the queues stay bounded however many clients come and go.
        self._abandoned += 1
        if self._abandoned > 64 and self._abandoned > self.waiting:
            self._sweep()

    def pick(self, now: float) -> Batch | None:
        """Takes the next micro-batch out of the queues, or ``None`` where nobody waits.

        Items that are done, or whose deadline has passed at ``now``, are taken out and not run.
        """
        while (key := self._oldest_queue()) is not None:
            items = self._take(key, now)
            if items:
                return Batch(key[0], items)
        return None

    @property
    def waiting(self) -> int:
        """Items that wait in any queue."""
        return sum(self._depth)

    def depth(self, segment: int) -> int:
        """Items that wait for ``segment`` (1 = first)."""
        return self._depth[segment]

    def _oldest_queue(self) -> tuple[int, int] | None:
        return min(self._queues, key=lambda key: self._queues[key][0][0], default=None)

    def _take(self, key: tuple[int, int], now: float) -> list[Item]:
        queue, longest = self._queues[key], 0
        items: list[Item] = []
        while queue and len(items) < self._max_batch_texts:
            item = queue[0][1]
            if not item.queued or item.done or (item.deadline is not None and item.deadline <= now):
                heapq.heappop(queue)
                self._account(item)
                continue
            longest = max(longest, item.tokens)
            if items and longest * (len(items) + 1) > self._max_batch_tokens:
                break
            heapq.heappop(queue)
            self._account(item)
            items.append(item)
        if not queue:
            del self._queues[key]
        return items

    def _account(self, item: Item) -> None:
        """Books an entry that has left its heap."""
        if item.queued:
            item.queued = False
            self._depth[item.segment] -= 1
        else:
            self._abandoned -= 1

    def _sweep(self) -> None:
        for key, queue in list(self._queues.items()):
            kept = [entry for entry in queue if entry[1].queued]
            if kept:
                heapq.heapify(kept)
                self._queues[key] = kept
            else:
                del self._queues[key]
        self._abandoned = 0
