"""The engine with real graphs: early exits skip segments, nobody is disturbed by others, nothing is lost."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle, Precision
from models.exits import Policy, full_depth
from server.engine.admission import FEW_REQUESTS, PREDICTION_SECONDS, Overloaded
from server.engine.engine import MOST_CHECKS, Engine, NoTokens, NotRunning, TooLong
from server.engine.latency import LatencyTable, Measurement
from server.engine.request import Answer, Failure, Outcome, OutOfMemory, SegmentRunner, Text, Work
from server.engine.runner import Runner, SegmentOutput
from server.logs import FIELDS
from tests.server.conftest import some_texts
from tests.tiny import POISON, VOCABULARY

pytestmark = pytest.mark.anyio

LAST = full_depth(4)
FIRST = Policy("confidence", 0.0)


class Spy:
    """A real runner that notes what it runs; ``before`` may block or raise."""

    def __init__(self, bundle: Bundle) -> None:
        self._runner = Runner(bundle, precision="fp32", device="cpu", threads=1)
        self.runs: list[tuple[int, int]] = []
        self.lone: list[bool] = []
        self.read: list[bool] = []
        self.threads: list[threading.Thread] = []
        self.before: Callable[[int], None] = lambda segment: None
        # Ids of which a run that holds one raises, as if the graph could not take it.
        self.refused: set[int] = set()

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> SegmentOutput:
        self.runs.append((segment, len(items)))
        self.lone.append(lone)
        self.read.append(read)
        self.threads.append(threading.current_thread())
        self.before(segment)
        if any(self.refused & set(item.ids.tolist()) for item in items):
            raise RuntimeError("out of range")
        return self._runner.run(segment, items, lone=lone, read=read)


class Tally:
    """An observer that counts."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.failures: list[Failure] = []
        self.checks: list[tuple[float, bool]] = []
        self.answers_before_check: list[int] = []
        self.cancellations = 0

    def segment_ran(self, segment: int, texts: int, seconds: float) -> None:
        assert seconds >= 0

    def answered(self, answer: Answer) -> None:
        self.answers.append(answer)

    def failed(self, failure: Failure) -> None:
        self.failures.append(failure)

    def cancelled(self) -> None:
        self.cancellations += 1

    def checked(self, tier: float, agrees: bool) -> None:
        self.checks.append((tier, agrees))
        self.answers_before_check.append(len(self.answers))


def engine_of(
    bundle: Bundle, runner: SegmentRunner, precision: Precision, tally: Tally | None = None, **settings: Any
) -> Engine:
    """An engine on ``runner`` with the bundle's own encoder and temperatures."""
    options: dict[str, Any] = {"workers": 1, "max_queue": 500, "max_batch_tokens": 512, "max_batch_texts": 32}
    calibration = bundle.calibration.precisions[precision]
    return Engine(
        runner=runner,
        encoder=bundle.encoder,
        temperatures=calibration.temperatures,
        agreement_temperatures=calibration.agreement_temperatures,
        observer=tally or Tally(),
        **(options | settings),
    )


class Rig:
    def __init__(self, bundle: Bundle, **settings: Any) -> None:
        self.spy = Spy(bundle)
        self.tally = Tally()
        self.engine = engine_of(bundle, self.spy, "fp32", self.tally, **settings)

    async def ask(self, *texts: str, policy: Policy = LAST, **options: Any) -> list[Outcome]:
        submitted = await self.engine.submit([Text(text) for text in texts], [policy] * len(texts), **options)
        return submitted.outcomes


@asynccontextmanager
async def running(bundle: Bundle, **settings: Any) -> AsyncIterator[Rig]:
    rig = Rig(bundle, **settings)
    await rig.engine.start()
    try:
        yield rig
    finally:
        rig.spy.before = lambda segment: None
        await rig.engine.close()


class Gate:
    """Blocks a worker inside a segment until it is opened."""

    def __init__(self, rig: Rig, segment: int) -> None:
        self._entered, self._open = threading.Event(), threading.Event()
        self._segment = segment
        rig.spy.before = self._wait

    def _wait(self, segment: int) -> None:
        if segment == self._segment:
            self._entered.set()
            self._open.wait(30)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, 30)

    def open(self) -> None:
        self._open.set()


async def until(condition: Callable[[], bool]) -> None:
    """Waits for something that other threads bring about; fails after 30 s."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


def answered(outcome: Outcome) -> Answer:
    assert isinstance(outcome, Answer), outcome
    return outcome


async def test_an_early_exit_skips_the_segments_behind_it(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        (outcome,) = await rig.ask("a good film", policy=FIRST)
        assert answered(outcome).left.exit == 1
        assert answered(outcome).reason == "confidence"
        assert rig.spy.runs == [(1, 1)]


async def test_full_depth_runs_every_segment_once(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        (outcome,) = await rig.ask("a good film")
        assert answered(outcome).left.exit == 4
        assert answered(outcome).reason == "final"
        assert [reading.exit for reading in answered(outcome).readings] == [1, 2, 3, 4]
        assert rig.spy.runs == [(1, 1), (2, 1), (3, 1), (4, 1)]


async def test_an_exit_where_nobody_may_leave_is_not_read(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        (plain,) = await rig.ask("a good film")
        (passing,) = await rig.ask("a good film", every_reading=False)
        assert rig.spy.read == [True] * 4 + [False] * 3 + [True]
        assert [reading.exit for reading in answered(passing).readings] == [4]
        np.testing.assert_array_equal(answered(passing).left.logits, answered(plain).left.logits)


async def test_who_passes_unread_gets_the_same_answer_among_those_who_leave(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        (alone,) = await rig.ask("a good film", every_reading=False)
        gate = Gate(rig, 1)
        blocker = asyncio.ensure_future(rig.ask("a dull film", policy=FIRST))
        await gate.entered()
        company = asyncio.ensure_future(rig.ask("an odd film", policy=FIRST, every_reading=False))
        passing = asyncio.ensure_future(rig.ask("a good film", every_reading=False))
        await until(lambda: rig.engine.queue_depth(1) == 2)
        gate.open()
        await asyncio.gather(blocker, company)
        (outcome,) = await passing
        assert (1, 2) in rig.spy.runs
        assert [reading.exit for reading in answered(outcome).readings] == [4]
        np.testing.assert_allclose(answered(outcome).left.logits, answered(alone).left.logits, atol=1e-5)


@pytest.mark.parametrize(("milliseconds", "inline"), [(1.0, True), (50.0, False)])
async def test_a_short_first_run_of_a_text_alone_is_on_the_loops_thread(
    tiny_bundle: Bundle, milliseconds: float, inline: bool
) -> None:
    table = LatencyTable(np.array([1]), np.array([64]), np.full((4, 1, 1), milliseconds / 1000))
    async with running(tiny_bundle, workers=2, latency=table) as rig:
        await until(lambda: rig.engine.idle)
        (outcome,) = await rig.ask("a good film")
        assert [reading.exit for reading in answered(outcome).readings] == [1, 2, 3, 4]
        assert rig.spy.runs == [(1, 1), (2, 1), (3, 1), (4, 1)]
        assert [thread is threading.current_thread() for thread in rig.spy.threads] == [inline, False, False, False]
        await until(lambda: rig.engine.idle)
        await rig.ask("a good film", "a dull film", policy=FIRST)
        assert threading.current_thread() not in rig.spy.threads[4:]


async def test_a_text_that_breaks_on_the_loops_thread_fails_alone(tiny_bundle: Bundle) -> None:
    table = LatencyTable(np.array([1]), np.array([64]), np.full((4, 1, 1), 0.001))
    async with running(tiny_bundle, latency=table) as rig:
        await until(lambda: rig.engine.idle)
        rig.spy.refused = set(tiny_bundle.encoder.encode("bad").ids[1:-1])
        assert await rig.ask("bad") == [Failure("internal")]
        assert threading.current_thread() in rig.spy.threads
        answered((await rig.ask("a good film"))[0])


async def test_with_a_deadline_every_exit_is_read(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        (outcome,) = await rig.ask("a good film", every_reading=False, deadline_seconds=60)
        assert [reading.exit for reading in answered(outcome).readings] == [1, 2, 3, 4]


async def test_a_sampled_early_answer_runs_on_to_the_last_exit_once_it_is_given(tiny_bundle: Bundle) -> None:
    texts = some_texts(6)
    async with running(tiny_bundle, shadow_rate=1.0) as rig:
        full = [answered(outcome).left.label for outcome in await rig.ask(*texts)]
        early = []
        for text in texts:
            gate = Gate(rig, segment=2)
            early.append(answered((await rig.ask(text, policy=FIRST, tier=0.97))[0]).left)
            gate.open()
        assert {reading.exit for reading in early} == {1}
        await until(lambda: len(rig.tally.checks) == 6)
        expected = [(0.97, one.label == last) for one, last in zip(early, full, strict=True)]
        assert sorted(rig.tally.checks) == sorted(expected)
        # They are nobody's answers.
        assert len(rig.tally.answers) == 12


async def test_answers_of_the_last_exit_are_checks_that_cost_no_run(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, shadow_rate=1.0) as rig:
        await rig.ask(*some_texts(5), tier=0.97)
        assert rig.tally.checks == [(0.97, True)] * 5
        assert sum(texts for _, texts in rig.spy.runs) == 4 * 5


async def test_a_deadline_that_cuts_texts_short_does_not_leave_the_early_answers_alone_in_the_sample(
    tiny_bundle: Bundle,
) -> None:
    async with running(tiny_bundle, shadow_rate=1.0) as rig:
        gate = Gate(rig, segment=3)
        (outcome,) = await rig.ask("a good film", deadline_seconds=1.0, tier=0.97)
        gate.open()
        assert answered(outcome).reason == "deadline"
        assert rig.tally.checks == [(0.97, True)]


async def test_only_answers_under_a_tier_are_checked_and_only_a_few_at_once(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, shadow_rate=1.0) as rig:
        await rig.ask(*some_texts(5), policy=FIRST)
        await rig.ask(*some_texts(5))
        gate = Gate(rig, segment=2)
        # Behind them there is no room even for checks that cost no run: the sample would tilt towards those.
        free = Policy("confidence", 1.0, max_exit=1)
        texts = [Text(text) for text in some_texts(30)]
        await rig.engine.submit(texts, [FIRST] * 27 + [free] * 3, tier=0.97)
        gate.open()
        await until(lambda: len(rig.tally.checks) == MOST_CHECKS)
        await rig.ask(*some_texts(3))
        assert len(rig.tally.checks) == MOST_CHECKS


async def test_checks_are_no_wait_and_no_queue_for_those_who_come(tiny_bundle: Bundle) -> None:
    slow = LatencyTable(np.array([1]), np.array([8]), np.full((4, 1, 1), 1.0))
    async with running(tiny_bundle, shadow_rate=1.0, latency=slow, max_wait_seconds=10.0) as rig:
        gate = Gate(rig, segment=2)
        await rig.ask(*["a good film"] * MOST_CHECKS, policy=FIRST, tier=0.97)
        await gate.entered()
        # What is left of the run that goes on, a second at most.
        assert rig.engine.pressure() <= 0.1
        assert [rig.engine.queue_depth(segment) for segment in (1, 2, 3, 4)] == [0, 0, 0, 0]
        gate.open()
        await until(lambda: len(rig.tally.checks) == MOST_CHECKS)


async def test_checks_wait_for_everybody_who_waits_for_an_answer(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, shadow_rate=1.0, max_batch_texts=1) as rig:
        gate = Gate(rig, segment=1)
        early = asyncio.ensure_future(rig.ask("a good film", policy=FIRST, tier=0.97))
        await gate.entered()
        others = asyncio.ensure_future(rig.ask(*some_texts(5)))
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(early, others)
        await until(lambda: len(rig.tally.checks) == 1)
        assert rig.tally.answers_before_check == [6]


async def test_closing_does_not_wait_for_checks(tiny_bundle: Bundle) -> None:
    rig = Rig(tiny_bundle, shadow_rate=1.0)
    await rig.engine.start()
    gate = Gate(rig, segment=2)
    await rig.ask("a good film", policy=FIRST, tier=0.97)
    await gate.entered()
    closing = asyncio.ensure_future(rig.engine.close())
    gate.open()
    await closing
    assert not rig.engine.healthy


async def test_a_batch_compacts_at_each_exit(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        policies = [FIRST, Policy("confidence", 0.0, min_exit=2), Policy("confidence", 1.0, max_exit=3), LAST]
        submitted = await rig.engine.submit([Text("a good film")] * 4, policies)
        assert [answered(outcome).left.exit for outcome in submitted.outcomes] == [1, 2, 3, 4]
        assert [answered(outcome).reason for outcome in submitted.outcomes] == [
            "confidence", "confidence", "max_exit", "final",
        ]  # fmt: skip
        assert rig.spy.runs == [(1, 4), (2, 3), (3, 2), (4, 1)]


async def test_leavers_are_answered_while_survivors_run_on(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        blocked = Gate(rig, segment=2)
        submitted = rig.engine.submit([Text("a good film"), Text("a dull film")], [LAST, FIRST])
        both = asyncio.ensure_future(submitted)
        await blocked.entered()
        await until(lambda: len(rig.tally.answers) == 1)
        assert rig.tally.answers[0].left.exit == 1
        assert not both.done()
        blocked.open()
        assert [answered(outcome).left.exit for outcome in (await both).outcomes] == [4, 1]


async def test_newcomers_are_served_while_a_worker_is_busy(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, workers=2) as rig:
        gate = Gate(rig, segment=2)
        older = asyncio.ensure_future(rig.ask("a good film"))
        await gate.entered()
        (outcome,) = await rig.ask("a dull film", policy=FIRST)
        assert answered(outcome).left.exit == 1
        gate.open()
        assert answered((await older)[0]).left.exit == 4


async def test_work_for_two_wakes_two_workers(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, workers=2) as rig:
        meeting = threading.Barrier(2, timeout=60)

        def meet(segment: int) -> None:
            meeting.wait()

        rig.spy.before = meet
        # Lengths that never share a batch: each worker takes one, and neither gets on without the other.
        outcomes = await rig.ask("good", "good " * 40, policy=FIRST)
        assert [answered(outcome).left.exit for outcome in outcomes] == [1, 1]


@pytest.mark.parametrize("policy", [LAST, Policy("confidence", 0.9), Policy("entropy", 0.3), Policy("patience", 1)])
async def test_company_changes_nothing(tiny_bundle: Bundle, policy: Policy) -> None:
    texts = some_texts(40, seed=7)
    async with running(tiny_bundle, workers=2) as rig:
        alone = [answered((await rig.ask(text, policy=policy))[0]) for text in texts]
        together = [answered(outcome) for outcome in await rig.ask(*texts, policy=policy)]
    assert max(size for _, size in rig.spy.runs) > 1
    compared = 0
    for one, other in zip(alone, together, strict=True):
        # Where a reading is within rounding of the threshold, the exit may differ; such texts prove nothing.
        values = [reading.entropy if policy.criterion == "entropy" else reading.confidence for reading in one.readings]
        if min(abs(value - policy.threshold) for value in values) < 1e-4:
            continue
        compared += 1
        assert (one.left.exit, one.left.label, one.reason) == (other.left.exit, other.left.label, other.reason)
        np.testing.assert_allclose(one.left.probabilities, other.left.probabilities, atol=1e-4)
    assert compared > 30


async def test_a_poisoned_text_fails_alone(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        expected = answered((await rig.ask("a good film"))[0])
        good, bad, other = await rig.ask("a good film", f"a {POISON} film", "a dull film")
        assert bad == Failure("nonfinite")
        np.testing.assert_allclose(answered(good).left.logits, expected.left.logits, atol=1e-5)
        assert answered(other).left.exit == 4
        assert rig.tally.failures == [Failure("nonfinite")]
        assert (1, 3) in rig.spy.runs
        assert (2, 2) in rig.spy.runs


async def test_not_a_number_is_never_confident(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        (outcome,) = await rig.ask(POISON, policy=FIRST)
        assert outcome == Failure("nonfinite")


async def test_a_text_that_breaks_its_micro_batch_fails_alone(
    tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_bundle) as rig:
        expected = answered((await rig.ask("a good film"))[0])
        rig.spy.runs.clear()
        rig.spy.refused = {VOCABULARY.index("dull")}
        good, bad, other = await rig.ask("a good film", "a dull film", "a moving film")
        assert bad == Failure("internal")
        assert [answered(outcome).left.exit for outcome in (good, other)] == [4, 4]
        np.testing.assert_allclose(answered(good).left.logits, expected.left.logits, atol=1e-5)
        # Together, then each alone; the two that are whole go on together again.
        assert rig.spy.runs == [(1, 3), (1, 1), (1, 1), (1, 1), (2, 2), (3, 2), (4, 2)]
        assert len(answered(good).readings) == 4
        assert rig.tally.failures == [Failure("internal")]
        assert "segment 1 failed for 3 texts" in caplog.text
        assert "dull" not in caplog.text


async def test_what_broke_is_logged_with_the_ids_of_its_requests(
    tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_bundle) as rig:
        gate = Gate(rig, segment=2)
        inside = asyncio.ensure_future(rig.ask("a good film"))
        await gate.entered()
        rig.spy.refused = {VOCABULARY.index("dull")}
        asked = [asyncio.ensure_future(rig.ask("a dull film", request_id=name)) for name in ("first", "second")]
        await until(lambda: rig.engine.queue_depth(1) == 2)
        gate.open()
        await asyncio.gather(inside, *asked)
    fields = [getattr(record, FIELDS) for record in caplog.records if "failed for" in record.getMessage()]
    assert fields == [{"request_ids": ["first", "second"]}, {"request_id": "first"}, {"request_id": "second"}]


async def test_where_memory_is_short_the_halves_run_and_later_micro_batches_are_smaller(
    tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    def short(segment: int) -> None:
        if rig.spy.runs[-1][1] > 2:
            raise OutOfMemory("Failed to allocate memory")

    async with running(tiny_bundle) as rig:
        rig.spy.before = short
        texts = ["a good film"] * 6
        assert [answered(outcome).left.exit for outcome in await rig.ask(*texts)] == [4] * 6
        # All, both halves of three, and theirs; from then on no more tokens than two texts have.
        assert rig.spy.runs[:7] == [(1, 6), (1, 3), (1, 2), (1, 1), (1, 3), (1, 2), (1, 1)]
        assert {size for _, size in rig.spy.runs[7:]} <= {1, 2}
        assert rig.tally.failures == []
        assert "no memory for 6 texts" in caplog.text
        rig.spy.before = lambda segment: None


async def test_a_segment_that_breaks_for_all_ends_no_worker(tiny_bundle: Bundle) -> None:
    def broken(segment: int) -> None:
        if segment == 2:
            raise RuntimeError("out of something")

    async with running(tiny_bundle) as rig:
        rig.spy.before = broken
        assert await rig.ask("a long film", "a good film") == [Failure("internal")] * 2
        rig.spy.before = lambda segment: None
        assert rig.engine.healthy
        assert answered((await rig.ask("a good film"))[0]).left.exit == 4


async def test_an_observer_that_fails_costs_no_answer(tiny_bundle: Bundle) -> None:
    def broken(segment: int, texts: int, seconds: float) -> None:
        raise RuntimeError("no room for another sample")

    async with running(tiny_bundle) as rig:
        rig.tally.segment_ran = broken  # type: ignore[method-assign]
        assert answered((await rig.ask("a good film"))[0]).left.exit == 4
        assert rig.spy.runs == [(1, 1), (2, 1), (3, 1), (4, 1)]


async def test_an_engine_whose_scheduler_breaks_says_so_and_leaves_nobody_waiting(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tiny_bundle, workers=2) as rig:
        gate = Gate(rig, segment=2)
        inside = asyncio.ensure_future(rig.ask("a good film"))
        await gate.entered()

        def broken(now: float) -> None:
            raise RuntimeError("lost count")

        monkeypatch.setattr(rig.engine._scheduler, "pick", broken)
        waiting = asyncio.ensure_future(rig.ask("a dull film", "a long film"))
        assert await asyncio.gather(inside, waiting) == [[Failure("internal")], [Failure("internal")] * 2]
        assert not rig.engine.healthy
        with pytest.raises(NotRunning):
            await rig.ask("a good film")
        gate.open()
        # Closing, at the end of this block, does not wait for what will never come.


async def test_a_run_is_lone_only_while_nothing_else_runs_or_waits(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, workers=2) as rig:
        await until(lambda: rig.engine._busy == 0)
        gate = Gate(rig, segment=2)
        older = asyncio.ensure_future(rig.ask("a good film"))
        await gate.entered()
        await rig.ask("a dull film", policy=FIRST)
        gate.open()
        await older
        assert rig.spy.lone[:3] == [True, True, False]


async def test_abandoned_texts_are_dropped_before_their_next_segment(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        gate = Gate(rig, segment=1)
        running_one = asyncio.ensure_future(rig.ask("a good film"))
        await gate.entered()
        waiting_one = asyncio.ensure_future(rig.ask("a dull film"))
        await asyncio.sleep(0)
        running_one.cancel()
        waiting_one.cancel()
        await asyncio.gather(running_one, waiting_one, return_exceptions=True)
        gate.open()
        assert answered((await rig.ask("a long film", policy=FIRST))[0]).left.exit == 1
        assert rig.tally.cancellations == 2
        # Segment 1 ran for the one that was in it already and for the third text; segment 2 for nobody.
        assert rig.spy.runs == [(1, 1), (1, 1)]


async def test_at_the_deadline_the_latest_exit_answers(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        gate = Gate(rig, segment=3)
        outcome = (await rig.ask("a good film", deadline_seconds=2.0))[0]
        gate.open()
        assert answered(outcome).reason == "deadline"
        assert answered(outcome).left.exit == 2


async def test_a_text_that_passed_no_exit_by_its_deadline_fails(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        gate = Gate(rig, segment=1)
        assert await rig.ask("a good film", deadline_seconds=0.05) == [Failure("deadline")]
        gate.open()
        assert rig.tally.failures == [Failure("deadline")]


async def test_an_outcome_that_comes_too_late_counts_for_nothing(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, max_queue=1) as rig:
        gate = Gate(rig, segment=1)
        assert await rig.ask("a good film", policy=FIRST, deadline_seconds=0.05) == [Failure("deadline")]
        gate.open()
        assert answered((await rig.ask("a dull film", policy=FIRST))[0]).left.exit == 1
        assert len(rig.tally.answers) == 1
        assert rig.tally.failures == [Failure("deadline")]
        # The late one did not give its place back a second time.
        with pytest.raises(Overloaded):
            await rig.ask("a", "b")


async def test_an_answer_of_the_last_exit_is_final_even_if_the_deadline_overtakes_its_delivery(
    tiny_bundle: Bundle,
) -> None:
    # Between reading the last exit and handing the answer over, the worker waits here until the deadline has passed.
    delivered = threading.Event()

    async with running(tiny_bundle) as rig:
        rig.tally.segment_ran = lambda segment, texts, seconds: delivered.wait(30) if segment == 4 else None
        outcome = (await rig.ask("a good film", deadline_seconds=1.0))[0]
        delivered.set()
        assert answered(outcome).left.exit == 4
        assert answered(outcome).reason == "final"


async def test_a_deadline_that_is_not_reached_changes_nothing(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        assert answered((await rig.ask("a good film", deadline_seconds=60))[0]).reason == "final"


async def test_the_queue_is_bounded_and_recovers(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle, max_queue=3) as rig:
        gate = Gate(rig, segment=1)
        first = asyncio.ensure_future(rig.ask("a good film", "a dull film"))
        await gate.entered()
        with pytest.raises(Overloaded) as caught:
            await rig.ask("a long film", "a short film")
        assert (caught.value.reason, caught.value.retry_after) == ("queue_full", 1)
        third = asyncio.ensure_future(rig.ask("a long film"))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await rig.ask("a short film")
        gate.open()
        await asyncio.gather(first, third)
        assert len(await rig.ask("a", "b", "c")) == 3


async def test_a_text_that_could_not_make_its_deadline_is_refused_before_it_costs_anything(tiny_bundle: Bundle) -> None:
    slow = LatencyTable.from_measurements(Measurement(segment, 1, 8, 10.0) for segment in range(1, 5))
    async with running(tiny_bundle, max_queue=1, latency=slow) as rig:
        for _ in range(3):
            with pytest.raises(Overloaded) as caught:
                await rig.ask("a good film", deadline_seconds=9.0)
            assert caught.value.reason == "late"
            assert caught.value.retry_after >= 1
        assert rig.spy.runs == []
        # Those without a deadline, or with one that can be met, are served.
        assert answered((await rig.ask("a good film"))[0]).reason == "final"
        assert answered((await rig.ask("a good film", deadline_seconds=60.0))[0]).reason == "final"


async def test_many_requests_are_refused_where_they_would_wait_too_long_and_a_few_are_not(tiny_bundle: Bundle) -> None:
    slow = LatencyTable(np.array([1]), np.array([8]), np.full((4, 1, 1), 1.0))
    async with running(tiny_bundle, latency=slow, max_wait_seconds=10.0) as rig:
        gate = Gate(rig, segment=1)
        few = [asyncio.ensure_future(rig.ask(text, policy=FIRST)) for text in some_texts(FEW_REQUESTS + 1)]
        await gate.entered()
        with pytest.raises(Overloaded) as caught:
            await rig.ask("a good film")
        assert caught.value.reason == "wait"
        assert caught.value.retry_after > 10
        gate.open()
        await asyncio.gather(*few)
        assert len(await rig.ask("a good film")) == 1


async def test_where_waits_turn_out_longer_than_predicted_fewer_are_admitted(tiny_bundle: Bundle) -> None:
    table = LatencyTable(np.array([1]), np.array([64]), np.full((4, 1, 1), 0.003))
    ahead = 0.0

    async def admitted(rig: Rig) -> int:
        nonlocal ahead
        gate = Gate(rig, segment=1)
        asked = []
        for text in some_texts(300):
            asked.append(asyncio.ensure_future(rig.ask(text, policy=FIRST)))
            await asyncio.sleep(0)
            ahead += 2 * PREDICTION_SECONDS
        gate.open()
        outcomes = await asyncio.gather(*asked, return_exceptions=True)
        assert {one.reason for one in outcomes if isinstance(one, Overloaded)} <= {"wait"}
        return sum(not isinstance(one, Overloaded) for one in outcomes)

    options = {"latency": table, "max_wait_seconds": 0.75, "max_batch_texts": 1}
    async with running(tiny_bundle, **options, clock=lambda: time.monotonic() + ahead) as rig:
        for text in some_texts(100):
            # So that it is known that such texts leave at exit 1.
            await rig.ask(text, policy=FIRST)
        first = await admitted(rig)
        assert 200 < first < 300
        assert await admitted(rig) < first / 2


@pytest.mark.parametrize("broken", ["", "\u0000"])
async def test_refused_texts_give_their_places_back(tiny_bundle: Bundle, broken: str) -> None:
    async with running(tiny_bundle, max_queue=2) as rig:
        for _ in range(5):
            with pytest.raises(NoTokens) as caught:
                await rig.ask("a good film", broken)
            assert caught.value.index == 1
        assert len(await rig.ask("a", "b")) == 2


async def test_a_long_text_is_cut_or_refused_as_wished(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        answer = answered((await rig.ask("good " * 200))[0])
        assert answer.truncated
        assert answer.tokens == 64
        with pytest.raises(TooLong) as caught:
            await rig.ask("a", "good " * 200, truncate=False)
        assert (caught.value.index, caught.value.tokens, caught.value.limit) == (1, 202, 64)
        assert not answered((await rig.ask("good " * 62, truncate=False))[0]).truncated


async def test_long_texts_are_tokenized_off_the_loop_to_the_same_answer(tiny_bundle: Bundle) -> None:
    async with running(tiny_bundle) as rig:
        short = answered((await rig.ask("good " * 100))[0])
        long = answered((await rig.ask("good " * 10_000))[0])
        np.testing.assert_allclose(short.left.logits, long.left.logits, atol=1e-6)


async def test_hundreds_at_once_are_each_answered_as_if_alone(tiny_bundle: Bundle) -> None:
    texts = some_texts(300, seed=11)
    policies = [Policy("confidence", threshold) for threshold in (0.7, 0.9, 0.99)]
    async with running(tiny_bundle, workers=3) as rig:
        asked = [rig.ask(text, policy=policies[place % 3]) for place, text in enumerate(texts)]
        answers = [answered(outcomes[0]) for outcomes in await asyncio.gather(*asked)]
    assert len(rig.tally.answers) == 300
    runner = Runner(tiny_bundle, precision="fp32", device="cpu", threads=1)
    for text, answer in list(zip(texts, answers, strict=True))[::10]:
        encoded = tiny_bundle.encoder.encode(text)

        class One:
            ids = np.asarray(encoded.ids, np.int64)
            type_ids = np.asarray(encoded.type_ids, np.int64)
            state: Any = ()

        for reading in answer.readings:
            output = runner.run(reading.exit, [One()])
            (One.state,) = output.carry([0])
            np.testing.assert_allclose(output.logits[0], reading.logits, atol=1e-4)


async def test_closing_finishes_what_was_accepted_and_ends_the_workers(tiny_bundle: Bundle) -> None:
    rig, others = Rig(tiny_bundle, workers=2), set(threading.enumerate())
    await rig.engine.start()
    workers = [t for t in threading.enumerate() if t not in others and t.name.startswith("offramp-worker")]
    assert len(workers) == 2
    gate = Gate(rig, segment=2)
    asked = [asyncio.ensure_future(rig.ask(text)) for text in some_texts(50)]
    await gate.entered()
    closing = asyncio.ensure_future(rig.engine.close())
    await asyncio.sleep(0)
    with pytest.raises(NotRunning):
        await rig.ask("too late")
    assert not closing.done()
    gate.open()
    for outcomes in await asyncio.gather(*asked):
        assert answered(outcomes[0]).left.exit == 4
    await closing
    assert not rig.engine.healthy
    assert not any(worker.is_alive() for worker in workers)


async def test_an_engine_that_never_started_refuses_and_closes(tiny_bundle: Bundle) -> None:
    rig = Rig(tiny_bundle)
    with pytest.raises(NotRunning):
        await rig.ask("a good film")
    await rig.engine.close()
