"""POST /classify over HTTP: what it answers, what it refuses, and in what words."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from models.bundle import Bundle
from models.costs import exit_costs, reading_costs
from server.api.errors import from_validation
from server.api.schemas import ClassifyRequest, ClassifyResponse
from server.promises import evidence
from tests.server.conftest import Served, error_of, samples, serving, some_texts
from tests.tiny import POISON

pytestmark = pytest.mark.anyio

SECRET = "xyzzy-secret-text"


@pytest.fixture(scope="module")
async def served(tiny_bundle: Bundle, pair_bundle: Bundle) -> AsyncIterator[Served]:
    async with serving(
        tiny_bundle, pair_bundle, max_inputs=64, max_body_bytes=200_000, max_characters=20_000, default_quality=0.97
    ) as up:
        yield up


# What it answers.


async def test_one_text_gets_one_result_of_the_documented_shape(served: Served, tiny_bundle: Bundle) -> None:
    response = await served.classify("a good film")
    assert response.status_code == 200
    document = ClassifyResponse.model_validate_json(response.content)
    assert (document.model, document.version) == ("tiny", "1")
    (result,) = document.results
    assert result.tokens == 5
    assert not result.truncated
    assert result.label == result.scores[0].label
    assert result.score == result.scores[0].score
    assert sum(score.score for score in result.scores) == pytest.approx(1.0)
    assert result.exit.of == 4
    assert result.exit.tier == 0.97
    costs = exit_costs(tiny_bundle.manifest.architecture, 5)
    assert result.exit.cost == pytest.approx(costs[result.exit.number - 1], abs=1e-4)
    assert document.usage.tokens == 5
    assert document.usage.layers_run == result.exit.layer
    assert document.usage.layers_saved == 4 - result.exit.layer


async def test_exits_appears_only_with_explain(served: Served) -> None:
    assert "exits" not in (await served.results("a good film"))[0]


@pytest.mark.parametrize("form", ["strings", "objects", "mixed"])
async def test_a_list_gets_a_result_for_each_in_order(served: Served, form: str) -> None:
    texts = some_texts(9, seed=2)
    inputs: list[Any] = [
        text if form == "strings" or (form == "mixed" and place % 2) else {"text": text}
        for place, text in enumerate(texts)
    ]
    singles = [(await served.results(text))[0] for text in texts]
    together = await served.results(inputs)
    assert [result["label"] for result in together] == [result["label"] for result in singles]
    assert [result["tokens"] for result in together] == [result["tokens"] for result in singles]
    np.testing.assert_allclose(
        [result["score"] for result in together], [result["score"] for result in singles], atol=1e-4
    )


async def test_two_strings_in_a_list_are_two_texts(served: Served) -> None:
    assert len(await served.results(["a film", "good"])) == 2


async def test_pairs_are_classified_by_a_model_that_takes_them(served: Served) -> None:
    pair = {"text": "a man plays music", "text_pair": "someone plays a flute"}
    (result,) = await served.results(pair, model="tiny-pairs")
    assert result["tokens"] == 4 + 4 + 3
    assert {score["label"] for score in result["scores"]} == {"entailment", "neutral", "contradiction"}
    (turned,) = await served.results({"text": pair["text_pair"], "text_pair": pair["text"]}, model="tiny-pairs")
    assert result["scores"] != turned["scores"]


async def test_deeper_qualities_go_deeper(served: Served) -> None:
    texts = some_texts(60, seed=5)
    depths = []
    for wish in ({"speed": 3.0}, {"quality": 0.95}, {"quality": 0.99}, {"quality": 1.0}):
        results = await served.results(texts, **wish)
        depths.append(sum(result["exit"]["cost"] for result in results))
        assert {result["exit"]["tier"] for result in results} == {wish.get("quality")}
    assert depths == sorted(depths)
    assert len(set(depths)) == 4


async def test_quality_1_is_the_last_exit_for_every_text(served: Served) -> None:
    results = await served.results(some_texts(20), quality=1.0)
    assert Counter((result["exit"]["number"], result["exit"]["reason"]) for result in results) == {(4, "final"): 20}


async def test_the_answer_names_the_tier_that_it_got(served: Served) -> None:
    assert (await served.results("a film", quality=0.98))[0]["exit"]["tier"] == 0.99


@pytest.mark.parametrize(
    ("criterion", "threshold", "met"),
    [
        ("confidence", 0.85, lambda passed: passed["confidence"] >= 0.85),
        ("entropy", 0.4, lambda passed: passed["entropy"] <= 0.4),
    ],
)
async def test_a_text_leaves_at_the_first_exit_that_meets_its_threshold(
    served: Served, criterion: str, threshold: float, met: Any
) -> None:
    for result in await served.results(some_texts(30), criterion=criterion, threshold=threshold, explain=True):
        *before, left = result["exits"]
        assert not any(met(passed) for passed in before)
        assert met(left) or left["number"] == 4
        assert result["exit"]["reason"] == ("final" if left["number"] == 4 else criterion)
        assert result["exit"]["tier"] is None


async def test_patience_leaves_when_exits_agree(served: Served) -> None:
    for result in await served.results(some_texts(30), criterion="patience", threshold=1, explain=True):
        labels = [passed["label"] for passed in result["exits"]]
        assert len(labels) >= 2
        assert all(one != other for one, other in itertools.pairwise(labels[:-1]))
        assert labels[-1] == labels[-2] or len(labels) == 4


async def test_min_and_max_exit_bound_the_way(served: Served) -> None:
    results = await served.results(some_texts(30), threshold=0.7, min_exit=2, max_exit=3)
    assert {result["exit"]["number"] for result in results} == {2, 3}
    late = await served.results(some_texts(10), threshold=1.0, max_exit=2)
    assert {(result["exit"]["number"], result["exit"]["reason"]) for result in late} == {(2, "max_exit")}


async def test_full_depth_does_not_pay_for_the_exits_that_it_passes(served: Served, tiny_bundle: Bundle) -> None:
    (plain,) = await served.results("a good film", quality=1.0)
    (explained,) = await served.results("a good film", quality=1.0, explain=True)
    reading = reading_costs(tiny_bundle.manifest.architecture, 5)
    assert plain["exit"]["cost"] == pytest.approx(explained["exit"]["cost"] - sum(reading[:-1]), abs=2e-4)
    assert plain["scores"] == explained["scores"]


async def test_explain_adds_every_exit_passed(served: Served) -> None:
    (result,) = await served.results("a good film", quality=1.0, explain=True)
    assert [passed["number"] for passed in result["exits"]] == [1, 2, 3, 4]
    last = result["exits"][-1]
    assert (last["label"], last["score"], last["scores"]) == (result["label"], result["score"], result["scores"])
    assert last["cost"] == result["exit"]["cost"]
    costs = [passed["cost"] for passed in result["exits"]]
    assert costs == sorted(costs)


async def test_raw_scores_are_logits(served: Served, tiny_bundle: Bundle) -> None:
    (plain,) = await served.results("a good film", max_exit=1, threshold=1)
    (raw,) = await served.results("a good film", max_exit=1, threshold=1, raw_scores=True)
    temperature = tiny_bundle.calibration.precisions["fp32"].temperatures[0]
    logits = np.array([score["score"] for score in raw["scores"]]) / temperature
    probabilities = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose([score["score"] for score in plain["scores"]], probabilities, atol=1e-6)
    assert raw["exit"] == plain["exit"]


async def test_top_k_shortens_the_scores(served: Served) -> None:
    pair = {"text": "a man plays music", "text_pair": "someone plays a flute"}
    everything = (await served.results(pair, model="tiny-pairs", top_k=99))[0]["scores"]
    assert [score["score"] for score in everything] == sorted((s["score"] for s in everything), reverse=True)
    assert len(everything) == 3
    assert (await served.results(pair, model="tiny-pairs", top_k=2))[0]["scores"] == everything[:2]


async def test_a_long_text_is_cut_and_says_so(served: Served) -> None:
    (result,) = await served.results("good " * 200)
    assert result["truncated"]
    assert result["tokens"] == 64


async def test_a_deadline_far_away_changes_nothing(served: Served) -> None:
    (plain,) = await served.results("a good film")
    (timed,) = await served.results("a good film", deadline_ms=60_000)
    assert plain == timed


async def test_the_timing_header_has_three_parts_in_milliseconds(served: Served) -> None:
    header = (await served.classify("a good film")).headers["server-timing"]
    parts = dict(part.split(";dur=") for part in header.split(", "))
    assert set(parts) == {"tokenize", "queue", "inference"}
    assert all(float(value) >= 0 for value in parts.values())


async def test_the_times_of_the_exits_passed_add_up_to_the_inference(served: Served) -> None:
    response = await served.classify("a good film", quality=1.0, explain=True)
    times = [passed["inference_ms"] for passed in response.json()["results"][0]["exits"]]
    assert len(times) == 4
    assert all(time > 0 for time in times)
    inference = float(response.headers["server-timing"].rpartition("=")[2])
    assert sum(times) == pytest.approx(inference, abs=0.01)


async def test_models_are_chosen_by_name(served: Served) -> None:
    response = await served.classify("a film", model="tiny")
    assert response.json()["model"] == "tiny"


async def test_text_beyond_ascii_is_welcome(served: Served) -> None:
    assert len(await served.results(["schön 好 🎬 ", "a\u0000b", "\u202egood"])) == 3


# What it refuses. Every refusal names the field, has the one shape, and repeats no text.


@pytest.mark.parametrize(
    ("document", "status", "param"),
    [
        ({}, 422, "inputs"),
        ({"inputs": None}, 422, "inputs"),
        ({"inputs": 7}, 422, "inputs"),
        ({"inputs": True}, 422, "inputs"),
        ({"inputs": []}, 422, "inputs"),
        ({"inputs": ""}, 422, "inputs"),
        ({"inputs": " \n\t\u00a0"}, 422, "inputs"),
        ({"inputs": ["a", "b", ""]}, 422, "inputs[2]"),
        ({"inputs": ["a", 7]}, 422, "inputs[1]"),
        ({"inputs": ["a", ["b"]]}, 422, "inputs[1]"),
        ({"inputs": [{"text": "a"}, {"text": 7}]}, 422, "inputs[1].text"),
        ({"inputs": [{"text": "a"}, {"text": " "}]}, 422, "inputs[1].text"),
        ({"inputs": [{"text_pair": SECRET}]}, 422, "inputs[0].text"),
        ({"inputs": {"text": "a", "texts": "b"}}, 422, "inputs.texts"),
        ({"inputs": {"text": "a", "text_pair": SECRET}}, 422, "inputs.text_pair"),
        ({"inputs": "a", "model": "tiny-pairs"}, 422, "inputs"),
        ({"inputs": [{"text": "a"}], "model": "tiny-pairs"}, 422, "inputs[0].text_pair"),
        ({"inputs": [{"text": "a", "text_pair": ""}], "model": "tiny-pairs"}, 422, "inputs[0].text_pair"),
        ({"inputs": "\u0000"}, 422, "inputs"),
        ({"inputs": ["a"] * 65}, 413, "inputs"),
        ({"inputs": ["a", "b" * 20_001]}, 413, "inputs[1]"),
        ({"inputs": {"text": "b" * 20_001}}, 413, "inputs.text"),
        ({"inputs": ["a", "good " * 100], "truncate": False}, 413, "inputs[1]"),
        ({"inputs": "a", "model": "nobody"}, 404, "model"),
        ({"inputs": "a", "model": 7}, 422, "model"),
        ({"inputs": "a", "treshold": 0.9}, 422, "treshold"),
        ({"inputs": "a", SECRET: 1}, 422, "(unknown)"),
        ({"inputs": "a", "threshold": 1.5}, 422, "threshold"),
        ({"inputs": "a", "threshold": -0.1}, 422, "threshold"),
        ({"inputs": "a", "threshold": "0.9"}, 422, "threshold"),
        ({"inputs": "a", "threshold": True}, 422, "threshold"),
        ({"inputs": "a", "threshold": float("nan")}, 422, "threshold"),
        ({"inputs": "a", "threshold": float("inf")}, 422, "threshold"),
        ({"inputs": "a", "threshold": [0.9]}, 422, "threshold"),
        ({"inputs": "a", "criterion": "entropy"}, 422, "threshold"),
        ({"inputs": "a", "criterion": "margin", "threshold": 0.5}, 422, "criterion"),
        ({"inputs": "a", "criterion": "patience", "threshold": 1.5}, 422, "threshold"),
        ({"inputs": "a", "quality": 0}, 422, "quality"),
        ({"inputs": "a", "quality": 1.01}, 422, "quality"),
        ({"inputs": "a", "quality": True}, 422, "quality"),
        ({"inputs": "a", "quality": 0.999}, 422, "quality"),
        ({"inputs": "a", "speed": 0.5}, 422, "speed"),
        ({"inputs": "a", "speed": 100}, 422, "speed"),
        ({"inputs": "a", "min_exit": 0}, 422, "min_exit"),
        ({"inputs": "a", "min_exit": 5}, 422, "min_exit"),
        ({"inputs": "a", "min_exit": 1.5}, 422, "min_exit"),
        ({"inputs": "a", "min_exit": True}, 422, "min_exit"),
        ({"inputs": "a", "max_exit": 5}, 422, "max_exit"),
        ({"inputs": "a", "min_exit": 3, "max_exit": 2}, 422, "max_exit"),
        ({"inputs": "a", "max_exit": 10**30}, 422, "max_exit"),
        ({"inputs": "a", "top_k": 0}, 422, "top_k"),
        ({"inputs": "a", "deadline_ms": 0}, 422, "deadline_ms"),
        ({"inputs": "a", "deadline_ms": 1e9}, 422, "deadline_ms"),
        ({"inputs": "a", "quality": 0.97, "quality_floor": 0.99}, 422, "quality_floor"),
        ({"inputs": "a", "raw_scores": "yes"}, 422, "raw_scores"),
        ({"inputs": "a", "truncate": 1}, 422, "truncate"),
        ({"inputs": "a", "explain": None}, 422, "explain"),
        ({"inputs": "a", "quality": 0.99, "speed": 2}, 422, None),
        ({"inputs": "a", "quality": 0.99, "threshold": 0.9}, 422, None),
        ({"inputs": "a", "speed": 2, "criterion": "entropy", "threshold": 0.9}, 422, None),
    ],
)
async def test_bad_requests_name_the_field(
    served: Served, document: dict[str, Any], status: int, param: str | None
) -> None:
    response = await served.client.post("/classify", content=json.dumps(document))
    error = error_of(response)
    assert (response.status_code, error["param"]) == (status, param), error
    assert SECRET not in response.text
    assert "\n" not in error["message"]


@pytest.mark.parametrize(
    ("inputs", "status", "param"),
    [(["a"] * 5_000, 413, "inputs"), ([7] * 5_000, 422, "inputs[0]"), (["a"] * 4_000 + [7] * 20, 422, "inputs[4000]")],
)
async def test_a_list_is_refused_at_its_first_wrong_element_or_its_first_too_many(
    served: Served, inputs: list[Any], status: int, param: str
) -> None:
    response = await served.classify(inputs)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
    with pytest.raises(ValidationError) as caught:
        ClassifyRequest.model_validate({"inputs": inputs})
    assert caught.value.error_count() == 1


async def test_thousands_of_unknown_fields_are_counted_and_not_listed(served: Served) -> None:
    response = await served.classify("a", **{f"field{number}": 1 for number in range(2_000)})
    assert response.status_code == 422
    assert "2000 fields" in error_of(response)["message"]


async def test_two_ways_to_choose_depth_are_both_named(served: Served) -> None:
    error = error_of(await served.classify("a", quality=0.99, threshold=0.9))
    assert "at most one" in error["message"]
    assert "quality and criterion and threshold" in error["message"]


@pytest.mark.parametrize(
    "document",
    [
        {"inputs": [7] * 100_000},
        {"inputs": [{}] * 100_000},
        {"inputs": [{"text": 7}] * 100_000},
        {"inputs": "a", **{f"k{number}": 1 for number in range(100_000)}},
        {"inputs": [{"text": "a", **{f"k{number}": 1 for number in range(100_000)}}]},
    ],
)
def test_a_body_full_of_mistakes_is_not_listed_mistake_by_mistake(
    document: dict[str, Any],
) -> None:
    """Listing 700,000 of them held up every other request for a minute."""
    body = json.dumps(document).encode()
    with pytest.raises(ValidationError) as caught:
        ClassifyRequest.model_validate_json(body)
    error = from_validation(caught.value, body)
    assert error.status == 422
    if caught.value.error_count() == 1:
        assert (error.param or "").startswith("inputs[0]")
    else:
        assert error.message.startswith("100000 fields are unknown or wrong")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"inputs": []}, "must have at least 1 item, not 0"),
        ({"inputs": "a", "model": ""}, "must have at least 1 character"),
        ({"inputs": "a", "quality": 2}, "must be less than or equal to 1"),
        ({"inputs": 7}, "must be a string, an object with text and text_pair, or a list of those"),
    ],
)
async def test_refusals_are_english(served: Served, fields: dict[str, Any], message: str) -> None:
    assert error_of(await served.classify(**fields))["message"] == message


async def test_limits_in_messages_name_the_number_and_the_setting(served: Served) -> None:
    assert "64" in error_of(await served.classify(["a"] * 65))["message"]
    assert "OFFRAMP_MAX_INPUTS" in error_of(await served.classify(["a"] * 65))["message"]
    too_long = error_of(await served.classify("good " * 100, truncate=False))["message"]
    assert "102 tokens" in too_long
    assert "64" in too_long


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"", 400, "not JSON"),
        (b"{", 400, "not JSON"),
        (b'{"inputs": "a",}', 400, "not JSON"),
        (b"inputs=a", 400, "not JSON"),
        (b'\xef\xbb\xbf{"inputs": "a"}', 400, "byte-order mark"),
        ('{"inputs": "caf\u00e9"}'.encode("latin-1"), 400, "not UTF-8"),
        (b'{"inputs": "\xed\xa0\x80"}', 400, "not UTF-8"),
        (b"\xff\xfe{\x00}\x00", 400, "not UTF-8"),
        (b"[" * 20_000, 400, "not JSON"),
        (b'{"inputs": ' + b"[" * 150 + b"]" * 150 + b"}", 422, "must be"),
        (b'{"inputs": ' + b'{"text":' * 20_000 + b"1" + b"}" * 20_000 + b"}", 400, "not JSON"),
        (b'{"inputs": "a", "top_k": ' + b"9" * 10_000 + b"}", 400, "not JSON"),
        (b"[]", 422, "object"),
        (b'"a"', 422, "object"),
        (b"null", 422, "object"),
    ],
)
async def test_bodies_that_are_no_request(served: Served, body: bytes, status: int, words: str) -> None:
    response = await served.client.post("/classify", content=body)
    error = error_of(response)
    assert response.status_code == status, error
    assert words in error["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (rb'{"inputs": "\ud800"}', "inputs"),
        (rb'{"inputs": "a \udc00 b"}', "inputs"),
        (rb'{"inputs": ["a", {"text": "\ud83dx"}]}', "inputs[1].text"),
        (rb'{"inputs": "a", "model": "\ud800"}', "model"),
        (rb'{"inputs": "a", "\ud800": 1}', "(unknown)"),
    ],
)
async def test_half_a_character_is_refused_by_field(served: Served, body: bytes, param: str) -> None:
    response = await served.client.post("/classify", content=body)
    error = error_of(response)
    assert (response.status_code, error["param"]) == (422, param)
    assert "surrogate" in error["message"]


async def test_a_body_that_declares_too_much_is_refused(served: Served) -> None:
    response = await served.client.post("/classify", content=b'{"inputs": "' + b"a" * 200_000 + b'"}')
    assert response.status_code == 413
    assert "200000 bytes" in error_of(response)["message"]


async def test_a_body_that_turns_out_too_large_is_refused(served: Served) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    response = await served.client.post("/classify", content=chunks())
    assert response.status_code == 413
    assert error_of(response)["type"] == "too_large"


async def test_a_poisoned_text_fails_its_request_by_index_and_no_other(served: Served) -> None:
    response = await served.classify(["a good film", f"a {POISON} film"])
    error = error_of(response)
    assert (response.status_code, error["type"], error["param"]) == (500, "nonfinite", "inputs[1]")
    assert (await served.classify("a good film")).status_code == 200


async def test_refusals_disturb_nobody(served: Served) -> None:
    (before,) = await served.results("a good film")
    for document in ({"inputs": ""}, {"inputs": "a", "quality": 7}, {"inputs": "a", "model": "nobody"}):
        await served.client.post("/classify", json=document)
    (after,) = await served.results("a good film")
    assert before == after


_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=10,
)
_fields = st.dictionaries(
    st.sampled_from(sorted(ClassifyRequest.model_fields)) | st.text(max_size=5), _json, max_size=6
)


@settings(max_examples=120, deadline=None)
@given(document=_json | _fields)
def test_any_json_is_a_request_or_a_refusal_without_its_text(document: Any) -> None:
    body = json.dumps(document).encode()
    try:
        ClassifyRequest.model_validate_json(body)
    except ValidationError as error:
        problem = from_validation(error, body)
        assert problem.status in (400, 422)
        assert problem.message
        assert "input_value" not in problem.message


@settings(max_examples=100, deadline=None)
@given(body=st.binary(max_size=60))
def test_any_bytes_are_a_request_or_a_refusal(body: bytes) -> None:
    problem = None
    try:
        ClassifyRequest.model_validate_json(body)
    except ValidationError as error:
        problem = from_validation(error, body)
    assert problem is None or problem.status in (400, 422)


_wishes = st.fixed_dictionaries(
    {"inputs": st.text(max_size=20) | st.lists(st.text(max_size=8), max_size=3)},
    optional={
        "quality": st.floats(0, 1.1),
        "speed": st.floats(0, 5),
        "criterion": st.sampled_from(["confidence", "entropy", "patience", "other"]),
        "threshold": st.floats(-0.1, 4) | st.integers(0, 5),
        "min_exit": st.integers(0, 6),
        "max_exit": st.integers(0, 6),
        "quality_floor": st.floats(0, 1),
        "top_k": st.integers(-1, 5),
        "raw_scores": st.booleans(),
        "truncate": st.booleans(),
        "explain": st.booleans(),
    },
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(wish=_wishes)
async def test_any_wish_gets_an_answer_of_the_documented_shape_or_a_clear_refusal(
    served: Served, wish: dict[str, Any]
) -> None:
    response = await served.client.post("/classify", content=json.dumps(wish))
    if response.status_code == 200:
        document = ClassifyResponse.model_validate_json(response.content)
        for result in document.results:
            assert wish.get("min_exit", 1) <= result.exit.number <= (wish.get("max_exit") or 4)
    else:
        assert response.status_code in (413, 422), response.text
        error_of(response)


async def test_load_lowers_quality_only_with_consent(
    tiny_bundle: Bundle, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served.catalog.default.engine, "pressure", lambda: 1.0)
    (agreed,) = await served.results("a good film", quality=0.99, quality_floor=0.95)
    (firm,) = await served.results("a good film", quality=0.99)
    assert (agreed["exit"]["tier"], firm["exit"]["tier"]) == (0.95, 0.99)
    lowered = samples(served.metrics.registry)["offramp_lowered_total", (("model", "tiny"), ("tier", "0.95"))]
    assert lowered == 1
    # Who gets no answer has none of a lower quality.
    await served.classify(POISON, quality=0.99, quality_floor=0.95)
    assert samples(served.metrics.registry)["offramp_lowered_total", (("model", "tiny"), ("tier", "0.95"))] == 1


async def test_shadow_checks_are_counted_by_tier(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, shadow_rate=1.0) as served:
        answers = [await served.results(text, quality=0.95) for text in some_texts(20)]
        assert {result["exit"]["reason"] for (result,) in answers} > {"final"}

        def counted() -> float:
            found = samples(served.metrics.registry)
            return sum(
                value
                for (name, labels), value in found.items()
                if name == "offramp_shadow_total" and ("tier", "0.95") in labels
            )

        for _ in range(1000):
            if counted() == 20:
                break
            await asyncio.sleep(0.01)
        assert counted() == 20


async def test_a_promise_found_broken_is_kept_by_full_depth_where_wished(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, shadow_fall_back=True) as served:
        metrics = served.catalog.default.metrics
        for _ in range(20):
            metrics.checked(0.97, agrees=False)
        (result,) = await served.results("a good film", quality=0.97)
        assert (result["exit"]["reason"], result["exit"]["tier"]) == ("final", 1.0)
        (other,) = await served.results("a good film", quality=0.95)
        assert other["exit"]["tier"] == 0.95
        assert samples(served.metrics.registry)[
            "offramp_promise_evidence", (("model", "tiny"), ("tier", "0.97"))
        ] == pytest.approx(evidence(20, 20, 0.03))
