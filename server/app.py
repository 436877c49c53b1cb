"""Puts a server process together: an ASGI app from settings and bundles, and what serves it."""

import asyncio
import gc
import logging
import multiprocessing
import signal
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from multiprocessing.connection import Connection
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from models.bundle import Bundle
from server.api import admin
from server.api.errors import ApiError, on_api_error, on_http_error
from server.api.front import EXITS_HEADER, WISHES_HEADER
from server.api.keys import RequireKey, load_keys
from server.api.openapi import document_of
from server.api.openinference import JSON_LENGTH_HEADER
from server.api.routes import REQUESTS, add_routes, metrics_page
from server.catalog import Catalog, load_catalog
from server.config import Settings, StartError, load_bundles
from server.listener import Balance, Listener
from server.logs import log_addresses
from server.metrics import Metrics
from server.middleware import Observe
from server.neighbours import Connections, Shared
from server.protocol import bounded_http
from server.reload import OnceMore, Reloaded
from server.workers import Failed, Line, Loaded

if TYPE_CHECKING:
    from server.tracing import Tracing

logger = logging.getLogger("offramp")

DESCRIPTION = """Text classification that pays only for the depth each request needs.

A text leaves the network at the first exit that is sure enough for what its request asked: a certified `quality`, a
mean `speed`, or a `criterion` with a `threshold`. Every error is `{"error": {"type", "message", "param"}}`."""


def load_tracing(settings: Settings) -> "Tracing | None":
    """What traces requests, where ``settings`` ask for it. Raises :class:`StartError`."""
    if not settings.tracing:
        return None
    try:
        # Not before: OpenTelemetry is an extra.
        from server.tracing import tracing_from_environment
    except ModuleNotFoundError as error:
        raise StartError(f"--tracing needs {error.name}: pip install 'offramp[otel]' brings it") from None
    return tracing_from_environment(_version())


def create_app(
    settings: Settings,
    bundles: Sequence[Bundle],
    tracing: "Tracing | None" = None,
    shared: Shared | None = None,
    reload: Callable[[str], Awaitable[Reloaded]] | None = None,
) -> FastAPI:
    """The ASGI app: sessions are open and warm when this returns, the engines run for as long as its lifespan.

    Where it is one of several processes, ``shared`` is where they join their metrics, and ``reload`` loads a model anew
    in all of them. ``app.state.catalog`` and ``app.state.metrics`` are its models and metrics. Raises
    :class:`StartError`.
    """
    keys = load_keys(settings)
    metrics = Metrics(shared)
    catalog = load_catalog(settings, bundles, metrics)
    metrics.read(metrics.ready, lambda: float(catalog.alive and not catalog.draining))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await catalog.start()
        fresh = None if shared is None else asyncio.ensure_future(_keep_fresh(metrics))
        yield
        if fresh is not None:
            fresh.cancel()
        await catalog.close()

    version = _version()
    app = FastAPI(
        title="Offramp",
        version=version,
        description=DESCRIPTION,
        lifespan=lifespan,
        redoc_url=None,
        redirect_slashes=False,
        # Looked up anew for each request, for 0.1 ms, though nobody listens. Our own is in server/tracing.py.
        telemetry={"tracing": False, "metrics": False, "logs": False},
        exception_handlers={ApiError: on_api_error, HTTPException: on_http_error},
    )
    app.state.catalog = catalog
    app.state.metrics = metrics
    add_routes(app.router, settings, catalog, metrics, version)
    if admin.is_open(settings, keyed=bool(keys)):
        admin.add_routes(app.router, reload or catalog.reload, metrics)
    # The last one added sees a request first: preflights carry no key, and refusals are counted like answers.
    if keys:
        app.add_middleware(RequireKey, digests=keys)
    if settings.cors_allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allow_origin,
            allow_methods=["GET", "HEAD", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID", WISHES_HEADER, JSON_LENGTH_HEADER],
            expose_headers=["X-Request-ID", "Server-Timing", "Retry-After", EXITS_HEADER, JSON_LENGTH_HEADER],
        )
    app.add_middleware(Observe, metrics=metrics, catalog=catalog, access_log=settings.access_log, tracing=tracing)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(document_of(app, REQUESTS, keys=bool(keys)))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def serve_alone(
    settings: Settings, bundles: Sequence[Bundle], listening: socket.socket, monitor: socket.socket | None
) -> int:
    """Serves in this process until it is told to end; the exit status. Raises :class:`StartError`."""
    tracing = load_tracing(settings)
    app = create_app(settings, bundles, tracing)
    return _run(app, Sockets(listening, monitor), settings, tracing)


def serve_with_others(
    settings: Settings,
    listening: socket.socket,
    monitor: socket.socket | None,
    shared: Shared,
    connection: "Connection[object, object]",
) -> int:
    """Serves as one of several processes, whose parent is at the other end of ``connection``; the exit status."""
    line = Line(connection)
    try:
        tracing = load_tracing(settings)
        app = create_app(settings, load_bundles(settings), tracing, shared, line.reload)
        balance = Balance(Connections(shared.folder, settings.workers or 1), shared.number)
    except StartError as error:
        line.send(Failed(str(error)))
        return 1
    status = _run(app, Sockets(listening, monitor, balance), settings, tracing, line)
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        shared.leave()
    return status


@dataclass(frozen=True, slots=True)
class Sockets:
    """Where requests come in, and the metrics are asked for, where that is elsewhere; ``balance`` is the share of the
    connections that one of several processes takes."""

    listening: socket.socket
    monitor: socket.socket | None
    balance: Balance | None = None


def _run(
    app: FastAPI, sockets: Sockets, settings: Settings, tracing: "Tracing | None", line: Line | None = None
) -> int:
    """Serves ``app``; ``line`` leads to the parent, where this is one of several processes."""
    _spare_the_garbage_collector()
    catalog: Catalog = app.state.catalog
    count = None if sockets.balance is None else sockets.balance.has
    config = uvicorn.Config(
        app,
        log_config=None,
        http=bounded_http(settings.request_timeout_seconds, lambda: catalog.draining, count),
        ws="none",
        access_log=False,
        # Nothing here asks who the client is.
        proxy_headers=False,
        server_header=False,
        lifespan="on",
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=int(settings.drain_seconds),
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        status = runner.run(_serve(_Server(config, sockets), app, sockets, settings, line))
    if tracing is not None:
        tracing.close()
    return status


def _spare_the_garbage_collector() -> None:
    """What is there now stays, so the collector need not walk it again and again; what requests leave behind is freed
    by its last reference, and cycles (exceptions) can wait. Spares a short request about 6 % of its CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


class _Server(uvicorn.Server):
    """Uvicorn's server, with a listener of ours."""

    def __init__(self, config: uvicorn.Config, sockets: Sockets) -> None:
        super().__init__(config)
        self._sockets = sockets
        self._listener: Listener | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._listener = Listener(self._sockets.listening, self._protocol, self._sockets.balance)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._listener is not None:
            await self._listener.close()
        await super().shutdown(sockets)

    def _protocol(self) -> asyncio.Protocol:
        # As uvicorn makes them.
        made: Any = self.config.http_protocol_class
        return made(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)


async def _serve(server: uvicorn.Server, app: FastAPI, sockets: Sockets, settings: Settings, line: Line | None) -> int:
    loop = asyncio.get_running_loop()
    catalog: Catalog = app.state.catalog
    reload = OnceMore(catalog.reload_all)
    watch: asyncio.Task[bool] | None = None

    def stop() -> None:
        server.should_exit = True

    def on_signal(sig: int, frame: FrameType | None) -> None:
        if catalog.draining:
            # Asked twice: whoever asks does not want to wait. Of several processes each may hear SIGTERM from the
            # parent and from whoever ends them all, so there it takes a SIGQUIT.
            if line is None or sig == signal.SIGQUIT:
                server.force_exit = server.should_exit = True
            return
        catalog.draining = True
        logger.info("%s: readiness is off, finishing accepted work", signal.Signals(sig).name)
        loop.call_soon_threadsafe(loop.call_later, settings.shutdown_delay_seconds, stop)

    # Uvicorn's own handler would raise the signal again after a clean end, and the exit status would be 143.
    server.handle_exit = on_signal  # type: ignore[method-assign]
    if threading.current_thread() is threading.main_thread():
        # Uvicorn does the same a little later; from the line below on, people and tests count on it.
        for sig in (signal.SIGTERM, signal.SIGINT if line is None else signal.SIGQUIT):
            signal.signal(sig, on_signal)
        if line is None:
            signal.signal(signal.SIGHUP, lambda sig, frame: loop.call_soon_threadsafe(reload.ask))
    async with _metrics_served(app.state.metrics, sockets.monitor):
        if line is None:
            log_addresses(sockets.listening, sockets.monitor)
        else:
            # A parent that dies leaves nobody to tell us when to end.
            line.open(catalog.reload, lambda _: None, lambda: on_signal(signal.SIGTERM, None))
            line.send(Loaded(tuple(catalog.models)))
            watch = asyncio.ensure_future(_end_once_broken(catalog, server))
        await server.serve(sockets=[])
    if server.force_exit:
        # Uvicorn leaves it at that; requests still get their 503, and the engine its orderly end.
        for task in list(server.server_state.tasks):
            task.cancel()
        await server.lifespan.shutdown()
    if watch is not None and watch.done() and watch.result():
        return 1
    return 0 if server.started else 1


async def _end_once_broken(catalog: Catalog, server: uvicorn.Server) -> bool:
    """Ends a process whose engine is dead, so that its parent starts another; whether that was so."""
    while not server.started or catalog.alive:  # noqa: ASYNC110 - threads die without a word
        await asyncio.sleep(1.0)
    if catalog.draining:
        return False
    logger.error("an engine has died, and this process ends")
    server.should_exit = True
    return True


@asynccontextmanager
async def _metrics_served(metrics: Metrics, monitor: socket.socket | None) -> AsyncIterator[None]:
    """Serves ``/metrics`` on ``monitor`` meanwhile, where there is one."""
    if monitor is None:
        yield
        return

    async def get_metrics(request: Request) -> Response:
        return metrics_page(request, metrics)

    app = Starlette(
        routes=[Route("/metrics", get_metrics)],
        exception_handlers={HTTPException: on_http_error},
    )
    server = uvicorn.Server(
        uvicorn.Config(app, log_config=None, ws="none", access_log=False, server_header=False, lifespan="off")
    )
    # Signals are for the server of requests; this one ends after it, so that the drain can be watched.
    server.capture_signals = nullcontext  # type: ignore[assignment,method-assign]
    serving = asyncio.ensure_future(server.serve(sockets=[monitor]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await serving


async def _keep_fresh(metrics: Metrics) -> None:
    """What other processes show of this one is at most a second old."""
    while True:
        metrics.refresh()
        await asyncio.sleep(1.0)


def _version() -> str:
    try:
        return metadata.version("offramp")
    except metadata.PackageNotFoundError:
        return "0.1.0"
