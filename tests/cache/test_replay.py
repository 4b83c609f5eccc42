"""Replay: a kept answer as a body or a stream, and the way back."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.replay import Collector, InvalidStream, canonical_answer, fold, pieces, replay_chunks, replay_completion


def answer(content: str = "Paris is the capital of France.", **message: Any) -> dict[str, Any]:
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 100,
        "model": "smollm2-135m",
        "system_fingerprint": "fp",
        "choices": [
            {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": "stop"}
        ],
        "usage": {"prompt_tokens": 12, "completion_tokens": 7, "total_tokens": 19},
    }


def replayed(whole: dict[str, Any], **options: Any) -> list[bytes]:
    return replay_chunks(canonical_answer(whole), id="chatcmpl-1", created=100, **{"include_usage": True, **options})


def decoded(events: list[bytes]) -> list[dict[str, Any]]:
    assert events[-1] == b"data: [DONE]\n\n"
    return [json.loads(event.removeprefix(b"data: ")) for event in events[:-1]]


def test_a_body_has_a_fresh_id_and_time_and_is_else_the_same() -> None:
    body = json.loads(replay_completion(canonical_answer(answer()), id="new", created=5))
    assert body == {**answer(), "id": "new", "created": 5}


def test_a_stream_has_role_content_finish_usage_done() -> None:
    chunks = decoded(replayed(answer(), usage_extra={"tierline": {"cache": "exact"}}))
    assert {(chunk["id"], chunk["object"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        ("chatcmpl-1", "chat.completion.chunk", 100, "smollm2-135m")
    }
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [delta["content"] for delta in deltas[1:-1]] == ["Paris ", "is ", "the ", "capital ", "of ", "France."]
    assert deltas[-1] == {}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == answer()["usage"]
    assert chunks[-1]["tierline"] == {"cache": "exact"}


def test_usage_is_left_out_unless_asked_for() -> None:
    chunks = decoded(replayed(answer(), include_usage=False))
    assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)


@given(content=st.text(max_size=300), reasoning=st.none() | st.text(max_size=50), refusal=st.sampled_from([None, ...]))
def test_fold_of_replay_is_the_answer(content: str, reasoning: str | None, refusal: Any) -> None:
    message: dict[str, Any] = {} if reasoning is None else {"reasoning_content": reasoning}
    if refusal is None:
        message["refusal"] = None
    whole = answer(content, **message)
    if reasoning == "":  # an empty text and none at all are the same stream
        del whole["choices"][0]["message"]["reasoning_content"]
    found = fold(replayed(answer(content, **message)))
    assert found == whole
    assert found is not None
    assert canonical_answer(found) == canonical_answer(whole)


@given(text=st.text(max_size=400))
def test_pieces_join_to_the_text_and_are_short(text: str) -> None:
    assert "".join(pieces(text)) == text
    assert all(len(piece.rstrip()) <= 24 for piece in pieces(text))


@given(cuts=st.lists(st.integers(0, 2000), max_size=20))
def test_bytes_may_be_cut_anywhere(cuts: list[int]) -> None:
    stream = b"".join(replayed(answer("Zoë isst Crêpes 🥞.\n\ndata: no event")))
    collector = Collector()
    edges = sorted({0, len(stream), *(cut % len(stream) for cut in cuts)})
    for start, end in pairwise(edges):
        collector.feed(stream[start:end])
    assert collector.answer() == answer("Zoë isst Crêpes 🥞.\n\ndata: no event")


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_cut_stream_is_no_answer(kept: int) -> None:
    assert fold(replayed(answer())[:kept]) is None


def test_a_stream_with_an_error_is_no_answer() -> None:
    events = replayed(answer())
    events.insert(-1, b'data: {"error": {"message": "upstream died"}}\n\n')
    assert fold(events) is None


def test_comments_other_line_ends_and_other_fields_of_events_are_understood() -> None:
    stream = b"".join(replayed(answer())).replace(b"\n", b"\r\n")
    collector = Collector()
    collector.feed(b": keep-alive\r\n\r\nevent: chunk\r\nid: 1\r\n" + stream)
    assert collector.answer() == answer()


def test_what_is_no_json_is_an_error() -> None:
    with pytest.raises(InvalidStream):
        Collector().feed(b"data: {broken\n\n")


def test_several_choices_tool_calls_and_logprobs_fold() -> None:
    def chunk(index: int, finish: str | None = None, logprobs: Any = None, **delta: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": logprobs}
        return {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}

    collector = Collector()
    for part in [
        chunk(1, role="assistant", content="B"),
        chunk(0, role="assistant", tool_calls=[{"index": 0, "id": "c", "type": "function", "function": {"name": "f"}}]),
        chunk(0, tool_calls=[{"index": 0, "function": {"arguments": '{"a"'}}]),
        chunk(
            0, tool_calls=[{"index": 1, "id": "d", "type": "function", "function": {"name": "g", "arguments": "{}"}}]
        ),
        chunk(0, tool_calls=[{"index": 0, "function": {"arguments": ": 1}"}}]),
        chunk(1, content="b", logprobs={"content": [{"token": "b"}]}),
        chunk(1, logprobs={"content": [{"token": "c"}]}, content="c"),
        chunk(0, "tool_calls"),
    ]:
        collector.add(part)
    assert collector.answer() is None
    collector.add(chunk(1, "stop"))
    found = collector.answer()
    assert found is not None
    first, second = found["choices"]
    assert first["finish_reason"] == "tool_calls"
    assert first["message"] == {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
            {"id": "d", "type": "function", "function": {"name": "g", "arguments": "{}"}},
        ],
    }
    assert second["message"]["content"] == "Bbc"
    assert second["logprobs"] == {"content": [{"token": "b"}, {"token": "c"}]}
