"""Everything about Offramp on a GPU in one run: is it right, how fast is it, how far from what the chip could do.

    PYTHONPATH=. python -m benchmarks.gpu.measure --seconds 460 --output results.json
    PYTHONPATH=. python -m benchmarks.gpu.measure --rehearse      # the same code on the CPU, tiny

A BERT-base of random weights with an exit after each of its 12 layers, at 64 and 128 tokens: Offramp's engine (real
scheduler, exits read and judged, no HTTP) beside the same network without exits in one ONNX Runtime session, in torch,
and in torch.compile, all fp16. Where a text leaves is dealt out beforehand, as at the certified tiers of the shipped
bundle (:data:`TIERS`), since random weights know no easy texts. Each stage prints as it ends and is left out where time
is up, so a run that is cut short has said what it knows.
"""

import argparse
import asyncio
import contextlib
import json
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

# Before onnxruntime: the CUDA libraries that it needs are those that torch brings.
import torch

from models.architecture import Architecture, ExitSpec
from models.bundle import Bundle, Precision
from models.costs import exit_costs, layer_cost
from models.exits import Policy
from models.tokenization import Encoded
from server.engine.cuda import versions
from server.engine.device import Buckets, DeviceRunner
from server.engine.engine import Engine
from server.engine.request import Answer, Failure, Text
from server.engine.runner import Runner
from training.graphs import build_segments, weight_shapes

LAYERS = 12
# Exits that texts leave at, of 12 layers, and the share of each: the shipped bundle's certified tiers on SST-2's 872
# development texts, its exits after 0, 1, 2, 3 and 6 of 6 layers moved to the next whole layer of twice as many.
TIERS = {
    "full depth": {12: 1.0},
    "0.99": {1: 0.252, 3: 0.122, 5: 0.280, 7: 0.237, 12: 0.109},
    "0.95": {1: 0.533, 3: 0.140, 5: 0.169, 7: 0.107, 12: 0.051},
}
# What one submission brings: less of the measurement is then asyncio's.
TEXTS_OF_A_REQUEST = 16


@dataclass(frozen=True)
class Scale:
    """How large a run is."""

    device: str
    hidden: int
    heads: int
    vocabulary: int
    lengths: tuple[int, ...]
    batches: tuple[int, ...]
    in_flight: int
    lone_texts: int
    seconds: float
    matrix: int
    megabytes: int
    compile_backend: str


GPU = Scale("cuda", 768, 12, 30522, (64, 128), (64, 128, 256), 1024, 200, 5.0, 8192, 2048, "inductor")
REHEARSAL = Scale("cpu", 32, 2, 100, (8, 16), (4,), 32, 3, 0.2, 64, 1, "eager")


@dataclass
class Report:
    """Rows of the tables, printed as they come in and written as JSON at the end."""

    facts: dict[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def fact(self, name: str, value: Any) -> None:
        self.facts[name] = value
        print(f"{name}: {value}", flush=True)

    def row(self, **values: Any) -> None:
        self.rows.append(values)
        print("  ".join(f"{name} {_shown(value)}" for name, value in values.items()), flush=True)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class ReadyIds:
    """An encoder whose texts are ready: the ids of every text are ``length`` random ones. Tokenizing is measured
    elsewhere (docs/performance.md), and the same for all."""

    def __init__(self, length: int, vocabulary: int) -> None:
        ids = np.random.default_rng(length).integers(1, vocabulary, length).tolist()
        self._encoded = Encoded(ids, [0] * length, length)
        self.max_length = length
        self.largest_id = vocabulary - 1

    def encode(self, text: str, pair: str | None = None) -> Encoded:
        return self._encoded if text else Encoded([], [], 0)

    def largest_type_id(self, *, pair: bool) -> int:
        return 0


class Silent:
    """An observer that counts nothing."""

    def segment_ran(self, segment: int, texts: int, seconds: float) -> None: ...
    def answered(self, answer: Answer) -> None: ...
    def failed(self, failure: Failure) -> None: ...
    def cancelled(self) -> None: ...
    def checked(self, tier: float, agrees: bool) -> None: ...


def architecture_of(scale: Scale, exits: Sequence[int]) -> Architecture:
    """The network with [CLS] exits after these layers."""
    return Architecture(
        backbone="random",
        num_layers=LAYERS,
        hidden_size=scale.hidden,
        embedding_size=scale.hidden,
        num_heads=scale.heads,
        intermediate_size=4 * scale.hidden,
        vocab_size=scale.vocabulary,
        max_length=max(scale.lengths),
        layer_norm_eps=1e-12,
        num_labels=2,
        exits=tuple(ExitSpec(number=at, after_layer=layer, head="cls") for at, layer in enumerate(exits, start=1)),
    )


def random_weights(architecture: Architecture) -> dict[str, Any]:
    """As transformers draws them, with gains of 1."""
    draw = np.random.default_rng(0)
    weights = {}
    for name, shape in weight_shapes(architecture).items():
        gain = np.float32(name.endswith("norm.weight"))
        weights[name] = gain + np.float32(0.03) * draw.standard_normal(shape, dtype=np.float32)
    return weights


def of_the_last_exit(weights: dict[str, Any]) -> dict[str, Any]:
    """The weights of the same network without the exits on the way."""
    kept = {name: array for name, array in weights.items() if not name.startswith("exits.")}
    own = f"exits.{LAYERS}."
    return kept | {name.replace(own, "exits.1."): array for name, array in weights.items() if name.startswith(own)}


def as_bundle(architecture: Architecture, paths: Sequence[Path], length: int, scale: Scale) -> Bundle:
    """As much of a bundle as a runner asks for."""
    manifest = SimpleNamespace(architecture=architecture, labels=("no", "yes"), takes_pairs=False)
    encoder = ReadyIds(length, scale.vocabulary)
    return cast(Bundle, SimpleNamespace(manifest=manifest, encoder=encoder, graph=lambda number, _: paths[number - 1]))


# --- is it right? -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Item:
    ids: Any
    type_ids: Any
    state: Any = ()


def logits_of(runner: Runner | DeviceRunner, segments: int, texts: Sequence[Any]) -> Any:
    """Logits ``[E, N, K]`` of texts (arrays of ids) that run together."""
    items = [_Item(ids, np.zeros_like(ids)) for ids in texts]
    found = []
    for segment in range(1, segments + 1):
        output = runner.run(segment, items)
        states = output.carry(range(len(items)))
        items = [_Item(item.ids, item.type_ids, state) for item, state in zip(items, states, strict=True)]
        found.append(np.array(output.logits))
    return np.stack(found)


def check(report: Report, scale: Scale, runner: DeviceRunner, exact: Runner) -> None:
    """Compares fp16 on the device with fp32 on the CPU, for texts of several lengths, together and alone."""
    random = np.random.default_rng(1)
    longest = max(scale.lengths)
    texts = [random.integers(1, scale.vocabulary, length) for length in (longest, longest // 2, 5, longest - 3, 3)]
    wanted = logits_of(exact, LAYERS, texts)
    # More than once: graphs must give the same whatever ran before.
    together = [logits_of(runner, LAYERS, texts) for _ in range(3)]
    alone = np.concatenate([logits_of(runner, LAYERS, [text]) for text in texts], axis=1)
    report.fact("largest difference from fp32 on the CPU", max(float(abs(one - wanted).max()) for one in together))
    report.fact("largest difference between runs", max(float(abs(one - together[0]).max()) for one in together))
    report.fact("largest difference alone and in company", float(abs(alone - together[0]).max()))
    report.fact("same labels as fp32", float((together[0].argmax(-1) == wanted.argmax(-1)).mean()))


# --- how fast? --------------------------------------------------------------------------------------------------------


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    milliseconds = 1000 * np.asarray(seconds)
    return {"p50 ms": float(np.percentile(milliseconds, 50)), "p99 ms": float(np.percentile(milliseconds, 99))}


def timed(call: Callable[[], object], times: int) -> list[float]:
    """Seconds of each call, after a few that do not count."""
    for _ in range(3):
        call()
    taken = []
    for _ in range(times):
        started = time.perf_counter()
        call()
        taken.append(time.perf_counter() - started)
    return taken


@contextlib.contextmanager
def busy_share(device: str) -> Iterator[list[float]]:
    """Collects the percentages of time in which kernels ran, as the driver counts them (nothing without one)."""
    found: list[float] = []
    if device == "cpu" or shutil.which("nvidia-smi") is None:
        yield found
        return
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "100"]
    watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert watcher.stdout is not None
    lines = watcher.stdout
    reader = threading.Thread(target=lambda: found.extend(float(line) for line in lines if line.strip().isdigit()))
    reader.start()
    try:
        yield found
    finally:
        watcher.terminate()
        watcher.wait()
        reader.join()


def policies_for(shares: dict[int, float], count: int) -> list[Policy]:
    """``count`` policies that leave where ``shares`` say, in random order; every exit on the way is read."""
    layers = np.random.default_rng(2).choice(list(shares), size=count, p=list(shares.values()))
    # No confidence exceeds 1, so a text leaves at its max_exit and nowhere else.
    return [Policy("confidence", 1.0, min_exit=int(layer), max_exit=int(layer)) for layer in layers]


async def saturated(engine: Engine, shares: dict[int, float], scale: Scale) -> float:
    """Texts a second with ``scale.in_flight`` of them always in work."""
    policies = policies_for(shares, 4096)
    size = min(TEXTS_OF_A_REQUEST, scale.in_flight)
    texts = [Text("text")] * size
    end, answered = float("inf"), 0

    async def client(number: int) -> None:
        nonlocal answered
        at = number
        while time.perf_counter() < end:
            chosen = [policies[(at + place) % len(policies)] for place in range(size)]
            at += size
            submitted = await engine.submit(texts, chosen)
            counted = [outcome for outcome in submitted.outcomes if isinstance(outcome, Answer)]
            if time.perf_counter() < end:
                answered += len(counted)

    clients = [asyncio.create_task(client(97 * number)) for number in range(max(1, scale.in_flight // size))]
    await asyncio.sleep(scale.seconds / 4)
    started, answered = time.perf_counter(), 0
    end = started + scale.seconds
    await asyncio.gather(*clients)
    return answered / scale.seconds


async def lone(engine: Engine, shares: dict[int, float], scale: Scale) -> list[float]:
    """Seconds of texts that come one after the other."""
    taken = []
    for policy in policies_for(shares, scale.lone_texts):
        started = time.perf_counter()
        await engine.submit([Text("text")], [policy])
        taken.append(time.perf_counter() - started)
    return taken


async def measure_engine(
    report: Report, scale: Scale, runner: DeviceRunner, length: int, left: Callable[[], float]
) -> None:
    texts = max(scale.batches)
    latency = runner.measure(texts * length, texts, seconds=min(3.0, scale.seconds))
    engine = Engine(
        runner=runner,
        encoder=cast(Any, ReadyIds(length, scale.vocabulary)),
        temperatures=[1.0] * LAYERS,
        agreement_temperatures=[1.0] * LAYERS,
        observer=Silent(),
        workers=len(runner._all_lanes),
        max_queue=4 * scale.in_flight,
        max_batch_tokens=texts * length,
        max_batch_texts=texts,
        latency=latency,
    )
    await engine.start()
    for tier, shares in TIERS.items():
        if left() < 3 * scale.seconds:
            break
        alone = percentiles(await lone(engine, shares, scale))
        with busy_share(scale.device) as busy:
            rate = await saturated(engine, shares, scale)
        idle = 100 - float(np.mean(busy)) if busy else None
        report.row(what="offramp", tier=tier, length=length, **alone, **{"texts/s": rate, "idle %": idle})
    await engine.close()


def measure_monolith(report: Report, scale: Scale, runner: DeviceRunner, length: int) -> None:
    """The network without exits: one session, the same buffers and CUDA graphs; two lanes keep the device busy."""
    ids = np.random.default_rng(3).integers(1, scale.vocabulary, length)
    item = _Item(ids, np.zeros_like(ids))
    alone = percentiles(timed(lambda: runner.run(1, [item]), scale.lone_texts))
    best = 0.0
    with ThreadPoolExecutor(max_workers=2) as pool:
        for batch in scale.batches:
            items = [item] * batch
            timed(lambda items=items: runner.run(1, items), 4)  # type: ignore[misc]
            end = time.perf_counter() + scale.seconds / len(scale.batches)

            def work(items: Sequence[_Item] = items, end: float = end) -> int:
                runs = 0
                while time.perf_counter() < end:
                    runner.run(1, items)
                    runs += 1
                return runs

            started = time.perf_counter()
            runs = sum(future.result() for future in [pool.submit(work), pool.submit(work)])
            best = max(best, runs * batch / (time.perf_counter() - started))
    report.row(what="one ORT session", tier="full depth", length=length, **alone, **{"texts/s": best})


def measure_torch(report: Report, scale: Scale, length: int, *, compiled: bool) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        vocab_size=scale.vocabulary,
        hidden_size=scale.hidden,
        num_hidden_layers=LAYERS,
        num_attention_heads=scale.heads,
        intermediate_size=4 * scale.hidden,
        max_position_embeddings=512,
    )
    dtype = torch.float16 if scale.device == "cuda" else torch.float32
    model: Any = BertForSequenceClassification(config).eval().to(scale.device, dtype)
    if compiled:
        mode = "reduce-overhead" if scale.compile_backend == "inductor" else None
        model = torch.compile(model, backend=scale.compile_backend, mode=mode, dynamic=False)

    def run(batch: int) -> Callable[[], object]:
        ids = torch.randint(1, scale.vocabulary, (batch, length), device=scale.device)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        def call() -> object:
            return model(**inputs).logits.cpu()

        return call

    with torch.inference_mode():
        alone = percentiles(timed(run(1), scale.lone_texts))
        # Each further shape is another minute of compiling.
        batches = scale.batches[-1:] if compiled else scale.batches
        rates = []
        for batch in batches:
            call = run(batch)
            one = float(np.median(timed(call, 3)))
            times = max(3, int(scale.seconds / len(batches) / one))
            rates.append(batch / float(np.mean(timed(call, times))))
    what = "torch.compile" if compiled else "torch eager"
    report.row(what=what, tier="full depth", length=length, **alone, **{"texts/s": max(rates)})


# --- how far from what the chip could do? -----------------------------------------------------------------------------


def ceilings(scale: Scale) -> tuple[float, float]:
    """FLOP/s of a large fp16 product, and bytes/s of a copy, both as torch gets them here."""
    dtype = torch.float16 if scale.device == "cuda" else torch.float32
    left = torch.randn(scale.matrix, scale.matrix, device=scale.device, dtype=dtype)
    source = torch.empty(scale.megabytes * 2**20, dtype=torch.uint8, device=scale.device)
    target = torch.empty_like(source)

    def synchronise() -> None:
        if scale.device == "cuda":
            torch.cuda.synchronize()

    def product() -> None:
        torch.matmul(left, left)
        synchronise()

    def copy() -> None:
        target.copy_(source)
        synchronise()

    flops = 2 * scale.matrix**3 / min(timed(product, 20))
    return flops, 2 * source.numel() / min(timed(copy, 20))


def roofline(architecture: Architecture, length: int, shares: dict[int, float], batch: int) -> tuple[float, float]:
    """FLOPs and bytes that a text needs at least: bytes are the weights of each segment once for ``batch`` texts, and
    the state of its tokens read and written once a segment (fp16)."""
    until = exit_costs(architecture, length) * 2 * layer_cost(architecture, length)
    h, inner = architecture.hidden_size, architecture.intermediate_size
    of_segment = 2 * (4 * h * h + 2 * h * inner) / batch + 2 * 2 * h * length
    flops = sum(share * float(until[exit - 1]) for exit, share in shares.items())
    return flops, sum(share * exit * of_segment for exit, share in shares.items())


def conclude(report: Report, scale: Scale, architecture: Architecture, ceiling: tuple[float, float]) -> None:
    """Ratios to the monolith, and shares of the roofline."""
    for length in scale.lengths:
        rows = [row for row in report.rows if row["length"] == length]
        base = next((row for row in rows if row["what"] == "one ORT session"), None)
        if base is None:
            continue
        for row in rows:
            flops, moved = roofline(architecture, length, TIERS[row["tier"]], max(scale.batches))
            ideal = max(flops / ceiling[0], moved / ceiling[1])
            row["throughput / monolith"] = row["texts/s"] / base["texts/s"]
            row["p50 / monolith"] = row["p50 ms"] / base["p50 ms"]
            row["share of roofline %"] = 100 * ideal * row["texts/s"]
    print("\n| what | tier | tokens | p50 ms | p99 ms | texts/s | × monolith | p50 × monolith | roofline % | idle % |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in report.rows:
        names = ("what", "tier", "length", "p50 ms", "p99 ms", "texts/s", "throughput / monolith", "p50 / monolith")
        cells = [_shown(row.get(name, "–")) for name in (*names, "share of roofline %", "idle %")]
        print(f"| {' | '.join('–' if cell == 'None' else cell for cell in cells)} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: does every stage run?")
    parser.add_argument("--seconds", type=float, default=460.0, help="when to stop beginning new stages")
    parser.add_argument("--output", type=Path, help="write everything as JSON there")
    options = parser.parse_args()
    scale, end = REHEARSAL if options.rehearse else GPU, time.perf_counter() + options.seconds
    report, threads = Report(), torch.get_num_threads()
    try:
        if options.rehearse:
            # Tensors this small gain nothing from a second thread, which on a busy machine costs seconds.
            torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="offramp-gpu-") as scratch:
            measure(report, scale, Path(scratch), lambda: end - time.perf_counter())
    finally:
        torch.set_num_threads(threads)
        if options.output is not None:
            options.output.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")


def measure(report: Report, scale: Scale, scratch: Path, left: Callable[[], float]) -> None:
    """All stages, the most telling first."""
    begun = left()
    name = torch.cuda.get_device_name() if scale.device == "cuda" else "CPU (rehearsal)"
    report.fact("device", f"{name}, {versions()}, torch {torch.__version__}")
    ceiling = ceilings(scale)
    report.fact("ceilings", f"{ceiling[0] / 1e12:.3g} TFLOP/s, {ceiling[1] / 1e12:.3g} TB/s")
    whole = architecture_of(scale, [LAYERS])
    stepped = architecture_of(scale, range(1, LAYERS + 1))
    weights = random_weights(stepped)
    precisions: tuple[Precision, ...] = ("fp32", "fp16")
    paths = {one: build_segments(stepped, weights, one, scratch / one) for one in precisions}
    alone = build_segments(whole, of_the_last_exit(weights), "fp16", scratch / "whole")
    report.fact("seconds to make the graphs", round(begun - left(), 1))
    longest, texts = max(scale.lengths), max(scale.batches)
    buckets = Buckets(Buckets.up_to(texts, longest).texts, (longest // 16, *scale.lengths))
    settings: dict[str, Any] = {"device": scale.device, "threads": 1, "lanes": 2, "buckets": buckets}
    settings["store_tokens"] = 2 * scale.in_flight * longest + texts * longest
    offramp = DeviceRunner(as_bundle(stepped, paths["fp16"], longest, scale), **settings)
    exact = Runner(as_bundle(stepped, paths["fp32"], longest, scale), precision="fp32", device="cpu", threads=4)
    monolith = DeviceRunner(as_bundle(whole, alone, longest, scale), **settings)
    for runner in (offramp, monolith):
        report.fact("sizes with CUDA graphs", runner.capture(texts * longest, seconds=30.0))
    check(report, scale, offramp, exact)
    stages: list[Callable[[int], object]] = [
        lambda length: measure_monolith(report, scale, monolith, length),
        lambda length: asyncio.run(measure_engine(report, scale, offramp, length, left)),
        lambda length: measure_torch(report, scale, length, compiled=False),
        lambda length: measure_torch(report, scale, length, compiled=True),
    ]
    for stage in stages:
        for length in sorted(scale.lengths, reverse=True):
            if left() > 4 * scale.seconds:
                stage(length)
    conclude(report, scale, stepped, ceiling)


if __name__ == "__main__":
    main()
