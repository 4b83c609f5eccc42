"""Idempotency keys over several gateway processes on one Redis: replayed, joined, taken over, and without Redis."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.keys import CreatedKey
from tests.gateway.front_door import events
from tests.gateway.several import Several, kill, several, until

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
WORKERS = 2


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
    before, rows = upstream.requests, len(await gateways.settled_rows(0))
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

        async def shared(worker: int) -> bool:
            nonlocal number
            number += 1
            return "x-tierline-idempotency" not in (await post(gateways, worker, key, f"after-{number}")).headers

        # Each process finds out by itself that Redis is back.
        await until(lambda: shared(1), "keys to be shared again by worker 1")
        await until(lambda: shared(2), "keys to be shared again by worker 2")
        assert (await post(gateways, 1, key, f"after-{number}")).headers["idempotent-replayed"] == "true"
    server.close()
