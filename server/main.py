"""The life of a server: in this process, or in several that this one starts and keeps.

A parent serves nothing, so it does not import what serves: it is there early, and small.
"""

import asyncio
import logging
import multiprocessing
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path

from models.bundle import Bundle
from models.costs import layer_cost
from server.config import Settings, StartError, load_bundles, unknown_variables
from server.logs import configure_logging, log_addresses
from server.machine import cpu_allowance, fit_processes, memory_allowance
from server.neighbours import PREFIX, Connections, Shared, sweep
from server.workers import Workers

logger = logging.getLogger("offramp")

# A short text, as server.machine.MACS_OF_A_CPU counts it.
_TOKENS = 32


def run(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, and returns the exit status: 0 after a drain, 1 (and one line) on a bad start."""
    configure_logging(settings.log_level, settings.log_format)
    for name in unknown_variables(dict(os.environ)):
        logger.warning("%s is not a setting of this server", name)
    _allow_many_connections()
    try:
        bundles = load_bundles(settings)
        processes = settings.workers or suitable_processes(settings, bundles)
        folder = None if processes == 1 else _folder(settings, processes)
        listening = _listen(settings.host, settings.port)
        monitor = None if settings.metrics_port is None else _listen(settings.host, settings.metrics_port)
        if folder is not None:
            # Their tokenizers are for those who serve.
            bundles.clear()
            with folder:
                settings = settings.model_copy(update={"workers": processes})
                return asyncio.run(_keep_workers(settings, Path(folder.name), listening, monitor))
        from server.app import serve_alone

        return serve_alone(settings, bundles, listening, monitor)
    except StartError as error:
        print(f"offramp: {error}", file=sys.stderr)
        return 1


def suitable_processes(settings: Settings, bundles: Sequence[Bundle]) -> int:
    """How many processes suit the machine and ``bundles``, where ``settings`` do not say."""
    devices = settings.device.split(",")
    if settings.device.startswith("cuda") or (settings.device == "auto" and _built_for_cuda()):
        # A GPU does best with the texts of all.
        return len(devices)
    if settings.runs is not None or settings.threads is not None or settings.lone_threads is not None:
        # Whoever says how a process is to spend the CPUs has one in mind.
        return 1
    architectures = [bundle.manifest.architecture for bundle in bundles]
    macs = min(layer_cost(one, min(_TOKENS, one.max_length)) * one.num_layers for one in architectures)
    graphs = [
        graph
        for bundle in bundles
        for graph in bundle.manifest.precisions.get(settings.precision or bundle.manifest.default_precision, ())
    ]
    return fit_processes(cpu_allowance(), memory_allowance(), macs, sum(graph.bytes for graph in graphs))


def work(
    settings: Settings,
    listening: socket.socket,
    monitor: socket.socket | None,
    shared: Shared,
    connection: "Connection[object, object]",
) -> None:
    """One of several server processes: its whole life, from its own start on."""
    configure_logging(settings.log_level, settings.log_format, worker=shared.number)
    from server.app import serve_with_others

    sys.exit(serve_with_others(settings.for_worker(shared.number), listening, monitor, shared, connection))


def _built_for_cuda() -> bool:
    """Whether the ONNX Runtime that is installed can use a GPU; to import it takes longer than to look it up."""
    try:
        metadata.distribution("onnxruntime-gpu")
    except metadata.PackageNotFoundError:
        return False
    return True


def _allow_many_connections() -> None:
    """Raises the limit of open files, for this process and its workers, as far as it may be: it often is 1,024, and
    connections beyond it wait until others leave."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _folder(settings: Settings, processes: int) -> "tempfile.TemporaryDirectory[str] | None":
    """What ``processes`` share their metrics in: mapped files of a few hundred KB. ``None`` where there can be none
    and nobody asked for several. Raises :class:`StartError`."""
    folder: tempfile.TemporaryDirectory[str] | None = None
    try:
        folder = tempfile.TemporaryDirectory(prefix=PREFIX)
        Connections(Path(folder.name), processes)
        for number in range(1, processes + 1):
            Shared(Path(folder.name), number).reserve(len(settings.bundle_paths))
    except OSError as error:
        if folder is not None:
            folder.cleanup()
        why = f"no temporary folder for the metrics of several processes: {error.strerror} (TMPDIR names another place)"
        if settings.workers is not None:
            raise StartError(why) from None
        logger.warning("%s; one process serves", why)
        return None
    sweep(Path(folder.name).parent)
    return folder


async def _keep_workers(
    settings: Settings, folder: Path, listening: socket.socket, monitor: socket.socket | None
) -> int:
    """Serves with several processes that share their sockets and ``folder``. Raises :class:`StartError`."""
    count = settings.workers or 1
    context = multiprocessing.get_context("spawn")
    connections = Connections(folder, count)

    def spawn(number: int) -> tuple[SpawnProcess, "Connection[object, object]"]:
        shared = Shared(folder, number)
        # Of a dead one's files some are gone.
        shared.reserve(len(settings.bundle_paths))
        ours, theirs = context.Pipe()
        process = context.Process(
            target=work, args=(settings, listening, monitor, shared, theirs), name=f"worker-{number}"
        )
        process.start()
        theirs.close()
        return process, ours

    def on_end() -> None:
        # The workers have their own; the port is free once the last of them closes it.
        listening.close()
        if monitor is not None:
            monitor.close()

    def on_death(number: int) -> None:
        from prometheus_client.multiprocess import mark_process_dead

        mark_process_dead(number, str(folder))
        connections.leave(number)

    return await Workers(
        count,
        spawn,
        on_loaded=lambda: log_addresses(listening, monitor, count),
        on_end=on_end,
        on_death=on_death,
        grace_seconds=settings.shutdown_delay_seconds + settings.drain_seconds,
    ).run()


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        # The text of create_server's own error repeats the address.
        why = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise StartError(f"cannot listen on {host}:{port}: {why}") from None
