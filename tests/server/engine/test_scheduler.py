"""The scheduler alone: pure data, time as an argument."""

import asyncio
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from models.exits import full_depth
from server.engine.request import Item, Submission
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


def _scheduler(tokens: int = 64, texts: int = 8) -> Scheduler:
    return Scheduler(3, max_batch_tokens=tokens, max_batch_texts=texts)


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


def test_texts_of_very_different_lengths_do_not_share_a_batch() -> None:
    scheduler = _scheduler(tokens=1000)
    scheduler.add([_item(0, tokens=4), _item(1, tokens=60), _item(2, tokens=9)], 0.0)
    batch = scheduler.pick(0.0)
    assert batch is not None
    assert [item.arrival for item in batch.items] == [0, 2]


def test_the_padded_batch_stays_within_the_token_budget() -> None:
    scheduler = _scheduler(tokens=30)
    scheduler.add([_item(number, tokens=10) for number in range(4)], 0.0)
    sizes = [len(batch.items) for _ in range(2) if (batch := scheduler.pick(0.0)) is not None]
    assert sizes == [3, 1]


def test_a_text_longer_than_the_budget_runs_alone() -> None:
    scheduler = _scheduler(tokens=10)
    scheduler.add([_item(0, tokens=40), _item(1, tokens=40)], 0.0)
    batch = scheduler.pick(0.0)
    assert batch is not None
    assert len(batch.items) == 1


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


def test_removing_an_item_twice_or_while_it_runs_changes_nothing() -> None:
    scheduler = _scheduler()
    item, other = _item(0), _item(1)
    scheduler.add([item], 0.0)
    scheduler.pick(0.0)
    scheduler.add([other], 0.0)
    scheduler.remove(item)
    scheduler.remove(item)
    assert scheduler.waiting == 1


def test_items_that_are_removed_do_not_pile_up() -> None:
    scheduler = _scheduler()
    oldest = _item(0)
    scheduler.add([oldest], 0.0)
    for arrival in range(1, 5000):
        item = _item(arrival)
        scheduler.add([item], 0.0)
        scheduler.remove(item)
    held = sum(len(queue) for queue in scheduler._queues.values())
    assert held < 200
    batch = scheduler.pick(0.0)
    assert batch is not None
    assert list(batch.items) == [oldest]


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(1, 60)),
        st.tuples(st.just("remove"), st.integers(0, 10_000)),
        st.tuples(st.just("pick"), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(steps=_steps, tokens=st.integers(1, 200), texts=st.integers(1, 8))
def test_whatever_happens_each_item_runs_each_segment_once_or_is_removed(
    steps: list[tuple[str, int]], tokens: int, texts: int
) -> None:
    scheduler = Scheduler(3, max_batch_tokens=tokens, max_batch_texts=texts)
    items: list[Item] = []
    ran: dict[int, list[int]] = {}
    removed: set[int] = set()

    def run_one() -> bool:
        batch = scheduler.pick(0.0)
        if batch is None:
            return False
        longest = max(item.tokens for item in batch.items)
        assert len(batch.items) == 1 or longest * len(batch.items) <= tokens
        assert len(batch.items) <= texts
        for item in batch.items:
            assert item.arrival not in removed
            ran[item.arrival].append(batch.segment)
            item.segment += 1
        scheduler.add([item for item in batch.items if item.segment <= 3], 0.0)
        return True

    for action, value in steps:
        if action == "add":
            items.append(_item(len(items), tokens=value))
            ran[items[-1].arrival] = []
            scheduler.add([items[-1]], 0.0)
        elif action == "remove" and items:
            chosen = items[value % len(items)]
            if chosen.queued:
                removed.add(chosen.arrival)
            scheduler.remove(chosen)
        else:
            run_one()
        assert scheduler.waiting == sum(item.queued for item in items)
    while run_one():
        pass
    for arrival, segments in ran.items():
        assert segments == [1, 2, 3] if arrival not in removed else segments == [1, 2, 3][: len(segments)]
