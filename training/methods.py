"""How a multi-exit network is trained: each method as the losses that one batch gives.

A method looks at the exits' outputs and returns an :class:`Objective`: the cross-entropy part and, for methods with
ACL-Grad, a contrastive part whose gradient is compared with it. Formulas are in docs/training.md next to their tests.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from models.network import ExitOutput, MultiExitNetwork
from training.losses import acl_cl, acl_embed, distillation

MethodName = Literal["ce", "jt", "acl-cl"]
METHODS: tuple[MethodName, ...] = ("ce", "jt", "acl-cl")
ExitWeights = Literal["uniform", "depth"]


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
    """Scalars of one batch: ``cross_entropy``; ``distilled``, the divergence from the deepest exit (unweighted, None
    without one); ``supervised``, both together; ``contrastive``, which ACL-Grad weighs by λ or drops, or None."""

    cross_entropy: Tensor
    supervised: Tensor
    distilled: Tensor | None = None
    contrastive: Tensor | None = None


def trained_exits(method: MethodName, network: MultiExitNetwork) -> list[int]:
    """Numbers of the exits that ``method`` computes in a step: ``ce`` only the last, the others all."""
    numbers = [e.number for e in network.architecture.exits]
    return numbers[-1:] if method == "ce" else numbers


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
) -> Objective:
    """The losses of ``method`` on one batch; ``labels [B]``, ``outputs`` by exit number.

    - ``ce``: CE at the last exit. - ``jt``: Σ_m w_m CE_m (BERxiT's "all"; DeeBERT's second stage trained jointly).
    - ``acl-cl``: Σ_m w_m CE_m, and Σ_{m<M} ACL-CL_m + ACL-Embed_M as the contrastive part.

    ``distil`` adds Σ_{m<M} KL_m from the deepest exit M of ``outputs``. w: see :func:`exit_weights`.
    """
    last = max(outputs)
    each = [
        w * functional.cross_entropy(o.logits.float(), labels)
        for w, o in zip(exit_weights(weights, len(outputs)), outputs.values(), strict=True)
    ]
    cross_entropy = supervised = torch.stack(each).sum()
    distilled = None
    if distil.weight and len(outputs) > 1:
        teacher_logits = outputs[last].logits
        apart = [distillation(o.logits, teacher_logits, distil.temperature) for m, o in outputs.items() if m != last]
        distilled = torch.stack(apart).sum()
        supervised = cross_entropy + distil.weight * distilled
    if method != "acl-cl":
        return Objective(cross_entropy, supervised, distilled)
    teacher, teacher_labels = outputs[last].features, network.label_embeddings(last)
    parts = [
        acl_cl(o.features, labels, network.label_embeddings(m), teacher, teacher_labels, contrast.temperature)
        if m != last
        else acl_embed(teacher, labels, teacher_labels, contrast.temperature)
        for m, o in outputs.items()
    ]
    return Objective(cross_entropy, supervised, distilled, torch.stack(parts).sum())


def angle_between(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """Angle in degrees between two gradients over the same parameters; NaN where one is zero or not finite."""
    dot = norm_first = norm_second = 0.0
    for a, b in zip(first, second, strict=True):
        if a is not None:
            norm_first += float(torch.linalg.vector_norm(a)) ** 2
        if b is not None:
            norm_second += float(torch.linalg.vector_norm(b)) ** 2
        if a is not None and b is not None:
            dot += float(torch.dot(a.flatten(), b.flatten()))
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
    combined: list[Tensor | None] = []
    for a, b in zip(ce, acl, strict=True):
        combined.append(a if b is None else b * contrast.weight if a is None else a.add(b, alpha=contrast.weight))
    return combined, angle
