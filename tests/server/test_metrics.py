"""Metrics: there from the start, and moved by exactly one by each outcome."""

import asyncio
import re
import threading
from typing import Any

import httpx
import pytest

from models.bundle import Bundle
from models.costs import exit_costs, layer_cost, reading_costs
from tests.server.conftest import Served, eventually, samples, serving
from tests.tiny import POISON

pytestmark = pytest.mark.anyio

Key = tuple[str, tuple[tuple[str, str], ...]]


def key(name: str, **labels: str) -> Key:
    return (f"offramp_{name}", tuple(sorted(labels.items())))


def changes(served: Served, before: dict[Key, float]) -> dict[Key, float]:
    """What has changed, buckets and sums of durations left out."""
    after = samples(served.metrics.registry)
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if value != before.get(name, 0.0) and not name[0].endswith(("_bucket", "_sum"))
    }


NAMES = (
    "requests_total request_duration_seconds tokenize_duration_seconds queue_duration_seconds "
    "inference_duration_seconds exits_total exit_confidence layers_run_total layers_saved_total segment_batch_size "
    "segment_duration_seconds queue_depth inflight_requests rejected_total cancelled_total truncated_total "
    "nonfinite_total shadow_total tier_total tier_exits_total calibrated_exit_share flops_run_total flops_saved_total "
    "ready model_info model_reloads_total"
).split()


async def test_every_series_is_there_before_the_first_request(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        page = (await served.client.get("/metrics")).text
        for name in NAMES:
            assert re.search(rf"^offramp_{name}(_bucket)?({{[^}}]*}})? \S+$", page, re.MULTILINE), name
        start = samples(served.metrics.registry)
        for code in ("200", "422", "429", "500", "504"):
            assert start[key("requests_total", model="tiny", route="/classify", code=code)] == 0
        for tier in ("0.99", "0.97", "0.95", "1", "none"):
            assert start[key("tier_total", model="tiny", tier=tier)] == 0
        assert start[key("exits_total", model="tiny", exit="1", reason="deadline")] == 0
        info = key("model_info", model="tiny", version="1", precision="fp32", device="cpu", labels="2", exits="4")
        assert start[info] == 1


async def test_durations_have_fixed_buckets_from_a_quarter_of_a_millisecond(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        bounds = [
            float(dict(labels)["le"])
            for name, labels in samples(served.metrics.registry)
            if name == "offramp_request_duration_seconds_bucket" and dict(labels)["route"] == "/classify"
        ]
        assert min(bounds) == 0.00025
        assert max(bounds) == float("inf")


async def test_one_answer_moves_each_of_its_counters_by_one(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, runs=1) as served:
        before = samples(served.metrics.registry)
        (result,) = await served.results("a good film", threshold=0.0, min_exit=2)
        architecture, tokens = tiny_bundle.manifest.architecture, result["tokens"]
        costs, reading = exit_costs(architecture, tokens), reading_costs(architecture, tokens)
        flops = 2 * layer_cost(architecture, tokens)
        assert changes(served, before) == {
            key("requests_total", model="tiny", route="/classify", code="200"): 1,
            key("request_duration_seconds_count", model="tiny", route="/classify"): 1,
            key("tokenize_duration_seconds_count", model="tiny"): 1,
            key("queue_duration_seconds_count", model="tiny"): 1,
            key("inference_duration_seconds_count", model="tiny"): 1,
            key("exits_total", model="tiny", exit="2", reason="confidence"): 1,
            key("exit_confidence_count", model="tiny", exit="2"): 1,
            key("layers_run_total", model="tiny"): 1,
            key("layers_saved_total", model="tiny"): 3,
            key("flops_run_total", model="tiny"): pytest.approx(flops * (costs[1] - reading[0])),
            key("flops_saved_total", model="tiny"): pytest.approx(flops * (costs[3] - costs[1] - reading[2])),
            key("segment_batch_size_count", model="tiny", segment="1"): 1,
            key("segment_batch_size_count", model="tiny", segment="2"): 1,
            key("segment_duration_seconds_count", model="tiny", segment="1"): 1,
            key("segment_duration_seconds_count", model="tiny", segment="2"): 1,
            key("tier_total", model="tiny", tier="none"): 1,
        }


async def test_texts_are_counted_singly_and_requests_once(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, runs=1) as served:
        before = samples(served.metrics.registry)
        await served.results(["a good film", "good " * 200, "a film"], quality=1.0)
        moved = changes(served, before)
        assert moved[key("requests_total", model="tiny", route="/classify", code="200")] == 1
        assert moved[key("exits_total", model="tiny", exit="4", reason="final")] == 3
        assert moved[key("tier_total", model="tiny", tier="1")] == 3
        assert moved[key("tier_exits_total", model="tiny", tier="1", exit="4")] == 3
        assert moved[key("truncated_total", model="tiny")] == 1
        assert moved[key("layers_run_total", model="tiny")] == 12
        assert key("layers_saved_total", model="tiny") not in moved


@pytest.mark.parametrize(
    ("document", "code", "model", "also"),
    [
        ({"inputs": ""}, "422", "tiny", {}),
        ({"inputs": "a", "model": "nobody"}, "404", "", {}),
        ({"inputs": POISON}, "500", "tiny", {key("nonfinite_total", model="tiny"): 1}),
    ],
)
async def test_a_refusal_is_counted_once_under_its_code(
    tiny_bundle: Bundle, document: dict[str, Any], code: str, model: str, also: dict[Key, float]
) -> None:
    async with serving(tiny_bundle) as served:
        before = samples(served.metrics.registry)
        await served.client.post("/classify", json=document)
        moved = changes(served, before)
        assert {name: value for name, value in moved.items() if name[0] == "offramp_requests_total"} == {
            key("requests_total", model=model, route="/classify", code=code): 1
        }
        assert also.items() <= moved.items()
        assert not any(name[0] in ("offramp_exits_total", "offramp_tier_total") for name in moved)


async def test_what_the_calibration_saw_stands_beside_what_is_seen(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        page = samples(served.metrics.registry)
        shares = {
            tier: [
                page.get(key("calibrated_exit_share", model="tiny", tier=tier, exit=str(exit))) for exit in range(1, 5)
            ]
            for tier in ("1", "0.99", "0.97")
        }
        # The tiny calibration's curve has no point at the threshold of 0.99.
        assert shares == {"1": [0, 0, 0, 1], "0.99": [None] * 4, "0.97": [0.25] * 4}


async def test_readiness_is_a_metric(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        assert samples(served.metrics.registry)[key("ready")] == 1
        served.catalog.draining = True
        assert samples(served.metrics.registry)[key("ready")] == 0


async def test_a_full_queue_is_counted_as_a_rejection_with_429(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, max_queue=2, max_inputs=2, runs=1) as served:
        release = _block(served)
        waiting = asyncio.ensure_future(served.classify(["a", "b"]))
        await eventually(lambda: served.catalog.default.engine._admission.texts == 2)
        before = samples(served.metrics.registry)
        response = await served.classify("c")
        assert response.status_code == 429
        assert int(response.headers["retry-after"]) >= 1
        moved = changes(served, before)
        assert moved[key("rejected_total", model="tiny", reason="queue_full")] == 1
        assert moved[key("requests_total", model="tiny", route="/classify", code="429")] == 1
        release.set()
        assert (await waiting).status_code == 200


async def test_a_missed_deadline_is_504_and_counted(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, runs=1) as served:
        release = _block(served)
        before = samples(served.metrics.registry)
        response = await served.classify("a", deadline_ms=30)
        release.set()
        assert response.status_code == 504
        moved = changes(served, before)
        assert moved[key("rejected_total", model="tiny", reason="deadline")] == 1


async def test_an_answer_at_the_deadline_carries_no_promise(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, runs=1) as served:
        release = _block(served, segment=2)
        (result,) = await served.results("a good film", quality=1.0, deadline_ms=2000)
        release.set()
        assert (result["exit"]["number"], result["exit"]["reason"]) == (1, "deadline")
        assert result["exit"]["tier"] is None


async def test_queue_depth_and_requests_in_flight_rise_and_fall(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle, runs=1) as served:
        release = _block(served)
        running = asyncio.ensure_future(served.classify("a"))
        await eventually(lambda: served.catalog.default.engine.queue_depth(1) == 0 and release.entered.is_set())
        waiting = asyncio.ensure_future(served.classify(["b", "c"]))
        await eventually(lambda: served.catalog.default.engine.queue_depth(1) == 2)
        now = samples(served.metrics.registry)
        assert now[key("queue_depth", model="tiny", segment="1")] == 2
        assert now[key("inflight_requests")] == 2
        release.set()
        await asyncio.gather(running, waiting)
        now = samples(served.metrics.registry)
        assert now[key("queue_depth", model="tiny", segment="1")] == 0
        assert now[key("inflight_requests")] == 0


async def test_paths_that_a_scanner_tries_share_one_series(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        before = samples(served.metrics.registry)
        for number in range(20):
            await served.client.get(f"/wp-admin/{number}.php")
        moved = changes(served, before)
        assert moved == {
            key("requests_total", model="", route="unmatched", code="404"): 20,
            key("request_duration_seconds_count", model="", route="unmatched"): 20,
        }


async def test_apps_in_one_process_count_apart(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as one, serving(tiny_bundle) as other:
        before = samples(other.metrics.registry)
        await one.results("a film")
        assert changes(other, before) == {}


async def test_openmetrics_is_spoken_where_it_is_asked_for(tiny_bundle: Bundle) -> None:
    async with serving(tiny_bundle) as served:
        accept = {"accept": "application/openmetrics-text; version=1.0.0"}
        response: httpx.Response = await served.client.get("/metrics", headers=accept)
        assert response.headers["content-type"].startswith("application/openmetrics-text")
        assert response.text.endswith("# EOF\n")


class _Release(threading.Event):
    """Set it to let the blocked worker go on; ``entered`` tells that it stands there."""

    def __init__(self) -> None:
        super().__init__()
        self.entered = threading.Event()


def _block(served: Served, segment: int = 1) -> _Release:
    """Makes the engine's workers stop before ``segment`` until the event is set."""
    release = _Release()
    engine = served.catalog.default.engine
    run = engine._stepper._runner.run

    def waiting_run(number: int, items: Any, **options: Any) -> Any:
        if number == segment:
            release.entered.set()
            release.wait(30)
        return run(number, items, **options)

    engine._stepper._runner.run = waiting_run  # type: ignore[method-assign]
    return release
