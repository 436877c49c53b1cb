"""The forms in which peers serve the bundle's network: they must be that network."""

from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from starlette.testclient import TestClient

from benchmarks.peers import bare
from benchmarks.peers.fastapi_app import create_app
from benchmarks.peers.network import Whole, write_whole
from models.bundle import Bundle
from tests.server.conftest import some_texts
from tests.tiny import write_tiny_bundle

TEXTS = some_texts(12, seed=5)


@pytest.fixture(scope="module", params=["attention", "cls", "mean"])
def bundle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two exits, the last with each head that transformers can have; positions start as RoBERTa's for one of them."""
    exits = ({"number": 1, "after_layer": 1, "head": "peek"}, {"number": 2, "after_layer": 4, "head": request.param})
    offset = 2 if request.param == "mean" else 0
    folder = tmp_path_factory.mktemp(request.param)
    return write_tiny_bundle(folder, poison=(), exits=exits, position_offset=offset)


@pytest.fixture(scope="module")
def whole(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    return write_whole(bundle, tmp_path_factory.mktemp("whole"))


def last_logits(bundle: Bundle, text: str) -> Any:
    """What the last segment says of ``text``."""
    state, mask = bare.first_feeds(bundle, text), None
    for number in (1, 2):
        session = onnxruntime.InferenceSession(str(bundle.graph(number)))
        mask = state["attention_mask"]
        logits, *left = session.run(None, {node.name: state[node.name] for node in session.get_inputs()})
        state = {"attention_mask": mask, **dict(zip(("hidden", "key", "value"), left, strict=False))}
    return logits[0]


def test_one_graph_and_transformers_give_the_logits_of_the_last_exit(bundle: Bundle, whole: Whole) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    expected = np.array([last_logits(bundle, text) for text in TEXTS])
    session = onnxruntime.InferenceSession(str(whole.graphs["fp32"]))
    one_graph = [session.run(["logits"], bare.first_feeds(bundle, text))[0][0] for text in TEXTS]
    assert np.abs(np.array(one_graph) - expected).max() < 1e-5

    tokenizer = AutoTokenizer.from_pretrained(whole.transformers)
    model = AutoModelForSequenceClassification.from_pretrained(whole.transformers, trust_remote_code=True).eval()
    with torch.inference_mode():
        # All in one batch, so with padding.
        theirs = model(**tokenizer(TEXTS, padding=True, truncation=True, return_tensors="pt")).logits.numpy()
    assert np.abs(theirs - expected).max() < 1e-4
    assert model.config.id2label == dict(enumerate(bundle.manifest.labels))


def test_the_fastapi_peer_answers_with_the_label_of_the_last_exit(bundle: Bundle, whole: Whole) -> None:
    import json

    app = create_app(str(whole.graphs["fp32"]), json.loads(whole.settings.read_text(encoding="utf-8")))
    with TestClient(app) as client:
        given = [client.post("/classify", json={"text": text}).json()["label"] for text in TEXTS]
    assert given == [bundle.manifest.labels[int(last_logits(bundle, text).argmax())] for text in TEXTS]


@pytest.mark.parametrize("quality", [0.95, 0.99, 1.0])
def test_the_bare_loop_answers_as_the_command_line_does(bundle: Bundle, quality: float) -> None:
    from server.config import load_settings
    from server.local import Line, classify_all

    classify = bare.through_segments(
        bundle,
        bare.open_sessions([bundle.graph(1), bundle.graph(2)], 1),
        bare.policy_of(bundle, quality),
    )
    lines = [Line("line", text) for text in TEXTS]
    expected = classify_all(lines, {"quality": quality}, load_settings(bundles=(bundle.path,), threads=1, runs=1))
    assert [classify(text) for text in TEXTS] == [result["label"] for _, result in expected]


def test_the_bare_loops_rows_have_every_number_of_a_table(bundle: Bundle, tmp_path: Path) -> None:
    found = bare.rows_of("bare", [lambda text: "a"], [lambda text: "a"] * 2, TEXTS, 0.05)
    assert [one["load"] for one in found] == ["1 client", "16 clients"]
    assert all({"throughput", "p50", "p90", "p99", "cpu_ms", "peak_rss_mb"} <= one.keys() for one in found)
    assert all(one["requests"] > 0 and one["peak_rss_mb"] > 1 for one in found)
