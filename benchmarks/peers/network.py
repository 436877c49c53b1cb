"""The bundle's network without its early exits, in the forms that other servers take: the same weights, full depth.

- one fused ONNX graph in fp32 and one in int8, built as the bundle's own segments are;
- a ``transformers`` folder, whose model (``modeling.py`` beside this file goes along) gives the same logits.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.architecture import Architecture
from models.bundle import Bundle

MODELING = Path(__file__).with_name("modeling.py")
PADDING = ("[PAD]", "<pad>")


@dataclass(frozen=True, slots=True)
class Whole:
    """The paths of one network's forms. ``settings`` says what a server of the ``graphs`` must know."""

    graphs: dict[str, Path]
    settings: Path
    transformers: Path


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """What the FastAPI peer must know of a graph."""

    tokenizer: str
    labels: tuple[str, ...]
    max_length: int
    position_offset: int
    uses_token_type_ids: bool


def write_whole(bundle: Bundle, folder: Path) -> Whole:
    """Writes all forms of ``bundle``'s network into ``folder``. Raises ``ValueError`` for what is no plain BERT."""
    from training.export import dequantised_weights, select_exits
    from training.graphs import build_segments

    manifest = bundle.manifest
    exits = manifest.architecture.exits
    segments = [bundle.graph(spec.number) for spec in exits]
    stored = dequantised_weights(manifest.architecture, segments)
    architecture, weights = select_exits(manifest.architecture, stored, [exits[-1].number])
    graphs = {
        precision: build_segments(architecture, weights, precision, folder / precision)[0]
        for precision in ("fp32", "int8")
    }
    settings = GraphSettings(
        tokenizer=str(bundle.path / "tokenizer.json"),
        labels=manifest.labels,
        max_length=architecture.max_length,
        position_offset=architecture.position_offset,
        uses_token_type_ids=architecture.uses_token_type_ids,
    )
    (folder / "settings.json").write_text(json.dumps(asdict(settings)), encoding="utf-8")
    write_transformers(bundle, architecture, weights, folder / "transformers")
    return Whole(graphs, folder / "settings.json", folder / "transformers")


def write_transformers(
    bundle: Bundle, architecture: Architecture, weights: Mapping[str, NDArray[Any]], folder: Path
) -> None:
    """Writes a folder for ``AutoModelForSequenceClassification``; ``architecture`` has one exit, the last."""
    import torch
    from safetensors.torch import save_file
    from transformers import BertConfig, BertModel

    from models.network import canonical_weights

    if architecture.embedding_size != architecture.hidden_size:
        raise ValueError("projected embeddings have no counterpart in transformers' BERT")
    config = BertConfig(**bert_config(bundle, architecture))
    with torch.device("meta"):
        # For its names and shapes only.
        state = BertModel(config, add_pooling_layer=False).state_dict()
    theirs = {id(tensor): name for name, tensor in state.items()}
    tensors = {}
    for name, tensor in canonical_weights(dict(state)).items():
        array = fitting(architecture, weights, name, tuple(tensor.shape))
        tensors[f"bert.{theirs[id(tensor)]}"] = torch.from_numpy(array)
    for part in ("dense.weight", "dense.bias", "classifier.weight", "classifier.bias", "pool_query"):
        if (own := weights.get(f"exits.1.{part}")) is not None:
            tensors[part] = torch.from_numpy(np.array(own, dtype=np.float32))
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    documents = {"config": config.to_dict(), "tokenizer_config": tokenizer_config(bundle, architecture)}
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(bundle.path / "tokenizer.json", folder / "tokenizer.json")
    shutil.copyfile(MODELING, folder / MODELING.name)


def bert_config(bundle: Bundle, architecture: Architecture) -> dict[str, Any]:
    """The fields of ``config.json`` that say what this network is."""
    labels = bundle.manifest.labels
    return {
        "vocab_size": architecture.vocab_size,
        "hidden_size": architecture.hidden_size,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "intermediate_size": architecture.intermediate_size,
        "hidden_act": architecture.activation,
        "max_position_embeddings": architecture.max_length,
        "type_vocab_size": 2,
        "layer_norm_eps": architecture.layer_norm_eps,
        "id2label": dict(enumerate(labels)),
        "label2id": {label: number for number, label in enumerate(labels)},
        # A peek's row has no counterpart in transformers: the mean after the layer that it peeks into costs the same
        # for all tokens and is what it learned to foresee. Its accuracy is not the bundle's.
        "pooling": "mean" if architecture.exits[0].head == "peek" else architecture.exits[0].head,
        "architectures": ["ExitForSequenceClassification"],
        "auto_map": {"AutoModelForSequenceClassification": "modeling.ExitForSequenceClassification"},
    }


def tokenizer_config(bundle: Bundle, architecture: Architecture) -> dict[str, Any]:
    """By hand: what one major version of transformers writes, the other does not read."""
    vocabulary = json.loads((bundle.path / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": architecture.max_length,
        "pad_token": next((token for token in PADDING if token in vocabulary), PADDING[0]),
        "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
    }


def fitting(
    architecture: Architecture, weights: Mapping[str, NDArray[Any]], name: str, shape: tuple[int, ...]
) -> NDArray[np.float32]:
    """The weight that torch calls ``name``, with the rows that transformers' BERT has of it."""
    array = weights.get(name, weights.get(name.removesuffix(".weight")))
    if name == "embeddings.token_type.weight":
        # Unused types are zeros; only the first one is ever looked up for single texts.
        rows = np.zeros(shape, np.float32)
        if array is not None:
            rows[: len(array)] = array
        return rows
    if array is None:
        raise ValueError(f"the bundle's graphs have no weight {name}")
    if name == "embeddings.position.weight":
        # RoBERTa's first rows belong to no position.
        array = array[architecture.position_offset :][: shape[0]]
    return np.array(array, dtype=np.float32)
