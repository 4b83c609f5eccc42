"""What a token costs: prices from `tierline.yaml`, else from the bundled price list, each with a version of its own.

A version ends in a digest of its rates, so two rows with the same price version were charged at the same rates, even
if somebody edits a price and forgets to rename it. A model without a price costs nothing and says so: its rows carry
the version `unpriced`, and a warning is logged when the price book is made. Rates are nano-dollars per million tokens.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.metadata
import logging
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, Final, Literal

import msgspec

from gateway.ledger.money import InvalidAmount, cost_nanousd, parse_usd
from gateway.ledger.usage import Usage
from gateway.settings import ModelSettings, Price, Settings

logger = logging.getLogger("tierline.ledger")

PriceSource = Literal["override", "genai-prices", "unpriced"]


class InvalidPrice(ValueError):
    """A price in the configuration that cannot be used; the message names the model and what to write instead."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Nano-dollars per million tokens of each class, for requests whose input is longer than `above_input_tokens`."""

    above_input_tokens: int = 0
    input: int
    cached_input: int
    cache_write: int
    output: int
    reasoning: int


class ModelPrice(msgspec.Struct, frozen=True, kw_only=True):
    """A model's rates, by ascending input length, and a fee per request. The longest band reached prices everything."""

    version: str
    source: PriceSource
    bands: tuple[Rates, ...]
    request_nanousd: int = 0

    def rates(self, input_tokens: int) -> Rates:
        chosen = self.bands[0]
        for band in self.bands[1:]:
            if input_tokens > band.above_input_tokens:
                chosen = band
        return chosen


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """Nano-dollars by class; each is rounded half up on its own, and `total_nanousd` is their sum."""

    input: int = 0
    cached_input: int = 0
    cache_write: int = 0
    output: int = 0
    reasoning: int = 0
    request: int = 0

    @property
    def total_nanousd(self) -> int:
        return self.input + self.cached_input + self.cache_write + self.output + self.reasoning + self.request


_FREE = Rates(input=0, cached_input=0, cache_write=0, output=0, reasoning=0)
UNPRICED: Final = ModelPrice(version="unpriced", source="unpriced", bands=(_FREE,))


def cost(price: ModelPrice, usage: Usage) -> Cost:
    """What `usage` costs at `price`. Every token is charged in exactly one class."""
    rates = price.rates(usage.input_tokens)
    cached, written, reasoning = usage.cached_input_tokens, usage.cache_write_tokens, usage.reasoning_tokens
    return Cost(
        input=cost_nanousd(usage.fresh_input_tokens, rates.input),
        cached_input=cached and cost_nanousd(cached, rates.cached_input),
        cache_write=written and cost_nanousd(written, rates.cache_write),
        output=cost_nanousd(usage.output_tokens - reasoning, rates.output),
        reasoning=reasoning and cost_nanousd(reasoning, rates.reasoning),
        request=price.request_nanousd,
    )


def estimate(price: ModelPrice, input_tokens: int, max_output_tokens: int) -> int:
    """Upper bound in nano-dollars for an attempt with these counts: every token in its dearest class."""
    rates = price.rates(input_tokens)
    dearest_input = max(rates.input, rates.cached_input, rates.cache_write)
    dearest_output = max(rates.output, rates.reasoning)
    # One rounding step of slack per class that the real cost may be spread over.
    slack = 4 if price.source != "unpriced" else 0
    return (
        cost_nanousd(input_tokens, dearest_input)
        + cost_nanousd(max_output_tokens, dearest_output)
        + price.request_nanousd
        + slack
    )


class PriceBook:
    """Prices of the models in `tierline.yaml`. Works offline: the price list is a package.

    Raises:
        InvalidPrice: `price_as` names nothing in the price list, or an override is finer than a nano-dollar.
    """

    def __init__(self, settings: Settings) -> None:
        self._models = settings.models
        self._fixed: dict[str, ModelPrice] = {}
        self._of_batches: dict[str, ModelPrice] = {}  # where lines of batches pay another
        self._listed: dict[str, tuple[Any, Any]] = {}
        # The list has prices by date and time of day, to the minute; so a look-up is good for this minute.
        self._minute = -1
        self._resolved: dict[tuple[str, str | None], ModelPrice] = {}
        for name, model in settings.models.items():
            if model.price is not None:
                self._fixed[name] = _override(name, model.price)
                if model.price.batch_factor is not None:
                    self._of_batches[name] = _override(name, model.price, model.price.batch_factor)
            elif (listed := _find(name, model, settings)) is not None:
                self._listed[name] = listed
            else:
                self._fixed[name] = UNPRICED
                logger.warning(
                    "model '%s' has no price: its rows will cost 0 and say 'unpriced', and no budget will count it. "
                    "Give it 'price' or 'price_as' in tierline.yaml.",
                    name,
                )

    def price_for(
        self, model: str, service_tier: str | None = None, at: datetime | None = None, *, batch: bool = False
    ) -> ModelPrice:
        """The price of a model of the configuration; any other name is unpriced.

        Args:
            batch: what lines of a batch pay.
            service_tier: what the vendor's answer says it was served as, such as `flex` or `priority`.
            at: the moment of the request (aware); default: now.
        """
        if batch and (reduced := self._of_batches.get(model)) is not None:
            return reduced
        fixed = self._fixed.get(model)
        if fixed is not None:
            return fixed
        listed = self._listed.get(model)
        if listed is None:
            return UNPRICED
        moment = at or datetime.now(UTC)
        minute = int(moment.timestamp() // 60)
        if minute != self._minute:
            self._minute = minute
            self._resolved.clear()
        key = (model, service_tier)
        price = self._resolved.get(key)
        if price is None:
            price = self._resolved[key] = _from_list(*listed, moment, service_tier)
        return price

    def known(self) -> dict[str, ModelPrice]:
        """Every configured model with its price now."""
        return {name: self.price_for(name) for name in self._models}


def _override(name: str, price: Price, factor: Decimal = Decimal(1)) -> ModelPrice:
    """A price of the platform file, `factor` times."""
    cached = price.cached_input_usd_per_million
    try:
        input_rate = parse_usd(price.input_usd_per_million * factor)
        output_rate = parse_usd(price.output_usd_per_million * factor)
        cached_rate = input_rate if cached is None else parse_usd(cached * factor)
    except InvalidAmount as error:
        raise InvalidPrice(f"the price of model '{name}': {error}") from error
    rates = Rates(
        input=input_rate, cached_input=cached_rate, cache_write=input_rate, output=output_rate, reasoning=output_rate
    )
    version = price.version if factor == 1 else f"{price.version}*{factor}"
    return _versioned(version, "override", (rates,), 0)


def _versioned(version: str, source: PriceSource, bands: tuple[Rates, ...], request_nanousd: int) -> ModelPrice:
    digest = hashlib.sha256(msgspec.json.encode((bands, request_nanousd))).hexdigest()[:8]
    return ModelPrice(version=f"{version}@{digest}", source=source, bands=bands, request_nanousd=request_nanousd)


def _find(name: str, model: ModelSettings, settings: Settings) -> tuple[Any, Any] | None:
    """Provider and model of the price list, by `price_as`, the backend's address or the upstream name."""
    from genai_prices.data_snapshot import get_snapshot

    snapshot = get_snapshot()
    if model.price_as is not None:
        provider_id, separator, listed = model.price_as.partition(":")
        providers = [provider.id for provider in snapshot.providers]
        if not separator or provider_id not in providers:
            hint = _hint(provider_id, providers)
            raise InvalidPrice(f"price_as of model '{name}' must be PROVIDER:MODEL, got {model.price_as!r}.{hint}")
        try:
            found: tuple[Any, Any] = snapshot.find_provider_model(listed, None, provider_id, None)
        except LookupError:
            known = [
                item.id for provider in snapshot.providers if provider.id == provider_id for item in provider.models
            ]
            text = f"price_as of model '{name}': '{provider_id}' has no model '{listed}' in the price list."
            raise InvalidPrice(text + _hint(listed, known)) from None
        return found
    backend = settings.backends.get(model.backend)
    if backend is None or backend.engines:
        # The bundled engine runs on your own machine: no vendor's price applies to it.
        return None
    upstream = model.upstream_model or name
    for url in (*backend.urls, None):
        try:
            found = snapshot.find_provider_model(upstream, None, None, url)
        except LookupError:
            continue
        if url is None:
            logger.warning(
                "model '%s' is priced as %s:%s by its name only; set price_as or price in tierline.yaml to be sure.",
                name,
                found[0].id,
                found[1].id,
            )
        return found
    return None


def _hint(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean '{close[0]}'?" if close else ""


def _from_list(provider: Any, model: Any, at: datetime, service_tier: str | None) -> ModelPrice:
    prices = model.get_prices(at, {"service_tier": service_tier} if service_tier else None)
    listed = {key: value for key, value in prices.__dict__.items() if value is not None}
    starts = {0}
    for key in ("input_mtok", "cache_read_mtok", "cache_write_mtok", "output_mtok", "output_reasoning_mtok"):
        starts |= {tier.start for tier in getattr(listed.get(key), "tiers", ())}
    bands = []
    for start in sorted(starts):
        input_rate = _rate(listed.get("input_mtok"), start, 0)
        output_rate = _rate(listed.get("output_mtok"), start, 0)
        bands.append(
            Rates(
                above_input_tokens=start,
                input=input_rate,
                cached_input=_rate(listed.get("cache_read_mtok"), start, input_rate),
                cache_write=_rate(listed.get("cache_write_mtok"), start, input_rate),
                output=output_rate,
                reasoning=_rate(listed.get("output_reasoning_mtok"), start, output_rate),
            )
        )
    fee = _rate(listed.get("requests_kcount"), 0, 0)
    version = f"genai-prices-{importlib.metadata.version('genai-prices')}:{provider.id}:{model.id}"
    return _versioned(version, "genai-prices", tuple(bands), (fee + 500) // 1000)


def _rate(listed: Any, above: int, default: int) -> int:
    """One class's rate for inputs just longer than `above` tokens. The list holds float noise below a nano-dollar."""
    if listed is None:
        return default
    if isinstance(listed, Decimal):
        return parse_usd(listed, exact=False)
    price = listed.base
    for tier in listed.tiers:
        if above >= tier.start:
            price = tier.price
    return parse_usd(price, exact=False)
