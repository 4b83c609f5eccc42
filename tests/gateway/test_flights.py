"""Equal questions at once: one goes to the backend, whoever leaves and however slowly anybody reads, in one process and
between several that share a Redis."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from tests.cache.conftest import Process
from tests.gateway.front_door import PRICE, FrontDoor, configuration, eventually, front_door

POLICY = """\
version: 1
name: default
owner: tests
routes: [{tier: small}]
cache: {mode: exact}
"""
SLOW = "answer,chunks=40,interval_ms=10"
BODY = {"model": "mock", "messages": [{"role": "user", "content": "Hello there"}]}

Open = Callable[..., AbstractAsyncContextManager[FrontDoor]]


@pytest.fixture(scope="module")
def cache_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    process = Process(tmp_path_factory.mktemp("cache") / "s")
    process.start()
    yield process.socket
    assert process.end() == 0


@asynccontextmanager
async def opened(
    root: Path, upstream: MockUpstream, socket: Path, *, redis_url: str | None = None, like: FrontDoor | None = None
) -> AsyncIterator[FrontDoor]:
    """A gateway with a cache; with `like`, another process of the same house."""
    models = {"mock": {"tier": "small", "backend": "up", "price": PRICE}}
    document = configuration({"up": upstream}, models)
    document["cache"] = {"lookup_timeout_ms": 30_000.0}
    document["storage"] = {"redis_timeout_ms": 10_000}
    if redis_url is not None:
        document["storage"]["redis_url"] = redis_url
    (root / "var" / "run").mkdir(parents=True)
    (root / "var" / "run" / "cache.sock").symlink_to(socket)
    if like is not None:
        document["storage"]["database_url"] = f"sqlite:///{like.root}/var/tierline.db"
        shutil.copy(like.root / "var/secret", root / "var/secret")
    async with front_door(root, document, policy=POLICY) as door:
        assert door.services.cache is not None
        assert await door.services.cache.wait_connected(60)
        yield door


@pytest.fixture
async def door(tmp_path: Path, upstream: MockUpstream, cache_socket: Path) -> AsyncIterator[FrontDoor]:
    async with opened(tmp_path, upstream, cache_socket) as running:
        yield running


@pytest.fixture
async def doors(
    tmp_path: Path, upstream: MockUpstream, cache_socket: Path, redis_server: RedisServer
) -> AsyncIterator[tuple[FrontDoor, FrontDoor]]:
    """Two gateways that share a Redis and a ledger."""
    async with (
        opened(tmp_path / "one", upstream, cache_socket, redis_url=redis_server.url) as one,
        opened(tmp_path / "two", upstream, cache_socket, redis_url=redis_server.url, like=one) as two,
    ):
        for each in (one, two):
            assert each.services.shared_flights is not None
            await asyncio.wait_for(each.services.shared_flights._subscriber.listening.wait(), 10)
        yield one, two


class Reader:
    """A client of a stream. `text` is the content that it has so far."""

    def __init__(self, door: FrontDoor, **body: Any) -> None:
        self.door = door
        self.body = {**BODY, "stream": True, **body}
        self.text = ""
        self.headers = httpx.Headers()
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> list[Any]:
        seen = []
        sent = self.door.client.stream(
            "POST", "/v1/chat/completions", json=self.body, headers=self.door.headers(), timeout=60
        )
        async with sent as response:
            self.headers = response.headers
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                data = line.removeprefix("data: ")
                seen.append(data if data == "[DONE]" else json.loads(data))
                if data != "[DONE]":
                    for choice in seen[-1].get("choices", ()):
                        self.text += choice["delta"].get("content") or ""
        return seen

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def waiting(door: FrontDoor, count: int) -> None:
    await eventually(lambda: door.services.flight.shared >= count)


async def test_a_stream_is_shared_as_it_comes(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=6,held=1"
    first = Reader(door)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(door)
    await eventually(lambda: len(second.text) > 0 and second.text == first.text)
    plain = asyncio.create_task(door.chat())
    await waiting(door, 2)
    assert not first.task.done()
    assert not second.task.done()
    upstream.release.set()
    one, two = await first.task, await second.task
    assert (one[-1], two[-1]) == ("[DONE]", "[DONE]")
    assert first.text == second.text == (await plain).json()["choices"][0]["message"]["content"]
    assert upstream.requests == 1
    assert (first.headers["x-tierline-cache"], second.headers["x-tierline-cache"]) == ("miss", "exact")
    assert second.headers["x-tierline-cache-reason"] == "in_flight"
    ids = {part["id"] for part in two if part != "[DONE]"}
    assert len(ids) == 1
    assert ids != {part["id"] for part in one if part != "[DONE]"}
    rows = await door.rows()
    told = sorted((row["outcome"], row["cost_nanousd"] > 0, row["saved_nanousd"] > 0) for row in rows)
    assert told == [("cache_hit", False, True), ("cache_hit", False, True), ("success", True, False)]
    assert len({row["output_tokens"] for row in rows}) == 1


async def test_a_stream_goes_on_for_who_waits_when_its_own_client_leaves(
    door: FrontDoor, upstream: MockUpstream
) -> None:
    upstream.override = SLOW
    first = Reader(door)
    await eventually(lambda: len(first.text) > 0)
    second, plain = Reader(door), asyncio.create_task(door.chat())
    await waiting(door, 2)
    await first.leave()
    parts = await second.task
    assert parts[-1] == "[DONE]"
    assert (await plain).json()["choices"][0]["message"]["content"] == second.text
    assert second.text.count(" ") >= 39
    assert upstream.requests == 1
    assert upstream.records[0].outcome == "answered"
    await eventually(lambda: door.services.limiter.open_holds == 0)
    assert sorted(row["outcome"] for row in await door.rows()) == ["cache_hit", "cache_hit", "success"]


async def test_a_plain_answer_goes_on_for_who_waits_when_its_own_client_leaves(
    door: FrontDoor, upstream: MockUpstream
) -> None:
    upstream.override = "answer,delay_ms=400"
    first = asyncio.create_task(door.chat())
    await upstream.until(lambda: upstream.requests == 1)
    stream, plain = Reader(door), asyncio.create_task(door.chat())
    await waiting(door, 2)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (await plain).status_code == 200
    assert (await stream.task)[-1] == "[DONE]"
    assert stream.text == (await plain).json()["choices"][0]["message"]["content"]
    assert upstream.requests == 1


async def test_when_the_last_who_waits_leaves_too_the_backend_is_cancelled(
    door: FrontDoor, upstream: MockUpstream
) -> None:
    upstream.override = "answer,chunks=1000,interval_ms=10"
    first = Reader(door)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(door)
    await eventually(lambda: len(second.text) > 0)
    await first.leave()
    before = len(second.text)
    await eventually(lambda: len(second.text) > before + 20)
    assert upstream.records[0].outcome == "running"
    await second.leave()
    await upstream.until(lambda: upstream.records[0].outcome == "client-gone", timeout_s=2)
    await eventually(lambda: door.services.limiter.open_holds == 0)
    assert len(door.services.flight) == 0
    [row] = [row for row in await door.rows() if row["backend"] != "cache"]
    assert row["outcome"] == "cancelled"
    assert row["output_tokens"] > 0


async def test_a_client_that_does_not_read_holds_nobody_up(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=200,pad=50000,interval_ms=1"  # 10 MB: more than any buffer on the way
    host, port = door.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), limit=1024)
    body = json.dumps({**BODY, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {door.token}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    await upstream.until(lambda: upstream.requests == 1)
    await asyncio.sleep(0.5)  # until it is stuck
    second = Reader(door)
    assert (await asyncio.wait_for(second.task, 20))[-1] == "[DONE]"
    assert len(second.text.encode()) > 10_000_000
    assert upstream.requests == 1
    writer.close()


async def test_a_hundred_at_once_are_one_call(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,delay_ms=300,chunks=8,interval_ms=30"
    answers = await asyncio.gather(*(door.chat(stream=bool(number % 2)) for number in range(100)))
    assert {answer.status_code for answer in answers} == {200}
    assert all(answer.text.endswith("data: [DONE]\n\n") for answer in answers[1::2])
    assert upstream.requests == 1


async def test_a_refusal_of_the_request_is_everybodys(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=422,delay_ms=300"
    answers = await asyncio.gather(*(door.chat() for _ in range(10)))
    assert {answer.status_code for answer in answers} == {422}
    assert upstream.requests == 1


async def test_a_failure_hands_over_and_then_lets_everybody_go(door: FrontDoor, upstream: MockUpstream) -> None:
    door.services.dispatcher._limits = type(door.services.dispatcher._limits)(1, 30)
    upstream.override = "cut,times=1,delay_ms=200"
    answers = await asyncio.gather(*(door.chat() for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * 9 + [502]
    assert upstream.requests == 2


async def test_a_stream_that_breaks_breaks_for_who_follows_it(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "cut,after=20,interval_ms=20,chunks=40"
    first = Reader(door)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(door)
    for reader in (first, second):
        parts = await reader.task
        assert parts[-1]["error"]["code"] == "stream_cut"
    assert first.text == second.text
    assert len(door.services.flight) == 0


async def test_an_answer_that_may_not_be_kept_reaches_who_follows_it(door: FrontDoor, upstream: MockUpstream) -> None:
    """Its end was a limit of tokens, which is part of the question."""
    upstream.override = "answer,chunks=20,interval_ms=20"
    first = Reader(door)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(door)
    assert (await first.task)[-1] == (await second.task)[-1] == "[DONE]"


# -- between processes -------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_two_processes_share_one_stream_as_it_comes(
    doors: tuple[FrontDoor, FrontDoor], upstream: MockUpstream
) -> None:
    one, two = doors
    upstream.override = "answer,chunks=6,held=1"
    first = Reader(one)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(two)
    await eventually(lambda: len(second.text) > 0 and second.text == first.text)
    plain = asyncio.create_task(two.chat())
    await waiting(two, 1)
    assert not second.task.done()
    upstream.release.set()
    assert (await first.task)[-1] == (await second.task)[-1] == "[DONE]"
    assert first.text == second.text == (await plain).json()["choices"][0]["message"]["content"]
    assert upstream.requests == 1
    await two.rows()  # each writes its own into the ledger that they share
    assert sorted(row["outcome"] for row in await one.rows()) == ["cache_hit", "cache_hit", "success"]


@pytest.mark.redis
async def test_a_stream_goes_on_for_who_waits_in_another_process(
    doors: tuple[FrontDoor, FrontDoor], upstream: MockUpstream
) -> None:
    one, two = doors
    upstream.override = SLOW
    first = Reader(one)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(two)
    await eventually(lambda: len(second.text) > 0)
    await first.leave()
    assert (await second.task)[-1] == "[DONE]"
    assert upstream.requests == 1
    # And when nobody is left anywhere, the backend is cancelled.
    upstream.override = "answer,chunks=1000,interval_ms=10"
    other = [{"role": "user", "content": "Another question"}]
    first = Reader(one, messages=other)
    await eventually(lambda: len(first.text) > 0)
    second = Reader(two, messages=other)
    await eventually(lambda: len(second.text) > 0)
    await first.leave()
    await second.leave()
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", timeout_s=5)


@pytest.mark.redis
async def test_a_failure_in_one_process_hands_over_to_another(
    doors: tuple[FrontDoor, FrontDoor], upstream: MockUpstream
) -> None:
    one, two = doors
    upstream.override = "hang"
    first = asyncio.create_task(one.chat(headers={"x-tierline-deadline-ms": "600"}))
    await upstream.until(lambda: upstream.requests == 1)
    second = asyncio.create_task(two.chat())
    await eventually(lambda: two.services.flight._flights != {})
    upstream.override = None
    started = time.monotonic()
    assert (await second).status_code == 200
    assert time.monotonic() - started < 3
    assert (await first).status_code == 504
    assert upstream.requests == 2


@pytest.mark.redis
async def test_who_asks_just_after_the_landing_gets_the_answer_from_the_one_that_flew(
    doors: tuple[FrontDoor, FrontDoor], upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = doors
    await one.chat()
    cache = two.services.cache
    assert cache is not None
    await cache.purge()  # as if the answer had not come to the other one's cache yet
    answer = await two.chat()
    assert (answer.status_code, answer.headers["x-tierline-cache"]) == (200, "exact")
    assert upstream.requests == 1


@pytest.mark.redis
async def test_a_refusal_crosses_too(doors: tuple[FrontDoor, FrontDoor], upstream: MockUpstream) -> None:
    upstream.override = "status,status=422,delay_ms=300"
    answers = await asyncio.gather(*(door.chat() for door in doors for _ in range(5)))
    assert {answer.status_code for answer in answers} == {422}
    assert upstream.requests == 1


@pytest.mark.redis
async def test_without_redis_each_process_asks_for_its_own(
    tmp_path: Path, upstream: MockUpstream, cache_socket: Path, redis_binary: str
) -> None:
    server = RedisServer(redis_binary).start()
    try:
        async with (
            opened(tmp_path / "one", upstream, cache_socket, redis_url=server.url) as one,
            opened(tmp_path / "two", upstream, cache_socket, redis_url=server.url, like=one) as two,
        ):
            server.kill()
            upstream.override = "answer,delay_ms=200"
            answers = await asyncio.gather(*(door.chat() for door in (one, two) for _ in range(5)))
            assert {answer.status_code for answer in answers} == {200}
            assert upstream.requests == 2
    finally:
        server.close()
