"""Streams that are held back until they are checked: byte by byte what they would have been, in every dialect."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from bench.mock_agent import ARGUMENTS, TEXT, AgentWire
from gateway.escalating import holding
from tests.gateway.front_door import events, eventually
from tests.gateway.tiered import tiered

HELD = "escalate: {when: [refusal, empty], streams: buffer}\n"
ROUTES = "routes:\n  - {when: '\"plain=1\" in tags', tier: medium, escalate: {when: []}}\n  - tier: small\n"
REFUSAL = "I'm sorry, but I can't help with that."
HELLO: list[Any] = [{"role": "user", "content": "Name three rivers."}]
WEATHER = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object", "properties": {}}}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}

BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": HELLO, "tools": [FUNCTION]}),
    ("/v1/responses", {"input": "Name three rivers.", "store": False}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 500}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 500, "tools": [WEATHER]}),
]


async def test_what_is_held_back_comes_out_byte_by_byte(tmp_path: Path) -> None:
    async with tiered(tmp_path, HELD, routes=ROUTES, wires={"medium": AgentWire()}) as house:
        house.says("small", REFUSAL)
        for path, body in BODIES:
            found = []
            for tags in ("plain=1", "plain=0"):
                answer = await house.door.client.post(
                    path,
                    json={"model": "auto", "stream": True, **body},
                    headers={**house.door.headers(), "x-tierline-tags": tags},
                )
                assert answer.status_code == 200, answer.text
                found.append((answer, _same(answer.text, answer.headers["x-request-id"])))
            (plain, expected), (held, got) = found
            assert "x-tierline-escalated" not in plain.headers
            assert held.headers["x-tierline-escalated"] == "small>medium;refusal"
            assert got == expected
            assert got.count("\n\n") > 3


def _same(text: str, request_id: str) -> str:
    """Without what differs from one request to the next: its id, its time, its cost."""
    text = text.replace(request_id.removeprefix("req-").replace("-", ""), "ID").replace(request_id, "ID")
    return re.sub(r',"escalated":"[^"]*"', "", re.sub(r'("cost_usd"|"\w+_at"):[\d.e-]+', r"\1:0", text))


async def test_the_sdks_read_it(tmp_path: Path) -> None:
    async with tiered(tmp_path, HELD, wires={"medium": AgentWire()}) as house:
        house.says("small", REFUSAL)
        door = house.door
        async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="auto", messages=HELLO, stream=True, stream_options={"include_usage": True}
                )
            ]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
            assert chunks[-1].usage is not None
            assert chunks[-1].tierline["escalated"] == "small>medium;refusal"  # type: ignore[attr-defined]
            async with client.responses.stream(model="auto", input="Name three rivers.") as stream:
                assert (await stream.get_final_response()).output_text == TEXT
        async with anthropic.AsyncAnthropic(base_url=door.url, api_key=door.token, max_retries=0) as sdk:
            tools: list[Any] = [WEATHER]
            async with sdk.messages.stream(model="auto", max_tokens=99, messages=HELLO, tools=tools) as spoken:
                message = await spoken.get_final_message()
            assert message.stop_reason == "tool_use"
            (block,) = [block for block in message.content if block.type == "tool_use"]
            assert block.input == json.loads(ARGUMENTS)
        assert {row["outcome"] for row in await door.rows() if row["tier"] == "small"} == {"escalated"}


async def test_a_stream_that_is_not_held_back_is_not_checked(tmp_path: Path) -> None:
    async with tiered(tmp_path, "escalate: {when: [refusal]}\n") as house:
        house.says("small", REFUSAL)
        answer = await house.door.chat("auto", stream=True)
        assert "x-tierline-escalated" not in answer.headers
        assert house.asked()["medium"] == 0


async def test_what_outgrows_the_bound_goes_on_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "MOST_BYTES", 600)
    async with tiered(tmp_path, HELD) as house:
        house.says("small", REFUSAL, deltas=[{"content": f"{REFUSAL} "} for _ in range(40)])
        answer = await house.door.chat("auto", stream=True)
        assert "x-tierline-escalated" not in answer.headers
        said = [e["choices"][0]["delta"].get("content", "") for e in events(answer.text)[:-1] if e["choices"]]
        assert "".join(said) == f"{REFUSAL} " * 40
        assert events(answer.text)[-1] == "[DONE]"
        (row,) = await house.door.rows()
        assert (row["outcome"], row["output_tokens"]) == ("success", 2)


async def test_who_waits_long_gets_signs_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holding, "PATIENCE_S", 0.05)
    server = {"server": {"port": 0, "drain_seconds": 1, "keep_alive_seconds": 0.2}}
    wires = {"medium": AgentWire()}
    async with tiered(tmp_path, HELD, wires=wires, settings=server) as house:
        house.says("small", REFUSAL)
        house.servers["medium"].override = "answer,chunks=4,interval_ms=500"
        answer = await house.door.chat("auto", stream=True, stream_options={"include_usage": True})
        assert "x-tierline-tier" not in answer.headers  # nobody knew it yet
        body = answer.content
        assert body.startswith(b": keep-alive\n\n")
        assert body.endswith(b"data: [DONE]\n\n")
        last = events(body.decode().replace(": keep-alive\n\n", ""))[-2]
        assert (last["tierline"]["tier"], last["tierline"]["escalated"]) == ("medium", "small>medium;refusal")


async def test_an_error_after_signs_of_life_is_the_streams_last_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "PATIENCE_S", 0.0)
    error = "escalate: {when: [refusal], streams: buffer, otherwise: error}\n"
    async with tiered(tmp_path, error) as house:
        house.says("small", REFUSAL)
        house.servers["medium"].override = "status,status=500,delay_ms=200"
        answer = await house.door.chat("auto", stream=True)
        assert answer.status_code == 200
        assert events(answer.text)[-1]["error"]["code"] == "answer_failed_checks"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_stops_the_step_that_runs(tmp_path: Path, stream: bool) -> None:
    async with tiered(tmp_path, HELD) as house:
        house.says("small", REFUSAL)
        house.servers["medium"].override = "stall,after=1" if stream else "hang"
        asked = asyncio.create_task(house.door.chat("auto", stream=stream))
        await house.servers["medium"].until(lambda: house.servers["medium"].requests == 1)
        asked.cancel()
        await house.servers["medium"].until(lambda: house.servers["medium"].records[-1].outcome == "client-gone")
        await eventually(lambda: house.door.services.limiter.open_holds == 0)
        rows = await house.door.rows()
        assert [(row["tier"], row["outcome"]) for row in rows] == [("small", "escalated"), ("medium", "cancelled")]


async def test_a_stream_that_breaks_while_it_is_held_back_is_an_error_where_there_is_no_other(tmp_path: Path) -> None:
    async with tiered(tmp_path, HELD) as house:
        house.servers["small"].override = "cut,after=2"
        answer = await house.door.chat("auto", stream=True)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "stream_cut")
        (row,) = await house.door.rows()
        assert row["outcome"] == "cut"
