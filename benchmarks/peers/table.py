"""From measured rows to the tables of docs/performance.md: pure functions.

A row is a dictionary: ``case`` (what was measured, as ``offramp 0.99``), ``load`` (``1 client``, ``16 clients``,
``open 70 %``, ``wrk``, ``accuracy``, ``overload``), ``round``, and numbers. Every table shows medians over the rounds,
and every ratio is one of medians of the same run.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Numbers = dict[str, float]

ONE, MANY = "1 client", "16 clients"
FULL = "offramp 1"
ACCURACY_KEPT = 0.99
BEGIN, END = "<!-- tables of benchmarks.peers -->", "<!-- end of tables -->"


def opened(percent: int) -> str:
    """The name of the open loop at ``percent`` of a case's capacity."""
    return f"open {percent} %"


@dataclass(frozen=True, slots=True)
class Goal:
    """What is promised against a case: at least ``throughput`` times its requests a second, at most ``latency`` times
    its p50."""

    throughput: float
    latency: float


class Medians:
    """Medians over rounds of every number, by case and load."""

    def __init__(self, rows: Sequence[Row]) -> None:
        found: dict[tuple[str, str], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for row in rows:
            for name, value in row.items():
                if isinstance(value, int | float) and not isinstance(value, bool) and name != "round":
                    found[row["case"], row["load"]][name].append(value)
        self._numbers = {
            key: {name: statistics.median(values) for name, values in fields.items()} for key, fields in found.items()
        }
        self.cases = list(dict.fromkeys(row["case"] for row in rows))

    def of(self, case: str, load: str) -> Numbers:
        """The numbers of one case under one load; empty where it was not measured."""
        return self._numbers.get((case, load), {})

    def get(self, case: str, load: str, name: str) -> float:
        """One number; NaN where it was not measured."""
        return self.of(case, load).get(name, math.nan)


def headline(medians: Medians) -> str | None:
    """The lowest of Offramp's qualities that keeps :data:`ACCURACY_KEPT` of full depth's accuracy: the cheapest."""
    full = medians.get(FULL, "accuracy", "accuracy")
    kept = [
        case
        for case in medians.cases
        if case.startswith("offramp ")
        and case != FULL
        and medians.get(case, "accuracy", "accuracy") >= ACCURACY_KEPT * full
    ]
    return min(kept, key=lambda case: float(case.split()[1]), default=None)


def goals(chosen: str) -> dict[str, Goal | None]:
    """Whom ``chosen`` is compared with, and what it must reach."""
    return {
        "infinity": Goal(10, 1 / 10),
        "litserve": None,
        "fastapi fp32": Goal(4, 1 / 3),
        "fastapi int8": None,
        FULL: Goal(2.5, 0.45),
        chosen.replace("offramp", "bare"): Goal(0.75, 1.4),
    }


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


def closed_table(medians: Medians) -> str:
    """Everything that one and sixteen clients see."""
    header = ["", "accuracy, %", "16 clients, req/s", "p50", "p90", "p99", "CPU ms a request", "1 client, p50", "p90"]
    header += ["p99", "peak RSS, MB"]
    rows = []
    for case in medians.cases:
        one, many = medians.of(case, ONE), medians.of(case, MANY)
        if not many:
            continue
        cells = [number(100 * medians.get(case, "accuracy", "accuracy"), 1), number(many.get("throughput"), 1)]
        cells += [number(many.get(name), 1) for name in ("p50", "p90", "p99")]
        cells += [number(many.get("cpu_ms"), 2)]
        cells += [number(one.get(name), 2) for name in ("p50", "p90", "p99")]
        cells += [number(max(one.get("peak_rss_mb", 0), many.get("peak_rss_mb", 0)), 0)]
        rows.append([case, *cells])
    return markdown(header, rows)


def ratio_table(medians: Medians) -> str:
    """The chosen quality against everyone else; a goal that is missed says so."""
    chosen = headline(medians)
    if chosen is None:
        return "No certified quality keeps 99 % of full depth's accuracy.\n"
    rows = []
    for other, goal in goals(chosen).items():
        if not medians.of(other, MANY):
            continue
        throughput = ratio(medians, chosen, other, MANY, "throughput")
        latency = ratio(medians, chosen, other, ONE, "p50")
        rows.append(
            [
                other,
                f"{throughput:.2f}×",
                "" if goal is None else verdict(throughput >= goal.throughput, f"≥ {goal.throughput:g}×"),
                f"{latency:.2f}×",
                "" if goal is None else verdict(latency <= goal.latency, f"≤ {goal.latency:.2f}×"),
            ]
        )
    if medians.of("bare whole graph", MANY):
        # The other way round: what cutting the graph at its exits costs whoever goes to the end.
        throughput = ratio(medians, "bare 1", "bare whole graph", MANY, "throughput")
        latency = ratio(medians, "bare 1", "bare whole graph", ONE, "p50")
        rows.append(
            [
                "(bare 1 against the bare whole graph)",
                f"{throughput:.2f}×",
                verdict(throughput >= 1 / 1.1, "≥ 0.91×"),
                f"{latency:.2f}×",
                verdict(latency <= 1.1, "≤ 1.10×"),
            ]
        )
    accuracy = medians.get(chosen, "accuracy", "accuracy") / medians.get(FULL, "accuracy", "accuracy")
    title = f"{chosen} keeps {100 * accuracy:.1f} % of full depth's accuracy. Against:\n\n"
    return title + markdown(["", "16 clients, req/s", "goal", "1 client, p50", "goal"], rows)


def open_table(medians: Medians) -> str:
    """Poisson arrivals at a share of each one's own capacity; latencies from the time that a request was due."""
    header = ["", "load", "req/s", "p50", "p90", "p99", "p99 / p50", "not 200, %", "CPU ms a request"]
    rows = []
    for case in medians.cases:
        for percent in (50, 70, 90):
            numbers = medians.of(case, opened(percent))
            if not numbers:
                continue
            lost = 100 * (1 - numbers["ok"] / numbers["requests"]) if numbers["requests"] else math.nan
            rows.append(
                [
                    case,
                    f"{percent} %",
                    number(numbers["rate"], 1),
                    *(number(numbers[name], 1) for name in ("p50", "p90", "p99")),
                    number(numbers["p99"] / numbers["p50"], 1),
                    number(lost, 2),
                    number(numbers["cpu_ms"], 2),
                ]
            )
    return markdown(header, rows)


def overload_table(medians: Medians) -> str:
    """Three times a case's capacity."""
    rows = []
    for case in medians.cases:
        numbers = medians.of(case, "overload")
        if not numbers:
            continue
        goodput = numbers["throughput"] / numbers["capacity"]
        rows += [
            [f"{case}: requests in {numbers['seconds']:.0f} s", f"{numbers['requests']:.0f}", ""],
            ["answered with 200, 429", f"{numbers['ok']:.0f}, {numbers['refused']:.0f}", ""],
            ["anything else", f"{numbers['failed']:.0f}", verdict(numbers["failed"] == 0, "0")],
            [
                "200s with another label or exit than before",
                f"{numbers['wrong']:.0f}",
                verdict(not numbers["wrong"], "0"),
            ],
            ["200s a second, of capacity", f"{100 * goodput:.0f} %", verdict(goodput >= 0.9, "≥ 90 %")],
            ["p50, p99 of the 200s", f"{numbers['p50']:.0f}, {numbers['p99']:.0f} ms", ""],
            ["RSS early, late", f"{numbers['rss_early']:.0f}, {numbers['rss_late']:.0f} MB", ""],
            ["back to normal after", f"{numbers['recovery']:.2f} s", verdict(numbers["recovery"] <= 1, "≤ 1 s")],
        ]
    return markdown(["", "", "goal"], rows) if rows else ""


def load_table(medians: Medians) -> str:
    """This benchmark's own closed loop beside wrk's, 16 clients each."""
    rows = []
    for case in medians.cases:
        ours, theirs = medians.get(case, MANY, "throughput"), medians.get(case, "wrk", "throughput")
        if not math.isnan(theirs):
            rows.append([case, number(ours, 1), number(theirs, 1), f"{ours / theirs:.3f}"])
    return markdown(["", "16 clients, req/s", "wrk, req/s", "ratio"], rows) if rows else ""


def report(document: Mapping[str, Any]) -> str:
    """All tables of a results document, with its machine and settings."""
    medians = Medians(document["rows"])
    parts = [" · ".join(f"{name} {value}" for name, value in document["environment"].items()) + "\n"]
    parts += [ratio_table(medians), "Latencies in ms:\n\n" + closed_table(medians), open_table(medians)]
    parts += [overload_table(medians), load_table(medians)]
    return "\n".join(part for part in parts if part)


def put_into(page: str, tables: str) -> str:
    """``page`` with ``tables`` between its two marks. Raises ``ValueError`` where it lacks them."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no {BEGIN} with {END} behind it")
    return f"{before}{begin}\n\n{tables}\n{end}{after}"


def recovery(done: Sequence[tuple[float, bool]], end: float) -> float:
    """Seconds from ``end`` until all is as usual: ``done`` are the requests due after it, as (due, as usual)."""
    return max((due - end for due, usual in done if not usual), default=0.0)


def ratio(medians: Medians, case: str, other: str, load: str, name: str) -> float:
    divisor = medians.get(other, load, name)
    return medians.get(case, load, name) / divisor if divisor else math.nan


def verdict(holds: bool, goal: str) -> str:
    return goal if holds else f"**missed:** {goal}"


def number(value: float | None, digits: int) -> str:
    return "" if value is None or math.isnan(value) else f"{value:.{digits}f}"
