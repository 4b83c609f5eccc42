"""Responses and what lies beside them: answers from the cache, servers of another dialect, repeated requests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.cache.conftest import Process
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door
from tests.gateway.responses_types import checked_response, events, folded

POLICY = """\
version: 1
name: default
owner: tests
routes: [{tier: small}]
cache: {mode: exact}
"""
HELLO = "Name three rivers of Europe."


@pytest.fixture(scope="module")
def cache_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    process = Process(tmp_path_factory.mktemp("cache") / "s")
    process.start()
    yield process.socket
    assert process.end() == 0


@pytest_asyncio.fixture
async def door(
    tmp_path: Path, upstream: MockUpstream, claude: MockUpstream, cache_socket: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FrontDoor]:
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    model: dict[str, Any] = {"tier": "small", "backend": "up", "max_output_tokens": 5000, "price": PRICE}
    models = {"mock": model, "claude": {**model, "backend": "claude", "capabilities": ["reasoning", "tools"]}}
    document = configuration({"up": upstream, "claude": claude}, models)
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    document["cache"] = {"lookup_timeout_ms": 30_000.0}
    (tmp_path / "var" / "run").mkdir(parents=True)
    (tmp_path / "var" / "run" / "cache.sock").symlink_to(cache_socket)
    async with front_door(tmp_path, document, policy=POLICY) as running:
        assert running.services.cache is not None
        assert await running.services.cache.wait_connected(60)
        yield running


async def ask(door: FrontDoor, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    body = {"model": "mock", "input": HELLO, "temperature": 0, **body}
    return await door.client.post("/v1/responses", json=body, headers=door.headers() | (headers or {}))


async def test_an_answer_from_the_cache_is_a_response_of_its_own(door: FrontDoor, upstream: MockUpstream) -> None:
    first = await ask(door)
    assert first.headers["x-tierline-cache"] == "miss"
    streamed, whole = await ask(door, stream=True), await ask(door)
    assert {response.headers["x-tierline-cache"] for response in (streamed, whole)} == {"exact"}
    assert upstream.requests == 1
    told = events(streamed)
    assert folded(told) == told[-1]["response"]["output"]
    assert len([event for event in told if event["type"] == "response.output_text.delta"]) > 5
    answers = [first.json(), told[-1]["response"], whole.json()]
    for answer in answers:
        checked_response(answer)
        assert answer["output"][0]["content"] == answers[0]["output"][0]["content"]
        assert answer["usage"] == answers[0]["usage"]
    assert len({answer["id"] for answer in answers}) == 3
    assert told[-1]["tierline"]["cache"] == "exact"
    assert [row["outcome"] for row in await door.rows()] == ["success", "cache_hit", "cache_hit"]
    # Each can be gone on from; the conversation as a whole is another question.
    for answer in answers:
        again = await ask(door, input="And lakes?", previous_response_id=answer["id"])
        assert again.status_code == 200
    assert upstream.requests == 2, "the same conversation, whichever of the three it went through"


async def test_a_chat_and_a_response_share_answers(door: FrontDoor, upstream: MockUpstream) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": HELLO}]
    chat = await door.chat("mock", messages=said, temperature=0)
    assert chat.headers["x-tierline-cache"] == "miss"
    answer = await ask(door, instructions="Be brief.")
    assert answer.headers["x-tierline-cache"] == "exact"
    text = answer.json()["output"][0]["content"][0]["text"]
    assert text == chat.json()["choices"][0]["message"]["content"]


async def test_the_stream_fills_the_cache_too(door: FrontDoor, upstream: MockUpstream) -> None:
    told = events(await ask(door, stream=True))
    whole = await ask(door)
    assert whole.headers["x-tierline-cache"] == "exact"
    assert whole.json()["output"][0]["content"] == told[-1]["response"]["output"][0]["content"]


async def test_a_server_of_another_dialect_answers_as_well(door: FrontDoor, claude: MockUpstream) -> None:
    options: dict[str, Any] = {"model": "claude", "reasoning": {"effort": "low"}, "temperature": None}
    told = events(await ask(door, stream=True, instructions="Be brief.", **options))
    output = folded(told)
    assert [item["type"] for item in output] == ["reasoning", "message"]
    checked_response(told[-1]["response"])
    sent = msgspec.json.decode(claude.records[-1].body)
    assert (sent["system"], sent["messages"][0]["role"]) == ("Be brief.", "user")
    whole = (await ask(door, **options)).json()
    checked_response(whole)
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message"]
    await ask(door, previous_response_id=whole["id"], input="And?", **options)
    roles = [turn["role"] for turn in msgspec.json.decode(claude.records[-1].body)["messages"]]
    assert roles == ["user", "assistant", "user"]
    refused = await ask(door, model="claude", prompt_cache_key="k", text={"verbosity": "low"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "text.verbosity")


async def test_the_salt_keeps_responses_apart(door: FrontDoor, upstream: MockUpstream) -> None:
    for salt in ("a", "b", None):
        assert (await ask(door, cache_salt=salt)).headers["x-tierline-cache"] == "miss"
    assert (await ask(door, cache_salt="a")).headers["x-tierline-cache"] == "exact"


async def test_a_repeated_request_is_one_answer(door: FrontDoor, upstream: MockUpstream) -> None:
    once = {"idempotency-key": "once", "x-tierline-cache": "no-store"}
    first, again = [(await ask(door, once)).json() for _ in range(2)]
    assert again == first
    assert upstream.requests == 1
    listed = await door.client.get(f"/v1/responses/{first['id']}", headers=door.headers())
    assert listed.json() == first
