"""The door of text-embeddings-inference, and Hugging Face's own client."""

from typing import Any

import httpx
import pytest
from huggingface_hub import InferenceClient, constants
from huggingface_hub.errors import HfHubHTTPError

from tests.server.conftest import Served
from tests.server.process import Process

pytestmark = pytest.mark.anyio

TEXT = "a good film"


@pytest.fixture(autouse=True)
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where HF_HUB_OFFLINE is set for the backbones' sake, their client refuses our server as well."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


async def predict(doors: Served, path: str = "/predict", header: str | None = None, **body: Any) -> httpx.Response:
    headers = {} if header is None else {"x-offramp": header}
    return await doors.client.post(path, json=body, headers=headers)


def test_the_client_of_hugging_face_gets_all_labels_and_their_scores(server: Process) -> None:
    for url in (server.url, f"{server.url}/predict"):
        answer = InferenceClient(model=url).text_classification(TEXT)
        assert {element.label for element in answer} == {"negative", "positive"}
        assert answer[0].score > answer[1].score
        assert sum(element.score for element in answer) == pytest.approx(1)


def test_the_client_of_hugging_face_can_ask_for_the_best_label_and_for_logits(server: Process) -> None:
    client = InferenceClient(model=server.url)
    (best,) = client.text_classification(TEXT, top_k=1)
    assert best == client.text_classification(TEXT)[0]
    logits = client.text_classification(TEXT, function_to_apply="none")
    assert sum(element.score for element in logits) != pytest.approx(1)


def test_the_client_of_hugging_face_is_told_what_was_wrong(server: Process) -> None:
    with pytest.raises(HfHubHTTPError, match="the text is empty or blank"):
        InferenceClient(model=server.url).text_classification(" ")


@pytest.mark.parametrize("path", ["/predict", "/"])
async def test_one_text_is_answered_by_one_list_and_several_by_a_list_of_lists(doors: Served, path: str) -> None:
    expected = [result["scores"] for result in await doors.results([TEXT, "dull"])]
    assert (await predict(doors, path, inputs=TEXT)).json() == expected[0]
    assert (await predict(doors, path, inputs=[TEXT])).json() == expected[0]
    several = (await predict(doors, path, inputs=[[TEXT], ["dull"]])).json()
    assert [[one["label"] for one in scores] for scores in several] == [
        [one["label"] for one in scores] for scores in expected
    ]


async def test_two_strings_in_a_list_are_a_pair(doors: Served) -> None:
    (expected,) = await doors.results([{"text": "a man", "text_pair": "music"}], model="tiny-pairs")
    answer = await predict(doors, header="model=tiny-pairs", inputs=["a man", "music"])
    assert answer.json() == expected["scores"]
    batch = await predict(doors, header="model=tiny-pairs", inputs=[["a man", "music"]])
    assert batch.json() == [expected["scores"]]
    refused = await predict(doors, inputs=["a man", "music"])
    assert (refused.status_code, "pairs" in refused.json()["error"]) == (422, True)


async def test_raw_scores_are_the_logits(doors: Served) -> None:
    (expected,) = await doors.results([TEXT], raw_scores=True)
    assert (await predict(doors, inputs=TEXT, raw_scores=True)).json() == expected["scores"]


async def test_without_truncation_a_long_text_is_refused(doors: Served) -> None:
    long = "film " * 200
    assert (await predict(doors, inputs=long)).status_code == 200
    assert (await predict(doors, inputs=long, truncate=False)).status_code == 413


@pytest.mark.parametrize(
    ("header", "body"),
    [
        (None, {"quality": 1.0}),
        ("quality=1.0", {}),
        (None, {"parameters": {"quality": 1.0}}),
        ("min_exit=4", {}),
        ("criterion=confidence, threshold=1, min_exit = 4", {}),
    ],
)
async def test_the_depth_is_chosen_in_the_body_the_parameters_or_the_header(
    doors: Served, header: str | None, body: dict[str, Any]
) -> None:
    shallow = await predict(doors, inputs=[[TEXT], ["dull"]], threshold=0.0)
    assert shallow.headers["x-offramp-exits"] == "1,1"
    deep = await predict(doors, header=header, inputs=[[TEXT], ["dull"]], **body)
    assert (deep.status_code, deep.headers["x-offramp-exits"]) == (200, "4,4")


@pytest.mark.parametrize(
    ("header", "body", "word"),
    [
        (None, {"inputs": 7}, "inputs"),
        (None, {"inputs": []}, "inputs"),
        (None, {"inputs": [[]]}, "inputs[0]"),
        (None, {"inputs": [["a"], ["b", "c", "d"]]}, "inputs[1]"),
        (None, {"inputs": [["a"], "b"]}, "inputs[1]"),
        (None, {"inputs": TEXT, "qualty": 0.9}, "qualty"),
        (None, {"inputs": TEXT, "truncation_direction": "left"}, "truncation_direction"),
        (None, {"inputs": TEXT, "quality": 0.97, "parameters": {"quality": 0.97}}, "quality"),
        (None, {"inputs": TEXT, "parameters": {"function_to_apply": "sigmoid"}}, "function_to_apply"),
        (None, {"inputs": TEXT, "raw_scores": True, "parameters": {"function_to_apply": "softmax"}}, "raw_scores"),
        (None, {"inputs": TEXT, "raw_scores": False, "parameters": {"function_to_apply": "none"}}, "raw_scores"),
        ("quality=0.97", {"inputs": TEXT, "quality": 0.97}, "quality"),
        ("quality=0.97, speed=2", {"inputs": TEXT}, "at most one way"),
        ("quality=high", {"inputs": TEXT}, "quality"),
        ("quality=nan", {"inputs": TEXT}, "quality"),
        ("top=1", {"inputs": TEXT}, "X-Offramp"),
        ("quality", {"inputs": TEXT}, "X-Offramp"),
        ("quality=0.97,quality=0.97", {"inputs": TEXT}, "X-Offramp"),
    ],
)
async def test_what_is_wrong_is_said_in_the_shape_of_text_embeddings_inference(
    doors: Served, header: str | None, body: dict[str, Any], word: str
) -> None:
    response = await predict(doors, header=header, **body)
    assert response.status_code == 422
    assert set(response.json()) == {"error", "error_type"}
    assert response.json()["error_type"] == "Validation"
    assert word in response.json()["error"]


async def test_an_overload_is_called_what_text_embeddings_inference_calls_it(
    doors: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doors.catalog.default.engine._admission, "_max_texts", 0)
    response = await predict(doors, inputs=TEXT)
    assert (response.status_code, response.json()["error_type"]) == (429, "Overloaded")
    assert response.headers["retry-after"] == "1"


async def test_the_page_is_still_at_the_root(doors: Served) -> None:
    page = await doors.client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
