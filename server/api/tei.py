"""The door that text-embeddings-inference has: ``POST /predict``, and ``POST /`` for what posts to a bare URL.

Hugging Face's pipelines and ``InferenceClient.text_classification`` come through the same door; they are told by their
``parameters``, and read a list of lists where text-embeddings-inference gives one list for one text.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag

from server.api.errors import invalid
from server.api.front import Call, Front, exits_header, read_as, to_json, wish_from, wishes_header
from server.api.openapi import described
from server.api.schemas import Score, Strict, TextPair, Wishes
from server.catalog import ServedModel
from server.config import MOST_INPUTS

EXAMPLES: dict[str, dict[str, Any]] = {
    "one text": {"value": {"inputs": "a gripping and moving film"}},
    "several texts": {"value": {"inputs": [["a gripping film"], ["two hours of nothing"]]}},
    "a quality of one's own": {"value": {"inputs": "a gripping film", "quality": 0.97}},
    "as Hugging Face's InferenceClient asks": {"value": {"inputs": "a gripping film", "parameters": {"top_k": 1}}},
    "a pair (for a model that takes pairs)": {"value": {"inputs": ["A man plays a flute.", "Someone plays music."]}},
}


def _kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "=text"
    if isinstance(value, list):
        return "=batch" if value and isinstance(value[0], list) else "=strings"
    return None


_Strings = Annotated[list[str], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)]
_Inputs = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[_Strings, Tag("=strings")]
    | Annotated[list[_Strings], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True), Tag("=batch")],
    Discriminator(
        _kind,
        custom_error_type="input_type",
        custom_error_message="a string, a list of one or two strings (one text, or a pair), or a list of such lists",
    ),
]


class PipelineParameters(Wishes):
    """What Hugging Face's clients send beside ``inputs``."""

    top_k: int | None = Field(default=None, ge=1, le=100_000, description="how many labels; none means all")
    function_to_apply: Literal["softmax", "none"] | None = Field(
        default=None, description="none gives the exit's logits; sigmoid is not what these models were trained with"
    )


class PredictRequest(Wishes):
    """A request of text-embeddings-inference, and the depth."""

    inputs: _Inputs = Field(
        description='a text; a list of two strings is a pair, and several texts are lists in a list: [["a"], ["b"]]'
    )
    truncate: bool | None = Field(default=None, description="cut what is too long; false answers it with 413")
    truncation_direction: Literal["right", "Right"] = Field(default="right", description="texts are cut at their end")
    raw_scores: bool = Field(default=False, description="scores are the exit's logits")
    parameters: PipelineParameters | None = Field(
        default=None, description="as Hugging Face's clients send it; one text is then answered by a list in a list"
    )


class PredictError(Strict):
    error: str
    error_type: Literal["Validation", "Overloaded", "Backend", "Unhealthy"]


def add_routes(router: APIRouter, front: Front) -> None:
    async def predict(request: Request) -> Response:
        return await front.answer(request, lambda body: _read(body, wishes_header(request.headers)))

    for path in ("/predict", "/"):
        router.add_api_route(
            path,
            predict,
            methods=["POST"],
            name=f"predict at {path}",
            summary="Classify as text-embeddings-inference does",
            **described(PredictRequest, list[Score] | list[list[Score]], PredictError, EXAMPLES),
        )


def _read(body: bytes, header: str | None) -> Call:
    asked = read_as(PredictRequest, body)
    elements = [asked.inputs] if isinstance(asked.inputs, str) else asked.inputs
    rows = [element for element in elements if isinstance(element, list)]
    many = bool(rows)
    if not many:
        rows = [[element for element in elements if isinstance(element, str)]]
    fields: dict[str, Any] = asked.model_dump(include=set(Wishes.model_fields))
    fields |= {"truncate": asked.truncate, "raw_scores": asked.raw_scores}
    nested = many
    if asked.parameters is not None:
        nested = True
        for name, value in asked.parameters.model_dump(exclude_none=True).items():
            if fields.get(name) is not None:
                raise invalid("given beside inputs and in parameters", name)
            fields[name] = value
        apply = fields.pop("function_to_apply", None)
        if apply is not None:
            if "raw_scores" in asked.model_fields_set:
                raise invalid("says what raw_scores says beside inputs", "parameters.function_to_apply")
            fields["raw_scores"] = apply == "none"
    texts = [_text(row, f"inputs[{index}]" if many else "inputs") for index, row in enumerate(rows)]
    fields["inputs"] = texts if many else texts[0]

    def write(model: ServedModel, document: dict[str, Any]) -> Response:
        lists = [result["scores"] for result in document["results"]]
        return to_json(lists if nested else lists[0], exits_header(document))

    return Call(wish_from(fields, header), write)


def _text(row: list[str], path: str) -> str | TextPair:
    if len(row) > 2:
        raise invalid('a list of two strings is a pair; several texts are lists in a list, as in [["a"], ["b"]]', path)
    return row[0] if len(row) == 1 else TextPair(text=row[0], text_pair=row[1])
