"""Integers written as `5.0`: taken where an integer belongs, and nowhere does anything else pass for one."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.protocol import ChatRequest, CompletionRequest, convert

HELLO = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens", "n", "seed", "top_logprobs"])
@pytest.mark.parametrize(("written", "meant"), [("5.0", 5), ("5e0", 5), ("50e-1", 5), ("-0.0", 0), ("1e3", 1000)])
def test_a_whole_number_is_an_integer_however_it_is_written(name: str, written: str, meant: int) -> None:
    body = {**HELLO, name: msgspec.json.decode(written)}
    request = convert(body, ChatRequest)
    assert getattr(request, name) == meant
    assert (body[name], type(body[name])) == (meant, int), "the backend gets an integer"


@pytest.mark.parametrize("value", [5.5, "5", True, [5], 1e300, -1e19, {"a": 1}])
def test_nothing_else_is(value: Any) -> None:
    body = {**HELLO, "max_tokens": value, "n": 2.0}
    with pytest.raises(msgspec.ValidationError, match="max_tokens"):
        convert(body, ChatRequest)
    assert body["max_tokens"] == value


def test_numbers_that_may_be_fractions_stay_as_they_are() -> None:
    body = {**HELLO, "temperature": 1.0, "presence_penalty": 0.0, "n": 1.0, "unknown": 1.0}
    convert(body, ChatRequest)
    assert {name: type(body[name]) for name in ("temperature", "presence_penalty", "n", "unknown")} == {
        "temperature": float,
        "presence_penalty": float,
        "n": int,
        "unknown": float,
    }


def test_token_ids_are_integers_from_the_start() -> None:
    with pytest.raises(msgspec.ValidationError, match="prompt"):
        convert({"model": "m", "prompt": [1.0], "max_tokens": 1.0}, CompletionRequest)


class _Inner(msgspec.Struct):
    count: int | None = None


class _Outer(msgspec.Struct):
    inner: _Inner
    many: list[_Inner] = []


def test_inside_objects_and_lists_too() -> None:
    body: dict[str, Any] = {"inner": {"count": 1024.0}, "many": [{}, {"count": 2.0}, {"count": 3.0}]}
    assert convert(body, _Outer).inner.count == 1024
    assert msgspec.json.encode(body) == b'{"inner":{"count":1024},"many":[{},{"count":2},{"count":3}]}'
    with pytest.raises(msgspec.ValidationError, match=r"many\[1\]"):
        convert({"inner": {}, "many": [{"count": 1.0}, {"count": 1.5}]}, _Outer)
