"""Budgets and token limits through a whole gateway: what is held, how it grows, and by how much a limit is passed.

The upstream here writes one token per event and reports exactly what it wrote, so that the money adds up.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record, http_answer, sse
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.input_bound import input_bound
from tests.gateway.front_door import POLICY, PRICE, FrontDoor, configuration, front_door
from tests.gateway.test_front_door import events, eventually

MESSAGES = [{"role": "user", "content": "Hello there"}]
INPUT, OUTPUT = 1000, 2000  # nano-dollars per token, as in PRICE
PROMPT_TOKENS = 40
HELD_INPUT = input_bound({"messages": MESSAGES})
SLACK = 4  # nano-dollars that a hold adds for rounding


class ExactWire(OpenAIWire):
    """One token per event; plain answers as long as allowed, up to 100 tokens; usage as it was."""

    def answer(self, record: Record) -> bytes:
        asked = msgspec.json.decode(record.body)
        tokens = min(100, asked.get("max_tokens", 100))
        message = {"role": "assistant", "content": "tok " * tokens}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return http_answer(200, _json(object="chat.completion", choices=[choice], usage=_usage(tokens)))

    def text(self, record: Record, pad: bytes) -> bytes:
        return sse(_json(choices=[{"index": 0, "delta": {"content": "tok "}, "finish_reason": None}]))

    def finish(self, record: Record) -> bytes:
        finish = _json(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}])
        return sse(finish) + sse(_json(choices=[], usage=_usage(record.events - 1))) + sse(b"[DONE]")


def _json(**fields: Any) -> bytes:
    return msgspec.json.encode({"id": "chatcmpl-1", "created": 1_700_000_000, "model": "mock", **fields})


def _usage(output: int) -> dict[str, int]:
    return {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": output, "total_tokens": PROMPT_TOKENS + output}


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


def key_id(door: FrontDoor, token: str) -> str:
    return door.services.keys.authenticate(token).key_id


async def key(door: FrontDoor, **options: Any) -> str:
    """A new key that the gateway knows already."""
    token = await door.key(**options)
    await door.services.keys.refresh()
    return token


def stop_the_clock(door: FrontDoor) -> None:
    """Buckets refill no more, so that what they hold does not depend on how busy the machine is."""
    limiter = door.services.limiter
    assert isinstance(limiter, MemoryLimiter)
    now = limiter._clock()
    limiter._clock = lambda: now


async def settled_and_held(door: FrontDoor, token: str) -> tuple[int, int]:
    limiter = door.services.limiter
    assert isinstance(limiter, MemoryLimiter)
    return await limiter.balance(f"key:{key_id(door, token)}")


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


# -- what every answer says of the limits ------------------------------------------------------------------------------

LIMITS = {"requests_per_minute": 4, "tokens_per_minute": 10_000, "parallel": 3}
NAMES = {
    f"x-ratelimit-{what}-{unit}" for unit in ("requests", "tokens") for what in ("limit", "remaining", "reset")
} | {
    "x-ratelimit-limit-parallel",
    "x-ratelimit-remaining-parallel",
}


def said(response: httpx.Response) -> tuple[int, ...]:
    assert {name for name in response.headers if name.startswith("x-ratelimit-")} == NAMES
    return tuple(int(response.headers[f"x-ratelimit-remaining-{unit}"]) for unit in ("requests", "parallel"))


async def test_limits_are_said_on_every_answer_and_true_after_it(door: FrontDoor, upstream: MockUpstream) -> None:
    stop_the_clock(door)
    token = await key(door, **LIMITS)
    first = await door.chat(token=token, messages=MESSAGES, max_tokens=10)
    assert said(first) == (3, 3)
    # Not what was set aside for it, but what it has used.
    assert int(first.headers["x-ratelimit-remaining-tokens"]) == 10_000 - PROMPT_TOKENS - 10
    upstream.override = "status,status=400"
    assert said(await door.chat(token=token, messages=MESSAGES)) == (2, 3)
    upstream.override = None
    assert said(await door.chat(token=token, messages=MESSAGES, stream=True)) == (1, 2)  # itself runs
    assert said(await door.chat(token=token, messages=MESSAGES)) == (0, 3)
    refused = await door.chat(token=token, messages=MESSAGES)
    assert (refused.status_code, said(refused)) == (429, (0, 3))
    assert refused.headers["x-ratelimit-limit-requests"] == "4"
    assert float(refused.headers["x-ratelimit-reset-requests"].removesuffix("s")) > 30


async def test_a_parallel_limit_is_free_again_with_the_answer(door: FrontDoor) -> None:
    """Not a moment later: the next request is on its way when the last byte of this one has arrived."""
    token = await key(door, parallel=1)
    for number in range(40):
        response = await door.chat(token=token, messages=MESSAGES, stream=bool(number % 2))
        assert response.status_code == 200


async def test_a_refusal_names_whose_limit_it_is(tmp_path: Path, upstream: MockUpstream) -> None:
    policy = POLICY + "limits: {requests_per_minute: 2}\n"
    async with front_door(tmp_path, configuration({"up": upstream}), policy=policy) as door:
        stop_the_clock(door)
        mine = await key(door, name="ci-bot", requests_per_minute=1)
        prefix = door.services.keys.authenticate(mine).key_prefix
        await door.chat(token=mine)
        error = (await door.chat(token=mine)).json()["error"]
        assert error["message"].startswith(
            f"Your key 'ci-bot' ({prefix}…) allows 1 request per minute; there is room for"
        )
        free = await key(door, name="free")
        for _ in range(2):
            await door.chat(token=free)
        error = (await door.chat(token=free)).json()["error"]
        assert error["message"].startswith(
            "For each key, the policy 'default' allows 2 requests per minute; there is room"
        )


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


# -- only what is cached -----------------------------------------------------------------------------------------------


async def test_only_if_cached_costs_nothing_and_fails_nothing(
    door: FrontDoor, upstream: MockUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spent = await key(door, budget_nanousd=1)
    assert (await door.chat(token=spent)).status_code == 429
    caplog.clear()
    response = await door.chat(token=spent, headers={"x-tierline-cache": "only-if-cached"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (504, "not_in_cache", "not_in_cache")
    assert response.headers["x-should-retry"] == "false"
    assert upstream.requests == 0
    assert await settled_and_held(door, spent) == (0, 0)
    finished = [record for record in caplog.records if record.getMessage() == "request finished"]
    assert [(record.levelname, record.fields["outcome"]) for record in finished] == [("INFO", "not_cached")]  # type: ignore[attr-defined]
    metrics = (await door.client.get("/metrics")).text
    assert 'tierline_requests_total{outcome="not_cached",route="chat.completions",status="504"} 1.0' in metrics


async def test_only_if_cached_counts_as_a_request(door: FrontDoor) -> None:
    stop_the_clock(door)
    token = await key(door, requests_per_minute=1, tokens_per_minute=1)
    headers = {"x-tierline-cache": "only-if-cached"}
    assert (await door.chat(token=token, headers=headers)).status_code == 504
    assert (await door.chat(token=token, headers=headers)).status_code == 429


async def test_the_sdk_does_not_try_again_in_vain(door: FrontDoor) -> None:
    """Neither when the month is spent nor when an answer is not cached; its own rule would be twice more."""
    token = await key(door, budget_nanousd=1)
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=token) as client:
        with pytest.raises(openai.RateLimitError) as refused:
            await client.chat.completions.create(model="mock", messages=[{"role": "user", "content": "Hi"}])
        with pytest.raises(openai.InternalServerError) as missing:
            await client.chat.completions.create(
                model="mock",
                messages=[{"role": "user", "content": "Hi"}],
                extra_headers={"x-tierline-cache": "only-if-cached"},
            )
    assert refused.value.code == "budget_exhausted"
    assert int(refused.value.response.headers["retry-after"]) > 60
    assert missing.value.code == "not_in_cache"
    metrics = (await door.client.get("/metrics")).text
    assert 'tierline_requests_total{outcome="refused",route="chat.completions",status="429"} 1.0' in metrics
    assert 'tierline_requests_total{outcome="not_cached",route="chat.completions",status="504"} 1.0' in metrics
