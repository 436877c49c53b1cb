"""What is compared: the programs that are started, and the cases that each of them serves."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.network import Whole
from server.load import Target

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Case:
    """One way to ask a server: ``body`` makes a request's JSON of a text, ``label`` and ``exit_number`` read its answer
    (exit 0 where there are none)."""

    name: str
    route: str
    body: Callable[[str], object]
    label: Callable[[bytes], str]
    exit_number: Callable[[bytes], int] = lambda _: 0

    def requests(self, port: int, texts: Sequence[str]) -> list[bytes]:
        """Each text's request, as it goes over the wire to ``port``."""
        target = Target.parse(f"http://127.0.0.1:{port}")
        return [target.post(self.route, json.dumps(self.body(text)).encode()) for text in texts]


@dataclass(frozen=True, slots=True)
class Program:
    """A server: ``command`` for a port, and the ``cases`` to measure while it runs."""

    name: str
    command: Callable[[int], list[str]]
    cases: tuple[Case, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def offramp_case(quality: float) -> Case:
    return Case(
        f"offramp {quality:g}",
        "/classify",
        lambda text: {"inputs": text, "quality": quality},
        lambda body: json.loads(body)["results"][0]["label"],
        lambda body: json.loads(body)["results"][0]["exit"]["number"],
    )


def plain_case(name: str, route: str) -> Case:
    """For servers of ours that take a text and answer with a label."""
    return Case(name, route, lambda text: {"text": text}, lambda body: json.loads(body)["label"])


def infinity_label(body: bytes) -> str:
    scores = json.loads(body)["data"][0]
    return max(scores, key=lambda score: score["score"])["label"]


def programs(bundle: Path, qualities: Sequence[float], whole: Whole, environments: Path) -> list[Program]:
    """All servers, in the order of the tables. Peers with dependencies of their own live in ``environments``."""

    def installed(name: str, program: str) -> str:
        return str(environments / f"bench-{name}" / "bin" / program)

    def fastapi(precision: str) -> Program:
        return Program(
            f"fastapi {precision}",
            lambda port: [
                *(sys.executable, "-m", "uvicorn", "benchmarks.peers.fastapi_app:app"),
                *("--port", str(port), "--log-level", "warning"),
            ],
            (plain_case(f"fastapi {precision}", "/classify"),),
            {"GRAPH": str(whole.graphs[precision]), "SETTINGS": str(whole.settings), "ORT_DISABLE_TELEMETRY": "1"},
        )

    return [
        Program(
            "offramp",
            lambda port: [
                *(sys.executable, "-m", "offramp", "serve", str(bundle)),
                *("--port", str(port), "--log-level", "warning"),
            ],
            tuple(offramp_case(quality) for quality in qualities),
        ),
        fastapi("fp32"),
        fastapi("int8"),
        Program(
            "infinity",
            lambda port: [
                *(installed("infinity", "infinity_emb"), "v2", "--model-id", str(whole.transformers)),
                *("--served-model-name", "network", "--engine", "torch", "--device", "cpu", "--no-bettertransformer"),
                *("--host", "127.0.0.1", "--port", str(port), "--log-level", "warning"),
            ],
            (Case("infinity", "/classify", lambda text: {"input": [text], "model": "network"}, infinity_label),),
            {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"},
        ),
        Program(
            "litserve",
            lambda port: [
                installed("litserve", "python"),
                str(HERE / "litserve_app.py"),
                str(whole.transformers),
                str(port),
            ],
            (plain_case("litserve", "/predict"),),
            {"HF_HUB_OFFLINE": "1"},
        ),
    ]
