"""Limits while Redis is away, slow, moved or wrongly named: nobody waits, and each process keeps to its share."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis.asyncio

from bench.redis_server import RedisServer
from gateway import doctor
from gateway.access import counters_shared
from gateway.access.counters_shared import SharedLimiter
from gateway.access.limits import LimitExceeded, Refused, Scope
from gateway.access.redis_channel import Channel
from gateway.settings import Settings, WhenRedisIsDown
from tests.conftest import unused_port
from tests.gateway.limiters import scope
from tests.gateway.redis_house import KEY, House, request, spend
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
