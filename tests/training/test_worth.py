"""Which exits earn their cost."""

import numpy as np
import pytest

from tests.training.synthetic import draw
from training.worth import MOST_EXITS, Timings, exit_sets

LOGITS, _, _ = draw(600, exits=4, seed=3, sharpness=1.5)


def test_seconds_until_an_exit_leave_out_the_heads_of_those_before_it_that_are_gone() -> None:
    timings = Timings((1.0, 2.0, 3.0, 4.0), head=0.25)
    assert timings.until((0, 1, 2, 3)).tolist() == [1.0, 3.0, 6.0, 10.0]
    assert timings.until((1, 3)).tolist() == [3.0 - 0.25, 10.0 - 0.5]
    assert timings.until((3,)).tolist() == [10.0 - 0.75]


def test_every_set_holds_the_last_exit_and_the_cheapest_stands_first() -> None:
    sets = exit_sets(LOGITS, Timings((1.0,) * 4, head=0.1), 0.95)
    assert len({one.kept for one in sets}) == 8
    assert all(one.kept[-1] == 3 for one in sets)
    assert [one.seconds for one in sets] == sorted(one.seconds for one in sets)
    assert all(one.agreement >= 0.95 and sum(one.shares) == pytest.approx(1) for one in sets)


def test_exits_that_cost_nothing_are_all_worth_having() -> None:
    best = exit_sets(LOGITS, Timings((1.0,) * 4, head=0.0), 0.95)[0]
    alone = exit_sets(LOGITS, Timings((1.0,) * 4, head=0.0), 0.95)[-1]
    assert len(best.kept) > 1
    assert alone.kept == (3,)
    assert best.seconds < alone.seconds


def test_an_exit_that_answers_nobody_is_left_out_and_one_that_costs_too_much_too() -> None:
    useless = LOGITS.copy()
    # Always unsure, and wrong as often as not.
    useless[1] = np.random.default_rng(0).normal(scale=1e-3, size=useless[1].shape)
    kept = exit_sets(useless, Timings((1.0,) * 4, head=0.2), 0.95)[0].kept
    assert 1 not in kept
    assert exit_sets(LOGITS, Timings((1.0,) * 4, head=0.9), 0.999)[0].kept == (3,)


def test_too_many_exits_to_try_every_set_are_refused_with_the_limit() -> None:
    many = np.zeros((MOST_EXITS + 2, 3, 2))
    with pytest.raises(ValueError, match=f"at most {MOST_EXITS}"):
        exit_sets(many, Timings((1.0,) * (MOST_EXITS + 2), 0.0), 0.9)
