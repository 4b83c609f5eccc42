"""Warnings about policies that need more than the policies: the platform file, its prices, and what traffic cost.

Limits that can never bind, budgets that nothing is charged to, confidence that no model can tell, larger tiers that
cost less than smaller ones, and budgets that a day's traffic, or a month's at its rate, would spend.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from sqlalchemy import func, select

from gateway.escalating.confidence import reports_logprobs
from gateway.ledger.database import Database
from gateway.ledger.money import format_usd
from gateway.ledger.prices import PriceBook
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import ledger
from gateway.settings import Settings
from policies import yamlfile
from policies.confidence import never_told
from policies.load import Policy
from policies.yamlfile import Document, Problem
from policies.yamlread import Location

DAY_MS: Final = 86_400_000
LOOKED_AT_DAYS: Final = 28
_MONTH_DAYS: Final = 30
# By policy, what it cost on each day that it was used: days since 1970, nano-dollars.
Traffic = Mapping[str, Sequence[tuple[int, int]]]


def settings_advice(policies: Iterable[Policy], settings: Settings) -> list[Problem]:
    """Limits that never bind, budgets that nothing is charged to, confidence that no model can tell, and tiers that
    `tier: auto` passes over although they cost less."""
    book: PriceBook | None = None  # made where a budget asks for it: it warns of models without a price
    longest = max((m.context_length for m in settings.models.values() if m.kind == "chat"), default=0)
    reporting = {name: model.tier for name, model in settings.models.items() if reports_logprobs(settings, name)}
    found = []
    for policy in policies:
        document = yamlfile.parse(policy.text, policy.file)
        found += [replace(one, severity="warning") for one in never_told(document, policy, reporting)]
        limits, most = policy.limits, settings.limits.max_concurrency
        if limits.parallel is not None and most is not None and limits.parallel > most * settings.server.workers:
            at_once = f"the gateway runs at most {most * settings.server.workers} requests at once"
            text = f"never reached: {at_once} (limits.max_concurrency)."
            found.append(_warning(document, ("limits", "parallel"), text))
        each = limits.requests_per_minute
        if each is not None and limits.tokens_per_minute is not None and 0 < longest * each < limits.tokens_per_minute:
            text = (
                f"never reached: {each} requests a minute of at most {longest:,} tokens, the longest context here, have"
                f" {each * longest:,}."
            )
            found.append(_warning(document, ("limits", "tokens_per_minute"), text))
        for rule in policy.rules:
            if rule.route.tier == "auto":
                book = book or PriceBook(settings)
                found += [
                    _warning(document, ("routes", rule.index, "tier"), text) for text in _bargains(book, settings)
                ]
                break
        if policy.budget is None:
            continue
        book, models = book or PriceBook(settings), _models(policy, settings)
        if models and all(_free(book, model) for model in models):
            text = "never spent: no model that this policy may choose has a price in tierline.yaml."
            found.append(_warning(document, ("budget", "monthly_usd"), text))
    return found


def traffic_advice(policies: Iterable[Policy], traffic: Traffic) -> list[Problem]:
    """Budgets that traffic as it was would spend before the month is over."""
    found = []
    for policy in policies:
        days, budget = traffic.get(policy.name), policy.budget_nanousd
        if budget is None or not days:
            continue
        dearest, span = max(cost for _, cost in days), max(day for day, _ in days) - min(day for day, _ in days) + 1
        per_day = sum(cost for _, cost in days) / span
        if dearest > budget:
            text = f"lower than a day's traffic: the dearest day of the last {LOOKED_AT_DAYS} cost ${_usd(dearest)}."
        elif per_day * _MONTH_DAYS > budget:
            lasts = budget / per_day
            text = (
                f"traffic as it was spends it in {lasts:.0f} days: ${_usd(round(per_day))} a day over the last"
                f" {span} day{'s' if span > 1 else ''} on record."
            )
        else:
            continue
        found.append(_warning(yamlfile.parse(policy.text, policy.file), ("budget", "monthly_usd"), text))
    return found


async def read_traffic(database: Database) -> Traffic:
    """What each policy cost on each of the last days, today excluded unless there is nothing else."""
    today = now_ms() // DAY_MS
    day = (ledger.c.ts_ms - ledger.c.ts_ms % DAY_MS).label("day")
    statement = (
        select(ledger.c.policy, day, func.sum(ledger.c.cost_nanousd))
        .where(ledger.c.ts_ms >= (today - LOOKED_AT_DAYS) * DAY_MS)
        .group_by(ledger.c.policy, day)
    )
    found: dict[str, list[tuple[int, int]]] = {}
    async with database.read() as connection:
        for name, moment, cost in (await connection.execute(statement)).all():
            found.setdefault(name, []).append((int(moment) // DAY_MS, int(cost)))
    return {name: [one for one in days if one[0] != today] or days for name, days in found.items()}


def _models(policy: Policy, settings: Settings) -> set[str]:
    """Models that a policy may choose, fallbacks included; with `auto`, those of every tier."""
    tiers: set[str] = {policy.document.default, *policy.document.fallback}
    names = set()
    for rule in policy.rules:
        if rule.route.model is not None:
            names.add(rule.route.model)
        tier = rule.route.tier
        tiers |= set(policy.served) if tier == "auto" or tier is None else {tier}
    if tiers.difference(policy.served):  # what has no model falls back to any other
        tiers |= set(policy.served)
    return names.union(*(settings.tier_models(tier) for tier in tiers)) & settings.models.keys()


def _bargains(book: PriceBook, settings: Settings) -> list[str]:
    """Tiers whose first model costs no more than that of the next smaller one, and for input or output less."""
    served = [(tier, book.price_for(settings.tier_models(tier)[0])) for tier in settings.tiers_served()]
    priced = [(tier, price.rates(0)) for tier, price in served if price.source != "unpriced"]
    return [
        f"'auto' takes the smallest tier that is good enough, and '{larger}' costs less here than '{smaller}': give"
        f" '{smaller}' a cheaper model, or say in a rule where '{larger}' is to be taken."
        for (smaller, dear), (larger, cheap) in itertools.pairwise(priced)
        if cheap.input <= dear.input
        and cheap.output <= dear.output
        and (cheap.input, cheap.output) != (dear.input, dear.output)
    ]


def _free(book: PriceBook, model: str) -> bool:
    price = book.price_for(model)
    return not price.request_nanousd and all(band.input == band.output == 0 for band in price.bands)


def _warning(document: Document, path: Location, text: str) -> Problem:
    return replace(document.problem(path, text), severity="warning")


def _usd(nanousd: int) -> str:
    return format_usd(nanousd) if nanousd < 10**9 else f"{nanousd / 1e9:,.2f}"
