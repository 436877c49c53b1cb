"""Admission: who finds room, what a newcomer is told of its wait, and what is learned from waits that are over."""

import pytest

from server.engine.admission import FEW_REQUESTS, PREDICTION_SECONDS, Admission, Overloaded


class Work:
    """What lies ahead of a newcomer, on a clock that stands still unless it is set."""

    def __init__(self, ahead: float = 0.0) -> None:
        self.ahead = ahead
        self.now = 100.0
        self.asked = 0

    def predicted(self, now: float) -> float:
        assert now == self.now
        self.asked += 1
        return self.ahead


def _admission(work: Work, *, max_texts: int = 10, max_wait_seconds: float = 1.0) -> Admission:
    return Admission(
        max_texts=max_texts,
        max_wait_seconds=max_wait_seconds,
        predicted_wait=work.predicted,
        clock=lambda: work.now,
    )


def test_texts_find_room_up_to_the_bound() -> None:
    admission = _admission(Work())
    admission.texts = 7
    admission.check(3)
    with pytest.raises(Overloaded, match="too many texts are waiting; try again in 1 s") as caught:
        admission.check(4)
    assert caught.value.reason == "queue_full"


def test_a_long_wait_refuses_the_next_request_once_many_are_in_work() -> None:
    admission = _admission(Work(ahead=1.5))
    admission.requests = FEW_REQUESTS
    admission.check(1)
    with admission.request():
        with pytest.raises(Overloaded) as caught:
            admission.check(1)
        assert (caught.value.reason, caught.value.retry_after) == ("wait", 2)
    admission.check(1)


@pytest.mark.parametrize(("wait", "seconds"), [(0.0, 1), (3.2, 4), (1000.0, 60), (float("inf"), 60)])
def test_a_retry_is_never_asked_for_at_once_nor_in_more_than_a_minute(wait: float, seconds: int) -> None:
    assert Overloaded("late", wait).retry_after == seconds


def test_a_prediction_serves_for_a_while() -> None:
    work = Work(ahead=1.0)
    admission = _admission(work)
    assert admission.wait() == 1.0
    work.ahead = 2.0
    work.now += 0.9 * PREDICTION_SECONDS
    assert (admission.wait(), work.asked) == (1.0, 1)
    work.now += 0.2 * PREDICTION_SECONDS
    assert (admission.wait(), work.asked) == (2.0, 2)


def test_waits_that_turn_out_longer_are_expected_to_be_longer_and_forgotten_again() -> None:
    admission = _admission(Work(ahead=1.0))
    for _ in range(500):
        admission.learn(predicted=0.1, taken=0.3)
    assert admission.wait() == pytest.approx(3.0, rel=0.01)
    for _ in range(500):
        admission.learn(predicted=0.1, taken=0.1)
    assert admission.wait() == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("longest", [0.02, 0.2, 0.5, 5.0])
def test_a_stall_is_forgotten_by_waits_as_short_as_are_admitted_after_it(longest: float) -> None:
    """Else all but a few would go on being refused at a tenth of the longest wait, for as long as many ask."""
    work = Work()
    admission = _admission(work, max_wait_seconds=longest)
    for _ in range(1000):
        admission.learn(predicted=longest, taken=100 * longest)
    admission.requests = FEW_REQUESTS + 1
    work.ahead = 0.7 * longest
    with pytest.raises(Overloaded):
        admission.check(1)
    for _ in range(1000):
        # As long as it can be without being refused; and it takes as long as was predicted.
        work.now += 1.0
        work.ahead *= 0.99 * longest / admission.wait()
        work.now += 1.0
        admission.check(1)
        admission.learn(predicted=work.ahead, taken=work.ahead)
    work.now += 1.0
    work.ahead = 0.7 * longest
    admission.check(1)


def test_short_waits_teach_nothing_and_no_wait_is_beyond_belief() -> None:
    admission = _admission(Work(ahead=1.0))
    for _ in range(500):
        admission.learn(predicted=0.001, taken=60.0)
    assert admission.wait() == 1.0
    for _ in range(500):
        admission.learn(predicted=0.1, taken=60.0)
    assert admission.wait() == pytest.approx(10.0, rel=0.01)


@pytest.mark.parametrize(("ahead", "pressure"), [(0.0, 0.0), (0.1, 0.0), (0.35, 0.5), (0.6, 1.0), (9.0, 1.0)])
def test_pressure_rises_from_a_tenth_of_the_longest_wait_to_six_tenths(ahead: float, pressure: float) -> None:
    assert _admission(Work(ahead)).pressure() == pytest.approx(pressure)
    assert _admission(Work(4 * ahead), max_wait_seconds=4.0).pressure() == pytest.approx(pressure)


def test_without_a_longest_wait_there_is_no_pressure() -> None:
    assert _admission(Work(ahead=1e6), max_wait_seconds=float("inf")).pressure() == 0.0
