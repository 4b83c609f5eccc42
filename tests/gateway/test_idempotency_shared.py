"""Idempotency keys over several gateway processes: answers, leases and bounds in a real Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis as redis_client

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.keys import CreatedKey
from gateway.access.redis_channel import Channel
from gateway.idempotency.recording import Broken, Recording, Released, TooLarge
from gateway.idempotency.shared import SCRIPT, Bounds, Lease, RemoteAnswer, SharedAnswers
from tests.gateway.front_door import events
from tests.gateway.several import Several, kill, several, until

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis(redis_binary: str) -> AsyncIterator[RedisServer]:
    server = RedisServer(redis_binary).start()
    yield server
    server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(
    redis: RedisServer, upstream: MockUpstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Several]:
    async with several(tmp_path_factory.mktemp("several"), redis.url, upstream, workers=2) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(gateways: Several) -> CreatedKey:
    return await gateways.key("ci")


@contextlib.asynccontextmanager
async def client(gateways: Several, worker: int) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.AsyncHTTPTransport(uds=str(gateways.root / f"var/run/gateway-{worker}.sock"))
    async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=120) as opened:
        yield opened


def request(key: CreatedKey, idempotency_key: str, **fields: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key.token}", "idempotency-key": idempotency_key}
    document = {"model": "mock", "messages": [{"role": "user", "content": "Hello there"}], **fields}
    return {"url": "/v1/chat/completions", "headers": headers, "json": document}


async def post(gateways: Several, worker: int, key: CreatedKey, name: str, **fields: Any) -> httpx.Response:
    async with client(gateways, worker) as opened:
        return await opened.post(**request(key, name, **fields))


# -- several processes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_another_process_gives_the_same_answer(
    gateways: Several, upstream: MockUpstream, key: CreatedKey, stream: bool
) -> None:
    before = upstream.requests
    upstream.override = "answer,chunks=40,pad=20000" if stream else None
    first = await post(gateways, 1, key, f"again-{stream}", stream=stream)
    again = await post(gateways, 2, key, f"again-{stream}", stream=stream)
    upstream.override = None
    assert first.status_code == again.status_code == 200
    assert again.content == first.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert "x-tierline-idempotency" not in first.headers
    assert upstream.requests == before + 1
    other = await post(gateways, 2, key, f"again-{stream}", stream=stream, temperature=0.1)
    assert other.status_code == 422


async def test_a_burst_over_both_processes_is_one_call_and_one_row(
    gateways: Several, upstream: MockUpstream, key: CreatedKey
) -> None:
    before, rows = upstream.requests, len(await gateways.rows())
    upstream.override = "answer,delay_ms=500"
    answers = await asyncio.gather(*(post(gateways, 1 + number % 2, key, "burst") for number in range(10)))
    upstream.override = None
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert sum("idempotent-replayed" not in answer.headers for answer in answers) == 1
    assert upstream.requests == before + 1
    assert len(await gateways.settled_rows(rows + 1)) == rows + 1


async def test_a_stream_is_joined_live_at_another_process(
    gateways: Several, upstream: MockUpstream, key: CreatedKey
) -> None:
    upstream.override = "answer,chunks=60,interval_ms=50"
    async with (
        client(gateways, 1) as one,
        client(gateways, 2) as two,
        one.stream("POST", **request(key, "live", stream=True)) as first,
    ):
        lines = first.aiter_lines()
        seen = [await anext(lines) for _ in range(5)]
        async with two.stream("POST", **request(key, "live", stream=True)) as second:
            others = second.aiter_lines()
            joined = [await anext(others) for _ in range(5)]
            assert joined == seen
            assert upstream.records[-1].outcome == "running"
            seen += [line async for line in lines]
            joined += [line async for line in others]
    upstream.override = None
    assert joined == seen
    assert [line for line in seen if line][-1] == "data: [DONE]"


async def test_the_first_client_leaves_and_another_process_has_the_rest(
    gateways: Several, upstream: MockUpstream, key: CreatedKey
) -> None:
    before = upstream.requests
    upstream.override = "answer,chunks=40,interval_ms=50"
    async with client(gateways, 1) as one, one.stream("POST", **request(key, "left", stream=True)) as first:
        await anext(first.aiter_lines())
    answer = await post(gateways, 2, key, "left", stream=True)
    upstream.override = None
    assert events(answer.text)[-1] == "[DONE]"
    assert upstream.requests == before + 1


async def test_a_killed_process_ends_its_lease_and_the_next_one_leads(
    gateways: Several, upstream: MockUpstream, key: CreatedKey
) -> None:
    """Who has seen nothing gets a new answer; who is in the middle of a stream gets an error, never a false end."""
    upstream.override = "answer,delay_ms=60000,chunks=100000,interval_ms=20"
    async with client(gateways, 1) as one, client(gateways, 2) as two:
        begun = upstream.requests
        plain = asyncio.create_task(one.post(**request(key, "killed")))
        stream = asyncio.create_task(one.post(**request(key, "killed-stream", stream=True)))
        await upstream.until(lambda: upstream.requests == begun + 2, 30)
        async with two.stream("POST", **request(key, "killed-stream", stream=True)) as joined:
            lines = joined.aiter_lines()
            await anext(lines)
            waiting = asyncio.create_task(two.post(**request(key, "killed")))
            # Only a request that has found the other's lease waits; it has not called the upstream then.
            await until(lambda: _in_flight(gateways, 2, 2), "the second request to wait at worker 2")
            restarts = gateways.state()["gateway-1"]["restarts"]
            upstream.override = None
            kill(gateways.pid(1))
            rest = [line async for line in lines if line]
            answer = await waiting
        for task in (plain, stream):
            with pytest.raises(httpx.HTTPError):
                await task
    assert events(rest[-1] + "\n\n")[0]["error"]["code"] == "stream_cut"
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers
    assert upstream.requests == begun + 3
    await until(lambda: gateways.state()["gateway-1"]["restarts"] > restarts, "the worker to be started again")
    await until(lambda: gateways.state()["gateway-1"]["status"] == "ready", "the worker to be ready")
    again = await post(gateways, 1, key, "killed")
    assert again.content == answer.content


async def _in_flight(gateways: Several, worker: int, count: int) -> bool:
    return (await gateways.metric("tierline_requests_in_flight"))[worker - 1] == count


async def test_without_redis_each_process_knows_its_own_keys(
    redis_binary: str, upstream: MockUpstream, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Served, repeated within a process, and said so; shared again when Redis is back."""
    server = RedisServer(redis_binary).start()
    async with several(tmp_path_factory.mktemp("outage"), server.url, upstream, workers=2) as gateways:
        key = await gateways.key("outage")
        await post(gateways, 1, key, "before")
        server.kill()
        first = await post(gateways, 1, key, "during")
        assert first.status_code == 200
        assert first.headers["x-tierline-idempotency"] == "local"
        assert (await post(gateways, 1, key, "during")).headers["idempotent-replayed"] == "true"
        assert (await post(gateways, 1, key, "before")).headers["idempotent-replayed"] == "true"
        elsewhere = await post(gateways, 2, key, "during")
        assert elsewhere.status_code == 200
        assert elsewhere.headers["x-tierline-idempotency"] == "local"
        server.start()

        number = 0

        async def shared() -> bool:
            nonlocal number
            number += 1
            return "x-tierline-idempotency" not in (await post(gateways, 1, key, f"after-{number}")).headers

        await until(shared, "keys to be shared again")
        assert (await post(gateways, 2, key, f"after-{number}")).headers["idempotent-replayed"] == "true"
    server.close()


# -- the script --------------------------------------------------------------------------------------------------------


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


async def test_every_byte_comes_back(redis: RedisServer) -> None:
    async with Store(redis, "{bytes}", bounds()) as store:
        content = bytes(range(256)) * 4000
        await store.give("all", content)
        answer = await store.follow("all")
        start = await answer.begun()
        assert start == START
        assert answer.request_id == "req-all"
        assert answer.fingerprint == "print"
        assert b"".join([piece async for piece in answer.pieces()]) == content


async def test_bounds_hold_over_all_processes(redis: RedisServer) -> None:
    """The oldest go first, by number and by bytes; the sums are those of what is there."""
    async with Store(redis, "{bounds}", bounds(max_entries=10)) as store:
        for number in range(15):
            await store.give(f"n-{number}", b"x" * 100)
        assert store.count() == 10
        assert store.shared.evicted == 5
        assert await body_of(await store.follow("n-14")) == b"x" * 100
        assert (await store.lead("n-0")).token
    async with Store(redis, "{bounds}", bounds(max_bytes=100_000)) as store:
        for number in range(10):
            await store.give(f"b-{number}", b"y" * 30_000)
            assert store.bytes() <= 100_000
            assert store.held() <= store.bytes()
        assert await body_of(await store.follow("b-9")) == b"y" * 30_000


async def test_what_is_over_is_forgotten_with_its_bytes(redis: RedisServer) -> None:
    async with Store(redis, "{ttl}", bounds(ttl_s=0.2)) as store:
        await store.give("short", b"z" * 50_000)
        await until(lambda: _forgotten(store), "an answer to be over")
        assert store.count() == 1
        assert store.bytes() < 50_000


async def _forgotten(store: Store) -> bool:
    lease, _ = await store.shared.begin("short", "print")
    return lease is not None


async def test_an_error_is_read_by_who_follows_and_forgotten_for_who_comes(redis: RedisServer) -> None:
    async with Store(redis, "{failed}", bounds()) as store:
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
async def test_what_ended_without_an_answer_releases_who_waits(redis: RedisServer, state: Any, refused: bool) -> None:
    async with Store(redis, f"{{released-{state}}}", bounds()) as store:
        lease, recording = await store.lead("r"), Recording("req-r", "print")
        lease.publish(recording)
        waiting = asyncio.create_task((await store.follow("r")).begun())
        if refused:
            recording.begin({**START, "status": 429}, refused=True)
        recording.end(state)
        with pytest.raises(Released):
            await waiting
        assert (store.count(), store.bytes()) == (0, 0)


async def test_an_answer_that_is_too_large_leaves_its_mark_only(redis: RedisServer) -> None:
    async with Store(redis, "{large}", bounds()) as store:
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


async def test_a_lease_that_ended_is_taken_over_and_its_holder_writes_no_more(redis: RedisServer) -> None:
    async with Store(redis, "{lease}", bounds(), lease_s=0.2) as store:
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


async def test_a_lease_is_renewed_as_long_as_the_request_runs(redis: RedisServer) -> None:
    """And a process that reads it is known to the one that runs it."""
    async with Store(redis, "{renewed}", bounds(), lease_s=4.0) as store:
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


async def test_writing_twice_changes_nothing(redis: RedisServer) -> None:
    """A call whose reply got lost is made again."""
    async with Store(redis, "{twice}", bounds()) as store:
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
