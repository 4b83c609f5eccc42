"""`/admin/v1/costs` and `/admin/v1/requests`: what was spent, and what is on record about one request."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from gateway.admin.call import AdminRoute, Call, Text
from gateway.dialects.errors import NotFound
from gateway.ledger.database import Database
from gateway.ledger.reports import Report, cost_report, explain, parse_span


class CostQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`by`: dimensions with commas between them, as for `tierline cost report`; empty: one line for everything.

    `since` (inclusive) and `until` (exclusive) are dates (2026-11-30, UTC) or times ago (24h, 7d).
    """

    by: str = "team,model"
    since: str | None = None
    until: str | None = None
    format: Literal["json", "csv"] = "json"


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """Each row has the dimensions of `by`, then the sums. The sums of `total` are those of the rows, exactly."""

    by: list[str]
    since: str | None
    until: str | None
    rows: list[dict[str, Any]]
    total: dict[str, Any]


class Alternative(msgspec.Struct, frozen=True, kw_only=True):
    """A tier: P(success) and its lower bound (null where nobody estimated it), and nano-dollars, estimated before and
    exact after, for the tokens of this request. `role`: chosen, answered, fallback, or null."""

    tier: str
    model: str | None
    p: float | None
    lower: float | None
    outcomes: float | None
    estimated_nanousd: int | None
    cost_nanousd: int | None
    role: str | None
    why: str


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """A request: why it went where it went (null if it was refused before), how likely each tier was to do it well and
    what it would have cost there, its rows in the ledger, by attempt, and what happened to it beside them."""

    request_id: str
    decision: dict[str, Any] | None
    tiers: list[Alternative]
    attempts: list[dict[str, Any]]
    notes: list[dict[str, Any]]


async def costs(call: Call[CostQuery, None]) -> Costs | Text:
    query, mine = call.query, call.caller.organisation_id
    dimensions = [name.strip() for name in query.by.split(",") if name.strip()]
    span = parse_span(query.since, query.until)

    async def work(database: Database) -> Report:
        return await cost_report(database, dimensions, *span, organisation_id=mine)

    report = await call.database(work)
    if query.format == "csv":
        return Text(report.to_csv(), "text/csv; charset=utf-8")
    return msgspec.convert(report.as_json(), Costs)


async def request(call: Call[None, None]) -> Record:
    name = call.path["request"]
    found = await call.database(lambda database: explain(database, name))
    what = f"request '{name[:100]}' on record"
    if found is None:
        raise NotFound(f"There is no {what}.")
    owners = {row["organisation_id"] for row in found.rows}
    call.check_mine(owners.pop() if len(owners) == 1 else None, what)
    tiers = msgspec.convert(found.tiers, list[Alternative])
    return Record(
        request_id=found.request_id, decision=found.decision, tiers=tiers, attempts=found.rows, notes=found.notes
    )


ROUTES = [
    AdminRoute(
        "GET", "/admin/v1/costs", "Sum the ledger by any dimensions.", costs, Costs, query=CostQuery, text="text/csv"
    ),
    AdminRoute(
        "GET",
        "/admin/v1/requests/{request}",
        "Decision, alternatives, ledger rows and notes of a request.",
        request,
        Record,
    ),
]
