"""Where conversations are kept: bounded and with an end in memory, shared through Redis, and never waiting for it."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest
import redis as redis_client
from hypothesis import given
from hypothesis import strategies as st

from bench.redis_server import RedisServer
from gateway.access.redis_channel import Channel
from gateway.sessions.pins import Pins
from gateway.sessions.shared import SCRIPT, SharedPins
from tests.gateway.several import until
from tiers.session import Pin

_prefixes = itertools.count()
HERE, THERE = Pin("small", "a", 10), Pin("large", "b", 20, fewer=2, largest="small", returns=1, came_down=True)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(0.1, 50), st.floats(0, 5)), max_size=200))
async def test_what_is_kept_is_bounded_and_ends(steps: list[tuple[int, float, float]]) -> None:
    clock = Clock()
    pins = Pins(most=8, clock=clock)
    ends: dict[str, float] = {}
    for number, seconds, pause in steps:
        id = str(number)
        pins.keep(id, HERE, seconds)
        ends[id] = clock.now + seconds
        assert len(pins) <= 8
        assert await pins.find(id) == HERE, "the newest is there"
        clock.now += pause
        for known, end in ends.items():
            if await pins.find(known) is not None:
                assert clock.now < end, "nothing is found after its end"


async def test_the_one_longest_without_a_turn_goes_first() -> None:
    pins = Pins(most=2)
    for id in ("a", "b", "a", "c"):
        pins.keep(id, HERE, 60)
    assert [await pins.find(id) is not None for id in "abc"] == [True, False, True]


async def test_a_clock_that_is_set_back_takes_no_conversation_back() -> None:
    clock = Clock()
    pins = Pins(clock=clock)
    pins.keep("x", HERE, 60)
    clock.now -= 3600
    pins.keep("x", THERE, 60)
    assert await pins.find("x") == THERE
    clock.now += 61
    assert await pins.find("x") is None, "its end goes by the clock of its last turn"


@asynccontextmanager
async def process(
    url: str, prefix: str, *, most: int = 1000, timeout_s: float = 30.0, clock: Callable[[], float] = time.time
) -> AsyncIterator[Pins]:
    """What one gateway process has of it."""
    shared = SharedPins(Channel(url, SCRIPT, prefix, timeout_s), most=most)
    await shared.start()
    pins = Pins(shared, clock=clock)
    yield pins
    await pins.close()


@pytest.fixture
def prefix() -> str:
    return f"{{pins-{next(_prefixes)}}}"


@pytest.fixture
def own_server(redis_binary: str) -> Iterator[RedisServer]:
    server = RedisServer(redis_binary).start()
    yield server
    server.close()


async def test_processes_share_them(redis_server: RedisServer, prefix: str) -> None:
    async with process(redis_server.url, prefix) as one, process(redis_server.url, prefix) as two:
        one.keep("x", THERE, 60)
        assert await one.find("x") == THERE
        assert await two.find("x") == THERE
        two.keep("x", HERE, 60)
        assert await two.find("x") == HERE
        assert await one.find("x") == HERE, "the newer one counts"
        assert await two.find("nobody") is None


async def test_the_latest_turn_counts_on_hosts_whose_clocks_differ(redis_server: RedisServer, prefix: str) -> None:
    url = redis_server.url
    async with process(url, prefix, clock=lambda: time.time() + 30) as ahead, process(url, prefix) as behind:
        ahead.keep("x", HERE, 60)
        await ahead.find("x")  # behind what it has told
        assert await behind.find("x") == HERE
        behind.keep("x", THERE, 60)
        await behind.find("x")
        assert await ahead.find("x") == THERE
        ahead.keep("x", HERE, 60)
        await ahead.find("x")
        assert await behind.find("x") == HERE


async def test_redis_forgets_what_is_over_and_what_is_too_much(redis_server: RedisServer, prefix: str) -> None:
    client = redis_client.Redis(unix_socket_path=str(redis_server.socket))
    async with process(redis_server.url, prefix, most=5) as pins:
        for number in range(12):
            pins.keep(f"n-{number}", HERE, 60)
            await pins.find(f"n-{number}")
        assert client.zcard(f"{prefix}:sessions") == 5
        assert len(list(client.scan_iter(f"{prefix}:session:*"))) == 5
        pins.keep("short", HERE, 0.05)

        async def over() -> bool:
            pins.keep("other", HERE, 60)
            await pins.find("other")
            return client.zscore(f"{prefix}:sessions", "short") is None

        await until(over, "a pin to be over")
    client.close()


async def test_nothing_waits_for_a_redis_that_is_away(own_server: RedisServer, prefix: str) -> None:
    async with process(own_server.url, prefix, timeout_s=0.2) as one, process(own_server.url, prefix) as two:
        one.keep("x", HERE, 60)
        await until(lambda: _is(two, "x", HERE), "the other to find it")
        own_server.kill()
        await until(lambda: _is(one, "x", HERE), "the process to find its own")
        one.keep("x", THERE, 60)
        loop = asyncio.get_running_loop()
        began = loop.time()
        for _ in range(100):
            assert await one.find("x") == THERE
        assert loop.time() - began < 1, "no call went out"
        own_server.start()
        await until(lambda: _told(one, two), "the processes to share again")


async def _is(pins: Pins, id: str, pin: Pin) -> bool:
    return await pins.find(id) == pin


async def _told(one: Pins, two: Pins) -> bool:
    one.keep("y", THERE, 60)
    return await two.find("y") == THERE


async def test_what_another_version_wrote_is_no_pin(redis_server: RedisServer, prefix: str) -> None:
    client = redis_client.Redis(unix_socket_path=str(redis_server.socket))
    async with process(redis_server.url, prefix) as pins:
        client.set(f"{prefix}:session:x", "[1,2,3]")
        assert await pins.find("x") is None
    client.close()
