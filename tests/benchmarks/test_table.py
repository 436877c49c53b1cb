"""The tables of the benchmark of peers, from rows made up for each case."""

import math
from typing import Any

import pytest

from benchmarks.peers.table import (
    BEGIN,
    END,
    FULL,
    MANY,
    ONE,
    Medians,
    headline,
    opened,
    put_into,
    ratio_table,
    recovery,
    report,
)


def row(case: str, load: str, number: int = 1, **numbers: float) -> dict[str, Any]:
    return {"case": case, "load": load, "round": number, **numbers}


def closed(case: str, throughput: float, p50: float, accuracy: float = 0.9) -> list[dict[str, Any]]:
    """A case with one client, sixteen clients and an accuracy."""
    usual = {"p90": 2 * p50, "p99": 3 * p50, "cpu_ms": 2.0, "peak_rss_mb": 300.0}
    return [
        row(case, "accuracy", accuracy=accuracy, n=100),
        row(case, ONE, throughput=throughput / 3, p50=p50, **usual),
        row(case, MANY, throughput=throughput, p50=5 * p50, **usual),
    ]


def line_of(table: str, name: str) -> list[str]:
    """The cells behind ``name`` in its line of a Markdown table."""
    found = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    assert len(found) == 1, table
    return [cell.strip() for cell in found[0].strip("|").split("|")][1:]


def test_a_number_is_the_median_over_the_rounds() -> None:
    rows = [row("a", ONE, number, p50=p50) for number, p50 in ((1, 3.0), (2, 100.0), (3, 5.0))]
    medians = Medians(rows)
    assert medians.get("a", ONE, "p50") == 5.0
    assert math.isnan(medians.get("a", MANY, "p50"))
    assert "round" not in medians.of("a", ONE)


def test_the_headline_is_the_lowest_quality_that_keeps_99_percent_of_the_accuracy() -> None:
    rows = [
        *closed(FULL, 100, 9, accuracy=0.900),
        *closed("offramp 0.99", 200, 5, accuracy=0.899),
        *closed("offramp 0.98", 300, 4, accuracy=0.892),
        *closed("offramp 0.95", 400, 3, accuracy=0.890),
        *closed("fastapi int8", 900, 1, accuracy=0.900),
    ]
    assert headline(Medians(rows)) == "offramp 0.98"


def test_without_an_accurate_quality_there_is_no_headline_and_the_table_says_so() -> None:
    rows = [*closed(FULL, 100, 9), *closed("offramp 0.95", 400, 3, accuracy=0.5)]
    assert headline(Medians(rows)) is None
    assert "No certified quality" in ratio_table(Medians(rows))


def test_ratios_name_the_goals_that_are_missed() -> None:
    rows = [
        *closed(FULL, 100, 9),
        *closed("offramp 0.98", 260, 4),
        *closed("infinity", 50, 40),
        *closed("fastapi fp32", 60, 12),
        *closed("bare 0.98", 300, 3.5),
    ]
    table = ratio_table(Medians(rows))
    assert line_of(table, "infinity") == ["5.20×", "**missed:** ≥ 10×", "0.10×", "≤ 0.10×"]
    assert line_of(table, "fastapi fp32") == ["4.33×", "≥ 4×", "0.33×", "≤ 0.33×"]
    assert line_of(table, FULL) == ["2.60×", "≥ 2.5×", "0.44×", "≤ 0.45×"]
    assert line_of(table, "bare 0.98") == ["0.87×", "≥ 0.75×", "1.14×", "≤ 1.40×"]
    assert "litserve" not in table


def test_cutting_the_graph_may_cost_a_tenth_at_full_depth() -> None:
    rows = [*closed(FULL, 100, 9), *closed("offramp 0.98", 260, 4)]
    rows += [*closed("bare 1", 95, 10.4), *closed("bare whole graph", 100, 9.0)]
    cells = line_of(ratio_table(Medians(rows)), "(bare 1 against the bare whole graph)")
    assert cells == ["0.95×", "≥ 0.91×", "1.16×", "**missed:** ≤ 1.10×"]


def test_the_report_holds_every_table_that_was_measured() -> None:
    rows = [*closed(FULL, 100, 9), *closed("offramp 0.98", 260, 4)]
    numbers = {"rate": 180.0, "requests": 1000, "ok": 990, "p50": 5.0, "p90": 9.0, "p99": 16.0, "cpu_ms": 4.0}
    rows.append(row("offramp 0.98", opened(70), **numbers))
    rows.append(row("offramp 0.98", "wrk", throughput=250.0))
    overload = {"seconds": 60.0, "refused": 400, "failed": 1, "wrong": 0, "throughput": 210.0, "capacity": 260.0}
    memory = {"rss_early": 300.0, "rss_late": 301.0, "recovery": 0.4}
    rows.append(row("offramp 0.98", "overload", **numbers, **overload, **memory))
    found = report({"environment": {"cpu": "2 × test"}, "rows": rows})
    assert found.startswith("cpu 2 × test\n")
    assert "| offramp 0.98 | 70 % | 180.0 | 5.0 | 9.0 | 16.0 | 3.2 | 1.00 | 4.00 |" in found
    assert line_of(found, "anything else") == ["1", "**missed:** 0"]
    assert line_of(found, "200s a second, of capacity") == ["81 %", "**missed:** ≥ 90 %"]
    assert line_of(found, "back to normal after") == ["0.40 s", "≤ 1 s"]
    assert "| offramp 0.98 | 260.0 | 250.0 | 1.040 |" in found


def test_what_was_not_measured_is_left_out() -> None:
    found = report({"environment": {}, "rows": closed(FULL, 100, 9)})
    assert "offramp 1" in found
    assert "wrk" not in found
    assert "overload" not in found
    assert "nan" not in found


def test_tables_replace_the_earlier_ones_on_their_page() -> None:
    page = f"# Page\n{BEGIN}\nold\n{END}\nmore\n"
    once = put_into(page, "new")
    assert once == f"# Page\n{BEGIN}\n\nnew\n{END}\nmore\n"
    assert put_into(once, "new") == once
    with pytest.raises(ValueError, match="the page has no"):
        put_into("# Page\n", "new")


@pytest.mark.parametrize(
    ("after", "seconds"),
    [
        ([(60.1, True), (60.2, True)], 0.0),
        ([(60.1, False), (60.7, False), (60.9, True)], 0.7),
        # Usual once, and then not: it had not recovered.
        ([(60.1, True), (61.5, False), (62.0, True)], 1.5),
    ],
)
def test_recovery_ends_with_the_last_request_that_was_not_as_usual(
    after: list[tuple[float, bool]], seconds: float
) -> None:
    assert recovery(after, 60.0) == pytest.approx(seconds)
