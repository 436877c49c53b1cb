"""Prometheus metrics: the names, labels and buckets that dashboards and alerts rely on.

Every app has a registry of its own, so several apps can live in one process. Series are created at the start, so that
``rate()`` works from the first event on.
"""

import functools
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, values
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from models.architecture import Architecture
from models.exits import CRITERIA, Reason
from server.engine.request import Answer, Failure
from server.neighbours import Shared, SharedChecks
from server.promises import BROKEN, Promises

logger = logging.getLogger("offramp")

# Seconds. From 0.25 ms, doubling; early exits answer in the first few buckets.
SECONDS = (
    0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.064, 0.128, 0.256, 0.512, 1.024, 2.048, 4.096, 8.192
)  # fmt: skip
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONFIDENCES = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0)

CLASSIFY_ROUTES = ("/classify", "/predict", "/", "/v2/models/{model}/infer")
CLASSIFY_CODES = (200, 400, 408, 413, 422, 429, 499, 500, 503, 504)
REJECTIONS = ("queue_full", "wait", "concurrency", "late", "deadline", "not_running")
RELOADS = ("success", "failure")
UNMATCHED = "unmatched"

# How the processes of one server join a gauge: what they hold together, whether any of them or whether all say so.
_Together = Literal["livesum", "livemax", "livemin"]
# A series can't be taken out of the files that processes share: this value in it says that it is gone.
_GONE = -1.0


class Metrics:
    """All metrics of one app. Durations are in seconds; counts of ``exits``, ``tier``, ``tier_exits``, ``cancelled``,
    ``truncated`` and ``nonfinite`` are in texts, those of ``requests`` and ``rejected`` in requests."""

    def __init__(self, shared: Shared | None = None) -> None:
        """``shared``: this process is one of several, and its metrics are to be shown with theirs."""
        self.registry = CollectorRegistry()
        self._shared = shared
        # The shadow checks of all processes, where there are several.
        self.checks = None if shared is None else SharedChecks(shared)
        self._read: dict[Gauge, Callable[[], float]] = {}
        if shared is None:
            prometheus_client.ProcessCollector(registry=self.registry)
            prometheus_client.PlatformCollector(registry=self.registry)
            prometheus_client.GCCollector(registry=self.registry)
        else:
            # The library keeps this for the whole process, and asks for it when a metric is made.
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(shared.folder)
            values.ValueClass = values.MultiProcessValue(lambda: shared.number)
            self._of_process = _OfProcess(self.registry)

        def counter(name: str, help_text: str, *labels: str) -> Counter:
            return Counter(f"offramp_{name}", help_text, labels, registry=self.registry)

        def histogram(name: str, help_text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"offramp_{name}", help_text, labels, buckets=buckets, registry=self.registry)

        def gauge(name: str, help_text: str, together: _Together, *labels: str) -> Gauge:
            return Gauge(f"offramp_{name}", help_text, labels, registry=self.registry, multiprocess_mode=together)

        self.requests = counter(
            "requests_total", "HTTP requests; code 499: the client left before its answer", "model", "route", "code"
        )
        self.request_seconds = histogram(
            "request_duration_seconds", "HTTP request, first byte in to last byte out", SECONDS, "model", "route"
        )
        self.tokenize_seconds = histogram(
            "tokenize_duration_seconds", "Tokenizing all texts of a request", SECONDS, "model"
        )
        self.queue_seconds = histogram(
            "queue_duration_seconds", "Waiting of a text for a worker, before all its segments", SECONDS, "model"
        )
        self.inference_seconds = histogram(
            "inference_duration_seconds", "Runs of all segments that a text took part in", SECONDS, "model"
        )
        self.exits = counter("exits_total", "Texts answered, by the exit they left at", "model", "exit", "reason")
        self.confidence = histogram(
            "exit_confidence", "Largest probability at the exit that a text left at", CONFIDENCES, "model", "exit"
        )
        self.layers_run = counter("layers_run_total", "Layers computed for answered texts", "model")
        self.layers_saved = counter("layers_saved_total", "Layers that answered texts did not need", "model")
        self.batch_size = histogram(
            "segment_batch_size", "Texts in a run of a segment", BATCH_SIZES, "model", "segment"
        )
        self.segment_seconds = histogram(
            "segment_duration_seconds", "One run of a segment", SECONDS, "model", "segment"
        )
        self.queue_depth = gauge("queue_depth", "Texts waiting for a segment now", "livesum", "model", "segment")
        self.inflight = gauge("inflight_requests", "Classification requests in work now", "livesum")
        self.rejected = counter("rejected_total", "Requests refused or given up unanswered", "model", "reason")
        self.cancelled = counter("cancelled_total", "Texts dropped because their client had gone", "model")
        self.truncated = counter(
            "truncated_total",
            "Texts cut to the tokens that are read: the model's maximum, or the setting max_tokens",
            "model",
        )
        self.nonfinite = counter("nonfinite_total", "Texts failed because a logit was NaN or infinite", "model")
        self.shadow = counter(
            "shadow_total",
            "Answers that were checked against the last exit, and whether it agrees",
            "model",
            "tier",
            "agrees",
        )
        self.promise_evidence = gauge(
            "promise_evidence",
            "Evidence of the shadow checks against a tier's promise: 1 is none, 20 means broken",
            "livemax",
            "model",
            "tier",
        )
        self.lowered = counter(
            "lowered_total", "Texts answered below the quality they asked for, with consent", "model", "tier"
        )
        self.tier = counter("tier_total", "Texts answered, by the certified tier of the answer", "model", "tier")
        self.tier_exits = counter(
            "tier_exits_total",
            "Texts answered under a certified tier, by the exit they left at",
            "model",
            "tier",
            "exit",
        )
        self.calibrated_share = gauge(
            "calibrated_exit_share",
            "Share of the calibration's texts that left at an exit",
            "livemax",
            "model",
            "tier",
            "exit",
        )
        self.flops_run = counter("flops_run_total", "Estimated FLOPs until the exits of answered texts", "model")
        self.flops_saved = counter(
            "flops_saved_total", "Estimated FLOPs from there to the last exit, which were not needed", "model"
        )
        self.ready = gauge("ready", "1 while requests are welcome, 0 while starting, draining or broken", "livemin")
        self.model_info = gauge(
            "model_info",
            "1 for each model served",
            "livemax",
            "model",
            "version",
            "precision",
            "device",
            "labels",
            "exits",
        )
        self.reloads = counter(
            "model_reloads_total", "Reloads of a model; after a failure the old version goes on", "model", "outcome"
        )

    def answered(
        self, model: str, route: str, code: int, seconds: float, exemplar: dict[str, str] | None = None
    ) -> None:
        """Counts a request: the model that it went to (empty: none), its route's template, status and duration;
        ``exemplar`` names its trace."""
        self._request_series(model, route, code).inc()
        self._duration_series(model, route).observe(seconds, exemplar)

    @functools.cache  # noqa: B019 - one of these to an app, and finding a series by its labels takes 5 microseconds
    def _request_series(self, model: str, route: str, code: int) -> Counter:
        return self.requests.labels(model, route, str(code))

    @functools.cache  # noqa: B019
    def _duration_series(self, model: str, route: str) -> Histogram:
        return self.request_seconds.labels(model, route)

    def for_model(
        self, model: str, architecture: Architecture, tiers: tuple[float, ...], promises: Promises
    ) -> "ModelMetrics":
        """The metrics of one model; ``tiers`` are its certified qualities, and ``promises`` keeps count of the checks
        on them."""
        return ModelMetrics(self, model, architecture, tiers, promises)

    def read(self, gauge: Gauge, function: Callable[[], float]) -> None:
        """From here on ``gauge`` is what ``function`` says: at every scrape, or of several processes every second."""
        if self._shared is None:
            gauge.set_function(function)
        else:
            self._read[gauge] = function
            gauge.set(function())

    def refresh(self) -> None:
        """Writes down what this process has to say now, where others may be asked for it, and reads what they say."""
        if self.checks is not None:
            self.checks.refresh()
        for gauge, function in self._read.items():
            gauge.set(function())
        if self._shared is not None:
            self._of_process.refresh()

    def remove(self, gauge: Gauge, labels: Sequence[str]) -> None:
        """Takes the series of ``labels`` out of ``gauge``."""
        if self._shared is None:
            # The series refers to itself, so it lingers; what its function holds (an engine) should not.
            gauge.labels(*labels).set_function(float)
            gauge.remove(*labels)
        else:
            child = gauge.labels(*labels)
            self._read.pop(child, None)
            child.set(0.0 if gauge is self.queue_depth else _GONE)

    def page(self) -> CollectorRegistry:
        """What a scrape is answered with: the metrics of all processes of this server."""
        if self._shared is None:
            return self.registry
        self.refresh()
        together = CollectorRegistry()
        together.register(_AllProcesses(self._shared.folder))
        return together

    def create_route(self, route: str, codes: tuple[int, ...] = (200,), model: str = "") -> None:
        """Creates the request series of a route, so that they are there before the first request."""
        for code in codes:
            self.requests.labels(model, route, str(code))
        self.request_seconds.labels(model, route)


class _OfProcess:
    """CPU and memory of the processes of one server together, under the names that a single process gives them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._cpu = Counter(
            "process_cpu_seconds_total", "CPU time, user and system, of all processes", registry=registry
        )
        self._resident = Gauge(
            "process_resident_memory_bytes",
            "Resident memory, of all processes (what they share is counted in each)",
            registry=registry,
            multiprocess_mode="livesum",
        )
        self._counted = 0.0

    def refresh(self) -> None:
        spent = time.process_time()
        self._cpu.inc(spent - self._counted)
        self._counted = spent
        try:
            pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        except OSError:
            return
        self._resident.set(pages * os.sysconf("SC_PAGE_SIZE"))


class _AllProcesses(Collector):
    """The metrics of all processes that write to ``folder``, without the series that are gone."""

    def __init__(self, folder: Path) -> None:
        self._files = MultiProcessCollector(None, str(folder))

    def collect(self) -> Iterator[Metric]:
        for family in self._files.collect():
            if family.type == "gauge":
                family.samples = [sample for sample in family.samples if sample.value != _GONE]
            yield family


class ModelMetrics:
    """One version of one model: its series, looked up once. It is the engine's observer.

    Counters go on from version to version; gauges are a version's own, from :meth:`show` to :meth:`hide`.
    """

    def __init__(
        self, metrics: Metrics, model: str, architecture: Architecture, tiers: tuple[float, ...], promises: Promises
    ) -> None:
        self._layers = {spec.number: spec.after_layer for spec in architecture.exits}
        self._num_layers = architecture.num_layers
        self._metrics = metrics
        self._model = model
        last = len(architecture.exits)
        early: tuple[Reason, ...] = (*CRITERIA, "max_exit", "deadline")
        self._exits = {
            (number, reason): metrics.exits.labels(model, str(number), reason)
            for number in self._layers
            for reason in (early if number < last else ("final",))
        }
        self._confidence = {number: metrics.confidence.labels(model, str(number)) for number in self._layers}
        self._batch_size = {number: metrics.batch_size.labels(model, str(number)) for number in self._layers}
        self._segment_seconds = {number: metrics.segment_seconds.labels(model, str(number)) for number in self._layers}
        self._layers_run = metrics.layers_run.labels(model)
        self._layers_saved = metrics.layers_saved.labels(model)
        self._tokenize = metrics.tokenize_seconds.labels(model)
        self._queue = metrics.queue_seconds.labels(model)
        self._inference = metrics.inference_seconds.labels(model)
        self._cancelled = metrics.cancelled.labels(model)
        self._truncated = metrics.truncated.labels(model)
        self._nonfinite = metrics.nonfinite.labels(model)
        self._flops_run = metrics.flops_run.labels(model)
        self._flops_saved = metrics.flops_saved.labels(model)
        self._tier_exits = {
            (tier, number): metrics.tier_exits.labels(model, tier_label(tier), str(number))
            for tier in (1.0, *tiers)
            for number in self._layers
        }
        self._tiers = {tier: metrics.tier.labels(model, tier_label(tier)) for tier in (None, 1.0, *tiers)}
        self._rejected = {reason: metrics.rejected.labels(model, reason) for reason in REJECTIONS}
        self._reloads = {outcome: metrics.reloads.labels(model, outcome) for outcome in RELOADS}
        self._shown: list[tuple[Gauge, tuple[str, ...]]] = []
        self._shadow = {
            (tier, agrees): metrics.shadow.labels(model, tier_label(tier), str(agrees).lower())
            for tier in tiers
            for agrees in (True, False)
        }
        self._lowered = {tier: metrics.lowered.labels(model, tier_label(tier)) for tier in (None, *tiers)}
        self._promises = promises
        self._warned: set[float] = set()
        for route in CLASSIFY_ROUTES:
            metrics.create_route(route, CLASSIFY_CODES, model)

    def show(self, info: Sequence[str], shares: Mapping[float, Sequence[float]], depth: Callable[[int], int]) -> None:
        """``info``: version, precision, device, number of labels and of exits. ``shares``: for each tier, of the
        calibration's texts those that left at each exit. ``depth(segment)``: texts that wait for it now."""
        for tier, of_exits in shares.items():
            for number, share in zip(self._layers, of_exits, strict=True):
                self._gauge(self._metrics.calibrated_share, tier_label(tier), str(number)).set(share)
        for tier in {tier for tier, _ in self._shadow}:
            gauge = self._gauge(self._metrics.promise_evidence, tier_label(tier))
            self._metrics.read(gauge, functools.partial(self._evidence, tier))
        for segment in self._layers:
            self._metrics.read(self._gauge(self._metrics.queue_depth, str(segment)), functools.partial(depth, segment))
        self._gauge(self._metrics.model_info, *info).set(1)

    def count_with_others(self, version: str) -> None:
        """From here on shadow checks count together with those of other processes that serve this ``version``."""
        checks = self._metrics.checks
        if checks is not None:
            self._promises.join(checks.begin(self._model, version), functools.partial(checks.others, self._model))

    def hide(self) -> None:
        """Takes back what :meth:`show` has set."""
        for gauge, labels in self._shown:
            self._metrics.remove(gauge, labels)
        self._shown.clear()

    def _gauge(self, gauge: Gauge, *labels: str) -> Gauge:
        self._shown.append((gauge, (self._model, *labels)))
        return gauge.labels(self._model, *labels)

    def reloaded(self, outcome: Literal["success", "failure"]) -> None:
        self._reloads[outcome].inc()

    def segment_ran(self, segment: int, texts: int, seconds: float) -> None:
        self._batch_size[segment].observe(texts)
        self._segment_seconds[segment].observe(seconds)

    def answered(self, answer: Answer) -> None:
        left = answer.left
        self._exits[left.exit, answer.reason].inc()
        self._confidence[left.exit].observe(left.confidence)
        self._queue.observe(answer.queue_seconds)
        self._inference.observe(answer.inference_seconds)
        layers = self._layers[left.exit]
        self._layers_run.inc(layers)
        self._layers_saved.inc(self._num_layers - layers)
        if answer.truncated:
            self._truncated.inc()

    def failed(self, failure: Failure) -> None:
        if failure.kind == "nonfinite":
            self._nonfinite.inc()

    def cancelled(self) -> None:
        self._cancelled.inc()

    def checked(self, tier: float, agrees: bool) -> None:
        """A shadow check of an answer under ``tier``."""
        self._shadow[tier, agrees].inc()
        self._weighed(tier, self._promises.record(tier, agrees))

    def _evidence(self, tier: float) -> float:
        return self._weighed(tier, self._promises.evidence(tier))

    def _weighed(self, tier: float, evidence: float) -> float:
        if evidence >= BROKEN and tier not in self._warned:
            self._warned.add(tier)
            logger.warning(
                "%s: quality %g is not kept here: too many shadow checks disagree with the last exit", self._model, tier
            )
        return evidence

    def lowered(self, tier: float | None, texts: int) -> None:
        """Texts were answered under ``tier``, below the quality that they asked for."""
        self._lowered[tier].inc(texts)

    def tokenized(self, seconds: float) -> None:
        self._tokenize.observe(seconds)

    def served(self, tier: float | None, exit: int, *, flops: float, flops_saved: float) -> None:
        """One text was answered under ``tier`` at ``exit``."""
        self._tiers[tier].inc()
        if tier is not None:
            self._tier_exits[tier, exit].inc()
        self._flops_run.inc(flops)
        self._flops_saved.inc(flops_saved)

    def rejected(self, reason: str) -> None:
        self._rejected[reason].inc()


def tier_label(tier: float | None) -> str:
    """A tier as a label value: ``0.99``, or ``none`` where nothing is promised."""
    return "none" if tier is None else f"{tier:g}"
