"""What the OpenAPI document says of routes that read their bodies themselves, in one validation pass."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

REFERENCE = "#/components/schemas/{model}"

ERRORS = {
    400: "the body is not JSON, or not UTF-8",
    401: "the server asks for a key, and the request has none that it knows",
    404: "no such model",
    408: "the body did not arrive in time",
    413: "body, number of texts or a text too large",
    422: "the request asks for what cannot be; param names the field",
    429: "too many texts or requests are in work; Retry-After says when to try again",
    500: "the text could not be classified",
    503: "the server is starting or draining",
    504: "the deadline passed before the first exit",
}

ANSWER_HEADERS = {
    "Server-Timing": {
        "description": "tokenize, queue, inference in ms; of several texts the longest",
        "schema": {"type": "string"},
    },
    "X-Request-ID": {"description": "the caller's, or a new one", "schema": {"type": "string"}},
}


def described(
    request: type[BaseModel] | tuple[type[BaseModel], ...], answer: Any, error: Any, examples: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Arguments of a route that takes one of ``request`` and answers ``answer``, or ``error``."""
    schemas = [
        {"$ref": REFERENCE.format(model=schema.__name__)}
        for schema in (request if isinstance(request, tuple) else (request,))
    ]
    content = {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}, "examples": examples}
    return {
        "responses": {
            200: {"model": answer, "headers": ANSWER_HEADERS},
            **{code: {"model": error, "description": text} for code, text in ERRORS.items()},
        },
        "openapi_extra": {"requestBody": {"required": True, "content": {"application/json": content}}},
    }


def document_of(app: FastAPI, requests: tuple[type[BaseModel], ...], keys: bool) -> dict[str, Any]:
    """FastAPI's document, with the schemas of ``requests`` and, where ``keys`` are asked for, the way to give one."""
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, definitions = models_json_schema([(schema, "validation") for schema in requests], ref_template=REFERENCE)
    document["components"]["schemas"].update(definitions["$defs"])
    if keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
