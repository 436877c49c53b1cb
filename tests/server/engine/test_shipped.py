"""The promises that need real weights: the shipped bundle in the real engine, in every precision that ships."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.bundle import SHIPPED_BUNDLE, Bundle, Precision
from models.exits import Policy, full_depth
from server.engine.request import Answer, Text
from server.engine.runner import Runner
from tests.server.engine.test_engine import answered, engine_of
from tests.server.engine.test_runner import Work

pytestmark = pytest.mark.skipif(not SHIPPED_BUNDLE.is_dir(), reason="no shipped bundle in this checkout")

# From certain to torn: texts that leave at different exits.
CORPUS = [
    "a gripping film that never lets go",
    "two hours of nothing",
    "bad",
    "not bad , not good , and not the film that its makers think it is",
    "the performances are fine ; the script , which never decides what it wants to be , is another matter",
    "one wishes that the director had trusted the material , but what remains is funny in places and sad in others",
    "if you go in expecting little you may be surprised , and if you go in expecting much you may be too",
    "1999 !!! ??? :-) zxqv",
    "an unexpectedly tender , slow , at times tedious portrait of two brothers and the farm that they have to give up",
    " ".join(["it goes on , and on , and then it stops"] * 12),
]
POLICIES = [
    Policy("agreement", 0.98),
    Policy("confidence", 0.9),
    Policy("confidence", 0.97),
    Policy("entropy", 0.3),
    Policy("patience", 1),
    full_depth(5),
]
REQUEST = st.lists(st.tuples(st.sampled_from(CORPUS), st.sampled_from(POLICIES)), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.load(SHIPPED_BUNDLE)


def precisions() -> list[Precision]:
    return list(Bundle.load(SHIPPED_BUNDLE).manifest.precisions) if SHIPPED_BUNDLE.is_dir() else []


@pytest.fixture(scope="module", params=precisions())
def ask(bundle: Bundle, request: pytest.FixtureRequest) -> Callable[..., list[Answer]]:
    """Answers of requests that arrive together at an engine of two workers; ``alone``: one request after the other."""
    precision: Precision = request.param
    runner = Runner(bundle, precision=precision, device="cpu", threads=1)
    runner.widen(2)

    async def answers(requests: list[tuple[list[str], list[Policy]]], alone: bool) -> list[Answer]:
        engine = engine_of(bundle, runner, precision, workers=2, max_batch_tokens=256, max_batch_texts=16)
        await engine.start()
        submissions = [engine.submit([Text(text) for text in texts], policies) for texts, policies in requests]
        found = [await submission for submission in submissions] if alone else await asyncio.gather(*submissions)
        await engine.close()
        return [answered(outcome) for submitted in found for outcome in submitted.outcomes]

    return lambda requests, alone=False: asyncio.run(answers(requests, alone))


@pytest.fixture(scope="module")
def single(ask: Callable[..., list[Answer]]) -> dict[tuple[str, Policy], Answer]:
    """Each text under each policy, alone in the engine."""
    pairs = [(text, policy) for text in CORPUS for policy in POLICIES]
    return dict(zip(pairs, ask([([text], [policy]) for text, policy in pairs], alone=True), strict=True))


@settings(max_examples=12, deadline=None)
@given(st.lists(REQUEST, min_size=1, max_size=8))
def test_label_exit_and_scores_are_the_same_alone_and_in_any_company(
    ask: Callable[..., list[Answer]],
    single: dict[tuple[str, Policy], Answer],
    requests: list[list[tuple[str, Policy]]],
) -> None:
    together = ask([([text for text, _ in request], [policy for _, policy in request]) for request in requests])
    for pair, answer in zip([pair for request in requests for pair in request], together, strict=True):
        alone = single[pair]
        assert (answer.left.label, answer.left.exit, answer.reason) == (alone.left.label, alone.left.exit, alone.reason)
        for one, other in zip(answer.readings, alone.readings, strict=True):
            np.testing.assert_allclose(one.probabilities, other.probabilities, atol=1e-4, rtol=0)


def test_the_corpus_leaves_at_several_exits(single: dict[tuple[str, Policy], Answer]) -> None:
    """Else the property above would say little."""
    assert len({answer.left.exit for answer in single.values()}) >= 4


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_shapes_that_packs_have(bundle: Bundle) -> None:
    def resident() -> float:
        """MB of memory that this process holds."""
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    runner = Runner(bundle, precision=bundle.manifest.default_precision, device="cpu", threads=1)
    random = np.random.default_rng(5)
    budget = 512

    def run(lengths: list[int]) -> None:
        items = [Work(bundle, "a") for _ in lengths]
        for item, length in zip(items, lengths, strict=True):
            item.ids = random.integers(1000, 20000, length)
            item.type_ids = np.zeros(length, np.int64)
        for segment in range(1, len(bundle.manifest.architecture.exits) + 1):
            output = runner.run(segment, items)
            for item, state in zip(items, output.carry(range(len(items))), strict=True):
                item.state = state

    def random_lengths() -> list[int]:
        lengths: list[int] = []
        room, texts = budget, random.integers(1, 17)
        while room >= 3 and len(lengths) < texts:
            lengths.append(int(np.clip(random.lognormal(3, 1), 3, room)))
            room -= lengths[-1]
        return lengths

    run([budget])
    warm = resident()
    for _ in range(60):
        run(random_lengths())
    # Measured: -2; with ONNX Runtime's arena 169, and still growing.
    assert resident() - warm < 80
