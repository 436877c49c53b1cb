"""The routes that change the server: a model is loaded anew."""

from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Response

from server.api.errors import ApiError
from server.api.front import to_json
from server.api.schemas import ErrorResponse, Strict
from server.config import Settings
from server.metrics import Metrics
from server.reload import Reloaded, ReloadError

_STATUS = {"unknown": 404, "busy": 409, "bad": 422, "ending": 503}


class ReloadResponse(Strict):
    """Which version serves now, and which one did before; they are the same where the bundle is."""

    model: str
    old_version: str
    new_version: str


def is_open(settings: Settings, keyed: bool) -> bool:
    """Whether there are such routes on a server that asks for keys, or (``keyed`` false) does not."""
    return settings.admin == "open" or (settings.admin == "keyed" and keyed)


def add_routes(router: APIRouter, reload: Callable[[str], Awaitable[Reloaded]], metrics: Metrics) -> None:
    route = "/admin/models/{model}/reload"
    responses: dict[int | str, dict[str, Any]] = {
        401: {"model": ErrorResponse},
        404: {"model": ErrorResponse, "description": "no such model"},
        409: {"model": ErrorResponse, "description": "a reload of it is under way"},
        422: {"model": ErrorResponse, "description": "the new bundle is bad; the old version goes on serving"},
        503: {"model": ErrorResponse, "description": "the server is draining"},
    }

    @router.post(
        route,
        summary="Load a model anew from the folder that it came from; answered once the new version serves",
        response_model=ReloadResponse,
        responses=responses,
    )
    async def post_reload(model: str) -> Response:
        try:
            return to_json(asdict(await reload(model)))
        except ReloadError as error:
            kind = "draining" if error.kind == "ending" else None
            raise ApiError(_STATUS[error.kind], error.message, "model", type=kind) from None

    metrics.create_route(route, (200, 404, 409, 422))
