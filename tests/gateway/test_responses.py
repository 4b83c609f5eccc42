"""`POST /v1/responses`: the official OpenAI SDK against the gateway, and every event against the SDK's types."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
import pytest_asyncio
from pydantic import BaseModel

from bench.mock_agent import ARGUMENTS, TEXT, THOUGHT, AgentWire
from bench.mock_upstream import MockUpstream
from gateway.ledger.reports import explain
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.responses_types import checked_response, events, folded
from tests.gateway.script_wire import ScriptWire

ALL = ["tools", "reasoning", "json_schema", "vision", "logprobs"]
TOOLS: list[Any] = [
    {
        "type": "function",
        "name": "weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
HELLO = "Name three rivers."


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[MockUpstream]:
    upstream = MockUpstream(AgentWire())
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest.fixture
def script() -> ScriptWire:
    return ScriptWire()


@pytest_asyncio.fixture
async def door(tmp_path: Path, agent: MockUpstream, script: ScriptWire) -> AsyncIterator[FrontDoor]:
    scripted = MockUpstream(script)
    await scripted.start()
    model = {"tier": "small", "backend": "agent", "capabilities": ALL, "price": PRICE}
    models = {
        "agent": model,
        "cut": {**model, "upstream_model": "cut,after=2,chunks=4"},
        "slow": {**model, "upstream_model": "stall,after=2"},
        "plain": {**model, "capabilities": []},
        "script": {**model, "backend": "script"},
        "cut-script": {**model, "backend": "script", "upstream_model": "cut,after=2,chunks=4"},
    }
    async with front_door(tmp_path, configuration({"agent": agent, "script": scripted}, models)) as running:
        yield running
    await scripted.stop()


@pytest_asyncio.fixture
async def sdk(door: FrontDoor) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        yield client


async def ask(door: FrontDoor, model: str = "agent", **body: Any) -> httpx.Response:
    """POST a request; a stream is read to its end."""
    body.setdefault("input", HELLO)
    return await door.client.post("/v1/responses", json={"model": model, **body}, headers=door.headers())


def sent(upstream: MockUpstream) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(upstream.records[-1].body)
    return found


# Answers.


async def test_an_answer(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.responses.create(model="agent", input=HELLO)
    assert answer.output_text == TEXT
    assert (answer.status, answer.incomplete_details, answer.error) == ("completed", None, None)
    usage = answer.usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (20, 8)
    assert (usage.output_tokens, usage.output_tokens_details.reasoning_tokens, usage.total_tokens) == (9, 4, 29)
    (row,) = await door.rows()
    assert (row["outcome"], row["input_tokens"], row["output_tokens"]) == ("success", 20, 9)
    # The id of the answer is that of its request.
    assert row["request_id"].removeprefix("req-").replace("-", "") == answer.id.removeprefix("resp_")
    explained = await explain(door.services.database, answer.id)
    assert explained is not None
    assert explained.request_id == row["request_id"]


async def test_the_object_is_complete_and_says_what_was_asked(door: FrontDoor) -> None:
    asked = {
        "instructions": "Be brief.", "max_output_tokens": 50, "metadata": {"a": "b"}, "parallel_tool_calls": False,
        "prompt_cache_key": "p", "reasoning": {"effort": "low", "summary": "auto"}, "safety_identifier": "s",
        "temperature": 0.5, "text": {"format": {"type": "json_object"}, "verbosity": "low"}, "tool_choice": "none",
        "tools": TOOLS, "top_p": 0.9, "truncation": "disabled", "user": "u", "store": True,
    }  # fmt: skip
    answer = (await ask(door, **asked)).json()
    checked_response(answer)
    assert {name: answer[name] for name in asked} == asked
    assert answer["created_at"] <= answer["completed_at"]
    plain = (await ask(door)).json()
    checked_response(plain)
    defaults = {
        "instructions": None, "max_output_tokens": None, "metadata": {}, "parallel_tool_calls": True,
        "reasoning": {"effort": None, "summary": None}, "temperature": None, "top_p": None, "truncation": "disabled",
        "text": {"format": {"type": "text"}, "verbosity": None}, "tool_choice": "auto", "tools": [], "store": True,
        "top_logprobs": 0, "background": False, "service_tier": None, "previous_response_id": None,
    }  # fmt: skip
    assert {name: plain[name] for name in defaults} == defaults


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reasoning": {"effort": "high"}},
    {"reasoning": {"effort": "high", "summary": "detailed"}},
    {"tools": TOOLS},
    {"tools": TOOLS, "reasoning": {"effort": "low", "summary": "auto"}, "parallel_tool_calls": False},
    {"max_output_tokens": 1},
]


@pytest.mark.parametrize("options", OPTIONS)
async def test_a_stream_tells_of_what_the_whole_answer_says(door: FrontDoor, options: dict[str, Any]) -> None:
    whole = (await ask(door, **options)).json()
    told = events(await ask(door, stream=True, **options))
    assert [event["type"] for event in told[:2]] == ["response.created", "response.in_progress"]
    final = told[-1]["response"]
    assert told[-1]["type"] == f"response.{whole['status']}"
    for response in (told[0]["response"], final, whole):
        checked_response(response)
    assert folded(told) == final["output"]
    assert {event["response"]["id"] for event in told if "response" in event} == {final["id"]}

    def comparable(response: dict[str, Any]) -> dict[str, Any]:
        changing = ("id", "created_at", "completed_at", "output")
        items = [{**item, "id": item["id"].partition("_")[0]} for item in response["output"]]
        return {**{k: v for k, v in response.items() if k not in changing}, "output": items}

    assert comparable(final) == comparable(whole)
    assert told[0]["response"]["status"] == "in_progress"
    assert told[-1]["tierline"]["model"] == "agent"
    assert "[DONE]" not in (await ask(door, stream=True)).text


async def test_reasoning_is_content_or_summary_as_asked(door: FrontDoor) -> None:
    text = (await ask(door, reasoning={"effort": "high"})).json()["output"]
    assert [item["type"] for item in text] == ["reasoning", "message"]
    assert (text[0]["content"], text[0]["summary"]) == ([{"type": "reasoning_text", "text": THOUGHT}], [])
    told = events(await ask(door, reasoning={"effort": "high", "summary": "auto"}, stream=True))
    summary = told[-1]["response"]["output"][0]
    assert summary["summary"] == [{"type": "summary_text", "text": THOUGHT}]
    assert "content" not in summary
    kinds = [event["type"].removeprefix("response.") for event in told]
    assert [kind for kind in kinds if "reasoning" in kind] == [
        "reasoning_summary_part.added", "reasoning_summary_text.delta", "reasoning_summary_text.delta",
        "reasoning_summary_text.done", "reasoning_summary_part.done",
    ]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("finish", "status", "reason"),
    [
        ("stop", "completed", None),
        ("length", "incomplete", "max_output_tokens"),
        ("content_filter", "incomplete", "content_filter"),
    ],
)
async def test_why_it_ended(
    door: FrontDoor, script: ScriptWire, stream: bool, finish: str, status: str, reason: str | None
) -> None:
    script.finish_reason = finish
    response = await ask(door, "script", stream=stream)
    answer = events(response)[-1]["response"] if stream else response.json()
    assert (answer["status"], answer["output"][-1]["status"]) == (status, status)
    assert answer["incomplete_details"] == (reason and {"reason": reason})
    assert (answer["completed_at"] is None) == (status == "incomplete")
    assert answer["model"] == "script-1"


async def test_logprobs(door: FrontDoor, script: ScriptWire) -> None:
    script.logprobs = [
        {"token": "Ye", "logprob": -0.5, "bytes": [89, 101], "top_logprobs": [
            {"token": "Ye", "logprob": -0.5, "bytes": [89, 101]}, {"token": "ß", "logprob": -2.0, "bytes": None}]},
        {"token": "s.", "logprob": -0.25, "bytes": None, "top_logprobs": []},
    ]  # fmt: skip
    script.deltas = [{"content": ""}, {"content": "Yes."}]  # the text of the first token comes with the second
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = (await ask(door, "script", **options)).json()
    checked_response(whole)
    logprobs = whole["output"][0]["content"][0]["logprobs"]
    assert [(token["token"], token["logprob"], token["bytes"]) for token in logprobs] == [
        ("Ye", -0.5, [89, 101]), ("s.", -0.25, [115, 46]),
    ]  # fmt: skip
    assert logprobs[0]["top_logprobs"][1] == {"token": "ß", "logprob": -2.0, "bytes": [195, 159]}
    told = events(await ask(door, "script", stream=True, **options))
    assert told[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    (delta,) = (event for event in told if event["type"] == "response.output_text.delta")
    (done,) = (event for event in told if event["type"] == "response.output_text.done")
    assert delta["logprobs"] == done["logprobs"]
    assert [token["token"] for token in delta["logprobs"]] == ["Ye", "s."]


async def test_a_refusal_is_a_part_of_its_own(door: FrontDoor, script: ScriptWire) -> None:
    script.message = {"role": "assistant", "content": "Well. ", "refusal": "No."}
    script.deltas = [{"content": "Well. "}, {"refusal": "N"}, {"refusal": "o."}]
    whole = (await ask(door, "script")).json()
    checked_response(whole)
    told = events(await ask(door, "script", stream=True))
    output = folded(told)
    assert [part["type"] for part in output[0]["content"]] == ["output_text", "refusal"]
    assert output[0]["content"] == whole["output"][0]["content"]
    assert output == told[-1]["response"]["output"]


async def test_text_around_calls_becomes_items_in_their_order(door: FrontDoor, script: ScriptWire) -> None:
    call = {"index": 0, "id": "call_a", "type": "function", "function": {"name": "now", "arguments": ""}}
    second = {"index": 1, "function": {"name": "then", "arguments": "{}"}}  # of a server that gives no id
    script.deltas = [
        {"reasoning_content": "Hm."}, {"content": "Let me see."}, {"tool_calls": [call]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}, {"tool_calls": [second]}, {"content": "Done."},
    ]  # fmt: skip
    script.finish_reason = "tool_calls"
    told = events(await ask(door, "script", stream=True, tools=TOOLS))
    output = folded(told)
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call", "message"]
    assert output == told[-1]["response"]["output"]
    assert len({item["id"] for item in output}) == 5
    assert output[2]["call_id"] == "call_a"
    assert output[3]["call_id"]


async def test_no_usage_is_not_zero_usage(door: FrontDoor, script: ScriptWire) -> None:
    script.usage = None
    for stream in (False, True):
        response = await ask(door, "script", stream=stream)
        assert (events(response)[-1]["response"] if stream else response.json())["usage"] is None
    assert [row["usage_source"] for row in await door.rows()] == ["counted", "counted"]


async def test_the_service_tier_is_the_one_that_served(door: FrontDoor, script: ScriptWire) -> None:
    assert (await ask(door, "script", service_tier="flex")).json()["service_tier"] is None
    script.more = {"service_tier": "default"}
    assert (await ask(door, "script", service_tier="flex")).json()["service_tier"] == "default"
    told = events(await ask(door, "script", service_tier="flex", stream=True))
    assert told[-1]["response"]["service_tier"] == "default"


# The SDK's helpers.


async def test_the_sdk_streams(sdk: openai.AsyncOpenAI) -> None:
    async with sdk.responses.stream(model="agent", input=HELLO, reasoning={"effort": "low"}) as stream:
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert "".join(deltas) == final.output_text == TEXT
    plain = [event async for event in await sdk.responses.create(model="agent", input=HELLO, stream=True)]
    assert plain[-1].type == "response.completed"


class Rivers(BaseModel):
    rivers: list[str]


async def test_the_sdk_parses(sdk: openai.AsyncOpenAI, door: FrontDoor, script: ScriptWire) -> None:
    script.message["content"] = '{"rivers": ["Rhine"]}'
    script.deltas = [{"content": '{"rivers": '}, {"content": '["Rhine"]}'}]
    answer = await sdk.responses.parse(model="script", input=HELLO, text_format=Rivers)
    assert answer.output_parsed == Rivers(rivers=["Rhine"])
    async with sdk.responses.stream(model="script", input=HELLO, text_format=Rivers) as stream:
        assert (await stream.get_final_response()).output_parsed == Rivers(rivers=["Rhine"])


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_there_and_back(sdk: openai.AsyncOpenAI, agent: MockUpstream, stream: bool) -> None:
    """The loop of an agent that keeps the conversation itself, as the SDK's users write it."""
    conversation: list[Any] = [{"role": "user", "content": HELLO}]
    options: dict[str, Any] = {"model": "agent", "tools": TOOLS, "store": False, "reasoning": {"effort": "low"}}
    if stream:
        async with sdk.responses.stream(input=conversation, **options) as running:
            answer: Any = await running.get_final_response()
    else:
        answer = await sdk.responses.create(input=conversation, **options)
    calls = [item for item in answer.output if item.type == "function_call"]
    assert [(call.name, call.arguments) for call in calls] == [("weather", ARGUMENTS), ("now", "{}")]
    conversation += [item.model_dump() for item in answer.output]
    conversation += [
        {"type": "function_call_output", "call_id": call.call_id, "output": f"of {call.name}"} for call in calls
    ]
    again = await sdk.responses.create(input=conversation, **options)
    assert again.output_text == "The tools say: of weather; of now"
    messages = sent(agent)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [call.call_id for call in calls]


# What goes wrong.


@pytest.mark.parametrize("model", ["cut", "cut-script"])
async def test_a_broken_stream_fails_and_then_raises(door: FrontDoor, sdk: openai.AsyncOpenAI, model: str) -> None:
    seen: list[str] = []
    stream = await sdk.responses.create(model=model, input=HELLO, stream=True)

    async def read() -> None:
        async for event in stream:
            seen.append(event.type)  # noqa: PERF401

    with pytest.raises(openai.APIError, match="broke off") as broken:
        await read()
    assert seen[-1] == "response.failed"
    assert broken.value.code == "stream_cut"
    told = events(await ask(door, model, stream=True))
    assert [event["type"] for event in told[-2:]] == ["response.failed", "error"]
    failed = told[-2]["response"]
    checked_response(failed)
    assert (failed["status"], failed["error"]["code"], failed["store"]) == ("failed", "server_error", False)
    assert failed["output"][-1]["status"] == "incomplete"
    assert failed["output"][-1]["content"][0]["text"]
    assert told[-1]["code"] == "stream_cut"
    missing = await door.client.get(f"/v1/responses/{failed['id']}", headers=door.headers())
    assert missing.status_code == 404
    assert [(row["outcome"], row["output_tokens"] > 0) for row in await door.rows()] == [("cut", True), ("cut", True)]


async def test_mixed_calls_come_one_after_another(door: FrontDoor, script: ScriptWire) -> None:
    begun = [
        {"tool_calls": [{"index": i, "id": f"c{i}", "function": {"name": "now", "arguments": "{"}}]} for i in (0, 1)
    ]
    script.deltas = [*begun, {"tool_calls": [{"index": 0, "function": {"arguments": "}"}}]}]
    script.deltas.append({"tool_calls": [{"index": 1, "function": {"arguments": '"x":1}'}}]})
    told = events(await ask(door, "script", stream=True, tools=TOOLS))
    items = folded(told)
    assert items == told[-1]["response"]["output"]
    assert [(item["call_id"], item["arguments"]) for item in items] == [("c0", "{}"), ("c1", '{"x":1}')]


async def test_errors_before_the_answer_are_the_sdks_own(door: FrontDoor, sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        await sdk.with_options(api_key="tl-wrong").responses.create(model="agent", input="x")
    with pytest.raises(openai.NotFoundError):
        await sdk.responses.create(model="nobody", input="x")
    with pytest.raises(openai.BadRequestError) as refused:
        await sdk.responses.create(model="plain", input="x", tools=TOOLS)
    assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
    poor = sdk.with_options(api_key=await door.key(requests_per_minute=1))
    await poor.responses.create(model="agent", input="x")
    with pytest.raises(openai.RateLimitError) as limited:
        await poor.responses.create(model="agent", input="x")
    assert int(limited.value.response.headers["retry-after"]) >= 1
    spent = sdk.with_options(api_key=await door.key(budget_nanousd=1))
    with pytest.raises(openai.RateLimitError) as broke:
        await spent.responses.create(model="agent", input="x")
    assert broke.value.code == "budget_exhausted"


async def test_a_client_that_leaves_ends_it(door: FrontDoor, agent: MockUpstream) -> None:
    body = {"model": "slow", "input": HELLO, "stream": True}
    async with door.client.stream("POST", "/v1/responses", json=body, headers=door.headers()) as response:
        async for line in response.aiter_lines():
            if "output_text.delta" in line:
                break
    async with asyncio.timeout(20):
        while door.services.limiter.open_holds or agent.records[-1].outcome != "client-gone":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert [row["outcome"] for row in await door.rows()] == ["cancelled"]
