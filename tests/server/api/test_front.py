"""What all doors share: limits of requests in work, of time and of tokens."""

import asyncio
import gzip
import json
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from models.bundle import Bundle
from server.api.errors import ApiError
from server.api.front import MOST_VALUES, read_as
from server.api.schemas import ClassifyRequest
from server.config import MOST_INPUTS
from tests.server.conftest import Served, error_of, samples, serving, some_texts
from tests.server.process import Process, process, raw_request

pytestmark = pytest.mark.anyio


async def test_requests_beyond_those_allowed_in_work_are_told_to_come_back(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, max_concurrent_requests=2, runs=1) as served:
        inputs = ["good film " * 20] * 64
        answers = await asyncio.gather(*(served.classify(inputs, quality=1.0) for _ in range(6)))
        refused = [answer for answer in answers if answer.status_code == 429]
        assert [answer.status_code for answer in answers].count(200) == 2
        assert len(refused) == 4
        assert all(answer.headers["retry-after"] == "1" for answer in refused)
        assert "OFFRAMP_MAX_CONCURRENT_REQUESTS" in error_of(refused[0])["message"]
        rejected = ("offramp_rejected_total", (("model", "tiny"), ("reason", "concurrency")))
        assert samples(served.metrics.registry)[rejected] == 4
        assert (await served.classify("a film")).status_code == 200


async def test_texts_are_cut_to_the_tokens_allowed_and_refused_where_they_must_not_be_cut(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, max_tokens=10) as served:
        (result,) = await served.results("film " * 30)
        assert (result["tokens"], result["truncated"]) == (10, True)
        refused = await served.classify("film " * 30, truncate=False)
        assert (refused.status_code, error_of(refused)["param"]) == (413, "inputs")
        assert "at most 10" in error_of(refused)["message"]
        assert (await served.client.get("/models")).json()["models"][0]["max_length"] == 10
    async with serving(tiny_bundle, max_tokens=1000) as served:
        (result,) = await served.results("film " * 300)
        assert result["tokens"] == 64


async def _answer_to(server: Process, *parts: bytes) -> bytes:
    """All that the server sends back until it closes the connection."""
    reader, writer = await asyncio.open_connection(*server.address)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.1)
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
async def test_a_wish_to_upgrade_the_connection_is_ignored(server: Process, protocol: str) -> None:
    """As Java's client sends it; the body behind it counts, and so does the next request on the connection."""
    body = b'{"inputs": "a film\\r\\nupgrade: film"}'
    wish = {"Upgrade": protocol, "connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "AAMAAABkAAQ"}
    asking, last = raw_request("POST", "/classify", body, wish), raw_request("POST", "/classify", body)
    for parts in ((asking, last), (asking[: -len(body)], body, last)):
        assert (await _answer_to(server, *parts)).count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("path", ["/classify", "/predict"])
async def test_wishes_in_several_headers_are_one_list(doors: Served, path: str) -> None:
    async def ask(*wishes: str) -> httpx.Response:
        headers = [("X-Offramp", wish) for wish in wishes]
        return await doors.client.post(path, json={"inputs": "a film"}, headers=headers)

    assert (await ask("quality=1.0", "deadline_ms=60000")).status_code == 200
    for second in ("speed=2", "qualty=0.9", "quality=1.0"):
        assert (await ask("quality=1.0", second)).status_code == 422


async def test_a_number_in_the_header_is_written_as_in_json(doors: Served) -> None:
    for wish in ("speed=1_0", "quality=0.9_7", "threshold=0x1", "max_exit=²"):
        headers = [(b"X-Offramp", wish.encode("latin-1"))]
        response = await doors.client.post("/classify", json={"inputs": "a film"}, headers=headers)
        assert (response.status_code, error_of(response)["param"]) == (422, wish.partition("=")[0])


def test_tritons_client_is_told_that_compressed_bodies_are_not_taken(server: Process) -> None:
    text = triton.InferInput("text", [1], "BYTES")
    text.set_data_from_numpy(np.array([b"a film" * 50], dtype=np.object_))
    with triton.InferenceServerClient("{}:{}".format(*server.address)) as client:
        for name in ("gzip", "deflate"):
            with pytest.raises(InferenceServerException, match=r"\[400\] compressed bodies are not taken"):
                client.infer("tiny", [text], request_compression_algorithm=name)


@pytest.mark.parametrize(("path", "field"), [("/classify", "inputs"), ("/classify", "input"), ("/predict", "inputs")])
async def test_a_compressed_body_is_called_so_at_every_door(doors: Served, path: str, field: str) -> None:
    body = json.dumps({field: "a film"}).encode()
    response = await doors.client.post(path, content=gzip.compress(body), headers={"content-encoding": "gzip"})
    assert response.status_code == 400
    assert "compressed bodies are not taken" in response.text
    plain = await doors.client.post(path, content=body, headers={"content-encoding": "Identity"})
    assert plain.status_code == 200


@pytest.mark.parametrize("text", ["plain", ",[{" * 50, '"', "\\", '\\",[', 'a\\\\"[,'])
def test_the_most_pairs_that_a_request_may_have_are_not_too_many_values_whatever_is_in_them(text: str) -> None:
    pairs = [{"text": text, "text_pair": text}] * MOST_INPUTS
    read_as(ClassifyRequest, json.dumps({"inputs": pairs}).encode())


@pytest.mark.parametrize("value", [[], {}, 1, "", "a", '"', "\\", ",", {"k": 1}])
def test_more_values_than_any_request_needs_are_refused_before_they_are_parsed(value: object) -> None:
    for document in ({"inputs": [value] * (MOST_VALUES + 1)}, [value] * (MOST_VALUES + 1)):
        body = json.dumps(document).encode()
        for broken in (body, body[:-1]):
            with pytest.raises(ApiError, match=f"more than {MOST_VALUES} values") as caught:
                read_as(ClassifyRequest, broken)
            assert caught.value.status == 413


async def test_slow_bodies_and_slow_heads_are_given_up(tiny_bundle: Bundle) -> None:
    whole = raw_request("POST", "/classify", b'{"inputs": "a film"}').replace(b"close", b"keep-alive")
    with process(tiny_bundle, request_timeout_seconds=0.5) as server:
        body, head, nothing = await asyncio.gather(
            _answer_to(server, whole[:-5]), _answer_to(server, whole[:20]), _answer_to(server)
        )
        for answer in (body, head):
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b'"type":"timeout"' in answer
            assert b"connection: close" in answer.lower()
        assert nothing == b""
        # Whoever is slow within the time is served, and so is a second request on the connection.
        slow = await _answer_to(server, whole[:20], whole[20:-5], whole[-5:], whole.replace(b"keep-alive", b"close"))
        assert slow.count(b"HTTP/1.1 200 ") == 2


@pytest.mark.parametrize("wish", [{}, {"quality": 1.0}, {"threshold": 0.6}])
async def test_every_door_gives_the_same_labels_and_scores_in_the_order_of_the_texts(
    doors: Served, wish: dict[str, float]
) -> None:
    texts = some_texts(40)
    expected = await doors.results(texts, **wish)

    async def answer(path: str, **body: Any) -> Any:
        response = await doors.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    rows = [[text] for text in texts]
    tensor = {"name": "text", "shape": [len(texts), 1], "datatype": "BYTES", "data": rows}
    tensors = (await answer("/v2/models/tiny/infer", inputs=[tensor], parameters=wish))["outputs"]
    outputs = {output["name"]: output["data"] for output in tensors}
    assert outputs["label"] == [result["label"] for result in expected]
    assert outputs["exit"] == [result["exit"]["number"] for result in expected]
    assert outputs["score"] == pytest.approx([result["score"] for result in expected], abs=1e-4)
    for lists in (
        await answer("/predict", inputs=rows, **wish),
        await answer("/", inputs=rows, parameters=wish),
        (await answer("/classify", input=texts, **wish))["data"],
    ):
        assert [scores[0]["label"] for scores in lists] == outputs["label"]
        assert [scores[0]["score"] for scores in lists] == pytest.approx(outputs["score"], abs=1e-4)
