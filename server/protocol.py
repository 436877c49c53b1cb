"""HTTP/1.1 below the app: bounds on the size and time of a request's head, and our error shape for what is no HTTP."""

import asyncio
import functools
import re
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.errors import ApiError

# Other servers take 8 to 16 KiB of request line and headers; uvicorn with httptools collects without end.
MAX_HEAD_BYTES = 64 * 1024
_UPGRADE = re.compile(rb"(?i)(?<=\n)upgrade(?=[ \t]*:)")


def bounded_http(head_seconds: float) -> Any:
    """What uvicorn makes its protocols with."""
    return functools.partial(BoundedHttp, head_seconds=head_seconds)


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which answers 431 once a request's head exceeds ``MAX_HEAD_BYTES`` by more than one read, and
    408 where it has not arrived ``head_seconds`` after its first byte. A connection that sends nothing at all is closed
    after that time (between requests uvicorn's own, shorter time holds)."""

    def __init__(self, *args: Any, head_seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_seconds = head_seconds
        self._timer: asyncio.TimerHandle | None = None
        self._in_head = self._in_message = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_here()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        if was_in_head or not self._in_message:
            data = _without_upgrade(data)
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # A read in which a head begins may be mostly the body before it.
        self._head_bytes = self._head_bytes + len(data) if was_in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"request line and headers exceed {MAX_HEAD_BYTES} bytes", type="too_large"))

    def on_message_begin(self) -> None:
        self._in_head = self._in_message = True
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_is_here()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_message = False
        super().on_message_complete()

    def _await_head(self) -> None:
        if self._timer is None:
            self._timer = self.loop.call_later(self._head_seconds, self._too_late)

    def _head_is_here(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_late(self) -> None:
        self._timer = None
        if self._in_head and (self.cycle is None or self.cycle.response_complete):
            self._refuse(ApiError(408, f"the request did not arrive within {self._head_seconds:g} s"))
        else:
            # Nothing to answer yet, or the answer to the request before is still being written.
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1, or not valid"))

    def _refuse(self, error: ApiError) -> None:
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        status = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}[error.status]
        self.transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (error.status, status, head, bytes(response.body)))
        self.transport.close()


def _without_upgrade(data: bytes) -> bytes:
    """``data``, which begins in a request's head, with an ``Upgrade`` header of that head under a name that means
    nothing.

    We upgrade to nothing, so it is to be ignored (RFC 9110, 7.8); httptools drops the body of a request that has it.
    Java's own client sends ``Upgrade: h2c`` with every first request.
    """
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"Ignored", head) + end + rest
