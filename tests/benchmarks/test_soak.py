"""What the soak believes: it must see what is wrong, and poison what it means to poison."""

import json
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from benchmarks.soak import Mix, Request, long_and_short, poisoned_copy, problem_with, rare_word
from models.bundle import Bundle, Precision
from server.app import create_app
from server.config import load_settings
from tests.server.conftest import some_texts
from tests.tiny import write_tiny_bundle


def result(label: str = "positive", exit_number: int = 2, score: float = 0.9) -> dict[str, Any]:
    return {"label": label, "score": score, "exit": {"number": exit_number}}


ALONE = {(0.99, 7): result(), (0.99, 8): result("negative")}
ASKED = Request(b"", 200, (7, 8), 0.99)


def answered(*results: dict[str, Any]) -> bytes:
    return json.dumps({"results": results}).encode()


def test_the_answers_that_texts_get_alone_are_right() -> None:
    assert problem_with(ASKED, 200, answered(result(score=0.9004), result("negative")), ALONE) == ""


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, answered(result(), result("positive"))),
        (200, answered(result(exit_number=3), result("negative"))),
        (200, answered(result(score=0.95), result("negative"))),
        (200, answered(result("negative"), result())),
        (200, answered(result())),
        (500, b"{}"),
        (503, b"{}"),
    ],
    ids=["label", "exit", "score", "exchanged", "one lost", "failed", "draining"],
)
def test_whatever_differs_is_a_problem(status: int, body: bytes) -> None:
    assert problem_with(ASKED, status, body, ALONE)


def test_a_refusal_is_none_and_a_poisoned_text_must_fail_as_not_finite() -> None:
    poisoned = Request(b"", 500)
    nonfinite, internal = ({"error": {"type": kind}} for kind in ("nonfinite", "internal"))
    assert problem_with(ASKED, 429, b"", ALONE) == ""
    assert problem_with(poisoned, 500, json.dumps(nonfinite).encode(), ALONE) == ""
    assert problem_with(poisoned, 500, json.dumps(internal).encode(), ALONE)
    assert problem_with(poisoned, 200, answered(result()), ALONE)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_in_a_poisoned_copy_the_word_fails_alone(precision: Precision, tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path, precisions=(precision,), poison=())
    texts = ["the film was good", "a dull movie"]
    word, token = rare_word(bundle, texts)
    copy = Bundle.load(poisoned_copy(bundle, token, tmp_path / "poisoned"))
    with TestClient(create_app(load_settings(threads=1, runs=1), [copy])) as client:

        def status(text: str) -> int:
            return client.post("/classify", json={"inputs": text, "quality": 1.0}).status_code

        assert [status(text) for text in [*texts, f"the {word} was good"]] == [200, 200, 500]
    assert Bundle.load(bundle.path).manifest == bundle.manifest


def test_what_the_mix_draws_is_answered_as_it_says(tiny_bundle: Bundle) -> None:
    """One request after the other; ``poison`` is a word that the tiny bundle has NaN for."""
    texts = long_and_short(some_texts(4), 8)
    mix = Mix(texts, [0.95, 1.0], "poison", seed=3)
    drawn = [mix.request() for _ in range(1500)]
    assert {request.status for request in drawn} == {200, 400, 404, 413, 422, 500}
    usual, poisoned = ([request for request in drawn if request.status == status] for status in (200, 500))
    nonsense = {request.body: request for request in drawn if request.status not in (200, 500)}
    with TestClient(create_app(load_settings(threads=1, runs=1), [tiny_bundle])) as client:
        alone = {
            (quality, number): client.post("/classify", json={"inputs": text, "quality": quality}).json()["results"][0]
            for quality in (0.95, 1.0)
            for number, text in enumerate(texts)
        }
        for request in [*usual[:25], *poisoned[:10], *nonsense.values()]:
            reply = client.post("/classify", content=request.body)
            assert problem_with(request, reply.status_code, reply.content, alone) == ""


def test_texts_reach_from_one_word_to_more_than_the_model_takes(tiny_bundle: Bundle) -> None:
    longest = tiny_bundle.manifest.architecture.max_length
    tokens = [len(text.split()) for text in long_and_short(["the film was good"], longest)]
    assert {1, 2, longest, longest + 5} <= set(tokens)
