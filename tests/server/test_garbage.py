"""Requests leave no cycles behind: the collector that would have to find them stops the whole server meanwhile."""

import asyncio
import gc
import json
import socket
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from models.bundle import Bundle
from server.listener import Listener
from server.protocol import bounded_http
from tests.server.conftest import serving
from tests.server.process import raw_request

pytestmark = pytest.mark.anyio


@contextmanager
def found_by_the_collector() -> Iterator[Counter[str]]:
    """What only the collector could free, by type."""
    found: Counter[str] = Counter()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield found
        gc.collect()
        found.update(f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def ours(found: Counter[str]) -> list[str]:
    """Those of the server, not of the client that these tests run in the same process."""
    return [name for name in found if name.startswith(("server.", "starlette.", "uvicorn.", "fastapi."))]


async def test_an_answered_request_is_freed_at_once(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        config = uvicorn.Config(served.app, log_config=None, http=bounded_http(30.0, lambda: False))
        config.load()
        state = uvicorn.server.ServerState()
        listening = socket.create_server(("127.0.0.1", 0))
        listener = Listener(
            listening, lambda: config.http_protocol_class(config=config, server_state=state, app_state={})
        )
        body = json.dumps({"inputs": "a good film", "quality": 0.99}).encode()

        reader, writer = await asyncio.open_connection(*listening.getsockname())

        async def ask(times: int) -> None:
            for _ in range(times):
                writer.write(raw_request("POST", "/classify", body, {"connection": "keep-alive"}))
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 ")
                length = next(line for line in head.split(b"\r\n") if line.startswith(b"content-length"))
                await reader.readexactly(int(length.split()[1]))

        await ask(3)
        with found_by_the_collector() as found:
            await ask(10)
            await asyncio.sleep(0.05)
        # A connection that ends is one, with its last request: a matter of connections, not of requests.
        assert ours(found) == []
        writer.close()
        await listener.close()


async def test_behind_another_server_too(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        await served.results("a good film")
        with found_by_the_collector() as found:
            for _ in range(10):
                await served.results("a good film", quality=0.99)
            await asyncio.sleep(0.05)
        assert ours(found) == []
