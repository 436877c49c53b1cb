"""How a multi-exit network is trained: each method as its stages and the losses that one batch gives.

:data:`METHODS` says what each method is. A step looks at the exits' outputs and gives an :class:`Objective`: what
labels (and a teacher) ask, and for methods with a contrastive part that part, whose gradient is compared with the
other one's. Formulas are in docs/training.md next to their tests.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from models.network import ExitOutput, MultiExitNetwork
from training.losses import acl_cl, acl_embed, distillation, scl

MethodName = Literal["ce", "ce+scl", "acl", "jt", "2st", "alt", "jt+scl", "acl-embed", "acl-cl", "exits-only"]
Stage = Literal["last", "all", "alternating", "others"]
ContrastKind = Literal["scl", "acl-embed", "acl-cl"]
ExitWeights = Literal["uniform", "depth"]


@dataclass(frozen=True, slots=True)
class Method:
    """``stages``, one after the other, each with an optimiser of its own; ``contrast`` is what stands beside CE.

    A stage trains ``last``: the encoder by its last exit; ``all``: everything by every exit; ``alternating``: the last
    exit in even steps and every exit in odd ones; ``others``: only the own weights of the exits before the last, all
    else frozen and without dropout.
    """

    stages: tuple[Stage, ...]
    contrast: ContrastKind | None = None


METHODS: dict[MethodName, Method] = {
    # One exit, the last.
    "ce": Method(("last",)),
    "ce+scl": Method(("last",), "scl"),  # Gunel et al. 2021
    "acl": Method(("last",), "acl-embed"),  # arXiv 2602.03563; max_angle 180 is ACL-Embed without ACL-Grad
    # Every exit.
    "jt": Method(("all",)),  # BERxiT's "all" (Xin et al. 2021)
    "2st": Method(("last", "others")),  # DeeBERT (Xin et al. 2020)
    "alt": Method(("alternating",)),  # BERxiT
    "jt+scl": Method(("all",), "scl"),
    "acl-embed": Method(("all",), "acl-embed"),
    "acl-cl": Method(("all",), "acl-cl"),  # arXiv 2602.03563
    # For a network whose last exit is finished: the second stage of 2st alone (offramp retrofit).
    "exits-only": Method(("others",)),
}


@dataclass(frozen=True, slots=True)
class Contrast:
    """Settings of the contrastive part: ``weight`` λ, ``temperature`` τ, ``max_angle`` θ in degrees (ACL-Grad)."""

    weight: float = 0.2
    temperature: float = 0.3
    max_angle: float = 90.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight < math.inf:
            raise ValueError(f"contrast weight must be a number of at least 0, not {self.weight}")
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"contrast temperature must be above 0, not {self.temperature}")
        if not 0.0 <= self.max_angle <= 180.0:
            raise ValueError(f"max_angle must lie between 0 and 180 degrees, not {self.max_angle}")


@dataclass(frozen=True, slots=True)
class Distillation:
    """Self-distillation: every other exit learns from the deepest one's softened answers too.

    ``weight`` of their divergence beside CE (0: none), ``temperature`` T of both sides.
    """

    weight: float = 0.0
    temperature: float = 2.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.weight < math.inf:
            raise ValueError(f"distillation weight must be a number of at least 0, not {self.weight}")
        if not 0.0 < self.temperature < math.inf:
            raise ValueError(f"distillation temperature must be above 0, not {self.temperature}")


@dataclass(frozen=True, slots=True)
class Objective:
    """Scalars of one batch.

    ``cross_entropy``; ``distilled``, the divergence from the deepest exit (unweighted; None without one);
    ``supervised``, both together; ``contrastive``, or None. The loss is ``share`` · supervised + λ · contrastive, and
    where ``gated`` (ACL-Grad) the contrastive part is dropped for a batch in which the gradients conflict.
    """

    cross_entropy: Tensor
    supervised: Tensor
    distilled: Tensor | None = None
    contrastive: Tensor | None = None
    share: float = 1.0
    gated: bool = True


@dataclass(frozen=True, slots=True)
class StepExits:
    """Numbers of the exits that a step computes, and of those among them whose cross-entropy counts."""

    computed: tuple[int, ...]
    learning: tuple[int, ...]


def step_exits(stage: Stage, numbers: Sequence[int], step: int, *, teaching: bool = False) -> StepExits:
    """Which of the exits ``numbers`` (shallowest first) take part in step ``step`` (from 0) of ``stage``.

    ``teaching`` computes the last exit for the others to learn from where it would not be computed for itself.
    """
    every = tuple(numbers)
    if stage == "last" or (stage == "alternating" and step % 2 == 0):
        return StepExits(every[-1:], every[-1:])
    if stage == "others":
        return StepExits(every if teaching else every[:-1], every[:-1])
    return StepExits(every, every)


def scored_exits(stage: Stage, numbers: Sequence[int]) -> tuple[int, ...]:
    """Exits that a stage is judged by on the validation split: what it has trained so far."""
    return tuple(numbers[-1:] if stage == "last" else numbers)


def prepare_stage(stage: Stage, network: MultiExitNetwork, *, freeze_embeddings: bool = False) -> None:
    """Sets which parameters get gradients, and which modules train (dropout) or answer as they will when served."""
    last = network.architecture.exits[-1].number
    for name, parameter in network.named_parameters():
        own = name.startswith("exits.") and not name.startswith(f"exits.{last}.")
        parameter.requires_grad_(
            own if stage == "others" else not (freeze_embeddings and name.startswith("embeddings."))
        )
    network.train()
    if stage == "others":
        for module in (network.embeddings, network.layers, network.exits[str(last)]):
            module.eval()


def exit_weights(kind: ExitWeights, exits: int) -> list[float]:
    """w_1 .. w_M of the cross-entropies, shallowest first, M in sum: all 1, or w_m ∝ m (``depth``; PABEE, Zhou et al.
    2020, whose Σ m CE_m / Σ m is this over M: the size of the loss stays that of ``uniform``)."""
    if kind == "uniform":
        return [1.0] * exits
    return [2 * m / (exits + 1) for m in range(1, exits + 1)]


def objective(
    method: MethodName,
    network: MultiExitNetwork,
    outputs: Mapping[int, ExitOutput],
    labels: Tensor,
    contrast: Contrast,
    distil: Distillation = Distillation(),
    weights: ExitWeights = "uniform",
    *,
    learning: Collection[int] | None = None,
) -> Objective:
    """The losses of ``method`` on one batch; ``labels [B]``, ``outputs`` by exit number.

    Supervised: Σ_m w_m CE_m over the exits in ``learning`` (None: all of ``outputs``), w of :func:`exit_weights`, and
    ``distil`` times Σ_{m<M} KL_m from the deepest exit M of ``outputs``. Contrastive, with λ and τ of ``contrast``:

    - ``scl``: Σ_m SCL_m, as (1 − λ) supervised + λ SCL, whatever the angle.
    - ``acl-embed``: Σ_m ACL-Embed_m. - ``acl-cl``: Σ_{m<M} ACL-CL_m + ACL-Embed_M. Both under ACL-Grad.
    """
    last = max(outputs)
    counted = {m: o for m, o in outputs.items() if learning is None or m in learning}
    cross_entropy = torch.stack(
        [
            weight * functional.cross_entropy(o.logits.float(), labels)
            for weight, o in zip(exit_weights(weights, len(counted)), counted.values(), strict=True)
        ]
    ).sum()
    supervised, distilled = cross_entropy, None
    if distil.weight and len(outputs) > 1:
        teacher_logits = outputs[last].logits
        apart = [distillation(o.logits, teacher_logits, distil.temperature) for m, o in outputs.items() if m != last]
        distilled = torch.stack(apart).sum()
        supervised = cross_entropy + distil.weight * distilled
    kind = METHODS[method].contrast
    if kind is None:
        return Objective(cross_entropy, supervised, distilled)
    contrastive = torch.stack(
        [_contrast(kind, network, outputs, m, labels, contrast.temperature) for m in outputs]
    ).sum()
    if kind == "scl":
        return Objective(cross_entropy, supervised, distilled, contrastive, share=1.0 - contrast.weight, gated=False)
    return Objective(cross_entropy, supervised, distilled, contrastive)


def _contrast(
    kind: ContrastKind,
    network: MultiExitNetwork,
    outputs: Mapping[int, ExitOutput],
    number: int,
    labels: Tensor,
    temperature: float,
) -> Tensor:
    features, last = outputs[number].features, max(outputs)
    if kind == "scl":
        return scl(features, labels, temperature)
    if kind == "acl-embed" or number == last:
        return acl_embed(features, labels, network.label_embeddings(number), temperature)
    teacher, teacher_rows = outputs[last].features, network.label_embeddings(last)
    return acl_cl(features, labels, network.label_embeddings(number), teacher, teacher_rows, temperature)


def angle_between(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Angle in degrees between two gradients over the same parameters; NaN where one is zero or not finite."""
    dot, norm_first, norm_second = (
        # Stacked first: on a GPU every number read is a wait.
        float(torch.stack(parts).double().sum()) if parts else 0.0
        for parts in (
            [
                torch.dot(a.flatten(), b.flatten())
                for a, b in zip(first, second, strict=True)
                if a is not None and b is not None
            ],
            [torch.linalg.vector_norm(a).double().square() for a in first if a is not None],
            [torch.linalg.vector_norm(b).double().square() for b in second if b is not None],
        )
    )
    cosine = dot / math.sqrt(norm_first * norm_second) if norm_first and norm_second else math.nan
    # min and max would turn a NaN into an angle of 0.
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine)))) if math.isfinite(cosine) else math.nan


def acl_grad(
    ce: Sequence[Tensor | None], acl: Sequence[Tensor | None], contrast: Contrast
) -> tuple[list[Tensor | None], float]:
    """ACL-Grad: g_CE + λ·g_ACL, or g_CE alone where their angle exceeds ``max_angle``; and that angle in degrees.

    The lists run over the same parameters; None is a parameter that a loss does not reach.
    """
    angle = angle_between(ce, acl)
    if not angle <= contrast.max_angle:  # NaN included: nothing to align with
        return list(ce), angle
    return weighted_sum(ce, acl, 1.0, contrast.weight), angle


def weighted_sum(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None], weight_first: float, weight_second: float
) -> list[Tensor | None]:
    """weight_first · g_first + weight_second · g_second, parameter by parameter."""

    def scaled(gradient: Tensor, weight: float) -> Tensor:
        return gradient if weight == 1.0 else gradient * weight

    combined: list[Tensor | None] = []
    for a, b in zip(first, second, strict=True):
        if a is None or b is None:
            one, weight = (b, weight_second) if a is None else (a, weight_first)
            combined.append(None if one is None else scaled(one, weight))
        else:
            combined.append(scaled(a, weight_first).add(b, alpha=weight_second))
    return combined
