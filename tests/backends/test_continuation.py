"""What a broken stream is continued with: which text has no seam, the call for the rest, and the usage of both."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.attempt import Call, Candidate, Event, Native
from backends.protocol import ChatChunk
from backends.rescue import Delivered, Seam, continuation


def event(delta: dict[str, Any], dialect: str = "openai", **fields: Any) -> Event:
    chunk = {"id": "a", "choices": [{"index": 0, "delta": delta, "finish_reason": None}], **fields}
    data = msgspec.json.encode(chunk)
    return Event(b"data: " + data + b"\n\n", data, msgspec.json.decode(data, type=ChatChunk), dialect=dialect)


CALL = Call({"messages": [{"role": "user", "content": "hello"}]}, "chat", True, "r")


@pytest.mark.parametrize(
    ("delta", "whole"),
    [
        ({"role": "assistant", "content": ""}, True),
        ({"content": "a"}, True),
        ({}, True),
        ({"reasoning_content": "a"}, False),
        ({"reasoning": "a"}, False),
        ({"refusal": "a"}, False),
        ({"tool_calls": [{"index": 0, "id": "x"}]}, False),
        ({"audio": {"data": "x"}}, False),
    ],
)
def test_only_text_is_continued(delta, whole):
    assert (Delivered().add(event(delta), CALL) is None) == whole


def test_a_stream_in_the_client_s_own_dialect_is_not_continued():
    native = msgspec.structs.replace(CALL, native=Native("anthropic", {}))
    assert Delivered().add(event({"content": "a"}, "anthropic"), native) is not None
    assert Delivered().add(event({"content": "a"}), native) is None
    assert Delivered().add(event({"content": "a"}, "anthropic"), CALL) is None


# The seam.


@pytest.mark.parametrize(
    ("delivered", "pieces", "text"),
    [
        ("one", [" two"], " two"),
        ("one ", [" two"], "two"),
        ("one ", ["two"], "two"),
        ("one \n", [" ", "\n", "two"], "two"),
        ("one \n", [" two"], "two"),
        ("one ", ["\n\ntwo"], "\n\ntwo"),
        ("one ", [" ", " two"], " two"),
        ("one ", ["", " two"], "two"),
        ("one", ["one"], "one"),
    ],
)
def test_white_space_is_not_repeated(delivered, pieces, text):
    seam = Seam(None, delivered, 1)
    fitted = [seam.fit(event({"content": piece})) for piece in pieces]
    texts = [msgspec.json.decode(e.data)["choices"][0]["delta"]["content"] for e in fitted if e is not None]
    assert "".join(texts) == text
    assert [e.chunk.choices[0].delta.content for e in fitted if e is not None] == texts
    assert all(texts), "an event that says nothing is dropped"


def test_every_cut_of_a_text_fits_every_cut_of_its_rest():
    whole = "a  b\n\n c \u3000d😀"
    for at in range(1, len(whole)):
        rest = whole[len(whole[:at].rstrip()) :]
        for inner in range(len(rest) + 1):
            seam = Seam(None, whole[:at], 1)
            fitted = [seam.fit(event({"content": piece})) for piece in (rest[:inner], rest[inner:])]
            texts = [e.chunk.choices[0].delta.content or "" for e in fitted if e is not None]
            assert whole[:at] + "".join(texts) == whole


def test_a_continuation_in_another_dialect_is_written_in_the_common_one():
    seam = Seam(msgspec.convert({"id": "first", "model": "m", "created": 7}, ChatChunk), "one", 1)
    fitted = seam.fit(event({"role": "assistant", "content": "two"}, "anthropic"))
    assert fitted is not None
    assert fitted.dialect == "openai"
    fields = msgspec.json.decode(fitted.data)
    assert (fields["id"], fields["model"], fields["created"]) == ("first", "m", 7)
    assert fields["choices"][0]["delta"]["content"] == "two"


@pytest.mark.parametrize(
    ("reported", "told"),
    [
        ({"prompt_tokens": 20, "completion_tokens": 5, "total_tokens": 25}, (14, 11, 25)),
        ({"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}, (0, 11, 11)),
    ],
)
def test_usage_is_that_of_one_answer(reported, told):
    fitted = Seam(None, "text", 6).fit(event({}, usage={**reported, "prompt_tokens_details": {"cached_tokens": 18}}))
    assert fitted is not None
    usage = msgspec.json.decode(fitted.data)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == told
    assert usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert fitted.chunk.usage.prompt_tokens == usage["prompt_tokens"]
    assert fitted.usage.prompt_tokens == reported["prompt_tokens"]  # for the ledger: the attempt's own


def test_reported_tokens_count_before_counted_ones():
    delivered = Delivered()
    for text in ("a" * 40, "b"):
        delivered.add(event({"content": text}), CALL)
    assert delivered.tokens() == 11
    delivered.add(event({"content": "c"}, usage={"completion_tokens": 7}), CALL)
    assert delivered.tokens() == 7
    delivered.next_part()
    delivered.add(event({"content": "d"}), CALL)
    assert delivered.tokens() == 8


# The request for the rest.


def test_the_call_for_the_rest():
    call = msgspec.structs.replace(CALL, native=Native("anthropic", {}))
    rest = continuation(call, "one \n", 2)
    assert rest.payload["messages"] == [*CALL.payload["messages"], {"role": "assistant", "content": "one"}]
    assert rest.continues
    assert rest.native is None
    assert len(CALL.payload["messages"]) == 1


def test_white_space_alone_is_no_beginning():
    rest = continuation(msgspec.structs.replace(CALL, extra={"max_tokens": 9}), " \n", 2)
    assert rest.payload == CALL.payload
    assert not rest.continues
    assert rest.extra_for(Candidate("m", "small", "b", "m"))["max_tokens"] == 9


def test_white_space_that_is_generated_again_counts_once():
    call = msgspec.structs.replace(CALL, extra={"max_tokens": 9})
    for text, left in (("one two", 7), ("one ", 8)):
        assert continuation(call, text, 2).extra_for(Candidate("m", "small", "b", "m"))["max_tokens"] == left


def test_an_answer_that_the_client_had_begun_goes_on_in_its_words():
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well,"}]
    call = Call({"messages": messages, "continue_final_message": True}, "chat", True, "r")
    assert continuation(call, " one ", 2).payload["messages"][-1] == {"role": "assistant", "content": "Well, one"}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
@pytest.mark.parametrize("where", ["payload", "extra"])
def test_limits_never_reach_zero(name, where):
    fields = {name: 3}
    call = msgspec.structs.replace(
        CALL,
        payload={**CALL.payload, **(fields if where == "payload" else {})},
        extra=fields if where == "extra" else {},
    )
    assert continuation(call, "one", 9).extra_for(Candidate("m", "small", "b", "m"))[name] == 1
