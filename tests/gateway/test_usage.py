"""Usage: parts within their wholes, whatever a server says."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends import protocol
from gateway.ledger.usage import MOST_TOKENS, InvalidUsage, Usage, from_openai

counts = st.one_of(st.none(), st.integers(-5, 10**7))


def wire(
    prompt: int | None = None,
    completion: int | None = None,
    total: int | None = None,
    *,
    cached: int | None = None,
    written: int | None = None,
    reasoning: int | None = None,
) -> protocol.Usage:
    return protocol.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=total,
        prompt_tokens_details=protocol.PromptTokensDetails(cached_tokens=cached, cache_creation_tokens=written),
        completion_tokens_details=protocol.CompletionTokensDetails(reasoning_tokens=reasoning),
    )


def test_cached_tokens_are_part_of_the_input() -> None:
    usage = from_openai(wire(100, 20, 120, cached=60, written=10, reasoning=5))
    assert usage == Usage(
        input_tokens=100, output_tokens=20, cached_input_tokens=60, cache_write_tokens=10, reasoning_tokens=5
    )
    assert usage is not None
    assert usage.fresh_input_tokens == 30
    assert usage.total_tokens == 120
    assert usage.source == "reported"


def test_an_explicit_zero_is_a_report() -> None:
    fallback = Usage(input_tokens=7, output_tokens=9, source="counted")
    assert from_openai(wire(0, 0, 0), fallback) == Usage(input_tokens=0, output_tokens=0, source="reported")


def test_a_missing_report_is_the_fallback() -> None:
    fallback = Usage(input_tokens=7, output_tokens=9, source="counted")
    assert from_openai(None, fallback) is fallback
    assert from_openai(protocol.Usage(), fallback) is fallback
    assert from_openai(None) is None


def test_a_missing_count_comes_from_the_total_or_the_fallback() -> None:
    assert from_openai(wire(12, None, 12)) == Usage(input_tokens=12, output_tokens=0)
    assert from_openai(wire(None, 4, 10)) == Usage(input_tokens=6, output_tokens=4)
    fallback = Usage(input_tokens=7, output_tokens=9, source="counted")
    assert from_openai(wire(12), fallback) == Usage(input_tokens=12, output_tokens=9, source="counted")
    assert from_openai(wire(None, 3), fallback) == Usage(input_tokens=7, output_tokens=3, source="counted")


def test_cached_input_counted_beside_the_input_is_added(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        usage = from_openai(wire(10, 5, cached=90))
    assert usage == Usage(input_tokens=100, output_tokens=5, cached_input_tokens=90)
    assert "beside" in caplog.text


def test_reasoning_counted_beside_the_output_is_added() -> None:
    assert from_openai(wire(10, 5, 315, reasoning=300)) == Usage(
        input_tokens=10, output_tokens=305, reasoning_tokens=300
    )
    assert from_openai(wire(10, 5, 15, reasoning=3)) == Usage(input_tokens=10, output_tokens=5, reasoning_tokens=3)


@pytest.mark.parametrize(
    "reported",
    [
        wire(MOST_TOKENS + 1, 5),
        wire(5, 10**30),
        wire(5, None, 2**40),
        wire(5, 5, cached=2**63),
        wire(5, 5, written=2**64),
        wire(5, 5, reasoning=2**31),
    ],
)
def test_more_tokens_than_any_request_has_are_not_believed(
    reported: protocol.Usage, caplog: pytest.LogCaptureFixture
) -> None:
    fallback = Usage(input_tokens=7, output_tokens=9, source="counted")
    assert from_openai(reported, fallback) is fallback
    assert from_openai(reported) is None
    assert "not believed" in caplog.text
    assert from_openai(wire(MOST_TOKENS, MOST_TOKENS)) == Usage(input_tokens=MOST_TOKENS, output_tokens=MOST_TOKENS)


@given(counts, counts, counts, counts, counts, counts)
def test_any_report_becomes_a_consistent_usage(
    prompt: int | None,
    completion: int | None,
    total: int | None,
    cached: int | None,
    written: int | None,
    reasoning: int | None,
) -> None:
    fallback = Usage(input_tokens=1, output_tokens=1, source="counted")
    reported = wire(prompt, completion, total, cached=cached, written=written, reasoning=reasoning)
    usage = from_openai(reported, fallback)
    assert usage is not None  # and its constructor has checked the bounds
    assert usage.fresh_input_tokens >= 0
    if prompt is not None and completion is not None:
        assert usage.input_tokens >= prompt
        assert usage.output_tokens >= completion


@pytest.mark.parametrize(
    "fields",
    [
        {"input_tokens": -1, "output_tokens": 0},
        {"input_tokens": 1, "output_tokens": -1},
        {"input_tokens": 10, "output_tokens": 0, "cached_input_tokens": 6, "cache_write_tokens": 5},
        {"input_tokens": 1, "output_tokens": 2, "reasoning_tokens": 3},
        {"input_tokens": 1, "output_tokens": 2, "cached_input_tokens": -1},
    ],
)
def test_contradictions_are_refused(fields: dict[str, int]) -> None:
    with pytest.raises(InvalidUsage):
        Usage(**fields)
