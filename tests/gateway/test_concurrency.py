"""More requests than may run at once, through a whole gateway: they wait, or are told when to come back."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.exact_upstream import key
from tests.gateway.front_door import FrontDoor, configuration, front_door
from tests.gateway.test_http_edge import eventually

SHORT = "mock,delay_ms=30"
LONG = "mock,delay_ms=60000"


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


def document(upstream: MockUpstream, **limits: Any) -> dict[str, Any]:
    return configuration({"up": upstream}) | {"limits": limits}


def waiting(door: FrontDoor) -> int:
    return door.services.queue.waiting


async def metric(door: FrontDoor, name: str) -> float:
    page = (await door.client.get("/metrics")).text
    [line] = [line for line in page.splitlines() if line.startswith(name + " ")]
    return float(line.rpartition(" ")[2])


async def test_what_a_key_asks_beyond_its_parallel_limit_waits(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = SHORT
    async with front_door(tmp_path, document(upstream)) as door:
        token = await key(door, parallel=2)
        answers = await asyncio.gather(*(door.chat(token=token) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
        assert {answer.headers["x-ratelimit-limit-parallel"] for answer in answers} == {"2"}
        assert await metric(door, "tierline_queue_wait_seconds_count") == 6
        assert await metric(door, "tierline_queue_waiting") == 0
        assert len(await door.rows()) == 8
        assert door.services.queue.running == 0


async def test_never_more_run_than_the_process_may(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = SHORT
    running: list[int] = []
    async with front_door(tmp_path, document(upstream, max_concurrency=3)) as door:
        tasks = [asyncio.create_task(door.chat(stream=bool(number % 2))) for number in range(20)]
        while not all(task.done() for task in tasks):
            running.append(sum(record.outcome == "running" for record in upstream.records))
            await asyncio.sleep(0.002)
        assert [task.result().status_code for task in tasks] == [200] * 20
    assert max(running) <= 3


async def test_a_noisy_key_delays_itself(tmp_path: Path, upstream: MockUpstream) -> None:
    async with front_door(tmp_path, document(upstream, max_concurrency=1, max_queued=20)) as door:
        quiet = await key(door, name="quiet")
        upstream.override = LONG
        first = asyncio.create_task(door.chat())
        await upstream.until(lambda: upstream.requests == 1)
        upstream.override = SHORT
        noisy = [asyncio.create_task(door.chat()) for _ in range(30)]
        await eventually(lambda: waiting(door) == 20)
        await eventually(lambda: sum(task.done() for task in noisy) == 10)
        refused = [task.result() for task in noisy if task.done()]
        assert {answer.status_code for answer in refused} == {429}
        assert {answer.json()["error"]["code"] for answer in refused} == {"rate_limit_exceeded"}
        assert all(int(answer.headers["retry-after"]) >= 1 for answer in refused)
        assert await metric(door, "tierline_queue_waiting") == 20
        modest = asyncio.create_task(door.chat(token=quiet))  # the queue is full, and it is not of this key
        await eventually(lambda: sum(task.done() for task in noisy) == 11)
        first.cancel()
        assert (await modest).status_code == 200
        assert sum(task.done() for task in noisy) <= 13, "it was among the next"
        statuses = Counter(answer.status_code for answer in await asyncio.gather(*noisy))
        assert statuses == {200: 19, 429: 11}


async def test_waiting_in_vain_is_told_when_to_come_back(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = LONG
    async with front_door(tmp_path, document(upstream, max_concurrency=1, queue_timeout_s=0.1)) as door:
        first = asyncio.create_task(door.chat())
        await upstream.until(lambda: upstream.requests == 1)
        answer = await door.chat()
        assert answer.status_code == 429
        assert answer.json()["error"]["message"] == (
            "The gateway runs 1 requests, as many as it may at a time. No turn came in 0.1 s."
        )
        assert int(answer.headers["retry-after"]) >= 1
        late = await door.chat(headers={"x-tierline-deadline-ms": "50"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "backend_deadline")
        assert upstream.requests == 1
        first.cancel()


@pytest.mark.parametrize("stream", [False, True])
async def test_who_leaves_the_queue_has_taken_nothing(tmp_path: Path, upstream: MockUpstream, stream: bool) -> None:
    upstream.override = LONG
    async with front_door(tmp_path, document(upstream, max_concurrency=1)) as door:
        token = await key(door, requests_per_minute=10, budget_nanousd=10**9)
        first = asyncio.create_task(door.chat())
        await upstream.until(lambda: upstream.requests == 1)
        leaving = asyncio.create_task(door.chat(token=token, stream=stream))
        await eventually(lambda: waiting(door) == 1)
        leaving.cancel()
        await eventually(lambda: waiting(door) == 0)
        first.cancel()
        await eventually(lambda: door.services.queue.running == 0)
        upstream.override = None
        answer = await door.chat(token=token)
        assert answer.headers["x-ratelimit-remaining-requests"] == "9"
        assert upstream.requests == 2
        assert [row["outcome"] for row in await door.rows()] == ["cancelled", "success"]


async def test_counting_tokens_waits_for_nobody(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = LONG
    async with front_door(tmp_path, document(upstream, max_concurrency=1)) as door:
        first = asyncio.create_task(door.chat())
        await upstream.until(lambda: upstream.requests == 1)
        body = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}
        counted = await door.client.post("/v1/messages/count_tokens", json=body, headers=door.headers())
        assert counted.status_code == 429
        first.cancel()
        await eventually(lambda: door.services.queue.running == 0)
        counted = await door.client.post("/v1/messages/count_tokens", json=body, headers=door.headers())
        assert counted.status_code == 200
        assert door.services.queue.running == 0
