"""Loading a model anew while it serves: what comes of it, in one process and in all of them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Reloaded:
    """A model was loaded anew; both versions are the same where the bundle is."""

    model: str
    old_version: str
    new_version: str


class ReloadError(Exception):
    """A model was not loaded anew, and serves as before: it is ``unknown``, a reload of it goes on (``busy``), its new
    bundle is ``bad``, or the server is ``ending``."""

    def __init__(self, kind: Literal["unknown", "busy", "bad", "ending"], message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message

    def __reduce__(self) -> tuple[Any, ...]:
        """From process to process."""
        return ReloadError, (self.kind, self.message)


class OnceMore:
    """Runs something whenever it is asked for, once at a time. Asked for meanwhile it runs once more afterwards: what
    it has read may be of before. For an event loop's thread."""

    def __init__(self, run: Callable[[], Awaitable[None]]) -> None:
        self._run = run
        self._asked = False
        self._task: asyncio.Task[None] | None = None

    def ask(self) -> None:
        self._asked = True
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def _work(self) -> None:
        while self._asked:
            self._asked = False
            await self._run()
