"""What a request costs beside the model: the engine alone, and the whole app, with a runner that returns at once.

    PYTHONPATH=. python benchmarks/overhead.py --clients 16 --exit 2

prints requests per second and the CPU time of all threads per request (the one to compare on a busy machine), through
``Engine.submit`` and through the ASGI app (routing, validation, JSON; no socket). Every text leaves at ``--exit``.
``--profile`` adds the functions of the event loop's thread that take longest.
"""

import argparse
import asyncio
import cProfile
import json
import pstats
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np

from models.bundle import SHIPPED_BUNDLE, Bundle
from models.exits import Policy
from server.app import create_app
from server.config import load_settings
from server.engine.request import Text, Work
from server.engine.runner import SegmentOutput

TEXT = "a gripping film that never lets go , though the second half takes its time"
POLICY = Policy("confidence", 0.9)


class NullRunner:
    """Stands in for ``server.engine.runner.Runner``: unsure before exit ``leave_at``, sure there."""

    device = "cpu"
    lone_threads = (1,)
    leave_at = 1

    def __init__(self, bundle: Bundle, **_: Any) -> None:
        self._labels = len(bundle.manifest.labels)

    def warm_up(self, max_batch_tokens: int, max_batch_texts: int) -> None: ...

    def widen(self, threads: int) -> None: ...

    def run(self, segment: int, items: Sequence[Work], *, lone: bool = False, read: bool = True) -> SegmentOutput:
        logits = np.zeros((len(items), self._labels), np.float32)
        logits[:, 0] = 20.0 if segment == self.leave_at else 0.0
        return SegmentOutput(logits, (), range(len(items) + 1))


async def closed_loop(ask: Callable[[], Awaitable[None]], clients: int, requests: int) -> tuple[float, float]:
    """``clients`` that each ask again as soon as they are answered; requests per second, CPU seconds per request."""
    left = iter(range(requests))

    async def client() -> None:
        for _ in left:
            await ask()

    wall, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(client() for _ in range(clients)))
    return requests / (time.perf_counter() - wall), (time.process_time() - cpu) / requests


def asgi_ask(app: Any) -> Callable[[], Awaitable[None]]:
    """One ``POST /classify`` straight into the app."""
    body = json.dumps({"inputs": TEXT, "criterion": "confidence", "threshold": POLICY.threshold}).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "path": "/classify",
        "raw_path": b"/classify",
        "query_string": b"",
        "root_path": "",
        "scheme": "http",
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
    }

    async def ask() -> None:
        messages = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> dict[str, Any]:
            message = next(messages, None)
            # The client stays: whoever asks again waits until it is cancelled.
            return message if message is not None else await asyncio.get_running_loop().create_future()

        async def send(message: dict[str, Any]) -> None:
            assert message.get("status", 200) == 200, message

        await app(dict(scope), receive, send)

    return ask


async def measure(options: argparse.Namespace) -> None:
    NullRunner.leave_at = options.exit
    bundle = Bundle.load(SHIPPED_BUNDLE)
    settings = load_settings(runs=options.runs, threads=1, lone_threads=1, measure_seconds=0.0)
    with mock.patch("server.catalog.Runner", NullRunner):
        app = create_app(settings, [bundle])
    engine = app.state.catalog.default.engine

    async def submit() -> None:
        await engine.submit([Text(TEXT)], [POLICY])

    async with app.router.lifespan_context(app):
        for name, ask in (("engine", submit), ("app", asgi_ask(app))):
            await closed_loop(ask, options.clients, options.requests // 10)
            rounds = [await closed_loop(ask, options.clients, options.requests) for _ in range(options.rounds)]
            rate, cpu = max(rate for rate, _ in rounds), min(cpu for _, cpu in rounds)
            print(f"{name:6} {rate:8.0f} requests/s, CPU {cpu * 1e6:7.1f} us per request (best of {options.rounds})")
            if options.profile:
                profile = cProfile.Profile()
                profile.enable()
                await closed_loop(ask, options.clients, options.requests)
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--runs", type=int, default=2, help="segments run at once")
    parser.add_argument("--exit", type=int, default=2, help="exit that every text leaves at")
    parser.add_argument("--requests", type=int, default=2000, help="of each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    try:
        import uvloop
    except ImportError:
        asyncio.run(measure(options))
    else:
        # The loop that uvicorn takes where it is installed.
        uvloop.run(measure(options))


if __name__ == "__main__":
    main()
