"""Answers of Anthropic servers in the common form: whole, and no token counted twice or lost."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.anthropic import ANTHROPIC
from backends.attempt import Call, Event
from backends.dialect import MalformedAnswer
from backends.openai import OPENAI, chat_body, chat_event
from backends.protocol import ChatChunk, CompletionTokensDetails, PromptTokensDetails, Usage
from gateway.ledger.usage import from_openai
from tests.backends.anthropic_events import STOP, STREAM, end, event, last_usage, parsed, read, start, whole
from tests.backends.anthropic_types import check_message

CALL = Call({}, "chat", True, "req-1")


def answer(**fields: Any) -> Any:
    message = {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": [],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 4},
        **fields,
    }
    check_message(message)
    return ANTHROPIC.answer(msgspec.json.encode(message), CALL).completion


# Plain answers.


def test_text_thoughts_and_tool_calls():
    arguments = b'{"city": "K\\u00f6ln",  "days": 1.0}'
    body = (
        b"""{"id":"msg_1","type":"message","role":"assistant","model":"claude","content":[
        {"type":"thinking","thinking":"Hm.","signature":"x"},{"type":"redacted_thinking","data":"y"},
        {"type":"text","text":"Let me "},{"type":"text","text":"see.","citations":[]},
        {"type":"tool_use","id":"toolu_1","name":"weather","input":%b},
        {"type":"tool_use","id":"toolu_2","name":"now","input":{}}],
        "stop_reason":"tool_use","stop_sequence":null,"usage":{"input_tokens":10,"output_tokens":4}}"""
        % arguments
    )
    check_message(msgspec.json.decode(body))
    found = ANTHROPIC.answer(body, CALL)
    assert (found.body, found.dialect) == (body, "anthropic")
    [choice] = found.completion.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert choice.message.reasoning_content == "Hm."
    assert [
        (call.id, call.type, call.function.name, call.function.arguments) for call in choice.message.tool_calls
    ] == [
        ("toolu_1", "function", "weather", arguments.decode()),
        ("toolu_2", "function", "now", "{}"),
    ]


@pytest.mark.parametrize(
    ("reason", "finish"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("pause_turn", "length"),
        ("tool_use", "tool_calls"),
        ("refusal", "content_filter"),
    ],
)
def test_stop_reasons(reason, finish):
    assert answer(stop_reason=reason).choices[0].finish_reason == finish
    assert whole(read(start(), end(reason), STOP))["finish_reason"] == finish


def test_refusals_say_why():
    details = {"type": "refusal", "category": "cyber", "explanation": "No."}
    message = answer(stop_reason="refusal", stop_details=details).choices[0].message
    assert (message.content, message.refusal) == (None, "No.")
    streamed = event("message_delta", delta={"stop_reason": "refusal", "stop_details": details})
    assert whole(read(start(), streamed))["refusal"] == "No."
    assert answer(stop_reason="refusal").choices[0].message.refusal is None


@pytest.mark.parametrize("body", [b"", b"{oops", b"[]", b'{"type":"message"}', b'{"content":[{"type":7}]}', b"\xff"])
def test_what_is_no_message(body):
    with pytest.raises(MalformedAnswer):
        ANTHROPIC.answer(body, CALL)


# Usage.


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        ({"input_tokens": 10, "output_tokens": 4}, (10, 4, 0, 0, 0)),
        ({"input_tokens": 0, "output_tokens": 0}, (0, 0, 0, 0, 0)),
        (
            {
                "input_tokens": 10,
                "output_tokens": 4,
                "cache_read_input_tokens": 300,
                "cache_creation_input_tokens": 20,
                "output_tokens_details": {"thinking_tokens": 3},
            },
            (330, 4, 300, 20, 3),
        ),
        ({"input_tokens": 1, "output_tokens": 4, "cache_read_input_tokens": None}, (1, 4, 0, 0, 0)),
    ],
)
def test_usage_is_conserved(usage, expected):
    total, output, read_, written, thinking = expected
    reported = answer(usage=usage).usage
    assert reported.total_tokens == total + output
    for found in (reported, last_usage(start(**usage), end("end_turn", **usage), STOP)):
        counted = from_openai(found)
        assert counted.source == "reported"
        assert (counted.input_tokens, counted.output_tokens) == (total, output)
        assert (counted.cached_input_tokens, counted.cache_write_tokens) == (read_, written)
        assert counted.reasoning_tokens == thinking
        assert counted.fresh_input_tokens == usage["input_tokens"]


def test_usage_of_streams_is_cumulative():
    events = [
        start(input_tokens=10, cache_read_input_tokens=5, output_tokens=1),
        end(None, output_tokens=7),
        end("end_turn", output_tokens=9, input_tokens=12),
        STOP,
    ]
    assert last_usage(*events) == Usage(17, 9, 26, PromptTokensDetails(5, None, 0), None)


@pytest.mark.parametrize(
    "events",
    [
        [start(input_tokens=10, cache_read_input_tokens=5, output_tokens=1)],
        [start(input_tokens=10, cache_read_input_tokens=5, output_tokens=1), end(None, output_tokens=7)],
        [start(input_tokens=10, cache_read_input_tokens=5, output_tokens=1), STOP],
        [start(input_tokens=10, cache_read_input_tokens=5, output_tokens=1), end("end_turn"), STOP],
    ],
)
def test_output_that_was_not_reported_in_the_end_is_ours_to_count(events):
    counted = from_openai(last_usage(*events), from_openai(Usage(99, 50)))
    assert (counted.input_tokens, counted.cached_input_tokens, counted.output_tokens) == (15, 5, 50)


def test_zero_output_in_the_end_is_a_report():
    usage = last_usage(start(input_tokens=10, output_tokens=1), end("refusal", output_tokens=0), STOP)
    assert usage.completion_tokens == 0


def test_no_usage_at_all():
    usage = last_usage(start(), end("end_turn"), STOP)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (None, None, None)
    assert usage.completion_tokens_details is None


# Errors.


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens > 8 maximum"},
            "context_length_exceeded",
        ),
        (
            {"type": "invalid_request_error", "message": "Output blocked by content filtering policy"},
            "content_policy_violation",
        ),
        (
            {
                "type": "invalid_request_error",
                "message": "messages.0: too large",
                "details": {"error_code": "image_dimensions_too_large"},
            },
            "image_dimensions_too_large",
        ),
        ({"type": "rate_limit_error", "message": "context window of the minute"}, "rate_limit_exceeded"),
        ({"type": "conflict_error", "message": "twice"}, None),
    ],
)
def test_errors_that_a_fallback_can_tell(error, code):
    said = ANTHROPIC.error(msgspec.json.encode({"type": "error", "error": error, "request_id": "req_1"}))
    assert said["code"] == code
    assert said["message"] == error["message"]


@pytest.mark.parametrize("body", [b"", b"{oops", b"[]", b"{}", b'{"type":"error","error":"text"}'])
def test_bodies_without_an_error(body):
    assert ANTHROPIC.error(body) is None


# For chat clients.


def test_events_for_chat_clients():
    usage = Usage(12, 34, 46, PromptTokensDetails(5, None, 3), CompletionTokensDetails(9))
    chunks = []
    reader = OPENAI.reader(CALL)
    for found in parsed([STREAM]):
        written = chat_event(found)
        if found.chunk is None:
            assert written is found
            continue
        assert written.raw == b"data: " + written.data + b"\n\n"
        assert chat_event(found) is written, "for the client, for the cache and for a rescue, but written once"
        assert (written.dialect, written.done, written.chunk) == ("openai", found.done, found.chunk)
        chunks.append(msgspec.json.decode(written.data))
        assert reader.read((written.raw, written.data, b"")).chunk.choices == found.chunk.choices
    assert [("usage" in chunk) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1]["usage"]["prompt_tokens"] == 20
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 5, "cache_creation_tokens": 3}
    assert all(choice["index"] == 0 for chunk in chunks for choice in chunk["choices"])
    plain = Event(b"data: {}\n\n", b"{}", ChatChunk(usage=usage))
    assert chat_event(plain) is plain


def test_answers_for_chat_clients():
    body = msgspec.json.encode(
        {
            "id": "msg_1",
            "model": "claude",
            "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {"a": 1}}],
            "stop_reason": "tool_use",
            "usage": {"input_tokens": 1, "output_tokens": 2},
        }
    )
    found = ANTHROPIC.answer(body, CALL)
    found.completion.created = 7
    assert chat_body(found) is chat_body(found), "likewise"
    assert msgspec.json.decode(chat_body(found)) == {
        "id": "msg_1",
        "object": "chat.completion",
        "created": 7,
        "model": "claude",
        "choices": [
            {
                "index": 0,
                "message": {
                    "role": "assistant",
                    "content": None,
                    "refusal": None,
                    "tool_calls": [{"id": "t", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}],
                },
                "logprobs": None,
                "finish_reason": "tool_calls",
            }
        ],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0, "cache_creation_tokens": 0},
        },
    }
    plain = b'{"id":"a","object":"chat.completion","created":7,"model":"m","choices":[{"index":0,"message":{}}],"x":1}'
    assert chat_body(OPENAI.answer(plain, CALL)) == plain
