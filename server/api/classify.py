"""The one call behind every front door: a checked request in, the response document out.

Its HTTP shape is in ``schemas``; ``offramp classify`` uses it without HTTP.
"""

from dataclasses import dataclass
from typing import Any

from server.api.depth import Depth, choose_depth
from server.api.errors import ApiError, invalid
from server.api.schemas import ClassifyRequest, TextPair
from server.catalog import Catalog, ServedModel
from server.config import Settings
from server.engine.admission import Overloaded
from server.engine.engine import NoTokens, NotRunning, Submitted, TooLong
from server.engine.request import Answer, Outcome, Reading, Text, Timeline


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of a request: tokenizing all its texts, and the longest wait and inference of any of them."""

    tokenize: float
    queue: float
    inference: float

    def header(self) -> str:
        """As a ``Server-Timing`` header, in milliseconds."""
        parts = (("tokenize", self.tokenize), ("queue", self.queue), ("inference", self.inference))
        return ", ".join(f"{name};dur={seconds * 1000:.3f}" for name, seconds in parts)


def find_model(catalog: Catalog, name: str | None) -> ServedModel:
    """The model called ``name`` (``None``: the default). Raises :class:`ApiError` (404)."""
    model = catalog.find(name)
    if model is None:
        names = ", ".join(catalog.models)
        raise ApiError(404, f"no such model; this server has {names}", "model")
    return model


def overloaded(model: ServedModel, error: Overloaded) -> ApiError:
    """Counts a request that ``model`` has no room for; its 429."""
    model.metrics.rejected(error.reason)
    return ApiError(429, str(error), headers={"Retry-After": str(error.retry_after)})


async def classify(
    model: ServedModel,
    request: ClassifyRequest,
    settings: Settings,
    *,
    request_id: str = "",
    timeline: Timeline | None = None,
) -> tuple[dict[str, Any], Timing]:
    """Classifies the texts of ``request`` with ``model``; the log calls them by ``request_id``, and ``timeline`` is
    filled in on the way.

    Returns the document of ``schemas.ClassifyResponse`` and the timing. Raises :class:`ApiError`, naming the field. One
    text that cannot be answered fails its whole request; texts of other requests are not disturbed.
    """
    exits = len(model.bundle.manifest.architecture.exits)
    texts, paths = _texts(request, model, settings)
    depth = choose_depth(
        request,
        model.calibration,
        exits=exits,
        default_quality=settings.default_quality,
        pressure=0.0 if request.quality_floor is None else model.engine.pressure(),
        suspended=model.promises.suspended,
    )
    deadline_ms = settings.deadline_ms if request.deadline_ms is None else request.deadline_ms
    try:
        submitted = await model.engine.submit(
            texts,
            [depth.policy] * len(texts),
            truncate=request.truncate,
            deadline_seconds=None if deadline_ms is None else deadline_ms / 1000,
            every_reading=request.explain,
            tier=depth.tier if depth.tier is not None and depth.tier < 1.0 else None,
            request_id=request_id,
            timeline=timeline,
        )
    except Overloaded as error:
        raise overloaded(model, error) from None
    except NotRunning:
        model.metrics.rejected("not_running")
        if model.engine.broken:
            raise ApiError(503, "a worker of this model has died") from None
        raise ApiError(503, "the server is starting or draining", type="draining") from None
    except TooLong as error:
        message = f"{error.tokens} tokens, but at most {error.limit} are read (truncate is false)"
        raise ApiError(413, message, paths[error.index]) from None
    except NoTokens as error:
        raise invalid("nothing is left of the text after normalisation", paths[error.index]) from None
    model.metrics.tokenized(submitted.tokenize_seconds)
    answers = [_answer(outcome, path, model) for outcome, path in zip(submitted.outcomes, paths, strict=True)]
    if depth.lowered:
        model.metrics.lowered(depth.tier, len(texts))
    return _document(model, request, depth, answers), _timing(submitted, answers)


def _texts(request: ClassifyRequest, model: ServedModel, settings: Settings) -> tuple[list[Text], list[str]]:
    """The texts of a request, and the field path of each. Raises :class:`ApiError` for texts this model cannot take."""
    if isinstance(request.inputs, list):
        elements = request.inputs
        paths = [f"inputs[{index}]" for index in range(len(elements))]
    else:
        elements, paths = [request.inputs], ["inputs"]
    if len(elements) > settings.max_inputs:
        raise ApiError(
            413,
            f"{len(elements)} texts, but a request takes at most {settings.max_inputs} (OFFRAMP_MAX_INPUTS)",
            "inputs",
        )
    takes_pairs = model.bundle.manifest.takes_pairs
    texts = []
    for element, path in zip(elements, paths, strict=True):
        if isinstance(element, TextPair):
            text, first, pair = Text(element.text, element.text_pair), f"{path}.text", f"{path}.text_pair"
        else:
            text, first, pair = Text(element), path, path
        if takes_pairs and text.pair is None:
            raise invalid("this model classifies pairs, and the second text (text_pair) is missing", pair)
        if text.pair is not None and not takes_pairs:
            raise invalid("this model takes single texts, no pairs", pair)
        _check_text(text.text, first, settings)
        if text.pair is not None:
            _check_text(text.pair, pair, settings)
        texts.append(text)
    return texts, paths


def _check_text(text: str, path: str, settings: Settings) -> None:
    if len(text) > settings.max_characters:
        limit = f"at most {settings.max_characters} (OFFRAMP_MAX_CHARACTERS)"
        raise ApiError(413, f"{len(text)} characters, but a text may have {limit}", path)
    if not text or text.isspace():
        raise invalid("the text is empty or blank", path)


def _answer(outcome: Outcome, path: str, model: ServedModel) -> Answer:
    if isinstance(outcome, Answer):
        return outcome
    if outcome.kind == "deadline":
        model.metrics.rejected("deadline")
        raise ApiError(504, "the deadline passed before the first exit", path)
    if outcome.kind == "nonfinite":
        raise ApiError(500, "the model's scores for this text are not finite", path, type="nonfinite")
    raise ApiError(500, "the text could not be classified; the server's log says why", path)


def _timing(submitted: Submitted, answers: list[Answer]) -> Timing:
    return Timing(
        tokenize=submitted.tokenize_seconds,
        queue=max(answer.queue_seconds for answer in answers),
        inference=max(answer.inference_seconds for answer in answers),
    )


def _document(model: ServedModel, request: ClassifyRequest, depth: Depth, answers: list[Answer]) -> dict[str, Any]:
    results = [_result(model, request, depth, answer) for answer in answers]
    layers = sum(result["exit"]["layer"] for result in results)
    return {
        "model": model.name,
        "version": model.bundle.manifest.version,
        "results": results,
        "usage": {
            "tokens": sum(answer.tokens for answer in answers),
            "layers_run": layers,
            "layers_saved": len(results) * model.bundle.manifest.architecture.num_layers - layers,
        },
    }


def _result(model: ServedModel, request: ClassifyRequest, depth: Depth, answer: Answer) -> dict[str, Any]:
    costs, left = model.costs(answer.tokens), answer.left
    # Whoever was cut short by a deadline left before the certified threshold was met.
    tier = None if answer.reason == "deadline" else depth.tier
    spent = costs.spent([reading.exit for reading in answer.readings])
    model.metrics.served(tier, left.exit, flops=costs.layer * spent, flops_saved=costs.layer * costs.beyond(left.exit))
    document: dict[str, Any] = {
        **_scores(model, request, left),
        "exit": {
            "number": left.exit,
            "layer": model.bundle.manifest.architecture.exits[left.exit - 1].after_layer,
            "of": model.bundle.manifest.architecture.num_layers,
            "cost": round(spent, 4),
            "reason": answer.reason,
            "confidence": left.confidence,
            "entropy": left.entropy,
            "agreement": left.agreement,
            "tier": tier,
        },
        "tokens": answer.tokens,
        "truncated": answer.truncated,
    }
    if request.explain:
        document["exits"] = [
            {
                "number": reading.exit,
                "layer": model.bundle.manifest.architecture.exits[reading.exit - 1].after_layer,
                "cost": round(costs.until[reading.exit - 1], 4),
                **_scores(model, request, reading),
                "confidence": reading.confidence,
                "entropy": reading.entropy,
                "agreement": reading.agreement,
                "inference_ms": round(reading.seconds * 1000, 3),
            }
            for reading in answer.readings
        ]
    return document


def _scores(model: ServedModel, request: ClassifyRequest, reading: Reading) -> dict[str, Any]:
    labels = model.bundle.manifest.labels
    logits = reading.logits.tolist()
    values = logits if request.raw_scores else reading.probabilities.tolist()
    # By logits: two probabilities can round to the same number. Stable, so that ties go to the label of the verdict.
    # Python's sort, not NumPy's: that one hands the interpreter to the workers, and waits to get it back.
    order = sorted(range(len(logits)), key=logits.__getitem__, reverse=True)
    return {
        "label": labels[reading.label],
        "score": values[reading.label],
        "scores": [{"label": labels[index], "score": values[index]} for index in order[: request.top_k]],
    }
