"""Infinity's request and answer on ``/classify``, and Infinity's own client (``infinity-client``)."""

import os
from typing import Any

import pytest

from models.bundle import Bundle
from server.api.infinity import InfinityResponse
from tests.server.conftest import Served, error_of
from tests.server.process import process

pytestmark = pytest.mark.anyio

TEXTS = ["a good film", "dull"]


async def test_input_gets_infinitys_shape(doors: Served) -> None:
    expected = await doors.classify(TEXTS)
    response = await doors.client.post("/classify", json={"input": TEXTS, "model": "tiny"})
    answer = InfinityResponse.model_validate_json(response.content)
    assert [[one.label for one in scores] for scores in answer.data] == [
        [one["label"] for one in result["scores"]] for result in expected.json()["results"]
    ]
    assert answer.usage.total_tokens == expected.json()["usage"]["tokens"]
    assert (answer.object, answer.model) == ("classify", "tiny")


def test_infinitys_own_client_works_as_it_is(tiny_bundle: Bundle) -> None:
    if not os.environ.get("CI"):
        pytest.importorskip("infinity_client", reason="make setup installs it")
    from infinity_client import Client
    from infinity_client.api.default import classify
    from infinity_client.models import ClassifyInput, ClassifyResult

    with process(tiny_bundle, threads=1, measure_seconds=0) as server, Client(base_url=server.url) as client:
        for wish in ({}, {"raw_scores": True}, {"model": "tiny"}):
            answer = classify.sync(client=client, body=ClassifyInput(input_=TEXTS, **wish))
            assert isinstance(answer, ClassifyResult)
            assert answer.model == "tiny"
            assert [{one.label for one in scores} for scores in answer.data] == [{"negative", "positive"}] * 2
        refused = classify.sync_detailed(client=client, body=ClassifyInput(input_=TEXTS, model="other"))
        assert refused.status_code == 404


async def test_one_string_raw_scores_and_a_depth_are_taken(doors: Served) -> None:
    (expected,) = await doors.results([TEXTS[0]], raw_scores=True, quality=1.0)
    request = {"input": TEXTS[0], "raw_scores": True, "quality": 1.0}
    response = await doors.client.post("/classify", json=request)
    assert response.json()["data"] == [expected["scores"]]
    assert response.headers["x-offramp-exits"] == "4"


async def test_the_header_sets_the_depth_of_our_own_requests_too(doors: Served) -> None:
    response = await doors.client.post("/classify", json={"inputs": "dull"}, headers={"x-offramp": "quality=1.0"})
    assert response.json()["results"][0]["exit"]["tier"] == 1.0
    twice = await doors.client.post(
        "/classify", json={"inputs": "dull", "quality": 1.0}, headers={"x-offramp": "quality=1.0"}
    )
    assert (twice.status_code, error_of(twice)["param"]) == (422, "quality")


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"input": []}, 422, "input"),
        ({"input": ["a", 7]}, 422, "input[1]"),
        ({"input": ["a", " "]}, 422, "input[1]"),
        ({"input": "a", "model": "other"}, 404, "model"),
        ({"input": "a", "modle": "tiny"}, 422, "modle"),
        ({"input": ["a"] * 4097}, 413, "input"),
        ({"input": ["a"] * 200}, 413, "input"),
        ({"input": "a", "inputs": "a"}, 422, "input"),
        ({"other": "input"}, 422, "inputs"),
    ],
)
async def test_what_is_wrong_is_named_as_the_caller_named_it(
    doors: Served, body: dict[str, Any], status: int, param: str
) -> None:
    response = await doors.client.post("/classify", json=body)
    assert (response.status_code, error_of(response)["param"]) == (status, param)
