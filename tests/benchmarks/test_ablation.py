"""The table of one setting changed at a time: paired by seed, and the same again from its CSV."""

import math
from pathlib import Path

import pytest

from benchmarks.ablation import REFERENCE, VARIANTS, Row, read_csv, table, write_csv

OTHER = "acl-cl, λ 0.5"
ROWS = [
    Row(REFERENCE, 0, 872, (0.70, 0.80, 0.85), math.nan),
    Row(REFERENCE, 1, 872, (0.72, 0.82, 0.84), math.nan),
    Row(REFERENCE, 2, 872, (0.71, 0.81, 0.83), math.nan),
    Row(OTHER, 0, 872, (0.71, 0.81, 0.86), 0.02),
    Row(OTHER, 1, 872, (0.74, 0.84, 0.84), 0.04),
    Row(OTHER, 2, 872, (0.74, 0.84, 0.84), 0.06),
]


def _cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_differences_are_of_the_seeds_that_both_have() -> None:
    # +1, +2 and +3 points before the last exit, +1, 0 and +1 at it: t = 3.46 and 2 with two degrees of freedom.
    shallow, last = ["78.00", "+2.00 ± 1.00", "0.074"], ["84.67", "+0.67 ± 0.58", "0.184"]
    assert _cells(table(ROWS), OTHER) == ["3", *shallow, *last, "4.0"]
    assert _cells(table(ROWS), REFERENCE) == ["3", "76.00", "", "", "84.00", "", "", ""]


def test_of_two_seeds_there_is_no_p_value() -> None:
    rows = [row for row in ROWS if row.seed < 2]
    assert _cells(table(rows), OTHER) == ["2", "77.50", "+1.50 ± 0.71", "", "85.00", "+0.50 ± 0.71", "", "3.0"]


def test_the_csv_holds_all_that_the_table_says(tmp_path: Path) -> None:
    write_csv(tmp_path / "ablation.csv", ROWS)
    assert table(read_csv(tmp_path / "ablation.csv")) == table(ROWS)


def test_every_variant_differs_from_all_others() -> None:
    kinds = [(one.method, repr(sorted(one.settings.items()))) for one in VARIANTS.values()]
    assert len(set(kinds)) == len(kinds)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_names_settings_that_there_are(name: str) -> None:
    from training.trainer import TrainingSettings

    TrainingSettings(method=VARIANTS[name].method, **VARIANTS[name].settings)
