"""Whatever a server streams, in whatever pieces: the events of a response come in order and tell of all of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.attempt import StreamCut
from backends.protocol import ChunkChoice, Delta, FunctionCall, ToolCall
from gateway.dialects.responses_stream import StreamedOutput
from tests.gateway.responses_types import EVENTS, checked, folded

TEXT = st.text(min_size=1, max_size=8)
KINDS = st.sampled_from(["reasoning_content", "content", "refusal", "call", "arguments"])


def deltas(script: list[tuple[str, str]]) -> list[Delta]:
    """A script as a server's deltas: calls get their numbers, and arguments go to the call that came last."""
    made: list[Delta] = []
    calls = -1
    for kind, said in script:
        if kind == "call":
            calls += 1
            made.append(Delta(tool_calls=[ToolCall(id=f"c{calls}", index=calls, function=FunctionCall(name=said))]))
        elif kind == "arguments":
            if made and made[-1].tool_calls:
                made.append(Delta(tool_calls=[ToolCall(index=calls, function=FunctionCall(arguments=said))]))
        else:
            made.append(Delta(**{kind: said}))
    return made


def told(written: list[bytes]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for number, raw in enumerate(written):
        name, data = raw.decode().removesuffix("\n\n").split("\ndata: ")
        event = json.loads(data)
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        checked(EVENTS[event["type"]], event)
        found.append(event)
    return found


@settings(max_examples=300, deadline=None)
@given(script=st.lists(st.tuples(KINDS, TEXT), max_size=20), summary=st.booleans())
def test_the_events_tell_of_everything_in_order(script: list[tuple[str, str]], summary: bool) -> None:
    output = StreamedOutput("x", summary=summary)
    written: list[bytes] = []
    said = deltas(script)
    for delta in said:
        output.add(ChunkChoice(delta=delta), written)
    output.close(written, "incomplete")
    items = folded(told(written))
    assert items == output.items
    assert len({item["id"] for item in items}) == len(items)
    assert [item["status"] for item in items] == ["completed"] * (len(items) - 1) + ["incomplete"] * bool(items)

    def spoken(delta: Delta) -> str:
        function = delta.tool_calls[0].function if delta.tool_calls else None
        call = (function.name or function.arguments or "") if function else ""
        return (delta.reasoning_content or "") + (delta.content or "") + (delta.refusal or "") + call

    def spoken_by(item: dict[str, Any]) -> str:
        if item["type"] == "function_call":
            return str(item["name"]) + str(item["arguments"])
        parts = item.get("content") or item.get("summary") or []
        return "".join(part.get("text", part.get("refusal")) for part in parts)

    assert "".join(map(spoken_by, items)) == "".join(map(spoken, said))


def test_a_broken_item_is_closed_without_telling() -> None:
    output = StreamedOutput("x", summary=False)
    written: list[bytes] = []
    output.add(ChunkChoice(delta=Delta(content="So f")), written)
    before = len(written)
    output.close(None, "incomplete")
    assert len(written) == before
    written.append(output.say("error", {"message": "m", "code": None, "param": None}))
    assert told(written)[-1]["sequence_number"] == before
    assert output.items[0]["content"][0]["text"] == "So f"


def test_arguments_of_an_earlier_call_cannot_be_said() -> None:
    output = StreamedOutput("x", summary=False)
    for delta in deltas([("call", "f"), ("call", "g")]):
        output.add(ChunkChoice(delta=delta), [])
    output.add(ChunkChoice(delta=Delta(content="Well")), [])
    late = Delta(tool_calls=[ToolCall(index=0, function=FunctionCall(arguments="{}"))])
    with pytest.raises(StreamCut):
        output.add(ChunkChoice(delta=late), [])
