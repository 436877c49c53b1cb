"""The table of one setting changed at a time: paired by seed, and the same again from its CSV."""

import math
from pathlib import Path

import pytest

from benchmarks.ablation import REFERENCE, VARIANTS, Row, read_csv, table, write_csv

OTHER = "acl-cl, λ 0.5"
ROWS = [
    Row(REFERENCE, 0, 872, (0.70, 0.80, 0.85), math.nan),
    Row(REFERENCE, 1, 872, (0.72, 0.82, 0.84), math.nan),
    Row(OTHER, 0, 872, (0.71, 0.81, 0.86), 0.02),
    Row(OTHER, 1, 872, (0.74, 0.84, 0.84), 0.04),
    Row(OTHER, 2, 872, (0.74, 0.84, 0.84), 0.06),
]


def _cells(text: str, name: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in line.strip("|").split("|")][1:]


def test_differences_are_of_the_seeds_that_both_have() -> None:
    # +1 and +2 points before the last exit, +1 and 0 at it: t = 3 and 1 with one degree of freedom.
    assert _cells(table(ROWS), OTHER) == ["3", "78.00", "+1.50 ± 0.71", "0.20", "84.67", "+0.50 ± 0.71", "0.50", "4.0"]
    assert _cells(table(ROWS), REFERENCE) == ["2", "76.00", "", "", "84.50", "", "", ""]


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
