"""What a bundle's certified promises are worth on texts of another kind than those it was calibrated on.

    PYTHONPATH=. python benchmarks/drift.py models/zoo/sst2-minilm-l6 --file SST-2/dev.tsv --text-column sentence \\
        --other banking77=banking77/test.csv:text --csv drift.csv
    PYTHONPATH=. python benchmarks/drift.py --csv drift.csv

The second line prints the table again from the rows that the first one wrote.

A promise is agreement with full depth on texts like those of the risk split, so no labels are needed. The texts of
``--file`` are taken as they are, then shifted: typing errors, halves of texts, words out of order, two texts as one;
``--other`` adds files of other domains.
"""

import argparse
import csv
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from models.bundle import Bundle, Precision
from models.exits import Policy
from training.data import DataError, Example, read_table
from training.evaluate import curve_point, measure, run_bundle

# One random letter is drawn from these; SST-2 and its models know no capitals.
LETTERS = "abcdefghijklmnopqrstuvwxyz"
# A row is marked where chance alone would show so little agreement less often than this, were the promise kept.
LEVEL = 0.05

Shift = Callable[[Sequence[str], np.random.Generator], list[str]]


@dataclass(frozen=True, slots=True)
class Row:
    """What one tier gave on one set of ``n`` texts: ``agreement`` with full depth, ``speedup`` in mean cost.

    ``p_value``: the chance of this many disagreements or more, were the promise just kept (exact, binomial).
    """

    texts: str
    n: int
    mean_tokens: float
    precision: str
    promised: float
    agreement: float
    p_value: float
    speedup: float


def typing_errors(rate: float) -> Shift:
    """Each letter, with probability ``rate``, is left out, doubled, swapped with the next one or another letter."""

    def mistype(text: str, rng: np.random.Generator) -> str:
        letters = list(text)
        for at in np.flatnonzero(rng.random(len(letters)) < rate).tolist():
            if not letters[at].isalpha():
                continue
            kind = rng.integers(4)
            if kind == 0:
                letters[at] = ""
            elif kind == 1:
                letters[at] *= 2
            elif kind == 2 and at + 1 < len(letters):
                letters[at], letters[at + 1] = letters[at + 1], letters[at]
            else:
                letters[at] = LETTERS[rng.integers(len(LETTERS))]
        # A text of one letter must not vanish.
        return "".join(letters) if "".join(letters).strip() else text

    return lambda texts, rng: [mistype(text, rng) for text in texts]


def first_half(texts: Sequence[str], rng: np.random.Generator) -> list[str]:
    """The first half of the words, rounded up."""
    return [" ".join(words[: (len(words) + 1) // 2]) for words in map(str.split, texts)]


def last_half(texts: Sequence[str], rng: np.random.Generator) -> list[str]:
    """The last half of the words, rounded up."""
    return [" ".join(words[len(words) // 2 :]) for words in map(str.split, texts)]


def out_of_order(texts: Sequence[str], rng: np.random.Generator) -> list[str]:
    """The words of each text in random order."""
    return [" ".join(rng.permutation(text.split()).tolist()) for text in texts]


def two_as_one(texts: Sequence[str], rng: np.random.Generator) -> list[str]:
    """Each text with another one behind it, whatever that one says."""
    behind = rng.permutation(len(texts))
    return [f"{text} {texts[other]}" for text, other in zip(texts, behind, strict=True)]


SHIFTS: Mapping[str, Shift] = {
    "as they are": lambda texts, rng: list(texts),
    "2 % of letters mistyped": typing_errors(0.02),
    "5 % of letters mistyped": typing_errors(0.05),
    "10 % of letters mistyped": typing_errors(0.1),
    "20 % of letters mistyped": typing_errors(0.2),
    "first half of each": first_half,
    "last half of each": last_half,
    "words out of order": out_of_order,
    "two texts as one": two_as_one,
}


def tiers_on(bundle: Bundle, precision: Precision, name: str, texts: Sequence[str]) -> list[Row]:
    """A :class:`Row` for every certified tier of ``precision`` on ``texts``."""
    encoded = [bundle.encoder.encode(text) for text in texts]
    tokens = np.asarray([len(text) for text in encoded], dtype=np.int64)
    calibration = bundle.calibration.precisions[precision]
    split = measure(
        run_bundle(bundle, precision, encoded),
        calibration.temperatures,
        calibration.agreement_temperatures,
        # Agreement and cost ask for no labels.
        np.zeros(len(texts), dtype=np.int64),
        tokens,
        bundle.manifest.architecture,
        "agreement",
    )
    rows = []
    for tier in calibration.certified:
        point = curve_point(split, Policy(tier.criterion, tier.threshold))
        disagreements = round((1 - point.agreement) * len(texts))
        p_value = float(binom.sf(disagreements - 1, len(texts), 1 - tier.quality))
        rows.append(
            Row(
                name,
                len(texts),
                round(float(tokens.mean()), 1),
                precision,
                tier.quality,
                point.agreement,
                p_value,
                point.speedup,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: a row per set of texts, a column per promise; agreement in per cent, speed-up, and ``!`` where the
    promise is broken by more than chance explains."""
    promises = sorted({row.promised for row in rows}, reverse=True)
    lines = ["| texts | n | tokens | " + " | ".join(f"{promise:g}" for promise in promises) + " |"]
    lines.append("|---" * (3 + len(promises)) + "|")
    for name in dict.fromkeys(row.texts for row in rows):
        own = {row.promised: row for row in rows if row.texts == name}
        first = next(iter(own.values()))
        cells = [
            f"{100 * own[p].agreement:.1f}{' !' if own[p].p_value < LEVEL else ''} ({own[p].speedup:.2f}×)"
            for p in promises
        ]
        lines.append(f"| {name} | {first.n:,} | {first.mean_tokens:g} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def read_rows(path: Path) -> list[Row]:
    """Rows as ``--csv`` wrote them."""
    with path.open(newline="", encoding="utf-8") as stream:
        return [_row(row) for row in csv.DictReader(stream)]


def _row(cells: Mapping[str, str]) -> Row:
    kinds: dict[str, Any] = {f.name: f.type for f in fields(Row)}
    return Row(**{name: kind(cells[name]) for name, kind in kinds.items()})


def _other(text: str) -> tuple[str, list[Example]]:
    name, _, place = text.partition("=")
    path, _, column = place.rpartition(":")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"must be NAME=FILE:COLUMN, not {text!r}")
    # Any column will do as the label, which nobody looks at.
    return name, list(read_table(path, column, _first_other_column(path, column)).examples)


def _first_other_column(path: str, column: str) -> str:
    with Path(path).open(encoding="utf-8-sig", newline="") as stream:
        names = next(csv.reader(stream, delimiter="\t" if path.endswith(".tsv") else ","), [])
    return next((name for name in names if name != column), column)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("bundle", nargs="?")
    parser.add_argument("--file", help="texts like those calibrated on: .csv, .tsv or .jsonl")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--other", action="append", default=[], type=_other, help="NAME=FILE:COLUMN, again and again")
    parser.add_argument("--precision", help="[default: the one served by default]")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--csv", type=Path, help="write the rows there too; without a bundle: read them there")
    arguments = parser.parse_args()
    if arguments.bundle is None:
        if arguments.csv is None or arguments.file is not None:
            parser.error("give a bundle and --file, or --csv alone")
        print(table(read_rows(arguments.csv)))
        return
    if arguments.file is None:
        parser.error("a bundle needs --file")
    try:
        examples = read_table(arguments.file, arguments.text_column, arguments.label_column).examples
    except DataError as error:
        sys.exit(str(error))
    bundle = Bundle.load(arguments.bundle)
    precision = arguments.precision or bundle.manifest.default_precision
    texts = [example.text for example in examples]
    rows: list[Row] = []
    for name, shift in SHIFTS.items():
        rows += tiers_on(bundle, precision, name, shift(texts, np.random.default_rng(arguments.seed)))
    for name, others in arguments.other:
        rows += tiers_on(bundle, precision, name, [example.text for example in others])
    if arguments.csv is not None:
        with arguments.csv.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, list(asdict(rows[0])), lineterminator="\n")
            writer.writeheader()
            writer.writerows(asdict(row) for row in rows)
    print(
        f"{bundle.manifest.name}, {precision}: agreement with full depth in %, and the speed-up; ! where p < {LEVEL:g}"
    )
    print()
    print(table(rows))


if __name__ == "__main__":
    main()
