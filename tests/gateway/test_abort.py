"""A client that leaves in the middle of a stream: what the backend does, and what the ledger says, by `on_abort`."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.mock_anthropic import AnthropicWire
from bench.mock_upstream import MockUpstream
from gateway import abandoned
from gateway.access.keys import create_key
from gateway.access.secret import load_secret
from gateway.ledger.database import Database
from tests.gateway.exact_upstream import ExactWire, key
from tests.gateway.front_door import POLICY, PRICE, FrontDoor, configuration, front_door
from tests.gateway.test_http_edge import connect, eventually, gateway_process, request

MESSAGES = [{"role": "user", "content": "Name three rivers."}]
BODY = {"model": "mock", "messages": MESSAGES, "stream": True}
SLOW = "answer,chunks=40,interval_ms=10"
DRAIN = "on_abort: {mode: drain}\n"


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@asynccontextmanager
async def opened(root: Path, upstream: MockUpstream, on_abort: str, **server: Any) -> AsyncIterator[FrontDoor]:
    document = configuration({"up": upstream})
    document["server"] |= server
    async with front_door(root, document, policy=POLICY + on_abort) as door:
        yield door


async def leave(door: FrontDoor, upstream: MockUpstream, *, token: str | None = None, after: int = 4) -> None:
    """Ask for a stream and leave after a few of its events."""
    asked = upstream.requests
    async with door.client.stream("POST", "/v1/chat/completions", json=BODY, headers=door.headers(token)) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        seen = 0
        while seen < after:
            seen += (await anext(lines)).startswith("data: ")
    assert upstream.requests == asked + 1


async def settled(door: FrontDoor) -> dict[str, Any]:
    """The one row, once its request is over."""
    await eventually(lambda: door.services.limiter.open_holds == 0)
    [row] = await door.rows()
    return row


def said(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["outcome"], row["usage_source"], row["input_tokens"], row["output_tokens"]


async def drained(door: FrontDoor, ended: str) -> float:
    page = (await door.client.get("/metrics")).text
    found = [
        line for line in page.splitlines() if line.startswith(f'tierline_drained_streams_total{{ended="{ended}"}}')
    ]
    return float(found[0].rpartition(" ")[2]) if found else 0.0


# -- cancel and count --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_abort", ["", "on_abort: {mode: cancel}\n", "on_abort: {mode: count}\n"])
async def test_the_backend_is_cancelled_at_once(tmp_path: Path, upstream: MockUpstream, on_abort: str) -> None:
    upstream.override = "answer,chunks=1000,interval_ms=20"
    async with opened(tmp_path, upstream, on_abort) as door:
        await leave(door, upstream)
        await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", timeout_s=1)
        row = await settled(door)
        assert said(row)[:2] == ("cancelled", "counted")
        assert 4 <= row["output_tokens"] < 200
        assert row["error"] == "the client closed the connection"


async def test_counted_is_what_had_arrived_though_the_client_did_not_take_it(
    tmp_path: Path, upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = abandoned._read
    counts: list[int] = []

    async def watched(stream: Any, meter: Any, *rest: Any, **options: Any) -> str:
        counts.append(meter.content_events)
        ended = await read(stream, meter, *rest, **options)
        counts.append(meter.content_events)
        return ended

    monkeypatch.setattr(abandoned, "_read", watched)
    upstream.override = "answer,chunks=200000,pad=2000"
    async with opened(tmp_path, upstream, "on_abort: {mode: count}\n") as door:
        _, writer = await connect(door, receive_buffer=4096)
        writer.transport.pause_reading()
        writer.write(request(door, json.dumps(BODY).encode()))
        await eventually(lambda: any(not one.writable.is_set() for one in upstream.connections))
        writer.transport.abort()
        row = await settled(door)
    before, after = counts
    assert after - before > 20, "64 KiB of events of 2 KB at the least had arrived"
    assert said(row)[:2] == ("cancelled", "counted")
    assert row["output_tokens"] >= after


# -- drain -------------------------------------------------------------------------------------------------------------


async def test_drained_to_the_end_the_row_has_the_reported_usage(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = SLOW
    async with opened(tmp_path, upstream, DRAIN) as door:
        token = await key(door, parallel=1)
        await leave(door, upstream, token=token)
        assert door.services.limiter.open_holds == 1, "it still runs, and its money is still set aside"
        assert (await door.chat(token=token)).status_code == 429
        row = await settled(door)
        assert said(row) == ("cancelled", "reported", 12, 34)
        assert row["cost_nanousd"] == 12 * 1000 + 34 * 2000
        assert row["finish_reason"] == "stop"
        assert upstream.records[-1].outcome == "answered"
        assert await drained(door, "finished") == 1
        assert (await door.chat(token=token)).status_code == 200


async def test_what_was_drained_is_in_no_cache_and_teaches_no_length(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = SLOW
    async with opened(tmp_path, upstream, DRAIN) as door:
        token = await key(door)
        key_id = door.services.keys.authenticate(token).key_id
        expected = door.services.estimator.estimate(key_id, "mock")
        await leave(door, upstream, token=token)
        await settled(door)
        assert door.services.estimator.estimate(key_id, "mock") == expected


@pytest.mark.parametrize(
    ("bounds", "ended"), [("max_time: 1s", "time"), ("max_tokens: 5", "tokens"), ("max_time: 5m", "cut")]
)
async def test_a_drain_is_bounded(tmp_path: Path, upstream: MockUpstream, bounds: str, ended: str) -> None:
    kind = {"time": "stall,after=10", "tokens": "answer,chunks=100000", "cut": "cut,after=30"}[ended]
    upstream.override = f"{kind},interval_ms=10"
    async with opened(tmp_path, upstream, f"on_abort: {{mode: drain, {bounds}}}\n") as door:
        await leave(door, upstream)
        row = await settled(door)
        assert said(row)[:2] == ("cancelled", "counted")
        assert await drained(door, ended) == 1
        await upstream.until(lambda: upstream.records[-1].outcome in ("client-gone", "fault"))
        if ended == "time":
            assert row["output_tokens"] >= 10


async def test_a_broken_stream_is_not_continued_for_nobody(tmp_path: Path, upstream: MockUpstream) -> None:
    other = MockUpstream()
    await other.start()
    upstream.override = "cut,after=20,interval_ms=10"
    models = {
        name: {"tier": tier, "backend": backend, "capabilities": ["prefill"], "price": PRICE}
        for name, tier, backend in (("mock", "small", "up"), ("larger", "medium", "other"))
    }
    document = configuration({"up": upstream, "other": other}, models)
    async with front_door(tmp_path, document, policy=POLICY + DRAIN) as door:
        async with door.client.stream(
            "POST", "/v1/chat/completions", json=BODY | {"model": "auto"}, headers=door.headers()
        ) as response:
            await anext(response.aiter_lines())
        row = await settled(door)
        assert said(row)[:2] == ("cancelled", "counted")
        assert other.requests == 0
    await other.stop()


async def test_a_drain_ends_where_the_budget_does(tmp_path: Path) -> None:
    exact = MockUpstream(ExactWire())
    await exact.start()
    exact.override = "answer,chunks=5000,interval_ms=1"
    async with opened(tmp_path, exact, DRAIN) as door:
        token = await key(door, budget_nanousd=1_700_000)  # room for some 700 tokens of output
        await leave(door, exact, token=token)
        row = await settled(door)
        assert row["outcome"] == "over_budget"
        assert row["cost_nanousd"] <= 1_700_000
        assert await drained(door, "budget") == 1
    await exact.stop()


async def test_before_the_first_content_nothing_is_drained(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = "stall"
    async with opened(tmp_path, upstream, DRAIN) as door:
        task = asyncio.create_task(door.chat(stream=True))
        await upstream.until(lambda: upstream.requests == 1)
        task.cancel()
        await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", timeout_s=1)
        assert said(await settled(door))[:2] == ("cancelled", "estimated")


async def test_a_client_of_another_dialect_and_its_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    claude = MockUpstream(AnthropicWire())
    await claude.start()
    model = {"tier": "small", "backend": "claude", "max_output_tokens": 1000, "price": PRICE, "upstream_model": SLOW}
    document = configuration({"claude": claude}, {"mock": model})
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    async with front_door(tmp_path, document, policy=POLICY + DRAIN) as door:
        headers = {"x-api-key": door.token, "anthropic-version": "2023-06-01"}
        body = BODY | {"max_tokens": 100}
        async with door.client.stream("POST", "/v1/messages", json=body, headers=headers) as response:
            lines = response.aiter_lines()
            while not (await anext(lines)).startswith("event: content_block_delta"):
                pass
        row = await settled(door)
        assert said(row) == ("cancelled", "reported", 12 + 3 + 5, 34)
        assert claude.records[-1].outcome == "answered"
    await claude.stop()


async def test_a_rule_says_it_for_its_requests(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = SLOW
    policy = POLICY.replace("    tier: small\n", "    tier: small\n    on_abort: {mode: drain}\n")
    async with front_door(tmp_path, configuration({"up": upstream}), policy=policy) as door:
        for model, source in (("auto", "reported"), ("mock", "counted")):  # who names a model has no rule
            async with door.client.stream(
                "POST", "/v1/chat/completions", json=BODY | {"model": model}, headers=door.headers()
            ) as response:
                await anext(response.aiter_lines())
            await eventually(lambda: door.services.limiter.open_holds == 0)
            assert (await door.rows())[-1]["usage_source"] == source


# -- the gateway stops in the middle -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("drain_seconds", "source"), [(0.1, "counted"), (30, "reported")])
async def test_a_shutdown_waits_for_a_drain_as_for_any_request(
    tmp_path: Path, upstream: MockUpstream, drain_seconds: float, source: str
) -> None:
    upstream.override = "answer,chunks=150,interval_ms=10"
    async with opened(tmp_path, upstream, DRAIN, drain_seconds=drain_seconds) as door:
        await leave(door, upstream)
    async with opened(tmp_path, upstream, DRAIN) as door:
        [row] = await door.rows()
        assert said(row)[:2] == ("cancelled", source)
        assert row["output_tokens"] >= 4


async def test_a_killed_gateway_has_a_row_of_what_it_drained(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=100000,interval_ms=5"
    policy = POLICY + "on_abort: {mode: drain, max_time: 5m, max_tokens: 100000}\n"
    async with gateway_process(tmp_path, upstream, policy=policy) as (process, url):
        database = await Database.open(f"sqlite:///{tmp_path}/var/tierline.db")
        created = await create_key(database, load_secret(tmp_path / "var" / "secret"), name="first")
        await database.close()
        headers = {"authorization": f"Bearer {created.token}"}
        async with httpx.AsyncClient(base_url=url, timeout=30) as client:
            async with client.stream("POST", "/v1/chat/completions", json=BODY, headers=headers) as response:
                assert response.status_code == 200
                await anext(response.aiter_lines())
            left_at = upstream.records[-1].events
            # Progress is on record once a second.
            await eventually(lambda: upstream.records[-1].events > left_at + 400)
            assert upstream.records[-1].outcome == "running"
        process.send_signal(signal.SIGKILL)
    async with front_door(tmp_path, configuration({"up": upstream}), policy=policy) as door:
        [row] = await door.rows()
        assert said(row)[:2] == ("interrupted", "estimated")
        assert row["output_tokens"] > left_at
