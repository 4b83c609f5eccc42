"""Failover as a client of the gateway sees it: queues, rescues, hedges and refusals, with their rows and metrics."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from bench.mock_story import PIECES, STORY, StoryWire
from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record, http_answer
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

Servers = tuple[MockUpstream, MockUpstream]


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[Servers]:
    pair = MockUpstream(StoryWire("one")), MockUpstream(StoryWire("two"))
    for server in pair:
        await server.start()
    yield pair
    for server in pair:
        await server.stop()


def document(servers: Servers, upstream: str, **backend: Any) -> dict[str, Any]:
    """A small model on the first server and a medium one, its fallback, on the second; both can continue."""
    models = {
        "first": {"tier": "small", "backend": "one", "upstream_model": upstream, "price": PRICE},
        "second": {"tier": "medium", "backend": "two", "upstream_model": "story", "price": PRICE},
    }
    made = configuration({"one": servers[0], "two": servers[1]}, models)
    for model in models.values():
        model["capabilities"] = ["prefill"]
    made["backends"]["one"] |= {"attempts": 1, **backend}
    return made


async def story(door: FrontDoor, **body: Any) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, which must end well, and its chunks."""
    response = await door.chat("auto", stream=True, stream_options={"include_usage": True}, **body)
    assert response.status_code == 200
    data = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    return "".join(c["delta"].get("content") or "" for chunk in chunks for c in chunk["choices"]), chunks


# Rescue.


async def test_a_rescued_answer_is_one_answer_and_two_rows(tmp_path: Path, servers: Servers) -> None:
    async with front_door(tmp_path, document(servers, "cut,after=5")) as door:
        text, chunks = await story(door)
        rows = await door.rows()
        page = (await door.client.get("/metrics")).text
    assert text == STORY
    assert len({(chunk["id"], chunk["model"], chunk["created"]) for chunk in chunks}) == 1
    assert [(row["outcome"], row["model"], row["attempt"]) for row in rows] == [
        ("cut", "first", 1),
        ("success", "second", 2),
    ]
    first, second = rows
    assert (first["usage_source"], first["output_tokens"]) == ("counted", 7)  # 28 bytes
    assert (second["usage_source"], second["input_tokens"], second["output_tokens"]) == (
        "reported",
        12 + 5,
        10,
    )  # a blank line goes with the word after it
    assert second["finish_reason"] == "stop"
    total = first["cost_nanousd"] + second["cost_nanousd"]
    assert second["cost_nanousd"] == (17 * 1 + 10 * 2) * 1000
    tierline = chunks[-1]["tierline"]
    assert round(tierline["cost_usd"] * 1e9) == total
    assert tierline["model"] == "second"
    assert chunks[-1]["usage"]["prompt_tokens"] + chunks[-1]["usage"]["completion_tokens"] == 27
    assert 'tierline_backend_continuations_total{backend="two"} 1.0' in page
    assert 'tierline_requests_total{outcome="success",route="chat.completions",status="200"} 1.0' in page


async def test_an_answer_that_nobody_could_continue_is_cut(tmp_path: Path, servers: Servers) -> None:
    made = document(servers, "cut,after=5,times=1,then=status")
    made["models"].pop("second")
    async with front_door(tmp_path, made) as door:
        response = await door.chat("auto", stream=True)
        rows = await door.rows()
        page = (await door.client.get("/metrics")).text
    assert "[DONE]" not in response.text
    assert json.loads(response.text.split("\n\n")[-2].removeprefix("data: "))["error"]["code"] == "stream_cut"
    assert [row["outcome"] for row in rows] == ["cut", "error"]
    assert rows[0]["cost_nanousd"] > 0 == rows[1]["cost_nanousd"]
    assert 'tierline_requests_total{outcome="cut"' in page


async def test_a_rescued_answer_is_not_remembered_as_that_of_one_model(tmp_path: Path, servers: Servers) -> None:
    made = document(servers, "cut,after=5,times=1")
    made["models"].pop("second")
    async with front_door(tmp_path, made) as door:
        text, _ = await story(door, temperature=0)
        assert text == STORY
        assert [row["outcome"] for row in await door.rows()] == ["cut", "success"]


async def test_a_client_that_leaves_during_a_rescue_has_both_rows(tmp_path: Path, servers: Servers) -> None:
    async with front_door(tmp_path, document(servers, "cut,after=5")) as door:
        servers[1].override = "hang"
        async with httpx.AsyncClient(base_url=door.url) as client:
            body = {"model": "auto", "stream": True, "messages": [{"role": "user", "content": "hi"}]}
            call = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=door.headers()))
            await servers[1].until(lambda: servers[1].requests == 1)
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
        await servers[1].until(lambda: servers[1].records[-1].outcome == "client-gone", timeout_s=1)
        async with asyncio.timeout(5):
            while door.services.limiter.open_holds:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        rows = await door.rows()
    assert [row["outcome"] for row in rows] == ["cut", "cancelled"]
    assert rows[1]["input_tokens"] > rows[0]["input_tokens"]  # what was delivered is part of its prompt


# Queues.


async def test_requests_wait_for_a_busy_backend_and_leave_the_queue_with_their_client(
    tmp_path: Path, servers: Servers
) -> None:
    made = document(servers, "story,chunks=9999,interval_ms=5", max_outstanding=1, max_queued=1)
    made["models"].pop("second")
    async with front_door(tmp_path, made) as door:
        pool = door.services.pools["one"]
        body = {"model": "first", "stream": True, "messages": [{"role": "user", "content": "hi"}]}

        async def until_queued(number: int) -> None:
            async with asyncio.timeout(5):
                while pool.queued != number:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)

        async with httpx.AsyncClient(base_url=door.url, headers=door.headers(), timeout=30) as client:
            running = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await servers[0].until(lambda: servers[0].requests == 1)
            waiting = asyncio.create_task(client.post("/v1/chat/completions", json=body))
            await until_queued(1)
            assert 'tierline_backend_queued{backend="one"} 1.0' in (await door.client.get("/metrics")).text
            refused = await client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "backend_overloaded")
            assert int(refused.headers["retry-after"]) >= 1
            waiting.cancel()
            await until_queued(0)
            again = asyncio.create_task(client.post("/v1/chat/completions", json={**body, "stream": False}))
            await until_queued(1)
            running.cancel()
            servers[0].override = "story"
            assert (await again).status_code == 200
        rows = await door.rows()
    assert sorted(row["outcome"] for row in rows) == ["cancelled", "success"]  # who never left the queue has no row
    assert door.services.limiter.open_holds == 0


async def test_a_flood_of_one_key_does_not_lock_out_another(tmp_path: Path, servers: Servers) -> None:
    made = document(servers, "story,delay_ms=30", max_outstanding=1, max_queued=4)
    made["models"].pop("second")
    async with front_door(tmp_path, made) as door:
        modest = await door.key(name="modest")
        flood = [asyncio.create_task(door.chat("first")) for _ in range(12)]
        await servers[0].until(lambda: servers[0].requests == 1)
        assert (await door.chat("first", token=modest)).status_code == 200
        statuses = [answer.status_code for answer in await asyncio.gather(*flood)]
    assert set(statuses) == {200, 503}


# Hedges.


async def test_both_attempts_of_a_hedge_are_in_the_ledger(tmp_path: Path, servers: Servers) -> None:
    made = document(servers, "story", hedge={"max_share": 1.0, "min_delay_s": 0.05})
    async with front_door(tmp_path, made) as door:
        for _ in range(31):  # before there are figures nothing is hedged
            await story(door)
        servers[0].override = "hang,times=1"
        text, _ = await story(door)
        rows = (await door.rows())[-2:]
        page = (await door.client.get("/metrics")).text
    assert text == STORY
    assert sorted(row["outcome"] for row in rows) == ["cancelled", "success"]
    lost = next(row for row in rows if row["outcome"] == "cancelled")
    assert lost["error"] == "another attempt answered first"
    assert lost["input_tokens"] > 0 == lost["output_tokens"]
    assert lost["cost_nanousd"] > 0
    assert {row["attempt"] for row in rows} == {1, 2}
    assert 'tierline_backend_hedges_total{backend="one",result="made"} 1.0' in page


# Refusals.


class TooLong(OpenAIWire):
    def refusal(self, record: Record) -> bytes | None:
        error = {"message": "maximum context length is 8 tokens", "type": "BadRequestError", "code": 400}
        return http_answer(400, json.dumps({"error": error}).encode())


async def test_a_prompt_too_long_for_one_model_is_answered_by_a_longer_one(tmp_path: Path, servers: Servers) -> None:
    servers[0].wire = TooLong()
    made = document(servers, "story")
    made["models"]["first"]["context_length"], made["models"]["second"]["context_length"] = 4096, 8192
    async with front_door(tmp_path, made) as door:
        response = await door.chat("auto")
        assert response.status_code == 200
        assert response.headers["x-tierline-model"] == "second"
        assert response.headers["x-tierline-fallback"] == "backend_failed"
        assert [row["outcome"] for row in await door.rows()] == ["refused", "success"]


async def test_without_a_longer_one_the_client_learns_why(tmp_path: Path, servers: Servers) -> None:
    servers[0].wire = TooLong()
    async with front_door(tmp_path, document(servers, "story")) as door:
        response = await door.chat("auto")
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert servers[1].requests == 0


async def test_retry_after_of_a_server_reaches_the_client(tmp_path: Path, servers: Servers) -> None:
    made = document(servers, "status,status=429,retry_after=20.4")
    made["models"].pop("second")
    async with front_door(tmp_path, made) as door:
        first, second = await door.chat("auto"), await door.chat("auto")
    assert [first.status_code, second.status_code] == [429, 429]
    assert first.headers["retry-after"] == "21"  # rounded up: earlier would be in vain
    assert 15 <= int(second.headers["retry-after"]) <= 21
    assert servers[0].requests == 1


def test_the_story_has_as_many_pieces_as_these_tests_count() -> None:
    assert len(PIECES) == 16
