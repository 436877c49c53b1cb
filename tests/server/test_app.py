"""The app around the engine: probes, documents, several models, and what importing it costs."""

import asyncio
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from models.bundle import Bundle
from server.app import create_app
from server.config import StartError, load_bundles, load_settings
from tests.server.conftest import error_of, eventually, serving
from tests.tiny import write_tiny_bundle

pytestmark = pytest.mark.anyio


async def test_the_probes_answer_while_it_runs(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        assert (await served.client.get("/livez")).status_code == 200
        assert (await served.client.get("/readyz")).status_code == 200


async def test_readiness_is_off_while_draining_and_work_is_refused_once_closed(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        served.catalog.draining = True
        response = await served.client.get("/readyz")
        assert (response.status_code, error_of(response)["type"]) == (503, "draining")
        assert (await served.client.get("/livez")).status_code == 200
        assert (await served.classify("a film")).status_code == 200
        await served.catalog.close()
        late = await served.classify("a film")
        assert (late.status_code, error_of(late)["type"]) == (503, "draining")


async def test_a_dead_worker_turns_both_probes_off(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        engine = served.catalog.default.engine
        worker, *others = engine._workers

        class Dead:
            ident = worker.ident

            def is_alive(self) -> bool:
                return False

            def join(self) -> None:
                worker.join()

        engine._workers = [Dead(), *others]  # type: ignore[list-item]
        assert (await served.client.get("/readyz")).status_code == 503
        assert (await served.client.get("/livez")).status_code == 503


async def test_a_broken_engine_says_so_and_not_that_it_ends(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tiny_bundle) as served:

        def broken(now: float) -> None:
            raise RuntimeError("a surprise")

        monkeypatch.setattr(served.catalog.default.engine._scheduler, "pick", broken)
        assert (await served.classify("a film")).status_code == 500
        for response in (await served.classify("a film"), await served.client.get("/readyz")):
            assert (response.status_code, error_of(response)["type"]) == (503, "not_ready")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/nowhere", 404, "not_found"),
        ("GET", "/classify", 405, "method_not_allowed"),
        ("DELETE", "/classify", 405, "method_not_allowed"),
        ("POST", "/models", 405, "method_not_allowed"),
        ("POST", "/classify/", 404, "not_found"),
    ],
)
async def test_wrong_ways_have_the_one_error_shape(
    tiny_bundle: Bundle, method: str, path: str, status: int, kind: str
) -> None:
    async with serving(tiny_bundle) as served:
        response = await served.client.request(method, path)
        assert (response.status_code, error_of(response)["type"]) == (status, kind)


async def test_a_wrong_method_is_told_all_that_the_path_takes(tiny_bundle: Bundle) -> None:
    paths = {"/classify": "POST", "/models": "GET, HEAD", "/": "GET, HEAD, POST", "/v2/models/tiny": "GET, HEAD"}
    async with serving(tiny_bundle) as served:
        for path, methods in paths.items():
            response = await served.client.delete(path)
            assert (response.status_code, response.headers["allow"]) == (405, methods)


async def test_models_lists_what_requests_can_ask_for(tiny_bundle: Bundle, pair_bundle: Bundle) -> None:
    async with serving(tiny_bundle, pair_bundle) as served:
        tiny, pairs = (await served.client.get("/models")).json()["models"]
        assert (tiny["name"], tiny["default"], pairs["default"]) == ("tiny", True, False)
        assert pairs["takes_pairs"]
        assert pairs["labels"] == ["entailment", "neutral", "contradiction"]
        assert [tier["quality"] for tier in tiny["tiers"]] == [0.99, 0.97, 0.95]
        assert tiny["refused_tiers"][0]["quality"] == 0.995
        assert tiny["max_speed"] == 3.0
        assert [spec["head"] for spec in tiny["exits"]] == ["peek", "mean", "peek", "cls"]
        for model in (tiny, pairs):
            pair = {"text_pair": "a man"} if model["takes_pairs"] else {}
            tiers = [tier["quality"] for tier in model["tiers"]]
            (result,) = await served.results({"text": "a film", **pair}, model=model["name"], quality=tiers[0])
            assert result["exit"]["tier"] == tiers[0]


async def test_info_tells_the_limits(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, max_inputs=5, max_tokens=40, max_wait_seconds=2.0, threads=1, runs=2) as served:
        info = (await served.client.get("/info")).json()
        assert (info["processes"], info["limits"]["max_inputs"]) == (1, 5)
        assert (info["limits"]["max_tokens"], info["limits"]["max_wait_seconds"]) == (40, 2.0)
        assert info["runtime"]["tiny"] == {
            "precision": "fp32",
            "device": "cpu",
            "cuda": None,
            "runs": 2,
            "threads": 1,
            "lone_threads": [1] * 4,
            "latency": None,
        }


async def test_the_openapi_document_names_schemas_errors_and_examples(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        document = (await served.client.get("/openapi.json")).json()
        operation = document["paths"]["/classify"]["post"]
        body = operation["requestBody"]["content"]["application/json"]
        assert body["schema"]["anyOf"][0] == {"$ref": "#/components/schemas/ClassifyRequest"}
        assert {"ClassifyRequest", "TextPair", "ClassifyResponse", "ErrorResponse"} <= set(
            document["components"]["schemas"]
        )
        assert set(document["components"]["schemas"]["ClassifyRequest"]["properties"]) == {
            "inputs", "model", "quality", "speed", "criterion", "threshold", "min_exit", "max_exit", "quality_floor",
            "deadline_ms", "top_k", "raw_scores", "truncate", "explain",
        }  # fmt: skip
        assert {"400", "404", "413", "422", "429", "500", "503", "504"} <= set(operation["responses"])
        references = _references(document)
        assert all(name in document["components"]["schemas"] for name in references)


def _references(node: object) -> set[str]:
    if isinstance(node, dict):
        own = {node["$ref"].rsplit("/", 1)[1]} if isinstance(node.get("$ref"), str) else set()
        return own.union(*(_references(child) for child in node.values()))
    if isinstance(node, list):
        return set().union(*(_references(child) for child in node))
    return set()


@pytest.mark.parametrize("path", ["/", "/docs"])
async def test_the_pages_are_pages(tiny_bundle: Bundle, path: str) -> None:
    async with serving(tiny_bundle) as served:
        response = await served.client.get(path)
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/html")


async def test_models_share_the_cpus_and_each_gets_its_turn(tiny_bundle: Bundle, pair_bundle: Bundle) -> None:
    async with serving(tiny_bundle, pair_bundle, runs=1) as served:
        entered, release = threading.Event(), threading.Event()
        runner = served.catalog.default.engine._stepper._runner.runner
        run = runner.run

        def held_up(*arguments: Any, **options: Any) -> Any:
            entered.set()
            assert release.wait(60)
            return run(*arguments, **options)

        runner.run = held_up
        first = asyncio.ensure_future(served.classify("a good film"))
        assert await asyncio.to_thread(entered.wait, 60)
        pair = {"text": "a man", "text_pair": "someone"}
        second = asyncio.ensure_future(served.classify(pair, model="tiny-pairs"))
        turns = served.catalog.default.engine._stepper._runner.turns
        await eventually(lambda: len(turns._waiting) == 1)
        release.set()
        assert [reply.status_code for reply in await asyncio.gather(first, second)] == [200, 200]


def test_two_bundles_of_one_name_stop_the_start(tiny_bundle: Bundle) -> None:
    with pytest.raises(StartError, match="two bundles have the name tiny"):
        create_app(load_settings(), [tiny_bundle, tiny_bundle])


def test_a_precision_that_a_bundle_lacks_stops_the_start(tiny_bundle: Bundle) -> None:
    with pytest.raises(StartError, match="no graphs in precision int8; it has fp32"):
        create_app(load_settings(precision="int8"), [tiny_bundle])


async def test_int8_serves_like_fp32(tmp_path: Path) -> None:
    bundle = write_tiny_bundle(tmp_path, precisions=("fp32", "int8"))
    async with serving(bundle, precision="int8") as served:
        (alone,) = await served.results("a good film", quality=1.0)
        (among,) = (await served.results(["a good film", "a dull and long film"], quality=1.0))[:1]
        assert alone["label"] == among["label"]
        assert alone["score"] == pytest.approx(among["score"], abs=1e-6)


def test_a_bundle_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="no such bundle folder"):
        load_bundles(load_settings(bundles=(tmp_path / "nothing",)))


async def test_a_default_quality_that_is_not_certified_is_said_and_runs_to_the_end(
    tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tiny_bundle, default_quality=0.999) as served:
        (result,) = await served.results("a film")
        assert (result["exit"]["number"], result["exit"]["tier"]) == (4, 1.0)
    assert "0.999 is not certified" in caplog.text


def test_importing_the_server_imports_nothing_of_training() -> None:
    heavy = ("torch", "transformers", "onnx", "scipy", "matplotlib", "training", "pandas", "datasets", "accelerate")
    program = (
        "import sys, server.app, server.catalog, server.api.routes, server.engine.runner\n"
        "server.engine.sessions.load_onnxruntime()\n"
        f"print([name for name in {heavy!r} if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
