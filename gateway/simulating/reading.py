"""Recorded requests, oldest first: decisions with their ledger rows, page by page, so that memory stays bounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from sqlalchemy import select, tuple_

from gateway.ledger.database import Database
from gateway.ledger.rows import Decision
from gateway.ledger.schema import decisions, ledger
from policies.facts import Facts
from policies.recorded import facts_of
from policies.simulation.recorded import Recorded, Served, Tokens
from tiers.session import Pin

PAGE: Final = 2000
_COLUMNS: Final = (
    "request_id", "attempt", "tier", "model", "cache", "outcome", "input_tokens", "cached_input_tokens",
    "cache_write_tokens", "output_tokens", "reasoning_tokens", "cost_nanousd", "saved_nanousd", "ttft_ms",
    "duration_ms",
)  # fmt: skip
_DECODER: Final = msgspec.json.Decoder(Decision)
# Outcomes of an attempt whose answer the client got, or the greater part of it.
_ANSWERED: Final = ("success", "over_budget", "cancelled")
_Row = Mapping[Any, Any]


class Unusable(msgspec.Struct):
    """How many decisions could not be used: of an earlier version, whose record lacks something."""

    count: int = 0


async def recorded(
    database: Database, since_ms: int, until_ms: int, unusable: Unusable
) -> AsyncIterator[list[Recorded]]:
    """Pages of requests that were decided in `[since_ms, until_ms)`, in the order of their decisions."""
    at = (since_ms, "")
    columns = [ledger.c[name] for name in _COLUMNS]
    key = tuple_(decisions.c.ts_ms, decisions.c.request_id)
    page = (
        select(decisions.c.request_id, decisions.c.ts_ms, decisions.c.json)
        .where(decisions.c.ts_ms < until_ms)
        .order_by(decisions.c.ts_ms, decisions.c.request_id)
        .limit(PAGE)
    )
    while True:
        async with database.read() as connection:
            made = (await connection.execute(page.where(decisions.c.ts_ms >= at[0], key > tuple_(*at)))).all()
            ids = [row[0] for row in made]
            rows: dict[str, list[_Row]] = defaultdict(list)
            if ids:
                attempts = select(*columns).where(ledger.c.request_id.in_(ids)).order_by(ledger.c.attempt)
                for row in (await connection.execute(attempts)).mappings():
                    rows[row["request_id"]].append(row)
        found = []
        for request_id, _, text in made:
            request = None
            with suppress(KeyError, TypeError, ValueError, msgspec.MsgspecError):
                request = _recorded(_DECODER.decode(text), rows[request_id])
            if request is None:
                unusable.count += 1
            else:
                found.append(request)
        if found:
            yield found
        if len(made) < PAGE:
            return
        at = (made[-1][1], made[-1][0])


def _recorded(decision: Decision, rows: Sequence[_Row]) -> Recorded:
    features = decision.features
    facts = facts_of(features)
    served = _served(rows)
    session = features.get("session")
    common: dict[str, Any] = {
        "request_id": decision.request_id,
        "ts_ms": decision.ts_ms,
        "facts": facts,
        "policy": decision.policy,
        "version": decision.policy_version,
        "rule": decision.rule,
        "tier": decision.tier,
        "wanted": decision.model,
        "cost_nanousd": sum(row["cost_nanousd"] for row in rows),
        "conversation": session["id"] if session else None,
        "pin": Pin(**session["pin"]) if session and session["pin"] else None,
    }
    if served is None:
        return Recorded(fate="failed" if rows else "refused", tokens=_estimated(features, facts), **common)
    hit = served["outcome"] == "cache_hit"
    return Recorded(
        fate="hit" if hit else "answered",
        served=Served(served["model"], served["tier"]),
        tokens=Tokens(
            served["input_tokens"],
            served["output_tokens"],
            served["cached_input_tokens"],
            served["cache_write_tokens"],
            served["reasoning_tokens"],
        ),
        saved_nanousd=served["saved_nanousd"],
        failed_first=next((Served(row["model"], row["tier"]) for row in rows if row["outcome"] == "escalated"), None),
        semantic=hit and served["cache"] == "semantic",
        ttft_ms=served["ttft_ms"],
        duration_ms=sum(row["duration_ms"] for row in rows),
        **common,
    )


def _served(rows: Sequence[_Row]) -> _Row | None:
    """The attempt that answered: the last one that did."""
    for row in reversed(rows):
        if row["outcome"] == "cache_hit" or (row["outcome"] in _ANSWERED and row["output_tokens"] > 0):
            return row
    return next((row for row in reversed(rows) if row["outcome"] == "success"), None)


def _estimated(features: Mapping[str, Any], facts: Facts) -> Tokens:
    """What a request without an answer would have used."""
    return Tokens(features.get("input_estimate", facts.prompt_tokens), features.get("output_estimate", 0))
