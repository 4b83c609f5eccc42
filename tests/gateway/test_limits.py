"""Limits, budgets and holds: atomic, exact, and `used = settled + held` whatever the order of events."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from gateway.access.counters_memory import MemoryLimiter
from gateway.access.counting import LATE_SETTLE_S
from gateway.access.limits import (
    BudgetExhausted,
    Grant,
    Limiter,
    LimitExceeded,
    Refused,
    Scope,
    Standing,
)
from tests.gateway.limiters import DECEMBER_1, NOVEMBER_29, Clock, ask, scope


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def clock(request: pytest.FixtureRequest) -> AsyncIterator[Clock]:
    """Every test of this file that takes a clock runs with both kinds of limiter."""
    made = Clock(request.getfixturevalue("redis_server").url if request.param == "redis" else None)
    yield made
    await made.close()


async def test_it_is_a_limiter(clock: Clock) -> None:
    limiter: Limiter = await clock.limiter()
    assert limiter is not None


async def test_requests_per_minute(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(requests_per_minute=3)
    standings = [(await limiter.admit(ask(str(n), key))).standing for n in range(3)]
    assert [standing.remaining_requests for standing in standings] == [2, 1, 0]
    assert standings[-1].reset_requests_s == pytest.approx(60)
    with pytest.raises(LimitExceeded) as refused:
        await limiter.admit(ask("late", key))
    assert refused.value.limit == "requests_per_minute"
    assert refused.value.scope == "key:a"
    assert refused.value.retry_after_s == pytest.approx(20)
    assert refused.value.headers() == {"retry-after": "20", "x-tierline-limit": "key requests_per_minute"}
    clock.pass_(19.99)
    with pytest.raises(LimitExceeded):
        await limiter.admit(ask("late", key))
    clock.pass_(0.01)
    await limiter.admit(ask("late", key))


async def test_headers_show_the_tightest_scope(clock: Clock) -> None:
    limiter = await clock.limiter()
    grant = await limiter.admit(
        ask(
            "h", scope("a", requests_per_minute=100, tokens_per_minute=50), scope("b", requests_per_minute=5), tokens=20
        )
    )
    assert dict(line.split(": ") for line in grant.standing.lines()) == {
        "x-ratelimit-limit-requests": "5",
        "x-ratelimit-remaining-requests": "4",
        "x-ratelimit-reset-requests": "12.000s",
        "x-ratelimit-limit-tokens": "50",
        "x-ratelimit-remaining-tokens": "30",
        "x-ratelimit-reset-tokens": "24.000s",
    }
    assert Grant(hold_id="h").standing.lines() == []


async def test_tokens_are_corrected_when_settled(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(tokens_per_minute=100)
    await limiter.admit(ask("1", key, tokens=80))
    with pytest.raises(LimitExceeded) as refused:
        await limiter.admit(ask("2", key, tokens=50))
    assert refused.value.limit == "tokens_per_minute"
    assert refused.value.retry_after_s == pytest.approx(18)
    await limiter.settle("1", 10, 0)
    assert (await limiter.admit(ask("2", key, tokens=50))).standing.remaining_tokens == 40
    # More than was expected becomes a debt, which the next one waits out.
    await limiter.settle("2", 190, 0)
    with pytest.raises(LimitExceeded) as in_debt:
        await limiter.admit(ask("3", key, tokens=10))
    assert in_debt.value.retry_after_s == pytest.approx(66)


async def test_a_request_larger_than_the_bucket_waits_for_a_full_one(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(tokens_per_minute=100)
    await limiter.admit(ask("small", key, tokens=30))
    with pytest.raises(LimitExceeded) as refused:
        await limiter.admit(ask("large", key, tokens=500))
    clock.pass_(refused.value.retry_after_s)
    await limiter.admit(ask("large", key, tokens=500))
    with pytest.raises(LimitExceeded) as after:
        await limiter.admit(ask("next", key, tokens=10))
    assert after.value.retry_after_s == pytest.approx(246)


async def test_parallel(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(parallel=2)
    await limiter.admit(ask("1", key))
    await limiter.admit(ask("2", key))
    with pytest.raises(LimitExceeded, match="2 requests at a time; running now: 2") as refused:
        await limiter.admit(ask("3", key))
    assert refused.value.limit == "parallel"
    await limiter.settle("1", 0, 0)
    await limiter.admit(ask("3", key))


async def test_all_scopes_or_none(clock: Clock) -> None:
    limiter = await clock.limiter()
    wide, narrow = scope("wide", requests_per_minute=10, parallel=10, budget_nanousd=100), scope("narrow", parallel=1)
    await limiter.admit(ask("1", narrow))
    for n in range(20):
        with pytest.raises(LimitExceeded):
            await limiter.admit(ask(f"x{n}", wide, narrow, cost=50))
    assert await limiter.balance("key:wide") == (0, 0)
    assert (await limiter.admit(ask("2", wide, cost=100))).standing.remaining_requests == 9


async def test_a_budget_counts_what_is_spent_and_what_is_held(clock: Clock) -> None:
    limiter, key = await clock.limiter(a=700), scope(budget_nanousd=1000)
    grant = await limiter.admit(ask("1", key, cost=200))
    assert grant.budget_used == {"key:a": 0.9}
    with pytest.raises(BudgetExhausted) as held:
        await limiter.admit(ask("2", key, cost=200))
    assert held.value.retry_after_s == 1.0
    assert (held.value.settled_nanousd, held.value.held_nanousd, held.value.needed_nanousd) == (700, 200, 200)
    await limiter.settle("1", 0, 50)
    assert await limiter.budget_used([key]) == {"key:a": 0.75}
    await limiter.admit(ask("2", key, cost=200))
    await limiter.settle("2", 0, 300)  # more than was held: the budget is passed by this and no more
    assert await limiter.balance("key:a") == (1050, 0)
    with pytest.raises(BudgetExhausted, match="wait for the next month") as spent:
        await limiter.admit(ask("3", key))
    assert spent.value.retry_after_s == pytest.approx(DECEMBER_1 - NOVEMBER_29)


async def test_a_budget_of_nothing_admits_nothing(clock: Clock) -> None:
    with pytest.raises(BudgetExhausted):
        await (await clock.limiter()).admit(ask("1", scope(budget_nanousd=0)))
    assert await (await clock.limiter()).budget_used([scope(budget_nanousd=0), scope("b")]) == {"key:a": 1.0}


async def test_a_new_month_starts_from_nothing(clock: Clock) -> None:
    limiter, key = await clock.limiter(a=900), scope(budget_nanousd=1000)
    await limiter.admit(ask("old", key, cost=100))
    clock.pass_(DECEMBER_1 - NOVEMBER_29)
    # The hold has expired meanwhile; it belongs to November, as its row does.
    assert await limiter.balance("key:a") == (0, 0)
    await limiter.admit(ask("new", key, cost=1000))
    assert await limiter.settle("old", 0, 77)
    assert await limiter.balance("key:a") == (0, 1000)
    await limiter.settle("new", 0, 1000)
    assert await limiter.balance("key:a") == (1000, 0)


async def test_settling_twice_is_settling_once(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(budget_nanousd=1000, tokens_per_minute=1000, parallel=1)
    await limiter.admit(ask("1", key, cost=100, tokens=10))
    assert await limiter.settle("1", 20, 60)
    assert not await limiter.settle("1", 20, 60)
    assert not await limiter.settle("never", 1, 1)
    assert await limiter.balance("key:a") == (60, 0)
    await limiter.admit(ask("2", key))  # there is room again for one, and only one
    with pytest.raises(LimitExceeded):
        await limiter.admit(ask("3", key))


async def test_admitting_twice_is_admitting_once(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(budget_nanousd=1000, requests_per_minute=10, parallel=1)
    first = await limiter.admit(ask("1", key, cost=100))
    again = await limiter.admit(ask("1", key, cost=100))
    assert (again.standing, again.budget_used) == (first.standing, first.budget_used)
    assert await limiter.balance("key:a") == (0, 100)


async def test_a_hold_nobody_settles_is_given_back(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(budget_nanousd=100, parallel=1)
    await limiter.admit(ask("1", key, cost=100, ttl_s=60))
    clock.pass_(59)
    assert await limiter.touch("1", 60)
    clock.pass_(59)
    assert await limiter.balance("key:a") == (0, 100)
    clock.pass_(1)
    assert await limiter.balance("key:a") == (0, 0)
    assert limiter.expired_holds == 1
    assert not await limiter.touch("1", 60)
    with pytest.raises(ValueError, match="has expired"):
        await limiter.admit(ask("1", key))
    # Settled late, its money still counts: the ledger has a row for it.
    assert await limiter.settle("1", 5, 30)
    assert not await limiter.settle("1", 5, 30)
    assert await limiter.balance("key:a") == (30, 0)
    await limiter.admit(ask("2", key, cost=70, ttl_s=60))
    clock.pass_(60 + LATE_SETTLE_S + 1)
    await limiter.balance("key:a")
    clock.pass_(LATE_SETTLE_S)
    assert not await limiter.settle("2", 1, 1)


async def test_touch_raises_a_hold_as_the_answer_grows(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(budget_nanousd=100, tokens_per_minute=1000)
    await limiter.admit(ask("1", key, tokens=10, cost=10))
    assert await limiter.touch("1", 60, tokens=400, cost_nanousd=60)
    assert await limiter.balance("key:a") == (0, 60)
    assert await limiter.touch("1", 60, tokens=5, cost_nanousd=5)  # never lowered
    assert await limiter.balance("key:a") == (0, 60)
    with pytest.raises(BudgetExhausted):
        await limiter.admit(ask("2", key, cost=50))
    await limiter.settle("1", 400, 60)
    assert (await limiter.admit(ask("2", key, tokens=600, cost=40))).standing.remaining_tokens == 0


async def test_touch_raises_no_hold_beyond_a_budget(clock: Clock) -> None:
    limiter, wide, narrow = await clock.limiter(b=50), scope(budget_nanousd=1000), scope("b", budget_nanousd=100)
    await limiter.admit(ask("1", wide, narrow, tokens=10, cost=30))
    await limiter.admit(ask("2", narrow, cost=10))
    assert await limiter.touch("1", 60, cost_nanousd=40)
    with pytest.raises(BudgetExhausted, match=r"needs \$0.000000001 more. It ends here") as refused:
        await limiter.touch("1", 60, cost_nanousd=41)
    assert (refused.value.scope, refused.value.needed_nanousd, refused.value.held_nanousd) == ("key:b", 1, 50)
    assert refused.value.retry_after_s == 1.0  # the other one may end
    assert await limiter.balance("key:a") == (0, 40)  # nothing was changed
    assert await limiter.balance("key:b") == (50, 50)
    # To live on is no raise, even where others have passed the budget by now.
    await limiter.settle("2", 0, 30)
    assert await limiter.touch("1", 900, cost_nanousd=40)


async def test_touch_puts_a_bucket_into_debt(clock: Clock) -> None:
    limiter, key = await clock.limiter(), scope(tokens_per_minute=60)
    await limiter.admit(ask("1", key, tokens=60))
    clock.pass_(30)
    assert await limiter.touch("1", 60, tokens=120)
    with pytest.raises(LimitExceeded) as refused:
        await limiter.admit(ask("2", key, tokens=10))
    assert refused.value.retry_after_s == pytest.approx(40)  # 90 used, 50 allowed


async def test_every_answer_says_where_the_limits_stand(clock: Clock) -> None:
    limiter = await clock.limiter()
    wide = scope("wide", requests_per_minute=100, tokens_per_minute=1000, parallel=3)
    narrow = scope("narrow", requests_per_minute=2, parallel=5)
    names = [
        f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
    ]
    names += ["x-ratelimit-limit-parallel", "x-ratelimit-remaining-parallel"]

    def said(standing: Standing) -> list[str]:
        headers = dict(line.split(": ") for line in standing.lines())
        assert list(headers) == names
        return list(headers.values())

    first = await limiter.admit(ask("1", wide, narrow, tokens=400))
    assert said(first.standing) == ["2", "1", "30.000s", "1000", "600", "24.000s", "3", "2"]
    second = await limiter.admit(ask("2", wide, narrow, tokens=100))
    assert said(second.standing) == ["2", "0", "60.000s", "1000", "500", "30.000s", "3", "1"]
    with pytest.raises(LimitExceeded) as refused:
        await limiter.admit(ask("3", wide, narrow, tokens=100))
    assert said(refused.value.standing) == said(second.standing)
    clock.pass_(15)
    settled = await limiter.settle("1", 100, 0)
    assert settled is not None
    assert said(settled) == ["2", "0", "45.000s", "1000", "1000", "0.000s", "3", "2"]


async def test_a_refusal_says_whose_limit_it_is(clock: Clock) -> None:
    limiter = await clock.limiter()
    key = Scope("key:1", 60, 100, 1, 1000, label="Your key 'ci' (tl-abc…)")
    await limiter.admit(ask("1", key, tokens=90, cost=900))

    async def said(**wider: int | None) -> str:
        narrow = {"requests_per_minute": None, "tokens_per_minute": None, "parallel": None, "budget_nanousd": None}
        with pytest.raises(Refused) as refused:
            await limiter.admit(ask("2", msgspec.structs.replace(key, **{**narrow, **wider}), tokens=40, cost=200))
        return refused.value.message

    assert await said(requests_per_minute=1) == (
        "Your key 'ci' (tl-abc…) allows 1 request per minute; there is room for the next one in 60.0 s."
    )
    assert await said(tokens_per_minute=100) == (
        "Your key 'ci' (tl-abc…) allows 100 tokens per minute; "
        "there is room for the 40 tokens of this request in 18.0 s."
    )
    assert await said(parallel=1) == (
        "Your key 'ci' (tl-abc…) allows 1 request at a time; running now: 1. Try again when one has ended."
    )
    assert (await said(budget_nanousd=1000)).startswith("Your key 'ci' (tl-abc…) has a monthly budget of $0.000001; ")


async def test_a_hold_keeps_the_limits_it_was_admitted_with(clock: Clock) -> None:
    """Another request of the same scope may come with other limits, when a policy was edited or none applies."""
    limiter = await clock.limiter()
    await limiter.admit(ask("1", scope(tokens_per_minute=100), tokens=80))
    await limiter.admit(ask("2", scope(), tokens=5))
    assert await limiter.touch("1", 60, tokens=100)
    settled = await limiter.settle("1", 30, 0)
    assert settled is not None
    assert settled.remaining_tokens == 70


@pytest.mark.parametrize(("tokens", "cost"), [(-1, 0), (0, -1)])
async def test_negative_amounts_are_mistakes(clock: Clock, tokens: int, cost: int) -> None:
    limiter, key = await clock.limiter(), scope(budget_nanousd=10)
    with pytest.raises(ValueError, match=">= 0"):
        await limiter.admit(ask("1", key, tokens=tokens, cost=cost))
    await limiter.admit(ask("2", key))
    with pytest.raises(ValueError, match="cannot be settled"):
        await limiter.settle("2", tokens, cost)
    assert await limiter.settle("2", 0, 0)


async def test_settled_holds_leave_nothing_behind() -> None:
    limiter, key = MemoryLimiter(), scope(parallel=5)
    for n in range(20_000):
        await limiter.admit(ask(str(n), key))
        await limiter.settle(str(n), 1, 1)
    assert limiter.open_holds == 0
    assert len(limiter._expiries) < 3000


async def test_a_thousand_at_once_on_an_almost_spent_budget(clock: Clock) -> None:
    """The promise of `limits.py`: passed by no more than what the running ones used beyond their holds."""
    budget, spent, hold, most = 10_000_000, 9_000_000, 10_000, 13_000
    limiter, key = await clock.limiter(a=spent), scope(budget_nanousd=budget)
    order = random.Random(5)
    running: dict[int, int] = {}
    over_at_last_admission: list[int] = []
    admitted = 0

    async def request(n: int) -> None:
        nonlocal admitted, over_at_last_admission
        used = order.randrange(hold // 2, most)
        while True:
            try:
                await limiter.admit(ask(str(n), key, cost=hold))
                break
            except BudgetExhausted as refused:
                if refused.retry_after_s > 1:
                    return
                await asyncio.sleep(0)  # only holds stand in the way: one of them may end
        admitted += 1
        running[n] = max(0, used - hold)
        over_at_last_admission = list(running.values())
        for _ in range(order.randrange(5)):
            await asyncio.sleep(0)
        await limiter.settle(str(n), 1, used)
        del running[n]

    await asyncio.gather(*(request(n) for n in range(1000)))
    settled, held = await limiter.balance("key:a")
    assert held == 0
    assert 100 <= admitted < 1000
    assert settled <= budget + sum(over_at_last_admission)
    # And it is not timid either: what is left is less than one hold.
    assert settled > budget - hold
