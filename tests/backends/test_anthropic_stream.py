"""Streams of Anthropic servers: every event as it came, and the same chat chunks however the bytes are cut."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.anthropic_stream import AnthropicReader
from backends.attempt import AttemptFailed
from backends.dialect import MalformedAnswer
from tests.backends.anthropic_events import STOP, STREAM, block, delta, end, event, parsed, read, start, whole
from tests.backends.anthropic_types import check_event


def test_tool_calls_of_streams():
    events = [
        start(input_tokens=1),
        block(0, type="text", text="Hi"),
        event("content_block_stop", index=0),
        block(1, type="tool_use", id="toolu_1", name="weather", input={}),
        delta(1, type="input_json_delta", partial_json=""),
        delta(1, type="input_json_delta", partial_json='{"city": "K'),
        block(2, type="tool_use", id="toolu_2", name="now", input={}),
        delta(2, type="input_json_delta", partial_json=""),
        event("content_block_stop", index=2),
        delta(1, type="input_json_delta", partial_json='öln"}'),
        event("content_block_stop", index=1),
        block(4, type="tool_use", id="toolu_3", name="all", input={"at": "once"}),
        event("content_block_stop", index=4),
        end("tool_use", output_tokens=5),
        STOP,
    ]
    found = read(*events)
    assert [e.raw for e in found] == [raw for raw, _, _ in events]
    assert [e.done for e in found] == [False] * (len(events) - 1) + [True]
    assert whole(found) == {
        "content": "Hi",
        "reasoning_content": "",
        "refusal": "",
        "finish_reason": "tool_calls",
        "tool_calls": {
            0: {"id": "toolu_1", "name": "weather", "arguments": '{"city": "Köln"}'},
            1: {"id": "toolu_2", "name": "now", "arguments": "{}"},
            2: {"id": "toolu_3", "name": "all", "arguments": '{"at":"once"}'},
        },
    }
    choices = [choice for e in found if e.chunk for choice in e.chunk.choices]
    pieces = [call.function.arguments for choice in choices for call in choice.delta.tool_calls or []]
    assert pieces == ["", '{"city": "K', "", "{}", 'öln"}', "", '{"at":"once"}']


@pytest.mark.parametrize(
    ("parsed", "commits"),
    [
        (start(input_tokens=1), False),
        (event("ping"), False),
        (block(0, type="text", text=""), False),
        (block(0, type="thinking", thinking="", signature=""), False),
        (block(0, type="redacted_thinking", data="x"), False),
        (delta(0, type="signature_delta", signature="x"), False),
        (delta(0, type="citations_delta", citation={}), False),
        (event("content_block_stop", index=0), False),
        (event("something_new", delta=7), False),
        (STOP, False),
        (end(None, output_tokens=1), False),
        (delta(0, type="text_delta", text=" "), True),
        (delta(0, type="thinking_delta", thinking="hm"), True),
        (block(0, type="tool_use", id="t", name="f", input={}), True),
        (block(0, type="server_tool_use", id="t", name="web_search", input={}), True),
        (end("end_turn"), True),
    ],
)
def test_first_content(parsed, commits):
    reader = AnthropicReader()
    found = reader.read(parsed)
    assert found.raw == parsed[0]
    assert reader.commits(found) == commits
    assert found.idle == (parsed[2] == b"ping")


@pytest.mark.parametrize(
    ("kind", "status", "failure"),
    [
        ("overloaded_error", 529, "overloaded"),
        ("rate_limit_error", 429, "rate_limited"),
        ("api_error", 500, "upstream_error"),
        ("timeout_error", 504, "upstream_error"),
        ("invalid_request_error", 400, "upstream_error"),
        ("something_new", 500, "upstream_error"),
        (None, 500, "upstream_error"),
    ],
)
def test_error_events(kind, status, failure):
    with pytest.raises(AttemptFailed) as caught:
        read(event("error", error={"type": kind, "message": "secret words"}))
    assert (caught.value.kind, caught.value.status) == (failure, status)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "parsed",
    [(b"", b"Overloaded", b"error"), (b"", b'{"type":"error","error":"text"}', b"error")],
)
def test_error_events_that_are_none(parsed):
    with pytest.raises(AttemptFailed):
        read(parsed)


@pytest.mark.parametrize(
    "data",
    [
        b"{oops",
        b"[]",
        b'"x"',
        b"{}7",
        b'{"type":"content_block_delta","delta":7}',
        b'{"type":"message_start","message":1}',
    ],
)
def test_events_that_are_none(data):
    with pytest.raises(MalformedAnswer):
        read((data, data, b""))


def test_a_foreign_end_is_an_end():
    found = read(start(input_tokens=3), end("end_turn", output_tokens=2), (b"data: [DONE]\n\n", b"[DONE]", b""))
    assert found[-1].done
    assert found[-1].chunk.usage.completion_tokens == 2


# The mock's stream, cut anywhere.


def test_the_mock_speaks_the_dialect():
    for found in parsed([STREAM]):
        check_event(msgspec.json.decode(found.data))
    put = whole(parsed([STREAM]))
    assert put["reasoning_content"] == "Which rivers come to mind?"
    assert "äöü €" in put["content"]
    assert put["tool_calls"][0]["arguments"] == '{"city":"Köln","days":3}'
    assert put["tool_calls"][1]["arguments"] == "{}"


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=40))
def test_a_stream_reads_the_same_however_it_is_cut(cuts):
    edges = [0, *sorted(cuts), len(STREAM)]
    found = parsed([STREAM[a:b] for a, b in itertools.pairwise(edges)])
    assert found == parsed([STREAM])
    assert b"".join(e.raw for e in found) == STREAM


def test_a_stream_reads_the_same_byte_by_byte():
    assert parsed([STREAM[i : i + 1] for i in range(len(STREAM))]) == parsed([STREAM])
