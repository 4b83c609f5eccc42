"""Guardrails at a running gateway: what models get, what clients get, and what is on record, in every dialect."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from sqlalchemy import select

from bench.mock_anthropic import AnthropicWire
from bench.mock_upstream import MockUpstream
from gateway.ledger.schema import notes
from tests.gateway.front_door import POLICY, PRICE, FrontDoor, configuration, events, eventually, front_door
from tests.gateway.script_wire import ScriptWire

MAIL = "{name: mail, personal_data: [email], action: redact}"
MODELS = {
    "mock": {"tier": "small", "backend": "up", "capabilities": ["tools", "logprobs"], "price": PRICE},
    "claude": {"tier": "medium", "backend": "claude", "price": PRICE, "max_output_tokens": 500},
    "vectors": {"kind": "embedding", "backend": "up", "price": PRICE},
}


@pytest.fixture
def script() -> ScriptWire:
    return ScriptWire()


@pytest.fixture
async def house(tmp_path: Path, script: ScriptWire, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    """Starts a gateway under guardrails, in front of a server of each dialect."""
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-test")
    up, claude = MockUpstream(script), MockUpstream(AnthropicWire())
    await up.start()
    await claude.start()
    async with contextlib.AsyncExitStack() as stack:

        async def start(guardrails: str) -> tuple[FrontDoor, MockUpstream]:
            document = configuration({"up": up, "claude": claude}, MODELS)
            document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
            policy = f"{POLICY}guardrails: {guardrails}\n"
            return await stack.enter_async_context(front_door(tmp_path, document, policy=policy)), up

        start.claude = claude  # type: ignore[attr-defined]
        yield start
    await up.stop()
    await claude.stop()


async def noted(door: FrontDoor) -> list[dict[str, Any]]:
    await door.services.writer.flush()
    async with door.services.database.read() as connection:
        found = await connection.execute(select(notes).where(notes.c.kind == "guardrail").order_by(notes.c.id))
        return [json.loads(row.json) for row in found]


def requests(text: str, model: str = "mock") -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": text}]
    parts = [{"type": "text", "text": text}]
    return [
        ("/v1/chat/completions", {"model": model, "messages": messages}),
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "user", "content": parts}]}),
        ("/v1/chat/completions", {"model": model, "messages": [{"role": "system", "content": text}, *messages]}),
        ("/v1/completions", {"model": "mock", "prompt": text}),
        ("/v1/responses", {"model": model, "input": text}),
        ("/v1/messages", {"model": model, "max_tokens": 50, "messages": messages}),
        ("/v1/messages", {"model": "claude", "max_tokens": 50, "system": text, "messages": messages[:1]}),
        ("/v1/embeddings", {"model": "vectors", "input": ["harmless", text]}),
    ]  # fmt: skip


# -- before ------------------------------------------------------------------------------------------------------------


async def test_a_request_that_may_not_pass_reaches_no_model(house: Any) -> None:
    door, up = await house("{before: [{name: a, phrases: [project phoenix], message: Not here.}]}")
    for path, body in requests("What became of Project  PHOENIX?"):
        answer = await door.client.post(path, json=body, headers=door.headers())
        assert answer.status_code == 400, (path, answer.text)
        error = answer.json()["error"]
        assert error["message"] == "Not here."
        assert error.get("code", "content_blocked") == "content_blocked"
    assert up.requests == house.claude.requests == 0
    assert await door.rows() == []
    assert await noted(door) == [{"when": "before", "rule": "a", "action": "deny", "found": {"a": 1}}] * 8
    page = (await door.client.get("/metrics")).text
    assert 'tierline_guardrail_findings_total{action="deny",policy="default",rule="a",when="before"} 8.0' in page
    assert (await door.chat()).status_code == 200


async def test_what_is_redacted_reaches_no_model_and_no_memory(house: Any) -> None:
    door, up = await house(f"{{before: [{MAIL}]}}")
    for path, body in requests("Write to jo@example.org, please"):
        answer = await door.client.post(path, json=body, headers=door.headers())
        assert answer.status_code == 200 or path == "/v1/embeddings", (path, answer.text)
        sent = (house.claude if body["model"] == "claude" else up).records[-1].body.decode()
        assert "jo@example.org" not in sent
        assert "Write to [email], please" in sent
    answer = await door.client.post(
        "/v1/responses", json={"model": "mock", "input": "I am jo@example.org", "store": True}, headers=door.headers()
    )
    kept = await door.client.get(f"/v1/responses/{answer.json()['id']}/input_items", headers=door.headers())
    assert "[email]" in kept.text
    assert "jo@" not in kept.text
    assert {"when": "before", "rule": "mail", "action": "redact", "found": {"email": 1}} in await noted(door)


async def test_tool_calls_and_results_are_looked_through_too(house: Any) -> None:
    door, up = await house(f"{{before: [{MAIL}]}}")
    arguments = json.dumps({"to": "jo@example.org"})
    call = {"id": "c1", "type": "function", "function": {"name": "send", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "Send it"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "sent to jo@example.org"},
    ]
    assert (await door.chat(messages=messages)).status_code == 200
    sent = json.loads(up.records[-1].body)["messages"]
    assert json.loads(sent[1]["tool_calls"][0]["function"]["arguments"]) == {"to": "[email]"}
    assert sent[2]["content"] == "sent to [email]"


async def test_what_is_torn_between_parts_is_found(house: Any) -> None:
    door, up = await house(f"{{before: [{MAIL}, {{name: a, phrases: [project phoenix]}}]}}")

    def parts(*texts: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]

    assert (await door.chat(messages=parts("mail bob@exa", "mple.com now", "."))).status_code == 200
    sent = json.loads(up.records[-1].body)["messages"][0]["content"]
    assert "".join(part["text"] for part in sent) == "mail [email] now."
    assert (await door.chat(messages=parts("project", " phoenix"))).status_code == 400
    untouched = parts("one", "two")
    await door.chat(messages=untouched)
    assert json.loads(up.records[-1].body)["messages"] == untouched


async def test_counting_tokens_and_instructions_are_looked_through_too(house: Any) -> None:
    door, up = await house(f"{{before: [{MAIL}, {{name: a, phrases: [project phoenix]}}]}}")
    count = {"model": "mock", "messages": [{"role": "user", "content": "project phoenix"}]}
    refused = await door.client.post("/v1/messages/count_tokens", json=count, headers=door.headers())
    assert refused.status_code == 400
    assert up.requests == 0
    body = {"model": "mock", "input": "Hi", "instructions": "mail jo@example.org", "store": True}
    answer = (await door.client.post("/v1/responses", json=body, headers=door.headers())).json()
    kept = await door.client.get(f"/v1/responses/{answer['id']}", headers=door.headers())
    assert answer["instructions"] == kept.json()["instructions"] == "mail [email]"


async def test_a_flag_lets_pass_and_goes_on_record(house: Any) -> None:
    door, up = await house("{before: [{name: a, phrases: [hello], action: flag}, {name: b, max_tokens: 20}]}")
    assert (await door.chat()).status_code == 200
    assert await noted(door) == [{"when": "before", "rule": "a", "action": "flag", "found": {"a": 1}}]
    refused = await door.chat(messages=[{"role": "user", "content": "word " * 50}])
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_blocked")
    assert up.requests == 1


# -- after -------------------------------------------------------------------------------------------------------------


async def test_whole_answers_are_redacted_in_every_dialect(house: Any, script: ScriptWire) -> None:
    script.message = {"role": "assistant", "content": "Ask jo@example.org."}
    door, _ = await house(f"{{after: [{MAIL}]}}")
    for path, body in requests("Who knows?")[:6]:
        answer = await door.client.post(path, json=body, headers=door.headers())
        assert answer.status_code == 200, answer.text
        if path != "/v1/completions":
            assert "Ask [email]." in answer.text
        assert "jo@" not in answer.text
    assert [row["outcome"] for row in await door.rows()] == ["success"] * 6


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_may_not_pass_is_held_back(house: Any, script: ScriptWire, stream: bool) -> None:
    script.message = {"role": "assistant", "content": "It was project phoenix."}
    script.deltas = [{"content": piece} for piece in ("It was pro", "ject phoe", "nix.", " More.")]
    door, up = await house("{after: [{name: a, phrases: [project phoenix], message: That stays here.}]}")
    async with openai.AsyncOpenAI(base_url=f"{door.url}/v1", api_key=door.token, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "What was it?"}]
        if stream:
            chunks = [
                chunk
                async for chunk in await client.chat.completions.create(
                    model="mock", messages=messages, stream=True, stream_options={"include_usage": True}
                )
            ]
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
            reason = reasons[-1]
            assert reasons.count("content_filter") == 1
        else:
            answer = await client.chat.completions.create(model="mock", messages=messages)
            text, reason = answer.choices[0].message.content or "", answer.choices[0].finish_reason
    assert (text, reason) == ("That stays here.", "content_filter")
    [row] = await door.rows()
    assert (row["outcome"], row["finish_reason"]) == ("blocked" if stream else "success", "content_filter")
    assert row["cost_nanousd"] > 0
    assert await noted(door) == [{"when": "after", "rule": "a", "action": "deny", "found": {"a": 1}}]
    assert up.requests == 1


@pytest.mark.parametrize("streams", ["window", "hold"])
@pytest.mark.parametrize("size", [1, 3, 7, 100])
async def test_streams_are_redacted_wherever_they_are_cut(
    house: Any, script: ScriptWire, streams: str, size: int
) -> None:
    text = "Ask jo@example.org or jane.doe@mail.example.com; nobody else. " * 3 + "And jo@example.org"
    script.deltas = [{"content": text[at : at + size]} for at in range(0, len(text), size)]
    door, _ = await house(f"{{after: [{MAIL}], streams: {streams}, window: 40}}")
    answer = await door.chat(stream=True)
    said = events(answer.text)
    assert said[-1] == "[DONE]"
    given = "".join(c["delta"].get("content") or "" for e in said[:-1] for c in e["choices"])
    assert given == text.replace("jo@example.org", "[email]").replace("jane.doe@mail.example.com", "[email]")
    assert [c["finish_reason"] for e in said[:-1] for c in e["choices"]][-1] == "stop"
    assert sum(note["found"]["email"] for note in await noted(door)) == 7


async def test_what_has_no_findings_is_given_as_it_came_when_it_was_held(house: Any, script: ScriptWire) -> None:
    script.deltas = [{"content": "No", "vendor": {"x": 1}}, {"content": " mail"}]
    door, _ = await house(f"{{after: [{MAIL}], streams: hold}}")
    said = events((await door.chat(stream=True)).text)
    assert {"content": "No", "vendor": {"x": 1}} in [c["delta"] for e in said[:-1] for c in e["choices"]]


async def test_streams_of_other_dialects_are_whole_and_redacted(house: Any, script: ScriptWire) -> None:
    function = {"name": "f", "arguments": '{"a": "jo@exam'}
    script.deltas = [
        {"reasoning_content": "jo@exa"},
        {"reasoning_content": "mple.org?"},
        {"content": "Ask jo@example.o"},
        {"content": "rg"},
        {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": function}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'ple.org"}'}}]},
    ]
    script.finish_reason = "tool_calls"
    door, _ = await house(f"{{after: [{MAIL}]}}")
    tools = {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]}
    chat = await door.chat(stream=True, **tools)
    calls = [call for e in events(chat.text)[:-1] for c in e["choices"] for call in c["delta"].get("tool_calls") or ()]
    assert "".join(call["function"].get("arguments", "") for call in calls) == '{"a": "[email]"}'
    for path, body in (
        ("/v1/messages", {"max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]}),
        ("/v1/responses", {"input": "Hi"}),
    ):
        answer = await door.client.post(path, json={"model": "mock", "stream": True, **body}, headers=door.headers())
        assert answer.status_code == 200
        assert "jo@exa" not in answer.text
        assert "[email]" in answer.text
        assert ("message_stop" if path == "/v1/messages" else "response.completed") in answer.text
    native = await door.client.post(
        "/v1/messages",
        json={"model": "claude", "stream": True, "max_tokens": 50, "messages": [{"role": "user", "content": "Hi"}]},
        headers=door.headers(),
    )
    names = [line.removeprefix("event: ") for line in native.text.splitlines() if line.startswith("event: ")]
    assert (names[0], names[-1]) == ("message_start", "message_stop")


async def test_log_probabilities_would_say_what_is_taken_out(house: Any) -> None:
    door, up = await house(f"{{after: [{MAIL}]}}")
    refused = await door.chat(logprobs=True)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
    assert up.requests == 0


# -- a service that decides --------------------------------------------------------------------------------------------


class Judge:
    """A service for `check`: answers as it is told, after so long."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.says = '{"verdict": "allow"}'
        self.status = 200
        self.delay_s = 0.0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = int(head.lower().partition("content-length: ")[2].split("\r\n")[0])
            self.heads.append(head)
            self.asked.append(json.loads(await reader.readexactly(length)))
            await asyncio.sleep(self.delay_s)
            body = self.says.encode()
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (self.status, len(body)) + body)
            await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


@pytest.fixture
async def judge() -> AsyncIterator[tuple[Judge, str]]:
    made = Judge()
    server = await asyncio.start_server(made, "127.0.0.1", 0)
    yield made, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/look?strict=1".partition("?")[0]
    server.close()


async def test_a_service_decides(
    house: Any, judge: tuple[Judge, str], script: ScriptWire, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, url = judge
    monkeypatch.setenv("TIERLINE_GUARD_TOKEN", "s3cret")
    check = f"{{url: '{url}', timeout_ms: 400, token_env: TIERLINE_GUARD_TOKEN}}"
    door, up = await house(f"{{before: [{MAIL}, {{name: judge, check: {check}}}]}}")
    ask: Any = {"messages": [{"role": "user", "content": "I am jo@example.org"}]}
    assert (await door.chat(**ask)).status_code == 200
    [asked] = service.asked
    assert asked | {"request_id": ""} == {
        "request_id": "", "policy": "default", "rule": "judge", "when": "before", "team": "default",
        "texts": ["I am [email]"],
    }  # fmt: skip
    assert "authorization: Bearer s3cret" in service.heads[0]
    service.says = '{"verdict": "deny", "reason": "medical"}'
    refused = await door.chat(**ask)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "content_blocked")
    for says, status, delay_s in (
        ("no JSON", 200, 0.0),
        ('{"verdict": "maybe"}', 200, 0),
        ("{}", 500, 0),
        ("{}", 200, 2),
    ):
        service.says, service.status, service.delay_s = says, status, delay_s
        assert (await door.chat(**ask)).status_code == 400
    found = [note["found"] for note in await noted(door) if note["rule"] == "judge"]
    assert found == [{"medical": 1}] + [{"no_verdict": 1}] * 4
    assert up.requests == 1


async def test_a_service_that_is_away_may_count_as_consent(house: Any, script: ScriptWire) -> None:
    check = "{url: 'http://127.0.0.1:9/x', timeout_ms: 200, on_error: allow}"
    door, _ = await house(f"{{after: [{{name: judge, check: {check}}}], streams: hold}}")
    assert (await door.chat()).status_code == 200
    assert events((await door.chat(stream=True)).text)[-1] == "[DONE]"


async def test_a_service_holds_an_answer_back(house: Any, judge: tuple[Judge, str], script: ScriptWire) -> None:
    service, url = judge
    service.says = '{"verdict": "deny"}'
    script.deltas = [{"content": "Ye"}, {"content": "s."}]
    door, _ = await house(f"{{after: [{{name: judge, check: {{url: '{url}'}}}}], streams: hold}}")
    whole = (await door.chat()).json()["choices"][0]
    assert whole["finish_reason"] == "content_filter"
    assert "Yes." not in whole["message"]["content"]
    answer = await door.chat(stream=True)
    assert "Ye" not in answer.text
    assert '"finish_reason":"content_filter"' in answer.text
    assert [asked["texts"] for asked in service.asked] == [["Yes."], ["Yes."]]


async def test_a_stream_that_a_client_leaves_ends_at_the_backend_too(house: Any, script: ScriptWire) -> None:
    script.deltas = [{"content": "word "} for _ in range(20_000)]
    door, _ = await house(f"{{after: [{MAIL}]}}")
    with contextlib.suppress(httpx.HTTPError):
        async with door.client.stream(
            "POST", "/v1/chat/completions", headers=door.headers(),
            json={"model": "mock", "stream": True, "messages": [{"role": "user", "content": "Go"}]},
        ) as response:  # fmt: skip
            await anext(response.aiter_bytes())
    await eventually(lambda: door.services.limiter.open_holds == 0)
    assert len(await door.rows()) == 1
