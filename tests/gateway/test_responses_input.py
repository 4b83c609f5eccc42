"""The items of a Responses request: each type is read or refused by name, and what a conversation of them becomes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from bench.mock_agent import AgentWire
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.responses_types import types_of


@pytest_asyncio.fixture
async def agent() -> AsyncIterator[MockUpstream]:
    upstream = MockUpstream(AgentWire())
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, agent: MockUpstream) -> AsyncIterator[FrontDoor]:
    able = ["tools", "reasoning", "json_schema", "vision", "logprobs"]
    model = {"tier": "small", "backend": "agent", "capabilities": able, "price": PRICE, "max_output_tokens": 900}
    models = {"agent": model, "plain": {**model, "capabilities": []}}
    async with front_door(tmp_path, configuration({"agent": agent}, models)) as running:
        yield running


async def ask(door: FrontDoor, model: str = "agent", **body: Any) -> httpx.Response:
    body = {"input": "Hello", "model": model, **body}
    return await door.client.post("/v1/responses", json=body, headers=door.headers())


def sent(upstream: MockUpstream) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(upstream.records[-1].body)
    return found


READ = {"message", "function_call", "function_call_output", "reasoning"}


async def test_items_of_other_types_are_refused(door: FrontDoor, agent: MockUpstream) -> None:
    others = types_of(ResponseInputItemParam) - READ
    assert len(others) > 20
    for kind in others:
        response = await ask(door, input=[{"role": "user", "content": "x"}, {"type": kind, "id": "x"}])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "input[1].type"), kind
        assert kind in response.json()["error"]["message"]
    assert agent.requests == 0


async def test_a_conversation_of_items(door: FrontDoor, agent: MockUpstream) -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "low"}
    response = await ask(
        door,
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "Speak German."},
            {"role": "user", "content": [image, {"type": "input_text", "text": "What is it?"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}],
             "encrypted_content": "x"},
            {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "phase": "commentary",
             "content": [{"type": "output_text", "text": "A ", "annotations": []},
                         {"type": "output_text", "text": "cat.", "annotations": [], "logprobs": []}]},
            {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "now", "arguments": "{}",
             "status": "completed", "caller": None},
            {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": "{\"city\": \"Ulm\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"type": "function_call_output", "call_id": "c2", "output": [
                {"type": "input_text", "text": "rain"}, {"type": "input_text", "text": "wind"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "user", "content": [
                {"type": "input_text", "text": "One."}, {"type": "input_text", "text": "Two."}]},
        ],
    )  # fmt: skip
    assert response.status_code == 200, response.text
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "now", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ulm"}'}},
    ]
    seen = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk=", "detail": "low"}}
    assert sent(agent)["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "Speak German."},
        {"role": "user", "content": [seen, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "A cat.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
        {"role": "tool", "tool_call_id": "c2", "content": "rain\nwind"},
        {"role": "assistant", "content": None, "refusal": "No."},
        {"role": "user", "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]},
    ]
    refused = await ask(door, "plain", input=[{"role": "user", "content": [image]}])
    assert refused.json()["error"]["param"] == "input[0].content[0]"


async def test_what_is_said_after_calls_stands_with_them(door: FrontDoor, agent: MockUpstream) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "noon"}
    after = {"role": "assistant", "content": "I look."}
    for before, content in (([], "I look."), ([{"role": "assistant", "content": "Well."}], "Well.\nI look.")):
        await ask(door, input=[{"role": "user", "content": "x"}, *before, call, after, output])
        turns = sent(agent)["messages"]
        assert [turn["role"] for turn in turns] == ["user", "assistant", "tool"]
        assert (turns[1]["content"], turns[1]["tool_calls"][0]["id"]) == (content, "c")


def said(**part: Any) -> list[Any]:
    return [{"role": "user", "content": [part]}]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ([], "input"),
        (5, "input"),
        (None, "input"),
        (["x"], "input[0]"),
        ([{"content": "x"}], "input[0].type"),
        ([{"type": 5}], "input[0].type"),
        ([{"role": "robot", "content": "x"}], "input[0].role"),
        ([{"role": "user"}], "input[0].content"),
        ([{"role": "user", "content": 5}], "input[0].content"),
        ([{"role": "user", "content": "x", "name": "ann"}], "input[0].name"),
        ([{"role": "user", "content": "x", "status": "odd"}], "input[0].status"),
        ([{"role": "user", "content": "x", "id": 5}], "input[0].id"),
        ([{"type": "item_reference", "id": "msg_1"}], "input[0].type"),
        ([{"id": "msg_1"}], "input[0].type"),
        ([{"type": "reasoning", "summary": []}], "input"),
        ([{"type": "reasoning", "summary": [{"type": "x"}]}], "input[0].summary[0]"),
        ([{"type": "function_call", "call_id": "c", "name": "n"}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "c", "name": "n", "arguments": {}}], "input[0].arguments"),
        ([{"type": "function_call", "call_id": "c", "name": "n", "arguments": "", "namespace": "x"}],
         "input[0].namespace"),
        ([{"type": "function_call_output", "output": "x"}], "input[0].call_id"),
        ([{"type": "function_call_output", "call_id": "c"}], "input[0].output"),
        (said(), "input[0].content[0].type"),
        (said(type="input_text"), "input[0].content[0].text"),
        (said(type="input_text", text=5), "input[0].content[0].text"),
        (said(type="input_text", text="x", prompt_cache_breakpoint={"mode": "explicit"}),
         "input[0].content[0].prompt_cache_breakpoint"),
        (said(type="input_file", file_id="f"), "input[0].content[0].type"),
        (said(type="input_audio", input_audio={}), "input[0].content[0].type"),
        (said(type="input_image", file_id="f"), "input[0].content[0].file_id"),
        (said(type="input_image"), "input[0].content[0].image_url"),
        (said(type="input_image", image_url="https://x", detail="some"), "input[0].content[0].detail"),
        (said(type="output_text", text="x"), "input[0].content[0].type"),
        ([{"role": "system", "content": [{"type": "input_image", "image_url": "https://x"}]}],
         "input[0].content[0].type"),
    ],
)  # fmt: skip
async def test_bad_input_names_the_place(door: FrontDoor, agent: MockUpstream, given: Any, param: str) -> None:
    response = await ask(door, input=given)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert agent.requests == 0


async def test_too_many_items_are_refused(door: FrontDoor) -> None:
    response = await ask(door, input=[{"role": "user", "content": "x"}] * 10_001)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "array_too_long")
