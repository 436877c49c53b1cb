"""Evidence against a promise: rare while it holds, soon there when it does not."""

import numpy as np
import pytest

from server.promises import BROKEN, Promises, evidence


def largest_evidence(risk: float, promised: float, checks: int, seed: int) -> float:
    wrong = np.random.default_rng(seed).random(checks) < risk
    counts = np.cumsum(wrong).tolist()
    return max(evidence(n, k, promised) for n, k in enumerate(counts, start=1))


@pytest.mark.parametrize("promised", [0.1, 0.05, 0.01])
def test_a_promise_that_just_holds_is_called_broken_in_at_most_one_run_of_twenty(promised: float) -> None:
    # Looked at after each of 1,500 checks; of 300 runs 15 may be wrong, and 25 are three standard errors more.
    alarms = sum(largest_evidence(promised, promised, 1_500, seed) >= BROKEN for seed in range(300))
    assert alarms <= 25


@pytest.mark.parametrize(
    ("promised", "risk", "checks"), [(0.05, 0.15, 200), (0.01, 0.05, 500), (0.1, 0.15, 1_500), (0.01, 0.02, 2_000)]
)
def test_a_broken_promise_is_found(promised: float, risk: float, checks: int) -> None:
    found = sum(largest_evidence(risk, promised, checks, seed) >= BROKEN for seed in range(40))
    assert found >= 32


def test_evidence_is_none_before_the_first_check_and_falls_while_answers_agree() -> None:
    assert evidence(0, 0, 0.05) == pytest.approx(1.0)
    assert evidence(100, 0, 0.05) < evidence(10, 0, 0.05) < 1.0
    assert evidence(10, 3, 0.05) > evidence(10, 2, 0.05) > 1.0


def test_one_disagreement_more_is_worth_its_likelihood_ratio() -> None:
    # By hand, with one alternative left: a risk of 0.5 can only be tried against 0.625 and 0.75.
    expected = (0.625 / 0.5 * (0.375 / 0.5) ** 2 + 0.75 / 0.5 * (0.25 / 0.5) ** 2) / 2
    assert evidence(3, 1, 0.5) == pytest.approx(expected)


def test_of_a_promise_of_next_to_nothing_there_is_no_evidence() -> None:
    assert evidence(10, 10, 0.9) == 1.0


def test_evidence_beyond_what_a_float_holds_is_still_a_number() -> None:
    assert evidence(10**6, 10**6, 0.005) > 1e200


def test_a_broken_tier_is_suspended_only_where_falling_back_is_wished() -> None:
    for fall_back in (True, False):
        promises = Promises((1.0, 0.99, 0.97), fall_back=fall_back)
        for _ in range(20):
            promises.record(0.99, agrees=False)
            promises.record(0.97, agrees=True)
        assert promises.broken(0.99)
        assert promises.suspended(0.99) is fall_back
        assert not promises.broken(0.97)
        assert not promises.suspended(None)


def test_a_promise_once_broken_stays_so() -> None:
    promises = Promises((0.97,), fall_back=True)
    for _ in range(20):
        promises.record(0.97, agrees=False)
    for _ in range(3_000):
        promises.record(0.97, agrees=True)
    assert promises.suspended(0.97)
