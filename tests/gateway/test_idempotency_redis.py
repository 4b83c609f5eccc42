"""The answers that processes share, in a real Redis: every byte, bounds, leases, outages."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import redis as redis_client

from bench.redis_server import RedisServer
from gateway.access.redis_channel import Channel
from gateway.idempotency.recording import Broken, Recording, Released, TooLarge
from gateway.idempotency.shared import SCRIPT, Bounds, Lease, RemoteAnswer, SharedAnswers
from tests.gateway.several import until

pytestmark = [pytest.mark.redis]
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Store:
    """A `SharedAnswers` with keys of its own, and what Redis has of it."""

    def __init__(self, redis: RedisServer, prefix: str, bounds: Bounds, lease_s: float = 30.0) -> None:
        self.prefix = prefix
        self.shared = SharedAnswers(Channel(redis.url, SCRIPT, prefix, 30.0), bounds, lease_s=lease_s)
        self.client = redis_client.Redis(unix_socket_path=str(redis.socket))

    async def __aenter__(self) -> Store:
        await self.shared.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shared.stop()
        self.client.close()

    async def lead(self, id: str) -> Lease:
        lease, other = await self.shared.begin(id, "print")
        assert other is None
        assert lease is not None
        return lease

    async def follow(self, id: str) -> RemoteAnswer:
        lease, other = await self.shared.begin(id, "print")
        assert lease is None
        assert other is not None
        return other

    async def give(self, id: str, content: bytes) -> Recording:
        """A whole answer, published to its end."""
        lease, recording = await self.lead(id), Recording(f"req-{id}", "print")
        lease.publish(recording)
        recording.begin(START, refused=False)
        recording.add(content)
        recording.end("whole")
        await self.published()
        return recording

    async def published(self) -> None:
        await asyncio.gather(*self.shared._tasks)

    def bytes(self) -> int:
        return int(self.client.get(f"{self.prefix}:answers:bytes") or 0)

    def held(self) -> int:
        """Bytes of all bodies that are there."""
        return sum(self.client.strlen(name) for name in self.client.scan_iter(f"{self.prefix}:answer:*:body"))

    def count(self) -> int:
        return int(self.client.zcard(f"{self.prefix}:answers"))


def bounds(**changed: Any) -> Bounds:
    return Bounds(**{"ttl_s": 3600.0, "max_entries": 1000, "max_bytes": 1 << 24, **changed})


async def body_of(answer: RemoteAnswer) -> bytes:
    await answer.begun()
    return b"".join([piece async for piece in answer.pieces()])


async def test_every_byte_comes_back(redis_server: RedisServer) -> None:
    async with Store(redis_server, "{bytes}", bounds()) as store:
        content = bytes(range(256)) * 4000
        await store.give("all", content)
        answer = await store.follow("all")
        start = await answer.begun()
        assert start == START
        assert answer.request_id == "req-all"
        assert answer.fingerprint == "print"
        assert b"".join([piece async for piece in answer.pieces()]) == content


async def test_bounds_hold_over_all_processes(redis_server: RedisServer) -> None:
    """The oldest go first, by number and by bytes; the sums are those of what is there."""
    async with Store(redis_server, "{bounds}", bounds(max_entries=10)) as store:
        for number in range(15):
            await store.give(f"n-{number}", b"x" * 100)
        assert store.count() == 10
        assert store.shared.evicted == 5
        assert await body_of(await store.follow("n-14")) == b"x" * 100
        assert (await store.lead("n-0")).token
    async with Store(redis_server, "{bounds}", bounds(max_bytes=100_000)) as store:
        for number in range(10):
            await store.give(f"b-{number}", b"y" * 30_000)
            assert store.bytes() <= 100_000
            assert store.held() <= store.bytes()
        assert await body_of(await store.follow("b-9")) == b"y" * 30_000


async def test_what_is_over_is_forgotten_with_its_bytes(redis_server: RedisServer) -> None:
    async with Store(redis_server, "{ttl}", bounds(ttl_s=0.2)) as store:
        await store.give("short", b"z" * 50_000)
        await until(lambda: _forgotten(store), "an answer to be over")
        assert store.count() == 1
        assert store.bytes() < 50_000


async def _forgotten(store: Store) -> bool:
    lease, _ = await store.shared.begin("short", "print")
    return lease is not None


async def test_an_error_is_read_by_who_follows_and_forgotten_for_who_comes(redis_server: RedisServer) -> None:
    async with Store(redis_server, "{failed}", bounds()) as store:
        lease, recording = await store.lead("f"), Recording("req-f", "print")
        lease.publish(recording)
        recording.begin(START, refused=False)
        recording.add(b"half")
        following = await store.follow("f")
        assert (await following.begun())["status"] == 200
        recording.add(b", then an error")
        recording.end("failed")
        assert b"".join([piece async for piece in following.pieces()]) == b"half, then an error"
        assert (await store.lead("f")).token != lease.token


@pytest.mark.parametrize(("state", "refused"), [("gone", False), ("failed", True)])
async def test_what_ended_without_an_answer_releases_who_waits(
    redis_server: RedisServer, state: Any, refused: bool
) -> None:
    async with Store(redis_server, f"{{released-{state}}}", bounds()) as store:
        lease, recording = await store.lead("r"), Recording("req-r", "print")
        lease.publish(recording)
        waiting = asyncio.create_task((await store.follow("r")).begun())
        if refused:
            recording.begin({**START, "status": 429}, refused=True)
        recording.end(state)
        with pytest.raises(Released):
            await waiting
        assert (store.count(), store.bytes()) == (0, 0)


async def test_an_answer_that_is_too_large_leaves_its_mark_only(redis_server: RedisServer) -> None:
    async with Store(redis_server, "{large}", bounds()) as store:
        lease, recording = await store.lead("l"), Recording("req-l", "print")
        lease.publish(recording)
        recording.begin(START, refused=False)
        recording.add(b"x" * 50_000)
        following = await store.follow("l")
        await following.begun()
        recording.end("lost")
        recording.clear()
        with pytest.raises(TooLarge):
            [piece async for piece in following.pieces()]
        recording.end("too_large")
        await store.published()
        assert store.held() == 0
        with pytest.raises(TooLarge):
            await (await store.follow("l")).begun()


async def test_a_lease_that_ended_is_taken_over_and_its_holder_writes_no_more(redis_server: RedisServer) -> None:
    async with Store(redis_server, "{lease}", bounds(), lease_s=0.2) as store:
        first = await store.lead("x")
        assert (await store.shared.put(first, "running", 0, b"old", "[]"))[0] == "ok"
        following = await store.follow("x")
        await until(lambda: _taken_over(store), "the lease to end")
        assert (await store.shared.put(first, "whole", 3, b" and more", None))[0] == "stolen"
        with pytest.raises(Released):
            await following.begun()
        await following._read(0)
        with pytest.raises(Broken):
            [piece async for piece in following.pieces()]


async def _taken_over(store: Store) -> bool:
    lease, _ = await store.shared.begin("x", "print")
    return lease is not None


async def test_a_lease_is_renewed_as_long_as_the_request_runs(redis_server: RedisServer) -> None:
    """And a process that reads it is known to the one that runs it."""
    async with Store(redis_server, "{renewed}", bounds(), lease_s=4.0) as store:
        lease, recording = await store.lead("y"), Recording("req-y", "print")
        lease.publish(recording)
        waiting = asyncio.create_task(body_of(await store.follow("y")))
        await asyncio.sleep(5.0)
        assert not waiting.done()
        assert recording.followed
        recording.begin(START, refused=False)
        recording.add(b"late")
        recording.end("whole")
        assert await waiting == b"late"


async def test_a_client_that_leaves_at_once_holds_no_lease(redis_server: RedisServer) -> None:
    async with Store(redis_server, "{left}", bounds(), lease_s=600.0) as store:
        asking = asyncio.create_task(store.shared.begin("a", "print"))
        await asyncio.sleep(0)  # it is on its way now
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await store.published()
        assert (await store.lead("a")).token


async def test_writing_twice_changes_nothing(redis_server: RedisServer) -> None:
    """A call whose reply got lost is made again."""
    async with Store(redis_server, "{twice}", bounds()) as store:
        lease = await store.lead("t")
        head = '["req-t",200,[],""]'
        for _ in range(2):
            assert (await store.shared.put(lease, "running", 0, b"abc", head))[0] == "ok"
            assert (await store.shared.put(lease, "running", 3, b"def", None))[0] == "ok"
        for _ in range(2):
            assert (await store.shared.put(lease, "whole", 6, b"", None))[0] == "ok"
        assert await body_of(await store.follow("t")) == b"abcdef"
        assert store.bytes() == 2048 + 6


async def test_publishing_outlives_an_outage(redis_binary: str, tmp_path: Path) -> None:
    """Redis goes away and comes back with its data while an answer grows: the answer is there in full."""
    server = RedisServer(redis_binary, "--appendonly", "yes", "--appendfsync", "always").start()
    async with Store(server, "{outage}", bounds()) as store:
        lease, recording = await store.lead("o"), Recording("req-o", "print")
        lease.publish(recording)
        recording.begin(START, refused=False)
        recording.add(b"before, ")
        following = await store.follow("o")
        await following.begun()
        server.kill()
        recording.add(b"during, ")
        recording.end("whole")
        server.start()
        await store.published()
        assert await body_of(await store.follow("o")) == b"before, during, "
    server.close()
