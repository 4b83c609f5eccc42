"""Idempotency keys at one gateway: a repeated request is answered as the first, and asks no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import FrontDoor, events, eventually, front_door
from tests.gateway.idempotent import CHAT, body, document, followed, post, results, streaming, until_written


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, document(upstream)) as running:
        yield running


# -- the same answer again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, body()),
        (CHAT, body(stream=True, stream_options={"include_usage": True})),
        ("/v1/completions", {"model": "mock", "prompt": "Once"}),
        ("/v1/completions", {"model": "mock", "prompt": "Once", "stream": True}),
        ("/v1/responses", {"model": "mock", "input": "Hello there"}),
        ("/v1/responses", {"model": "mock", "input": "Hello there", "stream": True}),
        ("/v1/messages", body(max_tokens=50)),
        ("/v1/messages", body(max_tokens=50, stream=True)),
        ("/v1/embeddings", {"model": "vectors", "input": "a text"}),
        ("/v1/rerank", {"model": "ranks", "query": "q", "documents": ["a", "b"]}),
    ],
)
async def test_a_repeated_request_gets_the_same_answer_and_one_row(
    door: FrontDoor, upstream: MockUpstream, path: str, fields: dict[str, Any]
) -> None:
    first = await post(door, "k-1", path, **fields)
    again = await post(door, "k-1", path, **fields)
    assert first.status_code == again.status_code == 200
    assert again.content == first.content
    assert "idempotent-replayed" not in first.headers
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-request-id"] == first.headers["x-request-id"]
    assert again.headers["content-type"] == first.headers["content-type"]
    assert upstream.requests == 1
    (row,) = await until_written(door, 1)
    assert row["request_id"] == first.headers["x-request-id"]
    assert results(door) == {"first": 1, "replayed": 1}


async def test_a_request_without_a_key_is_never_a_repetition(door: FrontDoor, upstream: MockUpstream) -> None:
    for _ in range(2):
        assert "idempotent-replayed" not in (await door.chat()).headers
    assert upstream.requests == 2
    assert results(door) == {}


async def test_a_long_answer_is_replayed_in_full(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=300,pad=5000"
    first = await post(door, "long", **body(stream=True))
    again = await post(door, "long", **body(stream=True))
    assert len(first.content) > 1_500_000
    assert again.content == first.content


async def test_a_replay_takes_nothing_off_the_limits(door: FrontDoor, upstream: MockUpstream) -> None:
    token = await door.key(requests_per_minute=2)
    for _ in range(5):
        assert (await post(door, "same", token=token, **body())).status_code == 200
    assert (await post(door, "other", token=token, **body())).status_code == 200
    refused = await post(door, "third", token=token, **body())
    assert refused.status_code == 429
    assert "x-ratelimit-remaining-requests" not in (await post(door, "same", token=token, **body())).headers
    assert upstream.requests == 2


async def test_another_api_key_of_the_project_gets_the_answer_too(door: FrontDoor, upstream: MockUpstream) -> None:
    other = await door.key()
    first = await post(door, "shared", **body())
    again = await post(door, "shared", token=other, **body())
    assert again.content == first.content
    assert upstream.requests == 1


async def test_another_project_has_keys_of_its_own(door: FrontDoor, upstream: MockUpstream) -> None:
    stranger = await door.key(project="elsewhere")
    await post(door, "k", **body())
    answer = await post(door, "k", token=stranger, **body(temperature=0.3))
    assert answer.status_code == 200
    assert "idempotent-replayed" not in answer.headers
    assert upstream.requests == 2


async def test_a_key_that_may_not_ask_does_not_get_the_answer(door: FrontDoor, upstream: MockUpstream) -> None:
    token = await door.key(allowed_models=["vectors"])
    await post(door, "secret", **body())
    refused = await post(door, "secret", token=token, **body())
    assert refused.status_code == 403
    assert upstream.requests == 1


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields", "extra"),
    [
        (CHAT, body(temperature=0.5), {}),
        ("/v1/messages", body(max_tokens=5), {}),
        (CHAT, body(), {"x-tierline-tier": "small"}),
        (CHAT, body(), {"anthropic-beta": "x-2026"}),
    ],
)
async def test_a_key_stands_for_one_request(
    door: FrontDoor, upstream: MockUpstream, path: str, fields: dict[str, Any], extra: dict[str, str]
) -> None:
    await post(door, "once", **body())
    headers = {**door.headers(), "idempotency-key": "once", **extra}
    refused = await door.client.post(path, json=fields, headers=headers)
    assert refused.status_code == 422
    error = refused.json()["error"]
    assert "idempotency" in error["message"]
    assert error.get("code", "idempotency_key_reuse") == "idempotency_key_reuse"
    assert upstream.requests == 1
    assert results(door)["reused"] == 1


async def test_a_key_in_use_refuses_another_request_at_once(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,delay_ms=60000"
    running = asyncio.create_task(post(door, "busy", **body()))
    await upstream.until(lambda: upstream.requests == 1)
    assert (await post(door, "busy", **body(temperature=0.5))).status_code == 422
    running.cancel()


@pytest.mark.parametrize("key", ["", "a b", "ü", "x" * 256, "tab\there"])
async def test_a_key_that_is_none_is_refused(door: FrontDoor, upstream: MockUpstream, key: str) -> None:
    headers = [(b"authorization", f"Bearer {door.token}".encode()), (b"idempotency-key", key.encode("latin-1"))]
    refused = await door.client.post(CHAT, json=body(), headers=headers)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "invalid_idempotency_key"
    assert upstream.requests == 0


@pytest.mark.parametrize("key", ["x", "x" * 255, '"8e03978e-40d5"', "a,b;c=d", "!~"])
async def test_every_visible_ascii_character_makes_a_key(door: FrontDoor, upstream: MockUpstream, key: str) -> None:
    assert (await post(door, key, **body())).status_code == 200
    assert (await post(door, key, **body())).headers["idempotent-replayed"] == "true"


async def test_two_different_keys_are_refused(door: FrontDoor) -> None:
    headers = [("authorization", f"Bearer {door.token}"), ("idempotency-key", "a"), ("idempotency-key", "b")]
    refused = await door.client.post(CHAT, json=body(), headers=headers)
    assert refused.status_code == 400
    assert "idempotency-key" in refused.json()["error"]["message"]


async def test_counting_tokens_takes_a_key_and_counts_again(door: FrontDoor) -> None:
    for _ in range(2):
        answer = await post(door, "count", "/v1/messages/count_tokens", **body())
        assert answer.status_code == 200
        assert "idempotent-replayed" not in answer.headers


# -- joining -----------------------------------------------------------------------------------------------------------


async def test_a_plain_request_joins_the_one_that_runs(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,delay_ms=400"
    answers = await asyncio.gather(*(post(door, "together", **body()) for _ in range(5)))
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.content for answer in answers}) == 1
    assert sorted("idempotent-replayed" in answer.headers for answer in answers) == [False, True, True, True, True]
    assert upstream.requests == 1
    await until_written(door, 1)
    assert results(door) == {"first": 1, "joined": 4}


async def test_a_stream_is_joined_from_its_first_event_and_then_live(door: FrontDoor, upstream: MockUpstream) -> None:
    """The joiner sees the first events while the answer still grows, and both end alike."""
    upstream.override = "answer,chunks=40,interval_ms=30"
    async with streaming(door, "live") as first:
        lines = first.aiter_lines()
        seen = [await anext(lines) for _ in range(9)]
        async with streaming(door, "live") as second:
            assert second.headers["idempotent-replayed"] == "true"
            others = second.aiter_lines()
            caught_up = [await anext(others) for _ in range(9)]
            assert caught_up == seen
            assert upstream.records[-1].outcome == "running"
            seen += [line async for line in lines]
            caught_up += [line async for line in others]
    assert caught_up == seen
    assert events("\n\n".join(seen))[-1] == "[DONE]"
    assert upstream.requests == 1


async def test_who_joined_may_leave_without_ending_it(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=20,interval_ms=30"
    async with streaming(door, "leaves") as first:
        async with streaming(door, "leaves") as second:
            await anext(second.aiter_lines())
        text = (await first.aread()).decode()
    assert events(text)[-1] == "[DONE]"
    assert upstream.records[-1].outcome == "answered"


async def test_the_first_client_may_leave_and_the_answer_is_finished(door: FrontDoor, upstream: MockUpstream) -> None:
    """Its retry gets everything, and so does a request that comes after the end."""
    upstream.override = "answer,chunks=20,interval_ms=30"
    async with streaming(door, "dropped") as first:
        await anext(first.aiter_lines())
    retried = await post(door, "dropped", **body(stream=True))
    assert retried.headers["idempotent-replayed"] == "true"
    assert events(retried.text)[-1] == "[DONE]"
    assert (await post(door, "dropped", **body(stream=True))).content == retried.content
    assert upstream.requests == 1
    (row,) = await until_written(door, 1)
    assert row["outcome"] == "success"


async def test_an_answer_that_nobody_waits_for_is_cancelled(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, document(upstream, finish_seconds=0.2)) as door:
        upstream.override = "answer,chunks=100000,interval_ms=20"
        async with streaming(door, "gone") as first:
            await anext(first.aiter_lines())
        await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", 10)
        (row,) = await until_written(door, 1)
        assert row["outcome"] == "cancelled"
        upstream.override = None
        assert "idempotent-replayed" not in (await post(door, "gone", **body(stream=True))).headers


async def test_an_answer_goes_on_as_long_as_somebody_follows(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, document(upstream, finish_seconds=0)) as door:
        upstream.override = "answer,chunks=30,interval_ms=50"
        async with streaming(door, "kept") as first:
            lines = first.aiter_lines()
            await anext(lines)
            joined = asyncio.create_task(post(door, "kept", **body(stream=True)))
            await eventually(lambda: results(door) == {"first": 1} and followed(door))
        assert events((await joined).text)[-1] == "[DONE]"
        assert upstream.records[-1].outcome == "answered"


async def test_a_follower_keeps_its_own_deadline(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=40,interval_ms=50"
    async with streaming(door, "slow") as first:
        lines = first.aiter_lines()
        await anext(lines)
        headers = {**door.headers(), "idempotency-key": "slow", "x-tierline-deadline-ms": "300"}
        late = await door.client.post(CHAT, json=body(stream=True), headers=headers)
        assert events(late.text)[-1]["error"]["code"] == "backend_deadline"
        assert [line async for line in lines if line][-1] == "data: [DONE]"


async def test_a_slow_client_holds_up_nobody_and_takes_no_memory(door: FrontDoor, upstream: MockUpstream) -> None:
    """Its own client reads nothing at all; who joins gets the whole answer all the same."""
    upstream.override = "answer,chunks=200,pad=50000"  # ten megabytes: more than all buffers on the way
    reader, writer = await asyncio.open_connection("127.0.0.1", int(door.url.rpartition(":")[2]), limit=1024)
    data = json.dumps(body(stream=True)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {door.token}\r\nidempotency-key: stuck\r\n"
    writer.write(head.encode() + f"content-length: {len(data)}\r\n\r\n".encode() + data)
    await reader.readline()  # the status: it has begun
    headers = {**door.headers(), "idempotency-key": "stuck"}
    joined = await door.client.post(CHAT, content=data, headers=headers)
    assert events(joined.text)[-1] == "[DONE]"
    assert len(joined.content) > 10_000_000
    answers = door.services.idempotency.answers
    assert answers.bytes < 1.2 * len(joined.content)
    writer.close()
    assert upstream.requests == 1
