"""How texts are shifted away from those a bundle was calibrated on, and what is said of its promises there."""

import argparse
from pathlib import Path

import numpy as np
import pytest

from benchmarks.drift import SHIFTS, Row, _other, first_half, last_half, table, tiers_on, two_as_one, typing_errors
from models.bundle import Bundle

TEXTS = ["a gorgeous , witty , seductive movie", "dull", "it 's slow -- very , very slow"]
ZOO = Path(__file__).parents[2] / "models" / "zoo" / "sst2-minilm-l6"


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


def test_about_the_asked_share_of_letters_is_mistyped_and_nothing_else() -> None:
    text = "abcdefghij 12345 !? " * 500
    (shifted,) = typing_errors(0.1)([text], rng())
    kept = "".join(c for c in text if not c.isalpha())
    assert "".join(c for c in shifted if not c.isalpha()) == kept
    # A quarter of the errors leave a letter out, a quarter double one.
    assert abs(len(shifted) - len(text)) < 60
    (unchanged,) = typing_errors(0.0)([text], rng())
    assert unchanged == text
    broken = sum(word not in ("abcdefghij", "12345", "!?") for word in shifted.split()) / 500
    assert broken == pytest.approx(1 - 0.9**10, abs=0.08)


def test_no_text_vanishes() -> None:
    for name, shift in SHIFTS.items():
        assert all(text.strip() for text in shift([*TEXTS, "a"] * 50, rng())), name


def test_halves_share_at_most_the_middle_word() -> None:
    assert first_half(TEXTS, rng()) == ["a gorgeous , witty", "dull", "it 's slow --"]
    assert last_half(TEXTS, rng()) == ["witty , seductive movie", "dull", "very , very slow"]


def test_two_as_one_begins_with_each_text() -> None:
    joined = two_as_one(TEXTS, rng())
    assert all(long.startswith(text + " ") for long, text in zip(joined, TEXTS, strict=True))
    assert sorted(long.removeprefix(text + " ") for long, text in zip(joined, TEXTS, strict=True)) == sorted(TEXTS)


def test_every_certified_tier_of_a_bundle_is_measured_against_its_full_depth() -> None:
    bundle = Bundle.load(ZOO)
    rows = tiers_on(bundle, "int8", "mine", TEXTS)
    assert [row.promised for row in rows] == [tier.quality for tier in bundle.calibration.precisions["int8"].certified]
    assert all(row.n == 3 and round(3 * row.agreement, 6).is_integer() and row.speedup >= 1 for row in rows)
    # Bolder tiers are never slower.
    assert [row.speedup for row in rows] == sorted(row.speedup for row in rows)
    # Where nothing disagreed, nothing speaks against the promise.
    assert all(row.p_value == 1 for row in rows if row.agreement == 1)


def test_a_broken_promise_is_marked_and_bad_luck_is_not() -> None:
    rows = [
        Row("as they are", 1000, 20.0, "int8", 0.99, 0.988, 0.3, 2.5),
        Row("as they are", 1000, 20.0, "int8", 0.9, 0.95, 1.0, 4.0),
        Row("drifted", 1000, 30.0, "int8", 0.99, 0.95, 1e-9, 3.0),
        Row("drifted", 1000, 30.0, "int8", 0.9, 0.94, 1.0, 5.0),
    ]
    assert table(rows).splitlines() == [
        "| texts | n | tokens | 0.99 | 0.9 |",
        "|---|---|---|---|---|",
        "| as they are | 1,000 | 20 | 98.8 (2.50×) | 95.0 (4.00×) |",
        "| drifted | 1,000 | 30 | 95.0 ! (3.00×) | 94.0 (5.00×) |",
    ]


def test_other_files_are_named_with_their_column(tmp_path: Path) -> None:
    file = tmp_path / "a:b.csv"
    file.write_text("id,question\n1,what now?\n")
    name, examples = _other(f"bank={file}:question")
    assert (name, [example.text for example in examples]) == ("bank", ["what now?"])
    with pytest.raises(argparse.ArgumentTypeError, match="must be NAME=FILE:COLUMN, not 'bank'"):
        _other("bank")
