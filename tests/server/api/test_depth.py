"""From wish to policy: certified tiers, the speed curve, thresholds of one's own."""

from typing import Any

import pytest

from models.exits import Policy
from server.api.depth import Depth, choose_depth, fastest
from server.api.errors import ApiError
from server.api.schemas import ClassifyRequest
from tests.tiny import tiny_calibration

CALIBRATION = tiny_calibration(4)


def _choose(default_quality: float = 0.99, pressure: float = 0.0, **wish: Any) -> Depth:
    request = ClassifyRequest(inputs="a", **wish)
    return choose_depth(request, CALIBRATION, exits=4, default_quality=default_quality, pressure=pressure)


def _refusal(**wish: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        _choose(**wish)
    assert caught.value.status == 422
    return caught.value


def test_no_wish_means_the_default_quality() -> None:
    assert _choose() == Depth(Policy("confidence", 0.97), 0.99)
    assert _choose(default_quality=0.95) == Depth(Policy("confidence", 0.8), 0.95)


def test_a_default_that_is_not_certified_runs_to_the_end() -> None:
    assert _choose(default_quality=0.999) == Depth(Policy("confidence", 1.0, min_exit=4), 1.0)


@pytest.mark.parametrize(
    ("quality", "tier", "threshold"), [(0.99, 0.99, 0.97), (0.98, 0.99, 0.97), (0.97, 0.97, 0.9), (0.5, 0.95, 0.8)]
)
def test_a_quality_takes_the_smallest_tier_that_is_enough(quality: float, tier: float, threshold: float) -> None:
    assert _choose(quality=quality) == Depth(Policy("confidence", threshold), tier)


def test_quality_1_is_the_last_exit() -> None:
    assert _choose(quality=1.0) == Depth(Policy("confidence", 1.0, min_exit=4), 1.0)
    assert _choose(quality=1) == _choose(quality=1.0)


def test_a_quality_beyond_the_certified_names_the_tiers_there_are() -> None:
    refusal = _refusal(quality=0.995)
    assert refusal.param == "quality"
    assert "0.99, 0.97, 0.95" in refusal.message


@pytest.mark.parametrize("limits", [{"min_exit": 2}, {"max_exit": 3}, {"min_exit": 2, "max_exit": 3}])
def test_exit_limits_void_the_promise(limits: dict[str, int]) -> None:
    depth = _choose(quality=0.97, **limits)
    assert depth == Depth(Policy("confidence", 0.9, limits.get("min_exit", 1), limits.get("max_exit")), None)


def test_limits_that_limit_nothing_keep_the_promise() -> None:
    assert _choose(quality=0.97, min_exit=1, max_exit=4).tier == 0.97
    assert _choose(quality=1.0, min_exit=3).tier == 1.0


def test_quality_1_with_a_max_exit_goes_that_far_without_a_promise() -> None:
    assert _choose(quality=1.0, max_exit=2) == Depth(Policy("confidence", 1.0, 2, 2), None)


@pytest.mark.parametrize(("speed", "threshold"), [(1.0, 0.99), (1.2, 0.99), (1.5, 0.9), (2.0, 0.8), (3.0, 0.6)])
def test_a_speed_takes_the_point_that_agrees_best(speed: float, threshold: float) -> None:
    assert _choose(speed=speed) == Depth(Policy("confidence", threshold), None)


def test_a_speed_beyond_the_curve_names_its_end() -> None:
    refusal = _refusal(speed=3.5)
    assert refusal.param == "speed"
    assert "ends at 3" in refusal.message
    assert fastest(CALIBRATION) == 3.0


@pytest.mark.parametrize(
    ("wish", "policy"),
    [
        ({"threshold": 0.8}, Policy("confidence", 0.8)),
        ({"criterion": "confidence", "threshold": 1}, Policy("confidence", 1.0)),
        ({"criterion": "entropy", "threshold": 0.2, "min_exit": 2}, Policy("entropy", 0.2, 2)),
        ({"criterion": "patience", "threshold": 2, "max_exit": 3}, Policy("patience", 2.0, 1, 3)),
    ],
)
def test_a_threshold_of_ones_own_promises_nothing(wish: dict[str, Any], policy: Policy) -> None:
    assert _choose(**wish) == Depth(policy, None)


@pytest.mark.parametrize(
    ("wish", "param"),
    [
        ({"criterion": "entropy"}, "threshold"),
        ({"threshold": 1.5}, "threshold"),
        ({"criterion": "patience", "threshold": 0.5}, "threshold"),
        ({"criterion": "patience", "threshold": 0}, "threshold"),
        ({"min_exit": 5}, "min_exit"),
        ({"max_exit": 5}, "max_exit"),
        ({"min_exit": 3, "max_exit": 2}, "max_exit"),
        ({"quality": 0.97, "quality_floor": 0.98}, "quality_floor"),
        ({"quality_floor": 0.995}, "quality_floor"),
        ({"speed": 2.0, "quality_floor": 0.9}, "quality_floor"),
        ({"threshold": 0.9, "quality_floor": 0.9}, "quality_floor"),
    ],
)
def test_what_makes_no_sense_is_refused_by_field(wish: dict[str, Any], param: str) -> None:
    assert _refusal(**wish).param == param


def test_a_floor_changes_nothing_without_load_and_load_nothing_without_a_floor() -> None:
    assert _choose(quality=0.99, quality_floor=0.95) == _choose(quality=0.99)
    assert _choose(quality_floor=0.95) == _choose()
    assert _choose(quality=0.99, pressure=1.0) == _choose(quality=0.99)
    assert _choose(quality=1.0, pressure=1.0) == _choose(quality=1.0)


@pytest.mark.parametrize(
    ("pressure", "floor", "tier", "threshold"),
    [
        (0.1, 0.95, 0.97, 0.9),
        (0.5, 0.95, 0.97, 0.9),
        (0.6, 0.95, 0.95, 0.8),
        (1.0, 0.95, 0.95, 0.8),
        (1.0, 0.96, 0.97, 0.9),
    ],
)
def test_load_lowers_depth_step_by_step_down_to_the_floor(
    pressure: float, floor: float, tier: float, threshold: float
) -> None:
    depth = _choose(quality=0.99, quality_floor=floor, pressure=pressure)
    assert depth == Depth(Policy("confidence", threshold), tier, lowered=True)


def test_load_lowers_full_depth_too_where_it_may() -> None:
    assert _choose(quality=1.0, quality_floor=0.97, pressure=0.2) == Depth(
        Policy("confidence", 0.97), 0.99, lowered=True
    )


def test_a_floor_between_the_tiers_lowers_nothing_below_it() -> None:
    assert _choose(quality=0.97, quality_floor=0.96, pressure=1.0) == _choose(quality=0.97)


def test_load_never_lowers_to_a_tier_that_is_served_at_full_depth() -> None:
    def lowered(broken: set[float]) -> float | None:
        request = ClassifyRequest(inputs="a", quality=0.99, quality_floor=0.95)
        return choose_depth(
            request, CALIBRATION, exits=4, default_quality=0.99, pressure=1.0, suspended=broken.__contains__
        ).tier

    assert lowered({0.95}) == 0.97
    assert lowered({0.95, 0.97}) == 0.99
