"""A chat client in front of an Anthropic server: the answer is a chat completion, and the books are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from bench.mock_upstream import MockUpstream
from gateway import settings
from policies.yamlfile import InvalidFile
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
MODEL = {
    "tier": "small",
    "backend": "claude",
    "capabilities": ["tools", "reasoning", "json_schema"],
    "max_output_tokens": 3000,
    "price": PRICE,
}


@pytest.fixture
def document(monkeypatch, claude, upstream):
    """The settings of a gateway with all of its models on the Anthropic server."""
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    models = {
        "mock": MODEL,
        "bits": {**MODEL, "upstream_model": "claude,chunks=3,piece=40"},
        "cut": {**MODEL, "upstream_model": "cut,after=5"},
        "full": {**MODEL, "upstream_model": "status,status=529"},
    }
    made = configuration({"claude": claude, "plain": upstream}, models)
    made["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY", "attempts": 1}
    for backend in made["backends"].values():
        backend["timeouts"] = {"connect_s": 20}
    return made


@pytest_asyncio.fixture
async def door(tmp_path, document):
    async with front_door(tmp_path, document) as opened:
        yield opened


def sent(upstream: MockUpstream) -> Any:
    return msgspec.json.decode(upstream.records[-1].body)


def events(text: str) -> list[str]:
    return [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]


async def test_a_plain_answer(door: FrontDoor, claude: MockUpstream) -> None:
    answer = await door.chat(tools=TOOLS, reasoning_effort="low")
    assert answer.status_code == 200
    completion = ChatCompletion.model_validate_json(answer.content, strict=True)
    assert [call.function.name for call in completion.choices[0].message.tool_calls] == ["weather", "now"]
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.usage.prompt_tokens == 20
    assert answer.json()["choices"][0]["message"]["reasoning_content"] == "Which rivers come to mind?"
    assert sent(claude)["max_tokens"] == 3000  # the model's, because the client names none
    assert claude.records[-1].headers["x-api-key"] == "sk-ant-secret"
    [row] = await door.rows()
    assert (row["input_tokens"], row["cached_input_tokens"], row["output_tokens"]) == (20, 5, 34)
    assert (row["outcome"], row["usage_source"]) == ("success", "reported")
    assert (row["cache_write_tokens"], row["reasoning_tokens"]) == (3, 9)


async def test_the_last_event_stays_the_last_however_late_it_comes(door: FrontDoor) -> None:
    """The one before it, which ends the answer, is held back until the row is written: nothing overtakes it."""
    body = {"model": "bits", "max_tokens": 50, "stream": True, "messages": [{"role": "user", "content": "Hello"}]}
    headers = {"x-api-key": door.token, "anthropic-version": "2023-06-01"}
    answer = await door.client.post("/v1/messages", json=body, headers=headers)
    names = [line for line in answer.text.split("\n") if line.startswith("event: ")]
    assert names[-2:] == ["event: message_delta", "event: message_stop"]
    assert names.count("event: message_stop") == 1


@pytest.mark.parametrize("usage", [True, False])
async def test_a_stream(door: FrontDoor, usage: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if usage else {}
    answer = await door.chat(tools=TOOLS, reasoning_effort="low", stream=True, **options)
    *datas, done = events(answer.text)
    assert done == "[DONE]"
    assert "event:" not in answer.text
    chunks = [ChatCompletionChunk.model_validate_json(data, strict=True) for data in datas]
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [usage]
    if usage:
        last = chunks.pop()
        assert (last.choices, last.usage.prompt_tokens, last.usage.completion_tokens) == ([], 20, 34)
        assert last.tierline["cost_usd"] > 0
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for call in chunk.choices[0].delta.tool_calls or []:
            arguments[call.index] = arguments.get(call.index, "") + (call.function.arguments or "")
    assert arguments == {0: '{"city":"Köln","days":3}', 1: "{}"}
    [row] = await door.rows()
    assert (row["input_tokens"], row["output_tokens"], row["usage_source"]) == (20, 34, "reported")


async def test_a_stream_that_is_cut_is_billed_by_what_came(door: FrontDoor) -> None:
    answer = await door.chat("cut", stream=True)
    assert "stream_cut" in answer.text
    assert "[DONE]" not in answer.text
    [row] = await door.rows()
    assert (row["outcome"], row["usage_source"]) == ("cut", "counted")
    assert (row["input_tokens"], row["cached_input_tokens"]) == (20, 5)  # as reported at the start
    text = "".join(msgspec.json.decode(d)["choices"][0]["delta"].get("content", "") for d in events(answer.text)[:-1])
    assert row["output_tokens"] == max(5, -(-len(text) // 4))


async def test_an_overloaded_server_is_unavailable(tmp_path: Path, document: dict[str, Any]) -> None:
    del document["models"]["mock"], document["models"]["cut"]  # nobody else to answer
    async with front_door(tmp_path, document) as door:
        answer = await door.chat("full")
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "backend_overloaded"


async def test_what_it_has_no_word_for(door: FrontDoor, claude: MockUpstream) -> None:
    answer = await door.chat(seed=7)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unsupported_parameter", "seed")
    assert "seed" in error["message"]
    assert not claude.records
    assert await door.rows() == []


async def test_another_server_has_the_word(tmp_path: Path, document: dict[str, Any], upstream: MockUpstream) -> None:
    document["models"]["plain"] = {**MODEL, "backend": "plain"}
    async with front_door(tmp_path, document) as door:
        answer = await door.chat("auto", seed=7)
    assert answer.status_code == 200
    assert answer.headers["x-tierline-backend"] == "plain"
    assert sent(upstream)["seed"] == 7


def problems(tmp_path: Path, **backend: Any) -> str:
    document = {"models": {"m": {"tier": "small", "backend": "b"}}, "backends": {"b": backend}}
    path = tmp_path / "tierline.yaml"
    path.write_bytes(msgspec.yaml.encode(document))
    with pytest.raises(InvalidFile) as caught:
        settings.load(path)
    return str(caught.value)


def test_a_model_there_needs_a_limit(tmp_path: Path) -> None:
    assert "max_output_tokens" in problems(tmp_path, base_urls=["http://a/v1"], dialect="anthropic")


def test_the_engine_speaks_openai(tmp_path: Path) -> None:
    assert "dialect" in problems(tmp_path, engine="e", dialect="anthropic")


def test_an_unknown_dialect_is_refused(tmp_path: Path) -> None:
    assert "'openai' or 'anthropic'" in problems(tmp_path, base_urls=["http://a/v1"], dialect="gemini")
