"""`POST /v1/messages`: the official Anthropic SDK against the gateway, before servers of either dialect."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.mock_agent import ARGUMENTS, TEXT, THOUGHT, AgentWire
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

TOOLS: list[Any] = [
    {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}},
    {"name": "now", "input_schema": {"type": "object"}},
]
HELLO: list[Any] = [{"role": "user", "content": "Name three rivers."}]
ALL = ["tools", "reasoning", "json_schema", "vision"]


@pytest_asyncio.fixture
async def agent():
    upstream = MockUpstream(AgentWire())
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest_asyncio.fixture
async def door(tmp_path, monkeypatch, agent, claude):
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    model = {"tier": "small", "backend": "agent", "capabilities": ALL, "price": PRICE}
    models = {
        "agent": model,
        "cut": {**model, "upstream_model": "cut,after=2,chunks=4"},
        "small": {**model, "capabilities": []},
        "claude": {**model, "backend": "claude", "max_output_tokens": 5000},
    }
    document = configuration({"agent": agent, "claude": claude}, models)
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    async with front_door(tmp_path, document) as door:
        yield door


@pytest_asyncio.fixture
async def sdk(door: FrontDoor):
    """The SDK as an application has it: its key goes into `x-api-key`."""
    async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.token, max_retries=0) as client:
        yield client


def sent(upstream: MockUpstream) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(upstream.records[-1].body)
    return found


# A server of another dialect.


async def test_a_message(door: FrontDoor, sdk: anthropic.AsyncAnthropic) -> None:
    answer = await sdk.messages.create(model="agent", max_tokens=50, messages=HELLO)
    assert [block.type for block in answer.content] == ["text"]
    assert answer.content[0].text == TEXT
    assert (answer.stop_reason, answer.stop_sequence, answer.role) == ("end_turn", None, "assistant")
    usage = answer.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.output_tokens) == (12, 8, 9)
    (row,) = await door.rows()
    assert (row["outcome"], row["input_tokens"], row["cached_input_tokens"], row["output_tokens"]) == (
        "success", 20, 8, 9,
    )  # fmt: skip


async def test_a_stream_says_what_the_whole_answer_says(sdk: anthropic.AsyncAnthropic) -> None:
    options: dict[str, Any] = {"model": "agent", "max_tokens": 5000, "messages": HELLO}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    whole = await sdk.messages.create(**options)
    async with sdk.messages.stream(**options) as stream:
        texts = [text async for text in stream.text_stream]
        streamed = await stream.get_final_message()
    assert "".join(texts) == TEXT
    for message in (whole, streamed):
        assert [block.type for block in message.content] == ["thinking", "text"]
        assert message.content[0].thinking == THOUGHT
    assert streamed.usage.model_dump(exclude_none=True) == whole.usage.model_dump(exclude_none=True)
    assert streamed.stop_reason == whole.stop_reason == "end_turn"


@pytest.mark.parametrize("stream", [False, True])
async def test_tools_there_and_back(
    door: FrontDoor, sdk: anthropic.AsyncAnthropic, agent: MockUpstream, stream
) -> None:
    options: dict[str, Any] = {"model": "agent", "max_tokens": 50, "tools": TOOLS}
    if stream:
        async with sdk.messages.stream(messages=HELLO, **options) as running:
            answer = await running.get_final_message()
    else:
        answer = await sdk.messages.create(messages=HELLO, **options)
    assert answer.stop_reason == "tool_use"
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [(call.name, call.input) for call in calls] == [("weather", msgspec.json.decode(ARGUMENTS)), ("now", {})]
    assert len({call.id for call in calls}) == 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": f"of {call.name}"} for call in calls]
    turns = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in answer.content]},
        {"role": "user", "content": [*results, {"type": "text", "text": "Well?"}]},
    ]
    await sdk.messages.create(messages=turns, **options)
    messages = sent(agent)["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == [call.id for call in calls]
    assert [message["content"] for message in messages[2:]] == ["of weather", "of now", "Well?"]


async def test_what_a_request_becomes(sdk: anthropic.AsyncAnthropic, agent: MockUpstream) -> None:
    await sdk.messages.create(
        model="agent",
        max_tokens=50,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}},
                    {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "A text"}},
                    {"type": "text", "text": "What is it?"},
                ],
            }
        ],
        stop_sequences=["!"],
        tools=TOOLS,
        tool_choice={"type": "tool", "name": "now", "disable_parallel_tool_use": True},
        metadata={"user_id": "u-1"},
        output_config={"format": {"type": "json_schema", "schema": {"type": "object"}}},
        extra_body={"temperature": 0.3, "top_k": 7},
    )
    asked = sent(agent)
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert asked["messages"] == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "user",
            "content": [image, {"type": "text", "text": "A text"}, {"type": "text", "text": "What is it?"}],
        },
    ]
    assert asked["tools"][0] == {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {"type": "object", "properties": {}},
        },
    }
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "now"}}
    assert asked["response_format"]["json_schema"]["schema"] == {"type": "object"}
    simple = ("max_tokens", "stop", "user", "temperature", "top_k", "parallel_tool_calls")
    assert [asked[name] for name in simple] == [50, ["!"], "u-1", 0.3, 7, False]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_it_is_named(sdk: anthropic.AsyncAnthropic, stream: bool) -> None:
    options: dict[str, Any] = {"model": "agent", "max_tokens": 50, "messages": HELLO, "stop_sequences": ["Danube"]}
    if stream:
        async with sdk.messages.stream(**options) as running:
            answer = await running.get_final_message()
    else:
        answer = await sdk.messages.create(**options)
    assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", "Danube")
    assert answer.content[0].text == TEXT[: TEXT.index("Danube")]


async def test_the_events_come_in_order(door: FrontDoor) -> None:
    body = {"model": "agent", "max_tokens": 5000, "messages": HELLO, "stream": True, "tools": TOOLS}
    body["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    response = await door.client.post("/v1/messages", json=body, headers=door.headers())
    events = [event.split("\n") for event in response.text.strip().split("\n\n")]
    said = [
        (lines[0].removeprefix("event: "), msgspec.json.decode(lines[1].removeprefix("data: "))) for lines in events
    ]
    assert all(name == data["type"] for name, data in said)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    kinds = [name for i, (name, _) in enumerate(said) if not i or name != said[i - 1][0]]
    assert kinds == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    assert [data["index"] for name, data in said if name == "content_block_start"] == [0, 1, 2]
    assert said[-2][1]["tierline"]["model"] == "agent"


async def test_a_broken_stream_ends_with_an_error(door: FrontDoor, sdk: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.APIStatusError, match="broke off"):
        async with sdk.messages.stream(model="cut", max_tokens=50, messages=HELLO) as stream:
            await stream.get_final_message()
    body = {"model": "cut", "max_tokens": 50, "messages": HELLO, "stream": True}
    response = await door.client.post("/v1/messages", json=body, headers=door.headers())
    assert "event: error" in response.text
    assert "message_stop" not in response.text
    assert [row["outcome"] for row in await door.rows()] == ["cut", "cut"]


# A server of the same dialect.


async def test_its_own_dialect_passes_unchanged(door: FrontDoor, claude: MockUpstream) -> None:
    body = {
        "model": "claude",
        "max_tokens": 2000,
        "messages": [
            {"role": "user", "content": "Hm?"},
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "mine", "signature": "s"}]},
            {"role": "user", "content": [{"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}}]},
        ],
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
    }
    betas = {"anthropic-beta": "context-management-2025-06-27"}
    response = await door.client.post("/v1/messages", json=body, headers=door.headers() | betas)
    assert response.status_code == 200, response.text
    assert sent(claude) == body
    assert claude.records[-1].headers["anthropic-beta"] == betas["anthropic-beta"]
    answer = response.json()
    assert answer["content"][0]["signature"]
    assert answer["id"] == "msg_mock0001"
    streamed = await door.client.post("/v1/messages", json={**body, "stream": True}, headers=door.headers())
    async with httpx.AsyncClient() as client:
        direct = await client.post(
            f"{claude.base_url}/messages",
            json={**body, "stream": True},
            headers={"x-api-key": "k", "anthropic-version": "2023-06-01"},
        )
    assert re.sub(r"t=\d+", "t", streamed.text) == re.sub(r"t=\d+", "t", direct.text)


async def test_what_only_that_dialect_can_say_needs_such_a_server(door: FrontDoor) -> None:
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = {"model": "agent", "max_tokens": 50, "messages": HELLO, "tools": [search]}
    response = await door.client.post("/v1/messages", json=body, headers=door.headers())
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "tools[0].type")
    assert "claude" in error["message"]


# Errors.


async def test_errors_are_in_the_words_of_the_dialect(door: FrontDoor, sdk: anthropic.AsyncAnthropic) -> None:
    with pytest.raises(anthropic.AuthenticationError) as refused:
        await sdk.with_options(api_key="tl-wrong").messages.create(model="agent", max_tokens=5, messages=HELLO)
    assert refused.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError):
        await sdk.messages.create(model="nobody", max_tokens=5, messages=HELLO)
    poor = await door.key(requests_per_minute=1)
    await sdk.with_options(api_key=poor).messages.create(model="agent", max_tokens=5, messages=HELLO)
    with pytest.raises(anthropic.RateLimitError) as limited:
        await sdk.with_options(api_key=poor).messages.create(model="agent", max_tokens=5, messages=HELLO)
    assert int(limited.value.response.headers["retry-after"]) >= 1


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"text": "x"}]}]}, "messages[0].content[0].type"),
        ({"temperature": 1.5}, "temperature"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "auto"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"stop_sequences": [""]}, "stop_sequences"),
    ],
)
async def test_bad_input_names_the_field(door: FrontDoor, changes: dict[str, Any], param: str) -> None:
    body = {"model": "agent", "max_tokens": 50, "messages": HELLO, **changes}
    response = await door.client.post("/v1/messages", json=body, headers=door.headers())
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert response.json()["request_id"] == response.headers["x-request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/drafts", 404, "not_found_error"),
    ],
)
async def test_what_is_not_there_is_said_in_the_dialect(
    door: FrontDoor, method: str, path: str, status: int, kind: str
) -> None:
    response = await door.client.request(method, path, headers=door.headers())
    said = response.json()
    assert (response.status_code, said["type"], said["error"]["type"]) == (status, "error", kind)
    assert said["request_id"] == response.headers["x-request-id"]
