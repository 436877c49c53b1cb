"""Fixtures shared by all tests."""

import pytest

from models.bundle import Bundle
from tests.tiny import write_tiny_bundle


@pytest.fixture(scope="session")
def tiny_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A servable bundle with four exits and two labels (see ``tests.tiny``)."""
    return write_tiny_bundle(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def pair_bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that classifies pairs into three labels."""
    return write_tiny_bundle(
        tmp_path_factory.mktemp("pairs"),
        name="tiny-pairs",
        labels=("entailment", "neutral", "contradiction"),
        takes_pairs=True,
        seed=1,
    )
