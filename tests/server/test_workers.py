"""Several server processes behind one port: they look like one, outlive each other, and end together."""

import asyncio
import errno
import os
import re
import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from models.bundle import Bundle
from server.catalog import Reloaded, ReloadError
from server.config import StartError
from server.workers import Workers
from tests.server.conftest import eventually
from tests.server.process import Process, Reply, ask, classify, ended, lives, metric, process, raw_request, start, until
from tests.server.test_process import HEAVY
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.anyio

QUICK: dict[str, Any] = {"workers": 2, "threads": 1, "measure_seconds": 0}
ANSWERED = 'requests_total{code="200",model="tiny",route="/classify"}'


async def _answer(server: Process, count: int) -> None:
    replies = await asyncio.gather(*(classify(server, "a good film") for _ in range(count)))
    assert [reply.status for reply in replies] == [200] * count


class _Begun:
    """A request that a process has accepted and waits for the end of."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, rest: bytes) -> None:
        self._reader, self._writer, self._rest = reader, writer, rest

    @classmethod
    async def on(cls, server: Process) -> "_Begun":
        request = raw_request("POST", "/classify", b'{"inputs": "a good film"}')
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(request[:-5])
        return cls(reader, writer, request[-5:])

    async def finish(self) -> int | None:
        """The status of its answer; ``None`` where its process is gone."""
        try:
            self._writer.write(self._rest)
            answer = await self._reader.read()
        except OSError:
            return None
        finally:
            self._writer.close()
        return int(answer.split()[1]) if answer else None


async def _refused(server: Process) -> None:
    """Returns once nobody listens any more."""
    for _ in range(3000):
        try:
            _, writer = await asyncio.open_connection(*server.address)
        except OSError:
            return
        writer.close()
        await asyncio.sleep(0.01)
    raise AssertionError("still listening")


async def _replaced(server: Process) -> None:
    """Returns once a third process of two serves."""
    await eventually(lambda: len(re.findall(r"worker \d serves", server.log)) == 3)


def _files(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def test_every_process_shows_what_all_of_them_did(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, metrics_port=0, **QUICK) as server:
        assert len(server.workers) == 2
        assert (await ask(server, "GET", "/info")).json()["processes"] == 2
        await _answer(server, 40)
        assert (await ask(server, "GET", "/metrics")).status == 404
        await asyncio.to_thread(server.wait_for, "/metrics")
        found = re.search(r"metrics on http://([^:]+):(\d+)/metrics", server.log)
        assert found
        server.address = found[1], int(found[2])
        # An answer is counted once it is sent, so its client may be quicker.
        await until(server, ANSWERED, lambda count: count == 40)
        for _ in range(10):
            assert await metric(server, ANSWERED) == 40
        info = 'model_info{device="cpu",exits="4",labels="2",model="tiny",precision="fp32",version="1"}'
        assert await metric(server, info) == 1
        await until(server, "ready", lambda value: value == 1)
        page = (await ask(server, "GET", "/metrics")).body.decode()
        (resident,) = re.findall(r"^process_resident_memory_bytes (\S+)$", page, re.MULTILINE)
        assert float(resident) > 2 * 30e6
        assert re.search(r"^process_cpu_seconds_total \S+$", page, re.MULTILINE)


async def test_sigterm_loses_no_accepted_request_of_any_process(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, runs=1, drain_seconds=300, **QUICK) as server:
        workers = server.workers
        begun = [await _Begun.on(server) for _ in range(8)]
        await until(server, "inflight_requests", lambda count: count == 8)
        asked = [asyncio.ensure_future(ask(server, "POST", "/classify", HEAVY)) for _ in range(20)]
        await until(server, "inflight_requests", lambda count: count > 8)
        server.terminate()
        # Whoever ends a whole control group tells the processes themselves, too.
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
        await _refused(server)
        assert [await one.finish() for one in begun] == [200] * 8
        # Some of these may never have been accepted, and none of those gets half an answer.
        replies = await asyncio.gather(*asked, return_exceptions=True)
        assert all(reply.status == 200 for reply in replies if isinstance(reply, Reply))
        assert server.status() == 0
        assert not any(lives(pid) for pid in workers)
        assert "Traceback" not in server.log


async def test_a_second_signal_gives_up_what_is_still_running(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, shutdown_delay_seconds=600, **QUICK) as server:
        server.terminate()
        await asyncio.to_thread(server.wait_for, "readiness is off")
        server.signal(signal.SIGINT)
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_a_killed_process_is_replaced_while_the_other_serves_on(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with process(tiny_bundle, **QUICK, tmpdir=tmp_path) as server:
        await _answer(server, 20)
        await until(server, ANSWERED, lambda count: count == 20)
        victim, survivor = server.workers
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: not lives(victim))
        for _ in range(10):
            assert (await classify(server, "a good film")).status == 200
        await until(server, ANSWERED, lambda count: count == 30)
        await asyncio.to_thread(server.wait_for, "was killed by SIGKILL; another starts")
        await _replaced(server)
        await until(server, "ready", lambda value: value == 1)
        assert survivor in server.workers
        assert await metric(server, ANSWERED) == 30, "the successor goes on with the counters of the dead"
        assert len(_files(tmp_path, "*/counter_*.db")) == 2
        server.terminate()
        assert server.status() == 0
        assert not _files(tmp_path, "*"), "the metrics' folder is left behind"


async def test_processes_end_when_their_parent_is_killed(tiny_bundle: Bundle, tmp_path: Path) -> None:
    with process(tiny_bundle, **QUICK, tmpdir=tmp_path) as server:
        workers = server.workers
        assert _files(tmp_path, "*/counter_*.db")
        server.signal(signal.SIGKILL)
        await eventually(lambda: not any(lives(pid) for pid in workers))
        assert not _files(tmp_path, "offramp-metrics-*"), "the metrics' folder is left behind"


def test_a_bad_start_is_one_line_and_status_1(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    bundle.graph(2).unlink()
    status, error = ended(start(bundle.path, log_level="error", **QUICK))
    assert status == 1
    assert re.fullmatch(r"offramp: .*segment_2\.onnx: .*\n", error)


def test_each_process_takes_a_gpu_of_its_own(tiny_bundle: Bundle) -> None:
    """There is none here, and each says which one it missed."""
    status, error = ended(start(tiny_bundle.path, log_level="error", **{**QUICK, "device": "cuda:4,cuda:5"}))
    assert status == 1
    assert re.fullmatch(r"offramp: device cuda:[45] was asked for, but CUDA does not work here: .*\n", error)


async def test_a_process_that_cannot_be_replaced_is_tried_again_and_the_last_ends_the_server(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    with process(bundle, **QUICK) as server:
        graph = bundle.graph(2)
        content = graph.read_bytes()
        graph.unlink()
        os.kill(server.workers[0], signal.SIGKILL)
        await asyncio.to_thread(server.wait_for, "segment_2.onnx")
        assert (await classify(server, "a good film")).status == 200
        graph.write_bytes(content)
        await _replaced(server)
        graph.unlink()
        for pid in server.workers:
            os.kill(pid, signal.SIGKILL)
        assert server.status() == 1
        assert "cannot start, and no other serves" in server.log


async def test_where_no_process_can_be_started_the_server_says_so() -> None:
    def exhausted(number: int) -> Any:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    def nothing(*_: Any) -> Any: ...

    workers = Workers(2, exhausted, on_loaded=nothing, on_end=nothing, on_death=nothing, grace_seconds=0.0)
    with pytest.raises(StartError, match=r"no server process can be started: .*temporarily unavailable"):
        await workers.run()


async def test_a_process_whose_successor_cannot_be_started_is_tried_again(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, **QUICK) as server:
        limits = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
        open_files = len(_files(Path(f"/proc/{server.pid}/fd"), "*"))
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (open_files - 1, limits[1]))
        os.kill(server.workers[0], signal.SIGKILL)
        await asyncio.to_thread(server.wait_for, "cannot be started: [Errno 24] Too many open files; another starts")
        assert (await classify(server, "a good film")).status == 200
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, limits)
        await _replaced(server)
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_processes_that_loaded_different_versions_are_no_success() -> None:
    """The bundle was changed between the first and the last of them."""

    def worker(new_version: str) -> Any:
        async def reload(model: str) -> Reloaded:
            return Reloaded(model, "1", new_version)

        loaded = asyncio.get_running_loop().create_future()
        loaded.set_result(True)
        return SimpleNamespace(loaded=loaded, models=("tiny",), line=SimpleNamespace(reload=reload))

    def nothing(*_: Any) -> Any: ...

    workers = Workers(2, nothing, on_loaded=nothing, on_end=nothing, on_death=nothing, grace_seconds=0.0)
    workers._workers = {1: worker("2"), 2: worker("3")}
    with pytest.raises(ReloadError, match="processes serve versions 2 and 3; reload again"):
        await workers.reload("tiny")
    with pytest.raises(ReloadError, match="no such model; this server has tiny"):
        await workers.reload("nobody")


async def test_what_a_killed_process_had_in_work_is_not_counted_any_more(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, **QUICK) as server:
        begun = [await _Begun.on(server) for _ in range(16)]
        await until(server, "inflight_requests", lambda count: count == 16)
        os.kill(server.workers[0], signal.SIGKILL)
        await _replaced(server)
        left = await metric(server, "inflight_requests")
        statuses = [await one.finish() for one in begun]
        assert statuses.count(200) == left
        assert statuses.count(None) == 16 - left
        await until(server, "inflight_requests", lambda count: count == 0)
        server.terminate()
        assert server.status() == 0
