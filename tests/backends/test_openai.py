"""The dialect on the wire: servers that are odd but right, servers that are wrong, and how an answer ends."""

from __future__ import annotations

import email.utils
import time

import msgspec
import pytest

from backends.attempt import AttemptFailed, Call
from backends.dialect import MalformedAnswer
from backends.dispatch import NoBackend, StreamCut
from backends.http import retry_after_s
from backends.openai import OPENAI, decode_answer, decode_chunk, error_in, has_content

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"  # its body ends with the connection


def data(**fields: object) -> bytes:
    return b"data: " + msgspec.json.encode(fields) + b"\n\n"


def choice(index: int = 0, finish: str | None = None, **delta: object) -> bytes:
    return data(choices=[{"index": index, "delta": delta, "finish_reason": finish}])


async def events_of(bench, serve, body: bytes, **options: object) -> list:
    origin = await serve(HEAD + body)
    bench.pool("main", f"http://{origin}/v1", attempts=1)
    answer = await bench.open(**options)
    return [event async for event in answer.events]


# Which event commits a stream.


@pytest.mark.parametrize(
    ("delta", "commits"),
    [
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant", "content": None}, False),
        ({}, False),
        ({"content": "x"}, True),
        ({"content": " "}, True),
        ({"reasoning_content": "hm"}, True),
        ({"reasoning": "hm"}, True),  # a field that our types do not name
        ({"refusal": "no"}, True),
        ({"tool_calls": [{"index": 0, "function": {"name": "f"}}]}, True),
        ({"function_call": {"name": "f"}}, True),
        ({"audio": {"id": "a"}}, True),
    ],
)
def test_first_content(delta, commits):
    raw = msgspec.json.encode({"choices": [{"index": 0, "delta": delta}]})
    assert has_content(decode_chunk(raw), raw) == commits


@pytest.mark.parametrize(
    ("chunk", "commits"),
    [
        ({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}, True),
        ({"choices": [{"index": 0, "text": "x"}]}, True),  # the older completions dialect
        ({"choices": []}, False),
        ({"choices": [], "usage": {"prompt_tokens": 1}}, False),
        ({}, False),
    ],
)
def test_other_chunks(chunk, commits):
    raw = msgspec.json.encode(chunk)
    assert has_content(decode_chunk(raw), raw) == commits


# How a stream may end.


async def test_finish_reason_without_done_is_whole(bench, serve):
    events = await events_of(bench, serve, choice(content="a") + choice(finish="stop"))
    assert len(events) == 2
    assert bench.outcomes() == ["success"]


async def test_done_without_finish_reason_is_whole(bench, serve):
    events = await events_of(bench, serve, choice(content="a") + b"data: [DONE]\n\n")
    assert events[-1].done
    assert bench.outcomes() == ["success"]


async def test_missing_last_blank_line_is_mended(bench, serve):
    events = await events_of(bench, serve, choice(content="a") + choice(finish="stop").rstrip(b"\n"))
    assert events[-1].raw.endswith(b"}\n\n")


async def test_every_choice_must_finish(bench, serve):
    body = choice(0, content="a") + choice(1, content="b") + choice(0, finish="stop")
    with pytest.raises(StreamCut):
        await events_of(bench, serve, body, payload={"n": 2})
    assert bench.outcomes() == ["cut"]


async def test_silence_after_the_last_finish_reason_is_an_end(bench, mock, serve, monkeypatch):
    monkeypatch.setattr("backends.stream.AFTER_FINISH_S", 0.1)

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + choice(content="a") + choice(finish="stop"))
        await reader.read()

    origin = await serve(handle)
    bench.pool("main", f"http://{origin}/v1", between_tokens_s=30)
    answer = await bench.open()
    began = time.monotonic()
    assert len([event async for event in answer.events]) == 2
    assert time.monotonic() - began < 1
    assert bench.outcomes() == ["success"]


async def test_done_before_any_content_is_no_answer(bench, serve):
    with pytest.raises(NoBackend):
        await events_of(bench, serve, choice(role="assistant") + b"data: [DONE]\n\n")


async def test_nothing_after_done_is_read(bench, serve):
    events = await events_of(bench, serve, choice(content="a") + b"data: [DONE]\n\n" + choice(content="b"))
    assert [event.done for event in events] == [False, True]


# Servers that say it in their own way.


async def test_odd_types_are_tolerated_and_relayed(bench, serve):
    odd = data(
        id=7,
        object=["chunk"],
        created="1700000000",
        model=3.5,
        choices=[{"index": "0", "delta": {"role": "x", "content": "a", "tool_calls": "none"}, "finish_reason": None}],
        usage={"prompt_tokens": 3.0, "completion_tokens": "4"},
        x_extra=[1],
    )
    events = await events_of(bench, serve, odd + choice(finish="stop"))
    assert events[0].raw == odd
    assert events[0].chunk.choices[0].delta.content == "a"
    assert events[0].chunk.usage.prompt_tokens == 3
    assert events[0].chunk.usage.completion_tokens == 4


def test_odd_answer_is_tolerated():
    answer = decode_answer(b'{"id":1,"choices":[{"index":0,"message":{"content":"a"},"finish_reason":"stop"},7]}')
    assert [c.message.content for c in answer.choices] == ["a"]
    assert answer.error is None


@pytest.mark.parametrize("body", [b"", b"{oops", b"[]", b'"text"', b"\xff"])
def test_what_is_not_a_json_object(body):
    with pytest.raises(MalformedAnswer):
        decode_answer(body)
    with pytest.raises(MalformedAnswer):
        decode_chunk(body)


@pytest.mark.parametrize(
    "event",
    [
        data(error={"message": "out of memory", "type": "server_error"}),
        data(error="out of memory"),
        b'event: error\ndata: {"message": "out of memory"}\n\n',
        b"event: error\ndata: out of memory\n\n",
    ],
)
async def test_errors_in_a_stream_take_many_forms(bench, serve, event):
    with pytest.raises(StreamCut) as caught:
        await events_of(bench, serve, choice(content="a") + event)
    assert caught.value.kind == "upstream_error"
    assert "out of memory" not in str(caught.value)
    with pytest.raises(NoBackend):
        await events_of(bench, serve, event)


async def test_null_error_is_no_error(bench, serve):
    body = data(choices=[{"index": 0, "delta": {"content": "a"}, "finish_reason": "stop"}], error=None)
    assert len(await events_of(bench, serve, body)) == 1


async def test_a_plain_answer_to_a_stream_request_is_an_error(bench, serve):
    origin = await serve(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}")
    bench.pool("main", f"http://{origin}/v1", attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open()
    assert "asked for a stream" in caught.value.attempts[0].error


@pytest.mark.parametrize("stream", [True, False])
async def test_compression_that_nobody_asked_for_is_an_error(bench, serve, stream):
    origin = await serve(b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 4\r\n\r\n\x1f\x8b\x08\x00")
    bench.pool("main", f"http://{origin}/v1", attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open(stream=stream)
    assert "compressed" in caught.value.attempts[0].error


async def test_an_error_whose_body_never_comes_is_still_an_error(bench, serve, monkeypatch):
    monkeypatch.setattr("backends.attempting.ERROR_BODY_S", 0.1)

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 503 Down\r\ncontent-length: 9\r\n\r\n")
        await reader.read()

    origin = await serve(handle)
    bench.pool("main", f"http://{origin}/v1", attempts=1)
    with pytest.raises(NoBackend) as caught:
        await bench.open()
    assert caught.value.attempts[0].error == "upstream_error: status 503"


async def test_done_without_a_reason_is_a_break_if_the_server_used_to_give_one(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("early_done,after=2")
    assert [event.done async for event in answer.events][-1]
    assert answer.attempt.outcome == "success"
    answer = await bench.open("mock,chunks=1")
    assert [event.done async for event in answer.events][-1]
    answer = await bench.open("early_done,after=2")
    with pytest.raises(StreamCut, match="finish reason"):
        async for _ in answer.events:
            pass
    assert answer.attempt.outcome == "cut"


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"choices":' * 100_000,
        b"\xff",
        b"",
        b"[]",
        b"{}",
        b'{"choices":[{"message":{"content":"\xc3"}}]}',
        b'{"choices":[{"message":{"content":"a"}}],"x_unknown":"\xc3"}',
    ],
)
def test_what_is_no_answer_is_told_apart(body):
    with pytest.raises(MalformedAnswer):
        OPENAI.answer(body, Call({}, "chat", False, "r"))
    assert error_in(body) is None


def test_an_answer_to_embeddings_has_no_choices():
    assert OPENAI.answer(b'{"data":[]}', Call({}, "embeddings", False, "r")).completion.choices == []


def test_an_error_may_be_the_whole_body():
    body = b'{"object":"error","message":"out of memory","type":"InternalServerError","code":500}'
    assert OPENAI.answer(body, Call({}, "chat", False, "r")).completion.error["code"] == 500
    assert OPENAI.error(body)["message"] == "out of memory"
    with pytest.raises(AttemptFailed) as caught:
        OPENAI.reader(Call({}, "chat", True, "r")).read((b"", body, b""))
    assert caught.value.status == 500


# Retry-After.


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after-ms": "nan"}, None),
        ({"retry-after": "Wed, 21 Oct 2015 07:28:00 GMT"}, 0),
    ],
)
def test_retry_after(headers, seconds):
    assert retry_after_s(headers) == seconds


def test_retry_after_as_a_date():
    assert retry_after_s({"retry-after": email.utils.formatdate(time.time() + 30, usegmt=True)}) == pytest.approx(
        30, abs=2
    )
