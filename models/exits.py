"""When to leave: criteria and per-request policy, as pure NumPy functions.

The graphs compute logits and decide nothing; everything that decides is here, and the server, the calibration and the
simulator all call the same functions.

Sources: confidence, Teerapittayanon et al. 2016 (BranchyNet uses entropy; the maximum softmax probability is its
common twin); normalised entropy, Xin et al. 2020 (DeeBERT) divided by log K; patience, Zhou et al. 2020 (PABEE).
Agreement is ours: confidence at a temperature that makes it the chance to say what the last exit says, not the chance
to be right (docs/decisions/0006).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Criterion = Literal["agreement", "confidence", "entropy", "patience"]
CRITERIA: tuple[Criterion, ...] = ("agreement", "confidence", "entropy", "patience")
Reason = Literal["agreement", "confidence", "entropy", "patience", "final", "max_exit", "deadline"]

# An estimate from some hundred texts is never certainty: a threshold of 1 lets nobody leave early.
MOST_AGREEMENT = 1 - 1e-9

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
IntOrInts = TypeVar("IntOrInts", int, NDArray[np.int64])


@dataclass(frozen=True, slots=True)
class Policy:
    """How sure one text must be to leave.

    - ``agreement``: leave when the estimated probability that the last exit gives the same label is ≥ ``threshold``
      (0 to 1).
    - ``confidence``: leave when the largest probability is ≥ ``threshold`` (0 to 1).
    - ``entropy``: leave when the normalised entropy is ≤ ``threshold`` (0 to 1).
    - ``patience``: leave when ``threshold`` exits in a row (an integer ≥ 1) have each agreed with the exit before
      them, so no earlier than exit ``threshold + 1``.

    Exits before ``min_exit`` are passed whatever they say; at ``max_exit`` the text leaves whatever it says
    (``None``: the last exit).
    """

    criterion: Criterion
    threshold: float
    min_exit: int = 1
    max_exit: int | None = None

    def __post_init__(self) -> None:
        if self.criterion not in CRITERIA:
            raise ValueError(f"criterion must be one of {', '.join(CRITERIA)}, not {self.criterion!r}")
        if not math.isfinite(self.threshold):
            raise ValueError("threshold must be a finite number")
        if self.criterion == "patience":
            if self.threshold < 1 or self.threshold != int(self.threshold):
                raise ValueError(f"threshold of patience must be a whole number of at least 1, not {self.threshold:g}")
        elif not 0.0 <= self.threshold <= 1.0:
            raise ValueError(f"threshold of {self.criterion} must lie between 0 and 1, not {self.threshold:g}")
        if self.min_exit < 1:
            raise ValueError(f"min_exit must be at least 1, not {self.min_exit}")
        if self.max_exit is not None and self.max_exit < self.min_exit:
            raise ValueError(f"max_exit {self.max_exit} lies before min_exit {self.min_exit}")

    def reads(self, exit_number: int, last_exit: int) -> bool:
        """Whether it matters what exit ``exit_number`` says: not before ``min_exit``, but that patience counts from
        the first exit on."""
        return exit_number >= min(self.min_exit, last_exit) or self.criterion == "patience"


def full_depth(last_exit: int) -> Policy:
    """The policy of ``quality: 1.0``: the last exit, always."""
    return Policy("confidence", 1.0, min_exit=last_exit)


def softmax(logits: NDArray[np.floating], temperature: float | Floats = 1.0) -> Floats:
    """Probabilities ``[..., K]`` of ``logits [..., K]`` divided by ``temperature``; rows with a NaN stay NaN."""
    scaled = np.asarray(logits, dtype=np.float64) / temperature
    with np.errstate(invalid="ignore", over="ignore"):
        shifted = np.exp(scaled - scaled.max(axis=-1, keepdims=True))
        return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one exit says of a batch: ``probabilities [B, K]``, ``labels [B]``, ``confidence [B]``, ``entropy [B]``
    (divided by log K: 0 is certain, 1 is uniform), ``agreement [B]`` (estimated probability that the last exit says
    the same), ``finite [B]`` (False where a logit was NaN or infinite: such a row is never confident)."""

    probabilities: Floats
    labels: Ints
    confidence: Floats
    entropy: Floats
    agreement: Floats
    finite: Bools


def judge(logits: NDArray[np.floating], temperature: float, agreement_temperature: float) -> Verdict:
    """Turns an exit's ``logits [B, K]`` into a :class:`Verdict`; the temperatures are the exit's own.

    Once for every micro-batch, so its count of NumPy calls is its cost; rows that are not finite are the rare case.
    """
    raw = np.asarray(logits, dtype=np.float64)
    finite = np.asarray(np.isfinite(raw).all(axis=-1))
    whole = bool(finite.all())
    if not whole:
        raw = np.where(finite[..., None], raw, 0.0)
    below = raw - raw.max(axis=-1, keepdims=True)
    scaled = below / temperature
    parts = np.exp(scaled)
    total = parts.sum(axis=-1)
    probabilities = parts / total[..., None]
    # argmax of the logits, not of the probabilities: two probabilities can round to the same number.
    labels = raw.argmax(axis=-1)
    # The largest part is 1.
    confidence = 1.0 / total
    agreement = np.minimum(1.0 / np.exp(below / agreement_temperature).sum(axis=-1), MOST_AGREEMENT)
    # -sum p log p with log p = scaled - log total. Rounding can leave -1e-17 at a certain answer, or a hair over 1.
    entropy = (np.log(total) - (probabilities * scaled).sum(axis=-1)) / math.log(raw.shape[-1])
    entropy = np.minimum(np.maximum(entropy, 0.0), 1.0)
    if not whole:
        probabilities[~finite] = confidence[~finite] = entropy[~finite] = agreement[~finite] = np.nan
        labels[~finite] = -1
    return Verdict(probabilities, labels, confidence, entropy, agreement, finite)


def agree(labels: IntOrInts, previous_labels: IntOrInts, streak: IntOrInts) -> IntOrInts:
    """Patience counter after this exit: one more where the label is the one of the exit before, else 0.

    For one text, or for ``[B]`` of them. ``previous_labels`` is -1 before the first exit (and after an exit whose
    logits were not finite).
    """
    return (streak + 1) * ((labels == previous_labels) & (labels >= 0))


def _met(policy: Policy, agreement: Any, confidence: Any, entropy: Any, streak: Any) -> Any:
    """The rule itself: whether a policy's criterion is met, by what an exit says of one text or of an array of them.

    Comparisons with NaN, which is what is said of logits that are not finite, are false; their streak is 0.
    """
    if policy.criterion == "agreement":
        return agreement >= policy.threshold
    if policy.criterion == "confidence":
        return confidence >= policy.threshold
    if policy.criterion == "entropy":
        return entropy <= policy.threshold
    return streak >= policy.threshold


def decide(
    verdict: Verdict, streak: Sequence[int] | Ints, policies: Sequence[Policy], exit_number: int, last_exit: int
) -> list[Reason | None]:
    """For each row the reason to leave at ``exit_number``, or ``None`` to go on.

    ``final`` at the last exit; the criterion's own name where it is met at or after ``min_exit``; ``max_exit`` where
    only that limit ends the way. A ``min_exit`` beyond the last exit still leaves at the last one.
    """
    if exit_number >= last_exit:
        return ["final"] * len(policies)
    reasons: list[Reason | None] = []
    # Row by row on Python's own numbers: micro-batches are small, and mixed policies would take ten NumPy calls.
    said = zip(verdict.agreement.tolist(), verdict.confidence.tolist(), verdict.entropy.tolist(), streak, strict=True)
    for policy, row in zip(policies, said, strict=True):
        if exit_number >= policy.min_exit and _met(policy, *row):
            reasons.append(policy.criterion)
        elif policy.max_exit is not None and exit_number >= policy.max_exit:
            reasons.append("max_exit")
        else:
            reasons.append(None)
    return reasons


@dataclass(frozen=True, slots=True)
class Judged:
    """What every exit says of every text, whatever the policy: ``labels``, ``confidence``, ``entropy``,
    ``agreement``, ``streak`` and ``finite``, each ``[E, N]``. Judged once, it answers for any number of thresholds."""

    labels: Ints
    confidence: Floats
    entropy: Floats
    agreement: Floats
    streak: Ints
    finite: Bools


def judge_all(
    logits: NDArray[np.floating],
    temperatures: Floats | Sequence[float],
    agreement_temperatures: Floats | Sequence[float],
) -> Judged:
    """All exits' ``logits [E, N, K]``, each at its temperatures ``[E]``, exit by exit as the server sees them."""
    for given in (temperatures, agreement_temperatures):
        if len(given) != len(logits):
            raise ValueError(f"{len(given)} temperatures for {len(logits)} exits")
    previous = np.full(logits.shape[1], -1, dtype=np.int64)
    streak = np.zeros(logits.shape[1], dtype=np.int64)
    verdicts, streaks = [], []
    for exit_logits, *own in zip(logits, temperatures, agreement_temperatures, strict=True):
        verdict = judge(exit_logits, *map(float, own))
        streak = agree(verdict.labels, previous, streak)
        previous = verdict.labels
        verdicts.append(verdict)
        streaks.append(streak)
    return Judged(
        labels=np.stack([verdict.labels for verdict in verdicts]),
        confidence=np.stack([verdict.confidence for verdict in verdicts]),
        entropy=np.stack([verdict.entropy for verdict in verdicts]),
        agreement=np.stack([verdict.agreement for verdict in verdicts]),
        streak=np.stack(streaks),
        finite=np.stack([verdict.finite for verdict in verdicts]),
    )


def leave_at(judged: Judged, policy: Policy) -> Ints:
    """Index ``[N]`` (from 0) of the exit that each text leaves at under ``policy``.

    The offline twin of :func:`decide`, for calibration: the same rule, all exits and texts at once.
    """
    exits = judged.labels.shape[0]
    leave = _met(policy, judged.agreement, judged.confidence, judged.entropy, judged.streak)
    leave[: policy.min_exit - 1] = False
    if policy.max_exit is not None:
        leave[policy.max_exit - 1 :] = True
    leave[exits - 1] = True
    return np.argmax(leave, axis=0).astype(np.int64)


def first_exit(
    logits: NDArray[np.floating],
    temperatures: Floats | Sequence[float],
    agreement_temperatures: Floats | Sequence[float],
    policy: Policy,
) -> Ints:
    """:func:`leave_at` straight from all exits' ``logits [E, N, K]`` and temperatures ``[E]``."""
    return leave_at(judge_all(logits, temperatures, agreement_temperatures), policy)
