"""The server's scheduler under a simulated clock: orders, loads and machines compared without owning the machines.

    python benchmarks/simulate.py run                          # SST-2's texts and the measured table that lie beside it
    python benchmarks/simulate.py run --workers 64 --loads 0.7 # 64 cores
    python benchmarks/simulate.py run --workers 1 --batching-gain 10 --max-batch-texts 64 --max-batch-tokens 4096
    python benchmarks/simulate.py run --clients 1,16           # closed loop in place of Poisson arrivals
    python benchmarks/simulate.py latency BUNDLE --output table.json     # measure this machine
    python benchmarks/simulate.py profile BUNDLE --file dev.tsv --text-column sentence --output profile.json

`run` prints, for each order and load, the median over the seeds of: answers a second, milliseconds from arrival to
answer (p50, p90, p99), the share of the workers' time that is used, and the mean texts of a run of each segment. A load
is a share of the capacity, which is what the order `oldest` answers a second when nobody ever waits for work.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from models.bundle import Bundle
from models.exits import Policy, first_exit, full_depth
from server.engine.latency import LatencyTable
from server.engine.order import ORDERS
from server.engine.runner import Runner
from server.engine.scheduler import Scheduler
from server.engine.simulator import Arrivals, Profile, Service, Simulated, batching_like, simulate

BESIDE = Path(__file__).parent / "simulator"


@dataclass(frozen=True, slots=True)
class Row:
    """One order under one load, medians over the seeds; times in milliseconds, loads as shares of ``capacity``."""

    order: str
    load: float | None
    clients: int | None
    answers_per_second: float
    p50: float
    p90: float
    p99: float
    busy: float
    batch: list[float]
    refused: float
    unanswered: float


def scheduler(options: argparse.Namespace, latency: LatencyTable, order: str) -> Scheduler[Any]:
    return Scheduler(
        latency.segments,
        max_batch_tokens=options.max_batch_tokens,
        max_batch_texts=options.max_batch_texts,
        order=ORDERS[order],
        latency=replace(latency, padding=0.0) if options.mix_lengths else latency,
        workers=1 if options.no_share else options.workers,
        max_wait_seconds=options.max_wait_ms / 1000,
    )


def row_of(order: str, load: float | None, clients: int | None, found: Sequence[Simulated], workers: int) -> Row:
    def median(values: Sequence[float]) -> float:
        return float(statistics.median(values))

    return Row(
        order=order,
        load=load,
        clients=clients,
        answers_per_second=median([one.throughput for one in found]),
        p50=median([1000 * one.quantile(0.5) for one in found]),
        p90=median([1000 * one.quantile(0.9) for one in found]),
        p99=median([1000 * one.quantile(0.99) for one in found]),
        busy=median([one.busy / one.elapsed / workers for one in found]),
        batch=np.median([one.ran / np.maximum(1, one.runs) for one in found], axis=0).round(2).tolist(),
        refused=median([one.refused / len(one.seconds) for one in found]),
        unanswered=median([float(np.isnan(one.seconds).mean()) - one.refused / len(one.seconds) for one in found]),
    )


def run(options: argparse.Namespace) -> None:
    profile = Profile.from_document(json.loads(options.profile.read_text(encoding="utf-8")), options.quality)
    latency = LatencyTable.from_document(json.loads(options.latency.read_text(encoding="utf-8")))
    if options.batching_gain:
        mean = round(float(profile.tokens.mean()))
        latency = batching_like(latency, options.batching_gain, tokens=mean, largest=options.max_batch_texts)
    service = Service(options.workers, options.front_ms / 1000, options.cpus)
    began, events = time.perf_counter(), 0
    crowd = Arrivals(clients=4 * options.workers * options.max_batch_texts)
    texts = min(options.texts, 20_000 * max(1, options.workers // 8))
    full = simulate(scheduler(options, latency, "oldest"), latency, profile, crowd, service, texts=texts)
    capacity = full.throughput
    if options.clients:
        ways = [(None, clients, Arrivals(clients=clients)) for clients in options.clients]
    else:
        ways = [(load, None, Arrivals(rate=load * capacity)) for load in options.loads]
        service = replace(
            service,
            max_queue=options.max_queue,
            deadline_seconds=options.deadline_ms / 1000 if options.deadline_ms else None,
        )
    rows = []
    for load, clients, arrivals in ways:
        for order in options.orders:
            found = [
                simulate(
                    scheduler(options, latency, order),
                    latency,
                    profile,
                    arrivals,
                    service,
                    texts=options.texts,
                    seed=seed,
                )
                for seed in range(options.seeds)
            ]
            events += sum(one.events for one in found)
            rows.append(row_of(order, load, clients, found, options.workers))
    seconds = time.perf_counter() - began
    if options.json:
        print(json.dumps({"capacity": capacity, "rows": [asdict(row) for row in rows]}, indent=1))
        return
    print(f"capacity {capacity:.0f} answers a second; {options.workers} workers, quality {options.quality}, ", end="")
    print(f"{options.texts} texts × {options.seeds} seeds, {latency.segments} segments\n")
    refusing = options.max_queue or options.deadline_ms
    head = ["clients" if options.clients else "load", "order", "answers/s", "p50", "p90", "p99", "busy, %"]
    line(*head, "texts a run", *(["refused, %", "no answer, %"] if refusing else []))
    line(*["---"] * (8 + 2 * bool(refusing)))
    for row in rows:
        line(
            row.clients if row.load is None else f"{row.load:g}",
            row.order,
            f"{row.answers_per_second:.0f}",
            *(f"{value:.2f}" for value in (row.p50, row.p90, row.p99)),
            f"{100 * row.busy:.0f}",
            " ".join(f"{size:.1f}" for size in row.batch),
            *([f"{100 * row.refused:.1f}", f"{100 * row.unanswered:.1f}"] if refusing else []),
        )
    print(f"\n{events / seconds:.0f} events a second, {seconds:.0f} s in all")


def line(*cells: object) -> None:
    """A row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |")


def measure(options: argparse.Namespace) -> None:
    """Times every segment as a server does when it starts, only for longer."""
    bundle = Bundle.load(options.bundle)
    precision = options.precision or bundle.manifest.default_precision
    runner = Runner(bundle, precision=precision, device="cpu", threads=options.threads)
    runner.warm_up(options.max_batch_tokens, options.max_batch_texts)
    table = runner.measure(options.max_batch_tokens, options.max_batch_texts, options.seconds, rounds=10_000)
    options.output.write_text(json.dumps(table.document()) + "\n", encoding="utf-8")
    print(f"an empty place beside a longer text counts as {table.padding:.2f} tokens\n")
    rows = table.rows()
    line(*rows[0])
    line(*["---"] * len(rows[0]))
    for row in rows[1:]:
        line(*row)


def leave(options: argparse.Namespace) -> None:
    """Runs labelled or plain texts through a bundle's graphs and writes each one's tokens and exit at every quality."""
    from training.data import read_table
    from training.evaluate import run_bundle

    bundle = Bundle.load(options.bundle)
    precision = options.precision or bundle.manifest.default_precision
    calibration = bundle.calibration.precisions[precision]
    table = read_table(options.file, options.text_column, options.label_column)
    encoded = [bundle.encoder.encode(example.text, example.pair) for example in table.examples]
    logits = run_bundle(bundle, precision, encoded, threads=options.threads)
    policies = {"1.0": full_depth(len(logits))}
    policies |= {f"{tier.quality:g}": Policy(tier.criterion, tier.threshold) for tier in calibration.certified}
    exits = {
        quality: (first_exit(logits, calibration.temperatures, calibration.agreement_temperatures, policy) + 1).tolist()
        for quality, policy in policies.items()
    }
    document = {"tokens": [len(text) for text in encoded], "exits": exits}
    options.output.write_text(json.dumps(document) + "\n", encoding="utf-8")
    for quality, numbers in exits.items():
        shares = np.bincount(numbers, minlength=len(logits) + 1)[1:] / len(numbers)
        print(f"quality {quality:>5}: % at each exit", " ".join(f"{100 * share:.0f}" for share in shares))


def numbers_of(kind: type) -> Any:
    return lambda text: [kind(part) for part in text.split(",")]


def orders_of(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in ORDERS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no order {', '.join(unknown)}; there are {', '.join(ORDERS)}")
    return names


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = top.add_subparsers(required=True, metavar="run | latency | profile")
    one = commands.add_parser("run", help="simulate", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    one.set_defaults(do=run)
    one.add_argument("--profile", type=Path, default=BESIDE / "sst2-minilm-l6.profile.json", help="of `profile`")
    one.add_argument("--latency", type=Path, default=BESIDE / "sst2-minilm-l6.latency.json", help="of `latency`")
    one.add_argument("--quality", default="0.99", help="whose exits, of those in the profile")
    one.add_argument("--orders", type=orders_of, default=list(ORDERS), help="comma-separated")
    one.add_argument("--loads", type=numbers_of(float), default=[0.5, 0.7, 0.9], help="shares of the capacity")
    one.add_argument("--clients", type=numbers_of(int), help="closed loop with these numbers of clients, not --loads")
    one.add_argument("--workers", type=int, default=2)
    one.add_argument("--texts", type=int, default=100_000, help="texts in each simulation")
    one.add_argument("--seeds", type=int, default=5)
    one.add_argument("--max-batch-tokens", type=int, default=256)
    one.add_argument("--max-batch-texts", type=int, default=16)
    one.add_argument("--max-wait-ms", type=float, default=1000.0, help="bound on starvation")
    one.add_argument("--no-share", action="store_true", help="a free worker takes all that fits, whoever else is free")
    one.add_argument("--mix-lengths", action="store_true", help="company by age alone, whatever its lengths cost")
    one.add_argument("--front-ms", type=float, default=0.0, help="of the one event loop for each text")
    one.add_argument("--cpus", type=float, help="that workers and event loop share; default: enough for all")
    one.add_argument("--max-queue", type=int, help="refuse while so many texts are in the house")
    one.add_argument("--deadline-ms", type=float, help="of every text; predicted-late texts are refused")
    one.add_argument("--batching-gain", type=float, help="of a device: full batches serve so many times the texts")
    one.add_argument("--json", action="store_true")
    two = commands.add_parser("latency", help="measure", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    two.set_defaults(do=measure)
    two.add_argument("bundle", type=Path)
    two.add_argument("--output", type=Path, required=True)
    two.add_argument("--precision", choices=["fp32", "fp16", "int8"])
    two.add_argument("--threads", type=int, default=1)
    two.add_argument("--seconds", type=float, default=20.0, help="to measure for")
    two.add_argument("--max-batch-tokens", type=int, default=512)
    two.add_argument("--max-batch-texts", type=int, default=32)
    three = commands.add_parser("profile", help="run texts", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    three.set_defaults(do=leave)
    three.add_argument("bundle", type=Path)
    three.add_argument("--output", type=Path, required=True)
    three.add_argument("--file", required=True, help="labelled texts: .csv, .tsv or .jsonl")
    three.add_argument("--text-column", default="text")
    three.add_argument("--label-column", default="label")
    three.add_argument("--precision", choices=["fp32", "fp16", "int8"])
    three.add_argument("--threads", type=int, default=1)
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser().parse_args(arguments)
    try:
        options.do(options)
    except (OSError, ValueError) as error:
        sys.exit(f"simulate: {error}")


if __name__ == "__main__":
    main()
