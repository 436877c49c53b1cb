"""The one shape of every error, ``{"error": {"type", "message", "param"}}``, and what it becomes for the clients of
other protocols.

No message ever holds input text: messages are written here and in the schemas, and pydantic's are taken without their
``input``.
"""

import json
import re
from typing import Any

import pydantic_core
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import Scope

from server.config import MOST_INPUTS

TYPES = {
    400: "malformed",
    401: "unauthorized",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "too_large",
    422: "invalid",
    429: "overloaded",
    499: "client_gone",
    500: "internal",
    503: "not_ready",
    504: "deadline",
}
# What text-embeddings-inference calls them; whatever is not listed is the request's own fault, its "Validation".
_TEI_TYPES = {429: "Overloaded", 500: "Backend", 503: "Unhealthy", 504: "Backend"}
# A body can hold hundreds of thousands of unknown fields, and pydantic takes 10 microseconds to list each.
MAX_ERRORS = 100
_SURROGATE = re.compile("[\ud800-\udfff]")
_FIELD_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,31}")


class ApiError(Exception):
    """An answer with ``status`` and one error; ``param`` names the field it is about (``inputs[3].text``)."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        *,
        type: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.type = type or TYPES.get(status, "error")
        self.headers = headers

    def response(self, scope: Scope | None = None) -> Response:
        """As a response in the shape that clients of the request's route read (``None``: our own)."""
        path, method = ("", "") if scope is None else (scope["path"], scope["method"])
        sentence = f"{self.param}: {self.message}" if self.param else self.message
        body: dict[str, Any]
        if path == "/v2" or path.startswith("/v2/"):
            body = {"error": sentence}
        elif path == "/predict" or (path == "/" and method == "POST"):
            body = {"error": sentence, "error_type": _TEI_TYPES.get(self.status, "Validation")}
        else:
            body = {"error": {"type": self.type, "message": self.message, "param": self.param}}
        return Response(pydantic_core.to_json(body), self.status, headers=self.headers, media_type="application/json")


def invalid(message: str, param: str | None) -> ApiError:
    """422: the request is well-formed, and asks for what cannot be."""
    return ApiError(422, message, param)


def from_validation(error: ValidationError, body: bytes) -> ApiError:
    """The first error of a pydantic validation of the JSON ``body``, as an :class:`ApiError`."""
    if error.error_count() > MAX_ERRORS:
        return invalid(f"{error.error_count()} fields are unknown or wrong; so many are not named one by one", None)
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid":
        return _from_json(first["msg"].removeprefix("Invalid JSON: "), body)
    param = path_of(first["loc"])
    if first["type"] == "too_long" and first["ctx"]["max_length"] == MOST_INPUTS:
        return ApiError(413, f"a list of more than {MOST_INPUTS} texts", param)
    if first["type"] == "extra_forbidden":
        return invalid("no such field; unknown fields are refused so that a typing error never goes unnoticed", param)
    if first["type"] == "missing":
        return invalid("this field is required", param)
    if first["type"] in ("model_type", "model_attributes_type", "dict_type"):
        return invalid("must be a JSON object", param)
    if first["type"] == "value_error":
        return invalid(first["msg"].removeprefix("Value error, "), param)
    # "String should have at least 1 character" and the like; custom messages say what it must be.
    must = re.match(r"\w+ should (.*)", first["msg"])
    words = must[1].replace(" after validation", "") if must else f"be {first['msg']}"
    return invalid(f"must {words}", param)


def path_of(location: tuple[int | str, ...]) -> str | None:
    """``("inputs", 3, "text")`` as ``inputs[3].text``; tags of unions (``=pair``) are left out.

    A key that does not look like a field's name might be text that went astray, so it is not repeated.
    """
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not part.startswith("="):
            name = part if _FIELD_NAME.fullmatch(part) else "(unknown)"
            path += f".{name}" if path else name
    return path or None


def _from_json(problem: str, body: bytes) -> ApiError:
    """What is wrong with a body that is not JSON, or holds a string that is no Unicode text."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        return ApiError(400, f"the body is not UTF-8: byte {error.start} cannot be decoded")
    try:
        location = _lone_surrogate(json.loads(text), ())
    except (ValueError, RecursionError):
        location = None
    if location is not None:
        return invalid(
            "holds a lone surrogate (half of a \\ud83d\\ude00-style escape), which is no character", path_of(location)
        )
    if text.startswith("\ufeff"):
        return ApiError(400, "the body is not JSON: it begins with a byte-order mark")
    return ApiError(400, f"the body is not JSON: {problem}")


def _lone_surrogate(value: Any, path: tuple[int | str, ...]) -> tuple[int | str, ...] | None:
    """Where in a parsed document a string with a lone surrogate is, or ``None``."""
    if isinstance(value, str):
        return path if _SURROGATE.search(value) else None
    children: Any = ()
    if isinstance(value, list):
        children = enumerate(value)
    elif isinstance(value, dict):
        children = value.items()
    for key, child in children:
        if isinstance(key, str) and _SURROGATE.search(key):
            return (*path, "(unknown)")
        found = _lone_surrogate(child, (*path, key))
        if found is not None:
            return found
    return None


async def on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope)


async def on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own errors (no such route, wrong method) in our shape."""
    assert isinstance(error, HTTPException)
    messages = {404: "no such route", 405: "this route does not take this method"}
    message = messages.get(error.status_code, str(error.detail))
    headers = dict(error.headers) if error.headers else None
    if error.status_code == 405:
        headers = {"Allow": ", ".join(sorted(_methods_of(request.scope)))}
    return ApiError(error.status_code, message, headers=headers).response(request.scope)


def _methods_of(scope: Scope) -> set[str]:
    """What the path takes, of all its routes: the framework names the methods of the first one alone."""
    routes = [route for route in scope["app"].routes if isinstance(route, Route)]
    methods = {
        method for route in routes if route.matches(scope)[0] is not Match.NONE for method in route.methods or ()
    }
    return methods | {"HEAD"} if "GET" in methods else methods
