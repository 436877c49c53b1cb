"""The real process: uvicorn, sockets, signals."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from models.bundle import Bundle
from tests.server.conftest import error_of, some_texts
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from server.app import run
from server.config import StartError, load_settings
try:
    settings = load_settings()
except StartError as error:
    sys.exit(f"offramp: {error}")
sys.exit(run(settings))
"""


def _start(*bundles: Path, **settings: Any) -> "subprocess.Popen[str]":
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OFFRAMP_")}
    given = {"bundles": ":".join(map(str, bundles)), "port": 0} | settings
    environment |= {f"OFFRAMP_{name.upper()}": str(value) for name, value in given.items()}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
    )


class Process:
    """A running server: its address, its log so far, and its end."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self._lines: list[str] = []
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        assert self._listening.wait(60), self.log
        found = re.search(r"listening on (http://\S+)", self.log)
        assert found, self.log
        self.url = found[1]

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if "listening on" in line:
                self._listening.set()
        self._listening.set()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def status(self) -> int:
        """The exit status, once it has ended."""
        status = self._process.wait(60)
        self._reader.join(10)
        return status


@contextmanager
def process(bundle: Bundle, **settings: Any) -> Iterator[Process]:
    started = _start(bundle.path, **settings)
    try:
        yield Process(started)
    finally:
        if started.poll() is None:
            started.kill()
        started.wait(10)


def _client(server: Process, connections: int = 50) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(base_url=server.url, limits=limits, timeout=60)


async def _metric(client: httpx.AsyncClient, series: str) -> float:
    page = (await client.get("/metrics")).text
    found = re.search(rf"^offramp_{re.escape(series)} (\S+)$", page, re.MULTILINE)
    return float(found[1]) if found else 0.0


async def _until(client: httpx.AsyncClient, series: str, value: float) -> None:
    for _ in range(600):
        if await _metric(client, series) >= value:
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"{series} never reached {value}")


async def test_hundreds_of_connections_get_the_answers_of_their_own_texts(tiny_bundle: Bundle) -> None:
    texts = some_texts(40, seed=21)
    with process(tiny_bundle) as server:
        async with _client(server, connections=200) as client:

            async def ask(text: str) -> dict[str, Any]:
                response = await client.post("/classify", json={"inputs": text, "quality": 1.0})
                assert response.status_code == 200, response.text
                return response.json()["results"][0]

            alone = [await ask(text) for text in texts]
            many = await asyncio.gather(*(ask(texts[place % 40]) for place in range(400)))
        for place, result in enumerate(many):
            assert result["label"] == alone[place % 40]["label"]
            assert result["score"] == pytest.approx(alone[place % 40]["score"], abs=1e-4)
        server.terminate()
        assert server.status() == 0


async def test_sigterm_under_load_loses_no_accepted_request_and_exits_0(tiny_bundle: Bundle) -> None:
    heavy = {"inputs": ["good film " * 30] * 128, "quality": 1.0}
    with process(tiny_bundle, max_queue=10_000, workers=1, threads=1) as server:
        async with _client(server) as client:
            asked = [asyncio.ensure_future(client.post("/classify", json=heavy)) for _ in range(20)]
            async with _client(server) as other:
                await _until(other, "inflight_requests", 20)
            server.terminate()
            responses = await asyncio.gather(*asked)
            assert Counter(response.status_code for response in responses) == {200: 20}
            assert all(len(response.json()["results"]) == 128 for response in responses)
        assert server.status() == 0
        assert "readiness is off" in server.log


async def test_after_sigterm_readiness_is_off_while_requests_are_still_served(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, shutdown_delay_seconds=3) as server:
        async with _client(server) as client:
            assert (await client.get("/readyz")).status_code == 200
            server.terminate()
            for _ in range(100):
                ready = await client.get("/readyz")
                if ready.status_code == 503:
                    break
                await asyncio.sleep(0.01)
            assert error_of(ready)["type"] == "draining"
            assert (await client.post("/classify", json={"inputs": "a film"})).status_code == 200
        assert server.status() == 0


async def test_work_that_outlasts_the_drain_is_given_up(tiny_bundle: Bundle) -> None:
    heavy = {"inputs": ["good film " * 30] * 128, "quality": 1.0}
    with process(tiny_bundle, max_queue=10_000, workers=1, threads=1, drain_seconds=0) as server:
        async with _client(server) as client:
            asked = [asyncio.ensure_future(client.post("/classify", json=heavy)) for _ in range(20)]
            async with _client(server) as other:
                await _until(other, "inflight_requests", 20)
            server.terminate()
            await asyncio.gather(*asked, return_exceptions=True)
        assert server.status() == 0


async def test_clients_that_leave_free_their_work_and_disturb_nobody(tiny_bundle: Bundle) -> None:
    body = json.dumps({"inputs": ["good film " * 30] * 128, "quality": 1.0}).encode()
    head = f"POST /classify HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with process(tiny_bundle, max_queue=10_000, workers=1, threads=1) as server:
        address = server.url.removeprefix("http://").split(":")
        async with _client(server) as client:
            leavers = [socket.create_connection((address[0], int(address[1]))) for _ in range(20)]
            for leaver in leavers:
                await asyncio.to_thread(leaver.sendall, head + body)
            await _until(client, "inflight_requests", 15)
            for leaver in leavers:
                leaver.close()
            # And some that leave in the middle of their body.
            for _ in range(5):
                with socket.create_connection((address[0], int(address[1]))) as half:
                    half.sendall(head + body[:100])
            await _until(client, 'requests_total{code="499",model="tiny",route="/classify"}', 10)
            assert await _metric(client, 'cancelled_total{model="tiny"}') > 0
            response = await client.post("/classify", json={"inputs": "a film"})
            assert response.status_code == 200
            for _ in range(600):
                if await _metric(client, "inflight_requests") == 0:
                    break
                await asyncio.sleep(0.02)
            assert await _metric(client, "inflight_requests") == 0
            assert await _metric(client, 'queue_depth{model="tiny",segment="1"}') == 0
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_texts_are_never_logged_at_any_level(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, log_level="debug", access_log=True) as server:
        async with _client(server) as client:
            for document in (
                {"inputs": "xyzzy film"},
                {"inputs": {"text": "xyzzy", "text_pair": "xyzzy"}},
                {"xyzzy": 1},
            ):
                response = await client.post("/classify", json=document)
                assert response.status_code == 200 or "xyzzy" not in response.json()["error"]["message"]
            await client.post("/classify", content=b'{"inputs": "xyzzy')
            await client.post("/classify", json={"inputs": "xyzzy poison"})
        server.terminate()
        assert server.status() == 0
        assert "POST /classify 200" in server.log
        assert "xyzzy" not in server.log


def _end(started: "subprocess.Popen[str]") -> tuple[int, str]:
    _, error = started.communicate(timeout=60)
    return started.returncode, error


def test_a_taken_port_is_one_line_and_status_1(tiny_bundle: Bundle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, error = _end(_start(tiny_bundle.path, port=port, log_level="error"))
    assert status == 1
    assert error == f"offramp: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_changed_bundle_is_one_line_and_status_1(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    graph = bundle.graph(2)
    content = bytearray(graph.read_bytes())
    content[100] ^= 1
    graph.write_bytes(content)
    status, error = _end(_start(bundle.path, log_level="error"))
    assert status == 1
    assert re.fullmatch(r"offramp: .*segment_2\.onnx: sha256 is not the manifest's.*\n", error)


def test_cuda_where_there_is_none_is_one_line_and_status_1(tiny_bundle: Bundle) -> None:
    status, error = _end(_start(tiny_bundle.path, device="cuda:7", log_level="error"))
    assert status == 1
    assert re.fullmatch(r"offramp: device cuda:7 was asked for, but CUDA does not work here: .*\n", error)


def test_a_bad_setting_is_one_line_and_status_1(tiny_bundle: Bundle) -> None:
    status, error = _end(_start(tiny_bundle.path, max_queue="many"))
    assert status == 1
    assert re.fullmatch(r"offramp: setting OFFRAMP_MAX_QUEUE: .*\n", error)


def test_a_second_signal_ends_it_at_once(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, shutdown_delay_seconds=600) as server:
        server.terminate()
        while "readiness is off" not in server.log:
            time.sleep(0.01)
        server.terminate()
        server.status()
