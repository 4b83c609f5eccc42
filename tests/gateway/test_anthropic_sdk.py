"""The official Anthropic SDK against the gateway: whatever it offers on our routes, before servers of either dialect.

What becomes of a request on its way to a server of another dialect is in `test_messages.py`.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import pydantic
import pytest
import pytest_asyncio

from bench.mock_agent import THOUGHT
from tests.gateway.sdk_doors import BOTH, Doors, doors

HELLO: list[Any] = [{"role": "user", "content": "Name three rivers."}]
THINKING: Any = {"type": "enabled", "budget_tokens": 1024}
TOOLS: list[Any] = [
    {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}},
    {"name": "now", "input_schema": {"type": "object", "properties": {}}},
]


class Rivers(pydantic.BaseModel):
    rivers: int


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Doors]:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    async with doors(tmp_path) as running:
        yield running


@pytest_asyncio.fixture
async def sdk(gateway: Doors) -> AsyncIterator[anthropic.AsyncAnthropic]:
    door = gateway.door
    async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.token, max_retries=0) as client:
        yield client


# Answers.


@pytest.mark.parametrize("model", BOTH)
async def test_create(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    answer = await sdk.messages.create(model=model, max_tokens=2000, messages=HELLO, thinking=THINKING)
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[0].thinking == THOUGHT
    assert answer.content[1].text.startswith("The Rhine, the Danube and the Loire")
    assert (answer.role, answer.type, answer.stop_reason) == ("assistant", "message", "end_turn")
    assert answer.usage.output_tokens > 0
    assert answer._request_id is not None
    assert answer._request_id.startswith("req-")


@pytest.mark.parametrize("model", BOTH)
async def test_the_synchronous_client(gateway: Doors, model: str) -> None:
    def ask() -> tuple[str, str]:
        door = gateway.door
        with anthropic.Anthropic(base_url=door.url, api_key=door.token, max_retries=0) as client:
            whole = client.messages.create(model=model, max_tokens=50, messages=HELLO)
            with client.messages.stream(model=model, max_tokens=50, messages=HELLO) as stream:
                said = "".join(stream.text_stream)
            return whole.content[0].text, said

    whole, streamed = await asyncio.to_thread(ask)
    assert whole
    assert streamed


@pytest.mark.parametrize("model", BOTH)
async def test_the_key_as_a_bearer_token(gateway: Doors, model: str) -> None:
    door = gateway.door
    async with anthropic.AsyncAnthropic(base_url=door.url, auth_token=door.token, max_retries=0) as client:
        assert (await client.messages.create(model=model, max_tokens=50, messages=HELLO)).content


@pytest.mark.parametrize("model", BOTH)
async def test_the_stream_helper_and_its_snapshot(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 2000, "messages": HELLO, "tools": TOOLS, "thinking": THINKING}
    async with sdk.messages.stream(**options) as stream:
        events = [event async for event in stream]
        message = await stream.get_final_message()
        assert stream.request_id is not None
    kinds = [event.type for event in events]
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["weather", "now"]
    assert calls[0].input["days"] == 3
    assert calls[1].input == {}
    assert message.content[0].thinking == THOUGHT
    assert message.stop_reason == "tool_use"
    first = message.content.index(calls[0])
    pieces = [
        event.delta.partial_json
        for event in events
        if event.type == "content_block_delta" and event.index == first and event.delta.type == "input_json_delta"
    ]
    assert len(pieces) > 1
    assert json.loads("".join(pieces)) == calls[0].input


@pytest.mark.parametrize("model", BOTH)
async def test_events_without_the_helper(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    stream = await sdk.messages.create(model=model, max_tokens=50, messages=HELLO, stream=True)
    events = [event async for event in stream]
    assert events[0].message.usage.output_tokens <= 1  # not yet known
    (end,) = [event for event in events if event.type == "message_delta"]
    assert end.delta.stop_reason == "end_turn"
    assert end.usage.output_tokens > 0
    assert events[-1].type == "message_stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
async def test_structured_output(sdk: anthropic.AsyncAnthropic, model: str, stream: bool) -> None:
    options: Any = {"model": model, "max_tokens": 50, "messages": HELLO, "output_format": Rivers}
    if stream:
        async with sdk.messages.stream(**options) as running:
            answer = await running.get_final_message()
    else:
        answer = await sdk.messages.parse(**options)
    assert answer.parsed_output == Rivers(rivers=3)


@pytest.mark.parametrize("model", BOTH)
async def test_the_tool_runner(gateway: Doors, sdk: anthropic.AsyncAnthropic, model: str) -> None:
    asked: list[str] = []

    @anthropic.beta_async_tool
    async def weather(city: str, days: int) -> str:
        """The weather of a city."""
        asked.append(f"{city} {days}")
        return "rain"

    options: Any = {"model": model, "max_tokens": 50, "messages": HELLO, "tools": [weather]}
    runner = sdk.beta.messages.tool_runner(**options, thread=False)
    message = await runner.until_done()
    assert len(asked) == 1
    assert asked[0].endswith(" 3")
    assert message.stop_reason == "end_turn"
    assert b"rain" in gateway.behind(model).records[-1].body


@pytest.mark.parametrize("model", BOTH)
async def test_raw_and_streaming_responses(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    options: Any = {"model": model, "max_tokens": 50, "messages": HELLO}
    raw = await sdk.messages.with_raw_response.create(**options)
    assert raw.headers["x-tierline-model"] == model
    assert raw.headers["request-id"] == raw.headers["x-request-id"]
    assert (await raw.parse()).content
    async with sdk.messages.with_streaming_response.create(**options, stream=True) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-2] == "event: message_stop"


@pytest.mark.parametrize("model", BOTH)
async def test_count_tokens(sdk: anthropic.AsyncAnthropic, model: str) -> None:
    counted = await sdk.messages.count_tokens(model=model, messages=HELLO, tools=TOOLS)
    assert counted.input_tokens > 0
    assert counted._request_id is not None


async def test_betas_reach_the_server_that_has_them(gateway: Doors, sdk: anthropic.AsyncAnthropic) -> None:
    options: Any = {"max_tokens": 50, "messages": HELLO, "betas": ["context-management-2025-06-27"]}
    options["context_management"] = {"edits": []}
    await sdk.beta.messages.create(model="claude", **options)
    sent = gateway.claude.records[-1]
    assert sent.headers["anthropic-beta"] == "context-management-2025-06-27"
    assert b"context_management" in sent.body
    with pytest.raises(anthropic.BadRequestError) as refused:
        await sdk.beta.messages.create(model="agent", **options)
    assert refused.value.body["error"]["param"] == "context_management"


async def test_models(sdk: anthropic.AsyncAnthropic) -> None:
    page = await sdk.models.list()
    listed = [model async for model in page]
    assert {"auto", "agent", "claude"} < {model.id for model in listed}
    assert all((model.type, model.display_name) == ("model", model.id) for model in listed)
    assert (page.has_more, page.first_id, page.last_id) == (False, listed[0].id, listed[-1].id)
    model = await sdk.models.retrieve("agent")
    assert model.display_name == "agent"
    assert model.created_at.year == 1970
    assert model._request_id is not None
    with pytest.raises(anthropic.NotFoundError) as missing:
        await sdk.models.retrieve("nobody")
    assert missing.value.body["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    "call",
    [
        lambda sdk: sdk.messages.batches.retrieve("msgbatch_1"),
    ],
)
async def test_other_routes_are_not_found(sdk: anthropic.AsyncAnthropic, call: Any) -> None:
    with pytest.raises(anthropic.NotFoundError) as missing:
        await call(sdk)
    assert missing.value.body["error"]["type"] == "not_found_error"
    assert missing.value.request_id is not None


# Errors.


@pytest.mark.parametrize(
    ("options", "kind", "name"),
    [
        ({"model": "nobody"}, anthropic.NotFoundError, "not_found_error"),
        ({"model": "agent", "temperature": 2}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "plain", "tools": TOOLS}, anthropic.BadRequestError, "invalid_request_error"),
        ({"model": "agent", "system": "x" * 2_000_000}, anthropic.RequestTooLargeError, "request_too_large"),
    ],
)
async def test_errors_of_the_gateway(
    sdk: anthropic.AsyncAnthropic, options: Any, kind: type[Exception], name: str
) -> None:
    more = {"extra_body": {"temperature": options.pop("temperature")}} if "temperature" in options else {}
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            await sdk.messages.create(max_tokens=50, messages=HELLO, stream=stream, **options, **more)
        body = raised.value.body
        assert (body["type"], body["error"]["type"]) == ("error", name)
        assert raised.value.request_id == body["request_id"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(
    ("fault", "kind", "name"),
    [
        ("failing", anthropic.InternalServerError, "api_error"),
        ("limited", anthropic.RateLimitError, "rate_limit_error"),
        ("refusing", anthropic.UnprocessableEntityError, "invalid_request_error"),
    ],
)
async def test_errors_of_servers(
    sdk: anthropic.AsyncAnthropic, model: str, fault: str, kind: type[Exception], name: str, stream: bool
) -> None:
    with pytest.raises(kind) as raised:
        await sdk.messages.create(model=f"{model}-{fault}", max_tokens=50, messages=HELLO, stream=stream)
    assert raised.value.body["error"]["type"] == name
    assert raised.value.request_id is not None
    if fault == "limited":
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 7


async def test_keys(gateway: Doors, sdk: anthropic.AsyncAnthropic) -> None:
    options: Any = {"model": "agent", "max_tokens": 5, "messages": HELLO}
    with pytest.raises(anthropic.AuthenticationError) as unknown:
        await sdk.with_options(api_key="tl-wrong").models.list()
    assert unknown.value.body["error"]["type"] == "authentication_error"
    bound = await gateway.door.key(allowed_models=["plain"])
    with pytest.raises(anthropic.PermissionDeniedError):
        await sdk.with_options(api_key=bound).messages.create(**options)
    poor = sdk.with_options(api_key=await gateway.door.key(requests_per_minute=1))
    await poor.messages.create(**options)
    with pytest.raises(anthropic.RateLimitError) as limited:
        await poor.messages.create(**options)
    assert int(limited.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("model", BOTH)
async def test_a_broken_stream_raises(gateway: Doors, sdk: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        async with sdk.messages.stream(model=f"{model}-cut", max_tokens=50, messages=HELLO) as stream:
            await stream.get_final_message()
    assert [row["outcome"] for row in await gateway.door.rows()] == ["cut"]


# Retries, time, leaving.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
async def test_the_sdk_tries_again(gateway: Doors, sdk: anthropic.AsyncAnthropic, model: str, stream: bool) -> None:
    retrying = sdk.with_options(max_retries=1)
    answer = await retrying.messages.create(model=f"{model}-failing-once", max_tokens=50, messages=HELLO, stream=stream)
    if stream:
        assert [event async for event in answer][-1].type == "message_stop"
    assert gateway.behind(model).requests == 2
    assert [row["outcome"] for row in await gateway.door.rows()] == ["error", "success"]


@pytest.mark.parametrize("model", BOTH)
async def test_the_sdks_timeout_ends_the_request(gateway: Doors, sdk: anthropic.AsyncAnthropic, model: str) -> None:
    with pytest.raises(anthropic.APITimeoutError):
        await sdk.messages.create(model=f"{model}-hanging", max_tokens=50, messages=HELLO, timeout=0.3)
    upstream = gateway.behind(model)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone")


@pytest.mark.parametrize("model", BOTH)
async def test_closing_a_stream_ends_the_request(gateway: Doors, sdk: anthropic.AsyncAnthropic, model: str) -> None:
    async with sdk.messages.stream(model=f"{model}-slow", max_tokens=50, messages=HELLO) as stream:
        async for _ in stream.text_stream:
            break
    upstream = gateway.behind(model)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone")
