"""The Open Inference Protocol (KServe V2, Triton) under ``/v2``, with its binary tensors and Triton's classification.

A model takes the tensor ``text`` (``BYTES``, UTF-8), of shape ``[N]`` or ``[N, 1]``, and ``text_pair`` beside it where
it classifies pairs. It gives ``label``, ``score``, ``exit``, ``cost`` and ``tier`` in that shape, and ``scores`` as
``[N, K]`` in the order of the model's labels.
"""

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
import pydantic_core
from fastapi import APIRouter, Request, Response
from pydantic import Discriminator, Field, Tag
from starlette.datastructures import Headers

from server.api.classify import find_model
from server.api.errors import ApiError, invalid
from server.api.front import Call, Front, read_as, to_json, wish_from, wishes_header
from server.api.openapi import described
from server.api.schemas import Strict, TextPair, Wishes
from server.catalog import Catalog, ServedModel
from server.config import MOST_INPUTS
from server.middleware import CONTEXT, Context

JSON_LENGTH_HEADER = "Inference-Header-Content-Length"

EXAMPLES: dict[str, dict[str, Any]] = {
    "one text": {
        "value": {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a gripping film"]}]}
    },
    "two texts, their best class, at a promised quality": {
        "value": {
            "inputs": [
                {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a gripping film", "two hours of nothing"]}
            ],
            "outputs": [{"name": "scores", "parameters": {"classification": 1}}, {"name": "exit"}],
            "parameters": {"quality": 0.97},
        }
    },
}


class InputParameters(Strict):
    binary_data_size: int | None = Field(
        default=None, ge=0, lt=2**63, description="bytes of the tensor behind the JSON, in place of data"
    )


def _kind_of_row(value: Any) -> str | None:
    return "=text" if isinstance(value, str) else "=row" if isinstance(value, list) else None


_Row = Annotated[
    Annotated[str, Tag("=text")] | Annotated[list[str], Field(max_length=MOST_INPUTS, fail_fast=True), Tag("=row")],
    Discriminator(
        _kind_of_row, custom_error_type="input_type", custom_error_message="a string, or a list of one string"
    ),
]
_Size = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class InputTensor(Strict):
    name: str = Field(max_length=128)
    shape: list[_Size] = Field(min_length=1, max_length=2, fail_fast=True)
    datatype: str = Field(max_length=16)
    parameters: InputParameters = InputParameters()
    data: Annotated[list[_Row], Field(max_length=MOST_INPUTS, fail_fast=True)] | None = None


class OutputParameters(Strict):
    binary_data: bool | None = Field(default=None, description="whether the tensor comes behind the JSON")
    classification: int | None = Field(
        default=None, ge=1, le=100_000, description='so many classes of scores, best first, as "score:index:label"'
    )


class OutputRequest(Strict):
    name: str = Field(max_length=128)
    parameters: OutputParameters = OutputParameters()


class InferParameters(Wishes):
    """How deep to go, in the protocol's place for what it does not know."""

    binary_data_output: bool = Field(default=False, description="outputs come as binary tensors")
    raw_scores: bool = Field(default=False, description="scores are the exit's logits")
    truncate: bool = Field(default=True, description="cut what is too long; false answers it with 413")


class InferRequest(Strict):
    """A request of the Open Inference Protocol."""

    id: str | None = Field(default=None, max_length=128)
    inputs: list[InputTensor] = Field(min_length=1, max_length=2, fail_fast=True)
    outputs: list[OutputRequest] = Field(default=[], max_length=16, fail_fast=True, description="none means all")
    parameters: InferParameters = InferParameters()


class OutputTensor(Strict):
    name: str
    shape: list[int]
    datatype: str
    parameters: dict[str, int] | None = None
    data: list[str] | list[float] | list[int] | None = None


class InferResponse(Strict):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[OutputTensor]


class InferError(Strict):
    error: str


class ServerMetadata(Strict):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Strict):
    name: str
    datatype: str
    shape: list[int] = Field(description="-1: as many as there are texts")


class ModelMetadata(Strict):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Live(Strict):
    live: Literal[True]


class Ready(Strict):
    ready: Literal[True]
    name: str | None = None


@dataclass(frozen=True, slots=True)
class _Output:
    """A tensor that every model gives: one value for each text, or (``of`` is ``None``) the scores of all labels."""

    datatype: str
    of: Callable[[dict[str, Any]], Any] | None = None


_OUTPUTS = {
    "label": _Output("BYTES", lambda result: result["label"]),
    "score": _Output("FP32", lambda result: result["score"]),
    "scores": _Output("FP32"),
    "exit": _Output("INT64", lambda result: result["exit"]["number"]),
    "cost": _Output("FP32", lambda result: result["exit"]["cost"]),
    # 0 promises nothing; a tensor has no null.
    "tier": _Output("FP32", lambda result: result["exit"]["tier"] or 0.0),
}
_DTYPES = {"FP32": "<f4", "INT64": "<i8"}


def add_routes(router: APIRouter, front: Front, catalog: Catalog, version: str) -> None:
    def model_of(name: str, wanted: str | None) -> ServedModel:
        model = find_model(catalog, name)
        if wanted is not None and wanted != model.bundle.manifest.version:
            raise ApiError(404, f"no such version; this server has {model.bundle.manifest.version}", "version")
        return model

    errors: dict[int | str, dict[str, Any]] = {
        code: {"model": InferError, "description": text}
        for code, text in ((401, "a key is needed"), (404, "no such model or version"), (503, "not ready"))
    }

    @router.get("/v2", summary="The server, as the Open Inference Protocol names it", response_model=ServerMetadata)
    async def get_server() -> Response:
        extensions = ["classification", "binary_tensor_data"]
        return to_json({"name": "offramp", "version": version, "extensions": extensions})

    @router.get("/v2/health/live", summary="Whether the process works", response_model=Live, responses=errors)
    async def get_live() -> Response:
        if not catalog.draining and not catalog.alive:
            raise ApiError(503, "a worker has died")
        return to_json({"live": True})

    @router.get("/v2/health/ready", summary="Whether to send requests here", response_model=Ready, responses=errors)
    async def get_ready() -> Response:
        _check_ready(catalog)
        return to_json({"ready": True})

    for prefix in ("/v2/models/{model}", "/v2/models/{model}/versions/{version}"):

        @router.get(prefix, summary="A model and its tensors", response_model=ModelMetadata, responses=errors)
        async def get_model(model: str, version: str | None = None) -> Response:
            return to_json(_metadata(model_of(model, version)))

        @router.get(f"{prefix}/ready", summary="Whether a model answers", response_model=Ready, responses=errors)
        async def get_model_ready(model: str, version: str | None = None) -> Response:
            served = model_of(model, version)
            _check_ready(catalog)
            return to_json({"name": served.name, "ready": True})

        @router.post(
            f"{prefix}/infer",
            summary="Classify as the Open Inference Protocol does",
            **described(InferRequest, InferResponse, InferError, EXAMPLES),
        )
        async def infer(request: Request, model: str, version: str | None = None) -> Response:
            def read(body: bytes) -> Call:
                # A model that is not there is no label of a metric.
                context: Context = request.scope[CONTEXT]
                context.model = ""
                served = model_of(model, version)
                context.model = served.name
                return _read(body, served, request.headers)

            return await front.answer(request, read)


def _check_ready(catalog: Catalog) -> None:
    if catalog.draining or not catalog.alive:
        raise ApiError(503, "draining" if catalog.draining else "not ready")


def _metadata(model: ServedModel) -> dict[str, Any]:
    manifest = model.bundle.manifest
    names = ("text", "text_pair") if manifest.takes_pairs else ("text",)
    return {
        "name": manifest.name,
        "versions": [manifest.version],
        "platform": "offramp",
        "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in names],
        "outputs": [
            {
                "name": name,
                "datatype": output.datatype,
                "shape": [-1] if output.of is not None else [-1, len(manifest.labels)],
            }
            for name, output in _OUTPUTS.items()
        ],
    }


def _read(body: bytes, model: ServedModel, headers: Headers) -> Call:
    document, rest = body, b""
    declared = headers.getlist(JSON_LENGTH_HEADER)
    if declared:
        # No more digits than any body has bytes: int() refuses 4301 of them, zeros in front or not.
        length = int(declared[0]) if re.fullmatch("[0-9]{1,19}", declared[0]) else len(body) + 1
        if len(declared) > 1 or length > len(body):
            raise ApiError(400, f"no number of bytes within the body: {JSON_LENGTH_HEADER}")
        document, rest = body[:length], body[length:]
    asked = read_as(InferRequest, document)
    for place, output in enumerate(asked.outputs):
        if output.name not in _OUTPUTS:
            raise invalid(f"no such output; this model has {', '.join(_OUTPUTS)}", f"outputs[{place}].name")
        if output.parameters.classification is not None and output.name != "scores":
            raise invalid("only scores can be classified", f"outputs[{place}].parameters.classification")
    tensors, shape = _texts(asked, rest)
    if "text" not in tensors:
        raise invalid("the tensor text is missing", "inputs")
    # A pair that is missing, or not for this model, is found where all doors' texts are checked.
    pairs = tensors.get("text_pair")
    inputs = (
        tensors["text"]
        if pairs is None
        else [TextPair(text=text, text_pair=pair) for text, pair in zip(tensors["text"], pairs, strict=True)]
    )
    wishes = asked.parameters.model_dump(exclude={"binary_data_output"})
    wish = wish_from({"inputs": inputs, "model": model.name, **wishes}, wishes_header(headers))
    return Call(wish, lambda served, answer: _write(served, answer, asked, shape), "text")


def _texts(asked: InferRequest, rest: bytes) -> tuple[dict[str, list[str]], list[int]]:
    """The texts of each input tensor, and the shape that they share. Raises :class:`ApiError`."""
    tensors: dict[str, list[str]] = {}
    shape = asked.inputs[0].shape
    for place, tensor in enumerate(asked.inputs):
        path = f"inputs[{place}]"
        if tensor.name not in ("text", "text_pair") or tensor.name in tensors:
            raise invalid("the tensors are text, and text_pair for a model that takes pairs", f"{path}.name")
        if tensor.datatype != "BYTES":
            raise invalid("must be BYTES", f"{path}.datatype")
        if tensor.shape != shape or shape[0] < 1 or shape[1:] not in ([], [1]):
            raise invalid("must be [N] or [N, 1] with N texts, the same for all inputs", f"{path}.shape")
        if shape[0] > MOST_INPUTS:
            # Not after its texts are read: a body has room for 500,000 empty ones, which kept the event loop for 0.9 s.
            raise ApiError(413, f"more than {MOST_INPUTS} texts", f"{path}.shape")
        size = tensor.parameters.binary_data_size
        if (size is None) == (tensor.data is None):
            raise invalid("either data or parameters.binary_data_size is needed", path)
        if size is not None:
            if size > len(rest):
                raise ApiError(400, f"{size} bytes are declared, {len(rest)} are left", path)
            texts, rest = _unpack(rest[:size], shape[0], path), rest[size:]
        else:
            texts = [text for row in tensor.data or () for text in (row if isinstance(row, list) else [row])]
        if len(texts) != shape[0]:
            raise invalid(f"{len(texts)} texts, but the shape says {shape[0]}", f"{path}.data")
        tensors[tensor.name] = texts
    if rest:
        raise ApiError(400, f"{len(rest)} bytes behind the last tensor")
    return tensors, shape


def _unpack(data: bytes, count: int, path: str) -> list[str]:
    """The texts of a binary ``BYTES`` tensor: before each its length in bytes, 4 bytes little-endian."""
    texts: list[str] = []
    place = 0
    while place < len(data) and len(texts) <= count:
        end = place + 4 + int.from_bytes(data[place : place + 4], "little")
        if place + 4 > len(data) or end > len(data):
            raise ApiError(400, f"text {len(texts)} ends beyond the tensor", path)
        try:
            texts.append(data[place + 4 : end].decode("utf-8"))
        except UnicodeDecodeError:
            raise ApiError(400, f"text {len(texts)} is not UTF-8", path) from None
        place = end
    return texts


def _write(model: ServedModel, document: dict[str, Any], asked: InferRequest, shape: list[int]) -> Response:
    labels = model.bundle.manifest.labels
    places = {label: place for place, label in enumerate(labels)}
    results = document["results"]
    outputs: list[dict[str, Any]] = []
    binary: list[bytes] = []
    for output in asked.outputs or [OutputRequest(name=name) for name in _OUTPUTS]:
        kind, classes = _OUTPUTS[output.name], output.parameters.classification
        tensor: dict[str, Any] = {"name": output.name, "datatype": kind.datatype, "shape": shape}
        values: list[Any]
        if kind.of is not None:
            values = [kind.of(result) for result in results]
        elif classes is not None:
            values = [text for result in results for text in _classified(result["scores"][:classes], places)]
            tensor |= {"datatype": "BYTES", "shape": [len(results), min(classes, len(labels))]}
        else:
            rows = ({one["label"]: one["score"] for one in result["scores"]} for result in results)
            values = [row[label] for row in rows for label in labels]
            tensor["shape"] = [len(results), len(labels)]
        wanted = output.parameters.binary_data
        if asked.parameters.binary_data_output if wanted is None else wanted:
            binary.append(_pack(values, tensor["datatype"]))
            tensor["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            tensor["data"] = values
        outputs.append(tensor)
    answer: dict[str, Any] = {"model_name": model.name, "model_version": document["version"], "outputs": outputs}
    if asked.id is not None:
        answer["id"] = asked.id
    if not binary:
        return to_json(answer)
    head = pydantic_core.to_json(answer)
    return Response(
        b"".join((head, *binary)),
        media_type="application/octet-stream",
        headers={JSON_LENGTH_HEADER: str(len(head))},
    )


def _classified(scores: Sequence[dict[str, Any]], places: Mapping[str, int]) -> list[str]:
    return [f"{one['score']:f}:{places[one['label']]}:{one['label']}" for one in scores]


def _pack(values: list[Any], datatype: str) -> bytes:
    if datatype == "BYTES":
        return b"".join(struct.pack("<I", len(text)) + text for text in (str(value).encode() for value in values))
    return np.asarray(values, _DTYPES[datatype]).tobytes()
