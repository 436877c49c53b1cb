"""Sessions: their answers do not depend on company, and what does not fit stops the start."""

import importlib
import itertools
import math
import os
import re
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from models.bundle import Bundle
from server.config import StartError
from server.engine.latency import Measurement
from server.engine.request import State
from server.engine.runner import Runner, SegmentOutput, padding_in_packs
from server.engine.sessions import load_onnxruntime
from server.engine.warmup import run_clock
from tests.server.conftest import some_texts
from tests.tiny import VOCABULARY, write_tiny_bundle


class Work:
    def __init__(self, bundle: Bundle, text: str) -> None:
        encoded = bundle.encoder.encode(text)
        self.ids = np.asarray(encoded.ids, np.int64)
        self.type_ids = np.asarray(encoded.type_ids, np.int64)
        self.state: State = ()


def open_runner(bundle: Bundle, device: str = "cpu") -> Runner:
    return Runner(bundle, precision=bundle.manifest.default_precision, device=device, threads=1)


def _logits(runner: Runner, bundle: Bundle, texts: list[str]) -> np.ndarray:
    """Logits ``[E, N, K]`` of texts that run through all segments together."""
    items = [Work(bundle, text) for text in texts]
    found = []
    for segment in range(1, len(bundle.manifest.architecture.exits) + 1):
        output = runner.run(segment, items)
        for item, state in zip(items, output.carry(range(len(items))), strict=True):
            item.state = state
        found.append(output.logits)
    return np.stack(found)


def test_logits_are_the_same_alone_and_packed_in_company(tiny_bundle: Bundle) -> None:
    runner = open_runner(tiny_bundle)
    texts = some_texts(12, seed=3)
    together = _logits(runner, tiny_bundle, texts)
    alone = np.concatenate([_logits(runner, tiny_bundle, [text]) for text in texts], axis=1)
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_survivors_of_different_batches_can_be_regrouped(tiny_bundle: Bundle) -> None:
    runner = open_runner(tiny_bundle)
    texts = some_texts(4, seed=4)
    first, second = [Work(tiny_bundle, text) for text in texts[:2]], [Work(tiny_bundle, text) for text in texts[2:]]
    for group in (first, second):
        for item, state in zip(group, runner.run(1, group).carry([0, 1]), strict=True):
            item.state = state
    mixed = runner.run(2, [second[1], first[0]])
    expected = _logits(runner, tiny_bundle, texts)[1]
    np.testing.assert_allclose(mixed.logits, expected[[3, 0]], atol=1e-5)


def test_positions_start_where_the_backbone_says(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path, position_offset=2, uses_token_type_ids=False)
    runner = open_runner(bundle)
    runner.warm_up(64, 4)
    texts = some_texts(3, seed=5)
    together = _logits(runner, bundle, texts)
    alone = np.concatenate([_logits(runner, bundle, [text]) for text in texts], axis=1)
    np.testing.assert_allclose(together, alone, atol=1e-5)


def _with(bundle: Bundle, tmp_path: Path, **manifest: Any) -> Bundle:
    """``bundle`` with another manifest, as if it had been written so."""
    changed = bundle.manifest.model_copy(update=manifest)
    return Bundle(bundle.path, changed, bundle.calibration, bundle.encoder)


def test_a_graph_with_other_inputs_than_the_manifest_means_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    architecture = tiny_bundle.manifest.architecture.model_copy(update={"uses_token_type_ids": False})
    with pytest.raises(StartError, match=r"segment_1\.onnx: takes .*token_type_ids"):
        open_runner(_with(tiny_bundle, tmp_path, architecture=architecture))


def test_a_graph_with_another_state_than_the_manifest_means_is_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    exits = tuple(spec.model_copy(update={"head": "mean"}) for spec in tiny_bundle.manifest.architecture.exits)
    architecture = tiny_bundle.manifest.architecture.model_copy(update={"exits": exits})
    with pytest.raises(StartError, match=r"segment_1\.onnx: returns"):
        open_runner(_with(tiny_bundle, tmp_path, architecture=architecture))


def test_logits_that_are_not_as_wide_as_the_labels_are_refused(tiny_bundle: Bundle, tmp_path: Path) -> None:
    runner_of_three = _with(tiny_bundle, tmp_path, labels=("a", "b", "c"))
    with pytest.raises(StartError, match="labels"):
        open_runner(runner_of_three).warm_up(64, 4)


def test_a_file_that_is_no_graph_is_refused_by_name(tiny_bundle: Bundle, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny_bundle.path, copy)
    (copy / "graphs" / "fp32" / "segment_2.onnx").write_bytes(b"not a graph")
    broken = Bundle(copy, tiny_bundle.manifest, tiny_bundle.calibration, tiny_bundle.encoder)
    with pytest.raises(StartError, match=r"segment_2\.onnx: not a graph"):
        open_runner(broken)


def test_a_model_that_gives_no_finite_answer_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="not finite"):
        open_runner(write_tiny_bundle(tmp_path, poison=VOCABULARY)).warm_up(64, 4)


def test_the_warm_up_runs_no_larger_batch_than_requests_will(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generous token budget once meant a batch of as many texts, and a start that never ended."""
    runner, sizes = open_runner(tiny_bundle), []
    run = runner.run

    def counted(segment: int, items: Sequence[Any], **options: Any) -> SegmentOutput:
        sizes.append(len(items))
        return run(segment, items, **options)

    monkeypatch.setattr(runner, "run", counted)
    runner.warm_up(1_000_000, 3)
    assert max(sizes) == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        # The tokenizer's ids fit vocab_size, positions fit max_length; but the graph's tables are shorter than both.
        ({"max_length": 300}, "segment_1.onnx: does not run"),
        ({"hidden_size": 64}, "segment_1.onnx: state is not as wide as the manifest's hidden_size 64"),
    ],
)
def test_a_manifest_that_promises_more_than_its_graphs_hold_stops_the_start(
    tiny_bundle: Bundle, change: dict[str, int], words: str
) -> None:
    architecture = tiny_bundle.manifest.architecture.model_copy(update=change)
    manifest = tiny_bundle.manifest.model_copy(update={"architecture": architecture})
    bundle = Bundle(tiny_bundle.path, manifest, tiny_bundle.calibration, tiny_bundle.encoder)
    with pytest.raises(StartError, match=re.escape(words)):
        open_runner(bundle).warm_up(64, 4)


def test_measuring_knows_every_segment_alone_and_in_company(tiny_bundle: Bundle) -> None:
    table = open_runner(tiny_bundle).measure(512, 8, seconds=60.0)
    assert table.segments == 4
    assert table.texts.tolist() == [1, 8]
    # The tiny model takes 64 tokens, so one text is measured up to 32, and eight have 512 in all.
    assert table.tokens.tolist() == [8, 32, 128, 512]
    # So narrow a model spends its time in attention.
    assert table.padding == 1.0


def test_an_empty_place_beside_a_longer_text_costs_a_quarter_of_a_token_in_packs_of_minilm(tiny_bundle: Bundle) -> None:
    widths = {"hidden_size": 384, "intermediate_size": 1536, "max_length": 128}
    minilm = tiny_bundle.manifest.architecture.model_copy(update=widths)
    assert padding_in_packs(minilm) == pytest.approx(0.26, abs=0.01)


def test_a_slow_model_is_measured_on_fewer_sizes(tiny_bundle: Bundle) -> None:
    table = open_runner(tiny_bundle).measure(512, 8, seconds=0.0)
    assert (table.segments, len(table.texts), len(table.tokens)) == (4, 1, 1)


def test_what_a_run_takes_is_cpu_time_where_the_run_is_one_thread(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count()
    monkeypatch.setattr(time, "thread_time", lambda: 0.001 * next(ticks))
    assert np.allclose(open_runner(tiny_bundle).measure(32, 1, seconds=10.0).seconds, 0.001)


def test_what_a_run_takes_is_stretched_by_a_quota_of_less_than_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "thread_time", lambda: 1.0)
    for quota, seconds in ((math.inf, 1.0), (1.5, 1.0), (0.25, 4.0)):
        monkeypatch.setattr("server.engine.warmup.cpu_quota", lambda quota=quota: quota)
        assert run_clock(1, "cpu")() == seconds


@pytest.mark.parametrize(("threads", "device"), [(2, "cpu"), (1, "cuda:0")])
def test_of_several_threads_and_of_a_gpu_only_the_wall_knows_when_they_end(threads: int, device: str) -> None:
    assert run_clock(threads, device) is time.perf_counter


def test_lone_runs_on_more_threads_say_the_same(tiny_bundle: Bundle) -> None:
    runner = open_runner(tiny_bundle)
    runner.widen(2)
    for text in some_texts(5, seed=8):
        together, alone = (runner.run(1, [Work(tiny_bundle, text)], lone=lone) for lone in (False, True))
        np.testing.assert_allclose(together.logits, alone.logits, atol=1e-6)


@pytest.mark.parametrize(
    ("milliseconds", "kept"),
    [
        ({1: [10] * 4, 2: [9.5, 12, 10, 9.1]}, (1, 1, 1, 1)),
        ({1: [10] * 4, 2: [9.5, 6, 6, 6], 4: [1, 5.8, 3, 6], 8: [1, 1, 2.9, 1]}, (1, 2, 4, 2)),
        ({1: [10] * 4, 2: [6, 6, 6, 6], 4: [4, 4, 4, 4], 8: [2, 2, 2, 4]}, (8, 8, 8, 4)),
    ],
)
def test_more_threads_for_a_lone_run_must_earn_their_keep(
    tiny_bundle: Bundle,
    monkeypatch: pytest.MonkeyPatch,
    milliseconds: dict[int, list[float]],
    kept: tuple[int, ...],
) -> None:
    runner = open_runner(tiny_bundle)

    def timed(_: Runner, lengths: Sequence[int], *, lone: bool = False, **clock: object) -> list[Measurement]:
        assert lone
        taken = milliseconds[runner.lone_threads[0]]
        return [Measurement(at, len(lengths), sum(lengths), one) for at, one in enumerate(taken, start=1)]

    monkeypatch.setattr(runner._warm_up, "time", timed)
    assert list(runner.fit_lone_threads(8)) == list(milliseconds)
    assert runner.lone_threads == kept


def test_whoever_goes_on_never_keeps_much_more_than_its_own_state_alive(tiny_bundle: Bundle) -> None:
    runner = open_runner(tiny_bundle)
    texts = [Work(tiny_bundle, "good " * length) for length in (3, 30, 2, 5)]
    output = runner.run(1, texts)
    assert [len(array) for state in output.carry([0, 1]) for array in state] == [5, 5, 5, 32, 32, 32]
    # Most tokens go on: views. Few do: copies, or one short text would hold all the others' arrays.
    assert all(np.shares_memory(array, output.state[0]) for array, *_ in output.carry([0, 1]))
    assert not any(np.shares_memory(array, output.state[0]) for array, *_ in output.carry([0, 3]))
    for view, copy in zip(output.carry([0, 1])[0], output.carry([0])[0], strict=True):
        np.testing.assert_array_equal(view, copy)


def test_cuda_where_there_is_none_is_an_error_never_the_cpu(tiny_bundle: Bundle) -> None:
    if "CUDAExecutionProvider" in load_onnxruntime().get_available_providers():
        pytest.skip("this onnxruntime has CUDA")
    with pytest.raises(StartError, match=r"device cuda was asked for, .*CUDAExecutionProvider"):
        open_runner(tiny_bundle, "cuda")


def test_a_session_that_falls_back_to_the_cpu_silently_is_an_error(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    ort = load_onnxruntime()
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    # What onnxruntime does with a GPU build and no driver: the session opens, on the CPU.
    open_session = ort.InferenceSession
    monkeypatch.setattr(
        ort, "InferenceSession", lambda path, options, providers: open_session(path, options, ["CPUExecutionProvider"])
    )
    with pytest.raises(StartError, match=r"device cuda:0 was asked for, .*fell back"):
        open_runner(tiny_bundle, "cuda:0")
    assert open_runner(tiny_bundle, "auto").device == "cpu"


def test_a_missing_onnxruntime_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named '{name}'")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(StartError, match=r"offramp\[cpu\]"):
        load_onnxruntime()


def test_a_damaged_onnxruntime_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib, "import_module", lambda name: SimpleNamespace())
    with pytest.raises(StartError, match="exactly one"):
        load_onnxruntime()


def test_onnxruntime_is_told_to_report_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str | None] = []
    monkeypatch.delenv("ORT_DISABLE_TELEMETRY", raising=False)

    def module(name: str) -> Any:
        told.append(os.environ.get("ORT_DISABLE_TELEMETRY"))
        return SimpleNamespace(InferenceSession=None)

    monkeypatch.setattr(importlib, "import_module", module)
    load_onnxruntime()
    assert told == ["1"]
