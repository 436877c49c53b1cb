"""The bundle that ships: whole, right about obvious texts, and the same in any company."""

import numpy as np
import pytest

from models.bundle import Bundle
from offramp import shipped_bundle
from training.evaluate import run_graphs

pytestmark = pytest.mark.skipif(not shipped_bundle().is_dir(), reason="no shipped bundle in this checkout")

POSITIVE = [
    "a gripping film that never lets go",
    "one of the best movies of the year , warm , funny and beautifully acted",
    "I loved every minute of it",
    "a delightful and moving story",
]
NEGATIVE = [
    "two hours of nothing",
    "a dull , lifeless and badly written mess",
    "a boring and pointless film",
    "the plot makes no sense and the acting is terrible",
]


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.load(shipped_bundle())


def logits_of(bundle: Bundle, texts: list[str], batch_tokens: int) -> np.ndarray:
    paths = [bundle.graph(number) for number in range(1, len(bundle.manifest.architecture.exits) + 1)]
    encoded = [bundle.encoder.encode(text) for text in texts]
    return run_graphs(paths, bundle.manifest.architecture, encoded, threads=1, batch_tokens=batch_tokens)


def test_the_last_exit_is_right_about_obvious_texts(bundle: Bundle) -> None:
    answers = logits_of(bundle, POSITIVE + NEGATIVE, 2048)[-1].argmax(-1)
    expected = ["positive"] * len(POSITIVE) + ["negative"] * len(NEGATIVE)
    assert [bundle.manifest.labels[a] for a in answers] == expected


def test_every_exit_says_the_same_alone_and_in_company(bundle: Bundle) -> None:
    texts = [*POSITIVE, *NEGATIVE, "good", " ".join(["and then it goes on"] * 40)]
    together, alone = logits_of(bundle, texts, 10**6), logits_of(bundle, texts, 1)
    np.testing.assert_allclose(together, alone, atol=1e-4)


def test_its_promises_are_in_order_and_its_first_exits_are_cheap(bundle: Bundle) -> None:
    certified = bundle.calibration.precisions[bundle.manifest.default_precision].certified
    qualities = [tier.quality for tier in certified]
    assert qualities == sorted(qualities, reverse=True)
    assert 0.99 in qualities
    assert [t.mean_cost for t in certified] == sorted((t.mean_cost for t in certified), reverse=True)
    assert bundle.manifest.exit_costs[0] < 0.5
