"""How many processes a server starts where nobody says, and what each of them gets."""

import errno
import math
import tempfile
from importlib import metadata
from pathlib import Path

import pytest

import server.main
from models.bundle import SHIPPED_BUNDLE, Bundle
from server.config import StartError, load_settings
from server.main import suitable_processes
from tests.server.process import classify, process

pytestmark = pytest.mark.anyio


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.main, "cpu_allowance", lambda: 8)
    monkeypatch.setattr(server.main, "memory_allowance", lambda: math.inf)


@pytest.mark.usefixtures("eight_cpus")
def test_the_shipped_bundle_gets_a_process_for_each_cpu() -> None:
    assert suitable_processes(load_settings(), [Bundle.load(SHIPPED_BUNDLE)]) == 8


@pytest.mark.usefixtures("eight_cpus")
def test_the_smallest_of_several_models_decides(tiny_bundle: Bundle) -> None:
    large = tiny_bundle.manifest.architecture.model_copy(update={"hidden_size": 1024, "intermediate_size": 4096})
    manifest = tiny_bundle.manifest.model_copy(update={"architecture": large})
    others = Bundle(tiny_bundle.path, manifest, tiny_bundle.calibration, tiny_bundle.encoder)
    assert suitable_processes(load_settings(), [others]) < 8
    assert suitable_processes(load_settings(), [others, tiny_bundle]) == 8


@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize(
    ("wish", "expected"),
    [
        ({"device": "cuda"}, 1),
        ({"device": "cuda:0,cuda:1,cuda:2"}, 3),
        ({"runs": 4}, 1),
        ({"threads": 2}, 1),
        ({"lone_threads": 4}, 1),
        ({"device": "cpu"}, 8),
    ],
)
def test_gpus_and_whoever_spends_the_cpus_by_hand_decide_too(
    tiny_bundle: Bundle, wish: dict[str, object], expected: int
) -> None:
    assert suitable_processes(load_settings(**wish), [tiny_bundle]) == expected


@pytest.mark.usefixtures("eight_cpus")
def test_a_runtime_for_gpus_gets_one_process(tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "distribution", lambda name: name)
    assert suitable_processes(load_settings(), [tiny_bundle]) == 1
    assert suitable_processes(load_settings(device="cpu"), [tiny_bundle]) == 8


def test_what_bounds_memory_is_divided_and_what_bounds_a_queue_is_each_ones_own() -> None:
    settings = load_settings(workers=3, max_queue=100, max_inputs=10, max_concurrent_requests=20).for_worker(2)
    assert (settings.max_queue, settings.max_concurrent_requests) == (100, 7)


def test_where_nothing_can_be_written_one_process_serves_unless_several_were_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container without a place of its own."""

    def nowhere(prefix: str) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", nowhere)
    assert server.main._folder(load_settings(), 2) is None
    assert "Read-only file system (TMPDIR names another place); one process serves" in caplog.text
    with pytest.raises(StartError, match="no temporary folder for the metrics of several processes"):
        server.main._folder(load_settings(workers=2), 2)


def test_a_folder_without_room_for_what_processes_share_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Found out before they start: a mapped file that the disk has no room for kills whoever writes to it."""

    def full(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_bytes", full)
    assert server.main._folder(load_settings(), 2) is None
    assert "No space left on device (TMPDIR names another place); one process serves" in caplog.text
    with pytest.raises(StartError, match="No space left on device"):
        server.main._folder(load_settings(workers=2), 2)
    assert not list(tmp_path.iterdir())


async def test_the_default_serves_with_as_many_as_suit(tiny_bundle: Bundle) -> None:
    expected = suitable_processes(load_settings(), [tiny_bundle])
    with process(tiny_bundle, measure_seconds=0, workers="") as server:
        assert len(server.workers) == (expected if expected > 1 else 0)
        assert (await classify(server, "a good film")).status == 200
        server.terminate()
        assert server.status() == 0
