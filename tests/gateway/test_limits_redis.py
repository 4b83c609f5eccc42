"""Limits in Redis: the same decisions as in memory, and what is spent stays the ledger's sum whatever Redis loses.

What both limiters promise is tested in `test_limits.py`; here is what only a shared one can get wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.redis_server import RedisServer
from gateway.access import counters_redis, counters_shared
from gateway.access.counters_redis import RedisLimiter
from gateway.access.limits import BudgetExhausted, Grant, LimitExceeded, Refused, Scope, Standing
from gateway.ledger.rows import new_id
from tests.gateway.limiters import Clock, ask, scope
from tests.gateway.redis_house import House, request, spend
from tests.gateway.several import until

pytestmark = pytest.mark.redis


@pytest.fixture(autouse=True)
def _quick_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_shared, "BEAT_S", 0.05)


@pytest.fixture
def server(redis_binary: str) -> Iterator[RedisServer]:
    """A server for one test, which may end it."""
    own = RedisServer(redis_binary).start()
    yield own
    own.close()


# -- the same decisions as in memory -----------------------------------------------------------------------------------

_some = st.one_of(st.none(), st.integers(1, 40))
_event = st.one_of(
    st.tuples(st.just("admit"), st.integers(0, 30), st.integers(0, 30), st.integers(1, 100)),
    st.tuples(st.just("settle"), st.integers(0, 40), st.integers(0, 30), st.integers(0, 30)),
    st.tuples(st.just("touch"), st.integers(0, 40), st.integers(0, 60), st.integers(0, 30)),
    st.tuples(st.just("wait"), st.sampled_from([0, 1, 7, 60, 3600, 90_000, 172_800]), st.just(0), st.just(0)),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(_event, max_size=60),
    st.lists(st.tuples(_some, _some, _some, st.one_of(st.none(), st.integers(0, 300))), min_size=2, max_size=3),
)
async def test_memory_and_redis_decide_alike(
    redis_server: RedisServer,
    events: list[tuple[str, int, int, int]],
    limits: list[tuple[int | None, int | None, int | None, int | None]],
) -> None:
    scopes = tuple(Scope(f"key:{number}", *limit) for number, limit in enumerate(limits))
    clocks = Clock(), Clock(redis_server.url)
    both = [await clock.limiter() for clock in clocks]
    assert isinstance(both[1], RedisLimiter)
    for n, (kind, first, second, third) in enumerate(events):
        if kind == "wait":
            for clock in clocks:
                clock.pass_(first)
            await both[1].seed()  # the month may be a new one, see `Clock.limiter`
            continue
        said: list[object] = []
        for limiter in both:
            try:
                if kind == "admit":
                    admission = ask(str(n), *scopes, tokens=first, cost=second, ttl_s=third)
                    said.append(await limiter.admit(admission))
                elif kind == "settle":
                    said.append(await limiter.settle(str(first), second, third))
                else:
                    said.append(await limiter.touch(str(first), second, second, third))
            except Refused as refused:
                said.append(refused)
        (words, numbers), (other_words, other_numbers) = map(_plain, said)
        assert words == other_words, (n, kind)
        assert numbers == pytest.approx(other_numbers, rel=1e-6, abs=1e-4), (n, kind)
        for one in scopes:
            assert await both[0].balance(one.id) == await both[1].balance(one.id), (n, kind)
    for limiter in both:
        await limiter.balance("key:0")  # reclaims what the last wait made expire
    assert both[0].expired_holds == both[1].expired_holds
    for clock in clocks:
        await clock.close()


def _plain(said: object) -> tuple[list[str], dict[str, float]]:
    """What a limiter said, as words to be equal and numbers to be near."""
    if isinstance(said, BudgetExhausted):
        amounts = {"settled": said.settled_nanousd, "held": said.held_nanousd, "needed": said.needed_nanousd}
        return ["exhausted", said.scope], {**amounts, "wait": said.retry_after_s, **_standing(said.standing)}
    if isinstance(said, LimitExceeded):
        return ["exceeded", said.scope, said.limit], {"wait": said.retry_after_s, **_standing(said.standing)}
    if isinstance(said, Grant):
        return ["granted"], {**_standing(said.standing), **said.budget_used}
    if isinstance(said, Standing):
        return ["settled"], _standing(said)
    return [str(said)], {}


def _standing(standing: Standing) -> dict[str, float]:
    return {name: -1 if value is None else value for name, value in msgspec.structs.asdict(standing).items()}


# -- what lies in Redis ------------------------------------------------------------------------------------------------


async def test_nothing_in_redis_lives_for_ever_and_settled_holds_leave_nothing(server: RedisServer) -> None:
    async with House(server.url) as house, redis.asyncio.from_url(server.url) as client:
        limiter = await house.gateway()
        for _ in range(50):
            await spend(house, limiter, 5)
        running = request()
        await limiter.admit(running)

        async def mortal() -> bool:
            return min([await client.ttl(key) async for key in client.scan_iter("*")]) > 0

        await until(mortal, "every key to have a time to live")  # that of `expiry` comes with the next beat
        keys = [key async for key in client.scan_iter("*")]
        assert sorted(key for key in keys if b":hold:" in key) == [f"{{house}}:hold:{running.hold_id}".encode()]
        assert all(key.startswith(b"{house}:") for key in keys)  # one slot of a cluster


async def test_a_forgotten_script_is_loaded_again(server: RedisServer) -> None:
    async with House(server.url) as house, redis.asyncio.from_url(server.url) as client:
        limiter = await house.gateway()
        await client.script_flush()
        await asyncio.gather(*(spend(house, limiter, 1) for _ in range(20)))
        assert not limiter.degraded
        assert await house.balance() == (20, 0)


async def test_many_holds_that_expire_at_once_are_given_back_in_turns(redis_server: RedisServer) -> None:
    clock = Clock(redis_server.url)
    limiter, key = await clock.limiter(), scope(parallel=2000, budget_nanousd=10**9)
    for start in range(0, 1200, 100):
        await asyncio.gather(*(limiter.admit(ask(f"{start + n}", key, cost=7, ttl_s=60)) for n in range(100)))
    clock.pass_(60)
    left = [await limiter.balance("key:a") for _ in range(6)]
    assert left == [(0, count * 7) for count in (1000, 800, 600, 400, 200, 0)]
    assert limiter.expired_holds == 1200
    await clock.close()


# -- budgets and the ledger --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slowness", [0, 50])
async def test_several_processes_start_budgets_from_the_ledger_once(server: RedisServer, slowness: int) -> None:
    async with House(server.url) as house:
        house.books.slowness = slowness
        house.books.rows = {f"req-{new_id()}": 1000 for _ in range(5)}
        limiters = [house.redis(str(number)) for number in range(4)]
        for limiter in limiters:
            await limiter.channel.connect()
        # All at once, and with ids from before the sums are read: each counts once, here.
        await asyncio.gather(*(spend(house, limiter, 3) for limiter in limiters for _ in range(25)))
        assert await house.balance() == (5000 + 100 * 3, 0)
        # So does each that comes after the cut.
        await until(lambda: f"req-{new_id()}" > max(house.cuts), "the cut to lie in the past")
        await asyncio.gather(*(spend(house, limiter, 2) for limiter in limiters for _ in range(5)))
        # All rows are in the ledger by now; reading it again must not count them twice.
        for limiter in limiters:
            await limiter.read_ledger()
        assert await house.balance() == (5000 + 100 * 3 + 20 * 2, 0) == (house.books.total(), 0)


async def test_a_request_is_refused_by_what_the_ledger_has(server: RedisServer) -> None:
    async with House(server.url) as house:
        house.books.rows = {f"req-{new_id()}": 999_950}
        limiter = await house.gateway()
        await limiter.admit(request(50))
        with pytest.raises(BudgetExhausted) as refused:
            await limiter.admit(request(1))
        assert (refused.value.settled_nanousd, refused.value.held_nanousd) == (999_950, 50)


async def test_redis_may_forget_everything(server: RedisServer) -> None:
    """FLUSHALL on a running server: sums come back from the ledger, running requests from their processes."""
    async with House(server.url) as house, redis.asyncio.from_url(server.url) as client:
        limiters = [await house.gateway(str(number)) for number in range(2)]
        before = [await spend(house, limiter, 10) for limiter in limiters]
        late = await spend(house, limiters[0], 30, row=False)  # its row is still on its way to the database
        running = [request(100) for _ in limiters]
        for limiter, admission in zip(limiters, running, strict=True):
            await limiter.admit(admission)
        await client.flushall()
        await house.expect(20, 200)
        after = await spend(house, limiters[1], 7)
        house.books.rows[late] = 30
        for limiter, admission in zip(limiters, running, strict=True):
            house.books.rows[admission.hold_id] = 60
            await limiter.settle(admission.hold_id, 10, 60)
        assert {*before, late, after} < set(house.books.rows)
        await house.expect(house.books.total())
        assert house.books.total() == 20 + 30 + 7 + 120


@pytest.mark.parametrize("disk", ["all of it", "an older state", "nothing"])
async def test_redis_may_be_killed_and_start_again(redis_binary: str, disk: str) -> None:
    """With what it had on disk, which may be less than it had acknowledged, or with nothing."""
    options = ["--appendonly", "yes", "--appendfsync", "no"] if disk == "all of it" else []
    server = RedisServer(redis_binary, *options).start()
    async with House(server.url) as house:
        limiter = await house.gateway(processes=1)
        await until(lambda: f"req-{new_id()}" > max(house.cuts), "the cut to lie in the past")
        for number in range(10):
            await spend(house, limiter, 10)
            if disk == "an older state" and number == 4:
                with redis.Redis(unix_socket_path=str(server.socket)) as client:
                    client.save()
        across, within = request(100), request(100)
        await limiter.admit(across)
        await limiter.admit(within)
        server.kill()
        await until(lambda: limiter.degraded, "the loss to be noticed")
        house.books.rows[within.hold_id] = 40
        await limiter.settle(within.hold_id, 10, 40)
        alone = await spend(house, limiter, 3)
        server.start()
        await until(lambda: not limiter.degraded, "Redis to be used again")
        house.books.rows[across.hold_id] = 50
        await limiter.settle(across.hold_id, 10, 50)
        await spend(house, limiter, 2)
        assert alone in house.books.rows
        await house.expect(house.books.total())
        assert house.books.total() == 100 + 40 + 3 + 50 + 2
    server.close()


@pytest.mark.parametrize("taken_over", [False, True])
async def test_holds_of_a_dead_process_are_settled_from_the_ledger(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch, taken_over: bool
) -> None:
    """When it is back, or when another one has stored its journal."""
    async with House(server.url) as house:
        dead = house.redis("worker-1")
        await dead.channel.connect()
        ran, never_ran = request(500), request(500)
        await dead.admit(ran)
        await dead.admit(never_ran)
        monkeypatch.setattr(counters_redis, "_PAGE", 2)
        house.books.rows[ran.hold_id] = 123  # from its journal, as `interrupted`
        other = await house.gateway("worker-2")
        running = [request(1) for _ in range(5)]
        for admission in running:
            await other.admit(admission)
        assert await house.balance() == (0, 1005)
        if taken_over:
            await house.gateway("worker-0", former_owners=["worker-1"])
        else:
            await house.gateway("worker-1")
        assert await house.balance() == (123, 5) == (house.books.total(), other.open_holds)
