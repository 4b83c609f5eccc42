"""Anthropic servers behind a dispatcher, over real HTTP: requests, answers, faults, and the SDK as a second client."""

from __future__ import annotations

import asyncio
from typing import Any, get_args

import anthropic
import msgspec
import pytest
import pytest_asyncio

from backends.anthropic import ANTHROPIC
from backends.attempt import Call, Candidate, Event, Native
from backends.dialect import CannotTranslate
from backends.dialects import DIALECTS
from backends.dispatch import NoBackend, StreamCut, UpstreamRefused
from bench.mock_anthropic import AnthropicWire
from bench.mock_upstream import MockUpstream
from gateway.settings import BackendSettings
from tests.backends.anthropic_events import TOOLS
from tests.backends.anthropic_types import check_error, check_message, check_request

ASKED = {"max_tokens": 4000}
FUNCTIONS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]


@pytest_asyncio.fixture
async def claude():
    upstream = MockUpstream(AnthropicWire())
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest_asyncio.fixture
async def sonnet():
    upstream = MockUpstream(AnthropicWire())
    await upstream.start()
    yield upstream
    await upstream.stop()


# For a loaded machine: no test here waits so long, unless it is about a deadline.
PATIENT = {"connect_s": 20, "first_token_s": 20, "between_tokens_s": 20, "total_s": 60}


def pool(bench: Any, *upstreams: MockUpstream | str, name: str = "main", **options: Any) -> Any:
    return bench.pool(name, *upstreams, **{**PATIENT, "dialect": ANTHROPIC, "api_key": "key-1", **options})


def request(upstream: MockUpstream) -> dict[str, Any]:
    """The latest request that a mock saw, approved by the SDK's types."""
    found: dict[str, Any] = msgspec.json.decode(upstream.records[-1].body)
    check_request(found)
    return found


def test_the_registry_and_the_setting_name_the_same_dialects():
    assert {name: dialect.name for name, dialect in DIALECTS.items()} == {name: name for name in DIALECTS}
    assert set(get_args(BackendSettings.model_fields["dialect"].annotation)) == set(DIALECTS)


# The usual.


async def test_a_plain_answer(bench, claude):
    pool(bench, claude, headers={"anthropic-beta": "ours"})
    headers = {"anthropic-beta": "theirs", "Anthropic-Version": "2001-01-01"}
    found = await bench.open(stream=False, payload={**ASKED, "tools": FUNCTIONS}, headers=headers)
    [choice] = found.whole.completion.choices
    check_message(msgspec.json.decode(found.whole.body))
    assert choice.finish_reason == "tool_calls"
    assert [call.function.name for call in choice.message.tool_calls] == ["weather", "now"]
    assert found.whole.completion.usage.prompt_tokens == 20
    assert request(claude)["max_tokens"] == 4000
    record = claude.records[-1]
    assert record.path == "/v1/messages"
    assert record.headers["x-api-key"] == "key-1"
    assert record.headers["anthropic-version"] == "2023-06-01"
    assert "authorization" not in record.headers
    assert bench.outcomes() == ["success"]


async def test_beta_headers_of_both_sides_arrive(bench, serve):
    heads = []

    async def handle(reader, writer):
        heads.append(await reader.readuntil(b"\r\n\r\n"))

    origin = await serve(handle)
    pool(bench, f"http://{origin}/v1", headers={"anthropic-beta": "ours"}, attempts=1)
    with pytest.raises(NoBackend):
        await bench.open(payload=ASKED, headers={"anthropic-beta": "theirs"})
    assert b"anthropic-beta: ours\r\n" in heads[0]
    assert b"anthropic-beta: theirs\r\n" in heads[0]


async def test_a_backend_may_name_another_version(bench, claude):
    pool(bench, claude, headers={"Anthropic-Version": "2026-10-21"})
    await bench.open(stream=False, payload=ASKED)
    assert claude.records[-1].headers["anthropic-version"] == "2026-10-21"
    with pytest.raises(UpstreamRefused):
        await bench.open(stream=False, payload={**ASKED, "temperature": 0.5})


async def test_a_stream(bench, claude):
    pool(bench, claude)
    answer = await bench.open("mock,chunks=3", payload={**ASKED, "reasoning_effort": "low", "tools": FUNCTIONS})
    events = [event async for event in answer.events]
    assert request(claude)["thinking"] == {"type": "adaptive"}
    assert {event.dialect for event in events} == {"anthropic"}
    assert [event.done for event in events].count(True) == 1
    deltas = [choice.delta for event in events if event.chunk for choice in event.chunk.choices]
    assert "".join(delta.content or "" for delta in deltas).count("t=") == 3
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "Which rivers come to mind?"
    assert events[-1].chunk.usage.completion_tokens == 34
    assert bench.outcomes() == ["success"]
    assert bench.outstanding() == 0


async def test_no_tokens_for_who_names_no_limit(bench, claude):
    pool(bench, claude)
    with pytest.raises(CannotTranslate) as caught:
        await bench.open()
    assert caught.value.param == "max_tokens"
    found = await bench.open(stream=False, extra=lambda candidate: {"max_tokens": 77})
    assert found.status == 200
    assert request(claude)["max_tokens"] == 77
    assert bench.outcomes() == ["success"]


async def test_the_next_candidate_has_the_word(bench, claude, mock):
    pool(bench, claude)
    bench.pool("other", mock, **PATIENT)
    found = await bench.open("mock", "mock@other", stream=False, payload={**ASKED, "seed": 7})
    assert found.attempt.candidate.backend == "other"
    assert not claude.records
    assert [attempt.candidate.backend for attempt in bench.observer.started] == ["other"]


@pytest.mark.parametrize("operation", ["completions", "embeddings", "rerank"])
async def test_only_chats(bench, claude, operation):
    pool(bench, claude)
    with pytest.raises(CannotTranslate):
        await bench.dispatcher.open(
            Call({"input": "a"}, operation, False, "req-1"), [Candidate("m", "small", "main", "m")], bench.observer
        )


async def test_probes_find_it_up(bench, claude):
    checked = pool(bench, claude)
    assert await checked.check() == 1
    claude.healthy = False
    assert await checked.check() == 0


# A client of the same dialect.


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_in_the_same_dialect_goes_on_as_it_is(bench, claude, stream):
    pool(bench, claude)
    own = {
        "model": "public",
        "max_tokens": 2000,
        "messages": [{"role": "user", "content": "hello"}],
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919", "x_unknown": [1.5, None]}]},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "tools": TOOLS,
        "stream": not stream,
    }
    native = Native("anthropic", dict(own))
    found = await bench.open(
        stream=stream, native=native, extra={"max_tokens": 5, "cache_salt": "x"}, headers={"anthropic-beta": "b-1"}
    )
    assert msgspec.json.decode(claude.records[-1].body) == {**own, "model": "mock", "stream": stream}
    assert claude.records[-1].headers["anthropic-beta"] == "b-1"
    assert native.payload == own
    if stream:
        raw = b"".join([event.raw async for event in found.events])
        assert raw.count(b"event: ping\n") == 1
        assert b"signature_delta" in raw
        assert raw.endswith(b'data: {"type":"message_stop"}\n\n')
    else:
        assert check_message(msgspec.json.decode(found.whole.body)).content[0].type == "thinking"


async def test_the_limit_of_the_model_where_the_request_has_none(bench, claude):
    pool(bench, claude)
    own = {"messages": [{"role": "user", "content": "hello"}]}
    await bench.open(stream=False, native=Native("anthropic", own), extra={"max_tokens": 5})
    assert request(claude) == {"model": "mock", "max_tokens": 5, **own}


async def test_a_request_in_another_dialect_is_translated(bench, claude):
    pool(bench, claude)
    await bench.open(stream=False, payload=ASKED, native=Native("responses", {"input": "hello"}))
    assert request(claude)["messages"][0]["content"] == [{"type": "text", "text": "hello"}]


async def test_a_continuation_is_translated(bench, claude):
    pool(bench, claude)
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "The Rh"}]
    own = Native("anthropic", {"messages": []})
    await bench.open(stream=False, payload={**ASKED, "messages": said}, native=own, continues=True)
    assert request(claude)["messages"][-1] == {"role": "assistant", "content": [{"type": "text", "text": "The Rh"}]}


# Faults.


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "kind", "status"),
    [
        ("status,status=529", "overloaded", 503),
        ("status,status=429", "rate_limited", 429),
        ("status,status=500", "upstream_error", 502),
        ("error,code=529", "overloaded", 503),
        ("error,code=429", "rate_limited", 429),
        ("error", "upstream_error", 502),
        ("garbage", "upstream_error", 502),
    ],
)
async def test_faults_that_another_try_may_mend(bench, claude, sonnet, fault, kind, status, stream):
    pool(bench, claude, attempts=1)
    pool(bench, sonnet, name="other")
    found = await bench.open(fault, "mock@other", stream=stream, payload=ASKED)
    assert bench.outcomes()[0] == "error"
    assert found.attempt.candidate.backend == "other"
    await found.aclose()
    pool(bench, claude, attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open(fault, stream=stream, payload=ASKED)
    assert (caught.value.kind, caught.value.status) == (kind, status)


async def test_retry_after_is_heard(bench, claude):
    pool(bench, claude, attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open("status,status=429,retry_after=7", payload=ASKED)
    assert caught.value.retry_after == 7


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("status,status=400", None),
        ("status,status=401", "invalid_api_key"),
        ("status,status=402", "insufficient_quota"),
        ("status,status=403", "permission_denied"),
        ("status,status=404", "model_not_found"),
        ("status,status=413", "request_too_large"),
        ("error,code=400", None),
        ("error,code=413", "request_too_large"),
    ],
)
async def test_refusals_are_final(bench, claude, fault, code, stream):
    pool(bench, claude)
    with pytest.raises(UpstreamRefused) as caught:
        await bench.open(fault, stream=stream, payload=ASKED)
    status = int(fault[-3:])
    assert caught.value.status == status
    assert caught.value.said["code"] == code
    assert caught.value.credentials_fault == (status in (401, 402, 403))
    assert bench.outcomes() == ["refused"]


async def test_the_server_explains_what_it_refuses(bench, claude):
    pool(bench, claude)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "user", "content": "b"},
    ]
    with pytest.raises(UpstreamRefused) as caught:
        await bench.open(stream=False, payload={**ASKED, "messages": said})
    assert "tool_result" in caught.value.said["message"]
    check_error(msgspec.json.decode(caught.value.body))


async def read_to_the_break(answer: Any) -> tuple[list[Event], StreamCut]:
    seen: list[Event] = []
    try:
        async for event in answer.events:
            seen.append(event)  # noqa: PERF401
    except StreamCut as cut:
        return seen, cut
    raise AssertionError("the stream came to a clean end")


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("cut,after=2", "disconnected"),
        ("end,after=2", "disconnected"),
        ("stall,after=2", "between_tokens_timeout"),
        ("error,after=2,code=529", "upstream_error"),
        ("error,after=2,code=429", "upstream_error"),
        ("garbage,after=2", "protocol"),
    ],
)
async def test_a_broken_stream_reports_its_input_and_no_output(bench, claude, fault, kind):
    pool(bench, claude, between_tokens_s=0.2 if "stall" in fault else 20)
    answer = await bench.open(fault, payload=ASKED)
    seen, broken = await read_to_the_break(answer)
    assert broken.kind == kind
    usage = [event.chunk.usage for event in seen if event.chunk and event.chunk.usage][-1]
    assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (20, 5)
    assert usage.completion_tokens is None
    assert bench.outcomes() == ["timeout" if "timeout" in kind else "cut"]


async def test_a_broken_stream_is_continued_there(bench, claude):
    pool(bench, claude)
    candidate = Candidate("claude", "small", "main", "cut,after=2,times=1", prefill=True)
    call = Call({"messages": [{"role": "user", "content": "hello"}], **ASKED}, "chat", True, "req-1")
    answer = await bench.dispatcher.open(call, [candidate], bench.observer)
    choices = [choice for e in [e async for e in answer.events] if e.chunk for choice in e.chunk.choices]
    said = "".join(choice.delta.content or "" for choice in choices)
    begun = request(claude)["messages"][-1]
    assert begun["role"] == "assistant"
    assert said.startswith(begun["content"][0]["text"])
    assert said.count("t=") == 2 + 16  # the mock starts anew: only the seam is of interest here
    assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]
    assert [attempt.outcome for attempt in bench.observer.started] == ["cut", "success"]


async def test_pings_are_no_progress(bench, serve):
    """A server that pings for ever and says nothing runs into the deadline between tokens; its pings are relayed."""
    ping = b'event: ping\ndata: {"type":"ping"}\n\n'

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        said = b'event: message_start\ndata: {"type":"message_start","message":{"content":[]}}\n\n'
        text = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + said + text)
        while not writer.is_closing():
            writer.write(ping)
            await writer.drain()
            await asyncio.sleep(0.02)

    origin = await serve(handle)
    pool(bench, f"http://{origin}/v1", between_tokens_s=1)
    answer = await bench.open(payload=ASKED)
    seen, broken = await read_to_the_break(answer)
    assert broken.kind == "between_tokens_timeout"
    assert [event.idle for event in seen].count(True) > 1


# The SDK as a second client of the mock: what it makes of an answer is what we make of it.


async def test_the_sdk_reads_the_same(bench, claude):
    pool(bench, claude)
    base_url = claude.base_url.removesuffix("/v1")
    sdk = anthropic.AsyncAnthropic(api_key="k", base_url=base_url, max_retries=0, _strict_response_validation=True)
    asked: Any = {
        "model": "mock,chunks=2",
        "max_tokens": 4000,
        "messages": [{"role": "user", "content": "hello"}],
        "tools": TOOLS,
        "thinking": {"type": "adaptive"},
    }
    payload = {**ASKED, "reasoning_effort": "high", "tools": FUNCTIONS}
    async with sdk:
        theirs = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        for wrong in ({"max_tokens": 0}, {"extra_body": {"temperature": 1}}):
            with pytest.raises(anthropic.BadRequestError):
                await sdk.messages.create(**{**asked, **wrong})
    ours = (await bench.open("mock,chunks=2", stream=False, payload=payload)).whole.completion
    answer = await bench.open("mock,chunks=2", payload=payload)
    chunks = [event.chunk async for event in answer.events if event.chunk]
    message = ours.choices[0].message
    calls = [block for block in theirs.content if block.type == "tool_use"]
    assert message.content == "".join(block.text for block in theirs.content if block.type == "text")
    assert message.reasoning_content == "".join(b.thinking for b in theirs.content if b.type == "thinking")
    assert [call.id for call in message.tool_calls] == [call.id for call in calls]
    assert [msgspec.json.decode(call.function.arguments) for call in message.tool_calls] == [c.input for c in calls]
    arguments: dict[int, str] = {}
    for chunk in chunks:
        for call in [call for choice in chunk.choices for call in choice.delta.tool_calls or []]:
            arguments[call.index] = arguments.get(call.index, "") + call.function.arguments
    calls = [block for block in streamed.content if block.type == "tool_use"]
    assert [msgspec.json.decode(arguments[index]) for index in sorted(arguments)] == [call.input for call in calls]
    for usage, theirs_ in ((ours.usage, theirs.usage), (chunks[-1].usage, streamed.usage)):
        assert usage.completion_tokens == theirs_.output_tokens
        read, written = theirs_.cache_read_input_tokens or 0, theirs_.cache_creation_input_tokens or 0
        assert usage.prompt_tokens == theirs_.input_tokens + read + written
