"""Minutes of everything that clients do to a server, and whether it loses, leaks or mixes up anything.

    PYTHONPATH=. python benchmarks/soak.py --file dev.tsv --minutes 10

Serves a copy of the bundle in which one token's embedding is NaN, and keeps so many clients busy, each of which posts
one text or several, of one token up to more than the model takes, at any certified quality or none; hangs up before the
answer now and then; has a poisoned text among its own; or asks for nonsense. Checked: every answer is the one of its
text alone (label, exit, score to 1e-3) or the error that it must be; afterwards nothing waits, no thread was added, the
server's own counts are the clients', and memory has grown by less than 5 % since the warm-up. Exit code 1 where not.
"""

import argparse
import asyncio
import json
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.peers.process import ServerProcess, free_port, serving
from models.bundle import SHIPPED_BUNDLE, Bundle, sha256_of
from training.data import read_table

ROOT = Path(__file__).resolve().parents[1]
SCORE_TOLERANCE = 1e-3
# What the checks allow.
MOST_RSS_GROWTH = 0.05


@dataclass(frozen=True, slots=True)
class Request:
    """A body, and what must come of it: the ``texts`` by number under a ``quality``, or an error with ``status``."""

    body: bytes
    status: int
    texts: tuple[int, ...] = ()
    quality: float | None = None


@dataclass(slots=True)
class Tally:
    """What clients saw: counts of outcomes, and the first few things that were wrong."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def complain(self, words: str) -> None:
        self.seen["WRONG"] += 1
        if len(self.wrong) < 10:
            self.wrong.append(words)


Answers = dict[tuple[float, int], dict[str, Any]]
"""By quality and number of the text: its result, asked alone."""


def poisoned_copy(bundle: Bundle, token: int, target: Path) -> Path:
    """A copy of ``bundle`` at ``target`` that looks NaN up for ``token``, in every precision."""
    shutil.copytree(bundle.path, target)
    manifest = json.loads((target / "manifest.json").read_text(encoding="utf-8"))
    for graphs in manifest["precisions"].values():
        file = target / graphs[0]["file"]
        model = onnx.load(file)
        # fp32: the row itself; int8: what its integers are multiplied with. See training/graphs.py.
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        tensor = stored.get("embeddings.word.table.scale", stored.get("embeddings.word.table"))
        if tensor is None:
            raise ValueError(f"{file}: no table of word embeddings")
        values = numpy_helper.to_array(tensor).copy()
        values[token] = np.nan
        tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))
        onnx.save(model, file)
        graphs[0] |= {"sha256": sha256_of(file), "bytes": file.stat().st_size}
    (target / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return target


def rare_word(bundle: Bundle, texts: Sequence[str]) -> tuple[str, int]:
    """A word that is one token of the model's and in none of ``texts``, and that token."""
    used = {token for text in texts for token in bundle.encoder.encode(text).ids}
    vocabulary = json.loads((bundle.path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    blank = len(bundle.encoder.encode("").ids)
    for word, token in sorted(vocabulary.items(), key=lambda item: -item[1]):
        ids = bundle.encoder.encode(word).ids
        # The largest id goes through every segment when the server warms up, so it must stay whole.
        usable = len(ids) == blank + 1 and token in ids and token not in used and token != bundle.encoder.largest_id
        if usable and word.isascii() and word.isalpha():
            return word, token
    raise ValueError("no word is left to poison")


def long_and_short(texts: Sequence[str], longest: int) -> list[str]:
    """``texts``, and as many more of every length up to beyond ``longest`` tokens, made of their words."""
    draw = random.Random(0)
    words = [word for text in texts for word in text.split()]
    made = [" ".join(draw.choices(words, k=length)) for length in range(1, longest + 20)]
    return [*texts, *made]


class Mix:
    """Draws requests: what they ask, and what must come of it."""

    def __init__(self, texts: Sequence[str], qualities: Sequence[float], poison: str, seed: int) -> None:
        self._texts, self._qualities, self._poison = texts, qualities, poison
        self._draw = random.Random(seed)

    def request(self) -> Request:
        kind = self._draw.random()
        if kind < 0.03:
            return self._nonsense()
        count = 1 if kind < 0.8 else self._draw.choice((2, 3, 8, 32))
        numbers = tuple(self._draw.randrange(len(self._texts)) for _ in range(count))
        inputs = [self._texts[number] for number in numbers]
        quality = self._draw.choice(self._qualities)
        wish = {"quality": quality}
        if self._draw.random() < 0.05:
            inputs.insert(self._draw.randrange(count + 1), f"{inputs[0]} {self._poison}"[-200:])
            return Request(_json({"inputs": inputs, **wish}), 500)
        return Request(_json({"inputs": inputs[0] if count == 1 else inputs, **wish}), 200, numbers, quality)

    def _nonsense(self) -> Request:
        return self._draw.choice(
            (
                Request(b"{", 400),
                Request(_json({"inputs": "a", "quality": 2}), 422),
                Request(_json({"inputs": []}), 422),
                Request(_json({"inputs": "  "}), 422),
                Request(_json({"inputs": "a", "model": "none"}), 404),
                Request(_json({"inputs": ["a"] * 4000}), 413),
            )
        )

    def hangs_up_after(self) -> float | None:
        """Seconds after which the client leaves, whatever has come by then; mostly never."""
        return self._draw.expovariate(200) if self._draw.random() < 0.1 else None


def _json(document: object) -> bytes:
    return json.dumps(document).encode()


async def post(port: int, body: bytes, leave_after: float | None = None) -> tuple[int, bytes] | None:
    """Status and body of a POST on a connection of its own; ``None`` where the client left first."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /classify HTTP/1.1\r\nhost: soak\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        try:
            raw = await asyncio.wait_for(reader.read(), 60 if leave_after is None else leave_after)
        except TimeoutError:
            if leave_after is not None:
                return None
            raise
    finally:
        writer.close()
    head_bytes, _, content = raw.partition(b"\r\n\r\n")
    declared = re.search(rb"content-length: (\d+)", head_bytes)
    if not declared or len(content) != int(declared[1]):
        raise ConnectionError(f"cut short: {raw[:100]!r}")
    return int(raw.split(b" ", 2)[1]), content


async def answers_alone(port: int, texts: Sequence[str], qualities: Sequence[float]) -> Answers:
    """What every text gets with nobody beside it."""
    found: Answers = {}
    for quality in qualities:
        for number, text in enumerate(texts):
            reply = await post(port, _json({"inputs": text, "quality": quality}))
            assert reply and reply[0] == 200, reply
            found[quality, number] = json.loads(reply[1])["results"][0]
    return found


async def client(port: int, mix: Mix, alone: Answers, tally: Tally, until: float) -> None:
    """Posts what ``mix`` draws until the clock says ``until``."""
    while time.monotonic() < until:
        request = mix.request()
        try:
            reply = await post(port, request.body, mix.hangs_up_after())
        except (OSError, TimeoutError) as error:
            tally.complain(f"no answer to {request.body[:80]!r}: {error!r}")
            continue
        if reply is None:
            tally.seen["left"] += 1
            continue
        tally.seen[str(reply[0])] += 1
        if problem := problem_with(request, *reply, alone):
            tally.complain(f"{request.body[:80]!r}: {problem}")


def problem_with(request: Request, status: int, body: bytes, alone: Answers) -> str:
    """What is wrong with an answer; empty where nothing is."""
    if status == 429:
        return ""
    if status != request.status:
        return f"{status}, not {request.status}: {body[:200]!r}"
    document = json.loads(body)
    if status != 200:
        kind = document["error"]["type"]
        return "" if status != 500 or kind == "nonfinite" else f"error of type {kind}"
    results = document["results"]
    if len(results) != len(request.texts):
        return f"{len(results)} results for {len(request.texts)} texts"
    for number, result in zip(request.texts, results, strict=True):
        expected = alone[request.quality or 0.0, number]
        same = result["label"] == expected["label"] and result["exit"]["number"] == expected["exit"]["number"]
        if not same or abs(result["score"] - expected["score"]) > SCORE_TOLERANCE:
            return f"text {number}: {result} and not {expected}"
    return ""


def metric(port: int, name: str) -> float:
    """The sum of all series of ``offramp_<name>``."""
    return _sum_of(port, rf"offramp_{name}(?:\{{.*\}})?")


def posted(port: int) -> float:
    """Requests to /classify that the server has counted, by its own metrics."""
    return _sum_of(port, r'offramp_requests_total\{.*route="/classify".*\}')


def _sum_of(port: int, series: str) -> float:
    """The sum of the values on the server's page whose series matches the whole pattern ``series``."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        page = response.read().decode()
    return sum(map(float, re.findall(rf"^{series} (\S+)$", page, re.MULTILINE)))


async def soak(port: int, server: ServerProcess, texts: Sequence[str], poison: str, options: Any) -> list[str]:
    """Runs it all; what was wrong, in words."""
    alone = await answers_alone(port, texts, options.qualities)
    counted_before = posted(port)
    tally = Tally()
    start = time.monotonic()
    end = start + 60 * options.minutes
    mixes = [Mix(texts, options.qualities, poison, seed) for seed in range(options.clients)]
    clients = [asyncio.ensure_future(client(port, mix, alone, tally, end)) for mix in mixes]
    threads, warm = 0, 0.0
    while (now := time.monotonic()) < end:
        await asyncio.sleep(min(end - now + 0.01, 60 * options.minutes / 20))
        rss = server.rss_mb()
        seen = f"{time.monotonic() - start:6.0f} s  {rss:7.1f} MB  {server.threads()} threads  {dict(tally.seen)}"
        print(seen, flush=True)
        if not warm and time.monotonic() - start >= 60 * options.minutes / 5:
            warm, threads = rss, server.threads()
    await asyncio.gather(*clients)
    # What one process says of the others is up to a second old.
    await asyncio.sleep(3)
    problems = list(tally.wrong)
    if metric(port, "inflight_requests"):
        problems.append("requests are in flight after the last client has gone")
    if metric(port, "queue_depth"):
        problems.append("texts wait after the last client has gone")
    if server.threads() > threads:
        problems.append(f"{server.threads()} threads, and {threads} after the warm-up")
    grown = server.rss_mb() / warm - 1
    print(f"memory {100 * grown:+.1f} % since {warm:.1f} MB after the warm-up")
    if grown > MOST_RSS_GROWTH:
        problems.append(f"memory has grown by {100 * grown:.1f} %")
    sent, counted = sum(tally.seen.values()) - tally.seen["WRONG"], posted(port) - counted_before
    # Whoever left before the server had read its request was never counted.
    if not sent - tally.seen["left"] <= counted <= sent:
        problems.append(
            f"clients posted {sent:.0f} requests and left {tally.seen['left']}; the server says {counted:.0f}"
        )
    if not tally.seen["200"] or not tally.seen["500"] or not tally.seen["left"]:
        problems.append(f"too short to have met everything: {dict(tally.seen)}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--bundle", type=Path, default=SHIPPED_BUNDLE, help="default: the shipped one")
    parser.add_argument("--file", required=True, help="texts: .csv, .tsv or .jsonl")
    parser.add_argument("--text-column", default="sentence")
    parser.add_argument("--label-column", default="label")
    parser.add_argument("--texts", type=int, default=200, help="so many of the file's, and some of every length")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument(
        "--qualities", type=lambda text: [float(q) for q in text.split(",")], help="default: all certified, and 1.0"
    )
    options = parser.parse_args()
    bundle = Bundle.load(options.bundle)
    calibration = bundle.calibration.precisions[bundle.manifest.default_precision]
    options.qualities = options.qualities or [*(tier.quality for tier in calibration.certified), 1.0]
    table = read_table(options.file, options.text_column, options.label_column)
    given = [example.text for example in table.examples][: options.texts]
    texts = long_and_short(given, bundle.manifest.architecture.max_length)
    poison, token = rare_word(bundle, texts)
    with tempfile.TemporaryDirectory(prefix="offramp-soak-") as name:
        copy = poisoned_copy(bundle, token, Path(name) / bundle.manifest.name)
        port, log = free_port(), Path(name) / "log"
        command = [sys.executable, "-m", "offramp", "serve", str(copy), "--port", str(port), "--log-level", "error"]
        with serving(command, port=port, log=log, environment={"PYTHONPATH": str(ROOT)}, cwd=ROOT) as server:
            problems = asyncio.run(soak(port, server, texts, poison, options))
            status = server.stop()
    if status:
        problems.append(f"the server ended with status {status} after SIGTERM")
    print("\n".join(problems) or "nothing lost, nothing mixed up, nothing leaked")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
