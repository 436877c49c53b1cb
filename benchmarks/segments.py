"""What a text costs until each exit, on this machine: times of the exported segments with random MiniLM-L6 weights.

    PYTHONPATH=. python benchmarks/segments.py --exits 0:peek,1:peek,3:peek,6:attention --lengths 128,20,30,60

prints, for the texts padded and packed and for each exit, milliseconds until its logits are there (lower quartile of
the runs; wall clock, and CPU time of all threads, which is the one to compare on a busy machine). ``--operators`` adds
where runs of all segments spend their time, by operator, as ONNX Runtime's profiler sees it (it adds some microseconds
to each).
"""

import argparse
import json
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from models.architecture import Architecture, ExitSpec
from models.bundle import READ, segment_io, state_names
from training.graph_format import Weights
from training.graphs import build_segments, weight_shapes

WARM_UP = 5


def minilm(exits: str) -> Architecture:
    pairs = [part.split(":") for part in exits.split(",")]
    return Architecture(
        backbone="random",
        num_layers=6,
        hidden_size=384,
        embedding_size=384,
        num_heads=12,
        intermediate_size=1536,
        vocab_size=30522,
        max_length=512,
        layer_norm_eps=1e-12,
        num_labels=2,
        exits=tuple(
            ExitSpec.model_validate({"number": number, "after_layer": int(layer), "head": head})
            for number, (layer, head) in enumerate(pairs, start=1)
        ),
    )


def random_weights(architecture: Architecture) -> Weights:
    draw = np.random.default_rng(0)
    return {
        name: (draw.standard_normal(shape) * 0.05 + (name.endswith("norm.weight"))).astype(np.float32)
        for name, shape in weight_shapes(architecture).items()
    }


def open_segments(paths: list[Path], threads: int, profile: str | None) -> list[onnxruntime.InferenceSession]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    if profile:
        options.enable_profiling = True
        options.profile_file_prefix = profile
    return [onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"]) for path in paths]


def run(
    architecture: Architecture, sessions: list[onnxruntime.InferenceSession], feed: dict[str, Any], passing: bool
) -> list[tuple[float, float]]:
    """Runs all segments once, ``passing`` all exits but the last unread; (wall, CPU) seconds of each."""
    state, taken = dict(feed), []
    for number, session in enumerate(sessions, start=1):
        inputs, outputs = segment_io(architecture, number)
        feeds = {name: state[name] for name in inputs}
        if passing and number < len(sessions):
            feeds[READ] = np.array(False)
        wall, cpu = time.perf_counter(), time.process_time()
        found = session.run(list(outputs), feeds)
        taken.append((time.perf_counter() - wall, time.process_time() - cpu))
        if number < len(sessions):
            state = {"attention_mask": feed["attention_mask"]}
            state |= zip(state_names(architecture, number), found[1:], strict=True)
    return taken


def padded(lengths: list[int], vocabulary: int) -> dict[str, Any]:
    """Inputs of segment 1 for texts of these ``lengths`` of random ids, a row for each."""
    shape = (len(lengths), max(lengths))
    positions = np.broadcast_to(np.arange(shape[1]), shape)
    return {
        "input_ids": np.random.default_rng(0).integers(1, vocabulary, shape),
        "attention_mask": (positions < np.array(lengths)[:, None]).astype(np.int64),
        "position_ids": np.ascontiguousarray(positions),
        "token_type_ids": np.zeros(shape, np.int64),
    }


def packed(lengths: list[int], vocabulary: int) -> dict[str, Any]:
    """The same side by side in one row."""
    tokens = sum(lengths)
    return {
        "input_ids": np.random.default_rng(0).integers(1, vocabulary, (1, tokens)),
        "attention_mask": np.repeat(np.arange(1, len(lengths) + 1), lengths)[None],
        "position_ids": np.concatenate([np.arange(length) for length in lengths])[None],
        "token_type_ids": np.zeros((1, tokens), np.int64),
    }


def operators(sessions: list[onnxruntime.InferenceSession], runs: int) -> Counter[str]:
    """Microseconds per run by operator type."""
    spent: Counter[str] = Counter()
    for session in sessions:
        for event in json.loads(Path(session.end_profiling()).read_text(encoding="utf-8")):
            if event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
                spent[event["args"]["op_name"]] += event["dur"] / runs
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--exits", default="0:peek,1:peek,2:peek,3:peek,5:peek", help="after_layer:head, ...")
    parser.add_argument("--precision", choices=["fp32", "int8"], default="int8")
    parser.add_argument("--lengths", default="25", help="tokens of each text of the batch, as 25,25,12")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--passing", action="store_true", help="leave out what all exits but the last need")
    parser.add_argument("--operators", action="store_true", help="profile the runs")
    options = parser.parse_args()

    architecture = minilm(options.exits)
    lengths = [int(length) for length in options.lengths.split(",")]
    feeds = {"padded": padded(lengths, architecture.vocab_size), "packed": packed(lengths, architecture.vocab_size)}
    with tempfile.TemporaryDirectory() as folder:
        paths = build_segments(architecture, random_weights(architecture), options.precision, Path(folder))
        print(
            f"{options.precision}: {sum(path.stat().st_size for path in paths) / 1e6:.1f} MB in {len(paths)} segments"
        )
        sessions = open_segments(paths, options.threads, f"{folder}/profile" if options.operators else None)
        taken: dict[str, list[Any]] = {layout: [] for layout in feeds}
        # Alternating, so that a busy minute of the machine falls on both.
        for number in range(WARM_UP + options.runs):
            for layout, feed in feeds.items():
                seconds = run(architecture, sessions, feed, options.passing)
                if number >= WARM_UP:
                    taken[layout].append(seconds)
        for layout, found in taken.items():
            until = 1e3 * np.cumsum(np.quantile(np.array(found), 0.25, axis=0), axis=0)
            for spec, (wall, cpu) in zip(architecture.exits, until, strict=True):
                name = f"{layout}, exit {spec.number} ({spec.head} after layer {spec.after_layer})"
                print(f"{name:38} {wall:7.2f} ms, CPU {cpu:7.2f} ms")
        if options.operators:
            spent = operators(sessions, len(feeds) * (WARM_UP + options.runs))
            for name, microseconds in spent.most_common(15):
                print(f"  {name:24} {microseconds:8.0f} us  {100 * microseconds / spent.total():5.1f} %")


if __name__ == "__main__":
    main()
