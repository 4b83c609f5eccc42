"""Budgets and token limits through a whole gateway: what is held, how it grows, and by how much a limit is passed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.access.counters_memory import MemoryLimiter
from gateway.accounting import RAISE_TOKENS
from tests.gateway.exact_upstream import (
    HELD_INPUT,
    INPUT,
    MESSAGES,
    OUTPUT,
    SLACK,
    ExactWire,
    key,
    key_id,
    settled_and_held,
    stop_the_clock,
)
from tests.gateway.front_door import POLICY, PRICE, FrontDoor, configuration, events, eventually, front_door


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(ExactWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    document = configuration({"up": upstream})
    document["backends"]["up"] |= {"max_outstanding": 2000, "timeouts": {"connect_s": 60, "total_s": 300}}
    async with front_door(tmp_path, document) as running:
        yield running


# -- what is held ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "output"),
    [
        ({"max_tokens": 4000}, 4000),  # a plain answer is seen only when it is whole: all it may have is held
        ({"max_tokens": 4000, "n": 2}, 8000),
        ({"max_tokens": 4000, "stream": True}, 512),  # a stream is watched: what is likely is held, and raised
        ({"max_tokens": 30, "stream": True}, 30),
        ({}, 512),  # nothing bounds it: what is likely
        ({"max_tokens": 900_000}, 8192),  # no answer is longer than the model's context
    ],
)
async def test_a_hold_covers_input_and_output(
    door: FrontDoor, upstream: MockUpstream, body: dict[str, Any], output: int
) -> None:
    token = await key(door, budget_nanousd=10**12)
    upstream.override = "hang"
    call = asyncio.create_task(door.chat(token=token, messages=MESSAGES, **body))
    await eventually(lambda: upstream.requests == 1)
    assert await settled_and_held(door, token) == (0, HELD_INPUT * INPUT + output * OUTPUT + SLACK)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


async def test_a_models_own_limit_bounds_the_hold(tmp_path: Path, upstream: MockUpstream) -> None:
    models = {"mock": {"tier": "small", "backend": "up", "max_output_tokens": 700, "price": PRICE}}
    async with front_door(tmp_path, configuration({"up": upstream}, models)) as door:
        token = await key(door, budget_nanousd=(HELD_INPUT * INPUT + 700 * OUTPUT + SLACK))
        assert (await door.chat(token=token, messages=MESSAGES)).status_code == 200
        assert (await door.chat(token=token, messages=MESSAGES)).status_code == 429


# -- a stream that grows -----------------------------------------------------------------------------------------------


async def test_a_stream_is_held_as_it_grows(door: FrontDoor, upstream: MockUpstream) -> None:
    stop_the_clock(door)
    token = await key(door, budget_nanousd=10**12, tokens_per_minute=1500)
    upstream.override = "stall,after=1000"
    body = {"model": "mock", "messages": MESSAGES, "stream": True}
    async with door.client.stream("POST", "/v1/chat/completions", json=body, headers=door.headers(token)) as stream:
        # Headers are sent when the stream begins: they count what was set aside for it.
        assert stream.headers["x-ratelimit-remaining-tokens"] == str(1500 - HELD_INPUT - 512)
        seen = 0
        async for line in stream.aiter_lines():
            seen += line.startswith("data: ")
            if seen == 1001:  # the role and a thousand tokens
                break
        _, held = await settled_and_held(door, token)
        covered = (held - HELD_INPUT * INPUT - SLACK) // OUTPUT
        assert 1000 <= covered <= 1000 + 64
        # Its tokens count now, not when it ends.
        refused = await door.chat(token=token, messages=MESSAGES, max_tokens=400)
        assert refused.status_code == 429
        assert int(refused.headers["x-ratelimit-remaining-tokens"]) == 1500 - HELD_INPUT - covered
    await eventually(lambda: door.services.limiter.open_holds == 0)


@pytest.mark.parametrize("limit", [None, 3000])
async def test_a_stream_ends_when_its_budget_does(door: FrontDoor, upstream: MockUpstream, limit: int | None) -> None:
    budget = HELD_INPUT * INPUT + 600 * OUTPUT
    token = await key(door, name="ci", budget_nanousd=budget)
    upstream.override = "answer,chunks=2000,interval_ms=1"
    body: dict[str, Any] = {} if limit is None else {"max_tokens": limit}
    response = await door.chat(token=token, messages=MESSAGES, stream=True, **body)
    seen = events(response.text)
    assert "[DONE]" not in seen
    error = seen[-1]["error"]
    assert (error["code"], error["type"]) == ("budget_exhausted", "insufficient_quota")
    assert error["message"].startswith("Your key 'ci' (tl-")
    assert "It ends here." in error["message"]
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", timeout_s=5)
    row = (await door.rows())[-1]
    delivered = sum(1 for item in seen[:-1] if item["choices"][0]["delta"].get("content"))
    assert (row["outcome"], row["usage_source"], row["output_tokens"]) == ("over_budget", "counted", delivered)
    assert 600 - 64 <= delivered <= 600
    settled, held = await settled_and_held(door, token)
    assert (settled, held) == (row["cost_nanousd"], 0)
    assert settled <= budget
    metrics = (await door.client.get("/metrics")).text
    assert 'tierline_requests_total{outcome="over_budget",route="chat.completions",status="200"} 1.0' in metrics
    assert 'tierline_limited_total{limit="budget"} 1.0' in metrics


async def test_an_answer_within_its_bound_is_never_cut(door: FrontDoor, upstream: MockUpstream) -> None:
    """What is held at first is what the answer can have: there is nothing to raise."""
    token = await key(door, budget_nanousd=HELD_INPUT * INPUT + 300 * OUTPUT + SLACK)
    upstream.override = "answer,chunks=300"
    response = await door.chat(token=token, messages=MESSAGES, stream=True, max_tokens=300)
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_stream_beyond_its_bound_by_our_count_raises_its_hold_in_steps(
    door: FrontDoor, upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers send more events than tokens, or longer words than we think: every event of such a stream would cost."""
    raised = []
    touch = MemoryLimiter.touch

    async def counted(self: MemoryLimiter, *arguments: Any) -> bool:
        raised.append(arguments)
        return await touch(self, *arguments)

    monkeypatch.setattr(MemoryLimiter, "touch", counted)
    token = await key(door, budget_nanousd=10**12)
    upstream.override = "answer,chunks=300"
    response = await door.chat(token=token, messages=MESSAGES, stream=True, max_tokens=10)
    assert response.text.endswith("data: [DONE]\n\n")
    assert 1 <= len(raised) <= -(-300 // RAISE_TOKENS)


async def test_a_policy_budget_that_downgrades_ends_no_stream(tmp_path: Path, upstream: MockUpstream) -> None:
    policy = POLICY + 'budget: {monthly_usd: "0.001", when_exhausted: downgrade}\n'
    async with front_door(tmp_path, configuration({"up": upstream}), policy=policy) as door:
        upstream.override = "answer,chunks=900"
        for _ in range(2):
            response = await door.chat("auto", messages=MESSAGES, stream=True)
            assert response.text.endswith("data: [DONE]\n\n")


async def test_what_failed_attempts_cost_is_held_too(tmp_path: Path, upstream: MockUpstream) -> None:
    """A server that was silent for too long has cost its input. The stream of the next one must fit beside it."""
    document = configuration({"up": upstream})
    document["backends"]["up"]["timeouts"] = {"first_token_s": 0.3}
    document["backends"]["up"]["base_urls"] *= 2  # two replicas: a silent one is not asked twice
    async with front_door(tmp_path, document) as door:
        token = await key(door, budget_nanousd=10**12)
        upstream.override = "hang,times=1"
        first = asyncio.create_task(door.chat(token=token, messages=MESSAGES, stream=True))
        await eventually(lambda: upstream.requests == 1)
        _, before = await settled_and_held(door, token)
        upstream.override = "stall,after=520"
        await eventually(lambda: upstream.requests == 2 and upstream.records[-1].events > 520)
        cost = (await door.rows())[0]["cost_nanousd"]
        assert cost > 0

        async def raised() -> bool:
            _, held = await settled_and_held(door, token)
            return bool(held >= before + cost + 8 * OUTPUT)

        async with asyncio.timeout(5):
            while not await raised():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)


# -- a thousand at once ------------------------------------------------------------------------------------------------


async def ask(door: FrontDoor, token: str, **body: Any) -> tuple[int, str]:
    """One request on a connection of its own, without a pool that a thousand would wait for: status and body."""
    port = int(door.url.rpartition(":")[2])
    content = json.dumps({"model": "mock", "messages": MESSAGES, **body})
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: test\r\nauthorization: Bearer {token}\r\n"
        writer.write(f"{head}connection: close\r\ncontent-length: {len(content)}\r\n\r\n{content}".encode())
        head_, _, text = (await reader.read(-1)).decode().partition("\r\n\r\n")
        return int(head_.split()[1]), text
    finally:
        writer.close()


async def test_a_thousand_at_once_pass_a_budget_by_no_more_than_stated(door: FrontDoor, upstream: MockUpstream) -> None:
    """docs/finance.md: by one event for each stream that was running when the budget was spent."""
    order, budget = random.Random(1), 20_000_000
    token = await key(door, budget_nanousd=budget)
    for _ in range(5):  # it is known for short answers, so little is held: about a hundred run at once
        door.services.estimator.observe(key_id(door, token), "mock", 40)
    bodies: list[dict[str, Any]] = [
        order.choice([{"max_tokens": order.randrange(1, 200)}, {"stream": True}, {"stream": True, "max_tokens": 150}])
        for _ in range(1000)
    ]
    upstream.override = "answer,chunks=140,interval_ms=1,delay_ms=20"
    answers = await asyncio.gather(*(ask(door, token, **body) for body in bodies))
    await eventually(lambda: door.services.limiter.open_holds == 0)
    rows = await door.rows()
    ends = Counter(row["outcome"] for row in rows)
    assert {status for status, _ in answers} == {200, 429}
    assert sum(status == 200 for status, _ in answers) == len(rows)
    assert sum('"budget_exhausted"' in text for status, text in answers if status == 200) == ends["over_budget"]
    assert ends["success"] >= 20
    assert ends["over_budget"] >= 5
    spent = sum(row["cost_nanousd"] for row in rows)
    assert await settled_and_held(door, token) == (spent, 0)
    assert spent <= budget + ends["over_budget"] * OUTPUT
    # And it is not timid: what is left is less than one more request would have needed.
    assert spent > budget - 100 * (HELD_INPUT * INPUT + 64 * OUTPUT)


async def test_a_thousand_at_once_keep_a_token_limit(door: FrontDoor, upstream: MockUpstream) -> None:
    """In any T seconds at most `limit * (1 + T / 60)` tokens, and what admitted ones use beyond their holds."""
    order, limit = random.Random(2), 30_000
    token = await key(door, tokens_per_minute=limit)
    for _ in range(5):
        door.services.estimator.observe(key_id(door, token), "mock", 40)
    admitted_with = HELD_INPUT + door.services.estimator.estimate(key_id(door, token), "mock", 8192)
    bodies: list[dict[str, Any]] = [
        order.choice([{"max_tokens": order.randrange(1, 200)}, {"stream": True}]) for _ in range(1000)
    ]
    upstream.override = "answer,chunks=300,delay_ms=20"
    began = time.monotonic()
    answers = await asyncio.gather(*(ask(door, token, **body) for body in bodies))
    took = time.monotonic() - began
    rows = await door.rows()
    assert {status for status, _ in answers} == {200, 429}
    used = sum(row["input_tokens"] + row["output_tokens"] for row in rows)
    beyond = sum(max(0, row["input_tokens"] + row["output_tokens"] - admitted_with) for row in rows if row["stream"])
    assert used <= limit * (1 + took / 60) + beyond
    assert beyond > 0
    assert used > limit / 4
