"""A tiny bundle with real graphs, random weights and a hand-made calibration, for tests that need a whole model."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from models.architecture import Architecture, ExitSpec
from models.bundle import (
    Bundle,
    Calibration,
    CurvePoint,
    Precision,
    PrecisionCalibration,
    RefusedTier,
    Tier,
    write_bundle,
)
from models.costs import exit_costs
from training.graphs import build_segments

WORDS = (
    "a the film movie is was good bad great awful gripping dull moving boring not very two hours of nothing man plays "
    "music flute someone and but with story heart soul empty long short slow fast fun sad dark light"
).split()
POISON = "poison"
"""A word whose embedding is NaN in fp32 bundles: every exit of a text that holds it is NaN."""
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCABULARY = (
    *SPECIAL,
    *WORDS,
    POISON,
    *"abcdefghijklmnopqrstuvwxyz",
    *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
)
MAX_LENGTH = 64


def tiny_architecture(**changes: Any) -> Architecture:
    """Four layers of width 32 and an exit of each head but ``attention``: peek at 0, mean at 1, peek at 2, cls at 4."""
    fields: dict[str, Any] = {
        "backbone": "tiny-random",
        "num_layers": 4,
        "hidden_size": 32,
        "embedding_size": 32,
        "num_heads": 2,
        "intermediate_size": 64,
        "vocab_size": len(VOCABULARY),
        "max_length": MAX_LENGTH,
        "layer_norm_eps": 1e-12,
        "num_labels": 2,
        "exits": (
            ExitSpec(number=1, after_layer=0, head="peek"),
            ExitSpec(number=2, after_layer=1, head="mean"),
            ExitSpec(number=3, after_layer=2, head="peek"),
            ExitSpec(number=4, after_layer=4, head="cls"),
        ),
    }
    return Architecture(**(fields | changes))


def random_weights(architecture: Architecture, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    """Canonical weights of ``architecture``, large enough for confidences to spread between 1/K and 1."""
    random = np.random.default_rng(seed)
    h, i, e = architecture.hidden_size, architecture.intermediate_size, architecture.embedding_size
    weights: dict[str, NDArray[np.float32]] = {}

    def draw(name: str, *shape: int, scale: float) -> None:
        weights[name] = random.normal(0, scale, shape).astype(np.float32)

    def linear(name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        draw(f"{name}.weight", rows, columns, scale=gain / columns**0.5)
        draw(f"{name}.bias", rows, scale=0.02)

    def norm(name: str, width: int) -> None:
        weights[f"{name}.weight"] = np.ones(width, np.float32)
        weights[f"{name}.bias"] = np.zeros(width, np.float32)

    draw("embeddings.word", architecture.vocab_size, e, scale=1.0)
    draw("embeddings.position", architecture.max_length + architecture.position_offset, e, scale=0.1)
    if architecture.uses_token_type_ids:
        draw("embeddings.token_type", 2, e, scale=0.1)
    norm("embeddings.norm", e)
    for layer in range(architecture.num_layers):
        for name in ("query", "key", "value", "attention_output"):
            linear(f"layers.{layer}.{name}", h, h)
        linear(f"layers.{layer}.intermediate", i, h)
        linear(f"layers.{layer}.output", h, i)
        norm(f"layers.{layer}.attention_norm", h)
        norm(f"layers.{layer}.output_norm", h)
    for spec in architecture.exits:
        if spec.head == "attention":
            draw(f"exits.{spec.number}.pool_query", architecture.num_heads, architecture.head_size, scale=0.5)
        linear(f"exits.{spec.number}.dense", h, h)
        linear(f"exits.{spec.number}.classifier", architecture.num_labels, h, gain=3.0)
    return weights


def tiny_tokenizer() -> Tokenizer:
    """A lower-casing WordPiece tokenizer over :data:`VOCABULARY`; unknown words fall into letters."""
    vocabulary = {token: number for number, token in enumerate(VOCABULARY)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", vocabulary["[CLS]"]), ("[SEP]", vocabulary["[SEP]"])],
    )
    return tokenizer


def tiny_calibration(exits: int) -> PrecisionCalibration:
    """Tiers 0.99, 0.97 and 0.95 are certified by confidence, 0.995 is refused; the speed curve ends at 3.0."""

    def point(threshold: float, agreement: float, speedup: float) -> CurvePoint:
        return CurvePoint(
            threshold=threshold,
            metric=agreement,
            agreement=agreement,
            mean_cost=4 / speedup,
            speedup=speedup,
            exit_shares=(1 / exits,) * exits,
        )

    def tier(quality: float, threshold: float, speedup: float) -> Tier:
        return Tier(
            quality=quality,
            criterion="confidence",
            threshold=threshold,
            n=2000,
            disagreements=3,
            p_value=0.001,
            mean_cost=4 / speedup,
            speedup=speedup,
        )

    confidence = (point(0.99, 1.0, 1.2), point(0.9, 0.99, 1.8), point(0.8, 0.96, 2.4), point(0.6, 0.9, 3.0))
    return PrecisionCalibration(
        temperatures=(1.5, 1.25, 1.0, 1.0, 1.0, 1.0)[:exits],
        agreement_temperatures=(0.75, 0.5, 1.0, 1.0, 1.0, 1.0)[:exits],
        calibration_error_before=(0.05,) * exits,
        calibration_error_after=(0.03,) * exits,
        curves={"confidence": confidence, "entropy": (point(0.1, 0.99, 1.8),), "patience": (point(1, 0.97, 1.1),)},
        certified=(tier(0.99, 0.97, 1.5), tier(0.97, 0.9, 1.8), tier(0.95, 0.8, 2.4)),
        refused=(RefusedTier(quality=0.995, why="too few calibration texts", n_needed=4000),),
    )


def write_tiny_bundle(
    folder: Path,
    *,
    name: str = "tiny",
    version: str = "1",
    labels: tuple[str, ...] = ("negative", "positive"),
    takes_pairs: bool = False,
    precisions: tuple[Precision, ...] = ("fp32",),
    poison: Sequence[str] = (POISON,),
    seed: int = 0,
    **architecture_changes: Any,
) -> Bundle:
    """Writes a servable bundle at ``folder / name``; the tokens ``poison`` have NaN for an embedding in fp32."""
    architecture = tiny_architecture(num_labels=len(labels), **architecture_changes)
    weights = random_weights(architecture, seed)
    graphs = {
        precision: build_segments(architecture, weights, precision, folder / f"{name}-graphs-{precision}")
        for precision in precisions
    }
    if "fp32" in graphs:
        _poison(graphs["fp32"][0], poison)
    calibration = Calibration(
        metric="accuracy",
        delta=0.05,
        n_temperature=500,
        n_risk=2000,
        n_validation=500,
        data_sha256=hashlib.sha256(b"tiny").hexdigest(),
        precisions={precision: tiny_calibration(len(architecture.exits)) for precision in precisions},
    )
    manifest = {
        "name": name,
        "version": version,
        "task": "tiny",
        "labels": labels,
        "takes_pairs": takes_pairs,
        "architecture": architecture.model_dump(),
        "exit_costs": exit_costs(architecture, 12).tolist(),
        "mean_tokens": 12.0,
        "default_precision": precisions[0],
        "scores": (),
        "provenance": {"method": "random weights"},
        "licence": "Apache-2.0",
    }
    return write_bundle(
        folder / name,
        manifest=manifest,
        calibration=calibration,
        tokenizer_json=tiny_tokenizer().to_str(),
        graphs=graphs,
        readme="# tiny\n",
    )


def _poison(graph: Path, tokens: Sequence[str]) -> None:
    """Puts NaN into the finished graph of segment 1: weights that are not finite are refused before they get there."""
    model = onnx.load(graph)
    for tensor in model.graph.initializer:
        if tensor.name == "embeddings.word.table":
            table = onnx.numpy_helper.to_array(tensor).copy()
            table[[VOCABULARY.index(token) for token in tokens]] = np.nan
            tensor.CopyFrom(onnx.numpy_helper.from_array(table, tensor.name))
    onnx.save(model, graph)
