"""Traces: what a request's spans say, and that they reach a collector without ever hurting an answer."""

import itertools
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, Sampler
from opentelemetry.trace import SpanKind, StatusCode, format_span_id, format_trace_id

from models.bundle import Bundle
from server.app import load_tracing
from server.config import StartError, load_settings
from server.engine.engine import Engine
from server.tracing import Tracing
from tests.server.conftest import serving
from tests.server.process import ROOT, ask, classify, ended, process, start

pytestmark = pytest.mark.anyio

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "tracestate": "vendor=42"}


class Traced:
    """Tracing into memory."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(sampler, shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_time or 0)

    @property
    def request(self) -> ReadableSpan:
        (span,) = (span for span in self.spans if span.kind is SpanKind.SERVER)
        return span


def about(span: ReadableSpan, prefix: str = "") -> dict[str, Any]:
    return {name: value for name, value in (span.attributes or {}).items() if name.startswith(prefix)}


async def test_a_request_is_one_span_with_its_route_status_model_and_exit(tiny_bundle: Bundle) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        (result,) = await served.results("a good film", quality=0.97)
    span = traced.request
    assert (span.name, span.kind, span.status.status_code) == ("POST /classify", SpanKind.SERVER, StatusCode.UNSET)
    attributes = about(span)
    assert attributes.pop("offramp.request_id")
    assert attributes == {
        "http.request.method": "POST",
        "http.route": "/classify",
        "http.response.status_code": 200,
        "url.scheme": "http",
        "offramp.model": "tiny",
        "offramp.version": "1",
        "offramp.precision": "fp32",
        "offramp.texts": 1,
        "offramp.tokens": result["tokens"],
        "offramp.truncated": False,
        "offramp.exit": result["exit"]["number"],
        "offramp.exit.layer": result["exit"]["layer"],
        "offramp.exit.reason": result["exit"]["reason"],
        "offramp.exit.tier": 0.97,
    }


async def test_its_children_are_the_way_through_the_engine_in_order_and_within_it(tiny_bundle: Bundle) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        (result,) = await served.results("a good film", quality=1.0)
    request = traced.request
    children = sorted((span for span in traced.spans if span is not request), key=lambda span: span.start_time or 0)
    assert [span.name for span in children] == ["tokenize", *["queue", "segment"] * 4]
    assert {span.parent.span_id for span in children if span.parent} == {request.context.span_id}
    assert all(before.end_time <= after.start_time for before, after in itertools.pairwise(children))
    assert request.start_time <= children[0].start_time
    assert children[-1].end_time <= request.end_time
    for number, span in enumerate(traced.named("segment"), start=1):
        assert about(span, "offramp") == {
            "offramp.segment": number,
            "offramp.texts": 1,
            "offramp.batch.texts": 1,
            "offramp.batch.tokens": result["tokens"],
            "offramp.precision": "fp32",
        }


async def test_a_batch_has_a_span_for_each_text_and_one_for_each_run_that_its_texts_shared(
    tiny_bundle: Bundle,
) -> None:
    traced = Traced()
    inputs = ["a good film", "two hours of nothing", "a dull and boring movie with no heart"]
    async with serving(tiny_bundle, tracing=traced.tracing, runs=1) as served:
        results = await served.results(inputs, criterion="confidence", threshold=0.8)
    texts = sorted(traced.named("text"), key=lambda span: about(span)["offramp.index"])
    assert [about(span)["offramp.exit"] for span in texts] == [result["exit"]["number"] for result in results]
    assert [about(span)["offramp.tokens"] for span in texts] == [result["tokens"] for result in results]
    # The deeper one goes, the later it ends.
    assert max(texts, key=lambda span: span.end_time or 0) is max(texts, key=lambda span: about(span)["offramp.exit"])
    assert "offramp.exit" not in about(traced.request)
    assert about(traced.request)["offramp.texts"] == 3
    first = traced.named("segment")[0]
    assert (about(first)["offramp.texts"], about(first)["offramp.batch.texts"]) == (3, 3)
    runs = sum(about(span)["offramp.texts"] for span in traced.named("segment"))
    assert runs == sum(result["exit"]["number"] for result in results)


async def test_the_callers_trace_goes_on(tiny_bundle: Bundle) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        await served.client.post("/predict", json={"inputs": "a film"}, headers=CALLER)
    span = traced.request
    assert span.parent is not None
    assert (format_span_id(span.parent.span_id), span.parent.is_remote) == (SPAN_ID, True)
    assert span.context.trace_state.get("vendor") == "42"
    assert {format_trace_id(one.context.trace_id) for one in traced.spans} == {TRACE_ID}


@pytest.mark.parametrize("value", ["", "00-0-0-01", "\xff" * 500, f"00-{'0' * 32}-{SPAN_ID}-01"])
async def test_a_traceparent_that_is_none_begins_a_new_trace(tiny_bundle: Bundle, value: str) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        headers = {"traceparent": value.encode("latin-1")}
        assert (await served.client.get("/livez", headers=headers)).status_code == 200
    assert traced.request.parent is None


async def test_what_the_sampler_leaves_out_is_not_recorded_and_keeps_its_id_in_the_log(
    tiny_bundle: Bundle, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    timelines = []
    submit = Engine.submit

    async def spy(self: Engine, *args: Any, **options: Any) -> Any:
        timelines.append(options["timeline"])
        return await submit(self, *args, **options)

    monkeypatch.setattr(Engine, "submit", spy)
    traced = Traced(ALWAYS_OFF)
    async with serving(tiny_bundle, tracing=traced.tracing, access_log=True) as served:
        assert (await served.client.post("/classify", json={"inputs": "a film"}, headers=CALLER)).status_code == 200
        assert "trace_id" not in await _open_metrics(served.client)
    assert traced.spans == ()
    assert timelines == [None]
    (line,) = (record for record in caplog.records if "POST /classify" in record.getMessage())
    assert line.offramp_fields["trace_id"] == TRACE_ID  # type: ignore[attr-defined]


async def _open_metrics(client: Any) -> str:
    return (await client.get("/metrics", headers={"accept": "application/openmetrics-text"})).text


async def test_the_latency_histogram_points_to_a_trace(tiny_bundle: Bundle) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        await served.client.post("/classify", json={"inputs": "a film"}, headers=CALLER)
        page = await _open_metrics(served.client)
    found = re.findall(r'request_duration_seconds_bucket.*route="/classify".*# {trace_id="(\w+)"}', page)
    assert found == [TRACE_ID]


@pytest.mark.parametrize(
    ("body", "status", "failed"),
    [
        ({"inputs": "a film", "quality": 2}, 422, False),
        ({"inputs": "a film", "model": "xyzzy"}, 404, False),
        ({"inputs": "poison"}, 500, True),
    ],
)
async def test_only_our_own_failures_are_errors(
    tiny_bundle: Bundle, body: dict[str, Any], status: int, failed: bool
) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        await served.client.post("/classify", json=body)
    assert about(traced.request)["http.response.status_code"] == status
    assert (traced.request.status.status_code is StatusCode.ERROR) is failed
    assert ("error.type" in about(traced.request)) is failed
    # What was done before it failed is there to be seen.
    assert len(traced.named("segment")) == failed


async def test_no_span_holds_a_text_or_a_path_as_it_was_asked_for(tiny_bundle: Bundle) -> None:
    traced = Traced()
    async with serving(tiny_bundle, tracing=traced.tracing) as served:
        for inputs in ("xyzzy film", ["xyzzy", "film xyzzy"], "poison xyzzy", {"text": "xyzzy", "text_pair": "xyzzy"}):
            await served.classify(inputs)
        await served.classify("film", model="xyzzy")
        await served.client.get("/xyzzy?q=xyzzy", headers={"user-agent": "xyzzy"})
        await served.client.post("/v2/models/xyzzy/infer", json={"inputs": ["xyzzy"]})
        await served.client.request("XYZZY", "/classify")
    told = "\n".join(span.to_json() for span in traced.spans)
    assert "POST /v2/models/{model}/infer" in told
    assert "xyzzy" not in told.lower()


class Collector(ThreadingHTTPServer):
    """Takes OTLP over HTTP as a collector does, and keeps the spans."""

    def __init__(self, status: int = 200) -> None:
        super().__init__(("127.0.0.1", 0), _Receive)
        self.status = status
        self.asked = threading.Event()
        self.resources: list[dict[str, str]] = []
        self.spans: list[Any] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Receive(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        if self.server.status == 200:
            for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                attributes = {pair.key: pair.value.string_value for pair in of_resource.resource.attributes}
                self.server.resources.append(attributes)
                self.server.spans += [span for scope in of_resource.scope_spans for span in scope.spans]
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def collecting(status: int = 200) -> Iterator[Collector]:
    with Collector(status) as collector:
        serving = threading.Thread(target=collector.serve_forever, daemon=True)
        serving.start()
        try:
            yield collector
        finally:
            collector.shutdown()
            serving.join()


@pytest.fixture(autouse=True)
def no_telemetry_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


async def test_a_collector_gets_the_spans_of_a_server_that_ends(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
        # Longer than the test: what arrives was sent because the server ended.
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "600000")
        with process(tiny_bundle, tracing=True, access_log=True, log_format="json") as server:
            reply = await ask(server, "POST", "/classify", {"inputs": "a film", "quality": 1.0}, headers=CALLER)
            assert reply.status == 200
            server.terminate()
            assert server.status() == 0
    assert sorted(span.name for span in collector.spans) == sorted(
        ["POST /classify", "tokenize", *["queue", "segment"] * 4]
    )
    assert {span.trace_id.hex() for span in collector.spans} == {TRACE_ID}
    (request,) = (span for span in collector.spans if span.kind == span.SPAN_KIND_SERVER)
    assert (request.parent_span_id.hex(), request.trace_state) == (SPAN_ID, "vendor=42")
    (resource,) = collector.resources
    assert resource["service.name"] == "offramp"
    assert resource["deployment.environment.name"] == "test"
    (line,) = (json.loads(line) for line in server.log.splitlines() if "/classify" in line)
    assert (line["trace_id"], line["status"]) == (TRACE_ID, 200)


async def test_a_collector_that_fails_hurts_no_answer_and_no_end(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with collecting(status=500) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
        with process(tiny_bundle, tracing=True) as server:
            assert (await classify(server, "a film")).status == 200
            assert collector.asked.wait(60)
            assert [(await classify(server, "a film")).status for _ in range(5)] == [200] * 5
            server.terminate()
            assert server.status() == 0
            assert "Traceback" not in server.log


async def test_without_a_collector_requests_are_answered_and_the_server_ends(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with process(tiny_bundle, tracing=True) as server:
        assert (await classify(server, "a film")).status == 200
        server.terminate()
        assert server.status() == 0
        assert "the collector did not take the last traces" in server.log


async def test_opentelemetrys_own_variables_choose_the_sampler_and_switch_it_off(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asked_with(name: str, value: str) -> list[str]:
        with collecting() as collector, monkeypatch.context() as patch:
            patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
            patch.setenv(name, value)
            with process(tiny_bundle, tracing=True) as server:
                assert (await classify(server, "a film")).status == 200
                assert (await ask(server, "GET", "/livez", headers=CALLER)).status == 200
                server.terminate()
                assert server.status() == 0
        return [span.name for span in collector.spans if span.kind == span.SPAN_KIND_SERVER]

    assert await asked_with("OTEL_TRACES_SAMPLER", "parentbased_always_off") == ["GET /livez"]
    assert await asked_with("OTEL_SDK_DISABLED", "true") == []


@pytest.mark.parametrize(
    ("name", "value", "only"),
    [("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc", "http/protobuf"), ("OTEL_TRACES_EXPORTER", "console", "otlp")],
)
def test_another_way_to_a_collector_is_one_line_and_status_1(
    tiny_bundle: Bundle, monkeypatch: pytest.MonkeyPatch, name: str, value: str, only: str
) -> None:
    monkeypatch.setenv(name, value)
    status, error = ended(start(tiny_bundle.path, tracing=True, log_level="error"))
    assert (status, error) == (1, f"offramp: {name} {value!r}: this server traces by {only} only\n")


def test_without_the_extra_the_start_fails_and_says_what_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "server.tracing")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(
        StartError, match=r"needs opentelemetry\.sdk\.resources: pip install 'offramp\[otel\]' brings it"
    ):
        load_tracing(load_settings(tracing=True))


def test_nobody_who_does_not_ask_for_it_loads_it() -> None:
    program = "import sys, server.app; print('server.tracing' in sys.modules, 'opentelemetry.sdk' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"
