"""Limiters beside a model of nothing but dictionaries: any sequence of events, any arrivals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access.counters_memory import MemoryLimiter
from gateway.access.limits import BudgetExhausted, LimitExceeded, Refused
from tests.gateway.limiters import Clock, ask, scope

_amount = st.integers(0, 50)
_event = st.one_of(
    st.tuples(st.just("admit"), _amount, _amount, st.integers(1, 100)),
    st.tuples(st.just("settle"), st.integers(0, 40), _amount, _amount),
    st.tuples(st.just("touch"), st.integers(0, 40), _amount, _amount),
    st.tuples(st.just("wait"), st.integers(0, 60), st.just(0), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_event, max_size=80), st.integers(0, 300))
async def test_used_is_settled_plus_held_in_any_order(events: list[tuple[str, int, int, int]], budget: int) -> None:
    """A model with nothing but dictionaries runs beside the limiter; both must agree after every event."""
    clock = Clock()
    limiter, key, other = (
        await clock.limiter(),
        scope(budget_nanousd=budget, parallel=5),
        scope("b", budget_nanousd=10**6),
    )
    assert isinstance(limiter, MemoryLimiter)
    held: dict[str, tuple[int, float]] = {}
    late: set[str] = set()
    settled = 0
    for n, (kind, first, second, third) in enumerate(events):
        for hold_id in [h for h, (_, until) in held.items() if until <= clock.now]:
            del held[hold_id]
            late.add(hold_id)
        target = str(first)
        if kind == "admit":
            fits = settled + sum(c for c, _ in held.values()) + second <= budget and settled < budget and len(held) < 5
            try:
                await limiter.admit(ask(str(n), key, other, tokens=first, cost=second, ttl_s=third))
                assert fits
                held[str(n)] = (second, clock.now + third)
            except Refused:
                assert not fits
        elif kind == "settle":
            known = target in held or target in late
            assert (await limiter.settle(target, second, third) is not None) == known
            held.pop(target, None)
            late.discard(target)
            settled += third if known else 0
        elif kind == "touch":
            cost, until = held.get(target, (0, 0.0))
            raised = max(cost, third)
            if target in held and raised > cost and settled + sum(c for c, _ in held.values()) + raised - cost > budget:
                with pytest.raises(BudgetExhausted):
                    await limiter.touch(target, second, 0, third)
            else:
                assert await limiter.touch(target, second, 0, third) == (target in held)
                if target in held:
                    held[target] = (raised, max(until, clock.now + second))
        else:
            clock.pass_(first)
        for hold_id in [h for h, (_, until) in held.items() if until <= clock.now]:
            del held[hold_id]
            late.add(hold_id)
        expected = (settled, sum(cost for cost, _ in held.values()))
        assert await limiter.balance("key:a") == (await limiter.balance("key:b")) == expected
        assert limiter.open_holds == len(held)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 40)), min_size=1, max_size=60), st.integers(1, 60))
async def test_no_window_lets_more_through_than_stated(arrivals: list[tuple[float, int]], limit: int) -> None:
    """At most `limit * (1 + T / 60)` requests, and a refused one passes exactly when it was told to."""
    clock = Clock()
    limiter, key = await clock.limiter(), scope(requests_per_minute=limit)
    passed: list[float] = []
    n = 0
    for wait, count in arrivals:
        clock.pass_(wait)
        for _ in range(count):
            n += 1
            try:
                await limiter.admit(ask(str(n), key))
            except LimitExceeded as refused:
                told = refused.retry_after_s
                clock.pass_(told * 0.99)
                with pytest.raises(LimitExceeded):
                    await limiter.admit(ask(f"{n} early", key))
                clock.pass_(told * 0.01 + 1e-6)
                await limiter.admit(ask(f"{n} again", key))
            passed.append(clock.now)
    for i in range(len(passed)):
        for j in range(i, len(passed)):
            assert j - i + 1 <= limit * (1 + (passed[j] - passed[i]) / 60) + 1e-3
