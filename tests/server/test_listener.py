"""The listening socket: connections go to whoever has fewest, and none that waits is lost."""

import asyncio
import errno
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import server.listener
from server.listener import YIELD_SECONDS, Balance, Listener
from server.neighbours import Connections
from tests.server.conftest import eventually

pytestmark = pytest.mark.anyio


class Counting(asyncio.Protocol):
    """Counts its connections, and tells ``count`` as ours do."""

    def __init__(self, made: list[asyncio.Transport], count: Callable[[int], None] | None) -> None:
        self._made, self._count = made, count

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._made.append(transport)
        self._tell()

    def connection_lost(self, exc: Exception | None) -> None:
        self._made[:] = [transport for transport in self._made if not transport.is_closing()]
        self._tell()

    def _tell(self) -> None:
        if self._count is not None:
            self._count(len(self._made))


class Processes:
    """So many listeners of one socket, as if each were a process of its own."""

    def __init__(self, folder: Path, count: int, absent: int = 0) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = self._listening.getsockname()
        self.connections = Connections(folder, count)
        self.made: list[list[asyncio.Transport]] = [[] for _ in range(count)]
        self.listeners = [self._listener(folder, count, number) for number in range(1, count + 1 - absent)]
        self._writers: list[asyncio.StreamWriter] = []

    def _listener(self, folder: Path, count: int, number: int) -> Listener:
        # Each maps the file anew, as a process would.
        balance = Balance(Connections(folder, count), number)
        made = self.made[number - 1]
        return Listener(self._listening.dup(), lambda: Counting(made, balance.has), balance)

    @property
    def counts(self) -> list[int]:
        return [len(made) for made in self.made]

    async def connect(self, count: int) -> None:
        for _ in range(count):
            _, writer = await asyncio.open_connection(*self.address)
            self._writers.append(writer)

    async def close(self) -> None:
        for listener in self.listeners:
            await listener.close()
        for writer in self._writers:
            writer.close()
        for made in self.made:
            for transport in made:
                transport.close()
        self._listening.close()


@asynccontextmanager
async def processes(folder: Path, count: int, absent: int = 0) -> AsyncIterator[Processes]:
    started = Processes(folder, count, absent)
    try:
        yield started
    finally:
        await started.close()


@asynccontextmanager
async def clients_of(listening: socket.socket, count: int) -> AsyncIterator[list[asyncio.Transport]]:
    """So many clients of a listener of ``listening``; gives the connections that it has taken so far."""
    made: list[asyncio.Transport] = []
    with listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        listener = Listener(listening, lambda: Counting(made, None))
        writers = [(await asyncio.open_connection(*listening.getsockname()))[1] for _ in range(count)]
        try:
            yield made
        finally:
            for writer in writers:
                writer.close()
            await listener.close()
            for transport in made:
                transport.close()


async def test_connections_are_spread_evenly(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as server:
        for count in range(1, 13):
            await server.connect(1)
            await eventually(lambda count=count: sum(server.counts) == count)
            # Until nobody is still leaving the one before to others.
            await asyncio.sleep(3 * YIELD_SECONDS)
        assert server.counts == [4, 4, 4]


async def test_who_has_lost_connections_gets_the_next_ones(tmp_path: Path) -> None:
    async with processes(tmp_path, 2) as server:
        await server.connect(8)
        await eventually(lambda: sum(server.counts) == 8)
        for transport in list(server.made[1]):
            transport.close()
        await eventually(lambda: server.counts[1] == 0)
        before = server.counts[0]
        for _ in range(before):
            await asyncio.sleep(3 * YIELD_SECONDS)
            await server.connect(1)
        await eventually(lambda: sum(server.counts) == 2 * before)
        assert server.counts == [before, before]


async def test_a_process_that_hangs_keeps_no_client_waiting_for_long(tmp_path: Path) -> None:
    async with processes(tmp_path, 2, absent=1) as server:
        # As far as the others can know it is there: it has none, and takes none.
        server.connections.set(2, 0)
        await server.connect(10)
        await eventually(lambda: server.counts[0] == 10)


async def test_a_process_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    connections = Connections(tmp_path, 3)
    assert not connections.fewer_elsewhere(1), "nobody serves yet"
    connections.set(1, 5)
    connections.set(2, 4)
    assert connections.fewer_elsewhere(1)
    assert not connections.fewer_elsewhere(2)
    connections.leave(2)
    assert not connections.fewer_elsewhere(1)


async def test_who_has_left_is_not_counted_again_by_a_connection_that_ends(tmp_path: Path) -> None:
    connections = Connections(tmp_path, 2)
    balance = Balance(connections, 2)
    connections.set(1, 5)
    balance.has(1)
    balance.leave()
    balance.has(0)
    assert not connections.fewer_elsewhere(1)


async def test_whoever_waits_when_the_listener_ends_is_served() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    made: list[asyncio.Transport] = []
    listener = Listener(listening, lambda: Counting(made, None))
    # The event loop does not come to it before it ends.
    clients = [socket.create_connection(listening.getsockname()) for _ in range(5)]
    await listener.close()
    assert len(made) == 5
    for client, transport in zip(clients, made, strict=True):
        transport.write(b"served")
        client.close()
        transport.close()


async def test_without_files_to_spare_clients_wait_until_there_are(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(server.listener, "EXHAUSTED_SECONDS", 0.05)

    class Exhausted(socket.socket):
        left = 2

        def accept(self) -> tuple[socket.socket, object]:
            if self.left:
                self.left -= 1
                raise OSError(errno.EMFILE, "Too many open files")
            return super().accept()

    async with clients_of(Exhausted(), 1) as made:
        await eventually(lambda: len(made) == 1)
        assert caplog.text.count("no connection can be taken for 0.05 s: Too many open files") == 2


async def test_a_client_that_left_before_its_turn_costs_the_others_nothing() -> None:
    class Leaving(socket.socket):
        gone = 1

        def accept(self) -> tuple[socket.socket, object]:
            if self.gone:
                self.gone = 0
                super().accept()[0].close()
                raise ConnectionAbortedError
            return super().accept()

    async with clients_of(Leaving(), 3) as made:
        await eventually(lambda: len(made) == 2)
