"""Backends that fail before or in the middle of an answer, and clients that leave: what is said, and what is billed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, events, eventually, front_door

MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("fault", ["cut,after=3", "end,after=3", "garbage,after=3", "error,after=3", "stall,after=3"])
async def test_a_stream_that_breaks_ends_with_an_error_event(
    door: FrontDoor, upstream: MockUpstream, fault: str
) -> None:
    upstream.override = fault
    response = await door.chat(stream=True)
    seen = events(response.text)
    assert seen[-1]["error"]["code"] == "stream_cut"
    assert "[DONE]" not in seen
    row = (await door.rows())[-1]
    assert row["outcome"] in ("cut", "timeout")
    assert row["output_tokens"] >= 3
    assert row["usage_source"] == "counted"
    assert row["cost_nanousd"] > 0


@pytest.mark.parametrize("fault", ["cut", "end", "garbage", "error", "close", "status,status=500", "status,status=429"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_content_is_retried(
    door: FrontDoor, upstream: MockUpstream, fault: str, stream: bool
) -> None:
    upstream.override = f"{fault},times=1"
    response = await door.chat(stream=stream)
    assert response.status_code == 200
    rows = await door.rows()
    assert [row["outcome"] for row in rows] == ["error", "success"]
    assert [row["attempt"] for row in rows] == [1, 2]
    assert rows[0]["request_id"] == rows[1]["request_id"]
    assert rows[0]["cost_nanousd"] == 0


async def test_when_nothing_answers_the_client_is_told(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=500"
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "backend_upstream_error")
    assert [row["outcome"] for row in await door.rows()] == ["error", "error"]


async def test_a_backends_refusal_is_passed_on_and_not_retried(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=422"
    response = await door.chat()
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "mock_error"
    assert upstream.requests == 1
    assert [row["outcome"] for row in await door.rows()] == ["refused"]


async def test_a_backend_that_rejects_our_credentials_is_our_fault(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=401"
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "backend_credentials")


async def test_the_deadline_of_the_client_counts(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "hang"
    response = await door.chat(headers={"x-tierline-deadline-ms": "150"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "backend_deadline")


async def test_fallback_to_another_tier_is_said(tmp_path: Path, upstream: MockUpstream) -> None:
    models = {
        "tiny": {"tier": "small", "backend": "down", "price": PRICE},
        "middle": {"tier": "medium", "backend": "up", "price": PRICE},
    }
    document = configuration({"up": upstream}, models)
    document["backends"]["down"] = {"base_urls": ["http://127.0.0.1:9/v1"]}
    async with front_door(tmp_path, document) as door:
        response = await door.chat("auto")
        assert response.status_code == 200
        assert response.headers["x-tierline-tier"] == "medium"
        assert response.headers["x-tierline-requested-tier"] == "small"
        assert response.headers["x-tierline-fallback"] == "backend_failed"


async def test_a_tier_without_a_model_is_said(door: FrontDoor) -> None:
    response = await door.chat("auto", headers={"x-tierline-tier": "large"})
    assert response.status_code == 200
    assert response.headers["x-tierline-tier"] == "small"
    assert response.headers["x-tierline-requested-tier"] == "large"
    assert response.headers["x-tierline-fallback"] == "tier_not_served"


# -- the client leaves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_the_backend(door: FrontDoor, upstream: MockUpstream, stream: bool) -> None:
    upstream.override = "answer,chunks=1000,interval_ms=20" if stream else "hang"
    async with httpx.AsyncClient(base_url=door.url) as client:
        body = {"model": "mock", "messages": MESSAGES, "stream": stream}
        call = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=door.headers()))
        await eventually(lambda: upstream.requests == 1 and (not stream or upstream.records[-1].events > 2))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", timeout_s=1)
    await eventually(lambda: door.services.limiter.open_holds == 0)
    rows = await door.rows()
    assert rows[0]["outcome"] == "cancelled"
    assert rows[0]["input_tokens"] > 0
    assert (rows[0]["output_tokens"] > 0) == stream
