"""The HTTP routes. Each translates to one call; none has a path of its own to the engine."""

import asyncio
import html
from typing import Any

import pydantic_core
from fastapi import APIRouter, Request, Response
from prometheus_client.exposition import choose_encoder
from pydantic import ValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse

from server.api.classify import classify, find_model
from server.api.depth import fastest
from server.api.errors import ApiError, from_validation
from server.api.schemas import REQUEST_EXAMPLES, ClassifyRequest, ClassifyResponse, ErrorResponse
from server.catalog import Catalog, ServedModel
from server.config import Settings
from server.metrics import Metrics
from server.middleware import CONTEXT, Context

ERRORS = {
    400: "the body is not JSON, or not UTF-8",
    404: "no such model",
    413: "body, number of texts or a text too large",
    422: "the request asks for what cannot be; param names the field",
    429: "too many texts are waiting; Retry-After says when to try again",
    500: "the text could not be classified",
    503: "the server is starting or draining",
    504: "the deadline passed before the first exit",
}


def build_router(settings: Settings, catalog: Catalog, metrics: Metrics, version: str) -> APIRouter:
    """All routes, bound to one app's settings, models and metrics."""
    router = APIRouter()
    inflight = metrics.inflight

    @router.post(
        "/classify",
        summary="Classify texts, each to the depth that the request asks for",
        responses={
            200: {
                "model": ClassifyResponse,
                "headers": {
                    "Server-Timing": {
                        "description": "tokenize, queue, inference in ms; of several texts the longest",
                        "schema": {"type": "string"},
                    },
                    "X-Request-ID": {"description": "the caller's, or a new one", "schema": {"type": "string"}},
                },
            },
            **{code: {"model": ErrorResponse, "description": text} for code, text in ERRORS.items()},
        },
        openapi_extra={
            "requestBody": {
                "required": True,
                "content": {
                    "application/json": {
                        "schema": {"$ref": "#/components/schemas/ClassifyRequest"},
                        "examples": REQUEST_EXAMPLES,
                    }
                },
            }
        },
    )
    async def post_classify(request: Request) -> Response:
        with inflight.track_inprogress():
            context: Context = request.scope[CONTEXT]
            context.model = catalog.default.name
            try:
                body = await _body(request, settings.max_body_bytes)
            except ClientDisconnect:
                return _client_left(context)
            try:
                wish = ClassifyRequest.model_validate_json(body)
            except ValidationError as error:
                raise from_validation(error, body) from None
            if wish.model is not None:
                context.model = ""
                context.model = find_model(catalog, wish.model).name
            return await _answer(request, find_model(catalog, wish.model), wish, context)

    async def _answer(request: Request, model: ServedModel, wish: ClassifyRequest, context: Context) -> Response:
        # The server does not cancel a route when its client leaves; so somebody has to listen for it.
        work = asyncio.ensure_future(classify(model, wish, settings))
        departure = asyncio.ensure_future(_departure(request))
        try:
            await asyncio.wait((work, departure), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return _client_left(context)
            document, timing = work.result()
        finally:
            departure.cancel()
            work.cancel()
        return Response(
            pydantic_core.to_json(document), media_type="application/json", headers={"Server-Timing": timing.header()}
        )

    @router.get("/livez", summary="Whether the process works; restart it where this is not 200")
    async def livez() -> Response:
        if not catalog.draining and not catalog.alive:
            raise ApiError(503, "a worker has died")
        return _json({"status": "alive"})

    @router.get("/readyz", summary="Whether to send requests here; 503 while starting and draining")
    async def readyz() -> Response:
        if catalog.draining:
            raise ApiError(503, "draining", type="draining")
        if not catalog.alive:
            raise ApiError(503, "not ready")
        return _json({"status": "ready"})

    @router.get("/metrics", summary="Prometheus metrics")
    async def get_metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics.registry), media_type=content_type)

    @router.get("/models", summary="The models served, their exits, and the qualities certified for them")
    async def get_models() -> Response:
        return _json({"models": [describe(model, model is catalog.default) for model in catalog.models.values()]})

    @router.get("/info", summary="Version and limits of this server")
    async def get_info() -> Response:
        return _json(
            {
                "name": "offramp",
                "version": version,
                "default_model": catalog.default.name,
                "models": list(catalog.models),
                "default_quality": settings.default_quality,
                "default_deadline_ms": settings.deadline_ms,
                "limits": {
                    "max_inputs": settings.max_inputs,
                    "max_body_bytes": settings.max_body_bytes,
                    "max_characters": settings.max_characters,
                    "max_queue": settings.max_queue,
                },
                "runtime": {
                    model.name: {
                        "precision": model.precision,
                        "device": model.device,
                        "workers": model.workers,
                        "threads": model.threads,
                    }
                    for model in catalog.models.values()
                },
            }
        )

    @router.get("/", include_in_schema=False)
    async def get_root() -> HTMLResponse:
        return HTMLResponse(_landing(catalog, version))

    for route in ("/livez", "/readyz"):
        metrics.create_route(route, (200, 503))
    for route in ("/metrics", "/models", "/info", "/"):
        metrics.create_route(route)
    return router


def describe(model: ServedModel, default: bool) -> dict[str, Any]:
    """What ``/models`` says of a model."""
    manifest, calibration = model.bundle.manifest, model.calibration
    return {
        "name": manifest.name,
        "version": manifest.version,
        "default": default,
        "task": manifest.task,
        "labels": list(manifest.labels),
        "takes_pairs": manifest.takes_pairs,
        "max_length": manifest.architecture.max_length,
        "num_layers": manifest.architecture.num_layers,
        "precision": model.precision,
        "device": model.device,
        "exits": [
            {
                "number": spec.number,
                "after_layer": spec.after_layer,
                "head": spec.head,
                "cost_in_layers": round(cost, 4),
            }
            for spec, cost in zip(manifest.architecture.exits, manifest.exit_costs, strict=True)
        ],
        "tiers": [
            {
                "quality": tier.quality,
                "criterion": tier.criterion,
                "threshold": tier.threshold,
                "mean_cost": tier.mean_cost,
                "speedup": tier.speedup,
            }
            for tier in calibration.certified
        ],
        "refused_tiers": [refused.model_dump() for refused in calibration.refused],
        "max_speed": fastest(calibration),
        "licence": manifest.licence,
    }


async def _body(request: Request, limit: int) -> bytes:
    """The whole body. Raises :class:`ApiError` (413) as soon as it is known to exceed ``limit`` bytes."""
    problem = ApiError(413, f"the body exceeds {limit} bytes (OFFRAMP_MAX_BODY_BYTES)")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:19]) > limit:
        raise problem
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise problem
        chunks.append(chunk)
    return b"".join(chunks)


async def _departure(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _client_left(context: Context) -> Response:
    """Nobody reads this; 499 is what logs and metrics say of it."""
    context.client_left = True
    return Response(status_code=499)


def _json(document: dict[str, Any]) -> Response:
    return Response(pydantic_core.to_json(document), media_type="application/json")


def _landing(catalog: Catalog, version: str) -> str:
    names = "".join(f"<li><code>{html.escape(name)}</code></li>" for name in catalog.models)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Offramp</title>
<style>body{{font:16px/1.5 system-ui,sans-serif;max-width:44rem;margin:3rem auto;padding:0 1rem}}</style></head>
<body><h1>Offramp {html.escape(version)}</h1>
<p>Text classifiers that answer early. This server has:</p><ul>{names}</ul>
<pre>curl -s localhost:8000/classify -d '{{"inputs": "a gripping and moving film", "explain": true}}'</pre>
<p><a href="docs">API</a> · <a href="models">models</a> · <a href="info">info</a> · <a href="metrics">metrics</a></p>
</body></html>
"""
