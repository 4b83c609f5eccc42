"""Signs of life on streams that are silent for long, as clients see them: raw, and through the official SDKs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import pytest_asyncio

from bench.mock_anthropic import AnthropicWire
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
SLOW = "mock,chunks=3,interval_ms=400"
HELLO = "Name three rivers."


@pytest_asyncio.fixture
async def claude() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(AnthropicWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, upstream: MockUpstream, claude: MockUpstream
) -> AsyncIterator[FrontDoor]:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    model = {"tier": "small", "backend": "up", "price": PRICE, "max_output_tokens": 100}
    models = {
        "slow": {**model, "upstream_model": SLOW},
        "hesitant": {**model, "upstream_model": "mock,first_ms=900"},
        "silent": {**model, "upstream_model": "stall"},
        "claude": {**model, "backend": "claude", "upstream_model": SLOW},
    }
    document = configuration({"up": upstream, "claude": claude}, models)
    document["server"]["keep_alive_seconds"] = 0.2
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    async with front_door(tmp_path, document) as door:
        yield door


def events(body: bytes) -> list[bytes]:
    assert body.endswith(b"\n\n")
    return [part + b"\n\n" for part in body[:-2].split(b"\n\n")]


async def test_comments_come_between_whole_events(door: FrontDoor) -> None:
    answer = await door.chat("slow", stream=True)
    found = events(answer.content)
    assert found[0].startswith(b"data: "), "nothing comes before the first event"
    assert found[-1] == b"data: [DONE]\n\n"
    assert found.count(COMMENT) >= 2
    assert all(one.startswith(b"data: ") for one in found if one != COMMENT)
    assert sum(one.startswith(b'data: {"id"') for one in found) == 1 + 3 + 1  # role, contents, finish reason


@pytest.mark.parametrize("model", ["slow", "claude"])
async def test_messages_get_pings(door: FrontDoor, model: str) -> None:
    body = {"model": model, "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": HELLO}]}
    headers = {"x-api-key": door.token, "anthropic-version": "2023-06-01"}
    answer = await door.client.post("/v1/messages", json=body, headers=headers)
    found = events(answer.content)
    assert found[0].startswith(b"event: message_start"), "nothing comes before the first event"
    assert found[-1].startswith(b"event: message_stop")
    assert found.count(PING) >= 2
    assert all(one.startswith(b"event: ") for one in found)


async def test_the_openai_sdk_does_not_notice(door: FrontDoor) -> None:
    async with openai.AsyncOpenAI(base_url=door.url + "/v1", api_key=door.token, max_retries=0) as sdk:
        stream = await sdk.chat.completions.create(
            model="slow", stream=True, messages=[{"role": "user", "content": HELLO}]
        )
        chunks = [chunk async for chunk in stream]
    said = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert len(said) == 3
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("model", ["slow", "claude"])
async def test_the_anthropic_sdk_does_not_notice(door: FrontDoor, model: str) -> None:
    async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.token, max_retries=0) as sdk:
        asked: list[Any] = [{"role": "user", "content": HELLO}]
        async with sdk.messages.stream(model=model, max_tokens=50, messages=asked) as stream:
            said = [text async for text in stream.text_stream]
            message = await stream.get_final_message()
    assert len(said) == 3
    assert message.stop_reason == "end_turn"


async def test_waiting_for_the_first_token_commits_nothing(door: FrontDoor) -> None:
    """So that a failure before it still has a status of its own."""
    answer = await door.chat("hesitant", stream=True)
    assert events(answer.content)[0].startswith(b"data: "), "a second of silence, and no comment"
    failed = await door.chat("silent", stream=True)
    assert (failed.status_code, failed.json()["error"]["code"]) == (504, "backend_timeout")


async def test_a_plain_answer_gets_none(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "mock,delay_ms=900"
    answer = await door.chat("slow")
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
