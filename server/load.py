"""HTTP load from one thread: when each request was due, sent and answered.

Open loop: requests fall due at times fixed beforehand, whatever the server does, and a latency counts from the time
that a request was *due*. Else a server that stalls would hold up the requests that would have shown it ("coordinated
omission", Tene 2013). Closed loop: so many clients, each of which sends its next request once it has its answer.

Raw keep-alive connections on one selector and no event loop, because the load shares the machine's cores with the
server; what it costs is in docs/performance.md, with the command. Plain ``http`` on POSIX systems only.
"""

import gc
import random
import select
import selectors
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools
import numpy as np


class LoadError(Exception):
    """The load cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go: ``address`` for sockets, ``host`` for the header of that name, ``path`` before each route."""

    address: tuple[str, int]
    host: str
    path: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Raises :class:`LoadError` for what is no http URL with a host."""
        try:
            parts = urlsplit(url)
            port = parts.port or 80
        except ValueError as error:
            raise LoadError(f"{url}: {error}") from None
        if parts.scheme != "http" or not parts.hostname:
            raise LoadError(f"{url}: not a URL like http://localhost:8000")
        try:
            address = socket.getaddrinfo(parts.hostname, port, socket.AF_INET, socket.SOCK_STREAM)[0][4]
        except OSError as error:
            raise LoadError(f"{url}: {error}") from None
        return cls((str(address[0]), int(address[1])), parts.netloc.rpartition("@")[2], parts.path.rstrip("/"))

    def post(self, route: str, body: bytes, headers: Mapping[str, str] | None = None) -> bytes:
        """A POST of JSON as it goes over the wire."""
        lines = {"host": self.host, "content-type": "application/json", "content-length": str(len(body))}
        head = "".join(f"{name}: {value}\r\n" for name, value in {**lines, **(headers or {})}.items())
        return f"POST {self.path}{route} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request and its answer. ``due``, ``sent`` and ``done`` are seconds from the start of the load, ``request`` is
    its place among the requests; ``status`` is 0 where no answer came."""

    request: int
    due: float
    sent: float
    done: float
    status: int
    body: bytes

    @property
    def seconds(self) -> float:
        """The latency: from when it was due."""
        return self.done - self.due


def poisson(rate: float, seconds: float, seed: int) -> list[float]:
    """Times within ``seconds`` at which requests fall due: on average ``rate`` a second, independent of each other."""
    draw = random.Random(seed)
    times, now = [], draw.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += draw.expovariate(rate)
    return times


def open_loop(
    target: Target,
    requests: Sequence[bytes],
    due: Sequence[float],
    *,
    most_connections: int = 4096,
    patience: float = 30.0,
) -> list[Exchange]:
    """Sends request ``i`` (of ``requests``, in turn) when it falls ``due[i]`` seconds after the start.

    Returns when all are answered, or when nothing has come for ``patience`` seconds: then the rest has status 0.
    """
    arrivals = deque((at, number % len(requests)) for number, at in enumerate(due))
    return _Load(target, requests, arrivals, most_connections, lambda now: None).run(patience)


def closed_loop(
    target: Target,
    requests: Sequence[bytes],
    *,
    clients: int,
    seconds: float = float("inf"),
    most: float = float("inf"),
    patience: float = 30.0,
) -> list[Exchange]:
    """Sends ``requests`` in turn, ``clients`` at a time, until ``seconds`` have passed or ``most`` were sent."""
    sent = min(clients, int(min(most, clients)))

    def following(now: float) -> tuple[float, int] | None:
        nonlocal sent
        if now >= seconds or sent >= most:
            return None
        sent += 1
        return now, (sent - 1) % len(requests)

    arrivals = deque((0.0, number % len(requests)) for number in range(sent))
    return _Load(target, requests, arrivals, clients, following).run(patience)


class _Connection:
    """A socket and the request on its way through it. What httptools' parser calls is here too."""

    __slots__ = ("answered", "body", "complete", "due", "lasting", "out", "parser", "request", "sent", "socket")

    def __init__(self, target: Target) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket.connect_ex(target.address)
        self.parser = httptools.HttpResponseParser(self)
        self.body: list[bytes] = []
        self.out = b""
        self.answered = 0
        self.complete = self.lasting = False
        self.request, self.due, self.sent = -1, 0.0, 0.0

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.complete = True
        # Only in here does the parser still know.
        self.lasting = self.parser.should_keep_alive()


class _Load:
    def __init__(
        self,
        target: Target,
        requests: Sequence[bytes],
        arrivals: "deque[tuple[float, int]]",
        most_connections: int,
        following: Callable[[float], tuple[float, int] | None],
    ) -> None:
        """``arrivals`` are (due, request), in order of time; ``following`` says what an answer at a time leads to."""
        self._target, self._requests, self._arrivals = target, requests, arrivals
        self._most_connections, self._following = most_connections, following
        self._idle: list[_Connection] = []
        self._busy: set[_Connection] = set()
        self._done: list[Exchange] = []
        self._selector = selectors.DefaultSelector()

    def run(self, patience: float) -> list[Exchange]:
        # A pass of the collector over all exchanges takes milliseconds, which would look like the server's.
        collecting = gc.isenabled()
        gc.disable()
        self._start = latest = time.perf_counter()
        try:
            while self._arrivals or self._busy:
                wait = self._send_what_is_due()
                if wait < patience:
                    # A selector waits in whole milliseconds, rounded up; select() in microseconds.
                    select.select([self._selector], [], [], wait)
                    wait = 0.0
                events = self._selector.select(min(wait, patience))
                for key, mask in events:
                    self._serve(key.data, mask)
                now = time.perf_counter()
                latest = now if events or not self._busy else latest
                if now - latest > patience:
                    break
            now = self._now()
            unanswered = [(one.request, one.due, one.sent) for one in self._busy]
            unanswered += [(request, due, now) for due, request in self._arrivals]
            self._done += [Exchange(*one, now, 0, b"") for one in unanswered]
        finally:
            if collecting:
                gc.enable()
            for connection in [key.data for key in list((self._selector.get_map() or {}).values())]:
                connection.socket.close()
            self._selector.close()
        return self._done

    def _now(self) -> float:
        return time.perf_counter() - self._start

    def _send_what_is_due(self) -> float:
        """Returns the seconds until there is something to send again, if no answer comes before."""
        while self._arrivals:
            if not self._idle and len(self._busy) >= self._most_connections:
                return float("inf")
            wait = self._arrivals[0][0] - self._now()
            if wait > 0:
                return wait
            self._send(*self._arrivals.popleft())
        return float("inf")

    def _send(self, due: float, request: int) -> None:
        fresh = not self._idle
        connection = _Connection(self._target) if fresh else self._idle.pop()
        connection.request, connection.due, connection.sent = request, due, self._now()
        connection.out = self._requests[request]
        self._busy.add(connection)
        if fresh:
            # Not connected yet: it is written to when it can be.
            self._selector.register(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)
            return
        try:
            self._write(connection)
        except OSError:
            self._lose(connection)
            return
        if connection.out:
            self._selector.modify(connection.socket, selectors.EVENT_READ | selectors.EVENT_WRITE, connection)

    def _write(self, connection: _Connection) -> None:
        connection.out = connection.out[connection.socket.send(connection.out) :]

    def _serve(self, connection: _Connection, mask: int) -> None:
        try:
            if mask & selectors.EVENT_WRITE:
                self._write(connection)
                if not connection.out:
                    self._selector.modify(connection.socket, selectors.EVENT_READ, connection)
            if mask & selectors.EVENT_READ:
                received = connection.socket.recv(65536)
                if not received:
                    raise ConnectionResetError
                connection.parser.feed_data(received)
        except BlockingIOError:
            return
        except (OSError, httptools.HttpParserError):
            self._lose(connection)
            return
        if connection.complete:
            self._finish(connection)

    def _finish(self, connection: _Connection) -> None:
        now, body = self._now(), b"".join(connection.body)
        status = connection.parser.get_status_code()
        self._done.append(Exchange(connection.request, connection.due, connection.sent, now, status, body))
        connection.body.clear()
        connection.complete = False
        connection.answered += 1
        self._busy.discard(connection)
        if connection.lasting:
            self._idle.append(connection)
        else:
            self._close(connection)
        self._follow(now)

    def _follow(self, now: float) -> None:
        if (arrival := self._following(now)) is not None:
            self._arrivals.append(arrival)

    def _lose(self, connection: _Connection) -> None:
        """The connection is gone. Servers close idle ones, as they may: then its request goes out again on another."""
        self._close(connection)
        if connection not in self._busy:
            self._idle.remove(connection)
            return
        self._busy.discard(connection)
        if connection.answered and not connection.body:
            self._arrivals.appendleft((connection.due, connection.request))
            return
        now = self._now()
        self._done.append(Exchange(connection.request, connection.due, connection.sent, now, 0, b""))
        self._follow(now)

    def _close(self, connection: _Connection) -> None:
        self._selector.unregister(connection.socket)
        connection.socket.close()


@dataclass(frozen=True, slots=True)
class Summary:
    """What came of a load. Latencies are in ms, of answers with status 200 only; NaN where there is none.

    ``throughput`` is the rate of such answers within ``seconds``; ``late_p99`` is how late the load itself sent.
    """

    seconds: float
    requests: int
    statuses: dict[int, int]
    throughput: float
    p50: float
    p90: float
    p99: float
    longest: float
    late_p99: float

    @property
    def ok(self) -> int:
        return self.statuses.get(200, 0)


def summarise(exchanges: Sequence[Exchange], seconds: float | None = None) -> Summary:
    """``seconds`` is how long the load was meant to last; ``None``: until the last answer."""
    good = [one for one in exchanges if one.status == 200]
    if seconds is None:
        seconds = max((one.done for one in exchanges), default=0.0)
    within = sum(one.done <= seconds for one in good)
    late = 1e3 * np.array([one.sent - one.due for one in exchanges])
    p50, p90, p99, longest = percentiles([one.seconds for one in good], (50, 90, 99, 100))
    return Summary(
        seconds=seconds,
        requests=len(exchanges),
        statuses=dict(sorted(Counter(one.status for one in exchanges).items())),
        throughput=within / seconds if seconds else 0.0,
        p50=p50,
        p90=p90,
        p99=p99,
        longest=longest,
        late_p99=float(np.percentile(late, 99)) if len(late) else float("nan"),
    )


def percentiles(seconds: Sequence[float], wanted: Sequence[float]) -> Iterator[float]:
    """Percentiles of ``seconds`` in ms; NaN where there are none."""
    if not seconds:
        return iter([float("nan")] * len(wanted))
    return iter(float(value) for value in 1e3 * np.percentile(np.asarray(seconds), list(wanted)))
