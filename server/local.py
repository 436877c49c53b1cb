"""The engine without HTTP: `offramp classify`. The same checks, the same engine and the same result documents."""

import asyncio
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from server.api.classify import classify
from server.api.errors import ApiError, from_validation
from server.api.schemas import ClassifyRequest, TextPair
from server.catalog import load_catalog
from server.config import Settings, load_bundles
from server.metrics import Metrics

# Texts that are classified together: enough to fill micro-batches, few enough that a stream of lines keeps flowing.
CHUNK = 32


class WrongWish(Exception):
    """The depth that was asked for cannot be; the message names the wish."""


class WrongText(Exception):
    """A text cannot be classified; the message names the text by its place."""


@dataclass(frozen=True, slots=True)
class Line:
    """A text, and the words that name its place in an error (``line 7``). A tab separates the two texts of a pair."""

    place: str
    text: str


def classify_all(
    lines: Iterable[Line], wishes: Mapping[str, Any], settings: Settings
) -> Iterator[tuple[Line, dict[str, Any]]]:
    """Classifies ``lines`` with the first bundle of ``settings`` and yields each with its ``schemas.Result`` document.

    ``wishes`` are fields of ``schemas.ClassifyRequest``, for all lines alike. Lines are read only as answers are taken.
    Raises :class:`WrongWish`, :class:`WrongText`, or ``StartError`` for a bundle that cannot run.
    """
    # On a text that is sure to pass, so that what is wrong is the wish.
    request = _checked({"inputs": "text", **wishes})
    # Nobody else waits, so nothing has to be known of how long runs take.
    settings = settings.model_copy(update={"measure_seconds": 0.0})
    catalog = load_catalog(settings, load_bundles(settings)[:1], Metrics())
    model = catalog.default
    source = iter(lines)
    with asyncio.Runner() as runner:
        runner.run(catalog.start())
        try:
            while chunk := list(itertools.islice(source, min(CHUNK, settings.max_inputs))):
                inputs = [_as_input(line, model.bundle.manifest.takes_pairs) for line in chunk]
                try:
                    # Without copying the checks: texts are strings already, and classify looks at what they hold.
                    document, _ = runner.run(classify(model, request.model_copy(update={"inputs": inputs}), settings))
                except ApiError as error:
                    raise _named(error, chunk) from None
                yield from zip(chunk, document["results"], strict=True)
        finally:
            runner.run(catalog.close())


def _checked(fields: Mapping[str, Any]) -> ClassifyRequest:
    try:
        return ClassifyRequest.model_validate(fields)
    except ValidationError as error:
        raise _named(from_validation(error, b""), []) from None


def _as_input(line: Line, takes_pairs: bool) -> str | TextPair:
    try:
        line.text.encode()
    except UnicodeEncodeError:
        raise WrongText(f"{line.place}: not UTF-8") from None
    if not takes_pairs:
        return line.text
    text, tab, pair = line.text.partition("\t")
    if not tab:
        raise WrongText(f"{line.place}: this model classifies pairs: a tab must separate the two texts")
    return TextPair(text=text, text_pair=pair)


def _named(error: ApiError, chunk: list[Line]) -> Exception:
    """``error`` in the words of whoever gave the wishes and the lines."""
    place = re.match(r"inputs\[(\d+)\]", error.param or "")
    if place:
        return WrongText(f"{chunk[int(place[1])].place}: {error.message}")
    return WrongWish(f"{error.param}: {error.message}" if error.param else error.message)
