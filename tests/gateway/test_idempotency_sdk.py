"""Client libraries that send idempotency keys, over connections that break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest_asyncio
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import FrontDoor, eventually, front_door
from tests.gateway.idempotent import document, results, until_written


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, document(upstream)) as running:
        yield running


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
