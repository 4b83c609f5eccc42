"""`POST /v1/messages/count_tokens` by the official Anthropic SDK: who counts, what it costs, what is refused.

With the bundled engine as the server that counts: `tests/e2e/test_token_counting.py`.
"""

from __future__ import annotations

from typing import Any

import anthropic
import msgspec
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tiers.features import estimate_prompt_tokens

HELLO: list[Any] = [{"role": "user", "content": "Name three rivers."}]
TOOLS: list[Any] = [{"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}]
COUNTED = 2095  # what the mock of an Anthropic server says


@pytest_asyncio.fixture
async def door(tmp_path, monkeypatch, upstream, claude):
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    model = {"tier": "small", "backend": "plain", "capabilities": ["tools"], "price": PRICE}
    models = {
        "plain": model,
        "claude": {**model, "backend": "claude", "upstream_model": "claude-9", "max_output_tokens": 5000},
        "busy": {**model, "backend": "claude", "upstream_model": "status,status=529", "max_output_tokens": 5000},
    }
    document = configuration({"plain": upstream, "claude": claude}, models)
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    async with front_door(tmp_path, document) as door:
        yield door


def sdk(door: FrontDoor, token: str | None = None) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=door.url, api_key=token or door.token, max_retries=0)


async def test_an_anthropic_server_counts_the_request_as_it_came(door: FrontDoor, claude: MockUpstream) -> None:
    async with sdk(door) as client:
        raw = await client.messages.with_raw_response.count_tokens(
            model="claude", messages=HELLO, system="Be brief.", tools=TOOLS, extra_headers={"anthropic-beta": "b-1"}
        )
    assert (await raw.parse()).input_tokens == COUNTED
    assert (raw.headers["x-tierline-count"], raw.headers["x-tierline-model"]) == ("counted", "claude")
    record = claude.records[-1]
    assert record.path == "/v1/messages/count_tokens"
    assert (record.headers["x-api-key"], record.headers["anthropic-beta"]) == ("sk-ant-secret", "b-1")
    assert msgspec.json.decode(record.body) == {
        "model": "claude-9", "messages": HELLO, "system": "Be brief.", "tools": TOOLS,
    }  # fmt: skip


@pytest.mark.parametrize("model", ["plain", "busy", "auto"])
async def test_where_no_server_counts_it_is_estimated(door: FrontDoor, model: str) -> None:
    async with sdk(door) as client:
        raw = await client.messages.with_raw_response.count_tokens(model=model, messages=HELLO)
    assert (await raw.parse()).input_tokens == estimate_prompt_tokens(HELLO)
    assert raw.headers["x-tierline-count"] == "estimated"


async def test_a_server_that_is_away_is_not_an_error(door: FrontDoor, claude: MockUpstream) -> None:
    await claude.stop()
    async with sdk(door) as client:
        raw = await client.messages.with_raw_response.count_tokens(model="claude", messages=HELLO)
    assert raw.headers["x-tierline-count"] == "estimated"


async def test_a_count_leaves_nothing_on_the_bill_and_nothing_held(door: FrontDoor) -> None:
    token = await door.key(budget_nanousd=1, tokens_per_minute=1, parallel=1)  # too little for any answer
    async with sdk(door, token) as client:
        for _ in range(2):
            assert (await client.messages.count_tokens(model="claude", messages=HELLO)).input_tokens == COUNTED
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(model="claude", max_tokens=50, messages=HELLO)
    assert door.services.limiter.open_holds == 0
    assert [row for row in await door.rows() if row["model"] == "claude"] == []


async def test_a_count_is_a_request_of_the_minute(door: FrontDoor) -> None:
    token = await door.key(requests_per_minute=1)
    async with sdk(door, token) as client:
        raw = await client.messages.with_raw_response.count_tokens(model="plain", messages=HELLO)
        assert raw.headers["x-ratelimit-remaining-requests"] == "0"
        with pytest.raises(anthropic.RateLimitError) as refused:
            await client.messages.count_tokens(model="plain", messages=HELLO)
    assert refused.value.body["error"]["type"] == "rate_limit_error"
    assert int(refused.value.response.headers["retry-after"]) > 0


@pytest.mark.parametrize(("earlier", "role"), [([], "user"), (HELLO, "user"), (HELLO, "assistant")])
async def test_a_turn_without_blocks_is_refused_by_both(door: FrontDoor, earlier: list[Any], role: str) -> None:
    asked = {"model": "plain", "messages": [*earlier, {"role": role, "content": []}]}
    async with sdk(door) as client:
        refusals = []
        for call in (client.messages.count_tokens(**asked), client.messages.create(max_tokens=5, **asked)):
            with pytest.raises(anthropic.BadRequestError) as refused:
                await call
            refusals.append(refused.value.body["error"])
    assert refusals[0] == refusals[1]
    assert f"'messages[{len(earlier)}].content'" in refusals[0]["message"]


async def test_what_a_message_would_be_refused_for(door: FrontDoor) -> None:
    async with sdk(door) as client:
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.count_tokens(model="none", messages=HELLO)
        with pytest.raises(anthropic.BadRequestError):
            await client.messages.count_tokens(model="plain", messages=[])
    assert unknown.value.body["type"] == "error"
    async with sdk(door, "tl-" + "0" * 43) as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.count_tokens(model="plain", messages=HELLO)
    metrics = (await door.client.get("/metrics")).text
    assert 'tierline_requests_total{outcome="refused",route="count_tokens",status="404"} 1.0' in metrics
