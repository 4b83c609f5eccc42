"""What clients are told of their limits: headers on every answer, whose limit it is, when to try again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.exact_upstream import (
    MESSAGES,
    PROMPT_TOKENS,
    ExactWire,
    key,
    settled_and_held,
    stop_the_clock,
)
from tests.gateway.front_door import POLICY, FrontDoor, configuration, front_door


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(ExactWire())
    await mock.start()
    yield mock
    await mock.stop()


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
