"""Which replica is chosen, how much extra may be asked, and when a breaker opens: the arithmetic without a network."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.attempt import AttemptFailed
from backends.balance import DECAY_S, MOST, Latency, choose
from backends.breaker import COOL_FIRST_S, FAILURES_TO_OPEN, LIMITED_MAX_S, Breaker
from backends.share import Share


class Loaded:
    def __init__(self, outstanding: int, latency_s: float = 0.0) -> None:
        self.outstanding = outstanding
        self.latency = Latency()
        if latency_s:
            self.latency.observe(latency_s, 0.0)


def picks(replicas: list[Loaded], draws: int = 2000) -> list[float]:
    """Share of the draws that each gets."""
    random.seed(1)
    counted = Counter(id(choose(replicas, 0.0)) for _ in range(draws))
    return [counted[id(replica)] / draws for replica in replicas]


# Power of two choices.


def test_fewer_outstanding_requests_win():
    assert picks([Loaded(3), Loaded(2)]) == [0, 1]
    assert picks([Loaded(2)]) == [1]


def test_the_most_loaded_of_many_gets_nothing_and_the_least_two_draws():
    shares = picks([Loaded(0), Loaded(1), Loaded(2), Loaded(3)])
    assert shares[3] == 0
    assert shares == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)


def test_a_fast_replica_takes_more():
    assert picks([Loaded(2, 0.1), Loaded(1, 0.3)]) == [1, 0]
    assert picks([Loaded(5, 0.1), Loaded(1, 0.2)]) == [0, 1]


def test_no_replica_is_taken_to_be_very_much_slower():
    assert picks([Loaded(int(MOST), 0.1), Loaded(0, 60.0)]) == [0, 1]
    assert picks([Loaded(int(MOST) - 2, 0.1), Loaded(0, 60.0)]) == [1, 0]


def test_without_news_of_one_the_other_s_latency_does_not_count():
    assert picks([Loaded(1, 0.001), Loaded(0)]) == [0, 1]


def test_equals_share():
    for replicas in ([Loaded(1, 0.1), Loaded(1, 0.1)], [Loaded(0), Loaded(0), Loaded(0)]):
        assert picks(replicas) == pytest.approx([1 / len(replicas)] * len(replicas), abs=0.05)


def test_a_latency_jumps_up_and_sinks_slowly():
    latency = Latency()
    assert latency.value(5.0) == 0.0
    latency.observe(0.1, 0.0)
    latency.observe(2.0, 1.0)
    assert latency.value(1.0) == 2.0
    latency.observe(0.1, 2.0)
    assert 1.7 < latency.value(2.0) < 2.0
    assert latency.value(2.0 + DECAY_S) == pytest.approx(latency.value(2.0) / math.e)
    latency.forget()
    assert latency.value(2.0) == 0.0


# Shares of extra calls.


@given(st.lists(st.booleans(), max_size=400), st.sampled_from([0.05, 0.1, 0.2, 0.5, 1.0]))
def test_extra_calls_keep_to_their_share(calls, share):
    budget, ordinary, extra = Share(share, reserve=10.0), 0, 0
    for is_ordinary in calls:
        if is_ordinary:
            ordinary += 1
            budget.earn()
        else:
            extra += budget.spend()
        assert extra <= 10 + share * ordinary + 1e-6
    assert budget.spent == extra


def test_ten_tenths_are_a_whole():
    budget = Share(0.1, reserve=1.0, full=False)
    for _ in range(9):
        budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    assert not budget.spend()
    assert (budget.spent, budget.refused) == (1, 2)


def test_a_share_of_nothing_is_nothing():
    budget = Share(0.0, reserve=10.0, per_second=1000.0)
    budget.earn()
    assert not budget.spend()


def test_a_quiet_backend_may_be_asked_again(monkeypatch):
    now = 100.0
    monkeypatch.setattr("backends.share.time.monotonic", lambda: now)
    budget = Share(0.2, reserve=2.0, per_second=1.0)
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    now += 1.5
    assert [budget.spend() for _ in range(2)] == [True, False]


# Breakers.


def failure(kind: str = "upstream_error", **options: object) -> AttemptFailed:
    return AttemptFailed(kind, "broken", **options)  # type: ignore[arg-type]


def test_a_breaker_opens_and_half_opens_and_closes():
    breaker = Breaker()
    assert [breaker.failed(failure(), 0.0) for _ in range(FAILURES_TO_OPEN)] == [False, False, True]
    assert breaker.state(0.0) == "cooling"
    assert breaker.state(COOL_FIRST_S * 1.3) == "trial"
    breaker.succeeded()
    assert breaker.state(0.0) == "healthy"


def test_one_failure_in_the_trial_opens_it_again():
    breaker = Breaker()
    for _ in range(FAILURES_TO_OPEN):
        breaker.failed(failure(), 0.0)
    assert breaker.failed(failure(), 5.0)
    assert breaker.state(5.0) == "cooling"


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 20)), min_size=1, max_size=20))
def test_a_rest_is_never_shortened(failures):
    breaker, now = Breaker(), 0.0
    for rest_s, step_s in failures:
        before = breaker.limited_until
        breaker.failed(failure("rate_limited", retry_after=rest_s), now)
        assert breaker.limited_until == max(before, now + min(rest_s, LIMITED_MAX_S))
        now += step_s
    assert breaker.state(breaker.limited_until + 1) == "healthy"
    assert breaker.failures == 0


def test_a_cool_down_is_never_shortened_by_news_of_the_same_outage():
    breaker = Breaker()
    breaker.failed(failure("connect", reached=False), 0.0)
    until = breaker.cooled_until
    breaker.failed(failure(retry_after=0.1), 0.1)
    breaker.probed(False, 0.2)
    assert breaker.cooled_until == until
    breaker.probed(False, until + 1)
    assert breaker.cooled_until == until + 1
    breaker.probed(True, 0.0)  # it could not be reached, and now it can
    assert breaker.state(0.2) == "trial"


def test_a_healthy_breaker_is_well_again_after_a_rest():
    breaker = Breaker()
    breaker.failed(failure("rate_limited", retry_after=1), 0.0)
    assert (breaker.well, breaker.state(0.5)) == (False, "limited")
    assert breaker.state(1.5) == "healthy"
    assert breaker.well
