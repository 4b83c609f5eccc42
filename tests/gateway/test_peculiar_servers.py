"""Servers that speak the OpenAI dialect in their own way: clients of either dialect hear one and the same answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from bench.mock_peculiar import ARGUMENTS, PIECES, SERVERS, TEXT, THOUGHT, USAGE, PeculiarWire
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

FAULTY = ("gemini-refusing", "vllm-aborted", "llama.cpp-full")
WELL = [name for name in SERVERS if name not in FAULTY]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "now")
]
ANTHROPIC_TOOLS: list[Any] = [{"name": name, "input_schema": {"type": "object"}} for name in ("weather", "now")]
CALLS = [("weather", json.loads(ARGUMENTS)), ("now", {})]
HELLO: list[Any] = [{"role": "user", "content": "Name three rivers."}]


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(PeculiarWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    model = {"tier": "small", "backend": "up", "capabilities": ["tools", "reasoning"], "price": PRICE}
    document = configuration({"up": upstream}, dict.fromkeys(SERVERS, model))
    document["backends"]["up"]["attempts"] = 1
    async with front_door(tmp_path, document) as running:
        yield running


@pytest_asyncio.fixture
async def sdk(door: FrontDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        yield client


@pytest_asyncio.fixture
async def claude_sdk(door: FrontDoor) -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.token, max_retries=0) as client:
        yield client


async def finished(sdk: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    """The completion, whole or as the SDK puts a stream together."""
    options = {"messages": HELLO, **options}
    if not stream:
        return await sdk.chat.completions.create(**options)
    async with sdk.chat.completions.stream(**options, stream_options={"include_usage": True}) as running:
        async for _ in running:
            pass
        return await running.get_final_completion()


def thought_of(message: Any) -> str | None:
    return getattr(message, "reasoning_content", None) or getattr(message, "reasoning", None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", WELL)
async def test_text_and_thoughts(door: FrontDoor, sdk: openai.AsyncOpenAI, server: str, stream: bool) -> None:
    answer = await finished(sdk, stream, model=server, reasoning_effort="low")
    (choice,) = answer.choices
    message = choice.message
    assert (message.role, message.content, thought_of(message)) == ("assistant", TEXT, THOUGHT)
    assert choice.finish_reason == "stop"
    assert answer.id
    assert answer.created
    assert answer.model == server
    (row,) = await door.rows()
    assert row["outcome"] == "success"
    if server != "bare" or not stream:
        assert answer.usage.model_dump(include=set(USAGE)) == USAGE
        assert (row["input_tokens"], row["output_tokens"]) == (20, 9)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", WELL)
async def test_parallel_tool_calls(sdk: openai.AsyncOpenAI, server: str, stream: bool) -> None:
    answer = await finished(sdk, stream, model=server, tools=TOOLS)
    (choice,) = answer.choices
    calls = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == CALLS
    assert all(call.type == "function" and call.id for call in calls)
    assert len({call.id for call in calls}) == 2
    assert choice.finish_reason == "tool_calls"
    assert choice.message.role == "assistant"


async def test_a_signature_beside_a_call_is_kept(sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(model="gemini", messages=HELLO, tools=TOOLS, stream=True)
    calls = [call async for chunk in stream for choice in chunk.choices for call in choice.delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [call.extra_content["google"]["thought_signature"] for call in calls] == ["c2ln0", "c2ln1"]


async def test_a_function_asked_for_by_name_ends_as_at_openai(sdk: openai.AsyncOpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "weather"}}
    answer = await finished(sdk, True, model="vllm", tools=TOOLS, tool_choice=choice)
    (call,) = answer.choices[0].message.tool_calls
    assert (call.id, call.function.name, call.function.arguments) == ("chatcmpl-tool-0", "weather", ARGUMENTS)
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("server", WELL)
async def test_a_client_of_the_other_dialect(claude_sdk: anthropic.AsyncAnthropic, server: str, stream: bool) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    options: dict[str, Any] = {"model": server, "max_tokens": 2000, "messages": HELLO}
    answers = []
    for more in ({"thinking": thinking}, {"tools": ANTHROPIC_TOOLS}):
        if stream:
            async with claude_sdk.messages.stream(**options, **more) as running:
                answers.append(await running.get_final_message())
        else:
            answers.append(await claude_sdk.messages.create(**options, **more))
    said, called = answers
    assert [block.type for block in said.content] == ["thinking", "text"]
    assert (said.content[0].thinking, said.content[1].text, said.stop_reason) == (THOUGHT, TEXT, "end_turn")
    assert [(block.name, block.input) for block in called.content] == CALLS
    assert all(block.id for block in called.content)
    assert called.stop_reason == "tool_use"
    if server != "bare" or not stream:
        assert (said.usage.input_tokens, said.usage.output_tokens) == (20, 9)


async def test_usage_is_said_once_and_only_if_asked_for(door: FrontDoor) -> None:
    for server in WELL:
        for asked in (True, False):
            options = {"stream_options": {"include_usage": True}} if asked else {}
            response = await door.chat(server, stream=True, **options)
            *events, done = [line[6:] for line in response.text.split("\n") if line.startswith("data: ")]
            assert done == "[DONE]"
            reported = [chunk for chunk in map(json.loads, events) if chunk.get("usage")]
            if server == "bare":
                assert reported == []
                continue
            assert len(reported) == asked, server
            for chunk in reported:
                assert (chunk["choices"], chunk["usage"]) == ([], USAGE)
                assert chunk["tierline"]["cost_usd"] == 38e-6
                assert chunk["id"] == "chatcmpl-1"


async def test_usage_on_every_chunk_for_who_wants_it(door: FrontDoor) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await door.chat("gemini", stream=True, stream_options=options)
    chunks = [json.loads(line[6:]) for line in response.text.split("\n") if line.startswith("data: {")]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [3, 3, 3, 9]


# Servers that give up.


@pytest.mark.parametrize("stream", [False, True])
async def test_an_aborted_answer_is_not_a_success(door: FrontDoor, sdk: openai.AsyncOpenAI, stream: bool) -> None:
    with pytest.raises(openai.APIError) as failed:
        await finished(sdk, stream, model="vllm-aborted")
    assert failed.value.code == ("stream_cut" if stream else "backend_upstream_error")
    (row,) = await door.rows()
    assert row["outcome"] == ("cut" if stream else "error")


async def test_an_error_that_is_an_array_is_passed_on(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unable to submit request") as refused:
        await finished(sdk, False, model="gemini-refusing")
    assert refused.value.type == "invalid_request_error"


async def test_an_error_before_the_answer_in_a_stream_of_status_200(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await finished(sdk, True, model="llama.cpp-full")
    assert refused.value.code == "context_length_exceeded"


async def test_an_error_within_the_answer_in_a_stream_of_status_200(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    stream = await sdk.chat.completions.create(
        model="llama.cpp-full", messages=[{"role": "user", "content": "begin"}], stream=True
    )
    heard: list[str] = []

    async def listen() -> None:
        async for chunk in stream:
            heard.append(chunk.choices[0].delta.content or "")  # noqa: PERF401

    with pytest.raises(openai.APIError, match="incomplete"):
        await listen()
    assert "".join(heard) == PIECES[0]
