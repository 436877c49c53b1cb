"""Puts the server together: an ASGI app from settings and bundles, and the process that serves it."""

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext
from importlib import metadata
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

from models.bundle import Bundle, BundleError
from server.api.errors import ApiError, on_api_error, on_http_error
from server.api.front import EXITS_HEADER, WISHES_HEADER
from server.api.keys import RequireKey, load_keys
from server.api.openapi import document_of
from server.api.routes import REQUESTS, add_routes, metrics_page
from server.catalog import load_catalog
from server.config import Settings, StartError, unknown_variables
from server.logs import configure_logging
from server.metrics import Metrics
from server.middleware import Observe
from server.protocol import bounded_http

if TYPE_CHECKING:
    from server.tracing import Tracing

logger = logging.getLogger("offramp")

DESCRIPTION = """Text classification that pays only for the depth each request needs.

A text leaves the network at the first exit that is sure enough for what its request asked: a certified `quality`, a
mean `speed`, or a `criterion` with a `threshold`. Every error is `{"error": {"type", "message", "param"}}`."""


def load_bundles(settings: Settings) -> list[Bundle]:
    """The bundles that ``settings`` name, verified. Raises :class:`StartError`."""
    try:
        return [Bundle.load(path) for path in settings.bundle_paths]
    except BundleError as error:
        raise StartError(str(error)) from None


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


def create_app(settings: Settings, bundles: Sequence[Bundle], tracing: "Tracing | None" = None) -> FastAPI:
    """The ASGI app: sessions are open and warm when this returns, the engines run for as long as its lifespan.

    ``app.state.catalog`` and ``app.state.metrics`` are its models and metrics. Raises :class:`StartError`.
    """
    keys = load_keys(settings)
    metrics = Metrics()
    catalog = load_catalog(settings, bundles, metrics)
    metrics.ready.set_function(lambda: float(catalog.alive and not catalog.draining))

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await catalog.start()
        yield
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
    # The last one added sees a request first: preflights carry no key, and refusals are counted like answers.
    if keys:
        app.add_middleware(RequireKey, digests=keys)
    if settings.cors_allow_origin:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_allow_origin,
            allow_methods=["GET", "POST"],
            allow_headers=["Authorization", "Content-Type", "X-Request-ID", WISHES_HEADER],
            expose_headers=["X-Request-ID", "Server-Timing", "Retry-After", EXITS_HEADER],
        )
    app.add_middleware(Observe, metrics=metrics, catalog=catalog, access_log=settings.access_log, tracing=tracing)
    document: dict[str, Any] = {}

    def openapi() -> dict[str, Any]:
        if not document:
            document.update(document_of(app, REQUESTS, keys=bool(keys)))
        return document

    app.openapi = openapi  # type: ignore[method-assign]
    return app


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit status: 0 after a drain, 1 (and one line) on a bad start."""
    configure_logging(settings.log_level, settings.log_format)
    for name in unknown_variables(dict(os.environ)):
        logger.warning("%s is not a setting of this server", name)
    try:
        tracing = load_tracing(settings)
        app = create_app(settings, load_bundles(settings), tracing)
        listener = _listen(settings.host, settings.port)
        monitor = None if settings.metrics_port is None else _listen(settings.host, settings.metrics_port)
    except StartError as error:
        print(f"offramp: {error}", file=sys.stderr)
        return 1
    _spare_the_garbage_collector()
    config = uvicorn.Config(
        app,
        log_config=None,
        http=bounded_http(settings.request_timeout_seconds),
        ws="none",
        access_log=False,
        # Nothing here asks who the client is.
        proxy_headers=False,
        server_header=False,
        lifespan="on",
        timeout_graceful_shutdown=int(settings.drain_seconds),
    )
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        status = runner.run(_serve(uvicorn.Server(config), app, listener, monitor, settings))
    if tracing is not None:
        tracing.close()
    return status


def _spare_the_garbage_collector() -> None:
    """What is there now stays, so the collector need not walk it again and again; what requests leave behind is freed
    by its last reference, and cycles (exceptions) can wait. Spares a short request about 6 % of its CPU time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 100)


async def _serve(
    server: uvicorn.Server,
    app: FastAPI,
    listener: socket.socket,
    monitor: socket.socket | None,
    settings: Settings,
) -> int:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        server.should_exit = True

    def on_signal(sig: int, frame: FrameType | None) -> None:
        if app.state.catalog.draining:
            # Asked twice: whoever asks does not want to wait.
            server.force_exit = server.should_exit = True
            return
        app.state.catalog.draining = True
        logger.info("%s: readiness is off, finishing accepted work", signal.Signals(sig).name)
        loop.call_soon_threadsafe(loop.call_later, settings.shutdown_delay_seconds, stop)

    # Uvicorn's own handler would raise the signal again after a clean end, and the exit status would be 143.
    server.handle_exit = on_signal  # type: ignore[method-assign]
    if threading.current_thread() is threading.main_thread():
        # Uvicorn does the same a little later; from the line below on, people and tests count on it.
        for sig in (signal.SIGTERM, signal.SIGINT):
            signal.signal(sig, on_signal)
    async with _metrics_served(app.state.metrics, monitor):
        logger.info("listening on %s", _url(listener))
        await server.serve(sockets=[listener])
    if server.force_exit:
        # Uvicorn leaves it at that; requests still get their 503, and the engine its orderly end.
        for task in list(server.server_state.tasks):
            task.cancel()
        await server.lifespan.shutdown()
    return 0 if server.started else 1


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
    logger.info("metrics on %s/metrics", _url(monitor))
    serving = asyncio.ensure_future(server.serve(sockets=[monitor]))
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        await serving


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # The text of create_server's own error repeats the address.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise StartError(f"cannot listen on {host}:{port}: {why}") from None


def _version() -> str:
    try:
        return metadata.version("offramp")
    except metadata.PackageNotFoundError:
        return "0.1.0"
