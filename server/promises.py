"""Whether a certified quality holds in production: shadow checks, and what they say against the promise.

A tier promises that an answer is the last exit's with probability of at least ``quality``. A shadow check says whether
a sampled answer is: an early one runs on to the last exit, and one of the last exit agrees with itself.
"""

import math
from collections.abc import Callable, Iterable

# Risks that are tried against the promised one, in units of it.
ALTERNATIVES = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0)
# Evidence beyond which a promise counts as broken: for a promise that holds, the chance to ever get there is 1 in 20.
BROKEN = 20.0


def evidence(checks: int, disagreements: int, risk: float) -> float:
    """Evidence against "an answer disagrees with probability of at most ``risk``": 1 is none, :data:`BROKEN` much.

    An e-process: the mean over :data:`ALTERNATIVES` of likelihood ratios, each of which is a supermartingale while the
    promise holds. So it may be looked at after every check, and by Ville's inequality exceeds 20 ever with probability
    of at most 1/20 (Ramdas, Grünwald, Vovk, Shafer 2023, arXiv 2210.01948; Wald's mixture).
    """
    others = [risk * factor for factor in ALTERNATIVES if risk * factor < 1.0]
    logs = [
        disagreements * math.log(other / risk) + (checks - disagreements) * math.log((1 - other) / (1 - risk))
        for other in others
    ]
    if not logs:
        # A tier of 0.2 or less: there is nothing worse to try.
        return 1.0
    # The most that a float holds is enough.
    return sum(math.exp(min(log, 600.0)) for log in logs) / len(logs)


class Promises:
    """The checks of one version of a model, by tier, since it was loaded. Only the event loop's thread touches it."""

    def __init__(self, tiers: Iterable[float], *, fall_back: bool) -> None:
        """``fall_back``: a broken tier is served at full depth from then on."""
        self._fall_back = fall_back
        self._tiers = frozenset(tier for tier in tiers if tier < 1.0)
        self._checks: dict[float, list[int]] = {}
        self._elsewhere: Callable[[float], tuple[int, int]] = lambda tier: (0, 0)
        self._broken: set[float] = set()

    def join(self, counts: dict[float, list[int]], elsewhere: Callable[[float], tuple[int, int]]) -> None:
        """From here on counts in ``counts`` (checks and disagreements of each tier), and adds what ``elsewhere`` says
        of a tier: the checks of other processes that serve the same."""
        self._checks, self._elsewhere = counts, elsewhere

    def record(self, tier: float, agrees: bool) -> float:
        """Counts one check of an answer under ``tier``; the evidence against the tier's promise."""
        if tier not in self._tiers:
            raise KeyError(tier)
        counts = self._checks.setdefault(tier, [0, 0])
        counts[0] += 1
        counts[1] += not agrees
        return self.evidence(tier)

    def evidence(self, tier: float) -> float:
        """The evidence against the promise of ``tier`` by now."""
        (own, own_disagreements), (others, others_disagreements) = self._checks.get(tier, (0, 0)), self._elsewhere(tier)
        found = evidence(own + others, own_disagreements + others_disagreements, 1.0 - tier)
        if found >= BROKEN:
            self._broken.add(tier)
        return found

    def broken(self, tier: float | None) -> bool:
        """Whether the evidence against ``tier`` has ever been enough."""
        return tier in self._broken

    def suspended(self, tier: float | None) -> bool:
        """Whether ``tier`` is served at full depth instead."""
        return self._fall_back and self.broken(tier)
