"""The real process: uvicorn, sockets, signals."""

import asyncio
import json
import re
import resource
import socket
from pathlib import Path
from typing import Any

import pytest

from models.bundle import Bundle
from server.config import load_settings
from tests.server.conftest import some_texts
from tests.server.process import Process, ask, classify, ended, metric, process, raw_request, start, until
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.anyio

# Takes the tiny model long enough for things to happen meanwhile.
HEAVY = {"inputs": ["good film " * 30] * 48, "quality": 1.0}


async def all_taken_in(server: Process, requests: int) -> None:
    """Waits until so many heavy requests are in work, or answered already: the first may be before the last is read."""
    answered = 'requests_total{code="200",model="tiny",route="/classify"}'
    for _ in range(1000):
        if await metric(server, "inflight_requests") + await metric(server, answered) >= requests:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(server.log)


async def test_hundreds_of_connections_get_the_answers_of_their_own_texts(tiny_bundle: Bundle) -> None:
    texts = some_texts(40, seed=21)

    async def result(server: Process, text: str) -> dict[str, Any]:
        reply = await classify(server, text, quality=1.0)
        assert reply.status == 200, reply.body
        return reply.json()["results"][0]

    with process(tiny_bundle) as server:
        alone = [await result(server, text) for text in texts]
        many = await asyncio.gather(*(result(server, texts[place % 40]) for place in range(400)))
        for place, one in enumerate(many):
            assert one["label"] == alone[place % 40]["label"]
            assert one["score"] == pytest.approx(alone[place % 40]["score"], abs=1e-4)
        server.terminate()
        assert server.status() == 0


async def test_sigterm_under_load_loses_no_accepted_request_and_exits_0(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, runs=1, threads=1, drain_seconds=300) as server:
        asked = [asyncio.ensure_future(ask(server, "POST", "/classify", HEAVY)) for _ in range(20)]
        await all_taken_in(server, 20)
        server.terminate()
        replies = await asyncio.gather(*asked)
        assert [reply.status for reply in replies] == [200] * 20
        assert all(len(reply.json()["results"]) == 48 for reply in replies)
        assert server.status() == 0
        assert "readiness is off" in server.log


async def _keep_asking(server: Process) -> int:
    """Asks over connections that are kept for as long as the server keeps them, until nobody listens; how many requests
    were answered. Fails where one gets no answer."""
    request = raw_request("POST", "/classify", b'{"inputs": "a good film"}', {"connection": "keep-alive"})
    answered = 0
    while True:
        asked, lasting = 0, True
        try:
            reader, writer = await asyncio.open_connection(*server.address)
            while lasting:
                writer.write(request)
                head = await reader.readuntil(b"\r\n\r\n")
                declared = re.search(rb"content-length: (\d+)", head)
                assert declared
                await reader.readexactly(int(declared[1]))
                asked += 1
                assert head.startswith(b"HTTP/1.1 200 ")
                lasting = b"connection: close" not in head
            writer.close()
        except ConnectionError:
            # The kernel can't tell a client that comes as the listener goes.
            assert not asked, "a connection that was kept was closed upon a request"
            return answered
        answered += asked


@pytest.mark.parametrize("workers", [1, 2])
async def test_the_end_of_the_server_closes_no_connection_upon_a_request(tiny_bundle: Bundle, workers: int) -> None:
    with process(tiny_bundle, workers=workers, threads=1, measure_seconds=0) as server:
        clients = [asyncio.ensure_future(_keep_asking(server)) for _ in range(40)]
        await until(server, 'requests_total{code="200",model="tiny",route="/classify"}', lambda count: count > 200)
        server.terminate()
        assert sum(await asyncio.gather(*clients)) > 200
        assert server.status() == 0


async def test_connections_are_kept_while_clients_of_ours_would_keep_them(tiny_bundle: Bundle) -> None:
    """Pools keep them for 15 s (aiohttp) to 60 s (nginx, AWS)."""
    with process(tiny_bundle, keep_alive_seconds=1) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        writer.write(raw_request("GET", "/livez", b"", {"connection": "keep-alive"}))
        assert (await reader.read()).endswith(b'{"status":"alive"}'), "kept for a second, then closed"
        writer.close()
    assert load_settings().keep_alive_seconds > 60


async def test_more_connections_are_served_than_the_shell_allows_files(tiny_bundle: Bundle) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 400:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        started = start(tiny_bundle.path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 400), hard))
    try:
        server = Process(started)
        pairs = [await asyncio.open_connection(*server.address) for _ in range(150)]
        for reader, writer in pairs:
            writer.write(raw_request("GET", "/livez", b""))
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        started.kill()
        started.wait(10)


async def test_a_connection_without_requests_holds_up_the_end_for_a_last_call_only(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, drain_seconds=600) as server:
        fresh, writer = await asyncio.open_connection(*server.address)
        kept, asking = await asyncio.open_connection(*server.address)
        asking.write(raw_request("GET", "/livez", b"", {"connection": "keep-alive"}))
        await kept.readuntil(b'{"status":"alive"}')
        server.terminate()
        assert (await fresh.read(), await kept.read()) == (b"", b"")
        assert server.status() == 0
        writer.close()
        asking.close()


async def test_after_sigterm_answers_ask_clients_to_go_elsewhere(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, shutdown_delay_seconds=600) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        for told in (False, True):
            writer.write(raw_request("GET", "/livez", b"", {"connection": "keep-alive"}))
            head = await reader.readuntil(b"\r\n\r\n")
            assert (b"connection: close" in head) is told
            await reader.readuntil(b'{"status":"alive"}')
            if not told:
                server.terminate()
                await asyncio.to_thread(server.wait_for, "readiness is off")
        assert await reader.read() == b""
        writer.close()


async def test_after_sigterm_readiness_is_off_while_requests_are_still_served(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, shutdown_delay_seconds=3) as server:
        assert (await ask(server, "GET", "/readyz")).status == 200
        server.terminate()
        await asyncio.to_thread(server.wait_for, "readiness is off")
        ready = await ask(server, "GET", "/readyz")
        assert ready.status == 503
        assert ready.json()["error"]["type"] == "draining"
        assert (await classify(server, "a film")).status == 200
        assert server.status() == 0


async def test_work_that_outlasts_the_drain_is_given_up(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, runs=1, threads=1, drain_seconds=0) as server:
        asked = [asyncio.ensure_future(ask(server, "POST", "/classify", HEAVY)) for _ in range(20)]
        await all_taken_in(server, 20)
        server.terminate()
        replies = await asyncio.gather(*asked)
        late = [reply.json()["error"]["type"] for reply in replies if reply.status != 200]
        assert late
        assert set(late) == {"draining"}
        assert server.status() == 0
        assert "Traceback" not in server.log


# A body that comes in several parts is not read on when it is complete.
@pytest.mark.parametrize("padding", [0, 400_000])
async def test_clients_that_leave_free_their_work_and_disturb_nobody(tiny_bundle: Bundle, padding: int) -> None:
    request = raw_request("POST", "/classify", json.dumps(HEAVY).encode() + b" " * padding)
    with process(tiny_bundle, runs=1, threads=1) as server:
        leavers = [await asyncio.open_connection(*server.address) for _ in range(20)]
        for _, writer in leavers:
            writer.write(request)
        await until(server, "inflight_requests", lambda count: count >= 15)
        await until(server, 'queue_depth{model="tiny",segment="1"}', lambda count: count >= 100)
        for _, writer in leavers:
            writer.close()
        # And some that leave in the middle of their body.
        for _ in range(5):
            _, writer = await asyncio.open_connection(*server.address)
            writer.write(request[:200])
            await writer.drain()
            writer.close()
        gone = 'requests_total{code="499",model="tiny",route="/classify"}'
        await until(server, gone, lambda count: count >= 15)
        assert await metric(server, 'cancelled_total{model="tiny"}') > 0
        assert (await classify(server, "a film")).status == 200
        await until(server, "inflight_requests", lambda count: count == 0)
        assert await metric(server, 'queue_depth{model="tiny",segment="1"}') == 0
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_a_client_that_leaves_with_requests_behind_the_one_in_work_frees_that_one(tiny_bundle: Bundle) -> None:
    kept = {"connection": "keep-alive"}
    heavy = raw_request("POST", "/classify", json.dumps(HEAVY).encode(), kept)
    small = raw_request("POST", "/classify", b'{"inputs": "a film"}', kept)
    with process(tiny_bundle, workers=1, threads=1) as server:
        leavers = [await asyncio.open_connection(*server.address) for _ in range(10)]
        for _, writer in leavers:
            writer.write(heavy + small + small)
        await until(server, "inflight_requests", lambda count: count >= 8)
        for _, writer in leavers:
            writer.transport.abort()
        await until(server, "inflight_requests", lambda count: count == 0)
        assert await metric(server, 'requests_total{code="499",model="tiny",route="/classify"}') >= 8
        assert await metric(server, 'cancelled_total{model="tiny"}') > 0
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_texts_are_never_logged_at_any_level(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, log_level="debug", access_log=True) as server:
        assert (await classify(server, "xyzzy film")).status == 200
        for document in (
            {"inputs": {"text": "xyzzy", "text_pair": "xyzzy"}},
            {"xyzzy": 1},
            {"inputs": "xyzzy", "quality": "xyzzy", "model": "xyzzy"},
            b'{"inputs": "xyzzy',
            {"inputs": "xyzzy poison"},
        ):
            reply = await ask(server, "POST", "/classify", document)
            assert reply.status >= 400
            assert b"xyzzy" not in reply.body
        server.terminate()
        assert server.status() == 0
        assert "POST /classify 200" in server.log
        assert "xyzzy" not in server.log


@pytest.mark.parametrize(
    ("sent", "status", "kind"),
    [
        (b"\x16\x03\x01\x02\x00 a TLS greeting\r\n\r\n", 400, "malformed"),
        (b"POST /classify HTTP/1.1\r\nContent-Length: -1\r\n\r\n", 400, "malformed"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Endless: " + b"a" * 2_000_000, 431, "too_large"),
        (b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X-Many: a\r\n" * 200_000, 431, "too_large"),
    ],
)
async def test_what_is_no_request_gets_the_one_error_shape(
    tiny_bundle: Bundle, sent: bytes, status: int, kind: str
) -> None:
    with process(tiny_bundle) as server:
        reader, writer = await asyncio.open_connection(*server.address)
        answer = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
        # Bit by bit: what a closed connection has not read makes the kernel take back the answer.
        for start in range(0, len(sent), 10_000):
            writer.write(sent[start : start + 10_000])
            await asyncio.wait((answer,), timeout=0.02)
            if answer.done():
                break
        head = (await answer).decode()
        length = int(next(line.split(":")[1] for line in head.splitlines() if line.startswith("content-length")))
        error = json.loads(await reader.readexactly(length))["error"]
        writer.close()
        assert (int(head.split()[1]), error["type"], set(error)) == (status, kind, {"type", "message", "param"})
        assert (await classify(server, "a film")).status == 200


def test_a_taken_port_is_one_line_and_status_1(tiny_bundle: Bundle) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, error = ended(start(tiny_bundle.path, port=port, log_level="error"))
    assert status == 1
    assert error == f"offramp: cannot listen on 127.0.0.1:{port}: Address already in use\n"


def test_a_changed_bundle_is_one_line_and_status_1(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path)
    graph = bundle.graph(2)
    content = bytearray(graph.read_bytes())
    content[100] ^= 1
    graph.write_bytes(content)
    status, error = ended(start(bundle.path, log_level="error"))
    assert status == 1
    assert re.fullmatch(r"offramp: .*segment_2\.onnx: sha256 is not the manifest's.*\n", error)


def test_cuda_where_there_is_none_is_one_line_and_status_1(tiny_bundle: Bundle) -> None:
    status, error = ended(start(tiny_bundle.path, device="cuda:7", log_level="error"))
    assert status == 1
    assert re.fullmatch(r"offramp: device cuda:7 was asked for, but CUDA does not work here: .*\n", error)


def test_a_bad_setting_is_one_line_and_status_1(tiny_bundle: Bundle) -> None:
    status, error = ended(start(tiny_bundle.path, max_queue="many"))
    assert status == 1
    assert re.fullmatch(r"offramp: setting OFFRAMP_MAX_QUEUE: .*\n", error)


def test_a_second_signal_ends_it_at_once(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, shutdown_delay_seconds=600) as server:
        server.terminate()
        server.wait_for("readiness is off")
        server.terminate()
        assert server.status() == 0
        assert "Traceback" not in server.log


async def test_a_second_signal_gives_up_what_is_still_running(tiny_bundle: Bundle) -> None:
    with process(tiny_bundle, runs=1, threads=1, drain_seconds=600) as server:
        asked = [asyncio.ensure_future(ask(server, "POST", "/classify", HEAVY)) for _ in range(20)]
        await all_taken_in(server, 20)
        server.terminate()
        await asyncio.to_thread(server.wait_for, "readiness is off")
        server.terminate()
        replies = await asyncio.gather(*asked)
        assert {reply.status for reply in replies} <= {200, 503}
        assert server.status() == 0
        assert "Traceback" not in server.log
