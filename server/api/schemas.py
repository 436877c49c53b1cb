"""What ``POST /classify`` takes and returns. Unknown fields are refused; numbers are numbers (``true`` and ``"0.9"``
are not), finite, and within bounds."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, model_validator

from models.exits import Criterion, Reason
from server.config import MOST_INPUTS


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class TextPair(Strict):
    """One text, or a pair of texts for a model that classifies pairs."""

    text: str = Field(description="the text; empty or blank texts are refused")
    text_pair: str | None = Field(default=None, description="the second text, for models that take pairs")


def _kind_of_element(value: Any) -> str | None:
    if isinstance(value, str):
        return "=text"
    return "=pair" if isinstance(value, dict | TextPair) else None


def _kind_of_inputs(value: Any) -> str | None:
    return "=list" if isinstance(value, list) else _kind_of_element(value)


_Element = Annotated[
    Annotated[str, Tag("=text")] | Annotated[TextPair, Tag("=pair")],
    Discriminator(
        _kind_of_element,
        custom_error_type="input_type",
        custom_error_message="a string, or an object with text and text_pair",
    ),
]
_Inputs = Annotated[
    Annotated[str, Tag("=text")]
    | Annotated[TextPair, Tag("=pair")]
    # To the first wrong element only: a body of 2 MB holds 700,000, and to list all held the loop for a minute.
    | Annotated[list[_Element], Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True), Tag("=list")],
    Discriminator(
        _kind_of_inputs,
        custom_error_type="input_type",
        custom_error_message="a string, an object with text and text_pair, or a list of those",
    ),
]


class Wishes(Strict):
    """How deep to go, and for how long; every front door takes these. At most one of ``quality``, ``speed`` and
    ``criterion`` with ``threshold`` chooses the depth; none of them means the server's default quality."""

    quality: float | None = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="agreement with the model's last exit that the answer must have, as a certified promise: the "
        "certified tier with the smallest quality of at least this is used and named in `tier`; 1.0 is the last exit",
    )
    speed: float | None = Field(
        default=None,
        ge=1,
        le=1000,
        allow_inf_nan=False,
        description="least mean speed-up on the bundle's measured curve (ratio of mean cost to full depth); no promise",
    )
    criterion: Criterion | None = Field(
        default=None, description="what `threshold` is compared with; confidence where only a threshold is given"
    )
    threshold: float | None = Field(
        default=None,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="leave at an agreement or a confidence of at least, or a normalised entropy of at most this (0 to "
        "1), or after "
        "this many exits in a row that agree with the exit before them (patience, a whole number from 1)",
    )
    min_exit: int | None = Field(
        default=None,
        ge=1,
        le=1000,
        description="pass the exits before this one; together with quality voids the promise",
    )
    max_exit: int | None = Field(
        default=None, ge=1, le=1000, description="go no deeper than this exit; together with quality voids the promise"
    )
    quality_floor: float | None = Field(
        default=None,
        gt=0,
        le=1,
        allow_inf_nan=False,
        description="consent to a lower certified quality under load, down to this; at most `quality`. `exit.tier` "
        "says what each answer got; without it no load lowers anything",
    )
    deadline_ms: float | None = Field(
        default=None,
        gt=0,
        le=600_000,
        allow_inf_nan=False,
        description="milliseconds after which texts are answered from their latest exit (reason `deadline`, no "
        "promise); 504 where a text has passed none",
    )

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        ways = {
            "quality": self.quality is not None,
            "speed": self.speed is not None,
            "criterion and threshold": self.criterion is not None or self.threshold is not None,
        }
        chosen = [name for name, given in ways.items() if given]
        if len(chosen) > 1:
            raise ValueError(f"at most one way to choose the depth, but {' and '.join(chosen)} are given")
        return self


class ClassifyRequest(Wishes):
    """Texts, and how deep to go for them."""

    inputs: _Inputs = Field(
        description="one text, or a list; two strings in a list are two texts, a pair is an object with text and "
        "text_pair"
    )
    model: str | None = Field(
        default=None, min_length=1, max_length=128, description="a name from /models; none means the server's default"
    )
    top_k: int | None = Field(
        default=None, ge=1, le=100_000, description="length of `scores`; none, or more than there are, means all labels"
    )
    raw_scores: bool = Field(
        default=False,
        description="scores are the exit's logits, before temperature and softmax; confidence, entropy and agreement "
        "stay",
    )
    truncate: bool = Field(
        default=True,
        description="cut texts that have more tokens than the model (or the setting max_tokens) takes; false answers "
        "them with 413",
    )
    explain: bool = Field(default=False, description="add `exits`: the scores at every exit passed")


class Score(Strict):
    label: str
    score: float = Field(description="probability after the exit's temperature, or the logit with raw_scores")


class Exit(Strict):
    """Where a text left, and why."""

    number: int = Field(description="the exit, 1 is the shallowest")
    layer: int = Field(description="layers that were computed for all tokens")
    of: int = Field(description="layers of the model")
    cost: float = Field(
        description="multiply-accumulates until this exit, heads and rows included, in units of one whole layer at the "
        "text's length"
    )
    reason: Reason = Field(
        description="agreement, confidence, entropy, patience: the criterion was met; final: the last exit; max_exit, "
        "deadline: that limit ended the way"
    )
    confidence: float = Field(description="largest probability")
    entropy: float = Field(description="entropy divided by the log of the number of labels: 0 certain, 1 uniform")
    agreement: float = Field(
        description="estimated probability that the last exit gives the same label; 1 at the last exit"
    )
    tier: float | None = Field(description="the certified quality that this answer carries; null: nothing is promised")


class PassedExit(Strict):
    """What an exit on the way said (``explain``)."""

    number: int
    layer: int
    cost: float
    label: str
    score: float
    scores: list[Score]
    confidence: float
    entropy: float
    agreement: float
    inference_ms: float = Field(
        description="milliseconds of the run that led from the exit before to this one, other texts in it included"
    )


class Result(Strict):
    label: str
    score: float
    scores: list[Score] = Field(description="highest first, top_k of them")
    exit: Exit
    tokens: int = Field(description="tokens that the model read, special tokens included")
    truncated: bool
    exits: list[PassedExit] | None = Field(
        default=None, description="only with explain: every exit passed, the one it left at last"
    )


class Usage(Strict):
    tokens: int
    layers_run: int = Field(description="sum over the results of exit.layer")
    layers_saved: int = Field(description="sum over the results of exit.of - exit.layer")


class ClassifyResponse(Strict):
    """Results in the order of the inputs."""

    model: str
    version: str
    results: list[Result]
    usage: Usage


class ErrorDetail(Strict):
    type: Literal[
        "malformed",
        "unauthorized",
        "not_found",
        "method_not_allowed",
        "timeout",
        "too_large",
        "invalid",
        "overloaded",
        "internal",
        "nonfinite",
        "not_ready",
        "draining",
        "deadline",
    ]
    message: str = Field(description="one sentence for people; never holds input text")
    param: str | None = Field(description="the field that it is about, as in inputs[3].text")


class ErrorResponse(Strict):
    error: ErrorDetail


class Status(Strict):
    status: Literal["alive", "ready"]


class ExitDescription(Strict):
    number: int
    after_layer: int
    head: str
    cost_in_layers: float = Field(description="cost until this exit, at the mean length of the calibration texts")


class TierDescription(Strict):
    quality: float
    criterion: Criterion
    threshold: float
    mean_cost: float = Field(description="mean cost in layers on the calibration texts")
    speedup: float = Field(description="cost of full depth divided by that")


class RefusedTierDescription(Strict):
    quality: float
    why: str
    n_needed: int | None = None


class ModelDescription(Strict):
    """A model that requests can name, and what they can ask of it."""

    name: str
    version: str
    default: bool
    task: str
    labels: list[str]
    takes_pairs: bool
    max_length: int = Field(description="most tokens of a text, special ones included")
    num_layers: int
    precision: str
    device: str
    exits: list[ExitDescription]
    tiers: list[TierDescription] = Field(description="certified qualities")
    refused_tiers: list[RefusedTierDescription]
    max_speed: float | None
    licence: str


class Models(Strict):
    models: list[ModelDescription]


class LatencyTable(Strict):
    """Seconds of a run of each segment on so many texts with so many tokens in all:
    `seconds[segment][texts][tokens]`."""

    texts: list[int]
    tokens: list[int]
    seconds: list[list[list[float]]]
    padding: float = Field(description="tokens that an empty place beside a longer text counts as")


class Cuda(Strict):
    """Versions in use; null where the libraries don't say."""

    driver: str | None
    cuda: str | None
    cudnn: str | None


class Runtime(Strict):
    precision: str
    device: str
    cuda: Cuda | None = Field(description="null on the CPU")
    runs: int = Field(description="segments run at once, of all models of a process together")
    threads: int = Field(description="CPU threads of a run under load")
    lone_threads: list[int] = Field(description="CPU threads of each segment's run that has the machine to itself")
    latency: LatencyTable | None = Field(
        description="what the start measured; null where it was told not to (measure_seconds 0)"
    )


class Info(Strict):
    """Version and limits of a server."""

    name: Literal["offramp"]
    version: str
    default_model: str
    models: list[str]
    default_quality: float
    default_deadline_ms: float | None
    processes: int = Field(description="of this server; limits and runtime are those of the one that answers")
    limits: dict[str, int | float | None]
    runtime: dict[str, Runtime]


REQUEST_EXAMPLES: dict[str, dict[str, Any]] = {
    "one text": {"value": {"inputs": "a gripping and moving film"}},
    "several texts at a promised quality": {
        "value": {"inputs": ["a gripping film", "two hours of nothing"], "quality": 0.99}
    },
    "as fast as it takes": {"value": {"inputs": "a gripping film", "speed": 2.5}},
    "a threshold of one's own, explained": {
        "value": {"inputs": "a gripping film", "criterion": "entropy", "threshold": 0.2, "explain": True}
    },
    "never deeper than exit 2, never later than 25 ms": {
        "value": {"inputs": "a gripping film", "max_exit": 2, "deadline_ms": 25}
    },
    "pairs (for a model that takes pairs)": {
        "value": {"inputs": [{"text": "A man is playing a flute.", "text_pair": "Someone plays music."}]}
    },
}
