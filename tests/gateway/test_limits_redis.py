"""Limits in Redis: the same decisions as in memory, and what is spent stays the ledger's sum whatever Redis loses.

What both limiters promise is tested in `test_limits.py`; here is what only a shared one can get wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping
from contextlib import AsyncExitStack

import msgspec
import pytest
import redis.asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.redis_server import RedisServer
from gateway import doctor
from gateway.access import counters_redis, counters_shared
from gateway.access.counters_redis import Ids, RedisLimiter
from gateway.access.counters_shared import SharedLimiter
from gateway.access.limits import Admission, BudgetExhausted, Grant, LimitExceeded, Refused, Scope, Standing
from gateway.access.redis_channel import Channel, RedisDown
from gateway.ledger.rows import new_id
from gateway.limiter import _request_id_of_now
from gateway.settings import Settings, WhenRedisIsDown
from tests.conftest import unused_port
from tests.gateway.limiters import Clock, ask, new_channel, scope
from tests.gateway.several import until

pytestmark = pytest.mark.redis

KEY = scope("a", budget_nanousd=1_000_000, parallel=100)


@pytest.fixture(autouse=True)
def _quick_beat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counters_shared, "BEAT_S", 0.05)


@pytest.fixture
def server(redis_binary: str) -> Iterator[RedisServer]:
    """A server for one test, which may end it."""
    own = RedisServer(redis_binary).start()
    yield own
    own.close()


class Books:
    """The ledger, for limiters that know no database: a row for each request, of this month, key `a` and team `t`."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.slowness = 0  # turns of the event loop that a reading takes

    async def sums(self, month: int, before: str, without: Ids) -> Mapping[str, int]:
        seen = {request: cost for request, cost in self.rows.items() if request < before}
        for _ in range(self.slowness):
            await asyncio.sleep(0)
        early = await without()
        total = sum(cost for request, cost in seen.items() if request not in early)
        return {"key:a": total, "team:t": total}

    async def used_by(self, requests: Collection[str]) -> Mapping[str, tuple[int, int]]:
        return {request: (7, self.rows[request]) for request in requests if request in self.rows}

    def total(self) -> int:
        return sum(self.rows.values())


class House:
    """Gateway processes with one ledger and one Redis. Closes them at the end."""

    def __init__(self, url: str, prefix: str = "{house}", timeout_s: float = 30.0) -> None:
        self.books = Books()
        self.cuts: list[str] = []  # that were proposed
        self._url, self._prefix, self._timeout_s = url, prefix, timeout_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> House:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def redis(self, owner: str = "one") -> RedisLimiter:
        channel = new_channel(self._url, self._prefix, self._timeout_s)
        self._stack.push_async_callback(channel.aclose)
        return RedisLimiter(channel, owner=owner, spent=self.books.sums, new_cut=self._new_cut)

    def _new_cut(self) -> str:
        self.cuts.append(_request_id_of_now())
        return self.cuts[-1]

    async def gateway(
        self,
        owner: str = "one",
        processes: int = 1,
        when_down: WhenRedisIsDown = WhenRedisIsDown(),
        former_owners: Collection[str] = (),
    ) -> SharedLimiter:
        limiter = SharedLimiter(
            self.redis(owner),
            when_down,
            processes=processes,
            spent={"key:a": self.books.total()},
            used_by=self.books.used_by,
            former_owners=former_owners,
        )
        await limiter.start()
        self._stack.push_async_callback(limiter.stop)
        return limiter

    async def balance(self) -> tuple[int, int]:
        """Of key `a`, as Redis has it."""
        limiter = self.redis()
        await limiter.channel.connect()
        return await limiter.balance("key:a")

    async def expect(self, settled: int, held: int = 0) -> None:
        await until(lambda: self._is((settled, held)), f"the balance to be {settled} and {held}")

    async def _is(self, expected: tuple[int, int]) -> bool:
        try:
            return await self.balance() == expected
        except RedisDown:
            return False


def request(cost: int = 100, *scopes: Scope, ttl_s: float = 900.0) -> Admission:
    return Admission(f"req-{new_id()}", scopes or (KEY,), 10, cost, ttl_s)


async def spend(house: House, limiter: SharedLimiter | RedisLimiter, cost: int, *, row: bool = True) -> str:
    """A whole request. Its row comes before it is settled, as in the gateway, or not yet."""
    admission = request()
    await limiter.admit(admission)
    if row:
        house.books.rows[admission.hold_id] = cost
    await limiter.settle(admission.hold_id, 10, cost)
    return admission.hold_id


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


# -- while Redis is away -----------------------------------------------------------------------------------------------


async def test_a_silent_redis_holds_up_nobody_and_each_process_keeps_to_its_share(server: RedisServer) -> None:
    key = scope("a", requests_per_minute=40, parallel=8, budget_nanousd=1_000_000)
    async with House(server.url, timeout_s=0.2) as house:
        limiters = [await house.gateway(str(number)) for number in range(4)]
        await until(lambda: all(limiter.processes == 4 for limiter in limiters), "the processes to know each other")
        await spend(house, limiters[0], 200_000)
        first = request(1, key)
        for limiter in limiters:
            await limiter.budget_used([key])
        await limiters[0].admit(first)
        server.pause()

        said: list[str] = []

        async def admitted(limiter: SharedLimiter, cost: int, count: int) -> tuple[int, set[str]]:
            given, refused = 0, set()
            for _ in range(count):
                try:
                    await limiter.admit(request(cost, key))
                    given += 1
                except Refused as error:
                    refused.add(error.limit)
                    said.append(error.message)
            return given, refused

        # 8 / 4 in parallel, of which the first process has one already.
        assert await admitted(limiters[0], 1, 5) == (1, {"parallel"})
        assert await admitted(limiters[1], 1, 5) == (2, {"parallel"})
        # A quarter of what was left: less than this request needs.
        assert await admitted(limiters[2], 300_000, 1) == (0, {"budget"})
        assert await admitted(limiters[2], 150_000, 2) == (1, {"budget"})
        assert all(limiter.degraded for limiter in limiters[:3])
        assert all("split over 4 gateway processes" in message for message in said)
        await spend(house, limiters[3], 33)  # all of it while Redis is away
        assert await limiters[0].touch(first.hold_id, 900, 10, 5)
        assert await limiters[0].settle(first.hold_id, 10, 5) is not None
        house.books.rows[first.hold_id] = 5
        server.resume()
        await until(lambda: not any(limiter.degraded for limiter in limiters), "Redis to be used again")
        # All that was taken meanwhile counts now: 4 holds, and the two requests that ended.
        await house.expect(200_038, 1 + 2 + 150_000)
        assert await admitted(limiters[3], 1, 6) == (4, {"parallel"})


@pytest.mark.parametrize(
    ("rule", "refused"),
    [
        ({"rates": "refuse"}, ["requests_per_minute"]),
        ({"budgets": "refuse"}, ["budget"]),
        ({"rates": "refuse", "budgets": "refuse"}, ["requests_per_minute", "budget"]),
    ],
)
async def test_what_to_refuse_while_redis_is_away(
    server: RedisServer, rule: dict[str, str], refused: list[str]
) -> None:
    async with House(server.url) as house:
        limiter = await house.gateway(when_down=WhenRedisIsDown.model_validate(rule))
        server.kill()
        said: list[LimitExceeded] = []
        for one in (Scope("key:r", requests_per_minute=10), Scope("key:b", budget_nanousd=1000), Scope("key:free")):
            try:
                await limiter.admit(request(1, one))
            except LimitExceeded as error:
                said.append(error)
        assert [error.limit for error in said] == refused
        assert all(error.headers()["retry-after"] == "1" for error in said)
        assert all("cannot be checked now" in error.message for error in said)


async def test_a_gateway_starts_without_redis_and_finds_it_later(redis_binary: str) -> None:
    server = RedisServer(redis_binary)
    async with House(server.url) as house:
        house.books.rows["req-0"] = 70
        limiter = await house.gateway(processes=2)
        assert limiter.degraded
        assert await limiter.budget_used([KEY]) == {"key:a": 70 / 1_000_000}
        running = request(11)
        await limiter.admit(running)
        server.start()
        await until(lambda: not limiter.degraded, "Redis to be found")
        assert limiter.processes == 1
        await house.expect(70, 11)
        house.books.rows[running.hold_id] = 4
        assert await limiter.settle(running.hold_id, 10, 4) is not None
        await house.expect(74)
    server.close()


async def test_a_request_that_is_cancelled_while_it_is_admitted_keeps_nothing(server: RedisServer) -> None:
    async with House(server.url) as house:
        limiter = await house.gateway()
        server.pause()
        waiting = [asyncio.create_task(limiter.admit(request())) for _ in range(20)]
        await asyncio.sleep(0)
        for task in waiting:
            task.cancel()
        assert {type(result) for result in await asyncio.gather(*waiting, return_exceptions=True)} == {
            asyncio.CancelledError
        }
        server.resume()
        await house.expect(0, 0)
        assert limiter.open_holds == 0


async def test_more_settles_than_may_wait_start_the_budgets_over(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counters_shared, "MOST_WAITING", 5)
    async with House(server.url) as house:
        limiter = await house.gateway()
        for _ in range(3):
            await spend(house, limiter, 1)
        server.pause()
        limiter._redis.channel.close(TimeoutError("the test says so"))
        for _ in range(12):
            await spend(house, limiter, 10)
        server.resume()
        await until(lambda: not limiter.degraded, "Redis to be used again")
        await house.expect(123)


async def test_the_channel_follows_a_cluster_to_the_node_that_has_the_keys(redis_binary: str) -> None:
    ports, buses = [unused_port() for _ in range(2)], [unused_port() for _ in range(2)]
    nodes = [
        RedisServer(redis_binary, "--cluster-enabled", "yes", "--cluster-port", str(bus), port=port).start()
        for port, bus in zip(ports, buses, strict=True)
    ]
    clients = [redis.asyncio.Redis(unix_socket_path=str(node.socket)) for node in nodes]
    await clients[0].execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
    await clients[1].execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
    await clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", ports[1], buses[1])

    async def formed() -> bool:
        return all([(await client.execute_command("CLUSTER INFO"))["cluster_state"] == "ok" for client in clients])

    await until(formed, "the cluster to form")
    slot = int(await clients[0].execute_command("CLUSTER", "KEYSLOT", "{house}"))
    other = ports[0] if slot > 8191 else ports[1]
    async with House(f"redis://127.0.0.1:{other}") as house:
        limiter = await house.gateway()
        assert not limiter.degraded
        await asyncio.gather(*(spend(house, limiter, 2) for _ in range(10)))
        assert await house.balance() == (20, 0)
    for client, node in zip(clients, nodes, strict=True):
        await client.aclose()
        node.close()


def test_doctor_looks_at_redis(redis_binary: str) -> None:
    def found(url: str) -> tuple[str, str, str]:
        (finding,) = doctor._redis(Settings.model_validate({"storage": {"redis_url": url}}))
        return finding.check, finding.status, finding.message

    careless = RedisServer(redis_binary, "--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru").start()
    check, status, message = found(careless.url)
    assert (check, status) == ("redis", "warn")
    assert "allkeys-lru" in message
    with redis.Redis(unix_socket_path=str(careless.socket)) as client:
        client.config_set("maxmemory-policy", "noeviction")
    assert found(careless.url)[1] == "ok"
    careless.close()
    check, status, message = found(f"redis://user:secret@127.0.0.1:{unused_port()}/0")
    assert (check, status) == ("redis", "warn")
    assert "does not answer" in message
    assert "secret" not in message


def test_a_url_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="redis://"):
        Channel("http://somewhere", "", "", 1.0)
