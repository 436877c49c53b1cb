"""HTTP/1.1 below the app: bounds on the size and time of a request's head, our error shape for what is no HTTP, and an
end of connections that leaves the client its answer."""

import asyncio
import functools
import re
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.errors import ApiError

# Other servers take 8 to 16 KiB of request line and headers; uvicorn with httptools collects without end.
MAX_HEAD_BYTES = 64 * 1024
# What a client that was answered before its request was complete may still send, to get at its answer.
MAX_DROPPED_BYTES = 64 * 1024 * 1024
# How long the end of the server waits on a connection with no request in work for one that is on its way: nobody tells
# a client that the connection ends, until it does. As long as nginx's `keepalive_min_timeout` is meant for.
LAST_CALL_SECONDS = 1.0
_UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade(?=[ \t]*:)")
_UPGRADE_MESSAGE = "Upgrade behind a body, or in parts: nothing is upgraded here"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


DEPARTURE = "offramp.departure"
"""The key of a request's :class:`Departure` in its ASGI scope."""


class Departure:
    """The leaving of a request's client. ASGI tells it to whoever waits for a message; a task that waits, for each
    request, takes longer than reading its body."""

    __slots__ = ("_call", "_happened", "_watch")

    def __init__(self, watch: Callable[[], None]) -> None:
        """``watch`` is called once somebody wants to know: a large body is no longer read on when it is complete, and
        then the end of its connection goes unnoticed."""
        self._watch = watch
        self._happened = False
        self._call: Callable[[], None] | None = None

    def then(self, call: Callable[[], None] | None) -> None:
        """``call`` is called when it happens, at once if it has; nobody is where it is ``None``."""
        self._call = call
        if call is None:
            return
        self._watch()
        if self._happened:
            call()

    def happen(self) -> None:
        self._happened = True
        if self._call is not None:
            self._call()


def bounded_http(head_seconds: float, draining: Callable[[], bool], count: Callable[[int], None] | None = None) -> Any:
    """What uvicorn makes its protocols with; ``draining`` says whether the server is told to end, and ``count`` is told
    how many connections it has whenever that changes."""
    return functools.partial(BoundedHttp, head_seconds=head_seconds, draining=draining, count=count)


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, with these differences.

    - 431 where a request's head, its trailers or what frames one chunk exceed ``MAX_HEAD_BYTES``, however the bytes
      arrive; behind a body, whose end is not seen, by as much again at most. 408 where the head has not arrived
      ``head_seconds`` after its first byte. A connection that sends nothing at all is closed after that time (between
      requests ``timeout_keep_alive`` of uvicorn's holds).
    - What is no HTTP gets 400 in our shape, once the requests before it have been answered.
    - Whoever is answered before the request was complete gets ``Connection: close``. After the last answer of a
      connection what is still being sent is read and dropped until the client closes too, up to ``MAX_DROPPED_BYTES``
      and ``head_seconds``: a connection closed upon unread bytes is reset, and the client may never see the answer
      (RFC 9112, 9.6).
    - Head and body of an answer leave in one write: one packet, and one system call less.
    - Once the server is told to end, the answer to a request that comes is the last one of its connection, and says so.
      A connection with no request in work is not closed at once then, upon a request that has come or is coming, but
      after ``LAST_CALL_SECONDS`` without one.
    - A client that leaves is noticed by the request in work too where it has sent others behind it; uvicorn tells the
      last one only.
    """

    def __init__(
        self,
        *args: Any,
        head_seconds: float,
        draining: Callable[[], bool],
        count: Callable[[int], None] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._seconds = head_seconds
        self._draining = draining
        self._count = count
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = self._in_message = False
        # Of the head, and behind it since the last byte of the body: of trailers, of what frames chunks.
        self._bytes = 0
        # Whether what is being parsed begins with a head, so that all of it counts as one's.
        self._begins_with_head = False
        # httptools reads nothing right that follows an Upgrade header which it was shown.
        self._upgrading = False
        self._keep_alive = self._ending = self._lingering = False
        self._dropped = 0
        # The request in work, or the last one that was: uvicorn's own ``cycle`` is the last that came.
        self._in_work: Any = None
        # The answer to what came behind requests that are still in work.
        self._refusal: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        self._writer = _Transport(transport, self)
        super().connection_made(self._writer)  # type: ignore[arg-type]
        self._tell_count()
        self._start_timer(self._too_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._in_work is not None:
            self._in_work.disconnected = True
            self._in_work.message_event.set()
        super().connection_lost(exc)
        if self._in_work is not None and not self._in_work.response_complete:
            self._in_work.scope[DEPARTURE].happen()
        self._tell_count()

    def _tell_count(self) -> None:
        if self._count is not None:
            self._count(len(self.connections))

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._dropped += len(data)
            if self._dropped > MAX_DROPPED_BYTES:
                self._socket.close()
            return
        start = 0
        while start < len(data) and not self._reads_no_more:
            self._begins_with_head = not self._in_message
            if self._begins_with_head:
                self._bytes = 0
            elif self._bytes >= MAX_HEAD_BYTES:
                error = f"request line and headers exceed {MAX_HEAD_BYTES} bytes"
                self._refuse(ApiError(431, error, type="too_large"))
                return
            # No more than may come: a longer part could hold the rest of a head that is too long, and its request would
            # be in work, or refused for something else, before we saw its size.
            stop = start + MAX_HEAD_BYTES - self._bytes
            if self._begins_with_head or self._in_head:
                end = data.find(b"\r\n\r\n", start, stop)
                part = _without_upgrade(data[start : stop if end < 0 else end + 4])
            else:
                part = data[start:stop]
            start += len(part)
            self._bytes += len(part)
            super().data_received(part)
            if self._upgrading and self._in_message:
                self._refuse(ApiError(400, _UPGRADE_MESSAGE))

    def on_message_begin(self) -> None:
        self._in_head = self._in_message = True
        if not self._begins_with_head:
            # What it begins in may be mostly the body before it.
            self._bytes = 0
        self._begins_with_head = False
        self._start_timer(self._too_late)
        super().on_message_begin()
        self.scope[DEPARTURE] = Departure(self.flow.resume_reading)  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        if not self.pipeline:
            self._in_work = self.cycle
        self._in_head = False
        self._bytes = 0
        if self.parser.should_upgrade():
            # The last request that is read here.
            self._upgrading = self._ending = True
        self._stop_timer()
        # Until all of it is here: an answer before that is the last one.
        self._keep_alive, self.cycle.keep_alive = self.cycle.keep_alive, False

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers are no headers (RFC 9110, 6.5.1).
        if self._in_head:
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_message = False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keep_alive and not (self._ending or self._draining())
        super().on_message_complete()

    def on_response_complete(self) -> None:
        self._writer.end()
        if self._refusal is not None and not self.pipeline and not self.transport.is_closing():
            self._answer(self._refusal)
        if self.pipeline:
            self._in_work = self.pipeline[-1][0]
        super().on_response_complete()

    def shutdown(self) -> None:
        self._ending = True
        if self.cycle is not None and not self.cycle.response_complete:
            super().shutdown()
        elif not self._in_head:
            self._start_timer(self._too_late, LAST_CALL_SECONDS)

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1, or not valid"))

    def timeout_keep_alive_handler(self) -> None:
        # There is no answer that could be lost.
        self._socket.close()

    @property
    def is_closing(self) -> bool:
        return self._lingering or self._socket.is_closing()

    @property
    def _reads_no_more(self) -> bool:
        return self._refusal is not None or self._upgrading or self.is_closing

    def _start_timer(self, then: Callable[[], None], seconds: float | None = None) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(self._seconds if seconds is None else seconds, then)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._refuse(ApiError(408, f"the request did not arrive within {self._seconds:g} s"))
        else:
            # Nothing to answer yet, or the answer to the request before is still being written.
            self._writer.end()
            self._socket.close()

    def _refuse(self, error: ApiError) -> None:
        """Answers what is being received with ``error``, in its turn, and takes nothing more."""
        cycle, in_body = self.cycle, self._in_message and not self._in_head
        self._stop_timer()
        if in_body and (waiting := next((one for one in self.pipeline if one[0] is cycle), None)):
            self.pipeline.remove(waiting)
        elif in_body:
            # The app has this request, and waits for the rest of it.
            cycle.disconnected = True
            cycle.message_event.set()
            if cycle.response_started:
                self._writer.end()
                self._socket.close()
            else:
                self._answer(error)
            return
        elif cycle is None or cycle.response_complete:
            self._answer(error)
            return
        self._refusal = error
        self.flow.pause_reading()

    def _answer(self, error: ApiError) -> None:
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        self._socket.write(
            b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (error.status, _PHRASES[error.status], head, bytes(response.body))
        )
        self.linger()

    def linger(self) -> None:
        """Says that nothing more will come from here, and reads on for a while."""
        if self._lingering or self._socket.is_closing():
            return
        self._lingering = True
        self._writer.end()
        # The end of the server need not wait for it.
        self.connections.discard(self)
        self._tell_count()
        self._start_timer(self._socket.close)
        self._socket.write_eof()
        self.flow.resume_reading()


class _Transport:
    """A connection as uvicorn knows it: its end is the protocol's affair, and the head of an answer waits for what
    follows."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedHttp) -> None:
        self._protocol = protocol
        self._write = transport.write
        self._head: bytes | None = None
        self._in_answer = False
        self.close = protocol.linger
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading
        self.get_extra_info = transport.get_extra_info

    def write(self, data: bytes) -> None:
        if self._head is not None:
            self._write(self._head + data)
            self._head = None
        elif self._in_answer or data == _CONTINUE:
            self._write(data)
        else:
            self._head, self._in_answer = data, True

    def end(self) -> None:
        """The answer is complete, or cut short."""
        if self._head is not None:
            # Nothing follows: the answer to HEAD.
            self._write(self._head)
        self._head, self._in_answer = None, False

    def is_closing(self) -> bool:
        return self._protocol.is_closing


def _without_upgrade(head: bytes) -> bytes:
    """``head``, part of a request's, with its ``Upgrade`` header under a name that means nothing and is as long.

    We upgrade to nothing, so it is to be ignored (RFC 9110, 7.8); httptools drops the body of a request that has it.
    Java's own client sends ``Upgrade: h2c`` with every first request.
    """
    return _UPGRADE.sub(b"Ignored", head)
