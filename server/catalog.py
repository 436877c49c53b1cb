"""The models that one server serves: for each a bundle, the precision it runs in, and its engine."""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from models.architecture import Architecture
from models.bundle import Bundle, Precision, PrecisionCalibration
from models.costs import exit_costs, layer_cost, reading_costs
from server.api.depth import calibrated_shares
from server.config import Settings, StartError
from server.cpus import cpu_allowance, split_cpus
from server.engine.engine import Engine
from server.engine.latency import LatencyTable
from server.engine.order import ORDERS
from server.engine.runner import Runner
from server.metrics import Metrics, ModelMetrics
from server.promises import Promises

logger = logging.getLogger("offramp")


@dataclass(frozen=True)
class ServedModel:
    """One model, ready to be started."""

    bundle: Bundle
    precision: Precision
    device: str
    workers: int
    threads: int
    lone_threads: tuple[int, ...]
    latency: LatencyTable | None
    max_tokens: int
    engine: Engine
    metrics: ModelMetrics

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def promises(self) -> Promises:
        return self.metrics.promises

    @property
    def calibration(self) -> PrecisionCalibration:
        return self.bundle.calibration.precisions[self.precision]

    @functools.cached_property
    def _costs(self) -> dict[int, "Costs"]:
        return {}

    def costs(self, tokens: int) -> "Costs":
        """What a text of ``tokens`` tokens costs."""
        costs = self._costs.get(tokens)
        if costs is None:
            costs = self._costs[tokens] = Costs.of(self.bundle.manifest.architecture, tokens)
        return costs


@dataclass(frozen=True, slots=True)
class Costs:
    """Of a text of some length, in units of one whole layer: the cost ``until`` each exit, every exit before it read,
    what ``reading`` each adds to that, and the FLOPs of a ``layer``."""

    until: tuple[float, ...]
    reading: tuple[float, ...]
    layer: float

    @classmethod
    def of(cls, architecture: Architecture, tokens: int) -> "Costs":
        """Two FLOPs to a multiply-accumulate."""
        until, reading = exit_costs(architecture, tokens), reading_costs(architecture, tokens)
        return cls(tuple(until.tolist()), tuple(reading.tolist()), 2 * layer_cost(architecture, tokens))

    def spent(self, exits: Sequence[int]) -> float:
        """Cost of a text that read ``exits`` (from 1, rising) and left at the last of them."""
        unread = set(range(1, exits[-1])).difference(exits) if len(exits) < exits[-1] else ()
        return self.until[exits[-1] - 1] - sum(self.reading[number - 1] for number in unread)

    def beyond(self, exit: int) -> float:
        """Cost of going on from ``exit`` to the last one, reading none between."""
        return max(0.0, self.until[-1] - self.until[exit - 1] - sum(self.reading[exit:-1]))


class Catalog:
    """Served models by name; the first is the default. ``draining`` is set once the server is told to end."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        """Raises :class:`StartError` where there is no model, or two with one name."""
        if not models:
            raise StartError("no bundle to serve")
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            names = [model.name for model in models]
            twice = next(name for name in names if names.count(name) > 1)
            raise StartError(f"two bundles have the name {twice}; requests could not tell them apart")
        self.default = models[0]
        self.draining = False

    def find(self, name: str | None) -> ServedModel | None:
        """The model called ``name``, the default for ``None``; ``None`` where there is none."""
        return self.default if name is None else self.models.get(name)

    @property
    def alive(self) -> bool:
        """Whether every engine runs."""
        return all(model.engine.healthy for model in self.models.values())

    async def start(self) -> None:
        for model in self.models.values():
            await model.engine.start()

    async def close(self) -> None:
        """Finishes accepted work and ends the engines."""
        self.draining = True
        for model in self.models.values():
            await model.engine.close()


def load_catalog(settings: Settings, bundles: Sequence[Bundle], metrics: Metrics) -> Catalog:
    """Opens and warms the sessions of every bundle.

    Raises :class:`StartError` where a bundle lacks the precision asked for, its graphs do not fit its manifest, or the
    device does not work.
    """
    return Catalog([_serve(settings, bundle, metrics) for bundle in bundles])


def _serve(settings: Settings, bundle: Bundle, metrics: Metrics) -> ServedModel:
    manifest = bundle.manifest
    precision = settings.precision or manifest.default_precision
    if precision not in manifest.precisions:
        raise StartError(f"{bundle.path}: no graphs in precision {precision}; it has {', '.join(manifest.precisions)}")
    cpus = cpu_allowance()
    workers, threads = split_cpus(cpus, settings.workers, settings.threads)
    runner = Runner(bundle, precision=precision, device=settings.device, threads=threads)
    on_cpu = runner.device == "cpu"
    if not on_cpu and settings.workers is None:
        workers = 1  # one stream per session: a second worker would only wait for the first
    budget = settings.max_batch_tokens or (512 if on_cpu else 8192)
    runner.warm_up(budget, settings.max_batch_texts)
    latency = None
    if settings.measure_seconds > 0:
        latency = runner.measure(budget, settings.max_batch_texts, settings.measure_seconds)
        table = "\n".join("  ".join(cell.rjust(9) for cell in row) for row in latency.rows())
        logger.info("%s: milliseconds of a run\n%s", manifest.name, table)
    _choose_lone_threads(runner, settings, cpus)
    calibration = bundle.calibration.precisions[precision]
    tiers = tuple(sorted({tier.quality for tier in calibration.certified}, reverse=True))
    observer = metrics.for_model(manifest.name, manifest.architecture, tiers, fall_back=settings.shadow_fall_back)
    encoder = bundle.encoder if settings.max_tokens is None else bundle.encoder.limited_to(settings.max_tokens)
    engine = Engine(
        runner=runner,
        encoder=encoder,
        temperatures=calibration.temperatures,
        agreement_temperatures=calibration.agreement_temperatures,
        observer=observer,
        workers=workers,
        max_queue=settings.max_queue,
        max_wait_seconds=settings.max_wait_seconds,
        max_batch_tokens=budget,
        max_batch_texts=settings.max_batch_texts,
        latency=latency,
        order=ORDERS[settings.order],
        shadow_rate=settings.shadow_rate,
    )
    for quality in (1.0, *tiers):
        shares = calibrated_shares(calibration, quality, exits=len(manifest.architecture.exits))
        if shares is not None:
            observer.expect(quality, shares)
    observer.watch_queues(engine.queue_depth)
    metrics.model_info.labels(
        manifest.name,
        manifest.version,
        precision,
        runner.device,
        str(len(manifest.labels)),
        str(len(manifest.architecture.exits)),
    ).set(1)
    if settings.default_quality < 1.0 and not any(tier >= settings.default_quality for tier in tiers):
        names = ", ".join(f"{tier:g}" for tier in tiers) or "none"
        logger.warning(
            "%s: the default quality %g is not certified (certified: %s); requests that choose no depth run to the end",
            manifest.name,
            settings.default_quality,
            names,
        )
    logger.info(
        "%s %s: %s on %s, %d exits, %d workers with %d threads (%s for a run alone)",
        manifest.name,
        manifest.version,
        precision,
        runner.device,
        len(manifest.architecture.exits),
        workers,
        threads,
        " ".join(map(str, runner.lone_threads)),
    )
    return ServedModel(
        bundle=bundle,
        precision=precision,
        device=runner.device,
        workers=workers,
        threads=threads,
        lone_threads=runner.lone_threads,
        latency=latency,
        max_tokens=encoder.max_length,
        engine=engine,
        metrics=observer,
    )


def _choose_lone_threads(runner: Runner, settings: Settings, cpus: int) -> None:
    if settings.lone_threads is not None:
        runner.widen(settings.lone_threads)
    elif runner.device == "cpu" and settings.measure_seconds > 0:
        measured = runner.fit_lone_threads(min(cpus, 8))
        for threads, seconds in measured.items():
            table = " ".join(f"{1000 * taken:.2f}" for taken in seconds)
            logger.info("a text alone on %d threads: %s ms by segment", threads, table)
