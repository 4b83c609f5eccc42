"""Pieces of tool calls that come mixed: each call is passed on as a whole, in order, and as early as that allows."""

from __future__ import annotations

import json
from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.attempt import StreamCut
from backends.protocol import FunctionCall, ToolCall
from gateway.dialects.tool_calls import MAX_HELD, PIECE, CallOrder

ARGUMENTS = st.one_of(
    st.just(""), st.dictionaries(st.text(max_size=3), st.text(max_size=5), max_size=3).map(json.dumps)
)


def begin(number: int, arguments: str | None = None) -> ToolCall:
    function = FunctionCall(name=f"f{number}", arguments=arguments)
    return ToolCall(id=f"c{number}", type="function", function=function, index=number)


def piece(number: int | None, arguments: str) -> ToolCall:
    return ToolCall(index=number, function=FunctionCall(arguments=arguments))


def said(pieces: list[ToolCall]) -> list[tuple[str | None, str]]:
    """Name and arguments of each call, as a client that hears one after another puts them together."""
    found = []
    for _, group in groupby(pieces, key=lambda call: call.index):
        parts = [call.function for call in group if call.function is not None]
        found.append((parts[0].name, "".join(part.arguments or "" for part in parts)))
    return found


@settings(max_examples=300, deadline=None)
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=4), data=st.data())
def test_however_they_are_mixed_each_is_whole(calls: list[str], data: st.DataObject) -> None:
    """In any order of the pieces, as long as calls begin in order and no piece comes before its call begins."""
    order, left, begun = CallOrder(), list(calls), 0
    passed: list[ToolCall] = []
    while begun < len(calls) or any(left):
        able = [n for n in range(begun) if left[n]] + ([begun] if begun < len(calls) else [])
        number = data.draw(st.sampled_from(able))
        size = data.draw(st.integers(0 if number == begun else 1, 6))
        taken, left[number] = left[number][:size], left[number][size:]
        if number == begun:
            begun += 1
            passed += order.take(begin(number, taken))
        else:
            passed += order.take(piece(number, taken))
    passed += order.rest()
    assert said(passed) == [(f"f{number}", arguments) for number, arguments in enumerate(calls)]
    assert order.rest() == []


def test_calls_that_are_not_mixed_are_passed_on_piece_by_piece() -> None:
    order = CallOrder()
    pieces = [begin(0, '{"a"'), piece(0, ":1}"), begin(1, ""), piece(1, "{}"), begin(2, "{")]
    assert [order.take(one) for one in pieces] == [[pieces[0]], (pieces[1],), [pieces[2]], (pieces[3],), [pieces[4]]]


def test_a_call_that_waits_goes_on_when_the_next_begins_and_the_one_before_is_whole() -> None:
    order = CallOrder()
    assert said(list(order.take(begin(0, "{")))) == [("f0", "{")]
    assert order.take(begin(1, "{}")) == []
    assert len(order.take(piece(0, "}"))) == 1
    assert said(list(order.take(begin(2, "")))) == [("f1", "{}"), ("f2", "")]


def test_a_piece_without_an_index_belongs_to_the_latest_call() -> None:
    order = CallOrder()
    passed = [*order.take(begin(0, "{")), *order.take(begin(1, "")), *order.take(piece(None, "{}")), *order.rest()]
    assert said(passed) == [("f0", "{"), ("f1", "{}")]


def test_white_space_after_the_end_of_a_call_is_nothing_and_more_is_a_fault() -> None:
    order = CallOrder()
    order.take(begin(0, "{}"))
    order.take(begin(1, ""))
    assert order.take(piece(0, "\n")) == ()
    with pytest.raises(StreamCut, match="was over"):
        order.take(piece(0, "{}"))


def test_what_waits_is_bounded() -> None:
    order = CallOrder()
    order.take(begin(0, "{"))
    order.take(begin(1, "{"))
    for _ in range(MAX_HELD // (1000 + PIECE) - 1):
        assert order.take(piece(1, "x" * 1000)) == []
    with pytest.raises(StreamCut, match="too large to wait") as cut:
        order.take(piece(1, "x" * 2000))
    assert cut.value.kind == "too_large"
