"""The HTTP routes. Each translates to one call; none has a path of its own to the engine."""

import inspect
from collections.abc import Callable, Coroutine
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from prometheus_client.exposition import choose_encoder
from starlette.responses import PlainTextResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from server.api import infinity, openinference, page, tei
from server.api.depth import fastest
from server.api.errors import ApiError
from server.api.front import Call, Front, read_as, to_json, wish_from, wishes_header
from server.api.infinity import InfinityRequest, InfinityResponse
from server.api.openapi import described
from server.api.schemas import (
    REQUEST_EXAMPLES,
    ClassifyRequest,
    ClassifyResponse,
    ErrorResponse,
    Info,
    Models,
    Status,
)
from server.catalog import Catalog, ServedModel
from server.config import Settings
from server.metrics import Metrics

REQUESTS = (ClassifyRequest, InfinityRequest, tei.PredictRequest, openinference.InferRequest)
"""The schemas of bodies, which the OpenAPI document must be told of."""


class DirectRoute(APIRoute):
    """A route whose endpoint takes the request alone, or nothing but what its path gives.

    Ours read their bodies and write their responses themselves. Where the endpoint takes only the request, there is
    nothing for FastAPI to resolve and serialise, which it does for 0.2 ms all the same.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if list(inspect.signature(self.endpoint).parameters) == ["request"]:
            handler: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
            return handler
        return super().get_route_handler()

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child_scope = super().matches(scope)
        return (Match.FULL if match is Match.PARTIAL and self._gives_head(scope) else match), child_scope

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await (self.app if self._gives_head(scope) else super().handle)(scope, receive, send)

    def _gives_head(self, scope: Scope) -> bool:
        """What answers GET answers HEAD (RFC 9110, 9.1), and the server leaves the body out. FastAPI would want it
        among the methods, and in the document as operations of their own."""
        return scope["method"] == "HEAD" and "GET" in (self.methods or ())


def add_routes(router: APIRouter, settings: Settings, catalog: Catalog, metrics: Metrics, version: str) -> None:
    """All routes, bound to one app's settings, models and metrics."""
    router.route_class = DirectRoute
    front = Front(settings, catalog, metrics)

    @router.post(
        "/classify",
        summary="Classify texts, each to the depth that the request asks for",
        **described(
            (ClassifyRequest, InfinityRequest),
            ClassifyResponse | InfinityResponse,
            ErrorResponse,
            REQUEST_EXAMPLES | infinity.EXAMPLES,
        ),
    )
    async def post_classify(request: Request) -> Response:
        return await front.answer(request, lambda body: _read(body, wishes_header(request.headers)))

    tei.add_routes(router, front)
    openinference.add_routes(router, front, catalog, version)

    unready: dict[int | str, dict[str, Any]] = {503: {"model": ErrorResponse}}
    closed: dict[int | str, dict[str, Any]] = {401: {"model": ErrorResponse}}

    @router.get(
        "/livez",
        summary="Whether the process works; restart it where this is not 200",
        response_model=Status,
        responses=unready,
    )
    async def livez() -> Response:
        if not catalog.draining and not catalog.alive:
            raise ApiError(503, "a worker has died")
        return to_json({"status": "alive"})

    @router.get(
        "/readyz",
        summary="Whether to send requests here; 503 while starting and draining",
        response_model=Status,
        responses=unready,
    )
    async def readyz() -> Response:
        if catalog.draining:
            raise ApiError(503, "draining", type="draining")
        if not catalog.alive:
            raise ApiError(503, "not ready")
        return to_json({"status": "ready"})

    if settings.metrics_port is None:

        @router.get("/metrics", summary="Prometheus metrics", response_class=PlainTextResponse)
        async def get_metrics(request: Request) -> Response:
            return metrics_page(request, metrics)

    @router.get(
        "/models",
        summary="The models served, their exits, and the qualities certified for them",
        response_model=Models,
        responses=closed,
    )
    async def get_models() -> Response:
        return to_json({"models": [describe(model, model is catalog.default) for model in catalog.models.values()]})

    @router.get("/info", summary="Version and limits of this server", response_model=Info, responses=closed)
    async def get_info() -> Response:
        return to_json(
            {
                "name": "offramp",
                "version": version,
                "default_model": catalog.default.name,
                "models": list(catalog.models),
                "default_quality": settings.default_quality,
                "default_deadline_ms": settings.deadline_ms,
                "processes": settings.workers or 1,
                "limits": {
                    "max_inputs": settings.max_inputs,
                    "max_body_bytes": settings.max_body_bytes,
                    "max_characters": settings.max_characters,
                    "max_tokens": settings.max_tokens,
                    "max_queue": settings.max_queue,
                    "max_wait_seconds": settings.max_wait_seconds,
                    "max_concurrent_requests": settings.max_concurrent_requests,
                    "request_timeout_seconds": settings.request_timeout_seconds,
                },
                "runtime": {
                    model.name: {
                        "precision": model.precision,
                        "device": model.device,
                        "cuda": None if model.cuda is None else asdict(model.cuda),
                        "runs": model.runs,
                        "threads": model.threads,
                        "lone_threads": list(model.lone_threads),
                        "latency": None if model.latency is None else model.latency.document(),
                    }
                    for model in catalog.models.values()
                },
            }
        )

    page.add_routes(router)

    for route in ("/livez", "/readyz"):
        metrics.create_route(route, (200, 503))
    for route in ("/metrics", "/models", "/info", "/", "/playground/{name}", "/v2/health/live", "/v2/health/ready"):
        metrics.create_route(route)


def describe(model: ServedModel, default: bool) -> dict[str, Any]:
    """What ``/models`` says of a model (``schemas.ModelDescription``)."""
    manifest, calibration = model.bundle.manifest, model.calibration
    return {
        "name": manifest.name,
        "version": manifest.version,
        "default": default,
        "task": manifest.task,
        "labels": list(manifest.labels),
        "takes_pairs": manifest.takes_pairs,
        "max_length": model.max_tokens,
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


def metrics_page(request: Request, metrics: Metrics) -> Response:
    """All metrics, in the format that the scraper asks for."""
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(metrics.page()), media_type=content_type)


def _read(body: bytes, header: str | None) -> Call:
    try:
        wish = read_as(ClassifyRequest, body)
    except ApiError as error:
        # Only an unknown field tells them apart: what is no JSON, or too much of it, is not read again.
        if error.status == 422 and infinity.is_infinity(body):
            return infinity.read(body, header)
        raise
    if header is not None:
        wish = wish_from({name: getattr(wish, name) for name in wish.model_fields_set}, header)
    return Call(wish, lambda model, document: to_json(document))
