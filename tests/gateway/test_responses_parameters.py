"""Every documented parameter of the Responses API is honoured or refused by name: the SDK's types are walked."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import httpx
import msgspec
import pytest
import pytest_asyncio
from openai.types.responses import response_create_params as params
from openai.types.responses.response_includable import ResponseIncludable
from openai.types.responses.tool_param import ToolParam
from openai.types.shared_params.reasoning import Reasoning

from bench.mock_agent import AgentWire
from bench.mock_upstream import MockUpstream
from gateway.dialects.openai_responses import ResponsesRequest
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.responses_types import checked_response, types_of

TOOLS: list[Any] = [
    {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": True, "description": "D."},
    {"type": "function", "name": "now", "parameters": None, "strict": None},
]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


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


def documented() -> set[str]:
    return set(get_type_hints(params.ResponseCreateParamsBase)) | {"stream"}


# A value of each parameter that is refused.
REFUSED: dict[str, Any] = {
    "access_programs": {"cyber": "standard"},
    "background": True,
    "background_options": {"completion_window": "soonest"},
    "context_management": [{"type": "compaction"}],
    "conversation": "conv_1",
    "image": {"context_compression": "auto"},
    "max_tool_calls": 3,
    "moderation": {"model": "omni-moderation-latest"},
    "prompt": {"id": "pmpt_1"},
    "prompt_cache_options": {"mode": "explicit"},
}

# A value of each parameter that is honoured, and what the model's server gets for it: a field and its value.
PASSED_ON: dict[str, tuple[Any, str, Any]] = {
    "input": ("Hm?", "messages", [{"role": "user", "content": "Hm?"}]),
    "instructions": ("Be brief.", "messages", [{"role": "system", "content": "Be brief."},
                                               {"role": "user", "content": "Hello"}]),
    "max_output_tokens": (50, "max_tokens", 50),
    "parallel_tool_calls": (False, "parallel_tool_calls", False),
    "prompt_cache_key": ("k", "prompt_cache_key", "k"),
    "prompt_cache_retention": ("24h", "prompt_cache_retention", "24h"),
    "reasoning": ({"effort": "high"}, "reasoning_effort", "high"),
    "safety_identifier": ("s", "safety_identifier", "s"),
    "service_tier": ("priority", "service_tier", "priority"),
    "stream": (True, "stream", True),
    "temperature": (0.25, "temperature", 0.25),
    "text": ({"verbosity": "low"}, "verbosity", "low"),
    "tool_choice": ("required", "tool_choice", "required"),
    "tools": (TOOLS[:1], "tools", [{"type": "function", "function": {
        "name": "weather", "description": "D.", "parameters": {"type": "object"}, "strict": True}}]),
    "top_p": (0.5, "top_p", 0.5),
    "user": ("u", "user", "u"),
}  # fmt: skip

# What only the gateway acts on; where that is proved.
ACTED_ON = {
    "include": "test_include",
    "metadata": "test_metadata_stays_here",
    "model": "test_the_model_is_chosen",
    "previous_response_id": "tests/gateway/test_responses_kept.py",
    "store": "tests/gateway/test_responses_kept.py",
    "stream_options": "test_obfuscation_is_refused",
    "top_logprobs": "test_include",
    "truncation": "test_truncation",
}


def test_no_documented_parameter_is_forgotten() -> None:
    assert documented() == set(REFUSED) | set(PASSED_ON) | set(ACTED_ON)
    fields = set(ResponsesRequest.__struct_fields__)
    assert fields - {"cache_salt"} == set(PASSED_ON) | set(ACTED_ON)


async def test_what_is_not_there_is_refused_by_name(door: FrontDoor, agent: MockUpstream) -> None:
    for name, value in {**REFUSED, "no_such_parameter": 1}.items():
        response = await ask(door, **{name: value})
        error = response.json()["error"]
        assert (response.status_code, error["param"]) == (400, name), name
        assert error["code"] == ("unknown_parameter" if name == "no_such_parameter" else "unsupported_parameter")
        assert name in error["message"]
    assert agent.requests == 0


async def test_asking_for_nothing_is_not_refused(door: FrontDoor) -> None:
    nothing = dict.fromkeys(documented() - {"model", "input"})
    response = await ask(door, **{**nothing, "background": False})
    assert response.status_code == 200, response.text
    checked_response(response.json())


async def test_what_is_honoured_reaches_the_server(door: FrontDoor, agent: MockUpstream) -> None:
    for name, (value, field, expected) in PASSED_ON.items():
        more = {"tools": TOOLS} if name in ("tool_choice", "parallel_tool_calls") else {}
        response = await ask(door, **{**more, name: value})
        assert response.status_code == 200, (name, response.text)
        assert sent(agent)[field] == expected, name


async def test_the_model_is_chosen(door: FrontDoor, agent: MockUpstream) -> None:
    assert (await ask(door, "nobody")).status_code == 404
    assert (await ask(door, "plain")).headers["x-tierline-model"] == "plain"


async def test_metadata_stays_here(door: FrontDoor, agent: MockUpstream) -> None:
    """Servers of chat completions refuse it where they store nothing."""
    assert (await ask(door, metadata={"a": "b"})).json()["metadata"] == {"a": "b"}
    assert "metadata" not in sent(agent)


async def test_include(door: FrontDoor, agent: MockUpstream) -> None:
    for name in get_args(ResponseIncludable):
        response = await ask(door, include=[name])
        given = name in ("message.output_text.logprobs", "message.input_image.image_url")
        assert response.status_code == (200 if given else 400), name
        assert given or response.json()["error"]["param"] == "include[0]"
    await ask(door, include=["message.output_text.logprobs"], top_logprobs=3)
    assert [sent(agent)[name] for name in ("logprobs", "top_logprobs")] == [True, 3]
    refused = await ask(door, "plain", include=["message.output_text.logprobs"])
    assert refused.json()["error"]["param"] == "include[0]"
    assert (await ask(door, top_logprobs=3)).json()["error"]["param"] == "top_logprobs"


async def test_truncation(door: FrontDoor) -> None:
    assert (await ask(door, truncation="disabled")).status_code == 200
    assert (await ask(door, truncation="auto")).json()["error"]["param"] == "truncation"


async def test_obfuscation_is_refused(door: FrontDoor) -> None:
    assert (await ask(door, stream=True, stream_options={"include_obfuscation": False})).status_code == 200
    for body, param in (
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"stream": True, "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
    ):
        response = await ask(door, **body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_reasoning(door: FrontDoor) -> None:
    values = {
        "context": ("auto", "all_turns"), "effort": ("low", "enormous"), "generate_summary": (None, "auto"),
        "mode": ("standard", "pro"), "summary": ("detailed", "concise"),
    }  # fmt: skip
    assert set(values) == set(get_type_hints(Reasoning))
    for name, (good, bad) in values.items():
        assert (await ask(door, reasoning={name: good})).status_code == 200, name
        refused = await ask(door, reasoning={name: bad})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, f"reasoning.{name}")
    assert (await ask(door, reasoning={"depth": 1})).json()["error"]["param"] == "reasoning.depth"
    assert (await ask(door, "plain", reasoning={"effort": "low"})).json()["error"]["param"] == "reasoning.effort"


async def test_the_form_of_the_text(door: FrontDoor, agent: MockUpstream) -> None:
    await ask(door, text={"format": {"type": "json_object"}})
    assert sent(agent)["response_format"] == {"type": "json_object"}
    form = {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True, "description": "An answer."}
    await ask(door, text={"format": form})
    schema = {name: form[name] for name in ("name", "schema", "strict", "description")}
    assert sent(agent)["response_format"] == {"type": "json_schema", "json_schema": schema}
    await ask(door, text={"format": {"type": "text"}})
    assert "response_format" not in sent(agent)
    for text, param in (
        ({"format": {"type": "grammar"}}, "text.format.type"),
        ({"format": {"type": "json_schema", "schema": SCHEMA}}, "text.format.name"),
        ({"format": {"type": "json_schema", "name": "x"}}, "text.format.schema"),
        ({"format": {"type": "json_object", "schema": SCHEMA}}, "text.format.schema"),
        ({"tone": "kind"}, "text.tone"),
        ({"verbosity": "endless"}, "text.verbosity"),
    ):
        response = await ask(door, text=text)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    refused = await ask(door, "plain", text={"format": {"type": "json_object"}})
    assert refused.json()["error"]["param"] == "text.format"


async def test_tools_of_other_types_are_refused(door: FrontDoor) -> None:
    others = types_of(ToolParam) - {"function"}
    assert len(others) > 10
    for kind in others:
        response = await ask(door, tools=[{"type": kind, "name": "x"}])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools[0].type")
        assert kind in response.json()["error"]["message"]


async def test_what_tools_can_say(door: FrontDoor) -> None:
    for name, value in {
        "allowed_callers": ["programmatic"], "async": True, "defer_loading": True, "output_schema": {}, "extra": 1,
        "strict": "yes", "parameters": [], "description": 5,
    }.items():  # fmt: skip
        response = await ask(door, tools=[{"type": "function", "name": "x", name: value}])
        assert (response.status_code, response.json()["error"]["param"]) == (400, f"tools[0].{name}")
    assert (await ask(door, tools=[{"type": "function"}])).json()["error"]["param"] == "tools[0].name"


async def test_tool_choice(door: FrontDoor, agent: MockUpstream) -> None:
    named = {"type": "function", "name": "now"}
    for choice, expected, tools in (
        ("auto", "auto", 2),
        ("none", "none", 2),
        (named, {"type": "function", "function": {"name": "now"}}, 2),
        ({"type": "allowed_tools", "mode": "auto", "tools": [named]}, "auto", 1),
        ({"type": "allowed_tools", "mode": "required", "tools": [named]}, "required", 1),
    ):
        response = await ask(door, tools=TOOLS, tool_choice=choice)
        assert response.json()["tool_choice"] == choice
        checked_response(response.json())
        asked = sent(agent)
        assert (asked["tool_choice"], len(asked["tools"])) == (expected, tools)
    for choice in ("auto", "none"):  # without tools they ask for nothing
        assert (await ask(door, tool_choice=choice)).status_code == 200
        assert "tool_choice" not in sent(agent)
    for choice, param in (
        ("maybe", "tool_choice"),
        ({"type": "function"}, "tool_choice.name"),
        ({"type": "function", "name": "other"}, "tool_choice.name"),
        ({"type": "file_search"}, "tool_choice"),
        ({"type": "custom", "name": "now"}, "tool_choice"),
        ({"type": "mcp", "server_label": "x"}, "tool_choice"),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}, "tool_choice.tools[0]"),
    ):
        response = await ask(door, tools=TOOLS, tool_choice=choice)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), choice
    assert (await ask(door, tool_choice="required")).json()["error"]["param"] == "tool_choice"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"model": None}, "model"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": "5"}, "max_output_tokens"),
        ({"max_output_tokens": 901}, "max_output_tokens"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"instructions": ["x"]}, "instructions"),
        ({"store": "yes"}, "store"),
        ({"stream": "yes"}, "stream"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"prompt_cache_retention": "1h"}, "prompt_cache_retention"),
    ],
)
async def test_bad_values_name_the_field(door: FrontDoor, changes: dict[str, Any], param: str) -> None:
    response = await ask(door, **changes)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] in (param, f"{param}[...]")
    assert response.json()["error"]["request_id"] == response.headers["x-request-id"]


async def test_an_output_limit_of_the_model_counts_where_none_is_named(door: FrontDoor, agent: MockUpstream) -> None:
    await ask(door)
    assert sent(agent)["max_tokens"] == 900
