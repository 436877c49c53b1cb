"""Fixtures and helpers of the server's tests: apps with real tiny graphs, and clients that talk to them in process."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from models.bundle import Bundle
from server.app import create_app
from server.catalog import Catalog
from server.config import load_settings
from server.metrics import Metrics
from server.tracing import Tracing
from tests.tiny import WORDS


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may have OFFRAMP_ variables set."""
    import os

    for name in list(os.environ):
        if name.startswith("OFFRAMP_"):
            monkeypatch.delenv(name)


@dataclass
class Served:
    """An app that is up, and a client of it."""

    app: FastAPI
    client: httpx.AsyncClient

    @property
    def catalog(self) -> Catalog:
        return self.app.state.catalog

    @property
    def metrics(self) -> Metrics:
        return self.app.state.metrics

    async def classify(self, inputs: Any, **fields: Any) -> httpx.Response:
        return await self.client.post("/classify", json={"inputs": inputs, **fields})

    async def results(self, inputs: Any, **fields: Any) -> list[dict[str, Any]]:
        response = await self.classify(inputs, **fields)
        assert response.status_code == 200, response.text
        return response.json()["results"]


@asynccontextmanager
async def serving(*bundles: Bundle, tracing: Tracing | None = None, **settings: Any) -> AsyncIterator[Served]:
    """An app of ``bundles``, started, with a client in the same process."""
    quick = {"threads": 1, "lone_threads": 1, "runs": 2, "measure_seconds": 0.0, "shadow_rate": 0.0}
    app = create_app(load_settings(**(quick | settings)), bundles, tracing)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://offramp") as client:
            yield Served(app, client)


def some_texts(count: int, *, seed: int = 0, longest: int = 40) -> list[str]:
    """Random texts of the tiny model's words, 1 to ``longest`` words long."""
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(1, longest + 1))) for _ in range(count)]


def samples(registry: CollectorRegistry) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of ``registry`` by name and sorted labels, creation times left out."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name.startswith("offramp_") and not sample.name.endswith("_created")
    }


async def eventually(condition: Callable[[], bool]) -> None:
    """Returns once ``condition`` holds; fails after 30 s."""
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("waited in vain")


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of ``response``, after checking that it has the one shape."""
    document = response.json()
    assert set(document) == {"error"}, document
    assert set(document["error"]) == {"type", "message", "param"}, document
    assert isinstance(document["error"]["message"], str)
    assert document["error"]["message"]
    return document["error"]


@pytest.fixture(scope="module")
def texts() -> Iterator[list[str]]:
    return some_texts(60)
