"""What every HTTP request gets, as pure ASGI: an id, a metric, an answer when something breaks, a log line.

Pure ASGI, because Starlette's ``BaseHTTPMiddleware`` hides a client's leaving from the routes.
"""

import asyncio
import logging
import random
import re
import time
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ApiError
from server.catalog import Catalog
from server.logs import FIELDS
from server.metrics import UNMATCHED, Metrics

logger = logging.getLogger("offramp.http")

CONTEXT = "offramp.context"
_NOT_ID = re.compile(rb"[^A-Za-z0-9._:/+=-]")
MAX_ID_LENGTH = 128


@dataclass(slots=True)
class Context:
    """What is known of a request: its id, the name of the model that it went to (empty: none), and whether its client
    left before the answer."""

    request_id: str
    model: str = ""
    client_left: bool = False


class Observe:
    """Gives each request a :class:`Context`, echoes its id, counts it under its route's template, and turns an
    unexpected exception into our 500."""

    def __init__(self, app: ASGIApp, metrics: Metrics, catalog: Catalog, access_log: bool) -> None:
        self._app = app
        self._metrics = metrics
        self._catalog = catalog
        self._access_log = access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        context = scope[CONTEXT] = Context(request_id_of(scope))
        status = 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", context.request_id.encode("ascii")),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if not self._catalog.draining:
                raise
            # The drain is over and this request is not: say so while the connection lasts.
            if not status:
                error = ApiError(503, "the server ended before the answer was ready", type="draining")
                await error.response(scope)(scope, receive, send_with_id)
        except Exception:
            logger.exception(
                "request %s failed", context.request_id, extra={FIELDS: {"request_id": context.request_id}}
            )
            if not status:
                error = ApiError(500, "something broke; the server's log says what, under the request's id")
                await error.response(scope)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            code = 499 if context.client_left else status or 499
            route = getattr(scope.get("route"), "path", UNMATCHED)
            self._metrics.answered(context.model, route, code, seconds)
            if self._access_log:
                self._log(scope["method"], route, code, seconds, context)

    def _log(self, method: str, route: str, status: int, seconds: float, context: Context) -> None:
        milliseconds = round(seconds * 1000, 2)
        fields = {
            "request_id": context.request_id,
            "method": method,
            "route": route,
            "status": status,
            "duration_ms": milliseconds,
            "model": context.model,
        }
        logger.info(
            "%s %s %d %.2f ms id=%s", method, route, status, milliseconds, context.request_id, extra={FIELDS: fields}
        )


def request_id_of(scope: Scope) -> str:
    """The caller's ``X-Request-ID`` without characters that could break a log or header, cut to 128; else a new one."""
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            cleaned = _NOT_ID.sub(b"", value)[:MAX_ID_LENGTH]
            if cleaned:
                return str(cleaned, "ascii")
    # An id to tell requests apart, no secret: the kernel's random bytes would take a fifth of the way through the app.
    return f"{random.getrandbits(128):032x}"
