"""Offramp beside its peers, on the same weights and the same texts: one command, one set of tables.

    benchmarks/peers/setup.sh                   # once: environments of the peers, in .venv-bench
    python -m benchmarks.peers --file dev.tsv   # from the repository's root, about 20 minutes; --quick takes 6

Servers are started one at a time, each in its own process, in turn forwards and backwards; tables hold medians over the
rounds. Everything measured goes to --output as it comes; `--tables peers.json` prints the tables of such a file again.
What each number means is in docs/performance.md.
"""

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnxruntime

from benchmarks.peers.cases import HERE, ROOT, Case, Program, programs
from benchmarks.peers.network import write_whole
from benchmarks.peers.process import ServerProcess, StartFailed, free_port, serving
from benchmarks.peers.table import FULL, MANY, ONE, Medians, headline, opened, put_into, recovery, report
from models.bundle import SHIPPED_BUNDLE, Bundle
from server.load import Exchange, Target, closed_loop, open_loop, poisson, summarise
from training.data import read_table

CLIENTS = 16
OVERLOAD = 3
SHARES = (50, 70, 90)
# After the overload, at half the capacity.
AFTERMATH_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class Plan:
    """How long each measurement takes, in seconds."""

    rounds: int
    seconds: float
    open_seconds: float
    overload_seconds: float
    shares: tuple[int, ...]


@dataclass(slots=True)
class Session:
    """What a run knows: its texts (in an order of their own) with their labels, and the rows so far."""

    plan: Plan
    texts: list[str]
    truth: list[str]
    wrk: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    # By case: each text's label and exit, as it was answered first.
    answers: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    if options.tables:
        tables = report(json.loads(options.tables.read_text(encoding="utf-8")))
        if options.into:
            page = options.into.read_text(encoding="utf-8")
            options.into.write_text(put_into(page, tables), encoding="utf-8")
        else:
            print(tables)
        return
    bundle = Bundle.load(options.bundle)
    session = Session(plan_of(options), *labelled_texts(options), wrk=options.wrk)
    calibration = bundle.calibration.precisions[bundle.manifest.default_precision]
    qualities = options.qualities or [*(tier.quality for tier in calibration.certified), 1.0]
    environment = describe_machine(bundle, session)
    with tempfile.TemporaryDirectory(prefix="offramp-peers-") as name:
        folder = Path(name)
        say("writing the network in its other forms")
        whole = write_whole(bundle, folder)
        wanted = [
            program
            for program in programs(bundle.path, qualities, whole, options.environments)
            if not options.only or program.name in options.only
        ]
        for number in range(1, session.plan.rounds + 1):
            order: list[Program | None] = [*wanted, None] if not options.only or "bare" in options.only else [*wanted]
            for program in order if number % 2 else reversed(order):
                try:
                    if program is None:
                        measure_bare(session, number, bundle, qualities, whole.graphs["int8"], folder)
                    else:
                        measure_program(session, number, program, folder)
                except StartFailed as error:
                    say(f"left out: {error}")
                document = {"environment": environment, "rows": session.rows}
                save(options.output, document)
    print(report(document))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bundle", type=Path, default=SHIPPED_BUNDLE, help="default: the shipped one")
    parser.add_argument("--file", type=Path, help="labelled texts: .csv, .tsv or .jsonl")
    parser.add_argument("--text-column", default="sentence")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--label-map", default="0=negative,1=positive", help="labels of the file in the model's words")
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv-bench", help="where setup.sh put the peers")
    parser.add_argument("--only", type=lambda text: text.split(","), help="offramp,fastapi fp32,infinity,bare,...")
    parser.add_argument(
        "--qualities", type=lambda text: [float(q) for q in text.split(",")], help="default: all certified, and 1.0"
    )
    parser.add_argument("--rounds", type=int, help="default: 3; with --quick 1")
    parser.add_argument("--seconds", type=float, help="of each closed loop; default: 4; with --quick 3")
    parser.add_argument("--open-seconds", type=float, help="of each open loop; default: 6; with --quick 4")
    parser.add_argument("--overload-seconds", type=float, help="default: 60; with --quick 15; 0 leaves it out")
    parser.add_argument("--texts", type=int, help="only so many texts of the file")
    parser.add_argument("--quick", action="store_true", help="one round, open loop at 70 %% only")
    parser.add_argument("--no-wrk", dest="wrk", action="store_false", help="without wrk's view of 16 clients")
    parser.add_argument("--output", type=Path, default=Path("peers.json"), help="default: peers.json")
    parser.add_argument("--tables", type=Path, help="print the tables of an earlier run's output, and do nothing else")
    parser.add_argument("--into", type=Path, help="with --tables: the Markdown page that they belong to")
    options = parser.parse_args(arguments)
    if not options.tables and not options.file:
        parser.error("--file is needed: labelled texts")
    return options


def plan_of(options: argparse.Namespace) -> Plan:
    def given(value: float | None, usual: float, quick: float) -> float:
        return (quick if options.quick else usual) if value is None else value

    return Plan(
        rounds=int(given(options.rounds, 3, 1)),
        seconds=given(options.seconds, 4, 3),
        open_seconds=given(options.open_seconds, 6, 4),
        overload_seconds=given(options.overload_seconds, 60, 15),
        shares=(70,) if options.quick else SHARES,
    )


def labelled_texts(options: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Texts and labels, shuffled alike: whoever gets through the first hundred only has met a fair sample."""
    names = dict(part.split("=", 1) for part in options.label_map.split(",") if part)
    examples = list(read_table(options.file, options.text_column, options.label_column).examples)
    random.Random(0).shuffle(examples)
    examples = examples[: options.texts]
    return [one.text for one in examples], [names.get(one.label, one.label) for one in examples]


def describe_machine(bundle: Bundle, session: Session) -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    manifest = bundle.manifest
    return {
        "bundle": f"{manifest.name} {manifest.version} {manifest.default_precision}",
        "texts": len(session.texts),
        "rounds": session.plan.rounds,
        "cpu": f"{len(os.sched_getaffinity(0))} × {cpu}",
        "python": platform.python_version(),
        "onnxruntime": onnxruntime.__version__,
        "load average before": round(os.getloadavg()[0], 1),
        "when": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        # They change what `offramp serve` does here as anywhere.
        **{name: value for name, value in os.environ.items() if name.startswith("OFFRAMP_")},
    }


def measure_program(session: Session, number: int, program: Program, folder: Path) -> None:
    """Starts ``program``, measures each of its cases, and adds their rows; in round 1 also what is measured once."""
    port = free_port()
    say(f"round {number}: starting {program.name}")
    log = folder / f"{program.name}.log"
    environment = {"PYTHONPATH": str(ROOT), **program.environment}
    with serving(program.command(port), port=port, log=log, environment=environment, cwd=ROOT) as server:
        measured = [Measured(session, server, case, port, number) for case in program.cases]
        for one in measured:
            one.warm_up()
            if one.case.name not in session.answers:
                one.answer_all()
        chosen = headline(Medians(session.rows)) or FULL
        for one in measured:
            one.closed(ONE, 1)
            capacity = one.closed(MANY, CLIENTS)["throughput"]
            # Offramp's other qualities lie between or beyond these two.
            if program.name == "offramp" and one.case.name not in (chosen, FULL):
                continue
            for percent in session.plan.shares:
                one.open(percent, capacity)
            if number == 1 and session.wrk:
                one.with_wrk()
            if program.name == "offramp" and one.case.name == chosen and number == session.plan.rounds:
                one.overload()


@dataclass(slots=True)
class Measured:
    """A case on a running server."""

    session: Session
    server: ServerProcess
    case: Case
    port: int
    round: int

    @property
    def target(self) -> Target:
        return Target.parse(f"http://127.0.0.1:{self.port}")

    @property
    def requests(self) -> list[bytes]:
        """All texts' requests; each round begins elsewhere among them."""
        every = self.case.requests(self.port, self.session.texts)
        start = (self.round - 1) * len(every) // max(1, self.session.plan.rounds)
        return every[start:] + every[:start]

    def warm_up(self) -> None:
        """Until it answers at all (some listen before their model is loaded), then for 1.5 s with all clients."""
        until = time.monotonic() + 120
        while not any(one.status == 200 for one in closed_loop(self.target, self.requests[:1], clients=1, most=1)):
            if time.monotonic() > until or not self.server.running:
                raise StartFailed(f"{self.case.name} answers no request")
            time.sleep(0.5)
        closed_loop(self.target, self.requests, clients=CLIENTS, seconds=min(1.5, self.session.plan.seconds))

    def answer_all(self) -> None:
        """Every text once: accuracy, and what later answers are compared with."""
        requests = self.case.requests(self.port, self.session.texts)
        exchanges = closed_loop(self.target, requests, clients=CLIENTS, most=len(requests))
        by_text = {one.request: one for one in exchanges if one.status == 200}
        if len(by_text) < len(requests):
            raise StartFailed(f"{self.case.name} left {len(requests) - len(by_text)} texts without an answer")
        answers = [self.read(by_text[text].body) for text in range(len(requests))]
        self.session.answers[self.case.name] = answers
        right = sum(label == true for (label, _), true in zip(answers, self.session.truth, strict=True))
        self.add("accuracy", {"accuracy": right / len(answers), "n": len(answers)})

    def read(self, body: bytes) -> tuple[str, int]:
        return self.case.label(body), self.case.exit_number(body)

    def closed(self, load: str, clients: int) -> dict[str, Any]:
        seconds = self.session.plan.seconds
        exchanges, cost = self.costing(
            lambda: closed_loop(self.target, self.requests, clients=clients, seconds=seconds)
        )
        return self.add(load, {**numbers(exchanges, None), **cost})

    def open(self, percent: int, capacity: float) -> None:
        rate, seconds = capacity * percent / 100, self.session.plan.open_seconds
        due = poisson(rate, seconds, seed=self.round)
        exchanges, cost = self.costing(lambda: open_loop(self.target, self.requests, due))
        self.add(opened(percent), {"rate": rate, **numbers(exchanges, seconds), **cost})

    def with_wrk(self) -> None:
        """16 clients once more, by wrk: an opinion on our own load generator. Its latencies are not taken: it adds
        made-up ones for every long one ("coordinated omission"), also in a closed loop, where none is missing."""
        with tempfile.TemporaryDirectory() as name:
            bodies = Path(name) / "bodies"
            bodies.write_text("\n".join(json.dumps(self.case.body(text)) for text in self.session.texts) + "\n")
            seconds = max(1, round(self.session.plan.seconds))
            command = ["wrk", "-t1", f"-c{CLIENTS}", f"-d{seconds}", "-s", str(HERE / "wrk.lua")]
            command += [f"http://127.0.0.1:{self.port}{self.case.route}"]
            try:
                done = subprocess.run(
                    command, env={**os.environ, "BODIES": str(bodies)}, capture_output=True, text=True, check=True
                )
            except FileNotFoundError:
                say("wrk is not installed (Debian: apt-get install wrk); going on without it")
                self.session.wrk = False
                return
        found = json.loads(done.stderr.splitlines()[-1])
        self.add("wrk", {**found, "throughput": found["ok"] / found["seconds"]})

    def overload(self) -> None:
        """Three times the capacity, then half of it; every answer is compared with the one that its text gets alone."""
        seconds = self.session.plan.overload_seconds
        if not seconds:
            return
        medians = Medians(self.session.rows)
        capacity = medians.get(self.case.name, MANY, "throughput")
        half = medians.of(self.case.name, opened(50)) or medians.of(self.case.name, opened(70))
        usual = 3 * half["p99"] / 1e3
        due = poisson(OVERLOAD * capacity, seconds, seed=0)
        due += [seconds + at for at in poisson(capacity / 2, AFTERMATH_SECONDS, seed=1)]
        requests = self.case.requests(self.port, self.session.texts)
        with watching_rss(self.server) as rss:
            exchanges, cost = self.costing(lambda: open_loop(self.target, requests, due))
        during = [one for one in exchanges if one.due < seconds]
        after = [(one.due, one.status == 200 and one.seconds <= usual) for one in exchanges if one.due >= seconds]
        alone = self.session.answers[self.case.name]
        wrong = sum(self.read(one.body) != alone[one.request] for one in exchanges if one.status == 200)
        begin, end = split(rss, seconds)
        self.add(
            "overload",
            {
                "capacity": capacity,
                **numbers(during, seconds),
                **cost,
                "wrong": wrong,
                "recovery": recovery(after, seconds),
                "rss_early": begin,
                "rss_late": end,
            },
        )

    def costing(self, load: Callable[[], list[Exchange]]) -> tuple[list[Exchange], dict[str, float]]:
        """Runs ``load``: its exchanges; the server's CPU for each, and its memory."""
        before = self.server.cpu_seconds()
        exchanges = load()
        spent = self.server.cpu_seconds() - before
        return exchanges, {"cpu_ms": 1e3 * spent / max(1, len(exchanges)), "peak_rss_mb": self.server.peak_rss_mb()}

    def add(self, load: str, found: dict[str, Any]) -> dict[str, Any]:
        row = {"round": self.round, "case": self.case.name, "load": load, **rounded(found)}
        self.session.rows.append(row)
        shown = ", ".join(f"{name} {row[name]:g}" for name in ("accuracy", "throughput", "p50", "p99") if name in row)
        say(f"round {self.round}: {self.case.name}, {load}: {shown}")
        return row


def measure_bare(
    session: Session, number: int, bundle: Bundle, qualities: Sequence[float], whole: Path, folder: Path
) -> None:
    say(f"round {number}: the bare loop")
    texts = folder / "texts.json"
    texts.write_text(json.dumps(session.texts), encoding="utf-8")
    command = [sys.executable, "-m", "benchmarks.peers.bare", str(bundle.path), "--texts", str(texts)]
    command += ["--qualities", ",".join(f"{quality:g}" for quality in qualities), "--whole", str(whole)]
    command += ["--seconds", str(session.plan.seconds)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise StartFailed("the bare loop")
    session.rows += [{"round": number, **row} for row in map(rounded, json.loads(done.stdout))]


def numbers(exchanges: Sequence[Exchange], seconds: float | None) -> dict[str, Any]:
    """The fields of a row that any load gives; ``seconds`` as in :func:`server.load.summarise`."""
    summary = summarise(exchanges, seconds)
    refused = summary.statuses.get(429, 0)
    return {
        "seconds": summary.seconds,
        "requests": summary.requests,
        "ok": summary.ok,
        "refused": refused,
        "failed": summary.requests - summary.ok - refused,
        "throughput": summary.throughput,
        "p50": summary.p50,
        "p90": summary.p90,
        "p99": summary.p99,
        "late_p99": summary.late_p99,
    }


@contextmanager
def watching_rss(server: ServerProcess) -> Iterator[list[tuple[float, float]]]:
    """Fills the list that it yields with (seconds since the start, MB), twice a second."""
    found: list[tuple[float, float]] = []
    stop, start = threading.Event(), time.monotonic()

    def watch() -> None:
        while not stop.wait(0.5):
            found.append((time.monotonic() - start, server.rss_mb()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()


def split(rss: Sequence[tuple[float, float]], seconds: float) -> tuple[float, float]:
    """The highest MB in the second and in the last quarter of ``seconds``: the first quarter fills the queue."""
    early = [mb for at, mb in rss if seconds / 4 <= at < seconds / 2]
    late = [mb for at, mb in rss if 3 * seconds / 4 <= at < seconds]
    return max(early, default=float("nan")), max(late, default=float("nan"))


def rounded(row: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 4) if isinstance(value, float) else value for name, value in row.items()}


def save(path: Path, document: dict[str, Any]) -> None:
    """One row a line, so that two runs can be compared."""
    rows = ",\n  ".join(json.dumps(row) for row in document["rows"])
    path.write_text(f'{{"environment": {json.dumps(document["environment"])},\n "rows": [\n  {rows}\n ]}}\n')


def say(words: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {words}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    # Whoever ends this ends the server under test, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main()
