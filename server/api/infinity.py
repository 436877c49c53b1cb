"""Infinity's ``POST /classify``, told from our own by its ``input``."""

import time
import uuid
from typing import Annotated, Any, Literal

from fastapi import Response
from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, ValidationError

from server.api.front import Call, exits_header, read_as, to_json, wish_from
from server.api.schemas import Score, Strict, Wishes
from server.catalog import ServedModel
from server.config import MOST_INPUTS

# What Infinity's own client sends where nobody chose a model.
NO_MODEL = "default/not-specified"
EXAMPLES: dict[str, dict[str, Any]] = {
    "as Infinity's clients ask": {"value": {"input": ["a gripping film", "two hours of nothing"]}}
}


def _kind(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=list" if isinstance(value, list) else None


class InfinityRequest(Wishes):
    """A request of Infinity, and the depth."""

    input: Annotated[
        Annotated[str, Tag("=text")]
        | Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True), Tag("=list")],
        Discriminator(_kind, custom_error_type="input_type", custom_error_message="a string, or a list of strings"),
    ] = Field(description="a text, or several")
    model: str | None = Field(default=None, min_length=1, max_length=128, description="a name from /models")
    raw_scores: bool = Field(default=False, description="scores are the exit's logits")


class InfinityUsage(Strict):
    prompt_tokens: int
    total_tokens: int


class InfinityResponse(Strict):
    object: Literal["classify"]
    data: list[list[Score]] = Field(description="a list for each text, highest score first")
    model: str
    usage: InfinityUsage
    id: str
    created: int = Field(description="seconds since 1970")


class _Fields(BaseModel):
    model_config = ConfigDict(extra="ignore")

    input: Any = None
    inputs: Any = None


def is_infinity(body: bytes) -> bool:
    """Whether ``body``, which is no request of ours, has ``input`` and no ``inputs``."""
    if b'"input"' not in body:
        return False
    try:
        fields = _Fields.model_validate_json(body).model_fields_set
    except ValidationError:
        return False
    return fields == {"input"}


def read(body: bytes, header: str | None) -> Call:
    asked = read_as(InfinityRequest, body)
    fields = asked.model_dump(exclude={"input"})
    fields["inputs"] = asked.input
    if asked.model == NO_MODEL:
        del fields["model"]

    def write(model: ServedModel, document: dict[str, Any]) -> Response:
        tokens = document["usage"]["tokens"]
        answer = {
            "object": "classify",
            "data": [result["scores"] for result in document["results"]],
            "model": document["model"],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "id": f"classify-{uuid.uuid4().hex}",
            "created": int(time.time()),
        }
        return to_json(answer, exits_header(document))

    return Call(wish_from(fields, header), write, "input")
