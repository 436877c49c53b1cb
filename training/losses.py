"""The losses beside cross-entropy over one batch: aligned contrastive learning (ACL, arXiv 2602.03563), distillation.

Notation of docs/training.md: z = h/‖h‖ are normalised features [N, d], l_k = W_k/‖W_k‖ the normalised rows of an exit's
classifier [K, d] (its label embeddings), τ a temperature. Each exit m has the elements
E^m = {(z_i, y_i)} ∪ {(l_k, k)}, N + K of them.
"""

import torch
from torch import Tensor
from torch.nn import functional


def _elements(features: Tensor, labels: Tensor, label_embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """E^m as normalised vectors ``[N + K, d]``, in float32 at least, and their classes ``[N + K]``."""
    together = torch.cat([features, label_embeddings])
    vectors = functional.normalize(together.to(torch.promote_types(together.dtype, torch.float32)), dim=-1)
    classes = torch.cat([labels, torch.arange(len(label_embeddings), device=labels.device)])
    return vectors, classes


def _contrast(
    anchors: Tensor, anchor_classes: Tensor, candidates: Tensor, candidate_classes: Tensor, temperature: float
) -> Tensor:
    """Mean over anchors a with positives P(a) of −1/|P(a)| Σ_{p∈P(a)} log(e^{a·p/τ} / Σ_{b≠a} e^{a·b/τ}).

    ``candidates [C, d]`` begin with the ``anchors [A, d]`` themselves, so candidate a is left out for anchor a.
    """
    # Autocast would round the similarities to three digits before they are divided by τ.
    with torch.autocast(anchors.device.type, enabled=False):
        similarity = anchors @ candidates.T / temperature
    itself = torch.eye(len(anchors), len(candidates), dtype=torch.bool, device=anchors.device)
    # Not −inf: where there is no other candidate at all, its gradient would be a NaN.
    lowest = torch.finfo(similarity.dtype).min
    log_share = similarity - similarity.masked_fill(itself, lowest).logsumexp(dim=1, keepdim=True)
    positive = (anchor_classes[:, None] == candidate_classes[None, :]) & ~itself
    count = positive.sum(1)
    per_anchor = -log_share.masked_fill(~positive, 0.0).sum(1) / count.clamp(min=1)
    counted = count > 0
    # No anchor may have a positive (one text, say): the loss is then 0, not a NaN.
    return per_anchor[counted].sum() / counted.sum().clamp(min=1)


def scl(features: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Supervised contrastive loss (Khosla et al. 2020, L_out; Gunel et al. 2021 on the vector before the classifier).

    Mean over the texts i that share their class with another one, P(i) those, of
    −1/|P(i)| Σ_{p∈P(i)} log(e^{z_i·z_p/τ} / Σ_{b≠i} e^{z_i·z_b/τ}). ``features [N, d]``, ``labels [N]`` → scalar.
    """
    vectors = functional.normalize(features.to(torch.promote_types(features.dtype, torch.float32)), dim=-1)
    return _contrast(vectors, labels, vectors, labels, temperature)


def acl_embed(features: Tensor, labels: Tensor, label_embeddings: Tensor, temperature: float) -> Tensor:
    """ACL-Embed: supervised contrast (Khosla et al. 2020; Gunel et al. 2021) in which label embeddings take part.

    ``features [N, d]``, ``labels [N]``, ``label_embeddings [K, d]`` → scalar. All are normalised here.
    """
    vectors, classes = _elements(features, labels, label_embeddings)
    return _contrast(vectors, classes, vectors, classes, temperature)


def acl_cl(
    features: Tensor,
    labels: Tensor,
    label_embeddings: Tensor,
    teacher_features: Tensor,
    teacher_label_embeddings: Tensor,
    temperature: float,
) -> Tensor:
    """ACL-CL at a student exit m < M: anchors from E^m, candidates and same-class positives from E^m ∪ stopgrad(E^M).

    Shapes as in :func:`acl_embed`; the deepest exit's (the teacher's) vectors receive no gradient.
    """
    vectors, classes = _elements(features, labels, label_embeddings)
    guides, guide_classes = _elements(teacher_features.detach(), labels, teacher_label_embeddings.detach())
    candidates = torch.cat([vectors, guides])
    return _contrast(vectors, classes, candidates, torch.cat([classes, guide_classes]), temperature)


def distillation(logits: Tensor, teacher_logits: Tensor, temperature: float) -> Tensor:
    """Mean over texts of T²·KL(softmax(t/T) ‖ softmax(s/T)), T the ``temperature`` (Hinton et al. 2015).

    ``logits [N, K]`` of the student s, ``teacher_logits [N, K]`` of the teacher t, which get no gradient → scalar. T²
    keeps the size of the gradient alike at every T.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    student = functional.log_softmax(logits.to(wide) / temperature, dim=-1)
    teacher = functional.log_softmax(teacher_logits.detach().to(wide) / temperature, dim=-1)
    return temperature**2 * functional.kl_div(student, teacher, reduction="batchmean", log_target=True)
