"""The bundle's segments in a bare loop: no HTTP, no queue, no batches, all cores. Runs as a process of its own.

    python -m benchmarks.peers.bare BUNDLE --texts texts.json --qualities 0.99,1.0 --seconds 3 [--whole GRAPH]

For each quality: one text after the other (the better of one thread and all threads in a run), and as many loops side
by side as there are cores, each with one thread. ``--whole`` adds the same for one graph of the whole network. Prints a
JSON list of rows as :mod:`benchmarks.peers.table` takes them. What a server adds to this is its overhead.
"""

import argparse
import itertools
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.process import status_number
from models.bundle import READ, Bundle, segment_io, state_names
from models.exits import Policy, agree, decide, full_depth, judge
from server.api.depth import choose_depth
from server.api.schemas import ClassifyRequest
from server.engine.sessions import can_pass, load_onnxruntime
from server.load import percentiles
from server.machine import cpu_allowance

Classify = Callable[[str], str]


def open_sessions(graphs: Sequence[Path], threads: int) -> list[Any]:
    ort = load_onnxruntime()
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if len(graphs) > 1:
        # As in server/engine/runner.py: sessions in series spin against each other. A lone one may spin.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return [ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"]) for graph in graphs]


def through_segments(bundle: Bundle, sessions: Sequence[Any], policy: Policy) -> Classify:
    """Classifies a text with a session for each segment."""
    architecture, labels = bundle.manifest.architecture, bundle.manifest.labels
    calibration = bundle.calibration.precisions[bundle.manifest.default_precision]
    temperatures = list(zip(calibration.temperatures, calibration.agreement_temperatures, strict=True))
    names = [segment_io(architecture, number) for number in range(1, len(sessions) + 1)]
    states = [state_names(architecture, number) for number in range(1, len(sessions))]
    passable = [can_pass(session) for session in sessions]

    def classify(text: str) -> str:
        state = first_feeds(bundle, text)
        mask = state["attention_mask"]
        previous, streak = np.array([-1]), np.array([0])
        for number, session in enumerate(sessions, start=1):
            inputs, outputs = names[number - 1]
            feeds = {name: state[name] for name in inputs}
            if not policy.reads(number, len(sessions)) and passable[number - 1]:
                _, *left = session.run(list(outputs), feeds | {READ: np.array(False)})
                state = {"attention_mask": mask, **dict(zip(states[number - 1], left, strict=True))}
                continue
            logits, *left = session.run(list(outputs), feeds)
            verdict = judge(logits, *temperatures[number - 1])
            streak = agree(verdict.labels, previous, streak)
            if decide(verdict, streak, [policy], number, len(sessions))[0]:
                break
            previous = verdict.labels
            state = {"attention_mask": mask, **dict(zip(states[number - 1], left, strict=True))}
        return labels[int(verdict.labels[0])]

    return classify


def through_whole(bundle: Bundle, session: Any) -> Classify:
    """Classifies a text with one graph of the whole network."""

    def classify(text: str) -> str:
        logits = session.run(["logits"], first_feeds(bundle, text))[0]
        return bundle.manifest.labels[int(logits[0].argmax())]

    return classify


def first_feeds(bundle: Bundle, text: str) -> dict[str, Any]:
    architecture, encoded = bundle.manifest.architecture, bundle.encoder.encode(text)
    ids = np.array([encoded.ids], dtype=np.int64)
    offset = architecture.position_offset
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(offset, offset + ids.shape[1], dtype=np.int64)[None],
    }
    if architecture.uses_token_type_ids:
        feeds["token_type_ids"] = np.array([encoded.type_ids], dtype=np.int64)
    return feeds


def policy_of(bundle: Bundle, quality: float) -> Policy:
    """The policy that the server would choose."""
    calibration = bundle.calibration.precisions[bundle.manifest.default_precision]
    exits = len(bundle.manifest.architecture.exits)
    if quality >= 1:
        return full_depth(exits)
    request = ClassifyRequest(inputs="text", quality=quality)
    return choose_depth(request, calibration, exits=exits, default_quality=1.0).policy


def measure(classifiers: Sequence[Classify], texts: Sequence[str], seconds: float) -> dict[str, Any]:
    """A loop in a thread for each of ``classifiers``, for ``seconds``; the fields of a row."""
    taken: list[float] = []
    numbers = itertools.count()

    def loop(classify: Classify) -> None:
        begun = time.perf_counter()
        while True:
            classify(texts[next(numbers) % len(texts)])
            now = time.perf_counter()
            taken.append(now - begun)
            if now >= end:
                return
            begun = now

    threads = [threading.Thread(target=loop, args=(classify,)) for classify in classifiers]
    start, cpu = time.perf_counter(), time.process_time()
    end = start + seconds
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    wall, cpu = time.perf_counter() - start, time.process_time() - cpu
    p50, p90, p99 = percentiles(taken, (50, 90, 99))
    return {
        "seconds": round(wall, 3),
        "requests": len(taken),
        "ok": len(taken),
        "throughput": len(taken) / wall,
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "cpu_ms": 1e3 * cpu / len(taken),
        "peak_rss_mb": status_number(os.getpid(), "VmHWM") / 1024,
    }


def rows_of(
    name: str, lone: Sequence[Classify], many: Sequence[Classify], texts: Sequence[str], seconds: float
) -> list[dict[str, Any]]:
    """Rows of one case: ``lone`` are the ways to run it for one client, ``many`` the loops that run side by side."""
    for classify in [*lone, *many]:
        for text in texts[:5]:
            classify(text)
    alone = min((measure([way], texts, seconds / len(lone)) for way in lone), key=lambda row: row["p50"])
    return [
        {"case": name, "load": "1 client", **alone},
        {"case": name, "load": "16 clients", **measure(many, texts, seconds)},
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="a JSON list")
    parser.add_argument("--qualities", default="1.0", help="separated by commas")
    parser.add_argument("--whole", type=Path, help="a graph of the whole network")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    options = parser.parse_args(arguments)
    bundle, texts = Bundle.load(options.bundle), json.loads(options.texts.read_text(encoding="utf-8"))
    cores = cpu_allowance()
    graphs = [bundle.graph(spec.number) for spec in bundle.manifest.architecture.exits]
    sessions = {threads: open_sessions(graphs, threads) for threads in {1, cores}}
    rows = []
    for quality in map(float, options.qualities.split(",")):
        policy = policy_of(bundle, quality)
        ways = {threads: through_segments(bundle, own, policy) for threads, own in sessions.items()}
        rows += rows_of(f"bare {quality:g}", list(ways.values()), [ways[1]] * cores, texts, options.seconds)
    if options.whole:
        whole = {threads: through_whole(bundle, open_sessions([options.whole], threads)[0]) for threads in {1, cores}}
        rows += rows_of("bare whole graph", list(whole.values()), [whole[1]] * cores, texts, options.seconds)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
