"""What each tier costs a month: measured from the ledger, and what the same traffic would cost if all of it went there.

Every token that the traffic used is priced again, class by class and band by band, at today's price of the first model
of a tier; how many tokens another model would have written nobody knows. A model of your own without a price costs what
its machines cost, whatever it does.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, case, func, literal, select

from gateway.ledger.database import Database
from gateway.ledger.prices import ModelPrice, PriceBook, Rates
from gateway.ledger.schema import ledger
from gateway.settings import Settings
from tiers import TIERS

MONTH_S: Final = 30 * 86_400
HOURS_OF_A_MONTH: Final = 730
# What a published design for inference platforms says such a tier costs a month, at small scale: a claim to compare
# with, not a measurement of ours.
CLAIMED_YUAN: Final = {
    "small": (500, 2_000),
    "medium": (2_000, 8_000),
    "large": (8_000, 20_000),
    "xlarge": (20_000, None),
}
_TOKENS: Final = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")


class TierCost(msgspec.Struct, kw_only=True):
    """One tier over a span. Months have 30 days; amounts are nano-dollars, null where there is no price to go by.

    `requests` are those that a model of the tier was asked first. `month_nanousd` is what the tier costs at this rate,
    `all_month_nanousd` what all traffic would cost here, at the price of `model`. `machines` are those that are paid by
    the hour, for models without a price.
    """

    tier: str
    model: str | None
    price: str | None
    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    month_nanousd: int | None = None
    all_month_nanousd: int | None = None
    machines: int = 0
    claimed_yuan: tuple[int, int | None] = (0, None)


class TierCosts(msgspec.Struct, kw_only=True):
    """`seconds`: the time that the traffic is spread over, from the first of its rows or the beginning of the span."""

    since: str
    until: str
    seconds: float
    policy: str | None
    requests: int
    tiers: list[TierCost]


async def tier_costs(
    database: Database,
    settings: Settings,
    prices: PriceBook,
    since: datetime,
    until: datetime,
    *,
    policy: str | None = None,
    machine_nanousd_per_hour: int | None = None,
) -> TierCosts:
    """Sum the ledger by tier over `[since, until)`, of one policy where one is given."""
    models = {tier: settings.tier_models(tier) for tier in TIERS}
    first = {tier: prices.price_for(names[0]) for tier, names in models.items() if names}
    starts = sorted({band.above_input_tokens for price in first.values() for band in price.bands} - {0})
    groups = await _sums(database, since, until, policy, starts)
    begins = min((group["first_ms"] for group in groups), default=until.timestamp() * 1000) / 1000
    seconds = max(1.0, until.timestamp() - max(begins, since.timestamp()))
    found = []
    for tier, names in models.items():
        mine = [group for group in groups if group["tier"] == tier]
        price = first.get(tier)
        machines = _machines(settings, prices, names) if machine_nanousd_per_hour is not None else 0
        rent = machines * HOURS_OF_A_MONTH * (machine_nanousd_per_hour or 0)
        measured = sum(group["cost_nanousd"] for group in mine)
        month = round(measured * MONTH_S / seconds) + rent
        priced = price is not None and price.source != "unpriced"
        everything = None
        if price is not None and priced:
            everything = round(sum(_priced(price, group) for group in groups) * MONTH_S / seconds)
        elif machines:
            everything = rent
        found.append(
            TierCost(
                tier=tier,
                model=names[0] if names else None,
                price=price.version if price is not None else None,
                requests=sum(group["requests"] for group in mine),
                input_tokens=sum(group["input_tokens"] for group in mine),
                output_tokens=sum(group["output_tokens"] for group in mine),
                cost_nanousd=measured,
                month_nanousd=month if priced or machines or measured else None,
                all_month_nanousd=everything,
                machines=machines,
                claimed_yuan=CLAIMED_YUAN[tier],
            )
        )
    return TierCosts(
        since=since.isoformat(),
        until=until.isoformat(),
        seconds=seconds,
        policy=policy,
        requests=sum(group["requests"] for group in groups),
        tiers=found,
    )


async def _sums(
    database: Database, since: datetime, until: datetime, policy: str | None, starts: list[int]
) -> list[dict[str, Any]]:
    """Sums of what reached a model, by tier, length of the input (in which band of any price it lies) and whether it
    would have been asked elsewhere: not an answer that another was asked for after."""
    band: ColumnElement[int] = literal(0)
    for start in starts:
        band = band + case((ledger.c.input_tokens > start, 1), else_=0)
    band = band.label("band")
    elsewhere = case((ledger.c.outcome == "escalated", 0), else_=1).label("elsewhere")
    where = [
        ledger.c.ts_ms >= int(since.timestamp() * 1000),
        ledger.c.ts_ms < int(until.timestamp() * 1000),
        ledger.c.tier.in_(TIERS),
        ledger.c.outcome != "cache_hit",
    ]
    if policy is not None:
        where.append(ledger.c.policy == policy)
    sums = [func.sum(ledger.c[name]).label(name) for name in (*_TOKENS, "cost_nanousd")]
    requests = func.sum(case((ledger.c.attempt == 1, 1), else_=0)).label("requests")
    calls = func.sum(case((ledger.c.input_tokens > 0, 1), else_=0)).label("calls")  # those that a fee is paid for
    columns = (ledger.c.tier, band, elsewhere)
    statement = select(*columns, requests, calls, func.min(ledger.c.ts_ms).label("first_ms"), *sums).where(*where)
    async with database.read() as connection:
        rows = (await connection.execute(statement.group_by(*columns))).mappings().all()
    return [
        {
            **{name: value if name == "tier" else int(value) for name, value in row.items()},
            # The longest input of the group is not known, but which bands it reaches is.
            "reaches": starts[int(row["band"]) - 1] + 1 if row["band"] else 0,
        }
        for row in rows
    ]


def _priced(price: ModelPrice, group: dict[str, Any]) -> float:
    """Nano-dollars of a group's tokens at another price."""
    if not group["elsewhere"]:
        return 0.0
    rates: Rates = price.rates(group["reaches"])
    fresh = group["input_tokens"] - group["cached_input_tokens"] - group["cache_write_tokens"]
    tokens = (
        (fresh, rates.input),
        (group["cached_input_tokens"], rates.cached_input),
        (group["cache_write_tokens"], rates.cache_write),
        (group["output_tokens"] - group["reasoning_tokens"], rates.output),
        (group["reasoning_tokens"], rates.reasoning),
    )
    return float(sum(count * rate for count, rate in tokens)) / 1e6 + price.request_nanousd * float(group["calls"])


def _machines(settings: Settings, prices: PriceBook, names: Collection[str]) -> int:
    """Replicas that serve models of a tier without a price, each a machine; a backend counts once."""
    backends = {settings.models[name].backend for name in names if prices.price_for(name).source == "unpriced"}
    return sum(len(settings.base_urls(name)) for name in backends)
