"""What servers say almost in the dialect: what is right stays byte for byte, what is wrong is put right."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.attempt import AttemptFailed, Call
from backends.openai import OPENAI, error_in
from backends.protocol import Delta
from backends.sse import SseParser
from bench.mock_peculiar import SERVERS, TEXT

HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]


def call(operation: Any = "chat", **payload: Any) -> Call:
    return Call({"model": "public", **payload}, operation, True, "req-1")


def delta(**fields: Any) -> dict[str, Any]:
    return {"index": 0, "delta": fields, "finish_reason": None}


def tool(index: int | None = None, name: str | None = None, arguments: str | None = None, **fields: Any) -> Any:
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return {**({} if index is None else {"index": index}), **fields, **({"function": function} if function else {})}


def read(*choices: dict[str, Any], request: Call | None = None) -> list[dict[str, Any]]:
    """What a client gets of a stream with one choice per event; what metering sees must say the same."""
    reader = OPENAI.reader(request or call())
    found = []
    for choice in choices:
        data = msgspec.json.encode({**HEAD, "choices": [choice]})
        event = reader.read((b"data: " + data + b"\n\n", data, b""))
        assert event.raw == b"data: " + event.data + b"\n\n"
        (said,) = msgspec.json.decode(event.data)["choices"]
        assert event.chunk.choices[0].delta == msgspec.convert(said["delta"], Delta)
        assert event.chunk.choices[0].finish_reason == said["finish_reason"]
        found.append(said)
    return found


def calls(*pieces: Any) -> list[dict[str, Any]]:
    """The pieces of tool calls that a client gets, one event each."""
    first, *said = read(delta(role="assistant", content=""), *(delta(tool_calls=[piece]) for piece in pieces))
    assert first["delta"]["role"] == "assistant"
    return [choice["delta"]["tool_calls"][0] for choice in said]


@pytest.mark.parametrize("server", ["openai", "llama.cpp"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_what_is_right_stays_byte_for_byte(server: str, tools: list[Any]) -> None:
    said = SERVERS[server](
        {"model": "m", "tools": tools, "reasoning_effort": "low", "stream_options": {"include_usage": True}}
    )
    reader = OPENAI.reader(call(tools=tools))
    parser = SseParser()
    for piece in said.stream():
        raw = piece[piece.index(b"\r\n") + 2 : -2]
        (parsed,) = parser.feed(raw)
        event = reader.read(parsed)
        assert event.raw is parsed[0]
        assert event.raw == raw
    body = said.answer().partition(b"\r\n\r\n")[2]
    assert OPENAI.answer(body, call()).body is body


def test_numbers_of_a_mended_event_stay_as_they_are() -> None:
    data = (
        b'{"x":[1e-7,18446744073709551616,0.1,-0.0],"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":""}]}'
    )
    event = OPENAI.reader(call()).read((b"", data, b""))
    said = msgspec.json.decode(event.data)
    assert said["x"] == [1e-7, 18446744073709551616, 0.1, -0.0]
    assert said["choices"][0]["finish_reason"] is None


def test_calls_without_an_index_are_numbered() -> None:
    pieces = calls(
        tool(id="a", type="function", name="f", arguments='{"x"'),
        tool(arguments=":1}"),
        tool(id="a", name="f", arguments=""),
        tool(id="b", type="function", name="f", arguments="{}"),
        tool(type="function", name="g", arguments="{}"),
        tool(extra_content={"google": {"thought_signature": "s"}}),
    )
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 1, 2, 2]
    assert [piece.get("id", "")[:5] for piece in pieces] == ["a", "", "", "b", "call_", ""]
    assert pieces[5]["extra_content"] == {"google": {"thought_signature": "s"}}


def test_calls_at_one_index_are_told_apart_once_the_arguments_are_whole() -> None:
    pieces = calls(
        tool(0, id="a", name="f", arguments='{"x":'),
        tool(0, id="other", name="f", arguments='"{}"'),
        tool(0, id="third", name="f", arguments="}"),
        tool(0, id="fourth", name="f", arguments=""),
        tool(0, id="b", type="function", name="f", arguments="{}"),
        tool(0, id="c", type="function", name="g", arguments=""),
        tool(0, arguments="{}"),
    )
    assert [piece["index"] for piece in pieces] == [0, 0, 0, 0, 1, 2, 2]
    assert [piece.get("id") for piece in pieces] == ["a", None, None, None, "b", "c", None]
    assert [piece["function"].get("name") for piece in pieces] == ["f", None, None, None, "f", "g", None]


def test_calls_side_by_side_stay_apart() -> None:
    said = read(
        delta(role="assistant", tool_calls=[tool(0, "f", "", id="a"), tool(1, "g", "", id="b")]),
        delta(tool_calls=[tool(1, None, "[1"), tool(0, None, "{}"), tool(1, None, "]")]),
    )
    assert [piece["index"] for piece in said[1]["delta"]["tool_calls"]] == [1, 0, 1]
    assert said[0]["delta"]["tool_calls"][0]["type"] == "function"


def test_choices_number_their_calls_each_for_itself() -> None:
    reader = OPENAI.reader(call(n=2))
    indices = []
    for choice in (0, 1, 0):
        data = msgspec.json.encode(
            {**HEAD, "choices": [{**delta(tool_calls=[tool(None, "f", "{}", id=f"x{len(indices)}")]), "index": choice}]}
        )
        event = reader.read((b"", data, b""))
        indices.append(event.chunk.choices[0].delta.tool_calls[0].index)
    assert indices == [0, 0, 1]


def test_arguments_that_are_an_object_become_text() -> None:
    choice = delta(
        role="assistant", tool_calls=[{"index": 0, "id": "a", "function": {"name": "f", "arguments": {"ä": 1}}}]
    )
    (said,) = read(choice)
    assert said["delta"]["tool_calls"][0]["function"]["arguments"] == '{"ä":1}'


@pytest.mark.parametrize(
    ("choice", "tools", "reason"),
    [(None, True, "tool_calls"), ("auto", True, "tool_calls"), ("required", True, "stop"), (None, False, "stop")],
)
def test_how_a_choice_with_tools_ends(choice: str | None, tools: bool, reason: str) -> None:
    message: dict[str, Any] = {"role": "assistant", "content": None if tools else "a"}
    if tools:
        message["tool_calls"] = [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    request = call(**({"tool_choice": choice} if choice else {}))
    stop = {"index": 0, "delta": {}, "finish_reason": "stop"}
    *_, last = read(delta(**message), stop, request=request)
    assert last["finish_reason"] == reason
    body = msgspec.json.encode({**HEAD, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]})
    whole = OPENAI.answer(body, request)
    assert whole.completion.choices[0].finish_reason == reason
    assert msgspec.json.decode(whole.body)["choices"][0]["finish_reason"] == reason


def test_a_role_is_said_once() -> None:
    said = read(delta(role="assistant", content="a"), delta(role="assistant", content="b"), delta(role="assistant"))
    assert [choice["delta"] for choice in said] == [{"role": "assistant", "content": "a"}, {"content": "b"}, {}]
    assert read(delta(content="a"))[0]["delta"] == {"role": "assistant", "content": "a"}


@pytest.mark.parametrize("operation", ["chat", "completions"])
def test_a_head_is_given_to_what_has_none(operation: Any) -> None:
    reader = OPENAI.reader(call(operation))
    data = b'{"choices":[{"index":0,"text":"a"}],"model":null}'
    heads = [msgspec.json.decode(reader.read((b"", data, b"")).data) for _ in range(2)]
    kind = {"chat": "chat.completion.chunk", "completions": "text_completion"}[operation]
    assert [(head["id"], head["object"], head["model"]) for head in heads] == [("chatcmpl-1", kind, "public")] * 2
    assert heads[0]["created"] == heads[1]["created"] > 1_700_000_000


def test_empty_names_are_left_alone() -> None:
    """Azure begins with an event whose id and model are empty."""
    data = b'{"choices":[],"created":0,"id":"","model":"","object":"","prompt_filter_results":[]}'
    assert OPENAI.reader(call()).read((b"raw", data, b"")).raw == b"raw"


@pytest.mark.parametrize("reason", ["abort", "error", "insufficient_system_resource"])
def test_a_server_that_gave_up(reason: str) -> None:
    with pytest.raises(AttemptFailed) as failed:
        read(delta(role="assistant", content=TEXT), {**delta(), "finish_reason": reason})
    assert failed.value.kind == "upstream_error"
    body = msgspec.json.encode({**HEAD, "choices": [{"index": 0, "message": {}, "finish_reason": reason}]})
    assert OPENAI.answer(body, call()).completion.error == {"type": "finish_reason", "code": reason}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'[{"error":{"code":400,"message":"no","status":"INVALID_ARGUMENT"}}]', "no"),
        (b'{"error":"no"}', "no"),
        (b'{"detail":"no"}', "no"),
        (b'{"detail":[{"loc":["body","n"],"msg":"no"}]}', '[{"loc":["body","n"],"msg":"no"}]'),
        (b'{"object":"error","message":{"detail":"no"},"type":"invalid_request_error"}', '{"detail":"no"}'),
    ],
)
def test_forms_of_an_error(body: bytes, message: str) -> None:
    assert error_in(body)["message"] == message


@pytest.mark.parametrize("body", [b"[]", b"[7]", b'[{"choices":[]}]', b'"no"', b"{}", b'{"detail":null}'])
def test_what_is_no_error(body: bytes) -> None:
    assert error_in(body) is None
