"""The socket that connections come to: which process takes a new one, and the last ones before the end."""

import asyncio
import logging
import select
import socket
from collections.abc import Callable
from contextlib import suppress

from server.neighbours import Connections

logger = logging.getLogger("offramp")

# How long a new connection is left to whoever has fewer, and how often: who has fewest now may have begun to wait when
# it had not. A process that hangs, or is gone without a word, costs clients so much.
YIELD_SECONDS, YIELDS = 0.005, 2
# Without a file to spare no connection can be taken; whoever waits may be served when others have left.
EXHAUSTED_SECONDS = 1.0
# Taken at a time before others have their turn on the event loop.
MOST_AT_ONCE = 64


class Balance:
    """The share that one of several processes takes of a server's connections."""

    def __init__(self, connections: Connections, number: int) -> None:
        self._connections = connections
        self._number = number
        self._leaving = False

    def has(self, connections: int) -> None:
        """This process has so many now."""
        if not self._leaving:
            self._connections.set(self._number, connections)

    def leave(self) -> None:
        """This process takes no more."""
        self._leaving = True
        self._connections.leave(self._number)

    def fewer_elsewhere(self) -> bool:
        """Whether a new connection had better go to another process."""
        return self._connections.fewer_elsewhere(self._number)


class Listener:
    """Takes connections from a listening socket, on the running event loop.

    The kernel gives a connection that several processes could take to whichever asks first: an idle one takes all of a
    burst, and those of a client's pool stay where they are. So here whoever has more than another process lets that one
    go first.
    """

    def __init__(
        self, listening: socket.socket, protocol: Callable[[], asyncio.Protocol], balance: Balance | None = None
    ) -> None:
        """``protocol`` makes what serves a connection; ``balance`` is there where processes share the socket."""
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._protocol = protocol
        self._balance = balance
        self._pause: asyncio.TimerHandle | None = None
        self._yielded = 0
        self._waiting = select.poll()
        self._waiting.register(listening, select.POLLIN)
        self._beginning: set[asyncio.Task[object]] = set()
        listening.setblocking(False)
        if balance is not None:
            balance.has(0)
        self._watch()

    async def close(self) -> None:
        """Takes those that wait, and ends the listening: their clients know them as open, and may have sent a request,
        but the kernel resets them once no process listens any more."""
        if self._balance is not None:
            self._balance.leave()
        if self._pause is None:
            self._loop.remove_reader(self._listening.fileno())
        else:
            self._pause.cancel()
        with suppress(OSError):
            while self._take():
                pass
        self._listening.close()
        if self._beginning:
            await asyncio.wait(self._beginning)

    def _watch(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening.fileno(), self._on_connection)

    def _rest(self, seconds: float, then: Callable[[], None]) -> None:
        self._loop.remove_reader(self._listening.fileno())
        self._pause = self._loop.call_later(seconds, then)

    def _on_connection(self) -> None:
        if self._balance is not None and self._yielded < YIELDS and self._balance.fewer_elsewhere():
            self._yielded += 1
            self._rest(YIELD_SECONDS, self._after_others)
        else:
            # One at a time, so that others have theirs; those who were left the chance do not want it.
            self._take_some(1 if self._balance is not None and self._yielded < YIELDS else MOST_AT_ONCE)
            self._yielded = 0

    def _after_others(self) -> None:
        if not self._waiting.poll(0):
            self._yielded = 0
        self._watch()

    def _take_some(self, most: int) -> None:
        try:
            for _ in range(most):
                if not self._take():
                    return
        except OSError as error:
            logger.error("no connection can be taken for %g s: %s", EXHAUSTED_SECONDS, error.strerror)
            self._rest(EXHAUSTED_SECONDS, self._watch)

    def _take(self) -> bool:
        """Takes one that waits, if any does. Raises ``OSError`` where the process has no file left for it."""
        try:
            connection, _ = self._listening.accept()
        except (BlockingIOError, InterruptedError):
            return False
        except ConnectionError:
            # Its client has left again.
            return True
        connection.setblocking(False)
        # An answer is written in one piece: nothing is gained by waiting for more.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        beginning = self._loop.create_task(self._begin(connection))
        self._beginning.add(beginning)
        beginning.add_done_callback(self._beginning.discard)
        return True

    async def _begin(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, connection)
        except OSError:
            # Its client has left again.
            connection.close()
