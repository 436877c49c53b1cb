"""How every front door reaches the engine: the body in, its translation to the one request, the one call, the document
in the door's own shape out."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic_core
from fastapi import Request, Response
from pydantic import ValidationError
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from server.api.classify import classify, find_model
from server.api.errors import ApiError, from_validation, invalid
from server.api.schemas import ClassifyRequest, Strict, Wishes
from server.catalog import Catalog, ServedModel
from server.config import Settings
from server.metrics import Metrics
from server.middleware import CONTEXT, Context

Schema = TypeVar("Schema", bound=Strict)

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
        # The server does not cancel a route when its client leaves; so somebody has to listen for it.
        work = asyncio.ensure_future(classify(model, call.wish, self._settings))
        departure = asyncio.ensure_future(_departure(request))
        try:
            with model.users:
                await asyncio.wait((work, departure), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return _client_left(context)
            document, timing = work.result()
        except ApiError as error:
            if error.param is not None and error.param.startswith("inputs"):
                error.param = call.texts_field + error.param.removeprefix("inputs")
            raise
        finally:
            departure.cancel()
            work.cancel()
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
            raise invalid(f"given in the body and in the {WISHES_HEADER} header", name)
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
    try:
        return schema.model_validate_json(body)
    except ValidationError as error:
        raise from_validation(error, body) from None


def exits_header(document: dict[str, Any]) -> dict[str, str]:
    """For doors whose answers have no place for it: the exit of each text, in order."""
    return {EXITS_HEADER: ",".join(str(result["exit"]["number"]) for result in document["results"])}


def to_json(document: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(pydantic_core.to_json(document), media_type="application/json", headers=headers)


async def _body(request: Request, settings: Settings) -> bytes:
    """The whole body. Raises :class:`ApiError`: 413 as soon as it is known to be too large, 408 where it is slow."""
    limit, seconds = settings.max_body_bytes, settings.request_timeout_seconds
    problem = ApiError(413, f"the body exceeds {limit} bytes (OFFRAMP_MAX_BODY_BYTES)")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:19]) > limit:
        raise problem
    chunks, size = [], 0
    try:
        async with asyncio.timeout(seconds):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise problem
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(
            408,
            f"the body did not arrive within {seconds:g} s (OFFRAMP_REQUEST_TIMEOUT_SECONDS)",
            headers={"Connection": "close"},
        ) from None
    return b"".join(chunks)


async def _departure(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _client_left(context: Context) -> Response:
    """Nobody reads this; 499 is what logs and metrics say of it."""
    context.client_left = True
    return Response(status_code=499)
