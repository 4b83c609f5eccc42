"""The meter's own counts, and how it reads usage."""

from __future__ import annotations

import msgspec
import pytest

from backends.protocol import ChatChunk, ChatCompletion
from gateway.metering import Meter


def chunk(**fields: object) -> ChatChunk:
    return msgspec.convert(fields, ChatChunk)


def test_cumulative_usage_is_not_summed() -> None:
    meter = Meter()
    for completion in (1, 5, 9):
        meter.see(chunk(choices=[], usage={"prompt_tokens": 7, "completion_tokens": completion}))
    assert meter.usage is not None
    assert meter.usage.completion_tokens == 9


@pytest.mark.parametrize(
    ("deltas", "expected"),
    [
        ([{"content": "a"}] * 5, 5),
        ([{"content": "x" * 40}], 10),
        ([{"role": "assistant"}, {"content": ""}], 0),
        ([{"reasoning_content": "hm"}, {"content": "so"}], 2),
        ([{"reasoning_content": "x" * 8, "content": "y" * 8}], 4),
        ([{"tool_calls": [{"index": 0, "function": {"arguments": "{" * 9}}]}], 3),
        ([{"tool_calls": [{"index": 0, "function": {"name": "find_orders", "arguments": ""}}]}], 3),
        ([{"content": "今天下午三点开会"}], 6),  # 24 bytes
    ],
)
def test_own_count(deltas: list[dict[str, object]], expected: int) -> None:
    meter = Meter()
    for delta in deltas:
        meter.see(chunk(choices=[{"index": 0, "delta": delta}]))
    assert meter.counted_output() == expected


def test_complete_when_every_choice_has_ended() -> None:
    meter = Meter()
    meter.see(chunk(choices=[{"index": 0, "delta": {}, "finish_reason": "stop"}]))
    assert meter.complete(1)
    assert not meter.complete(2)
    meter.see(chunk(choices=[{"index": 1, "delta": {}, "finish_reason": "length"}]))
    assert meter.complete(2)


def test_a_whole_answer() -> None:
    meter = Meter()
    answer = {"id": "a-1", "choices": [{"message": {"content": "abcdefgh"}, "finish_reason": "stop"}]}
    meter.see_whole(msgspec.convert(answer, ChatCompletion))
    assert (meter.counted_output(), meter.finish_reasons, meter.answer_id) == (2, {0: "stop"}, "a-1")


def test_everything_that_a_whole_answer_holds_was_written() -> None:
    meter = Meter()
    call = {"id": "call_1", "type": "function", "function": {"name": "f" * 8, "arguments": "{" * 8}}
    message = {"content": "c" * 8, "reasoning_content": "r" * 8, "refusal": "n" * 8, "tool_calls": [call]}
    meter.see_whole(msgspec.convert({"choices": [{"message": message}]}, ChatCompletion))
    assert meter.counted_output() == 10
