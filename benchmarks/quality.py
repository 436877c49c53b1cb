"""What a running server answers on labelled texts: every exit by itself, every certified tier, and full depth.

    offramp serve &
    PYTHONPATH=. python benchmarks/quality.py http://localhost:8000 --file dev.tsv --text-column sentence \\
        --label-map 0=negative,1=positive

Everything is read off the HTTP answers: label, exit, cost. Agreement is with the answers to ``quality: 1.0``.
"""

import argparse
import json
import math
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.data import read_table

BATCH = 32


@dataclass(frozen=True, slots=True)
class Answers:
    """Per text: label, number of the exit, cost in layers, and the tier that the answer carries."""

    labels: list[str]
    exits: list[int]
    costs: list[float]
    tiers: set[float | None]


def ask(url: str, texts: Sequence[str], **wish: Any) -> Answers:
    """Posts ``texts`` in batches under one wish."""
    found = Answers([], [], [], set())
    for start in range(0, len(texts), BATCH):
        body = json.dumps({"inputs": list(texts[start : start + BATCH]), "top_k": 1, **wish}).encode()
        request = urllib.request.Request(f"{url}/classify", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request) as response:
            results = json.load(response)["results"]
        found.labels.extend(r["label"] for r in results)
        found.exits.extend(r["exit"]["number"] for r in results)
        found.costs.extend(r["exit"]["cost"] for r in results)
        found.tiers.update(r["exit"]["tier"] for r in results)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("url")
    parser.add_argument("--file", required=True, help="labelled texts: .csv, .tsv or .jsonl")
    parser.add_argument("--text-column", default="text")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--label-map", default="", help="labels of the file in the model's words, as 0=negative")
    arguments = parser.parse_args()
    names = dict(part.split("=", 1) for part in arguments.label_map.split(",") if part)
    table = read_table(arguments.file, arguments.text_column, arguments.label_column)
    texts = [e.text for e in table.examples]
    truth = [names.get(e.label, e.label) for e in table.examples]
    with urllib.request.urlopen(f"{arguments.url}/models") as response:
        model = next(m for m in json.load(response)["models"] if m["default"])
    full = ask(arguments.url, texts, quality=1.0)
    n, best = len(texts), share(full.labels, truth)
    error = math.sqrt(best * (1 - best) / n)
    print(f"{model['name']} {model['version']}, {model['precision']}, n = {n}")
    print(f"full depth: accuracy {100 * best:.1f} ± {100 * error:.1f} %, mean cost {mean(full.costs):.2f} layers\n")
    row("exit alone", "accuracy, %", "mean cost", "speed-up")
    row(*["---"] * 4)
    for spec in model["exits"]:
        number = spec["number"]
        got = ask(arguments.url, texts, criterion="confidence", threshold=1.0, min_exit=number, max_exit=number)
        assert set(got.exits) == {number}, "min_exit = max_exit must leave there"
        row(number, f"{100 * share(got.labels, truth):.1f}", f"{mean(got.costs):.2f}", f"{ratio(full, got):.2f}×")
    print()
    row("quality", "agreement, %", "accuracy, %", "kept, %", "mean cost", "speed-up", "% at each exit")
    row(*["---"] * 7)
    for tier in model["tiers"]:
        got = ask(arguments.url, texts, quality=tier["quality"])
        assert got.tiers == {tier["quality"]}, "every answer must carry the tier that was asked for"
        leaving, right = Counter(got.exits), share(got.labels, truth)
        row(
            f"{tier['quality']:g}",
            f"{100 * share(got.labels, full.labels):.2f}",
            f"{100 * right:.1f}",
            f"{100 * right / best:.1f}",
            f"{mean(got.costs):.2f}",
            f"{ratio(full, got):.2f}×",
            " ".join(f"{100 * leaving[e['number']] / n:.0f}" for e in model["exits"]),
        )


def row(*cells: object) -> None:
    """A row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |")


def share(given: Sequence[str], wanted: Sequence[str]) -> float:
    return sum(a == b for a, b in zip(given, wanted, strict=True)) / len(wanted)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def ratio(full: Answers, got: Answers) -> float:
    """Speed-up in layers: the ratio of mean costs."""
    return mean(full.costs) / mean(got.costs)


if __name__ == "__main__":
    main()
