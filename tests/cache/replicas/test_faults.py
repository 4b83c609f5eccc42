"""Redis is killed, stopped, emptied, slow or full; a stream has a gap: nothing hangs, nothing comes back, all agree."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import redis.asyncio

from bench.redis_server import RedisServer
from cache.replicas import link as link_module
from cache.store.changes import Purge
from tests.cache.replicas.conftest import Group, Member, until

pytestmark = pytest.mark.redis


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Redis that does not answer is found out soon: only where it stops, as one on a busy machine may seem to."""
    monkeypatch.setattr(link_module, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(link_module, "_BLOCK_MS", 100)


async def told(*members: Member) -> None:
    await until(
        lambda: all(one.replica.connected and one.replica.stats().waiting == 0 for one in members), "all to be told"
    )


async def test_what_happens_while_redis_is_killed_is_told_when_it_is_back(
    lonely_group: Group, own_redis: RedisServer
) -> None:
    one, other = await lonely_group.member(), await lonely_group.member()
    one.put("old", "1", model="bad")
    one.put("stays", "2")
    await until(lambda: other.answer("stays") == "2", "the answers to arrive")
    own_redis.kill()
    one.put("meanwhile", "3")
    assert one.answer("stays") == "2", "it serves what it has"
    started = time.monotonic()
    done = await other.replica.purge(Purge(model="bad"))
    assert time.monotonic() - started < 2, "a purge does not hang either"
    assert done.removed == 1
    assert len(done.unconfirmed) == 1
    assert one.answer("old") == "1"
    own_redis.start()  # with nothing in it
    await until(lambda: one.answer("old") is None, "the purge to be followed")
    await until(lambda: other.answer("meanwhile") == "3", "the answer to arrive")
    assert one.answer("stays") == other.answer("stays") == "2"
    again = await other.replica.purge(Purge())
    assert (again.confirmed, again.unconfirmed) == (2, [])
    assert one.answer("meanwhile") is None


@pytest.mark.usefixtures("impatient")
async def test_a_redis_that_stops_answering_holds_up_nothing(lonely_group: Group, own_redis: RedisServer) -> None:
    one, other = await lonely_group.member(), await lonely_group.member()
    one.put("a", "1")
    await until(lambda: other.answer("a") == "1", "the answer to arrive")
    own_redis.pause()
    one.put("b", "2")
    assert one.answer("a") == "1"
    await until(lambda: not one.replica.connected, "it to be found out")
    done = await one.replica.purge(Purge(exact=None, model="none"))
    assert len(done.unconfirmed) == 1
    await one.stop()  # must not hang
    one.start()
    own_redis.resume()
    await until(lambda: other.answer("b") == "2", "the answer to arrive")


async def test_an_emptied_redis_brings_nothing_back(lonely_group: Group) -> None:
    one, other = await lonely_group.member(), await lonely_group.member()
    one.put("purged", "1", model="bad")
    one.put("stays", "2")
    await until(lambda: other.answer("stays") == "2", "the answers to arrive")
    await other.stop()
    await one.replica.purge(Purge(model="bad"))
    assert other.answer("purged") == "1"
    async with redis.asyncio.Redis.from_url(lonely_group.url) as client:
        await client.flushall()
        await until(lambda: one.replica.stats().rebuilds == 2, "it to notice")
        await told(one)
        assert one.answer("stays") == "2"
        other.start()
        await told(other)
        assert other.answer("purged") is None, "it learns of the purge before it is in step"
        one.put("new", "3")
        await until(lambda: other.answer("new") == "3", "the answer to arrive")
        assert one.answer("purged") is None


async def test_a_gap_in_the_stream_is_seen_and_filled(group: Group) -> None:
    one, other = await group.member(), await group.member()
    one.put("a")
    await until(lambda: other.answer("a") is not None, "the answer to arrive")
    await other.stop()
    for number in range(50):
        one.put(f"q{number}")
    await told(one)
    async with redis.asyncio.Redis.from_url(group.url) as client:
        await client.xtrim(f"{group.prefix}:changes", maxlen=10, approximate=False)
        other.start()
        await until(lambda: len(other.store) == 51, "it to take them all")
        assert other.replica.stats().rebuilds == 2
        # And where a change was lost under its eyes.
        await client.incr(f"{group.prefix}:sequence")
    one.put("b")
    await until(lambda: other.replica.stats().rebuilds == 3 and other.answer("b") is not None, "it to read anew")


async def test_who_was_away_for_longer_than_redis_remembers_starts_anew(group: Group, tmp_path: Path) -> None:
    one, other = await group.member(), await group.member(tmp_path)
    kept = one.put("forgotten")
    one.put("stays")
    await until(lambda: other.answer("stays") is not None, "the answers to arrive")
    await other.stop()
    answer_id = one.store.answer_of(kept.id)
    assert answer_id is not None
    one.store.forget(answer_id)
    await one.replica.purge(Purge(model="nobody's"))
    async with redis.asyncio.Redis.from_url(group.url) as client:
        await client.zremrangebyrank(f"{group.prefix}:retractions", 0, 0)
    other.start()
    await until(lambda: other.answer("forgotten") is None, "it to forget")
    await until(lambda: other.answer("stays") is not None, "it to take what is there")


@pytest.mark.usefixtures("impatient")
async def test_a_replica_that_does_not_follow_is_named(lonely_group: Group, own_redis: RedisServer) -> None:
    one = await lonely_group.member()
    async with slow(own_redis) as (url, pace):
        other = await lonely_group.member(url=url)
        other.put("a")
        await until(lambda: one.answer("a") is not None, "the answer to arrive")
        pace.flowing.clear()
        started = time.monotonic()
        done = await one.replica.purge(Purge())
        assert 3 < time.monotonic() - started < 7, "it waits for who was alive a moment ago, and not for long"
        assert done.confirmed == 1
        (missing,) = done.unconfirmed
        assert missing.startswith("member 2:")
        assert other.answer("a") is not None
        pace.flowing.set()
        await until(lambda: other.answer("a") is None, "it to follow when it is back")


async def test_a_slow_way_to_redis_makes_nothing_slow_but_the_news(lonely_group: Group, own_redis: RedisServer) -> None:
    one = await lonely_group.member()
    async with slow(own_redis) as (url, pace):
        pace.delay_s = 0.05
        other = await lonely_group.member(url=url)
        for number in range(20):
            one.put(f"q{number}")
        other.put("mine")
        assert other.answer("mine") is not None
        assert one.answer("mine") is None, "nothing has waited for Redis yet"
        await until(lambda: len(other.store) == 21, "it to follow")
        await until(lambda: one.answer("mine") is not None, "its answer to arrive")
        done = await one.replica.purge(Purge())
        assert (done.confirmed, done.unconfirmed) == (2, [])


async def test_a_full_redis_keeps_answers_where_they_are(lonely_group: Group) -> None:
    one = await lonely_group.member()
    async with redis.asyncio.Redis.from_url(lonely_group.url) as client:
        one.put("a")
        await told(one)
        await client.config_set("maxmemory", "1")
        one.put("b")
        await until(lambda: one.replica.stats().refused == 1 or not one.replica.connected, "it to be refused")
        assert one.answer("b") is not None
        await client.config_set("maxmemory", "0")
        one.put("c")
        other = await lonely_group.member()
        await until(lambda: other.answer("c") is not None, "it to go on")


async def test_many_writers_agree_in_the_end(group: Group) -> None:
    members = [await group.member() for _ in range(3)]

    async def write(who: int) -> None:
        for number in range(100):
            members[who].put(f"q{number % 40}", f"{who}-{number}", model="bad" if number % 3 else "good")
            if number % 25 == 24:
                await members[who].replica.purge(Purge(model="bad"))
            await asyncio.sleep(0)

    await asyncio.gather(*(write(who) for who in range(3)))
    await members[0].replica.purge(Purge(model="bad"))
    await told(*members)
    fresh = await group.member()
    await asyncio.sleep(0.3)
    for number in range(40):
        seen = {member.answer(f"q{number}") for member in (*members, fresh)}
        # One that was replaced here by an answer which was purged before Redis had it may live on elsewhere.
        assert len(seen - {None}) <= 1, f"q{number}: {seen}"
    assert await fresh.store.purge(Purge(model="bad")) == 0


class Pace:
    """How fast a way to Redis is; nothing comes through unless it is `flowing`."""

    delay_s = 0.0

    def __init__(self) -> None:
        self.flowing = asyncio.Event()
        self.flowing.set()


@asynccontextmanager
async def slow(server: RedisServer) -> AsyncIterator[tuple[str, Pace]]:
    """A way to a Redis server whose pace a test sets."""
    pace = Pace()
    path = server.folder / "slow"
    writers: set[asyncio.StreamWriter] = set()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                await asyncio.sleep(pace.delay_s / 2)
                await pace.flowing.wait()
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_unix_connection(server.socket)
        writers.update((writer, back))
        await asyncio.gather(pump(reader, back), pump(there, writer))

    listening = await asyncio.start_unix_server(connected, path)
    try:
        yield f"unix://{path}", pace
    finally:
        pace.flowing.set()
        listening.close()
        for writer in writers:
            writer.close()
