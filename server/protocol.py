"""HTTP/1.1 below the app: a bound on the head of a request, and our error shape for what is no HTTP at all."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from server.api.errors import ApiError

# Other servers take 8 to 16 KiB of request line and headers; uvicorn with httptools collects without end.
MAX_HEAD_BYTES = 64 * 1024


class BoundedHttp(HttpToolsProtocol):
    """Uvicorn's protocol, which answers 431 once a request's head exceeds ``MAX_HEAD_BYTES`` by more than one read."""

    _in_head = False
    _head_bytes = 0

    def data_received(self, data: bytes) -> None:
        was_in_head = self._in_head
        super().data_received(data)
        if not self._in_head or self.transport.is_closing():
            return
        # A read in which a head begins may be mostly the body before it.
        self._head_bytes = self._head_bytes + len(data) if was_in_head else 0
        if self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"request line and headers exceed {MAX_HEAD_BYTES} bytes", type="too_large"))

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "this is not HTTP/1.1, or not valid"))

    def _refuse(self, error: ApiError) -> None:
        response = error.response()
        headers = [*response.raw_headers, (b"connection", b"close")]
        head = b"".join(name + b": " + value + b"\r\n" for name, value in headers)
        status = {400: b"Bad Request", 431: b"Request Header Fields Too Large"}[error.status]
        self.transport.write(b"HTTP/1.1 %d %s\r\n%s\r\n%s" % (error.status, status, head, bytes(response.body)))
        self.transport.close()
