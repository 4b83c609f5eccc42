"""The official OpenAI SDK against the gateway: whatever it offers on our routes, before servers of either dialect."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pydantic
import pytest
import pytest_asyncio

from bench.mock_agent import JSON_TEXT, TEXT, THOUGHT
from tests.gateway.sdk_doors import BOTH, Doors, doors

HELLO: list[Any] = [{"role": "user", "content": "Name three rivers."}]
IMAGE = "data:image/png;base64,aGk="


class Weather(pydantic.BaseModel):
    city: str
    days: int


class Now(pydantic.BaseModel):
    pass


class Rivers(pydantic.BaseModel):
    rivers: int


TOOLS: list[Any] = [openai.pydantic_function_tool(Weather), openai.pydantic_function_tool(Now)]


@pytest_asyncio.fixture
async def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Doors]:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    async with doors(tmp_path) as running:
        yield running


@pytest_asyncio.fixture
async def sdk(gateway: Doors) -> AsyncIterator[openai.AsyncOpenAI]:
    door = gateway.door
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        yield client


# Answers.


@pytest.mark.parametrize("model", BOTH)
async def test_create(gateway: Doors, sdk: openai.AsyncOpenAI, model: str) -> None:
    answer = await sdk.chat.completions.create(model=model, messages=HELLO)
    assert (answer.choices[0].message.role, answer.choices[0].finish_reason) == ("assistant", "stop")
    assert answer.choices[0].message.content.startswith("The Rhine, the Danube and the Loire")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer._request_id is not None
    assert answer._request_id.startswith("req-")
    assert json.loads(gateway.behind(model).records[-1].body)["messages"][0]["role"] == "user"


@pytest.mark.parametrize("model", BOTH)
async def test_the_synchronous_client(gateway: Doors, model: str) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{gateway.door.url}/v1", api_key=gateway.door.token, max_retries=0) as client:
            whole = client.chat.completions.create(model=model, messages=HELLO)
            with client.chat.completions.create(model=model, messages=HELLO, stream=True) as stream:
                said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
            return whole.choices[0].message.content or "", said

    whole, streamed = await asyncio.to_thread(ask)
    assert whole
    assert streamed


@pytest.mark.parametrize("model", BOTH)
async def test_a_stream_helper_and_its_snapshot(sdk: openai.AsyncOpenAI, model: str) -> None:
    options: Any = {"model": model, "messages": HELLO, "reasoning_effort": "low", "max_completion_tokens": 3000}
    async with sdk.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_completion()
    said = "".join(event.delta for event in events if event.type == "content.delta")
    assert said == answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.reasoning_content == THOUGHT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.completion_tokens > 0
    assert events[-1].type in ("content.done", "chunk")


@pytest.mark.parametrize("model", BOTH)
async def test_parallel_tools_through_the_stream_helper(sdk: openai.AsyncOpenAI, model: str) -> None:
    async with sdk.chat.completions.stream(model=model, messages=HELLO, tools=TOOLS) as stream:
        events = [event async for event in stream]
        answer = await stream.get_final_completion()
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name) for event in done] == [(0, "Weather"), (1, "Now")]
    assert done[0].parsed_arguments.days == 3
    pieces = [event for event in events if event.type == "tool_calls.function.arguments.delta" and event.index == 0]
    assert len(pieces) > 1
    assert pieces[-1].arguments == done[0].arguments == "".join(piece.arguments_delta for piece in pieces)
    assert answer.choices[0].finish_reason == "tool_calls"
    assert len({call.id for call in answer.choices[0].message.tool_calls or []}) == 2


@pytest.mark.parametrize("model", BOTH)
async def test_tools_there_and_back(gateway: Doors, sdk: openai.AsyncOpenAI, model: str) -> None:
    first = await sdk.chat.completions.parse(model=model, messages=HELLO, tools=TOOLS)
    calls = first.choices[0].message.tool_calls
    assert calls is not None
    weather, _ = (call.function.parsed_arguments for call in calls)
    assert weather.days == 3
    results: list[Any] = [{"role": "tool", "tool_call_id": call.id, "content": call.function.name} for call in calls]
    said: Any = first.choices[0].message
    second = await sdk.chat.completions.create(model=model, messages=[*HELLO, said, *results], tools=TOOLS)
    assert second.choices[0].finish_reason == "stop"
    assert second.choices[0].message.content
    sent = json.loads(gateway.behind(model).records[-1].body)["messages"]
    assert json.dumps(sent).count('"Weather"') >= 2  # the call and its result


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
async def test_structured_output(sdk: openai.AsyncOpenAI, model: str, stream: bool) -> None:
    options: Any = {"model": model, "messages": HELLO, "response_format": Rivers}
    if stream:
        async with sdk.chat.completions.stream(**options) as running:
            answer = await running.get_final_completion()
    else:
        answer = await sdk.chat.completions.parse(**options)
    assert answer.choices[0].message.parsed == Rivers(rivers=json.loads(JSON_TEXT)["rivers"])


@pytest.mark.parametrize("model", BOTH)
async def test_images_are_parts(gateway: Doors, sdk: openai.AsyncOpenAI, model: str) -> None:
    content = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": IMAGE}}]
    await sdk.chat.completions.create(model=model, messages=[{"role": "user", "content": content}])
    sent = json.loads(gateway.behind(model).records[-1].body)["messages"][0]["content"]
    assert [part["type"] for part in sent] == ["text", "image" if model == "claude" else "image_url"]
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.chat.completions.create(model="plain", messages=[{"role": "user", "content": content}])
    assert refused.value.param == "messages[0].content[1]"


async def test_several_choices_and_logprobs(sdk: openai.AsyncOpenAI) -> None:
    options: Any = {"model": "agent", "messages": HELLO, "n": 3, "logprobs": True, "top_logprobs": 0}
    whole = await sdk.chat.completions.create(**options)
    async with sdk.chat.completions.stream(**options) as stream:
        streamed = await stream.get_final_completion()
    for answer in (whole, streamed):
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert {choice.message.content for choice in answer.choices} == {TEXT}
        assert [choice.logprobs.content[0].logprob for choice in answer.choices] == [-0.25] * 3
        assert {choice.finish_reason for choice in answer.choices} == {"stop"}


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2}, "n"),
        ({"logprobs": True}, "logprobs"),
        ({"seed": 7}, "seed"),
        ({"frequency_penalty": 1}, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"temperature": 1.5}, "temperature"),
        ({"logit_bias": {"7": 1}}, "logit_bias"),
    ],
)
async def test_what_the_other_dialect_cannot_say_is_refused_by_name(
    gateway: Doors, sdk: openai.AsyncOpenAI, options: Any, param: str
) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as refused:
            await sdk.chat.completions.create(model="claude", messages=HELLO, **options, **more)
        assert (refused.value.param, refused.value.code) == (param, "unsupported_parameter")
        assert refused.value.request_id is not None
    assert not gateway.claude.records


@pytest.mark.parametrize("model", BOTH)
async def test_raw_and_streaming_responses(sdk: openai.AsyncOpenAI, model: str) -> None:
    raw = await sdk.chat.completions.with_raw_response.create(model=model, messages=HELLO)
    assert raw.headers["x-tierline-model"] == model
    assert float(raw.headers["x-tierline-cost-usd"]) > 0
    assert raw.parse().choices[0].message.content
    create = sdk.chat.completions.with_streaming_response.create
    async with create(model=model, messages=HELLO) as response:
        assert json.loads(await response.read())["object"] == "chat.completion"
    async with create(model=model, messages=HELLO, stream=True) as response:
        lines = [line async for line in response.iter_lines() if line]
    assert lines[-1] == "data: [DONE]"


async def test_text_completions(sdk: openai.AsyncOpenAI, gateway: Doors) -> None:
    with pytest.raises(openai.BadRequestError, match="completions"):
        await sdk.completions.create(model="claude", prompt="Once")
    assert not gateway.claude.records


@pytest.mark.parametrize("encoding", ["float", "base64", openai.omit])
async def test_embeddings(gateway: Doors, sdk: openai.AsyncOpenAI, encoding: Any) -> None:
    answer = await sdk.embeddings.create(model="vectors", input=["one", "two"], encoding_format=encoding, dimensions=16)
    assert len(answer.data[0].embedding) == 16
    assert answer._request_id is not None
    sent = json.loads(gateway.agent.records[-1].body)
    assert (sent["input"], sent["dimensions"]) == (["one", "two"], 16)


async def test_models(sdk: openai.AsyncOpenAI) -> None:
    listed = [model.id async for model in sdk.models.list()]
    assert listed[0] == "auto"
    assert {"agent", "claude", "vectors"} < set(listed)
    for name in ("auto", "claude-cut"):
        model = await sdk.models.retrieve(name)
        assert (model.id, model.object, model.owned_by) == (name, "model", "tierline")
    with pytest.raises(openai.NotFoundError):
        await sdk.models.retrieve("nobody/nothing")


# What is not there.


@pytest.mark.parametrize(
    "call",
    [
        lambda sdk: sdk.images.generate(prompt="a cat"),
        lambda sdk: sdk.audio.speech.create(input="a", model="m", voice="alloy"),
        lambda sdk: sdk.moderations.create(input="a"),
        lambda sdk: sdk.fine_tuning.jobs.list(),
        lambda sdk: sdk.vector_stores.list(),
        lambda sdk: sdk.chat.completions.retrieve("chatcmpl-1"),
    ],
)
async def test_other_routes_are_not_found(sdk: openai.AsyncOpenAI, call: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await call(sdk)
    assert missing.value.code == "unknown_url"
    assert missing.value.request_id is not None


async def test_stored_completions_cannot_be_listed(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await sdk.chat.completions.list()
    assert (refused.value.status_code, refused.value.response.headers["allow"]) == (405, "POST")


# Errors.


@pytest.mark.parametrize(
    ("options", "kind", "code"),
    [
        ({"model": "nobody"}, openai.NotFoundError, "model_not_found"),
        ({"model": "agent", "temperature": 9}, openai.BadRequestError, "invalid_value"),
        ({"model": "agent", "messages": []}, openai.BadRequestError, "empty_array"),
        ({"model": "vectors"}, openai.BadRequestError, "wrong_kind_of_model"),
        ({"model": "agent", "user": "x" * 2_000_000}, openai.APIStatusError, "request_too_large"),
    ],
)
async def test_errors_of_the_gateway(sdk: openai.AsyncOpenAI, options: Any, kind: type[Exception], code: str) -> None:
    for stream in (False, True):
        with pytest.raises(kind) as raised:
            await sdk.chat.completions.create(**{"messages": HELLO, **options}, stream=stream)
        assert raised.value.code == code
        assert raised.value.type
        assert raised.value.request_id is not None
        assert raised.value.body["request_id"] == raised.value.request_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
@pytest.mark.parametrize(
    ("fault", "kind", "code"),
    [
        ("failing", openai.InternalServerError, "backend_upstream_error"),
        ("overloaded", openai.InternalServerError, None),
        ("limited", openai.RateLimitError, "backend_rate_limited"),
        ("refusing", openai.UnprocessableEntityError, None),
    ],
)
async def test_errors_of_servers(
    sdk: openai.AsyncOpenAI, model: str, fault: str, kind: type[Exception], code: str | None, stream: bool
) -> None:
    with pytest.raises(kind) as raised:
        await sdk.chat.completions.create(model=f"{model}-{fault}", messages=HELLO, stream=stream)
    if code is not None:
        assert raised.value.code == code
    if fault == "limited":
        assert 1 <= int(raised.value.response.headers["retry-after"]) <= 7
    assert raised.value.request_id is not None


async def test_keys(gateway: Doors, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        await sdk.with_options(api_key="tl-wrong").models.list()
    assert unknown.value.code == "invalid_api_key"
    bound = await gateway.door.key(allowed_models=["plain"])
    with pytest.raises(openai.PermissionDeniedError):
        await sdk.with_options(api_key=bound).chat.completions.create(model="agent", messages=HELLO)
    poor = sdk.with_options(api_key=await gateway.door.key(requests_per_minute=1))
    await poor.chat.completions.create(model="agent", messages=HELLO)
    with pytest.raises(openai.RateLimitError) as limited:
        await poor.chat.completions.create(model="agent", messages=HELLO)
    assert int(limited.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize("model", BOTH)
async def test_a_broken_stream_raises(gateway: Doors, sdk: openai.AsyncOpenAI, model: str) -> None:
    stream = await sdk.chat.completions.create(model=f"{model}-cut", messages=HELLO, stream=True)
    with pytest.raises(openai.APIError, match="broke off"):
        [chunk async for chunk in stream]
    with pytest.raises(openai.APIError, match="broke off"):
        async with sdk.chat.completions.stream(model=f"{model}-cut", messages=HELLO) as helper:
            await helper.get_final_completion()
    assert [row["outcome"] for row in await gateway.door.rows()] == ["cut", "cut"]


# Retries, time, leaving.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("model", BOTH)
async def test_the_sdk_tries_again(gateway: Doors, sdk: openai.AsyncOpenAI, model: str, stream: bool) -> None:
    retrying = sdk.with_options(max_retries=1)
    answer = await retrying.chat.completions.create(model=f"{model}-failing-once", messages=HELLO, stream=stream)
    if stream:
        [chunk async for chunk in answer]
    assert gateway.behind(model).requests == 2
    assert [row["outcome"] for row in await gateway.door.rows()] == ["error", "success"]


async def test_the_sdk_does_not_try_again_what_is_in_vain(gateway: Doors) -> None:
    asked: list[httpx.Request] = []

    async def count(request: httpx.Request) -> None:
        asked.append(request)

    door = gateway.door
    async with (
        httpx.AsyncClient(event_hooks={"request": [count]}) as http,
        openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=3, http_client=http) as sdk,
    ):
        with pytest.raises(openai.InternalServerError) as missed:
            await sdk.chat.completions.create(
                model="agent", messages=HELLO, extra_headers={"x-tierline-cache": "only-if-cached"}
            )
        spent = await door.key(budget_nanousd=1)
        with pytest.raises(openai.RateLimitError) as refused:
            await sdk.with_options(api_key=spent).chat.completions.create(model="agent", messages=HELLO)
    assert (missed.value.code, refused.value.code) == ("not_in_cache", "budget_exhausted")
    assert len(asked) == 2


@pytest.mark.parametrize("model", BOTH)
async def test_the_sdks_timeout_ends_the_request(gateway: Doors, sdk: openai.AsyncOpenAI, model: str) -> None:
    with pytest.raises(openai.APITimeoutError):
        await sdk.chat.completions.create(model=f"{model}-hanging", messages=HELLO, timeout=0.3)
    upstream = gateway.behind(model)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone")


@pytest.mark.parametrize("model", BOTH)
async def test_closing_a_stream_ends_the_request(gateway: Doors, sdk: openai.AsyncOpenAI, model: str) -> None:
    stream = await sdk.chat.completions.create(model=f"{model}-slow", messages=HELLO, stream=True)
    async for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            break
    await stream.close()
    upstream = gateway.behind(model)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone")
    (row,) = await until_settled(gateway)
    assert row["outcome"] == "cancelled"
    assert row["output_tokens"] > 0


async def until_settled(gateway: Doors) -> list[dict[str, Any]]:
    async with asyncio.timeout(3):
        while gateway.door.services.limiter.open_holds:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    return await gateway.door.rows()
