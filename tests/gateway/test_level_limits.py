"""Limits of key, project, team and organisation together: all that apply or none, however many ask at once.

The model beside the limiters knows only what was admitted; the clock stands still, so that nothing drains.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

import msgspec
import pytest
import pytest_asyncio
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.redis_server import RedisServer
from gateway.access import counters_shared
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.counters_redis import Ids, RedisLimiter
from gateway.access.limits import Admission, BudgetExhausted, Grant, LimitExceeded, Refused, Scope
from gateway.ledger.rows import new_id
from tests.gateway.limiters import NOVEMBER_29, AnyLimiter, Clock, new_channel
from tests.gateway.redis_house import House
from tests.gateway.several import until

ABOVE = {"key:a": ("project:p", "team:t", "organisation:o"), "key:b": ("project:q", "team:t", "organisation:o")}
LEVELS = (*ABOVE, "project:p", "project:q", "team:t", "organisation:o")
Limits = Mapping[str, tuple[int | None, int | None, int | None, int | None]]
_prefixes = itertools.count()


def asking(hold: str, key: str, limits: Limits, tokens: int = 0, cost: int = 0) -> Admission:
    """A request of a key, as a gateway asks for it: the levels that have a limit, and the names of the others."""
    scopes = [Scope(level, *limits.get(level, (None, None, None, None))) for level in (key, *ABOVE[key])]
    limited = [scope for scope in scopes if any(value is not None for value in msgspec.structs.astuple(scope)[1:5])]
    unlimited = tuple(scope.id for scope in scopes if scope not in limited)
    return Admission(hold, tuple(limited), tokens, cost, 900.0, unlimited)


@dataclass
class Counted:
    """What the model says that a level was taken from."""

    requests: int = 0
    tokens: int = 0
    running: int = 0
    held: int = 0
    settled: int = 0
    largest: int = 0

    def take(self, tokens: int, cost: int) -> None:
        self.requests += 1
        self.tokens += tokens
        self.running += 1
        self.held += cost
        self.largest = max(self.largest, tokens)

    def end(self, held: int, cost: int) -> None:
        self.running -= 1
        self.held -= held
        self.settled += cost


_some = st.one_of(st.none(), st.integers(1, 12))
_tokens, _budget = st.one_of(st.none(), st.integers(1, 120)), st.one_of(st.none(), st.integers(0, 150))
_limits = st.fixed_dictionaries({level: st.tuples(_some, _tokens, _some, _budget) for level in LEVELS})
_request = st.tuples(st.sampled_from(sorted(ABOVE)), st.integers(0, 30), st.integers(0, 30))
_asked = st.lists(_request, min_size=1, max_size=15)
_ends = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 30)), max_size=8)
_rounds = st.lists(st.tuples(_asked, _ends), min_size=1, max_size=4)
Rounds = list[tuple[list[tuple[str, int, int]], list[tuple[int, int]]]]


async def check(limiters: Sequence[AnyLimiter], limits: Limits, rounds: Rounds) -> None:
    """Many at once on several processes, then some end, and so on; the books stay those of the model."""
    books = {level: Counted() for level in LEVELS}
    running: dict[str, tuple[str, int, int]] = {}
    number = itertools.count()
    for asked, ends in rounds:
        named = {str(next(number)): request for request in asked}
        calls = [
            limiters[i % len(limiters)].admit(asking(hold, key, limits, tokens, cost))
            for i, (hold, (key, tokens, cost)) in enumerate(named.items())
        ]
        answers = dict(zip(named, await asyncio.gather(*calls, return_exceptions=True), strict=True))
        for hold, answer in answers.items():
            key, tokens, cost = named[hold]
            if isinstance(answer, Grant):
                running[hold] = named[hold]
                for level in (key, *ABOVE[key]):
                    books[level].take(tokens, cost)
            else:
                assert isinstance(answer, Refused), answer
                assert answer.scope in (key, *ABOVE[key])
                assert limits[answer.scope] != (None, None, None, None)
        for level, (per_minute, tokens_per_minute, parallel, budget) in limits.items():
            of = books[level]
            assert per_minute is None or of.requests <= per_minute, level
            assert tokens_per_minute is None or of.tokens <= max(tokens_per_minute, of.largest), level
            assert parallel is None or of.running <= parallel, level
            assert budget is None or of.settled + of.held <= budget, level
        # Who was refused took nothing, and finds no room still: nothing was given back.
        for hold, answer in answers.items():
            if isinstance(answer, Refused):
                with pytest.raises(Refused):
                    await limiters[0].admit(asking(f"{hold} again", *_with(named[hold], limits)))
        await agree(limiters, limits, books)
        for which, used in ends:
            hold = str(which)
            if hold in running:
                key, tokens, held = running.pop(hold)
                cost = min(used, held)
                await limiters[which % len(limiters)].settle(hold, tokens, cost)
                assert await limiters[0].settle(hold, tokens, cost) is None, "settling twice is settling once"
                for level in (key, *ABOVE[key]):
                    books[level].end(held, cost)
        await agree(limiters, limits, books)


def _with(request: tuple[str, int, int], limits: Limits) -> tuple[str, Limits, int, int]:
    key, tokens, cost = request
    return key, limits, tokens, cost


async def agree(limiters: Sequence[AnyLimiter], limits: Limits, books: Mapping[str, Counted]) -> None:
    for level, of in books.items():
        held = of.held if limits[level] != (None, None, None, None) else 0
        assert await limiters[-1].balance(level) == (of.settled, held), level


@settings(max_examples=120, deadline=None)
@given(_limits, _rounds)
async def test_no_level_is_passed_in_memory(limits: Limits, rounds: Rounds) -> None:
    await check([MemoryLimiter(clock=lambda: 1000.0, wall_clock=lambda: float(NOVEMBER_29))], limits, rounds)


@pytest.mark.redis
@settings(max_examples=60, deadline=None)
@given(_limits, _rounds)
async def test_no_level_is_passed_by_several_processes(
    redis_server: RedisServer, limits: Limits, rounds: Rounds
) -> None:
    async with AsyncExitStack() as stack:
        prefix = f"{{levels-{next(_prefixes)}}}"
        await check([await _process(redis_server.url, prefix, stack) for _ in range(3)], limits, rounds)


async def _process(url: str, prefix: str, stack: AsyncExitStack) -> RedisLimiter:
    """A gateway process's limiter, on a clock that stands."""

    async def nothing(month: int, before: str, without: Ids) -> Mapping[str, int]:
        return {}

    channel = new_channel(url, prefix)
    stack.push_async_callback(channel.aclose)
    await channel.connect()
    limiter = RedisLimiter(channel, owner="tests", spent=nothing, new_cut=lambda: " ", clock=lambda: float(NOVEMBER_29))
    await limiter.seed()
    return limiter


# -- one at a time -----------------------------------------------------------------------------------------------------


@pytest_asyncio.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.redis)])
async def clock(request: pytest.FixtureRequest) -> AsyncIterator[Clock]:
    """A clock moved by hand, which makes limiters of each kind in turn."""
    moved = Clock(request.getfixturevalue("redis_server").url if request.param == "redis" else None)
    yield moved
    await moved.close()


def limited(**of: int) -> tuple[int | None, int | None, int | None, int | None]:
    """Limits of a level by their names."""
    names = ("requests", "tokens", "parallel", "budget")
    assert of.keys() <= set(names)
    requests, tokens, parallel, budget = (of.get(name) for name in names)
    return requests, tokens, parallel, budget


async def test_the_first_that_refuses_is_named_and_headers_are_of_the_tightest(clock: Clock) -> None:
    limiter = await clock.limiter()
    limits = {
        "key:a": limited(requests=10), "project:p": limited(requests=5), "team:t": limited(requests=3, tokens=100),
        "organisation:o": limited(parallel=7),
    }  # fmt: skip
    granted = await limiter.admit(asking("1", "key:a", limits, 40))
    assert (granted.standing.limit_requests, granted.standing.remaining_requests) == (3, 2)
    assert (granted.standing.limit_tokens, granted.standing.remaining_tokens) == (100, 60)
    assert granted.standing.remaining_parallel == 6
    await limiter.admit(asking("2", "key:a", limits, 40))
    with pytest.raises(LimitExceeded) as refused:
        await limiter.admit(asking("3", "key:a", limits, 40))
    assert (refused.value.scope, refused.value.limit) == ("team:t", "tokens_per_minute")
    assert refused.value.retry_after_s == pytest.approx(12)
    assert refused.value.headers() == {"retry-after": "12", "x-tierline-limit": "team tokens_per_minute"}
    assert refused.value.standing.remaining_requests == 1, "a refusal takes nothing, at no level"
    await limiter.admit(asking("4", "key:b", limits, 0))
    with pytest.raises(LimitExceeded, match="team:t allows 3 requests per minute"):
        await limiter.admit(asking("5", "key:a", limits))


async def test_a_hold_is_given_back_at_each_level(clock: Clock) -> None:
    """By a settle, and where its process died, by its time."""
    limiter = await clock.limiter()
    limits = {level: limited(budget=100, parallel=2) for level in ("key:a", "team:t", "organisation:o")}
    held = ("key:a", "team:t", "organisation:o")
    await limiter.admit(asking("1", "key:a", limits, cost=60))
    assert [await limiter.balance(level) for level in held] == [(0, 60)] * 3
    with pytest.raises(BudgetExhausted) as refused:
        await limiter.admit(asking("2", "key:b", limits, cost=60))
    assert refused.value.scope == "team:t"
    await limiter.settle("1", 0, 25)
    assert [await limiter.balance(level) for level in held] == [(25, 0)] * 3
    await limiter.admit(asking("3", "key:a", limits, cost=60))
    clock.pass_(901)
    assert [await limiter.balance(level) for level in held] == [(25, 0)] * 3
    assert limiter.expired_holds == 1
    await limiter.settle("3", 0, 30)  # its row arrives late
    levels = [*held, "project:p"]
    assert [await limiter.balance(level) for level in levels] == [(55, 0)] * 4, "and where no limit was"


async def test_a_budget_counts_what_was_spent_before_it_was_set(clock: Clock) -> None:
    limiter = await clock.limiter()
    before, after = {"key:a": limited(parallel=9)}, {"key:a": limited(parallel=9), "team:t": limited(budget=100)}
    await limiter.admit(asking("1", "key:a", before, cost=50))
    await limiter.settle("1", 0, 50)
    await limiter.admit(asking("2", "key:a", before, cost=30))  # runs while the budget is set
    with pytest.raises(BudgetExhausted) as refused:
        await limiter.admit(asking("3", "key:b", after, cost=51))
    assert (refused.value.settled_nanousd, refused.value.held_nanousd) == (50, 0)
    await limiter.admit(asking("4", "key:b", after, cost=20))
    await limiter.settle("2", 0, 30)
    assert await limiter.balance("team:t") == (80, 20)
    with pytest.raises(BudgetExhausted):
        await limiter.admit(asking("5", "key:a", after, cost=1))
    # Taken away and set again: what ran meanwhile counts, and no hold is left behind.
    await limiter.admit(asking("6", "key:a", before, cost=5))
    await limiter.settle("4", 0, 10)
    await limiter.settle("6", 0, 5)
    assert await limiter.balance("team:t") == (95, 0)
    await limiter.admit(asking("7", "key:a", after, cost=5))


async def test_a_new_month_starts_at_each_level_with_nothing(clock: Clock) -> None:
    limiter = await clock.limiter()
    limits = {"team:t": limited(budget=100)}
    await limiter.admit(asking("1", "key:a", limits, cost=100))
    clock.pass_(2 * 86_400)
    if isinstance(limiter, RedisLimiter):
        await limiter.seed()
    await limiter.settle("1", 0, 100)
    for level in ("key:a", "team:t", "organisation:o"):
        assert await limiter.balance(level) == (0, 0)
    await limiter.admit(asking("2", "key:a", limits, cost=100))


# -- in Redis, with a ledger -------------------------------------------------------------------------------------------


@pytest.fixture
def server(redis_binary: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[RedisServer]:
    """A server for one test, which may end it."""
    monkeypatch.setattr(counters_shared, "BEAT_S", 0.05)
    own = RedisServer(redis_binary).start()
    yield own
    own.close()


UNSET = {"key:a": limited(budget=10**6)}
SET = {**UNSET, "team:t": limited(budget=1000)}


def fresh(limits: Limits, cost: int) -> Admission:
    return asking(f"req-{new_id()}", "key:a", limits, 10, cost)


async def team(house: House) -> tuple[int, int]:
    limiter = house.redis()
    await limiter.channel.connect()
    return await limiter.balance("team:t")


@pytest.mark.redis
async def test_what_was_spent_without_a_limit_survives_the_loss_of_redis(server: RedisServer) -> None:
    async with House(server.url) as house, redis.asyncio.from_url(server.url) as client:
        limiters = [await house.gateway(str(number)) for number in range(2)]

        async def spend(limits: Limits, cost: int) -> None:
            for limiter in limiters:
                admission = fresh(limits, cost)
                await limiter.admit(admission)
                house.books.rows[admission.hold_id] = cost
                await limiter.settle(admission.hold_id, 10, cost)

        await spend(UNSET, 100)
        await spend(SET, 50)
        assert await team(house) == (300, 0)
        running = fresh(UNSET, 70)
        await limiters[0].admit(running)
        await client.flushall()
        await house.expect(300, 70)  # of the key; the team has no hold of it
        house.books.rows[running.hold_id] = 60
        await limiters[0].settle(running.hold_id, 10, 60)
        await spend(SET, 20)

        async def agrees() -> bool:
            return await team(house) == (house.books.total(), 0) == (400, 0)

        await until(agrees, "the team's balance to be the ledger's sum")
        with pytest.raises(BudgetExhausted) as refused:
            await limiters[1].admit(fresh(SET, 601))
        assert refused.value.settled_nanousd == 400


@pytest.mark.redis
async def test_a_dead_process_gives_back_at_each_level(server: RedisServer) -> None:
    """A process dies with holds: the one that comes after it settles them from the ledger, limited or not."""
    async with House(server.url) as house:
        dead = house.redis("worker-1")
        await dead.channel.connect()
        await dead.seed()
        ran, ran_without, never_ran = fresh(SET, 500), fresh(UNSET, 300), fresh(SET, 200)
        for admission in (ran, ran_without, never_ran):
            await dead.admit(admission)
        assert await team(house) == (0, 700)
        house.books.rows = {ran.hold_id: 123, ran_without.hold_id: 45}
        other = await house.gateway("worker-2")
        with pytest.raises(BudgetExhausted):
            await other.admit(fresh(SET, 301))
        await house.gateway("worker-1")
        assert await team(house) == (168, 0) == (house.books.total(), 0)
        await other.admit(fresh(SET, 832))


@pytest.mark.redis
async def test_shares_of_each_level_while_redis_is_away(server: RedisServer) -> None:
    limits = {"key:a": limited(parallel=40), "team:t": limited(parallel=4, budget=1000)}
    async with House(server.url, timeout_s=0.2) as house:
        limiters = [await house.gateway(str(number)) for number in range(2)]
        await until(lambda: all(limiter.processes == 2 for limiter in limiters), "the processes to know each other")
        for limiter in limiters:
            first = fresh(limits, 200)
            await limiter.admit(first)
            await limiter.settle(first.hold_id, 10, 200)
            house.books.rows[first.hold_id] = 200
            await limiter.admit(fresh(limits, 0))  # so that both have heard
        server.pause()
        running = []
        for limiter in limiters:
            running.append(fresh(limits, 300))
            await limiter.admit(running[-1])
            with pytest.raises(Refused) as refused:
                await limiter.admit(fresh(limits, 1))
            assert refused.value.scope == "team:t"
        server.resume()
        await until(lambda: not any(limiter.degraded for limiter in limiters), "Redis to be used again")
        assert await team(house) == (400, 600)
        for limiter, admission in zip(limiters, running, strict=True):
            house.books.rows[admission.hold_id] = 250
            await limiter.settle(admission.hold_id, 10, 250)
        assert await team(house) == (900, 0) == (house.books.total(), 0)
