"""Bounds on a rate: known values, monotone, and true as often as they say when looked at after every audit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betaincinv

from cache.promise.bounds import Alarm, lower_bound, upper_bound

COUNTS = st.integers(1, 5000).flatmap(lambda audits: st.tuples(st.integers(0, audits), st.just(audits)))


def test_without_audits_nothing_is_known() -> None:
    assert upper_bound(0, 0, 0.95) == 1.0
    assert lower_bound(0, 0, 0.95) == 0.0


@given(COUNTS)
def test_the_bounds_enclose_what_was_found(counts: tuple[int, int]) -> None:
    errors, audits = counts
    assert 0.0 <= lower_bound(errors, audits, 0.95) <= errors / audits <= upper_bound(errors, audits, 0.95) <= 1.0


@given(COUNTS)
def test_the_bounds_rise_with_errors_and_with_confidence(counts: tuple[int, int]) -> None:
    errors, audits = counts
    if errors < audits:
        assert upper_bound(errors, audits, 0.95) <= upper_bound(errors + 1, audits, 0.95)
        assert lower_bound(errors, audits, 0.95) <= lower_bound(errors + 1, audits, 0.95)
    assert upper_bound(errors, audits, 0.9) <= upper_bound(errors, audits, 0.99)
    assert upper_bound(errors, audits + 1, 0.95) <= upper_bound(errors, audits, 0.95)


@pytest.mark.parametrize(("errors", "audits", "exact"), [(0, 300, 0.00994), (3, 600, 0.01287), (50, 10_000, 0.00632)])
def test_looking_at_every_moment_costs_less_than_the_double_of_one_look(errors: int, audits: int, exact: float) -> None:
    """`exact`: Clopper and Pearson's bound for one look, from tables of the beta distribution."""
    assert exact < upper_bound(errors, audits, 0.95) < 2 * exact


def _fails(seed: int, rate: float, drift: float) -> tuple[bool, bool]:
    """Whether the upper, and the lower bound was ever wrong about the mean chance so far, looked at again and again."""
    lot = random.Random(seed)
    errors, chances, too_low, too_high = 0, 0.0, False, False
    for n in range(1, 601):
        # The chance depends on what came before, as it does where a bar moves.
        chance = min(1.0, rate * (1.0 + drift * (n > 200)) * (0.5 if errors > 2 else 1.0))
        chances += chance
        errors += lot.random() < chance
        if n % 10 == 0 or n < 10:
            too_low |= upper_bound(errors, n, 0.95) < chances / n
            too_high |= lower_bound(errors, n, 0.95) > chances / n
    return too_low, too_high


@pytest.mark.parametrize(("rate", "drift"), [(0.005, 0.0), (0.02, 3.0), (0.1, -0.9)])
def test_the_bounds_hold_at_every_look_in_at_least_95_of_100_deployments(rate: float, drift: float) -> None:
    runs = 300
    found = [_fails(seed, rate, drift) for seed in range(runs)]
    assert sum(low for low, _ in found) <= 0.05 * runs
    assert sum(high for _, high in found) <= 0.05 * runs


def test_a_bound_for_one_look_fails_too_often_when_looked_at_again_and_again() -> None:
    """Why the bounds are not Clopper and Pearson's."""
    rate, runs, fooled, ours = 0.02, 200, 0, 0
    for seed in range(runs):
        wrong = np.random.default_rng(seed).random(2000) < rate
        audits = np.arange(1, 2001)[::20]
        errors = np.cumsum(wrong)[::20]
        fooled += bool((betaincinv(errors + 1, audits - errors, 0.95) < rate).any())
        ours += any(upper_bound(int(e), int(n), 0.95) < rate for e, n in zip(errors, audits, strict=True))
    assert fooled > 0.1 * runs
    assert ours <= 0.05 * runs


@pytest.mark.parametrize("promise", [0.001, 0.005, 0.01, 0.05, 0.3, 0.5])
def test_the_alarm_goes_off_within_the_stated_number_of_wrong_audits(promise: float) -> None:
    alarm = Alarm(promise)
    for _ in range(5000):
        alarm.add(False)
    needed = next(n for n in range(1, 100) if alarm.add(True))
    assert needed == Alarm(promise).most_wrong_in_a_row <= 25


def test_the_alarm_is_quiet_while_the_promise_is_kept() -> None:
    """At the promised rate itself, false alarms are at least 2,000 audits apart in the mean."""
    lot, alarms = random.Random(7), 0
    alarm = Alarm(0.02)
    for _ in range(100_000):
        if alarm.add(lot.random() < 0.02):
            alarms += 1
            alarm = Alarm(0.02)
    assert alarms <= 50
