"""Amounts: exact, conserved, and never a float."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger.money import MAX_NANOUSD, InvalidAmount, cost_nanousd, format_usd, parse_usd


@pytest.mark.parametrize(
    ("text", "nanousd"),
    [
        ("12.50", 12_500_000_000),
        ("$1_000", 10**12),
        ("0", 0),
        ("0.000000001", 1),
        (" 3 ", 3 * 10**9),
        (7, 7 * 10**9),
        (Decimal("-0.5"), -500_000_000),
        ("1e-9", 1),
    ],
)
def test_parse(text: str | int | Decimal, nanousd: int) -> None:
    assert parse_usd(text) == nanousd


@pytest.mark.parametrize("text", ["", "ten", "1,50", "NaN", "Infinity", "0.0000000001", "1e30", "9223372037", "--1"])
def test_parse_refuses(text: str) -> None:
    with pytest.raises(InvalidAmount):
        parse_usd(text)


def test_rounding_is_half_up_when_asked_for() -> None:
    assert parse_usd("0.0000000005", exact=False) == 1
    assert parse_usd("0.00000000049", exact=False) == 0
    assert parse_usd(Decimal("0.18000000000000002"), exact=False) == 180_000_000


@given(st.integers(-MAX_NANOUSD, MAX_NANOUSD))
def test_what_is_printed_reads_back(nanousd: int) -> None:
    assert parse_usd(format_usd(nanousd)) == nanousd


def test_format() -> None:
    assert format_usd(1_500_000_000) == "1.50"
    assert format_usd(1) == "0.000000001"
    assert format_usd(-25_000_000) == "-0.025"
    assert format_usd(2 * 10**9, min_decimals=0) == "2"


@given(st.integers(0, 10**9), st.integers(0, 10**13))
def test_cost_is_the_nearest_nano_dollar_half_up(tokens: int, rate: int) -> None:
    exact = Fraction(tokens * rate, 10**6)
    cost = cost_nanousd(tokens, rate)
    assert Fraction(-1, 2) < cost - exact <= Fraction(1, 2)


def test_cost_refuses_negative_counts_and_prices() -> None:
    for tokens, rate in ((-1, 5), (5, -1)):
        with pytest.raises(ValueError, match=">= 0"):
            cost_nanousd(tokens, rate)
