"""The scheduler alone: pure data, time as an argument."""

import asyncio
import math
from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from models.exits import Policy, full_depth
from server.engine.latency import LatencyTable, Measurement
from server.engine.order import ORDERS, Chances, Order, OrderName, deepest, fullest, gittins, oldest
from server.engine.request import Item, Picked, Submission
from server.engine.scheduler import Scheduler


def _item(arrival: int, tokens: int = 5, segment: int = 1, deadline: float | None = None) -> Item:
    future: Any = asyncio.Future(loop=_Loop())  # type: ignore[arg-type]
    return Item(
        arrival=arrival,
        ids=np.zeros(tokens, np.int64),
        type_ids=np.zeros(tokens, np.int64),
        policy=full_depth(3),
        truncated=False,
        submission=Submission(1, future),
        index=0,
        deadline=deadline,
        segment=segment,
    )


class _Loop:
    """As much of an event loop as an unused future asks for."""

    def get_debug(self) -> bool:
        return False


def _scheduler(tokens: int = 64, texts: int = 8) -> Scheduler[Item]:
    return Scheduler(3, max_batch_tokens=tokens, max_batch_texts=texts)


def _table(*seconds: float) -> LatencyTable:
    """Each segment takes its ``seconds``, whatever runs."""
    return LatencyTable.from_measurements(
        Measurement(segment, texts, tokens, one)
        for segment, one in enumerate(seconds, start=1)
        for texts in (1, 8)
        for tokens in (8, 512)
    )


def _filled(lengths: list[int], **more: Any) -> Scheduler[Item]:
    """Texts of these lengths, the first the oldest, before segment 1."""
    scheduler: Scheduler[Item] = Scheduler(3, **{"max_batch_texts": 8, **more})
    scheduler.add([_item(number, tokens) for number, tokens in enumerate(lengths)], 0.0)
    return scheduler


def _first(scheduler: Scheduler[Item], now: float) -> Picked[Item]:
    batch = scheduler.pick(now)
    assert batch is not None
    return batch


def _drain(scheduler: Scheduler[Item]) -> Iterator[Picked[Item]]:
    while (batch := scheduler.pick(0.0)) is not None:
        yield batch


def _segments(scheduler: Scheduler[Item]) -> list[int]:
    return [batch.segment for batch in _drain(scheduler)]


def test_nothing_waits_in_a_new_scheduler() -> None:
    assert _scheduler().pick(0.0) is None


def test_whoever_waits_for_the_same_segment_goes_together_oldest_first() -> None:
    scheduler = _scheduler()
    items = [_item(2), _item(0), _item(1)]
    scheduler.add(items, 0.0)
    batch = scheduler.pick(0.0)
    assert batch is not None
    assert [item.arrival for item in batch.items] == [0, 1, 2]
    assert scheduler.pick(0.0) is None


def test_the_oldest_goes_first_whatever_its_segment() -> None:
    scheduler = _scheduler()
    scheduler.add([_item(5, segment=1), _item(3, segment=2), _item(4, segment=3)], 0.0)
    order = [batch.segment for _ in range(3) if (batch := scheduler.pick(0.0)) is not None]
    assert order == [2, 3, 1]


def test_survivors_join_whoever_waits_for_their_segment() -> None:
    scheduler = _scheduler()
    scheduler.add([_item(7, segment=2)], 0.0)
    scheduler.add([_item(1, segment=2)], 1.0)
    batch = scheduler.pick(1.0)
    assert batch is not None
    assert [item.arrival for item in batch.items] == [1, 7]


def test_texts_of_any_lengths_share_a_batch_within_the_token_budget() -> None:
    scheduler = _scheduler(tokens=70)
    scheduler.add([_item(0, tokens=4), _item(1, tokens=60), _item(2, tokens=6), _item(3, tokens=1)], 0.0)
    assert [[item.arrival for item in batch.items] for batch in _drain(scheduler)] == [[0, 1, 2], [3]]


def test_a_long_text_takes_few_short_ones_along() -> None:
    """Attention lays a micro-batch out as texts × longest, so 1 × 40 and 24 × 1 tokens are 25 × 40 to it."""
    scheduler = _scheduler(tokens=64, texts=32)
    scheduler.add([_item(0, tokens=40), *(_item(number, tokens=1) for number in range(1, 25))], 0.0)
    assert [len(batch.items) for batch in _drain(scheduler)] == [6, 19]


def test_a_text_that_does_not_fit_is_not_overtaken() -> None:
    scheduler = _scheduler(tokens=10)
    scheduler.add([_item(0, tokens=6), _item(1, tokens=8), _item(2, tokens=2)], 0.0)
    assert [[item.arrival for item in batch.items] for batch in _drain(scheduler)] == [[0], [1, 2]]


def test_a_text_longer_than_the_budget_runs_alone() -> None:
    scheduler = _scheduler(tokens=10)
    scheduler.add([_item(0, tokens=40), _item(1, tokens=40)], 0.0)
    batch = scheduler.pick(0.0)
    assert batch is not None
    assert len(batch.items) == 1


def test_a_budget_that_shrank_holds_from_then_on() -> None:
    scheduler = _filled([10] * 6, max_batch_tokens=64)
    scheduler.shrink(20)
    scheduler.shrink(40)
    assert [len(batch.items) for batch in _drain(scheduler)] == [2, 2, 2]


def test_removed_done_and_late_items_never_run() -> None:
    scheduler = _scheduler()
    removed, done, late, kept = _item(0), _item(1), _item(2, deadline=1.0), _item(3, deadline=9.0)
    scheduler.add([removed, done, late, kept], 0.0)
    scheduler.remove(removed)
    done.done = True
    batch = scheduler.pick(1.0)
    assert batch is not None
    assert list(batch.items) == [kept]
    assert scheduler.waiting == 0
    assert scheduler.pick(2.0) is None


def test_texts_that_become_done_while_they_are_picked_make_no_empty_batch() -> None:
    class Leaving(Item):
        """Done from the second look on, as if its client went at that moment."""

        looks = 0

        def __getattribute__(self, name: str) -> Any:
            if name == "done":
                type(self).looks += 1
                return type(self).looks > 2
            return super().__getattribute__(name)

    leaving = object.__new__(Leaving)
    for field in fields(Item):
        if field.name != "done":
            setattr(leaving, field.name, getattr(_item(0), field.name))
    scheduler = _scheduler()
    scheduler.add([leaving], 0.0)
    assert scheduler.pick(0.0) is None
    scheduler.add([_item(1)], 0.0)
    assert len(_first(scheduler, 0.0).items) == 1


def test_removing_an_item_twice_or_while_it_runs_changes_nothing() -> None:
    scheduler = _scheduler()
    item, other = _item(0), _item(1)
    scheduler.add([item], 0.0)
    scheduler.pick(0.0)
    scheduler.add([other], 0.0)
    scheduler.remove(item)
    scheduler.remove(item)
    assert scheduler.waiting == 1


def test_what_waits_is_shared_out_among_the_workers_that_are_free() -> None:
    scheduler: Scheduler[Item] = Scheduler(3, max_batch_tokens=100, max_batch_texts=8, workers=3)
    scheduler.add([_item(number) for number in range(8)], 0.0)
    assert [len(batch.items) for batch in _drain(scheduler)] == [3, 3, 2]
    scheduler.ran(1, 3, 0)
    scheduler.add([_item(number) for number in range(8, 12)], 0.0)
    assert [len(batch.items) for batch in _drain(scheduler)] == [4]


# Orders.


def _two_queues(order: Order, latency: LatencyTable | None = None, **more: Any) -> Scheduler[Item]:
    """One old text before segment 1, two younger ones before segment 2."""
    scheduler: Scheduler[Item] = Scheduler(
        3, max_batch_tokens=64, max_batch_texts=8, order=order, latency=latency, **more
    )
    scheduler.add([_item(0), _item(1, segment=2), _item(2, segment=2)], 0.0)
    return scheduler


@pytest.mark.parametrize(("order", "segment"), [(oldest, 1), (deepest, 2), (fullest, 2)])
def test_the_order_chooses_the_queue(order: Order, segment: int) -> None:
    assert _segments(_two_queues(order))[0] == segment


def test_gittins_learns_where_texts_leave_and_what_that_costs() -> None:
    scheduler = _two_queues(gittins, _table(1.0, 1.0, 1.0))
    for _ in range(50):
        scheduler.ran(1, 4, 4)
        scheduler.ran(2, 4, 0)
    assert _segments(scheduler) == [1, 2]
    scheduler = _two_queues(gittins, _table(1.0, 1.0, 1.0))
    for _ in range(50):
        scheduler.ran(1, 4, 1)
        scheduler.ran(2, 4, 4)
    assert _segments(scheduler) == [2, 1]
    # Nobody leaves at exit 2 who would not at exit 1, but segment 2 takes a hundredth of the time.
    assert _segments(_two_queues(gittins, _table(1.0, 0.01, 1.0))) == [2, 1]
    assert _segments(_two_queues(gittins, _table(0.01, 1.0, 1.0))) == [1, 2]


def test_chances_follow_the_traffic_and_the_last_exit_is_certain() -> None:
    chances = Chances(3, [0.2, 0.3, 0.9], weight=10)
    assert [chances[segment] for segment in (1, 2, 3)] == [0.2, 0.3, 1.0]
    for _ in range(2000):
        chances.ran(1, 8, 6)
        chances.ran(3, 8, 2)
    assert chances[1] == pytest.approx(0.75, abs=0.01)
    for _ in range(4000):
        chances.ran(1, 8, 1)
    assert chances[1] == pytest.approx(0.125, abs=0.01)
    assert (chances[2], chances[3]) == (0.3, 1.0)


def test_chances_refuse_a_prior_that_is_none() -> None:
    with pytest.raises(ValueError, match="3 probabilities"):
        Chances(3, [0.5, 0.5])
    with pytest.raises(ValueError, match="probabilities"):
        Chances(2, [0.5, 1.5])


def test_whoever_has_waited_too_long_goes_next_whatever_the_order_says() -> None:
    scheduler: Scheduler[Item] = Scheduler(
        3, max_batch_tokens=64, max_batch_texts=8, order=deepest, max_wait_seconds=1.0
    )
    scheduler.add([_item(0)], 0.0)
    for number in range(1, 5):
        now = 0.3 * number
        scheduler.add([_item(number, segment=3)], now)
        batch = scheduler.pick(now)
        assert batch is not None
        assert batch.segment == (1 if now > 1.0 else 3)


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_who_waits_behind_goes_alone_once_nobody_else_waits_or_after_too_long(order: Order) -> None:
    scheduler: Scheduler[Item] = Scheduler(
        3, max_batch_tokens=64, max_batch_texts=8, order=order, latency=_table(1.0, 1.0, 1.0), max_wait_seconds=1.0
    )
    behind = [_item(0, segment=3), _item(1, segment=3), _item(2, segment=2)]
    for item in behind:
        scheduler.add_behind(item, 0.0)
    assert (scheduler.waiting, scheduler.depth(3), scheduler.predicted_wait(0.0)) == (0, 0, 0.0)
    scheduler.add([_item(3)], 0.5)
    assert _first(scheduler, 0.5).segment == 1
    assert list(_first(scheduler, 0.5).items) == behind[:1]
    scheduler.add([_item(4), _item(5, segment=3)], 1.5)
    assert list(_first(scheduler, 1.5).items) == behind[1:2]
    scheduler.add_behind(behind[1], 1.5)
    assert list(_first(scheduler, 1.5).items) == behind[2:]
    scheduler.add_behind(behind[2], 1.5)
    assert sorted(batch.segment for batch in [_first(scheduler, 2.0), _first(scheduler, 2.0)]) == [1, 3]
    assert list(_first(scheduler, 2.0).items) == behind[1:2]


# Deadlines and admission.


def test_a_text_that_would_miss_its_deadline_goes_first() -> None:
    scheduler = _two_queues(deepest, _table(1.0, 1.0, 1.0))
    scheduler.add([_item(3, deadline=1.9)], 0.0)
    assert _first(scheduler, 0.0).items[0].arrival == 3


def test_a_deadline_that_leaves_time_for_one_more_run_changes_nothing() -> None:
    scheduler = _two_queues(deepest, _table(1.0, 1.0, 1.0))
    scheduler.add([_item(3, deadline=2.1)], 0.0)
    assert _first(scheduler, 0.0).segment == 2
    assert next(iter(_first(scheduler, 1.0).items)).arrival == 3


def test_of_two_in_a_hurry_the_one_without_an_answer_goes_first() -> None:
    scheduler: Scheduler[Item] = Scheduler(
        3, max_batch_tokens=64, max_batch_texts=8, order=deepest, latency=_table(1.0, 1.0, 1.0)
    )
    scheduler.add([_item(0, segment=2, deadline=1.5), _item(1, deadline=1.8)], 0.0)
    assert _segments(scheduler) == [1, 2]


def test_a_text_that_cannot_make_it_is_not_preferred() -> None:
    scheduler = _two_queues(deepest, _table(1.0, 1.0, 1.0))
    scheduler.add([_item(3, deadline=0.5)], 0.0)
    assert _first(scheduler, 0.0).segment == 2


def test_company_does_not_make_a_text_late_that_goes_first() -> None:
    per_text = LatencyTable.from_measurements(
        Measurement(segment, texts, 5 * texts, 1.0 * texts) for segment in (1, 2, 3) for texts in (1, 8)
    )
    scheduler: Scheduler[Item] = Scheduler(3, max_batch_tokens=64, max_batch_texts=8, latency=per_text)
    scheduler.add([_item(number) for number in range(5)], 0.0)
    scheduler.add([_item(9, deadline=3.5)], 0.0)
    assert [item.arrival for item in _first(scheduler, 0.0).items] == [9, 0, 1]


def _per_token(padding: float) -> LatencyTable:
    """1 ms a run and 1 ms a token; an empty place beside a longer text costs ``padding`` tokens."""
    measured = [(texts, tokens) for texts in (1, 8) for tokens in (8, 256)]
    table = LatencyTable.from_measurements(
        Measurement(segment, *cell, 1e-3 * (1 + cell[1])) for segment in (1, 2, 3) for cell in measured
    )
    return replace(table, padding=padding)


def test_texts_of_like_length_go_together_where_different_lengths_cost_time() -> None:
    lengths = [20, 100, 22, 90, 19]
    together = {
        padding: [
            [item.tokens for item in batch.items]
            for batch in _drain(_filled(lengths, latency=_per_token(padding), max_batch_tokens=256))
        ]
        for padding in (0.0, 0.3)
    }
    # A run costs as much as a token: to save one is worth one empty place at 0.3 tokens, but not four more.
    assert together == {0.0: [[20, 100, 22, 90, 19]], 0.3: [[20, 19], [100], [22], [90]]}


def test_every_order_is_one_that_the_setting_takes() -> None:
    assert set(ORDERS) == set(get_args(OrderName))


def test_where_not_all_fit_those_of_like_length_go_with_the_oldest() -> None:
    scheduler = _filled([20, 100, 22, 90, 19], latency=_per_token(0.001), max_batch_tokens=70)
    assert [item.tokens for item in _first(scheduler, 0.0).items] == [20, 19, 22]


def test_the_wait_of_a_newcomer_is_the_work_ahead_shared_among_workers() -> None:
    chances = Chances(2, [0.5, 1.0])
    scheduler: Scheduler[Item] = Scheduler(
        2, max_batch_tokens=64, max_batch_texts=1, latency=_table(1.0, 4.0), chances=chances, workers=2
    )
    assert scheduler.predicted_wait(0.0) == 0.0
    scheduler.add([_item(0), _item(1, segment=2)], 0.0)
    # The first runs 1 s, and in half of the cases 4 s more; the second runs 4 s: 7 s of work for two workers.
    assert scheduler.predicted_wait(0.0) == pytest.approx(3.5)
    _first(scheduler, 0.0)
    # Of the first run half a second is left, and what may come after it.
    assert scheduler.predicted_wait(0.5) == pytest.approx((0.5 + 2.0 + 4.0) / 2)


def test_only_those_are_late_that_could_not_even_pass_their_first_exit() -> None:
    scheduler: Scheduler[Item] = Scheduler(3, max_batch_tokens=64, max_batch_texts=1, latency=_table(1.0, 50.0, 50.0))
    assert not scheduler.would_be_late(0.0, 1.1, 5)
    assert scheduler.would_be_late(0.0, 0.9, 5)
    # Texts without a deadline, with a later one, and with an answer already let it pass.
    scheduler.add([_item(0), _item(1, deadline=9.0), _item(2, segment=2, deadline=1.0)], 0.0)
    assert not scheduler.would_be_late(0.0, 1.1, 5)
    # One with an earlier deadline does not, and neither does a run that goes on.
    scheduler.add([_item(3, deadline=1.05)], 0.0)
    assert scheduler.would_be_late(0.0, 1.1, 5)
    assert not scheduler.would_be_late(0.0, 2.1, 5)
    _first(scheduler, 0.0)
    assert scheduler.would_be_late(0.0, 1.9, 5)
    assert not scheduler.would_be_late(0.0, 2.1, 5)


def test_without_a_latency_table_nothing_is_predicted() -> None:
    scheduler = _scheduler()
    scheduler.add([_item(0)], 0.0)
    assert scheduler.predicted_wait(0.0) == 0.0
    assert not scheduler.would_be_late(0.0, 0.1, 5)


# Whatever happens.


class Life(RuleBasedStateMachine):
    """Texts come, run, leave, get cancelled and miss their deadlines, in any order of events and under any order of
    queues. Nobody is lost, nobody runs twice at once, and the oldest always gets on."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.items: list[Item] = []
        self.policies: list[Policy] = []
        self.waiting: set[int] = set()
        self.running: list[Picked[Item]] = []
        self.gone: set[int] = set()

    @initialize(
        order=st.sampled_from(sorted(ORDERS)),
        tokens=st.integers(1, 120),
        texts=st.integers(1, 6),
        workers=st.integers(1, 4),
        known=st.booleans(),
        padding=st.sampled_from([0.0, 0.5]),
    )
    def build(self, order: str, tokens: int, texts: int, workers: int, known: bool, padding: float) -> None:
        self.tokens, self.texts, self.workers = tokens, texts, workers
        self.scheduler: Scheduler[Item] = Scheduler(
            3,
            max_batch_tokens=tokens,
            max_batch_texts=texts,
            order=ORDERS[order],
            latency=replace(_table(0.1, 0.4, 0.2), padding=padding) if known else None,
            workers=workers,
            max_wait_seconds=2.0,
        )

    @rule(tokens=st.integers(1, 60), threshold=st.floats(0, 1), slack=st.one_of(st.none(), st.floats(0.01, 5.0)))
    def arrive(self, tokens: int, threshold: float, slack: float | None) -> None:
        item = _item(len(self.items), tokens, deadline=None if slack is None else self.now + slack)
        item.policy = Policy("confidence", threshold)
        self.items.append(item)
        self.policies.append(item.policy)
        self.waiting.add(item.arrival)
        self.scheduler.add([item], self.now)

    @rule(seconds=st.floats(0.0, 3.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.items)
    @rule(data=st.data(), told=st.booleans())
    def cancel(self, data: st.DataObject, told: bool) -> None:
        """``told`` or merely marked as done, as when a cancellation meets a run."""
        item = self.items[data.draw(st.integers(0, len(self.items) - 1))]
        if told:
            self.scheduler.remove(item)
            self.waiting.discard(item.arrival)
        item.done = True
        self.gone.add(item.arrival)

    @precondition(lambda self: len(self.running) < self.workers)
    @rule()
    def pick(self) -> None:
        starving = [i for i in self._alive() if self.now - i.waiting_since > 2.0]
        batch = self.scheduler.pick(self.now)
        if batch is None:
            assert not self._alive()
            self.waiting.clear()
            return
        arrivals = [item.arrival for item in batch.items]
        assert arrivals and len(set(arrivals)) == len(arrivals)
        assert set(arrivals) <= self.waiting - self.gone
        assert all(item.segment == batch.segment for item in batch.items)
        assert all(item.deadline is None or item.deadline > self.now for item in batch.items)
        assert len(arrivals) <= self.texts
        assert len(arrivals) == 1 or sum(item.tokens for item in batch.items) <= self.tokens
        oldest_of_all = min((i.arrival for i in self._alive()), default=None)
        if any(item.arrival == oldest_of_all for item in starving):
            assert oldest_of_all in arrivals
        self.waiting -= set(arrivals)
        self.running.append(batch)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def run_ends(self, data: st.DataObject) -> None:
        batch = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        leave = [batch.segment == 3 or data.draw(st.booleans()) for _ in batch.items]
        self.scheduler.ran(batch.segment, len(leave), sum(leave))
        for item, leaves in zip(batch.items, leave, strict=True):
            if leaves:
                item.done = True
                self.gone.add(item.arrival)
                continue
            item.segment += 1
            if not item.done:
                self.waiting.add(item.arrival)
        self.scheduler.add(batch.items, self.now)

    def _alive(self) -> list[Item]:
        """Who may run: waits, is not done, and has time left."""
        waiting = [self.items[number] for number in self.waiting - self.gone]
        return [item for item in waiting if item.deadline is None or item.deadline > self.now]

    @invariant()
    def nobody_is_lost_and_the_queues_hold_no_more_than_waits(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        alive = {item.arrival for item in self._alive()}
        held = [item for segment in (1, 2, 3) for item in self.scheduler._queues[segment - 1].by_age]
        assert alive <= {item.arrival for item in held}
        assert self.scheduler.waiting == len(held) == sum(self.scheduler.depth(segment) for segment in (1, 2, 3))
        assert len(held) <= len(self.waiting)
        assert all(item.queued for item in held)
        for queue in self.scheduler._queues:
            assert queue.tokens == sum(item.tokens for item in queue.by_age)
            assert set(queue.by_deadline) == {item for item in queue.by_age if item.deadline is not None}

    @invariant()
    def no_policy_is_ever_changed(self) -> None:
        assert [item.policy for item in self.items] == self.policies

    @invariant()
    def predictions_are_sane(self) -> None:
        if hasattr(self, "scheduler"):
            assert 0.0 <= self.scheduler.predicted_wait(self.now) < math.inf

    def teardown(self) -> None:
        """Nobody comes any more: all get to an end."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(6 * len(self.items)):
            if len(self.running) < self.workers and (batch := self.scheduler.pick(self.now)) is not None:
                self.running.append(batch)
            elif self.running:
                batch = self.running.pop()
                self.scheduler.ran(batch.segment, len(batch.items), 0)
                for item in batch.items:
                    item.done = item.done or item.segment == 3
                    item.segment += 1
                self.scheduler.add(batch.items, self.now)
        assert not self.running
        assert self.scheduler.waiting == 0
        assert all(item.done or (item.deadline is not None and item.deadline <= self.now) for item in self.items)


TestWhateverHappens = Life.TestCase
TestWhateverHappens.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
