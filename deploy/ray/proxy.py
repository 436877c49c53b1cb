"""What Ray Serve's proxy says by itself, in our error shape.

Ray's proxies answer in plain text where no replica can: 503 and 429 beyond ``max_queued_requests``, 408 after
``request_timeout_s``, 404 before the application is there, and a 500 from the HTTP server where a replica dies with a
request. ``RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=deploy.ray.proxy:middlewares`` in each node's environment mends it.
"""

from collections.abc import Iterable

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ApiError

_MESSAGES = {
    404: "no such route; the application may not be there yet",
    429: "too many requests are waiting for a replica; try again",
    503: "no replica can take this request now; try again",
    504: "no replica answered in time; try again",
}
# Ray says 408 where a replica takes too long, which is what HTTP calls a client that does.
_STATUSES = {408: 504}
_LOST = "the replica that had this request ended before it answered; try again"


def middlewares() -> list[Middleware]:
    """What Ray Serve wraps its proxies' HTTP servers in."""
    return [Middleware(OurErrors)]


class OurErrors:
    """Turns plain-text errors of the proxy into ours, and silence where a replica has died into 503.

    Classification changes nothing, so whoever gets that 503 may ask again. Ray's own routes (``/-/healthz``) stay as
    they are.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].startswith("/-/"):
            await self._app(scope, receive, send)
            return
        begun = replaced = False

        async def in_our_shape(message: Message) -> None:
            nonlocal begun, replaced
            if message["type"] == "http.response.start":
                begun = True
                headers = list(message["headers"])
                given: int = message["status"]
                status = _STATUSES.get(given, given)
                replaced = status >= 400 and _value(headers, b"content-type").startswith(b"text/plain")
                if replaced:
                    await answer(status, _MESSAGES.get(status, "the proxy refused this request"), headers)
                else:
                    await send({**message, "headers": list(_once(headers, b"x-request-id"))})
            elif not replaced:
                await send(message)

        async def answer(status: int, message: str, headers: list[tuple[bytes, bytes]]) -> None:
            # Whom Ray has not told when to come back may do so in a second.
            later = _value(headers, b"retry-after").decode("ascii") or "1"
            extra = {"Retry-After": later} if status in (429, 503) else {}
            request_id = _value(headers, b"x-request-id").decode("latin-1")
            if request_id:
                extra["X-Request-ID"] = request_id
            await ApiError(status, message, headers=extra).response(scope)(scope, receive, send)

        await self._app(scope, receive, in_our_shape)
        if not begun:
            # Ray has put the id that it made into the request's headers by now.
            await answer(503, _LOST, list(scope["headers"]))


def _value(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for given, value in headers if given.lower() == name), b"")


def _once(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> Iterable[tuple[bytes, bytes]]:
    """``headers`` without the second ``name``: the server in the replica and the proxy both add the request's id."""
    found = False
    for given, value in headers:
        if given.lower() == name:
            if found:
                continue
            found = True
        yield given, value
