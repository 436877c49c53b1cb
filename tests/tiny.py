"""A bundle with a tiny random network in it, small enough to be made for every test session.

Two layers of width 32 and three exits. The words ``good`` and ``bad`` and their like are all that its tokenizer knows;
what it answers is arbitrary, but always the same.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.normalizers import Lowercase
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from models.architecture import Architecture, ExitSpec
from models.bundle import (
    Bundle,
    Calibration,
    CurvePoint,
    ExitScore,
    PrecisionCalibration,
    RefusedTier,
    Scores,
    Tier,
    write_bundle,
)
from models.costs import exit_costs

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
WORDS = ("a", "bad", "dull", "film", "good", "gripping", "is", "not", "the", "this", "very", "was")
LABELS = ("negative", "positive")
HIDDEN, LAYERS, MEAN_TOKENS = 32, 2, 6

ARCHITECTURE = Architecture(
    backbone="tiny",
    num_layers=LAYERS,
    hidden_size=HIDDEN,
    embedding_size=HIDDEN,
    num_heads=4,
    intermediate_size=64,
    vocab_size=len(SPECIAL) + len(WORDS),
    max_length=16,
    layer_norm_eps=1e-12,
    num_labels=len(LABELS),
    exits=(
        ExitSpec(number=1, after_layer=0, head="peek"),
        ExitSpec(number=2, after_layer=1, head="mean"),
        ExitSpec(number=3, after_layer=2, head="mean"),
    ),
)


def tokenizer_json() -> str:
    """Words of :data:`WORDS` after the special tokens, in BERT's ``[CLS] a [SEP] b [SEP]``."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = Lowercase()
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return str(tokenizer.to_str())


def random_weights(seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Canonical weights of :data:`ARCHITECTURE`; the answers that they give differ in confidence."""
    random = np.random.default_rng(seed)

    def linear(name: str, outputs: int, inputs: int, scale: float = 0.3) -> None:
        weights[f"{name}.weight"] = random.normal(0, scale, (outputs, inputs)).astype(np.float32)
        weights[f"{name}.bias"] = random.normal(0, 0.1, outputs).astype(np.float32)

    def norm(name: str) -> None:
        weights[f"{name}.weight"] = np.ones(HIDDEN, dtype=np.float32)
        weights[f"{name}.bias"] = np.zeros(HIDDEN, dtype=np.float32)

    weights: dict[str, NDArray[np.float32]] = {}
    for table, rows in (("word", ARCHITECTURE.vocab_size), ("position", ARCHITECTURE.max_length), ("token_type", 2)):
        weights[f"embeddings.{table}"] = random.normal(0, 0.5, (rows, HIDDEN)).astype(np.float32)
    norm("embeddings.norm")
    for layer in range(LAYERS):
        for part in ("query", "key", "value", "attention_output"):
            linear(f"layers.{layer}.{part}", HIDDEN, HIDDEN)
        linear(f"layers.{layer}.intermediate", ARCHITECTURE.intermediate_size, HIDDEN)
        linear(f"layers.{layer}.output", HIDDEN, ARCHITECTURE.intermediate_size)
        norm(f"layers.{layer}.attention_norm")
        norm(f"layers.{layer}.output_norm")
    for spec in ARCHITECTURE.exits:
        linear(f"exits.{spec.number}.dense", HIDDEN, HIDDEN)
        linear(f"exits.{spec.number}.classifier", len(LABELS), HIDDEN)
    return weights


def calibration() -> Calibration:
    """One criterion, one certified tier and one that was refused; the numbers are made up, but consistent."""
    costs = exit_costs(ARCHITECTURE, MEAN_TOKENS)
    points = [
        CurvePoint(
            threshold=threshold,
            metric=metric,
            agreement=agreement,
            mean_cost=float(costs[-1]) / speedup,
            speedup=speedup,
            exit_shares=shares,
        )
        for threshold, metric, agreement, speedup, shares in (
            (1.0, 0.80, 1.0, 1.0, (0.0, 0.0, 1.0)),
            (0.9, 0.79, 0.98, 1.5, (0.2, 0.4, 0.4)),
            (0.6, 0.75, 0.91, 2.5, (0.6, 0.3, 0.1)),
        )
    ]
    tier = Tier(
        quality=0.97,
        criterion="confidence",
        threshold=0.9,
        n=500,
        disagreements=4,
        p_value=0.001,
        mean_cost=points[1].mean_cost,
        speedup=1.5,
    )
    refused = RefusedTier(quality=0.999, why="500 texts are too few", n_needed=2995)
    exits = len(ARCHITECTURE.exits)
    fp32 = PrecisionCalibration(
        temperatures=(1.5, 1.0, 1.0),
        calibration_error_before=(0.05,) * exits,
        calibration_error_after=(0.02,) * exits,
        curves={"confidence": tuple(points)},
        certified=(tier,),
        refused=(refused,),
    )
    return Calibration(
        metric="accuracy",
        delta=0.05,
        n_temperature=200,
        n_risk=500,
        n_validation=100,
        data_sha256="0" * 64,
        precisions={"fp32": fp32},
    )


def write(target: Path, graphs: list[Path], **manifest: Any) -> Bundle:
    """Writes the bundle at ``target`` with ``graphs`` for its segments; ``manifest`` overrides its fields."""
    exits = tuple(
        ExitScore(exit=number, cost_in_layers=float(cost), metrics={"accuracy": 0.7 + number / 100})
        for number, cost in enumerate(exit_costs(ARCHITECTURE, MEAN_TOKENS), start=1)
    )
    fields: dict[str, Any] = {
        "name": "tiny",
        "version": "1",
        "task": "sentiment",
        "labels": LABELS,
        "takes_pairs": False,
        "architecture": ARCHITECTURE.model_dump(mode="json"),
        "exit_costs": exit_costs(ARCHITECTURE, MEAN_TOKENS).tolist(),
        "mean_tokens": MEAN_TOKENS,
        "default_precision": "fp32",
        "scores": [Scores(split="dev", n=100, per_exit={"fp32": exits}).model_dump(mode="json")],
        "provenance": {"method": "none: random weights", "seed": 0},
        "licence": "Apache-2.0",
    }
    return write_bundle(
        target,
        manifest={**fields, **manifest},
        calibration=calibration(),
        tokenizer_json=tokenizer_json(),
        graphs={"fp32": graphs},
        readme="# tiny\n",
    )


def write_with_real_graphs(target: Path, work: Path) -> Bundle:
    """The bundle with graphs that run; ``work`` is a folder for what is made on the way."""
    from training.graphs import build_segments

    return write(target, build_segments(ARCHITECTURE, random_weights(), "fp32", work))


def write_with_idle_graphs(target: Path, work: Path) -> Bundle:
    """The bundle with files in place of graphs: enough for whoever only reads and verifies it."""
    work.mkdir(parents=True, exist_ok=True)
    graphs = [work / f"{number}.onnx" for number in range(1, len(ARCHITECTURE.exits) + 1)]
    for graph in graphs:
        graph.write_bytes(b"segment " + graph.name.encode())
    return write(target, graphs)
