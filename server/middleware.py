"""What every HTTP request gets, as pure ASGI: an id, a metric, an answer when something breaks, a log line.

Pure ASGI, because Starlette's ``BaseHTTPMiddleware`` hides a client's leaving from the routes.
"""

import asyncio
import logging
import random
import re
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.api.errors import ApiError
from server.catalog import Catalog
from server.logs import FIELDS
from server.metrics import UNMATCHED, Metrics

if TYPE_CHECKING:
    from server.tracing import Trace, Tracing

logger = logging.getLogger("offramp.http")

CONTEXT = "offramp.context"
_NOT_ID = re.compile(rb"[^A-Za-z0-9._:/+=-]")
MAX_ID_LENGTH = 128


@dataclass(slots=True)
class Context:
    """What is known of a request: its id, its trace where there is tracing, the name of the model that it went to
    (empty: none), and whether its client left before the answer."""

    request_id: str
    trace: "Trace | None" = None
    model: str = ""
    client_left: bool = False

    @property
    def fields(self) -> dict[str, Any]:
        """What a JSON log line says of the request, whatever else it says."""
        ids = {"request_id": self.request_id}
        return ids if self.trace is None else {**ids, "trace_id": self.trace.trace_id}


class Observe:
    """Gives each request a :class:`Context`, echoes its id, counts it under its route's template, and turns an
    unexpected exception into our 500."""

    def __init__(
        self, app: ASGIApp, metrics: Metrics, catalog: Catalog, access_log: bool, tracing: "Tracing | None" = None
    ) -> None:
        self._app = app
        self._metrics = metrics
        self._catalog = catalog
        self._access_log = access_log
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        context = scope[CONTEXT] = Context(request_id_of(scope))
        if self._tracing is not None:
            context.trace = self._tracing.begin(scope)
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
            logger.exception("request %s failed", context.request_id, extra={FIELDS: context.fields})
            if not status:
                error = ApiError(500, "something broke; the server's log says what, under the request's id")
                await error.response(scope)(scope, receive, send_with_id)
        finally:
            seconds = time.perf_counter() - started
            code = 499 if context.client_left else status or 499
            route = getattr(scope.get("route"), "path", UNMATCHED)
            exemplar = None
            if self._tracing is not None and context.trace is not None:
                exemplar = context.trace.exemplar
                self._tracing.end(context.trace, scope["method"], route, code, context.request_id)
            self._metrics.answered(context.model, route, code, seconds, exemplar)
            if self._access_log:
                self._log(scope["method"], route, code, seconds, context)

    def _log(self, method: str, route: str, status: int, seconds: float, context: Context) -> None:
        milliseconds = round(seconds * 1000, 2)
        fields = {
            **context.fields,
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
