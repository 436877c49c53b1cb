"""Tiny encoders of transformers with random weights, saved as folders that ``load_backbone`` can read.

Weights are drawn wider than transformers draws them, so that layers, norms and biases all move the result: with the
usual 0.02 a wrong layer would hide behind the residual.
"""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, normalizers, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import nn

from models.architecture import ExitSpec, Head
from models.network import Backbone, MultiExitNetwork, build_network, load_backbone

VOCABULARY = 100
HIDDEN, LAYERS, HEADS, INTERMEDIATE, POSITIONS = 32, 3, 4, 48, 24


def tiny_tokenizer(family: str) -> Tokenizer:
    """Words ``w0 w1 ...`` with the special tokens and the pair layout of BERT (and ELECTRA) or RoBERTa."""
    roberta = family == "roberta"
    special = ["<s>", "<pad>", "</s>", "<unk>"] if roberta else ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = [*special, *(f"w{i}" for i in range(VOCABULARY - len(special)))]
    tokenizer = Tokenizer(WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>" if roberta else "[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if roberta:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
        )
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]",
            pair="[CLS] $A [SEP] $B:1 [SEP]:1",
            special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
        )
    return tokenizer


def randomise(module: nn.Module, seed: int, std: float = 0.2) -> None:
    """Draws every parameter anew, norms' scales around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator) * std
            is_scale = name.endswith(("LayerNorm.weight", "norm.weight"))
            parameter.copy_(noise + 1.0 if is_scale else noise)


def tiny_model(family: str, **changes: Any) -> nn.Module:
    """A random model of ``family`` (``bert``, ``roberta``, ``electra``, or any of transformers with such settings)."""
    from transformers import AutoConfig, AutoModel

    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": POSITIONS,
    }
    if family == "electra":
        settings["embedding_size"] = 16
    if family in ("roberta", "xlm-roberta", "camembert", "data2vec-text"):
        settings |= {"type_vocab_size": 1, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2}
    model: nn.Module = AutoModel.from_config(AutoConfig.for_model(family, **{**settings, **changes}))
    randomise(model, seed=1)
    return model.eval()


def save_tiny(folder: Path, model: nn.Module, tokenizer: Tokenizer | None = None, **config: Any) -> Path:
    """Writes ``model`` and a tokenizer as transformers does; ``config`` overrides entries of its config.json."""
    from transformers import PreTrainedTokenizerFast

    model.save_pretrained(folder)
    if tokenizer is None:
        tokenizer = tiny_tokenizer("roberta" if model.config.pad_token_id == 1 else "bert")
    padding = "<pad>" if tokenizer.token_to_id("<pad>") is not None else "[PAD]"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=padding).save_pretrained(folder)
    if config:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
    return folder


def exits(*where: tuple[int, Head]) -> list[ExitSpec]:
    """Exits from ``(after_layer, head)`` pairs, numbered from 1."""
    return [ExitSpec(number=i, after_layer=depth, head=head) for i, (depth, head) in enumerate(where, start=1)]


@cache
def _backbone(folder: Path) -> Backbone:
    return load_backbone(str(folder))


def tiny_network(
    folder: Path, where: Sequence[tuple[int, Head]], *, num_labels: int = 3, seed: int | None = 2
) -> MultiExitNetwork:
    """The backbone in ``folder`` with exits, in eval mode; ``seed`` draws the heads anew, zero queries included."""
    network = build_network(_backbone(folder), num_labels=num_labels, exits=exits(*where), max_length=64)
    if seed is not None:
        randomise(network.exits, seed)
    return network.eval()
