"""Idempotency keys at one gateway: a repeated request is answered as the first, and asks no model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, events, eventually, front_door

CHAT = "/v1/chat/completions"


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


def document(upstream: MockUpstream, **idempotency: Any) -> dict[str, Any]:
    models = {
        "mock": {"tier": "small", "backend": "up", "capabilities": ["tools"], "price": PRICE},
        "vectors": {"kind": "embedding", "backend": "up", "price": PRICE},
        "ranks": {"kind": "rerank", "backend": "up", "price": PRICE},
    }
    made = configuration({"up": upstream}, models)
    made["backends"]["up"]["timeouts"] = {"connect_s": 5, "first_token_s": 30, "between_tokens_s": 30, "total_s": 60}
    return {**made, "idempotency": idempotency}


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, document(upstream)) as running:
        yield running


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": "Hello there"}], **fields}


async def post(door: FrontDoor, key: str, path: str = CHAT, token: str | None = None, **fields: Any) -> httpx.Response:
    headers = {**door.headers(token), "idempotency-key": key}
    return await door.client.post(path, json=fields, headers=headers)


@asynccontextmanager
async def streaming(door: FrontDoor, key: str, **fields: Any) -> AsyncIterator[httpx.Response]:
    headers = {**door.headers(), "idempotency-key": key}
    async with door.client.stream("POST", CHAT, json=body(stream=True, **fields), headers=headers) as response:
        yield response


def results(door: FrontDoor) -> dict[str, float]:
    counts = door.services.metrics.idempotent
    return {labels[0]: count.value for labels, count in counts._children.items()}


async def until_written(door: FrontDoor, count: int) -> list[dict[str, Any]]:
    await eventually(lambda: door.services.metrics.in_flight.value == 0)
    rows = await door.rows()
    assert len(rows) == count
    return rows


# -- the same answer again ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, body()),
        (CHAT, body(stream=True, stream_options={"include_usage": True})),
        ("/v1/completions", {"model": "mock", "prompt": "Once"}),
        ("/v1/completions", {"model": "mock", "prompt": "Once", "stream": True}),
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
            await eventually(lambda: results(door) == {"first": 1} and _followed(door))
        assert events((await joined).text)[-1] == "[DONE]"
        assert upstream.records[-1].outcome == "answered"


def _followed(door: FrontDoor) -> bool:
    return any(recording.followed for recording in door.services.idempotency.answers._running.values())


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


# -- what is not remembered --------------------------------------------------------------------------------------------


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
        await eventually(lambda: _followed(door))
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


# -- client libraries --------------------------------------------------------------------------------------------------


class Impatient:
    """A connection between client and gateway that breaks `times` times, once `broken()` says so."""

    def __init__(self, door: FrontDoor, times: int, broken: Callable[[], bool]) -> None:
        self._port = int(door.url.rpartition(":")[2])
        self._left = times
        self._broken = broken

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        pumps = [
            asyncio.create_task(self._pump(reader, there_writer)),
            asyncio.create_task(self._pump(there_reader, writer)),
        ]
        if self._left:
            self._left -= 1
            await eventually(self._broken)
            for one in (writer, there_writer):
                one.transport.abort()
        await asyncio.wait(pumps)
        for one in (writer, there_writer):
            one.close()

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(65536):
                writer.write(data)
            writer.write_eof()
        except OSError:
            pass


async def test_the_openai_sdk_retries_after_a_broken_connection(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,delay_ms=1500"
    proxy = await asyncio.start_server(Impatient(door, 1, lambda: upstream.requests == 1), "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    client = AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=door.token, max_retries=3)
    raw = await client.chat.completions.with_raw_response.create(
        model="mock", messages=[{"role": "user", "content": "Hi"}], extra_headers={"Idempotency-Key": "sdk-1"}
    )
    assert raw.retries_taken == 1
    assert raw.headers["idempotent-replayed"] == "true"
    assert raw.parse().choices[0].message.content
    assert upstream.requests == 1
    await until_written(door, 1)
    await client.close()
    proxy.close()


async def test_the_anthropic_sdk_retries_after_a_broken_connection(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,delay_ms=1500"
    proxy = await asyncio.start_server(Impatient(door, 1, lambda: upstream.requests == 1), "127.0.0.1", 0)
    port = proxy.sockets[0].getsockname()[1]
    client = AsyncAnthropic(base_url=f"http://127.0.0.1:{port}", api_key=door.token, max_retries=3)
    message = await client.messages.create(
        model="mock",
        max_tokens=50,
        messages=[{"role": "user", "content": "Hi"}],
        extra_headers={"Idempotency-Key": "sdk-2"},
    )
    assert message.content
    assert upstream.requests == 1
    await until_written(door, 1)
    await client.close()
    proxy.close()


async def test_keys_as_client_libraries_make_them(door: FrontDoor, upstream: MockUpstream) -> None:
    """Libraries that make a key themselves send it with every attempt, next to headers that differ."""
    for attempt in range(2):
        headers = {"idempotency-key": "stainless-python-retry-0b4d6c52", "x-stainless-retry-count": str(attempt)}
        answer = await door.chat(headers=headers)
        assert ("idempotent-replayed" in answer.headers) == (attempt == 1)
    client = AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token)
    client._idempotency_header = "Idempotency-Key"  # as in versions and languages that send one of their own
    await client.chat.completions.create(model="mock", messages=[{"role": "user", "content": "Hi"}])
    await client.close()
    assert upstream.requests == 2
    assert results(door) == {"first": 2, "replayed": 1}
