"""Several server processes behind one socket, and the parent that starts and keeps them and passes on what it is told.

SIGTERM and SIGINT end all of them after a drain (a second one at once), SIGHUP loads all models anew, one process after
the other. Where one dies another takes its place. The parent serves nothing itself.
"""

import asyncio
import itertools
import logging
import os
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from server.config import StartError
from server.reload import OnceMore, Reloaded, ReloadError

logger = logging.getLogger("offramp")

Reload = Callable[[str], Awaitable[Reloaded]]

# Seconds before another process is started in a dead one's place: doubled while they die young.
FIRST_PAUSE, LONGEST_PAUSE, YOUNG = 0.5, 30.0, 60.0
# Seconds beyond its own limits after which a process that should have ended is killed.
PATIENCE = 10.0


@dataclass(frozen=True, slots=True)
class Loaded:
    """From a worker: its models are warm, and it serves from here on."""

    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker: it cannot start, and why."""

    message: str


@dataclass(frozen=True, slots=True)
class _Asked:
    """To the other end: load this model anew. A worker asks for all of them, the parent means this one."""

    ticket: int
    model: str


@dataclass(frozen=True, slots=True)
class _Answered:
    ticket: int
    result: Reloaded | ReloadError


class Line:
    """One end of the pipe between the parent and a worker."""

    def __init__(self, connection: "Connection[object, object]") -> None:
        self._connection = connection
        self._tickets = itertools.count()
        self._waiting: dict[int, asyncio.Future[Reloaded | ReloadError]] = {}
        self._answers: set[asyncio.Task[None]] = set()

    def open(self, reload: Reload, on_news: Callable[[object], None], on_end: Callable[[], None]) -> None:
        """Hears the other end from here on, on this event loop: ``reload`` is what it may ask for, ``on_news`` takes
        whatever else it says, ``on_end`` is called when it is gone."""
        self._loop = asyncio.get_running_loop()
        self._reload, self._on_news, self._on_end = reload, on_news, on_end
        self._loop.add_reader(self._connection.fileno(), self._hear)

    def send(self, message: object) -> None:
        """Says ``message`` to the other end; whether that still is there shows in ``on_end``."""
        with suppress(OSError):
            self._connection.send(message)

    async def reload(self, model: str) -> Reloaded:
        """Asks the other end to load ``model`` anew. Raises :class:`ReloadError`; ``ending`` where it is gone."""
        if self._connection.closed:
            raise _gone()
        ticket = next(self._tickets)
        self._waiting[ticket] = self._loop.create_future()
        self.send(_Asked(ticket, model))
        result = await self._waiting[ticket]
        if isinstance(result, ReloadError):
            raise result
        return result

    def close(self) -> None:
        """Hears what has been said, and ends."""
        while not self._connection.closed:
            self._hear()

    def _hear(self) -> None:
        try:
            message = self._connection.recv()
        except (EOFError, OSError):
            self._loop.remove_reader(self._connection.fileno())
            self._connection.close()
            for waiting in self._waiting.values():
                _settle(waiting, _gone())
            self._waiting.clear()
            self._on_end()
            return
        if isinstance(message, _Answered):
            _settle(self._waiting.pop(message.ticket), message.result)
        elif isinstance(message, _Asked):
            answer = asyncio.ensure_future(self._answer(message))
            self._answers.add(answer)
            answer.add_done_callback(self._answers.discard)
        else:
            self._on_news(message)

    async def _answer(self, asked: _Asked) -> None:
        result: Reloaded | ReloadError
        try:
            result = await self._reload(asked.model)
        except ReloadError as error:
            result = error
        except Exception:
            logger.exception("%s: the reload broke", asked.model)
            result = ReloadError("bad", "the reload broke; the server's log says how")
        self.send(_Answered(asked.ticket, result))


def _settle(waiting: "asyncio.Future[Reloaded | ReloadError]", result: Reloaded | ReloadError) -> None:
    # Whoever asked may have been cancelled: a drain that is over cancels requests.
    if not waiting.done():
        waiting.set_result(result)


def _gone() -> ReloadError:
    return ReloadError("ending", "this process of the server is ending")


class Workers:
    """``count`` worker processes, numbered from 1."""

    def __init__(
        self,
        count: int,
        spawn: Callable[[int], tuple[SpawnProcess, "Connection[object, object]"]],
        *,
        on_loaded: Callable[[], None],
        on_end: Callable[[], None],
        on_death: Callable[[int], None],
        grace_seconds: float,
    ) -> None:
        """``spawn(number)`` starts a worker and gives our end of its pipe, or raises ``OSError``. ``on_loaded`` is
        called once all serve, ``on_end`` when they are told to end, ``on_death(number)`` whenever one is gone. They
        should end within ``grace_seconds``."""
        self._count = count
        self._spawn = spawn
        self._on_loaded, self._on_end, self._on_death = on_loaded, on_end, on_death
        self._grace_seconds = grace_seconds
        self._workers: dict[int, _Worker] = {}
        self._ending = asyncio.Event()
        self._gave_up = False
        self._reloading: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def run(self) -> int:
        """Serves until told to end, and returns the exit status: 1 where later no process can be started any more.

        Raises :class:`StartError` where one of them cannot start at first.
        """
        loop = asyncio.get_running_loop()
        for sig in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(sig, self._end, signal.Signals(sig).name)
        loop.add_signal_handler(signal.SIGHUP, OnceMore(self._reload_all).ask)
        try:
            workers = [self._start(number) for number in range(1, self._count + 1)]
        except OSError as error:
            self._end(None)
            await asyncio.gather(*(worker.ended.wait() for worker in self._workers.values()))
            raise StartError(f"no server process can be started: {error}") from None
        loaded = await asyncio.gather(*(worker.loaded for worker in workers))
        failed = None if self._ending.is_set() else next((one for one in workers if one.problem), None)
        if failed is None and all(loaded):
            self._on_loaded()
        elif failed is not None:
            self._end(None)
        await asyncio.gather(*(self._keep(worker) for worker in workers))
        if failed is not None:
            raise StartError(failed.problem)
        return 1 if self._gave_up else 0

    async def reload(self, model: str, *, wait: bool = False) -> Reloaded:
        """Loads ``model`` anew in every process, one after the other, and stops at the first that refuses; with
        ``wait`` after a reload of it that is under way, else such a one refuses it.

        One that starts meanwhile is waited for; one that dies is made up for by its successor, which loads what now
        lies there. Raises :class:`ReloadError`, also where they have not all loaded the same version.
        """
        if (models := self._models()) and model not in models:
            raise ReloadError("unknown", f"no such model; this server has {', '.join(models)}")
        if self._reloading[model].locked() and not wait:
            raise ReloadError("busy", "a reload of this model is under way")
        done: list[Reloaded] = []
        async with self._reloading[model]:
            for number in sorted(self._workers):
                worker = self._workers[number]
                if not await worker.loaded:
                    continue
                try:
                    done.append(await worker.line.reload(model))
                except ReloadError as error:
                    if error.kind != "ending":
                        raise _after(done, self._count, error) from None
        if not done:
            raise ReloadError("ending", "the server is ending")
        versions = dict.fromkeys(one.new_version for one in done)
        if len(versions) > 1:
            found = " and ".join(versions)
            raise ReloadError(
                "bad", f"the bundle was changed meanwhile: processes serve versions {found}; reload again"
            )
        return Reloaded(model, done[0].old_version, done[-1].new_version)

    def _models(self) -> list[str]:
        """What those that serve say they have; all have the same."""
        return list(dict.fromkeys(model for worker in self._workers.values() for model in worker.models))

    async def _reload_all(self) -> None:
        # Those that are loading may have read what lay there before.
        await asyncio.gather(*(worker.loaded for worker in self._workers.values()))
        for model in self._models():
            try:
                await self.reload(model, wait=True)
            except ReloadError as error:
                logger.error("%s: not reloaded in all processes: %s", model, error)

    def _start(self, number: int) -> "_Worker":
        with _blocked(signal.SIGINT, signal.SIGHUP):
            # The terminal sends them to the whole process group; a worker takes its orders from here. A process that
            # is started while they are blocked never gets them.
            process, connection = self._spawn(number)
        self._workers[number] = _Worker(number, process, Line(connection), self.reload)
        return self._workers[number]

    async def _keep(self, worker: "_Worker") -> None:
        """Starts another in ``worker``'s place when it dies, and so on, until all are to end."""
        pause = FIRST_PAUSE / 2
        while True:
            await worker.ended.wait()
            self._on_death(worker.number)
            if self._ending.is_set():
                return
            if worker.problem and not any(other.serves for other in self._workers.values()):
                logger.error("worker %d cannot start, and no other serves: %s", worker.number, worker.problem)
                self._gave_up = True
                self._end(None)
                return
            pause = FIRST_PAUSE if worker.age > YOUNG and not worker.problem else min(2 * pause, LONGEST_PAUSE)
            why = f": {worker.problem}" if worker.problem else f" {worker.end}"
            logger.error("worker %d%s; another starts in %g s", worker.number, why, pause)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ending.wait(), pause)
            if self._ending.is_set():
                return
            try:
                worker = self._start(worker.number)
            except OSError as error:
                # No file, no process or no room on the disk to spare: others may still leave theirs.
                worker.problem = f"cannot be started: {error}"

    def _end(self, asked_by: str | None) -> None:
        """Ends all workers: after a drain, or at once where they have been told before."""
        at_once = self._ending.is_set()
        if not at_once:
            self._ending.set()
            self._on_end()
            if asked_by is not None:
                logger.info("%s: all processes finish accepted work", asked_by)
            asyncio.get_running_loop().call_later(self._grace_seconds + PATIENCE, self._kill)
        for worker in self._workers.values():
            worker.signal(signal.SIGQUIT if at_once else signal.SIGTERM)

    def _kill(self) -> None:
        for worker in self._workers.values():
            if not worker.ended.is_set():
                logger.error("worker %d has not ended in time and is killed", worker.number)
                worker.signal(signal.SIGKILL)


def _after(done: list[Reloaded], count: int, error: ReloadError) -> ReloadError:
    """``error``, which says whether processes before it have changed already."""
    if not done:
        return error
    return ReloadError(
        error.kind,
        f"{error.message}; {len(done)} of {count} processes serve version {done[-1].new_version} already, "
        "the others go on as before: mend the bundle and reload again",
    )


class _Worker:
    """One worker process, from its start to its end."""

    def __init__(self, number: int, process: SpawnProcess, line: Line, reload_everywhere: Reload) -> None:
        loop = asyncio.get_running_loop()
        self.number = number
        self.line = line
        self.models: tuple[str, ...] = ()
        # Whether it serves; false where it has died before.
        self.loaded: asyncio.Future[bool] = loop.create_future()
        self.ended = asyncio.Event()
        self.problem = ""
        self._process = process
        self._born = time.monotonic()
        line.open(reload_everywhere, self._on_news, lambda: None)
        loop.add_reader(process.sentinel, self._on_exit)

    @property
    def serves(self) -> bool:
        return bool(self.models) and not self.ended.is_set()

    @property
    def age(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._born

    @property
    def end(self) -> str:
        """How it ended, in words."""
        status = self._process.exitcode or 0
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"

    def signal(self, sig: signal.Signals) -> None:
        if not self.ended.is_set() and self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, sig)

    def _on_news(self, message: object) -> None:
        if isinstance(message, Failed):
            self.problem = message.message
        elif isinstance(message, Loaded):
            self.models = message.models
            logger.info("worker %d serves, process %d", self.number, self._process.pid)
            self.loaded.set_result(True)

    def _on_exit(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._process.join()
        self.line.close()
        self.ended.set()
        if not self.loaded.done():
            self.problem = self.problem or f"a server process {self.end} before it was ready"
            self.loaded.set_result(False)


@contextmanager
def _blocked(*signals: signal.Signals) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
