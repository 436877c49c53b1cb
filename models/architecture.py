"""The shape of a multi-exit encoder: what training, export, bundle, server and cost model must agree on.

Pure data (pydantic), importable without torch.
"""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

Head = Literal["cls", "mean", "attention", "peek"]


class ExitSpec(BaseModel):
    """One off-ramp: where it reads the network, and how.

    ``cls``, ``mean`` and ``attention`` pool the output of layer ``after_layer`` (0 = the embeddings).
    ``peek`` sends one pooled row (the mean of those hidden states) through layer ``after_layer + 1`` as an
    extra query against that layer's keys and values, so it needs a layer to peek into.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    number: int = Field(ge=1, description="1 for the shallowest exit, counting up without gaps")
    after_layer: int = Field(ge=0, description="whole layers computed for all tokens before this exit reads")
    head: Head


class Architecture(BaseModel):
    """Sizes and conventions of a BERT-family encoder with exits.

    ``position_offset`` is the position id of the first token: 0 for BERT, ``pad_id + 1`` for RoBERTa.
    ``embedding_size`` differs from ``hidden_size`` only where embeddings are projected (ELECTRA-small).
    ``max_length`` is in tokens, special tokens included. Upper bounds are far beyond any network: they keep a damaged
    file from asking for more memory than there is, or for costs that are no numbers.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    backbone: str
    num_layers: int = Field(ge=1, le=10_000)
    hidden_size: int = Field(ge=1, le=1_000_000)
    embedding_size: int = Field(ge=1, le=1_000_000)
    num_heads: int = Field(ge=1, le=10_000)
    intermediate_size: int = Field(ge=1, le=10_000_000)
    vocab_size: int = Field(ge=1, le=100_000_000)
    max_length: int = Field(ge=3, le=1_000_000)
    layer_norm_eps: float = Field(gt=0, le=1)
    activation: Literal["gelu", "relu"] = "gelu"
    position_offset: int = Field(default=0, ge=0, le=1_000_000)
    uses_token_type_ids: bool = True
    num_labels: int = Field(ge=2)
    exits: tuple[ExitSpec, ...] = Field(min_length=1)

    @property
    def head_size(self) -> int:
        """Width of one attention head: ``hidden_size / num_heads``."""
        return self.hidden_size // self.num_heads

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.hidden_size % self.num_heads:
            raise ValueError(f"hidden_size {self.hidden_size} is not a multiple of num_heads {self.num_heads}")
        depth = -1
        for position, spec in enumerate(self.exits, start=1):
            if spec.number != position:
                raise ValueError(
                    f"exits must be numbered 1, 2, ... without gaps; position {position} holds {spec.number}"
                )
            # Two exits after one layer would need a peek and a pooled head side by side; nothing gains from that.
            if spec.after_layer <= depth:
                raise ValueError(f"exit {spec.number} must read a deeper layer than the exit before it")
            if spec.after_layer > self.num_layers:
                raise ValueError(f"exit {spec.number} reads layer {spec.after_layer} of {self.num_layers}")
            if spec.head == "peek" and spec.after_layer == self.num_layers:
                raise ValueError(f"exit {spec.number}: peek needs a layer after {spec.after_layer}, and there is none")
            depth = spec.after_layer
        return self
