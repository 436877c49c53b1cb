"""Traces of requests, with OpenTelemetry. Imported only where tracing is asked for: the libraries are an extra.

A request's span continues the trace that the caller's ``traceparent`` names. Its children are built after the answer,
from times that were recorded on the way:

    POST /classify
    ├─ tokenize
    ├─ queue        waiting for a run, the longest of the request's texts in it
    ├─ segment      one run; texts of other requests may have been in it
    ├─ ...
    └─ text         where the request has several: from tokenized to answered, with the exit that it left at

No attribute ever holds input text, nor the path as it was asked for, whose place for a name may hold anything.
"""

import logging
import os
import threading
import time
import uuid
from dataclasses import dataclass
from typing import Any, Final

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.propagate import extract
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Span, SpanKind, StatusCode, format_trace_id, set_span_in_context
from starlette.types import Scope

from server.catalog import ServedModel
from server.config import StartError
from server.engine.request import Run, Timeline
from server.metrics import UNMATCHED

logger = logging.getLogger("offramp.tracing")

FLUSH_SECONDS = 5.0
"""How long the end of the server waits for a collector that does not take what is left."""
_METHODS = frozenset({"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "TRACE"})
_SUPPORTED: Final = {
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
    "OTEL_TRACES_EXPORTER": "otlp",
}


@dataclass(slots=True)
class Trace:
    """One request's trace, while it is in work. ``timeline`` is ``None`` where the sampler left the request out;
    ``model`` and ``results`` (documents of ``schemas.Result``) are set as they become known."""

    span: Span
    trace_id: str
    began: float
    began_ns: int
    timeline: Timeline | None
    model: ServedModel | None = None
    results: list[dict[str, Any]] | None = None

    @property
    def exemplar(self) -> dict[str, str] | None:
        """What a histogram keeps of the request: only of one whose trace can be looked at."""
        return None if self.timeline is None else {"trace_id": self.trace_id}

    def at(self, seconds: float) -> int:
        """A time on the engine's clock as nanoseconds since 1970."""
        return self.began_ns + round((seconds - self.began) * 1e9)


class Tracing:
    """Begins and ends the traces of requests. Neither ever raises: an answer matters more than its trace."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("offramp")

    def begin(self, scope: Scope) -> Trace | None:
        """The trace of the request of ``scope``, a part of its caller's trace if it has one."""
        try:
            headers: dict[str, list[str]] = {}
            for name, value in scope["headers"]:
                headers.setdefault(name.decode("latin-1"), []).append(value.decode("latin-1"))
            began, began_ns = time.monotonic(), time.time_ns()
            method = _method(scope["method"])
            span = self._tracer.start_span(
                method,
                context=extract(headers),
                kind=SpanKind.SERVER,
                attributes={"http.request.method": method, "url.scheme": scope["scheme"]},
                start_time=began_ns,
            )
            context = span.get_span_context()
            # OTEL_SDK_DISABLED gives none.
            if not context.is_valid:
                return None
            timeline = Timeline() if span.is_recording() else None
            return Trace(span, format_trace_id(context.trace_id), began, began_ns, timeline)
        except Exception:
            logger.exception("a trace could not begin")
            return None

    def end(self, trace: Trace, method: str, route: str, status: int, request_id: str) -> None:
        """Ends ``trace`` with an answer of ``status`` (499: the client left)."""
        if trace.timeline is None:
            return
        try:
            self._end(trace, trace.timeline, _method(method), route, status, request_id)
        except Exception:
            logger.exception("a trace could not end")

    def _end(self, trace: Trace, timeline: Timeline, method: str, route: str, status: int, request_id: str) -> None:
        span = trace.span
        span.set_attributes({"http.response.status_code": status, "offramp.request_id": request_id})
        if route != UNMATCHED:
            span.update_name(f"{method} {route}")
            span.set_attribute("http.route", route)
        if status >= 499:
            span.set_attribute("error.type", str(status))
        if status >= 500:
            span.set_status(StatusCode.ERROR)
        if trace.model is not None:
            self._add_work(trace, timeline, trace.model)
        span.end(trace.at(time.monotonic()))

    def _add_work(self, trace: Trace, timeline: Timeline, model: ServedModel) -> None:
        """What the engine did for a request, whether or not it came to an answer."""
        span, results = trace.span, trace.results or ()
        span.set_attributes(
            {
                "offramp.model": model.name,
                "offramp.version": model.bundle.manifest.version,
                "offramp.precision": model.precision,
            }
        )
        # Read once: a worker may add to them, where the request ended before its texts did.
        runs = [list(own) for own in timeline.runs]
        if not runs:
            return
        span.set_attribute("offramp.texts", len(runs))
        self._add(trace, "tokenize", timeline.tokenizing, timeline.tokenized, {"offramp.texts": len(runs)})
        shared: dict[int, tuple[Run, list[float]]] = {}
        for own in runs:
            for since, run in own:
                shared.setdefault(id(run), (run, []))[1].append(since)
        for run, waited in sorted(shared.values(), key=lambda one: one[0].started):
            segment = {"offramp.segment": run.segment}
            self._add(trace, "queue", min(waited), run.started, segment)
            about = {
                "offramp.texts": len(waited),
                "offramp.batch.texts": run.texts,
                "offramp.batch.tokens": run.tokens,
                "offramp.precision": model.precision,
            }
            self._add(trace, "segment", run.started, run.ended, segment | about)
        if len(results) == 1:
            span.set_attributes(_exit(results[0]))
            return
        for index, (own, result) in enumerate(zip(runs, results, strict=False)):
            until = own[-1][1].ended if own else timeline.tokenized
            self._add(trace, "text", timeline.tokenized, until, {"offramp.index": index, **_exit(result)})

    def _add(self, trace: Trace, name: str, start: float, end: float, attributes: dict[str, Any]) -> None:
        context = set_span_in_context(trace.span)
        self._tracer.start_span(name, context, attributes=attributes, start_time=trace.at(start)).end(trace.at(end))

    def close(self, seconds: float = FLUSH_SECONDS) -> None:
        """Sends what is left, for ``seconds`` at most."""
        # The provider itself waits for half a minute, and takes no other time.
        flush = threading.Thread(target=self._provider.shutdown, name="offramp-flush", daemon=True)
        flush.start()
        flush.join(seconds)
        if flush.is_alive():
            logger.warning("the collector did not take the last traces within %g s", seconds)


def tracing_from_environment(version: str) -> Tracing:
    """Tracing as OpenTelemetry's own environment variables say, to a collector that speaks OTLP over HTTP.

    Raises :class:`StartError` for what cannot be.
    """
    for name, only in _SUPPORTED.items():
        if os.environ.get(name, only) != only:
            raise StartError(f"{name} {os.environ[name]!r}: this server traces by {only} only")
    try:
        named = OTELResourceDetector().detect().attributes
        own = {"service.name": "offramp", "service.version": version, "service.instance.id": str(uuid.uuid4())}
        resource = Resource.create({key: value for key, value in own.items() if key not in named})
        # What is left is sent by `close`, within bounds.
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise StartError(f"tracing: {error}") from None
    return Tracing(provider)


def _method(method: str) -> str:
    return method if method in _METHODS else "_OTHER"


def _exit(result: dict[str, Any]) -> dict[str, Any]:
    left = result["exit"]
    attributes = {
        "offramp.exit": left["number"],
        "offramp.exit.layer": left["layer"],
        "offramp.exit.reason": left["reason"],
        "offramp.tokens": result["tokens"],
        "offramp.truncated": result["truncated"],
    }
    # There is no null among attributes; none of a tier means that nothing is promised.
    return attributes if left["tier"] is None else {**attributes, "offramp.exit.tier": left["tier"]}
