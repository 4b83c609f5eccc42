"""Prices: from the file or the list, each token charged once, versions that tell rates apart."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.ledger.prices import UNPRICED, InvalidPrice, ModelPrice, PriceBook, Rates, cost, estimate
from gateway.ledger.usage import Usage
from gateway.settings import Settings

NOON = datetime(2026, 11, 20, 12, 0, tzinfo=UTC)
NIGHT = datetime(2026, 11, 20, 20, 0, tzinfo=UTC)


def settings(model: dict[str, Any], backend: dict[str, Any] | None = None, name: str = "m") -> Settings:
    return Settings.model_validate(
        {
            "models": {name: {"tier": "small", "backend": "b", **model}},
            "backends": {"b": backend or {"base_urls": ["http://10.0.0.1/v1"]}},
        }
    )


@st.composite
def prices(draw: st.DrawFn) -> ModelPrice:
    starts = [0, *sorted(draw(st.sets(st.integers(1, 300_000), max_size=3)))]
    rate = st.integers(0, 10**12)
    bands = tuple(
        Rates(
            above_input_tokens=start,
            input=draw(rate),
            cached_input=draw(rate),
            cache_write=draw(rate),
            output=draw(rate),
            reasoning=draw(rate),
        )
        for start in starts
    )
    return ModelPrice(version="v", source="override", bands=bands, request_nanousd=draw(st.integers(0, 10**9)))


@st.composite
def usages(draw: st.DrawFn) -> Usage:
    cached, written, fresh = (draw(st.integers(0, 10**6)) for _ in range(3))
    reasoning, rest = (draw(st.integers(0, 10**5)) for _ in range(2))
    return Usage(
        input_tokens=cached + written + fresh,
        cached_input_tokens=cached,
        cache_write_tokens=written,
        output_tokens=reasoning + rest,
        reasoning_tokens=reasoning,
    )


def test_an_override_is_exact_and_versioned() -> None:
    price = {"version": "mine-1", "input_usd_per_million": "2.5", "output_usd_per_million": "10"}
    book = PriceBook(settings({"price": {**price, "cached_input_usd_per_million": "0.25"}}))
    found = book.price_for("m")
    assert found.source == "override"
    assert found.version.startswith("mine-1@")
    spent = cost(found, Usage(input_tokens=1_000, cached_input_tokens=400, output_tokens=100))
    # 600 at $2.50, 400 at $0.25, 100 at $10 per million tokens
    assert (spent.input, spent.cached_input, spent.output) == (1_500_000, 100_000, 1_000_000)
    assert spent.total_nanousd == 2_600_000


def test_the_same_version_name_at_another_rate_is_another_version() -> None:
    def version(rate: str) -> str:
        price = {"version": "v1", "input_usd_per_million": rate, "output_usd_per_million": "1"}
        return PriceBook(settings({"price": price})).price_for("m").version

    assert version("1") == version("1.0")
    assert version("1") != version("1.01")


def test_cached_input_costs_as_input_unless_said_otherwise() -> None:
    price = {"input_usd_per_million": "4", "output_usd_per_million": "8"}
    found = PriceBook(settings({"price": price})).price_for("m")
    usage = Usage(input_tokens=10, cached_input_tokens=10, output_tokens=0)
    assert cost(found, usage).total_nanousd == 40_000


def test_an_override_finer_than_the_ledger_is_refused() -> None:
    price = {"input_usd_per_million": "0.0000000001", "output_usd_per_million": "1"}
    with pytest.raises(InvalidPrice, match="'m'"):
        PriceBook(settings({"price": price}))


def test_price_as_takes_the_list() -> None:
    found = PriceBook(settings({"price_as": "openai:gpt-4o"})).price_for("m")
    assert found.source == "genai-prices"
    assert ":openai:gpt-4o@" in found.version
    usage = Usage(input_tokens=1_000_000, cached_input_tokens=400_000, output_tokens=1_000)
    # The list's figures: 2.50, 1.25 cached, 10 dollars per million tokens.
    assert cost(found, usage).total_nanousd == 1_500_000_000 + 500_000_000 + 10_000_000


def test_long_inputs_reach_the_dearer_band_as_a_whole() -> None:
    found = PriceBook(settings({"price_as": "openai:gpt-5.4"})).price_for("m")
    below = cost(found, Usage(input_tokens=272_000, output_tokens=1_000_000))
    above = cost(found, Usage(input_tokens=272_001, output_tokens=1_000_000))
    assert below.output == 15 * 10**9
    assert above.output == 22_500_000_000
    assert above.input == 272_001 * 5_000
    assert estimate(found, 272_001, 1_000_000) >= above.total_nanousd


def test_prices_by_time_of_day() -> None:
    book = PriceBook(settings({"price_as": "deepseek:deepseek-chat"}))
    day, night = book.price_for("m", at=NOON), book.price_for("m", at=NIGHT)
    assert day.bands[0].input == 2 * night.bands[0].input
    assert day.version != night.version
    assert book.price_for("m", at=NOON) == day


def test_prices_by_service_tier() -> None:
    book = PriceBook(settings({"price_as": "openai:gpt-5.4"}))
    standard, flex = book.price_for("m", at=NOON), book.price_for("m", "flex", NOON)
    assert flex.bands[0].input * 2 == standard.bands[0].input
    assert book.price_for("m", "default", NOON) == standard


def test_a_vendor_is_known_by_its_address_then_by_the_model_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        by_url = PriceBook(settings({"upstream_model": "gpt-4o"}, {"base_urls": ["https://api.openai.com/v1"]}))
    assert not caplog.text
    assert ":openai:gpt-4o@" in by_url.price_for("m").version
    with caplog.at_level(logging.WARNING):
        by_name = PriceBook(settings({"upstream_model": "gpt-4o"}))
    assert by_name.price_for("m").version == by_url.price_for("m").version
    assert "by its name only" in caplog.text


def test_a_model_without_a_price_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        book = PriceBook(settings({"upstream_model": "home-made"}))
    assert "no price" in caplog.text
    assert book.price_for("m") is UNPRICED
    assert book.price_for("never heard of") is UNPRICED
    assert cost(UNPRICED, Usage(input_tokens=5, output_tokens=5)).total_nanousd == 0
    assert estimate(UNPRICED, 1000, 1000) == 0
    assert book.known() == {"m": UNPRICED}


def test_the_bundled_engine_never_gets_a_vendors_price() -> None:
    raw = {
        "models": {"gpt-4o": {"tier": "small", "backend": "b"}},
        "backends": {"b": {"engine": "e"}},
        "engines": {"e": {"model": "x"}},
    }
    assert PriceBook(Settings.model_validate(raw)).price_for("gpt-4o") is UNPRICED


@pytest.mark.parametrize(
    ("price_as", "hint"),
    [("gpt-4o", "PROVIDER:MODEL"), ("opnai:gpt-4o", "'openai'"), ("openai:gpt-4oo", "'gpt-4o'")],
)
def test_a_price_as_that_names_nothing_is_refused(price_as: str, hint: str) -> None:
    with pytest.raises(InvalidPrice, match=hint):
        PriceBook(settings({"price_as": price_as}))


@given(prices(), usages())
def test_every_token_is_charged_once_and_the_estimate_covers_it(price: ModelPrice, usage: Usage) -> None:
    spent = cost(price, usage)
    parts = (spent.input, spent.cached_input, spent.cache_write, spent.output, spent.reasoning, spent.request)
    assert min(parts) >= 0
    assert spent.total_nanousd == sum(parts)
    assert spent.total_nanousd <= estimate(price, usage.input_tokens, usage.output_tokens)
    rates = price.rates(usage.input_tokens)
    flat = Rates(
        above_input_tokens=0,
        input=rates.input,
        cached_input=rates.input,
        cache_write=rates.input,
        output=rates.output,
        reasoning=rates.output,
    )
    whole = cost(ModelPrice(version="", source="override", bands=(flat,)), usage).total_nanousd
    exact = (usage.input_tokens * rates.input + usage.output_tokens * rates.output) / 10**6
    assert abs(whole - exact) <= 2.5 + exact * 1e-12


def test_the_whole_list_can_be_priced() -> None:
    from genai_prices.data_snapshot import get_snapshot

    from gateway.ledger.prices import _from_list

    known = 0
    for provider in get_snapshot().providers:
        for model in provider.models:
            price = _from_list(provider, model, NOON, None)
            assert all(band.input >= 0 and band.output >= 0 for band in price.bands)
            known += 1
    assert known > 500
