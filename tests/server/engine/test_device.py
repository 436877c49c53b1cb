"""State on the device: the same answers as on the host, and nothing but numbers and logits crosses.

There is no GPU here: the "device" is the CPU, the code is the same.
"""

import asyncio
import gc
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle
from models.exits import Policy
from models.store import FIRST_ROW
from server.config import StartError
from server.engine.device import Buckets, DeviceRunner, FreeRows, StoreFull, session_limits
from server.engine.request import Answer, OutOfMemory, Text
from server.engine.runner import Runner
from tests.server.conftest import some_texts
from tests.server.engine.test_engine import answered, engine_of
from tests.server.engine.test_runner import Work, _logits
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundles"), precisions=("fp32", "fp16"), poison=())


def open_device(bundle: Bundle, **changes: Any) -> DeviceRunner:
    options: dict[str, Any] = {"lanes": 1, "buckets": Buckets.up_to(16, 64), "store_tokens": 2000}
    return DeviceRunner(bundle, device="cpu", threads=1, **(options | changes))


def logits(runner: DeviceRunner | Runner, bundle: Bundle, texts: list[str]) -> np.ndarray:
    return _logits(runner, bundle, texts)


def test_logits_are_those_of_the_host_runner(bundle: Bundle) -> None:
    texts = some_texts(11, seed=3)
    exact = logits(Runner(bundle, precision="fp32", device="cpu", threads=1), bundle, texts)
    np.testing.assert_allclose(logits(open_device(bundle), bundle, texts), exact, rtol=0, atol=1e-2)


@pytest.mark.parametrize("changes", [{"position_offset": 2, "uses_token_type_ids": False}, {"takes_pairs": True}])
def test_other_backbones_run_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    bundle = write_tiny_bundle(tmp_path, precisions=("fp32", "fp16"), **changes)
    texts = some_texts(3, seed=5)
    exact = logits(Runner(bundle, precision="fp32", device="cpu", threads=1), bundle, texts)
    np.testing.assert_allclose(logits(open_device(bundle), bundle, texts), exact, rtol=0, atol=1e-2)


def test_padding_up_to_a_bucket_changes_no_answer(bundle: Bundle) -> None:
    texts = some_texts(5, seed=6)
    longest = max(len(bundle.encoder.encode(text)) for text in texts)
    exact = open_device(bundle, buckets=Buckets((5,), (longest,)))
    roomy = open_device(bundle, buckets=Buckets((13,), (64,)))
    np.testing.assert_allclose(logits(roomy, bundle, texts), logits(exact, bundle, texts), rtol=0, atol=1e-3)


def test_company_changes_no_answer(bundle: Bundle) -> None:
    runner = open_device(bundle)
    texts = some_texts(9, seed=7)
    alone = np.concatenate([logits(runner, bundle, [text]) for text in texts], axis=1)
    np.testing.assert_allclose(logits(runner, bundle, texts), alone, rtol=0, atol=1e-3)


@pytest.mark.parametrize("lanes", [1, 2])
def test_survivors_of_different_batches_and_lanes_are_joined_by_naming_their_rows(bundle: Bundle, lanes: int) -> None:
    runner = open_device(bundle, lanes=lanes)
    texts = some_texts(4, seed=4)
    items = [Work(bundle, text) for text in texts]
    for group in (items[:2], items[2:]):
        output = runner.run(1, group)
        for item, state in zip(group, output.carry([0, 1]), strict=True):
            item.state = state
    mixed = runner.run(2, [items[3], items[0]])
    np.testing.assert_allclose(mixed.logits, logits(runner, bundle, texts)[1][[3, 0]], rtol=0, atol=1e-3)


def test_a_segment_can_be_run_again_on_what_it_read(bundle: Bundle) -> None:
    runner = open_device(bundle)
    items = [Work(bundle, text) for text in some_texts(3, seed=9)]
    for segment in range(1, 5):
        first, again = runner.run(segment, items), None
        if segment > 1:
            again = runner.run(segment, items)
            np.testing.assert_array_equal(first.logits, again.logits)
        for item, state in zip(items, (again or first).carry(range(3)), strict=True):
            item.state = state


def test_no_hidden_state_crosses_to_the_host(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = open_device(bundle)
    fetched: list[tuple[int, ...]] = []
    value_type = type(runner._stores[0]["hidden"])
    numpy = value_type.numpy

    def counted(value: Any) -> Any:
        array = numpy(value)
        fetched.append(array.shape)
        return array

    monkeypatch.setattr(value_type, "numpy", counted)
    texts = some_texts(4, seed=2)
    found = logits(runner, bundle, texts)
    # A session's plain run would bring everything back; nothing else of ONNX Runtime's gives arrays.
    assert fetched == [(4, 2)] * 4
    assert runner.bytes_fetched == found.nbytes
    # Rows, ids and types of [4, bucket], and lengths; rows and lengths alone from the second segment on.
    longest = runner._buckets.fit(4, max(len(bundle.encoder.encode(text)) for text in texts))[1]
    assert runner.bytes_sent == 4 * (6 * 4 * longest + 4 * 4)


def test_rows_are_free_again_once_a_text_has_left(bundle: Bundle) -> None:
    runner = open_device(bundle)
    everything = len(runner._free)
    items = [Work(bundle, text) for text in some_texts(3, seed=1)]
    output = runner.run(1, items)
    taken = sum(len(item.ids) for item in items)
    assert len(runner._free) == everything - taken
    items[1].state = output.carry([1])[0]
    del output
    gc.collect()
    assert len(runner._free) == everything - len(items[1].ids)
    items[1].state = ()
    assert len(runner._free) == everything


def test_no_row_is_held_twice_and_none_of_the_first_two_ever() -> None:
    free, random = FreeRows(FIRST_ROW + 50), np.random.default_rng(0)
    held: list[Any] = []
    for _ in range(300):
        length = int(random.integers(1, 9))
        if length <= len(free):
            held += free.take([length])
        else:
            with pytest.raises(StoreFull):
                free.take([length])
            del held[int(random.integers(len(held)))]
        numbers = np.concatenate([rows.numbers for rows in held])
        assert len(set(numbers.tolist())) == len(numbers)
        assert numbers.min() >= FIRST_ROW
        assert len(numbers) + len(free) == 50


def test_buckets_hold_what_they_are_asked_for_with_little_to_spare() -> None:
    buckets = Buckets.up_to(100, 500)
    for texts in range(1, 101):
        for longest in range(1, 501, 7):
            place, length = buckets.fit(texts, longest)
            assert place >= texts
            assert length >= longest
            assert place <= max(1.5 * texts, texts + 1)
            assert length <= max(8, 1.5 * longest + 1)
    assert buckets.fit(100, 500) == (100, 500)
    assert buckets.fit(130, 20)[0] == 130
    sizes = list(buckets.within(64))
    assert sizes[0] == (1, 8)
    assert all(texts * length <= 64 for texts, length in sizes)


def graph_ids(runner: DeviceRunner) -> list[str]:
    (lane,) = runner._all_lanes
    return [bound.options.get_run_config_entry("gpu_graph_id") for bound in lane.bound.values()]


def test_each_size_has_its_own_graph_and_its_addresses_stay(bundle: Bundle) -> None:
    runner = open_device(bundle)
    # As at a start: some sizes have run already, without graphs.
    runner.warm_up(64, 4)
    sizes = len(list(runner._buckets.within(64)))
    assert runner.capture(64, seconds=60.0) == sizes
    (lane,) = runner._all_lanes
    before = {size: bound.logits.data_ptr() for size, bound in lane.bound.items()}
    assert len(set(graph_ids(runner))) == len(graph_ids(runner)) == 4 * sizes
    assert "-1" not in graph_ids(runner)
    stores = [store.data_ptr() for stores in runner._stores for store in stores.values()]
    logits(runner, bundle, ["good"])
    assert {size: bound.logits.data_ptr() for size, bound in lane.bound.items()} == before
    assert [store.data_ptr() for stores in runner._stores for store in stores.values()] == stores


def test_nothing_is_captured_once_requests_are_served(bundle: Bundle) -> None:
    """Another lane's copies would spoil the graph, and it them."""
    runner = open_device(bundle)
    assert runner.capture(1024, seconds=0.0) <= 1
    captured = len(graph_ids(runner))
    assert np.isfinite(logits(runner, bundle, some_texts(5, seed=1))).all()
    assert graph_ids(runner)[captured:] == ["-1"] * 4


class Failing:
    """A session whose runs fail as ``message`` says while ``fails`` of their options holds."""

    def __init__(self, session: Any, message: str, fails: Any) -> None:
        self._session, self._message, self._fails = session, message, fails

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        if self._fails(binding, options):
            raise RuntimeError(self._message)
        self._session.run_with_iobinding(binding, options)


def break_sessions(runner: DeviceRunner, message: str, fails: Any) -> None:
    for lane in runner._all_lanes:
        lane.sessions = [Failing(session, message, fails) for session in lane.sessions]


def test_where_capture_fails_runs_go_on_without(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    runner, texts = open_device(bundle), some_texts(3, seed=2)
    expected = logits(runner, bundle, texts)
    break_sessions(
        runner,
        "CUDA failure 901: operation failed due to a previous error during capture",
        lambda binding, options: options.get_run_config_entry("gpu_graph_id") != "-1",
    )
    assert runner.capture(64, seconds=60.0) == 0
    assert caplog.text.count("going on without") == 1
    np.testing.assert_array_equal(logits(runner, bundle, texts), expected)
    assert set(graph_ids(runner)) == {"-1"}


@pytest.mark.parametrize(
    "message",
    [
        "BFCArena::AllocateRawInternal: Failed to allocate memory for requested buffer of size 402653184",
        "CUDA failure 2: out of memory ; GPU=0",
        "CUBLAS failure 3: CUBLAS_STATUS_ALLOC_FAILED",
    ],
)
def test_out_of_memory_is_told_apart_and_leaves_the_runner_whole(bundle: Bundle, message: str) -> None:
    runner, texts = open_device(bundle), some_texts(6, seed=2)
    expected, everything = logits(runner, bundle, texts), len(runner._free)
    sessions = [lane.sessions for lane in runner._all_lanes]
    break_sessions(runner, message, lambda *_: True)
    with pytest.raises(OutOfMemory):
        runner.run(1, [Work(bundle, text) for text in texts])
    assert len(runner._free) == everything
    for lane, whole in zip(runner._all_lanes, sessions, strict=True):
        lane.sessions = whole
    np.testing.assert_array_equal(logits(runner, bundle, texts), expected)


def answers(bundle: Bundle, runner: DeviceRunner | Runner, texts: list[str], policy: Policy) -> list[Answer]:
    """What an engine of two workers says to texts that arrive together."""

    async def ask() -> list[Answer]:
        engine = engine_of(bundle, runner, "fp16", workers=2, max_batch_tokens=256, max_batch_texts=16)
        await engine.start()
        submissions = await asyncio.gather(*(engine.submit([Text(text)], [policy]) for text in texts))
        await engine.close()
        return [answered(outcome) for submitted in submissions for outcome in submitted.outcomes]

    return asyncio.run(ask())


def test_an_engine_answers_as_it_does_with_fp32_on_the_host(bundle: Bundle) -> None:
    texts, policy = some_texts(60, seed=11), Policy("confidence", 0.8)
    exact = answers(bundle, Runner(bundle, precision="fp32", device="cpu", threads=1), texts, policy)
    runner = open_device(bundle, lanes=2)
    everything = len(runner._free)
    found = answers(bundle, runner, texts, policy)
    assert len({answer.left.exit for answer in exact}) > 2
    close = [abs(max(one.left.probabilities) - 0.8) < 0.01 for one in exact]
    for one, other, near in zip(found, exact, close, strict=True):
        if not near:
            assert (one.left.exit, one.left.label) == (other.left.exit, other.left.label)
            np.testing.assert_allclose(one.left.logits, other.left.logits, rtol=0, atol=1e-2)
    del found
    gc.collect()
    assert len(runner._free) == everything


def test_an_engine_goes_on_with_less_where_the_device_has_no_room(bundle: Bundle) -> None:
    texts, policy = some_texts(20, seed=12), Policy("confidence", 0.8)
    expected = answers(bundle, open_device(bundle), texts, policy)
    runner = open_device(bundle)
    break_sessions(
        runner,
        "CUDA failure 2: out of memory ; GPU=0",
        lambda binding, options: binding.get_outputs()[0].shape()[0] > 4,
    )
    found = answers(bundle, runner, texts, policy)
    assert [answer.left.exit for answer in found] == [answer.left.exit for answer in expected]


def test_a_size_that_found_no_memory_to_be_captured_is_not_tried_again_later(bundle: Bundle) -> None:
    runner = open_device(bundle)
    break_sessions(
        runner,
        "CUDA failure 2: out of memory ; GPU=0",
        lambda binding, options: options.get_run_config_entry("gpu_graph_id") == "9",
    )
    with pytest.raises(OutOfMemory):
        runner.capture(64, seconds=60.0)
    assert graph_ids(runner) == [str(number) for number in range(1, 9)]


def test_newcomers_beyond_the_store_are_refused_and_those_under_way_go_on(bundle: Bundle) -> None:
    runner = open_device(bundle, store_tokens=20)
    first = Work(bundle, "good bad great")
    first.state = runner.run(1, [first]).carry([0])[0]
    with pytest.raises(StoreFull):
        runner.run(1, [Work(bundle, "good " * 30)])
    assert np.isfinite(runner.run(2, [first]).logits).all()


def test_the_start_checks_and_measures_it_like_any_runner(bundle: Bundle) -> None:
    runner = open_device(bundle)
    runner.warm_up(256, 16)
    table = runner.measure(256, 8, seconds=60.0)
    assert (table.segments, table.texts.tolist(), table.padding) == (4, [1, 8], 1.0)


def test_graphs_that_do_not_fit_the_manifest_are_refused(bundle: Bundle) -> None:
    with pytest.raises(StartError, match=r"segment_1\.onnx: takes \['attention_mask'"):
        open_device(bundle, precision="fp32")


def test_a_memory_limit_is_shared_out_by_weights_and_never_passed() -> None:
    limits = session_limits(1000, 100, [200, 50], lanes=2)
    assert limits == [300, 150]
    assert 100 + 2 * sum(limits) <= 1000
    with pytest.raises(StartError, match="gpu_memory_bytes 600 are too few: weights take 500, states of texts 100"):
        session_limits(600, 100, [200, 50], lanes=2)


def test_two_lanes_run_at_once(bundle: Bundle) -> None:
    runner = open_device(bundle, lanes=2)
    both = threading.Barrier(2, timeout=30)
    break_sessions(runner, "never", lambda *_: both.wait() < 0)
    texts: Sequence[str] = some_texts(2, seed=8)
    found: list[Any] = []
    threads = [
        threading.Thread(target=lambda text=text: found.append(runner.run(1, [Work(bundle, text)]).logits))
        for text in texts
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # Had one waited for the other, neither would have passed the barrier.
    assert len(found) == 2
