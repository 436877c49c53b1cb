"""The models that one server serves: for each a bundle, the precision it runs in, and its engine."""

import asyncio
import ctypes
import functools
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from models.architecture import Architecture
from models.bundle import Bundle, BundleError, Precision, PrecisionCalibration
from models.costs import exit_costs, layer_cost, reading_costs
from server.api.depth import calibrated_shares
from server.config import Settings, StartError
from server.engine.cuda import CudaVersions
from server.engine.engine import Engine
from server.engine.latency import LatencyTable
from server.engine.order import ORDERS
from server.engine.request import Output, SegmentRunner, Work
from server.engine.runner import Runner
from server.machine import Turns, cpu_allowance, most_lone_threads, split_cpus
from server.metrics import Metrics, ModelMetrics
from server.promises import Promises
from server.reload import Reloaded, ReloadError
from server.runtime import Runtime, open_runtime

logger = logging.getLogger("offramp")


class Users:
    """Counts who is at work with something, so that it can be ended once nobody is. For an event loop's thread."""

    def __init__(self) -> None:
        self._count = 0
        self._none = asyncio.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self._none.set()

    async def gone(self) -> None:
        """Returns when nobody is at work with it."""
        await self._none.wait()


@dataclass(frozen=True)
class ServedModel:
    """One version of a model, ready to be started. ``source`` is the folder that a reload looks into; requests that go
    to it are its ``users``."""

    source: Path
    bundle: Bundle
    precision: Precision
    device: str
    cuda: CudaVersions | None
    runs: int
    threads: int
    lone_threads: tuple[int, ...]
    latency: LatencyTable | None
    max_tokens: int
    engine: Engine
    metrics: ModelMetrics
    promises: Promises
    users: Users = field(default_factory=Users)

    @property
    def name(self) -> str:
        return self.bundle.manifest.name

    @property
    def version(self) -> str:
        return self.bundle.manifest.version

    @property
    def calibration(self) -> PrecisionCalibration:
        return self.bundle.calibration.precisions[self.precision]

    def runs_like(self, architecture: Architecture, precision: Precision) -> bool:
        """Whether runs of ``architecture`` in ``precision`` take as long as those of this model."""
        return self.precision == precision and self.bundle.manifest.architecture == architecture

    def show(self) -> None:
        """Makes the gauges, and the checks that processes share, those of this version."""
        manifest, calibration = self.bundle.manifest, self.calibration
        self.metrics.count_with_others(manifest.version)
        exits = len(manifest.architecture.exits)
        shares = {tier: calibrated_shares(calibration, tier, exits=exits) for tier in (1.0, *_tiers(calibration))}
        self.metrics.show(
            info=(manifest.version, self.precision, self.device, str(len(manifest.labels)), str(exits)),
            shares={tier: of_exits for tier, of_exits in shares.items() if of_exits is not None},
            depth=self.engine.queue_depth,
        )

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

    def __init__(self, models: Sequence[ServedModel], reopen: Callable[[ServedModel], ServedModel]) -> None:
        """``reopen`` loads what now lies in the folder of a model; it is called on a thread, and raises
        :class:`StartError` or :class:`BundleError`.

        Raises :class:`StartError` where there is no model, or two with one name.
        """
        if not models:
            raise StartError("no bundle to serve")
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            names = [model.name for model in models]
            twice = next(name for name in names if names.count(name) > 1)
            raise StartError(f"two bundles have the name {twice}; requests could not tell them apart")
        self._default = models[0].name
        self._reopen = reopen
        self._reloading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self.draining = False

    @property
    def default(self) -> ServedModel:
        return self.models[self._default]

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
            model.show()

    async def close(self) -> None:
        """Finishes accepted work and ends the engines."""
        self.draining = True
        for model in self.models.values():
            await model.engine.close()

    async def reload(self, name: str, *, wait: bool = False) -> Reloaded:
        """Loads the model called ``name`` anew, from the folder that it came from, and puts it in the old one's place;
        with ``wait`` after a reload of it that is under way, else such a one refuses it.

        Requests go to the old version until the new one is verified and warm. What the old one has begun it finishes;
        it is closed when this returns. Raises :class:`ReloadError`; then nothing has changed.
        """
        if name not in self.models:
            raise ReloadError("unknown", f"no such model; this server has {', '.join(self.models)}")
        if self._reloading[name].locked() and not wait:
            raise ReloadError("busy", "a reload of this model is under way")
        async with self._reloading[name]:
            old = self.models[name]
            new = await self._open_anew(old)
            await new.engine.start()
            self.models[name] = new
            old.metrics.hide()
            new.show()
            new.metrics.reloaded("success")
            logger.info("%s: version %s serves in place of version %s", name, new.version, old.version)
            # Some have found the old version and not yet reached its engine, which would turn them away once it closes.
            await old.users.gone()
            await old.engine.close()
            done = Reloaded(name, old.version, new.version)
            del old
            await asyncio.to_thread(_trim_heap)
            return done

    async def reload_all(self) -> None:
        """Loads every model anew, one after the other; the log says what could not be."""
        for name in list(self.models):
            try:
                await self.reload(name, wait=True)
            except ReloadError:
                pass
            except Exception:
                logger.exception("%s: the reload broke", name)

    async def _open_anew(self, old: ServedModel) -> ServedModel:
        try:
            new = await asyncio.to_thread(self._reopen, old)
        except (BundleError, StartError) as error:
            old.metrics.reloaded("failure")
            logger.error("%s: not reloaded, version %s goes on serving: %s", old.name, old.version, error)
            raise ReloadError("bad", str(error)) from None
        except Exception:
            old.metrics.reloaded("failure")
            raise
        if self.draining:
            raise ReloadError("ending", "the server is draining")
        return new


def load_catalog(settings: Settings, bundles: Sequence[Bundle], metrics: Metrics) -> Catalog:
    """Opens and warms the sessions of every bundle.

    Raises :class:`StartError` where a bundle lacks the precision asked for, its graphs do not fit its manifest, or the
    device does not work.
    """
    cpus = max(1, cpu_allowance() // (settings.workers or 1))
    turns = Turns(split_cpus(cpus, settings.runs, settings.threads)[0]) if len(bundles) > 1 else None
    open_model = functools.partial(_open, settings, metrics, cpus, turns)
    models = [open_model(bundle.path, bundle) for bundle in bundles]
    return Catalog(models, functools.partial(_reopen, open_model))


def _reopen(open_model: Callable[..., ServedModel], old: ServedModel) -> ServedModel:
    """What now lies in the folder of ``old``. Raises :class:`BundleError` or :class:`StartError`."""
    # A symbolic link that is turned meanwhile must not give us half of each.
    bundle = Bundle.load(os.path.realpath(old.source))
    name = bundle.manifest.name
    if name != old.name:
        raise StartError(
            f"{bundle.path}: the bundle there is called {name}, and requests ask for {old.name}; a reload takes "
            "another version of the same name, a restart takes another name"
        )
    new = open_model(old.source, bundle, old)
    if not bundle.in_place():
        raise StartError(f"{bundle.path}: the bundle was changed while it was loaded; reload it again")
    return new


def _open(
    settings: Settings,
    metrics: Metrics,
    cpus: int,
    turns: Turns | None,
    source: Path,
    bundle: Bundle,
    old: ServedModel | None = None,
) -> ServedModel:
    """Opens and warms ``bundle``, in place of ``old`` where there is one. Several models take ``turns`` on the CPUs."""
    manifest = bundle.manifest
    runs, threads = split_cpus(cpus, settings.runs, settings.threads)
    opened = open_runtime(settings, bundle, runs, threads, serving=old is not None)
    runner, precision = opened.runner, opened.precision
    on_cpu = runner.device == "cpu"
    if old is not None and old.runs_like(manifest.architecture, precision):
        # Measured while nothing else ran, as it does now; the weights do not matter.
        latency = old.latency
        if isinstance(runner, Runner):
            runner.widen(old.lone_threads)
    else:
        latency = _measure(opened, settings, manifest.name)
        if isinstance(runner, Runner):
            _choose_lone_threads(runner, settings, cpus)
    calibration = bundle.calibration.precisions[precision]
    tiers = _tiers(calibration)
    promises = Promises(tiers, fall_back=settings.shadow_fall_back)
    observer = metrics.for_model(manifest.name, manifest.architecture, tiers, promises)
    encoder = bundle.encoder if settings.max_tokens is None else bundle.encoder.limited_to(settings.max_tokens)
    engine = Engine(
        runner=runner if turns is None or not on_cpu else _InTurn(runner, turns),
        encoder=encoder,
        temperatures=calibration.temperatures,
        agreement_temperatures=calibration.agreement_temperatures,
        observer=observer,
        workers=opened.runs,
        max_queue=settings.max_queue,
        max_wait_seconds=settings.max_wait_seconds,
        max_batch_tokens=opened.max_batch_tokens,
        max_batch_texts=opened.max_batch_texts,
        latency=latency,
        order=ORDERS[settings.order],
        shadow_rate=settings.shadow_rate,
    )
    if settings.default_quality < 1.0 and not any(tier >= settings.default_quality for tier in tiers):
        names = ", ".join(f"{tier:g}" for tier in tiers) or "none"
        logger.warning(
            "%s: the default quality %g is not certified (certified: %s); requests that choose no depth run to the end",
            manifest.name,
            settings.default_quality,
            names,
        )
    logger.info(
        "%s %s: %s on %s, %d exits, runs at once: %d, threads of a run: %d (alone: %s)",
        manifest.name,
        manifest.version,
        precision,
        runner.device,
        len(manifest.architecture.exits),
        opened.runs,
        threads,
        " ".join(map(str, runner.lone_threads)),
    )
    return ServedModel(
        source=source,
        bundle=bundle,
        precision=precision,
        device=runner.device,
        cuda=opened.cuda,
        runs=opened.runs,
        threads=threads,
        lone_threads=runner.lone_threads,
        latency=latency,
        max_tokens=encoder.max_length,
        engine=engine,
        metrics=observer,
        promises=promises,
    )


def _trim_heap() -> None:
    """Gives memory that was freed back to the system, which glibc does not do by itself for the heaps of threads.

    Without it ten reloads of the shipped bundle took a process from 190 to 410 MB, with it it stays below 190.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tiers(calibration: PrecisionCalibration) -> tuple[float, ...]:
    """The certified qualities, highest first."""
    return tuple(sorted({tier.quality for tier in calibration.certified}, reverse=True))


@dataclass(frozen=True, slots=True)
class _InTurn:
    """A runner that waits for its turn among those of other models."""

    runner: SegmentRunner
    turns: Turns

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> Output:
        if _on_event_loop():
            # Where an engine runs what is shorter than a wake-up: it would hold up everybody by waiting.
            return self.runner.run(segment, items, read=read)
        with self.turns.turn() as nobody_else:
            return self.runner.run(segment, items, lone=lone and nobody_else, read=read)


def _on_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _measure(opened: Runtime, settings: Settings, name: str) -> LatencyTable | None:
    if settings.measure_seconds <= 0:
        return None
    latency = opened.runner.measure(opened.max_batch_tokens, opened.max_batch_texts, settings.measure_seconds)
    table = "\n".join("  ".join(cell.rjust(9) for cell in row) for row in latency.rows())
    logger.info("%s: milliseconds of a run\n%s", name, table)
    return latency


def _choose_lone_threads(runner: Runner, settings: Settings, cpus: int) -> None:
    if settings.lone_threads is not None:
        runner.widen(settings.lone_threads)
    elif runner.device == "cpu" and settings.measure_seconds > 0 and most_lone_threads(cpus) > runner.threads:
        measured = runner.fit_lone_threads(most_lone_threads(cpus))
        for threads, seconds in measured.items():
            table = " ".join(f"{1000 * taken:.2f}" for taken in seconds)
            logger.info("a text alone on %d threads: %s ms by segment", threads, table)
