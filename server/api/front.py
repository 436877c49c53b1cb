"""How every front door reaches the engine: the body in, its translation to the one request, the one call, the document
in the door's own shape out."""

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pydantic_core
from fastapi import Request, Response
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from server.api.classify import classify, find_model, overloaded
from server.api.errors import ApiError, from_validation, invalid
from server.api.schemas import ClassifyRequest, Strict, Wishes
from server.catalog import Catalog, ServedModel
from server.config import MOST_INPUTS, Settings
from server.engine.admission import Overloaded
from server.metrics import Metrics
from server.middleware import CONTEXT, Context
from server.protocol import DEPARTURE, Departure

Schema = TypeVar("Schema", bound=Strict)

# Values of a JSON body: three for each of MOST_INPUTS pairs, and room to spare. The parser takes a microsecond for an
# empty list, so the 700,000 that 2 MB can hold kept the event loop, and the interpreter, for 0.7 s.
MOST_VALUES = 8 * MOST_INPUTS
_SEPARATORS = b",[{"

WISHES_HEADER = "X-Offramp"
EXITS_HEADER = "X-Offramp-Exits"


@dataclass(frozen=True, slots=True)
class Call:
    """A request that a door has read: its translation, and how to write the answer (``schemas.ClassifyResponse`` as a
    document) of the model that gave it. ``texts_field`` is what the door calls ``inputs``."""

    wish: ClassifyRequest
    write: Callable[[ServedModel, dict[str, Any]], Response]
    texts_field: str = "inputs"


class Front:
    """The way in that all doors share, with its limits."""

    def __init__(self, settings: Settings, catalog: Catalog, metrics: Metrics) -> None:
        self._settings = settings
        self._catalog = catalog
        self._inflight = metrics.inflight
        self._running = 0

    async def answer(self, request: Request, read: Callable[[bytes], Call]) -> Response:
        """Answers ``request``, whose body ``read`` translates. Raises :class:`ApiError`."""
        context: Context = request.scope[CONTEXT]
        context.model = self._catalog.default.name
        limit = self._settings.max_concurrent_requests
        if self._running >= limit:
            self._catalog.default.metrics.rejected("concurrency")
            raise ApiError(
                429,
                f"{limit} requests are in work already (OFFRAMP_MAX_CONCURRENT_REQUESTS); try again in 1 s",
                headers={"Retry-After": "1"},
            )
        if len(self._catalog.models) == 1:
            # Told before its body is read: refusals must cost little, or they take the time of those who are served.
            try:
                self._catalog.default.engine.check_room(1)
            except Overloaded as error:
                raise overloaded(self._catalog.default, error) from None
        self._running += 1
        try:
            with self._inflight.track_inprogress():
                return await self._answer(request, read, context)
        finally:
            self._running -= 1

    async def _answer(self, request: Request, read: Callable[[bytes], Call], context: Context) -> Response:
        try:
            body = await _body(request, self._settings)
        except ClientDisconnect:
            return _client_left(context)
        call = read(body)
        if call.wish.model is not None:
            context.model = ""
        model = find_model(self._catalog, call.wish.model)
        context.model = model.name
        trace = context.trace
        if trace is not None:
            trace.model = model
        departure = _Departure(request)
        try:
            with model.users:
                document, timing = await classify(
                    model,
                    call.wish,
                    self._settings,
                    request_id=context.request_id,
                    timeline=None if trace is None else trace.timeline,
                )
        except ApiError as error:
            if error.param is not None and error.param.startswith("inputs"):
                error.param = call.texts_field + error.param.removeprefix("inputs")
            raise
        except asyncio.CancelledError:
            if not departure.caused_it():
                raise
            return _client_left(context)
        finally:
            departure.ignore()
        if trace is not None:
            trace.results = document["results"]
        response = call.write(model, document)
        response.headers["Server-Timing"] = timing.header()
        return response


def wishes_header(headers: Headers) -> str | None:
    """The ``X-Offramp`` header, ``None`` where there is none. A list in several headers is one list (RFC 9110, 5.3)."""
    parts = headers.getlist(WISHES_HEADER)
    return ", ".join(parts) if parts else None


def wish_from(fields: Mapping[str, Any], header: str | None) -> ClassifyRequest:
    """The request with ``fields``, and with the wishes of the ``X-Offramp`` header (``quality=0.97, deadline_ms=25``).

    ``None`` stands for a field that was not given. Raises :class:`ApiError` (422), naming the field.
    """
    given = {name: value for name, value in fields.items() if value is not None}
    for name, value in _in_header(header).items():
        if name in given:
            raise invalid(f"given in the request and in its {WISHES_HEADER} header", name)
        given[name] = value
    try:
        return ClassifyRequest.model_validate(given)
    except ValidationError as error:
        raise from_validation(error, b"") from None


def _in_header(header: str | None) -> dict[str, Any]:
    known = {"model", *Wishes.model_fields}
    wishes: dict[str, Any] = {}
    for part in (header or "").split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            continue
        if not equals or name not in known or name in wishes:
            raise invalid(
                f"the header is a list like quality=0.97, deadline_ms=25 of {', '.join(sorted(known))}, each once",
                WISHES_HEADER,
            )
        try:
            if "_" in value and name not in ("model", "criterion"):
                # Python's own way to write 10 as 1_0.
                raise ValueError
            wishes[name] = (
                value if name in ("model", "criterion") else int(value) if value.isdecimal() else float(value)
            )
        except ValueError:
            raise invalid("must be a number", name) from None
    return wishes


def read_as(schema: type[Schema], body: bytes) -> Schema:
    """The JSON ``body`` as a ``schema``. Raises :class:`ApiError`, naming the field."""
    if _too_many_values(body):
        raise ApiError(413, f"the body holds more than {MOST_VALUES} values")
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, body) from None


def _too_many_values(body: bytes) -> bool:
    """Whether a JSON ``body`` has more commas and opening brackets outside strings than any request needs."""
    if len(body) <= MOST_VALUES or sum(body.count(one) for one in _SEPARATORS) <= MOST_VALUES:
        return False
    # Texts may have any number of them. A quote without a backslash begins or ends a string.
    marks = np.frombuffer(body.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    in_text = np.logical_xor.accumulate(marks == ord('"'))
    outside = marks[~in_text]
    return sum(int(np.count_nonzero(outside == one)) for one in _SEPARATORS) > MOST_VALUES


def exits_header(document: dict[str, Any]) -> dict[str, str]:
    """For doors whose answers have no place for it: the exit of each text, in order."""
    return {EXITS_HEADER: ",".join(str(result["exit"]["number"]) for result in document["results"])}


def to_json(document: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(pydantic_core.to_json(document), media_type="application/json", headers=headers)


async def _body(request: Request, settings: Settings) -> bytes:
    """The whole body. Raises :class:`ApiError`: 413 as soon as it is known to be too large, 408 where it is slow, 400
    where it is compressed."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise ApiError(400, "compressed bodies are not taken (Content-Encoding)")
    limit, seconds = settings.max_body_bytes, settings.request_timeout_seconds
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:19]) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise _too_large(limit)
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {seconds:g} s (OFFRAMP_REQUEST_TIMEOUT_SECONDS)",
            headers={"Connection": "close"},
        ) from None
    return b"".join(chunks)


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the body exceeds {limit} bytes (OFFRAMP_MAX_BODY_BYTES)")


class _Departure:
    """Cancels the task that made it when the client of ``request`` goes: the server does not do it."""

    def __init__(self, request: Request) -> None:
        self._work = asyncio.current_task()
        self._left = False
        self._told: Departure | None = request.scope.get(DEPARTURE)
        self._listening: asyncio.Task[None] | None = None
        if self._told is not None:
            self._told.then(self._cancel)
        else:
            # Served by another server than ours: Ray's, a test's.
            self._listening = asyncio.ensure_future(self._listen(request))

    async def _listen(self, request: Request) -> None:
        # The traceback of an exception that went through would hold the task, which holds the exception: a cycle.
        with suppress(asyncio.CancelledError):
            while (await request.receive())["type"] != "http.disconnect":
                pass
            self._cancel()

    def _cancel(self) -> None:
        self._left = True
        if self._work is not None:
            self._work.cancel()

    def caused_it(self) -> bool:
        """Whether a cancellation that has arrived was this one's, and no one else's; it is over then."""
        return self._left and self._work is not None and self._work.uncancel() == 0

    def ignore(self) -> None:
        """The answer is there: whoever leaves now changes nothing."""
        if self._told is not None:
            self._told.then(None)
        if self._listening is not None:
            self._listening.cancel()


def _client_left(context: Context) -> Response:
    """Nobody reads this; 499 is what logs and metrics say of it."""
    context.client_left = True
    return Response(status_code=499)
