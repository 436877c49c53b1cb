"""Which runner a bundle gets, and that a server on fp16 graphs answers like one on fp32 graphs."""

from pathlib import Path

import numpy as np
import pytest

from models.bundle import Bundle, Precision
from server.config import StartError, load_settings
from server.engine.device import DeviceRunner, bytes_of_a_token
from server.engine.runner import Runner
from server.engine.sessions import load_onnxruntime
from server.runtime import open_runtime
from tests.server.conftest import serving, some_texts
from tests.tiny import write_tiny_bundle

BOTH: tuple[Precision, ...] = ("fp32", "fp16")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return write_tiny_bundle(tmp_path_factory.mktemp("bundles"), precisions=BOTH)


@pytest.fixture
def gpu_build_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What onnxruntime does with a GPU build and no driver: sessions open, on the CPU."""
    ort = load_onnxruntime()
    open_session = ort.InferenceSession
    monkeypatch.setattr(ort, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(
        ort, "InferenceSession", lambda path, options, providers: open_session(path, options, ["CPUExecutionProvider"])
    )


@pytest.mark.anyio
async def test_a_server_on_fp16_graphs_answers_like_one_on_fp32_graphs(bundle: Bundle) -> None:
    texts = some_texts(20, seed=21)
    async with serving(bundle, precision="fp32") as exact:
        wanted = await exact.results(texts, quality=1.0)
    async with serving(bundle, precision="fp16") as served:
        found = await served.results(texts, quality=1.0)
        assert served.catalog.default.precision == "fp16"
    for one, other in zip(found, wanted, strict=True):
        assert one["exit"]["number"] == other["exit"]["number"] == 4
        np.testing.assert_allclose(one["score"], other["score"], atol=5e-3)


def test_the_cpu_takes_the_default_precision_and_the_runner_of_the_host(bundle: Bundle) -> None:
    opened = open_runtime(load_settings(device="auto"), bundle, runs=2, threads=1)
    assert isinstance(opened.runner, Runner)
    assert (opened.precision, opened.runs, opened.max_batch_texts, opened.cuda) == ("fp32", 2, 32, None)


@pytest.mark.usefixtures("gpu_build_without_gpu")
def test_auto_falls_back_to_the_graphs_that_suit_the_cpu(bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    opened = open_runtime(load_settings(device="auto"), bundle, runs=1, threads=1)
    assert isinstance(opened.runner, Runner)
    assert (opened.runner.device, opened.precision, opened.max_batch_tokens) == ("cpu", "fp32", 512)
    assert "CUDA does not work here, taking the CPU" in caplog.text


@pytest.mark.usefixtures("gpu_build_without_gpu")
@pytest.mark.parametrize("precision", [None, "fp32", "fp16"])
def test_cuda_that_was_asked_for_and_does_not_work_ends_in_one_line(bundle: Bundle, precision: str | None) -> None:
    with pytest.raises(StartError, match=r"^device cuda:1 .*fell back.* \(driver .*, CUDA .*, cuDNN .*\)$"):
        open_runtime(load_settings(device="cuda:1", precision=precision), bundle, runs=1, threads=1)


def test_the_store_has_room_for_all_that_is_accepted_within_reason(bundle: Bundle) -> None:
    few = open_runtime(load_settings(precision="fp16", max_queue=150), bundle, runs=1, threads=1)
    assert isinstance(few.runner, DeviceRunner)
    assert len(few.runner._free) == 150 * 64
    many = open_runtime(load_settings(precision="fp16", max_queue=10_000), bundle, runs=1, threads=1)
    assert isinstance(many.runner, DeviceRunner)
    assert len(many.runner._free) == 2**16


def test_a_token_takes_two_rows_for_each_name_of_state(bundle: Bundle, tmp_path: Path) -> None:
    assert bytes_of_a_token(bundle.manifest.architecture) == 2 * 3 * 32 * 2
    heads = write_tiny_bundle(tmp_path, precisions=BOTH).manifest.architecture
    exits = tuple(spec.model_copy(update={"head": "mean"}) for spec in heads.exits)
    assert bytes_of_a_token(heads.model_copy(update={"exits": exits})) == 2 * 32 * 2
