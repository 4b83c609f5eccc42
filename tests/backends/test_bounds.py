"""The bounds of a body's structure: exactly so much passes, and one more does not."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from backends.bounds import MAX_DEPTH, MAX_ELEMENTS, MAX_FIELDS, MAX_TOKEN_IDS, check_bounds, check_elements
from backends.protocol import InvalidRequest


def nested(levels: int) -> Any:
    found: Any = 1
    for level in range(levels):
        found = [found] if level % 2 else {"a": found}
    return found


@pytest.mark.parametrize(
    ("make", "most", "code", "param"),
    [
        (lambda n: {"messages": [{}] * n}, 10_000, "array_too_long", "messages"),
        (lambda n: {"messages": [{"content": ["x"] * n}]}, 10_000, "array_too_long", "messages[0].content"),
        (lambda n: {"tools": [{}] * n}, 1024, "array_too_long", "tools"),
        (lambda n: {"logit_bias": {str(i): 1 for i in range(n)}}, 4096, "array_too_long", "logit_bias"),
        (lambda n: {f"field{i}": 1 for i in range(n)}, MAX_FIELDS, "array_too_long", None),
        (lambda n: {"x": [[0] * (n - 2)]}, MAX_ELEMENTS, "array_too_long", None),
        (lambda n: {"x": nested(n - 1)}, MAX_DEPTH, "invalid_json", None),
        (lambda n: {"ids": ["x"] * n}, 2048, "array_too_long", "ids"),
        (lambda n: {"ids": [5] * n}, 1_048_576, "array_too_long", "ids"),
    ],
)
def test_one_more_is_too_many(make: Any, most: int, code: str, param: str | None) -> None:
    check_bounds(make(most), tokens="ids")
    with pytest.raises(InvalidRequest) as refused:
        check_bounds(make(most + 1), tokens="ids")
    assert (refused.value.code, refused.value.param) == (code, param)


@pytest.mark.parametrize("odd", [{"messages": 5}, {"messages": [5, {"content": 7}]}, {"tools": "x"}, {"ids": None}, {}])
def test_types_are_for_others_to_check(odd: Any) -> None:
    check_bounds(odd, tokens="ids")


@pytest.mark.parametrize("element", [b"{}", b"[]", b"1", b'""', rb'"\\"', rb'"a\""', b'{"a":1}'])
def test_a_body_of_very_many_elements_is_refused_before_it_is_decoded(element: bytes) -> None:
    with pytest.raises(InvalidRequest, match="more than 1248576 elements") as refused:
        check_elements(b'{"a":[' + b",".join([element] * 3_000_000) + b"]}")
    assert refused.value.code == "array_too_long"


@pytest.mark.parametrize("end", [b"", b"\\"])
def test_a_text_without_an_end_is_looked_through_once(end: bytes) -> None:
    check_elements(b'{"a":["' + rb"\"," * 3_000_000 + end)


@pytest.mark.parametrize("text", ["a,[{", '\\",', "\\\\,"])
def test_what_looks_like_elements_within_texts_does_not_count(text: str) -> None:
    messages = [{"role": "user", "content": text * 400_000} for _ in range(4)]
    check_elements(msgspec.json.encode({"messages": messages}))


def test_as_many_token_ids_as_a_prompt_may_have_are_decoded() -> None:
    check_elements(msgspec.json.encode({"prompt": [1] * MAX_TOKEN_IDS, "stop": ["a"] * 1000}))
