"""The Open Inference Protocol, and Triton's own client."""

import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
from pydantic import ValidationError
from tritonclient.utils import InferenceServerException

from server.api.openinference import InferRequest
from server.config import MOST_INPUTS
from tests.server.conftest import Served, samples
from tests.server.process import Process

pytestmark = pytest.mark.anyio

TEXTS = ["a good film", "dull", "très bon"]


@pytest.fixture
def client(server: Process) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient("{}:{}".format(*server.address)) as connected:
        yield connected


def tensor(texts: list[str], *, binary: bool = True, column: bool = False) -> triton.InferInput:
    array = np.array([text.encode() for text in texts], dtype=np.object_).reshape((-1, 1) if column else (-1,))
    made = triton.InferInput("text", list(array.shape), "BYTES")
    made.set_data_from_numpy(array, binary_data=binary)
    return made


def test_tritons_client_finds_the_server_and_the_model(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("other")
    assert "classification" in client.get_server_metadata()["extensions"]
    metadata = client.get_model_metadata("tiny")
    assert metadata["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert {"name": "scores", "datatype": "FP32", "shape": [-1, 2]} in metadata["outputs"]


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_the_tensors_of_the_metadata(client: triton.InferenceServerClient, binary: bool) -> None:
    names = [output["name"] for output in client.get_model_metadata("tiny")["outputs"]]
    outputs = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
    answer = client.infer("tiny", [tensor(TEXTS, binary=binary)], outputs=outputs, request_id="mine")
    assert answer.get_response()["id"] == "mine"
    scores = answer.as_numpy("scores")
    assert scores.shape == (3, 2)
    assert scores.sum(axis=1) == pytest.approx(1)
    labels = [label if isinstance(label, str) else label.decode() for label in answer.as_numpy("label")]
    assert labels == [("negative", "positive")[place] for place in scores.argmax(axis=1)]
    assert answer.as_numpy("score") == pytest.approx(scores.max(axis=1))
    assert answer.as_numpy("exit").dtype == np.int64
    assert answer.as_numpy("tier") == pytest.approx([0.99] * 3)


def test_tritons_client_gets_all_outputs_without_asking(client: triton.InferenceServerClient) -> None:
    answer = client.infer("tiny", [tensor(TEXTS)], model_version="1")
    assert {output["name"] for output in answer.get_response()["outputs"]} == {
        "label", "score", "scores", "exit", "cost", "tier",
    }  # fmt: skip


@pytest.mark.parametrize("binary", [True, False])
def test_tritons_client_gets_classes(client: triton.InferenceServerClient, binary: bool) -> None:
    outputs = [triton.InferRequestedOutput("scores", binary_data=binary, class_count=9)]
    classes = client.infer("tiny", [tensor(TEXTS)], outputs=outputs).as_numpy("scores")
    assert classes.shape == (3, 2)
    score, index, label = (classes[0][0] if isinstance(classes[0][0], str) else classes[0][0].decode()).split(":")
    assert (int(index), label) in {(0, "negative"), (1, "positive")}
    assert float(score) >= 0.5


def test_tritons_client_chooses_the_depth_by_parameters_or_by_the_header(
    client: triton.InferenceServerClient,
) -> None:
    def exits(**wish: Any) -> list[int]:
        return client.infer("tiny", [tensor(TEXTS)], **wish).as_numpy("exit").tolist()

    assert exits(parameters={"threshold": 0.0}) == [1, 1, 1]
    assert exits(parameters={"quality": 1.0}) == [4, 4, 4]
    assert exits(headers={"X-Offramp": "min_exit=2, max_exit=2"}) == [2, 2, 2]


def test_a_column_of_texts_gets_columns(client: triton.InferenceServerClient) -> None:
    answer = client.infer("tiny", [tensor(TEXTS, column=True)])
    assert answer.as_numpy("label").shape == (3, 1)
    assert answer.as_numpy("scores").shape == (3, 2)


def test_tritons_client_is_told_what_was_wrong(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException, match=r"\[422\] text\[1\]: the text is empty or blank"):
        client.infer("tiny", [tensor(["a", " "])])
    with pytest.raises(InferenceServerException, match=r"\[404\] model: no such model"):
        client.infer("other", [tensor(["a"])])
    with pytest.raises(InferenceServerException, match=r"\[422\].*no such output"):
        client.infer("tiny", [tensor(["a"])], outputs=[triton.InferRequestedOutput("logits")])
    with pytest.raises(InferenceServerException, match="priority"):
        client.infer("tiny", [tensor(["a"])], priority=1)


async def infer(doors: Served, model: str = "tiny", **request: Any) -> httpx.Response:
    return await doors.client.post(f"/v2/models/{model}/infer", json=request)


def text(**changes: Any) -> dict[str, Any]:
    return {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["a man"]} | changes


async def test_a_model_of_pairs_takes_a_second_tensor(doors: Served) -> None:
    metadata = (await doors.client.get("/v2/models/tiny-pairs")).json()
    assert [tensor["name"] for tensor in metadata["inputs"]] == ["text", "text_pair"]
    (expected,) = await doors.results([{"text": "a man", "text_pair": "music"}], model="tiny-pairs")
    response = await infer(doors, "tiny-pairs", inputs=[text(name="text_pair", data=["music"]), text()])
    outputs = {output["name"]: output["data"] for output in response.json()["outputs"]}
    assert outputs["label"] == [expected["label"]]
    assert (await infer(doors, "tiny-pairs", inputs=[text()])).status_code == 422


@pytest.mark.parametrize(
    ("request_", "word"),
    [
        ({"inputs": []}, "inputs"),
        ({"inputs": [text(name="TEXT")]}, "inputs[0].name"),
        ({"inputs": [text(), text()]}, "inputs[1].name"),
        ({"inputs": [text(name="text_pair")]}, "the tensor text is missing"),
        ({"inputs": [text(datatype="FP32")]}, "inputs[0].datatype"),
        ({"inputs": [text(shape=[2])]}, "the shape says 2"),
        ({"inputs": [text(shape=[1, 3])]}, "inputs[0].shape"),
        ({"inputs": [text(shape=[0], data=[])]}, "inputs[0].shape"),
        ({"inputs": [text(data=None)]}, "either data or"),
        ({"inputs": [text(parameters={"binary_data_size": 4})]}, "either data or"),
        ({"inputs": [text()], "outputs": [{"name": "label", "parameters": {"classification": 1}}]}, "classified"),
        ({"inputs": [text()], "parameters": {"qualty": 1}}, "parameters.qualty"),
        ({"inputs": [text()], "parameters": {"quality": 0.9999}}, "cannot be promised"),
    ],
)
async def test_a_request_that_cannot_be_is_refused_in_the_protocols_shape(
    doors: Served, request_: dict[str, Any], word: str
) -> None:
    response = await infer(doors, **request_)
    assert response.status_code == 422
    assert set(response.json()) == {"error"}
    assert word in response.json()["error"]


HEAD = b'{"inputs":[{"name":"text","shape":[1],"datatype":"BYTES","parameters":{"binary_data_size":%d}}]}'


def framed(*texts: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(one)) + one for one in texts)


@pytest.mark.parametrize(
    ("size", "rest", "length", "word"),
    [
        (None, framed(b"a man"), "7000", "Inference-Header-Content-Length"),
        (None, framed(b"a man"), "-1", "Inference-Header-Content-Length"),
        (100, framed(b"a man"), None, "100 bytes are declared"),
        (None, framed(b"a man") + b"more", None, "ends beyond"),
        (None, b"\xff\xff\xff\xffa", None, "ends beyond"),
        (None, framed(b"\xff\xfe"), None, "not UTF-8"),
        (4, framed(b"") + b"more", None, "behind the last tensor"),
    ],
)
async def test_broken_binary_tensors_are_malformed(
    doors: Served, size: int | None, rest: bytes, length: str | None, word: str
) -> None:
    head = HEAD % (len(rest) if size is None else size)
    headers = {"inference-header-content-length": length or str(len(head))}
    response = await doors.client.post("/v2/models/tiny/infer", content=head + rest, headers=headers)
    assert response.status_code == 400
    assert word in response.json()["error"]


@pytest.mark.parametrize(
    "lengths", [["0" * 5_000 + "96"], ["0" * 20 + "9999"], ["9" * 5_000], ["96", "3"], ["²"], [""]]
)
async def test_a_length_of_the_json_that_is_none_is_malformed(doors: Served, lengths: list[str]) -> None:
    headers = [(b"Inference-Header-Content-Length", length.encode("latin-1")) for length in lengths]
    content = HEAD % 9 + framed(b"a man")
    response = await doors.client.post("/v2/models/tiny/infer", content=content, headers=headers)
    assert response.status_code == 400
    assert "Inference-Header-Content-Length" in response.json()["error"]


@pytest.mark.parametrize(
    "request_",
    [
        {"inputs": [text(data=[[7] * 100_000])]},
        {"inputs": [text(data=[[7]] * 4_000)]},
        {"inputs": [text(data=[7] * 4_000)]},
        {"inputs": [text(shape=["1"] * 100_000)]},
        {"inputs": [{}] * 100_000},
        {"inputs": [text()], "outputs": [{}] * 100_000},
    ],
)
def test_a_tensor_full_of_mistakes_is_refused_at_the_first(request_: dict[str, Any]) -> None:
    """To collect a million of them held up every other request for seconds."""
    with pytest.raises(ValidationError) as caught:
        InferRequest.model_validate(request_)
    assert caught.value.error_count() <= 4


@pytest.mark.parametrize(
    "change", [{"shape": [10**4000]}, {"data": None, "parameters": {"binary_data_size": 10**4000}}]
)
async def test_a_number_of_thousands_of_digits_is_not_said_again(doors: Served, change: dict[str, Any]) -> None:
    response = await infer(doors, inputs=[text(**change)])
    assert response.status_code == 422
    assert len(response.text) < 200


async def test_a_tensor_of_more_texts_than_any_request_takes_is_refused_by_its_shape(doors: Served) -> None:
    """What is in it is not read: 500,000 empty texts kept the event loop for a second."""
    rest = b"\xff\xff\xff\xff"
    request = {"inputs": [text(shape=[MOST_INPUTS + 1], data=None, parameters={"binary_data_size": len(rest)})]}
    head = json.dumps(request).encode()
    headers = {"inference-header-content-length": str(len(head))}
    binary = await doors.client.post("/v2/models/tiny/infer", content=head + rest, headers=headers)
    rows = await infer(doors, inputs=[text(shape=[2 * MOST_INPUTS], data=[["a"] * MOST_INPUTS] * 2)])
    for response in (binary, rows):
        expected = {"error": f"inputs[0].shape: more than {MOST_INPUTS} texts"}
        assert (response.status_code, response.json()) == (413, expected)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"inputs": [text()] * MOST_INPUTS}, "inputs"),
        ({"inputs": [text(shape=[1] * MOST_INPUTS)]}, "inputs[0].shape"),
        ({"outputs": [{"name": "label"}] * MOST_INPUTS}, "outputs"),
    ],
)
async def test_a_list_that_is_too_long_is_no_list_of_texts_however_long_it_is(
    doors: Served, change: dict[str, Any], field: str
) -> None:
    response = await infer(doors, **({"inputs": [text()]} | change))
    assert response.status_code == 422
    assert response.json()["error"].startswith(f"{field}: must have at most ")


async def test_readiness_follows_the_server(doors: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doors.catalog, "draining", True)
    for path in ("/v2/health/ready", "/v2/models/tiny/ready"):
        response = await doors.client.get(path)
        assert (response.status_code, response.json()) == (503, {"error": "draining"})
    assert (await doors.client.get("/v2/health/live")).status_code == 200


async def test_a_version_that_is_not_served_is_not_found(doors: Served) -> None:
    response = await doors.client.get("/v2/models/tiny/versions/7/ready")
    assert (response.status_code, response.json()) == (404, {"error": "version: no such version; this server has 1"})


async def test_requests_are_counted_under_their_model_and_the_routes_template(doors: Served) -> None:
    def counted(model: str, code: str) -> float:
        labels = {"model": model, "route": "/v2/models/{model}/infer", "code": code}
        return samples(doors.metrics.registry).get(("offramp_requests_total", tuple(sorted(labels.items()))), 0)

    before = counted("tiny-pairs", "422"), counted("", "404"), counted("tiny", "200")
    await infer(doors, "tiny-pairs", inputs=[])
    await infer(doors, "nobody", inputs=[text()])
    await infer(doors, inputs=[text()])
    after = counted("tiny-pairs", "422"), counted("", "404"), counted("tiny", "200")
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 1]
