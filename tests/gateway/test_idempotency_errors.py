"""What an idempotency key does not bring back: errors, answers cut short, answers too large or too old."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import FrontDoor, events, eventually, front_door
from tests.gateway.idempotent import CHAT, body, document, followed, post, streaming, until_written


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, document(upstream)) as running:
        yield running


@pytest.mark.parametrize("fault", ["status,status=500", "status,status=429", "status,status=400", "close", "cut"])
async def test_an_error_is_not_remembered_so_that_a_retry_retries(
    door: FrontDoor, upstream: MockUpstream, fault: str
) -> None:
    upstream.override = fault
    failed = await post(door, "flaky", **body())
    assert failed.status_code >= 400
    before = upstream.requests
    upstream.override = None
    retried = await post(door, "flaky", **body())
    assert retried.status_code == 200
    assert "idempotent-replayed" not in retried.headers
    assert upstream.requests == before + 1


async def test_a_stream_that_broke_off_is_not_remembered(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "cut,after=3"
    broken = await post(door, "half", **body(stream=True))
    assert events(broken.text)[-1]["error"]["code"] == "stream_cut"
    upstream.override = None
    assert events((await post(door, "half", **body(stream=True))).text)[-1] == "[DONE]"


async def test_a_timeout_is_not_remembered(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,delay_ms=60000"
    headers = {**door.headers(), "idempotency-key": "late", "x-tierline-deadline-ms": "200"}
    assert (await door.client.post(CHAT, json=body(), headers=headers)).status_code == 504
    upstream.override = None
    assert (await post(door, "late", **body())).status_code == 200


async def test_who_joined_gets_the_error_of_a_backend(door: FrontDoor, upstream: MockUpstream) -> None:
    """It is the outcome of the call that both wait for; only who comes later has a call of its own."""
    upstream.override = "answer,chunks=10,interval_ms=50"
    async with streaming(door, "breaks") as first:
        lines = first.aiter_lines()
        await anext(lines)
        joined = asyncio.create_task(post(door, "breaks", **body(stream=True)))
        await eventually(lambda: followed(door))
        for connection in list(upstream.connections):
            connection.abort()
        ended = [line async for line in lines]
    assert events("\n\n".join(ended))[-1]["error"]["code"] == "stream_cut"
    assert events((await joined).text)[-1]["error"]["code"] == "stream_cut"
    assert upstream.requests == 1


async def test_a_refusal_before_any_call_is_not_shared(door: FrontDoor, upstream: MockUpstream) -> None:
    """The limits of one API key say nothing about another one's request."""
    poor = await door.key(budget_nanousd=1)
    refused, answered = await asyncio.gather(post(door, "k", token=poor, **body()), post(door, "k", **body()))
    assert (refused.status_code, answered.status_code) in {(429, 200), (200, 200)}
    assert (await post(door, "k2", token=poor, **body())).status_code == 429
    assert (await post(door, "k2", **body())).status_code == 200


async def test_an_answer_that_is_too_large_is_given_once_and_not_asked_for_again(
    tmp_path: Path, upstream: MockUpstream
) -> None:
    async with front_door(tmp_path, document(upstream, max_bytes=1 << 20)) as door:
        upstream.override = "answer,chunks=200,pad=5000"
        first = await post(door, "huge", **body(stream=True))
        assert events(first.text)[-1] == "[DONE]"
        assert len(first.content) > 1_000_000
        again = await post(door, "huge", **body(stream=True))
        assert again.status_code == 409
        assert again.json()["error"]["code"] == "idempotency_answer_too_large"
        assert again.headers["x-should-retry"] == "false"
        assert upstream.requests == 1
        assert door.services.idempotency.answers.bytes < 10_000
        await until_written(door, 1)


async def test_the_leaving_of_a_client_ends_an_answer_that_is_too_large(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, document(upstream, max_bytes=1 << 20)) as door:
        upstream.override = "answer,chunks=100000,pad=50000,interval_ms=5"
        async with streaming(door, "huge") as first:
            taken = 0
            async for piece in first.aiter_bytes():
                taken += len(piece)
                if taken > 1_000_000:
                    break
        await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", 10)
        (row,) = await until_written(door, 1)
        assert row["outcome"] == "cancelled"


async def test_the_oldest_answer_goes_when_there_are_too_many(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, document(upstream, max_entries=3)) as door:
        for number in range(5):
            await post(door, f"k-{number}", **body())
        again = [("idempotent-replayed" in (await post(door, f"k-{number}", **body())).headers) for number in (4, 3, 2)]
        assert again == [True, True, True]
        assert "idempotent-replayed" not in (await post(door, "k-0", **body())).headers
        door.services.idempotency.observe()
        page = (await door.client.get("/metrics")).text
        assert 'tierline_idempotent_evicted_total{where="memory"} 3.0' in page
        assert "tierline_idempotent_answers 3.0" in page
