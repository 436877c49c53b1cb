"""What the tests of the front doors share."""

from collections.abc import AsyncIterator, Iterator

import pytest

from models.bundle import Bundle
from tests.server.conftest import Served, serving
from tests.server.process import Process, process


@pytest.fixture(scope="module")
async def doors(tiny_bundle: Bundle, pair_bundle: Bundle) -> AsyncIterator[Served]:
    """An app of a model of texts (the default) and one of pairs."""
    async with serving(tiny_bundle, pair_bundle) as served:
        yield served


@pytest.fixture(scope="module")
def server(tiny_bundle: Bundle) -> Iterator[Process]:
    """A real process, for clients that bring their own sockets."""
    with process(tiny_bundle) as running:
        yield running
