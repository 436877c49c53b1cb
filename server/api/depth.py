"""From what a request wishes (quality, speed, threshold) to the policy that its texts run under."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from models.bundle import PrecisionCalibration, Tier
from models.exits import Policy, full_depth
from server.api.errors import ApiError, invalid
from server.api.schemas import ClassifyRequest


@dataclass(frozen=True, slots=True)
class Depth:
    """The policy for a request's texts and the certified quality that comes with it (``None``: nothing is promised).

    ``lowered``: load has put it below the quality that was asked for, with the request's consent.
    """

    policy: Policy
    tier: float | None
    lowered: bool = False


def choose_depth(
    request: ClassifyRequest,
    calibration: PrecisionCalibration,
    *,
    exits: int,
    default_quality: float,
    pressure: float = 0.0,
    suspended: Callable[[float | None], bool] = lambda tier: False,
) -> Depth:
    """The depth that ``request`` asks for, of a model with ``exits`` exits.

    ``pressure`` is the load, from 0 (none) to 1: it chooses among the certified tiers from the quality asked for down
    to the request's ``quality_floor``. Without a floor it changes nothing. A tier that is ``suspended`` is served at
    full depth, so load lowers to none.

    Raises :class:`ApiError` (422), naming the field, for what this model does not have.
    """
    low, high = _limits(request, exits)
    if request.quality_floor is not None:
        _check_floor(request, default_quality)
    if request.threshold is not None or request.criterion is not None:
        return _own_threshold(request, low, high)
    if request.speed is not None:
        return _from_speed(request.speed, calibration, low, high)
    quality = default_quality if request.quality is None else request.quality
    tier = None if quality >= 1.0 else certified_tier(calibration, quality)
    if quality < 1.0 and tier is None and request.quality is not None:
        raise invalid(_no_tier(calibration, quality), "quality")
    limited = high is not None and high < exits
    lowered = _lowered(request, quality, calibration, pressure, suspended)
    if lowered is not None:
        tier = lowered
    if tier is None:
        # 1.0 was asked for, or nothing was and the server's default cannot be promised here: the last exit, always.
        deepest = high if high is not None else exits
        return Depth(replace(full_depth(deepest), max_exit=high), None if limited else 1.0)
    # The certificate is for thresholds alone: other exits' answers were not counted when it was drawn up.
    voided = low > 1 or limited
    if not voided and suspended(tier.quality):
        return Depth(full_depth(exits), 1.0)
    policy = Policy(tier.criterion, tier.threshold, low, high)
    return Depth(policy, None if voided else tier.quality, lowered is not None)


def certified_tier(calibration: PrecisionCalibration, quality: float) -> Tier | None:
    """The certified tier with the smallest quality of at least ``quality``, the cheapest of several such."""
    enough = [tier for tier in calibration.certified if tier.quality >= quality]
    return min(enough, key=lambda tier: (tier.quality, tier.mean_cost), default=None)


def _lowered(
    request: ClassifyRequest,
    quality: float,
    calibration: PrecisionCalibration,
    pressure: float,
    suspended: Callable[[float | None], bool],
) -> Tier | None:
    """The tier that ``pressure`` lowers ``quality`` to; ``None`` where it stays what it is."""
    floor = request.quality_floor
    if floor is None or pressure <= 0.0:
        return None
    between = {tier.quality for tier in calibration.certified if floor <= tier.quality < quality}
    below = sorted((tier for tier in between if not suspended(tier)), reverse=True)
    steps = math.ceil(min(pressure, 1.0) * len(below))
    return certified_tier(calibration, below[steps - 1]) if steps else None


def calibrated_shares(calibration: PrecisionCalibration, quality: float, *, exits: int) -> tuple[float, ...] | None:
    """Shares of texts that left at each exit under the tier of ``quality`` in calibration (1.0: all at the last one);
    ``None`` where the curves do not have the tier's threshold."""
    if quality >= 1.0:
        return (0.0,) * (exits - 1) + (1.0,)
    tier = certified_tier(calibration, quality)
    if tier is None:
        return None
    curve = calibration.curves.get(tier.criterion, ())
    return next((point.exit_shares for point in curve if point.threshold == tier.threshold), None)


def fastest(calibration: PrecisionCalibration) -> float | None:
    """The largest speed-up on any measured curve, or ``None`` where there is none."""
    return max((point.speedup for points in calibration.curves.values() for point in points), default=None)


def _limits(request: ClassifyRequest, exits: int) -> tuple[int, int | None]:
    for name, value in (("min_exit", request.min_exit), ("max_exit", request.max_exit)):
        if value is not None and value > exits:
            raise invalid(f"{value} is deeper than the model's last exit, {exits}", name)
    low, high = request.min_exit or 1, request.max_exit
    if high is not None and high < low:
        raise invalid(f"{high} lies before min_exit {low}", "max_exit")
    return low, high


def _check_floor(request: ClassifyRequest, default_quality: float) -> None:
    assert request.quality_floor is not None
    if request.speed is not None or request.threshold is not None or request.criterion is not None:
        raise invalid("goes with quality only: speed and threshold promise nothing to lower", "quality_floor")
    quality = default_quality if request.quality is None else request.quality
    if request.quality_floor > quality:
        raise invalid(f"{request.quality_floor:g} is above the quality {quality:g}", "quality_floor")


def _own_threshold(request: ClassifyRequest, low: int, high: int | None) -> Depth:
    if request.threshold is None:
        raise invalid(f"criterion {request.criterion} needs a threshold", "threshold")
    try:
        return Depth(Policy(request.criterion or "confidence", request.threshold, low, high), None)
    except ValueError as error:
        raise invalid(str(error), "threshold") from None


def _from_speed(speed: float, calibration: PrecisionCalibration, low: int, high: int | None) -> Depth:
    enough = [
        (point, criterion)
        for criterion, points in calibration.curves.items()
        for point in points
        if point.speedup >= speed
    ]
    if not enough:
        raise _too_fast(speed, fastest(calibration))
    # Of points that agree equally well, the cheapest.
    best, criterion = max(enough, key=lambda found: (found[0].agreement, found[0].speedup))
    return Depth(Policy(criterion, best.threshold, low, high), None)


def _too_fast(speed: float, maximum: float | None) -> ApiError:
    if maximum is None:
        return invalid("this model has no measured curve to choose a speed from", "speed")
    return invalid(f"{speed:g} is beyond the measured curve, which ends at {int(maximum * 1000) / 1000:g}", "speed")


def _no_tier(calibration: PrecisionCalibration, quality: float) -> str:
    have = sorted({tier.quality for tier in calibration.certified}, reverse=True)
    names = ", ".join(f"{tier:g}" for tier in have)
    certified = f"certified are {names}" if have else "no tier is certified"
    return f"{quality:g} cannot be promised by this model: {certified}; 1.0 always runs to the last exit"
