"""Cost reports: rows of the ledger, grouped and summed. The total of a report is the sum of its groups, exactly.

Sums are of integers, made by the database over the same state that the total is made from; should the two ever
differ, the report says so instead of printing either.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import JSON, ColumnElement, Label, case, cast, func, literal_column, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.invalid import InvalidValue
from gateway.ledger.alternatives import alternatives
from gateway.ledger.database import Database
from gateway.ledger.money import format_usd
from gateway.ledger.rows import BATCH_TAG
from gateway.ledger.schema import decisions, keys, ledger, notes, organisations, projects, teams

DAY_MS: Final = 86_400_000
DIMENSIONS: Final = (
    "organisation", "team", "project", "key", "policy", "tier", "model", "backend", "cache", "outcome", "batch",
    "day",
)  # fmt: skip
MEASURES: Final = (
    "requests", "attempts", "input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens",
    "reasoning_tokens", "cost_nanousd", "saved_nanousd",
)  # fmt: skip
# Dimensions whose rows hold an id, and the table that knows its name and its parent.
_NAMED: Final = {"organisation": organisations, "team": teams, "project": projects, "key": keys}


class InvalidReport(InvalidValue):
    """A report nobody can make: an unknown dimension, an unreadable date or a span that ends before it begins."""


class LedgerMismatch(Exception):
    """Groups and total differ: the database contradicts itself."""


class Report(msgspec.Struct, kw_only=True):
    """`rows` hold the dimensions of `by` followed by `MEASURES`, dearest first; `total` has the measures only."""

    by: list[str]
    since: str | None
    until: str | None
    rows: list[dict[str, Any]]
    total: dict[str, int]

    def as_json(self) -> dict[str, Any]:
        """Plain data, with each amount in dollars as well."""
        rows = [{**row, **_dollars(row)} for row in self.rows]
        total = {**self.total, **_dollars(self.total)}
        return {"by": self.by, "since": self.since, "until": self.until, "rows": rows, "total": total}

    def to_json(self) -> str:
        return msgspec.json.format(msgspec.json.encode(self.as_json()), indent=2).decode()

    def to_csv(self) -> str:
        """One line per row and none for the total, so that a spreadsheet's sum is the total."""
        columns = [*self.by, *MEASURES, "cost_usd", "saved_usd"]
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, lineterminator="\n")
        writer.writeheader()
        for row in self.rows:
            safe = {name: _no_formula(row[name]) for name in self.by}
            writer.writerow({**row, **safe, **_dollars(row)})
        return text.getvalue()


async def cost_report(
    database: Database,
    by: Sequence[str],
    since: datetime | None = None,
    until: datetime | None = None,
    *,
    organisation_id: str | None = None,
) -> Report:
    """Sum the ledger by the given dimensions over `[since, until)`, of one organisation where one is given.

    Teams, projects and keys are grouped by identity, not by name; a name that stands for several is shown with its
    parents, as in `acme/support`.

    Raises:
        InvalidReport: an unknown or repeated dimension. LedgerMismatch: see there.
    """
    unknown = [name for name in by if name not in DIMENSIONS]
    if unknown or len(set(by)) != len(by):
        what = f"unknown dimension '{unknown[0]}'" if unknown else "a dimension stands twice"
        raise InvalidReport(f"{what}; choose from {', '.join(DIMENSIONS)}", "by")
    span: list[ColumnElement[bool]] = []
    if since:
        span.append(ledger.c.ts_ms >= _to_ms(since))
    if until:
        span.append(ledger.c.ts_ms < _to_ms(until))
    if organisation_id is not None:
        span.append(ledger.c.organisation_id == organisation_id)
    groups = [_dimension(name, database.dialect) for name in by]
    async with database.read() as connection:
        total_row = (await connection.execute(select(*_measures()).where(*span))).one()
        grouped = select(*groups, *_measures()).where(*span)
        found = (await connection.execute(grouped.group_by(*groups))).all() if groups else [total_row]
        labels = {name: await _labels(connection, name) for name in by if name in _NAMED}
    total = {name: int(value or 0) for name, value in zip(MEASURES, total_row, strict=True)}
    rows: list[dict[str, Any]] = []
    for values in found:
        row: dict[str, Any] = {
            name: _show(name, value, labels.get(name)) for name, value in zip(by, values[: len(by)], strict=True)
        }
        row.update({name: int(value or 0) for name, value in zip(MEASURES, values[len(by) :], strict=True)})
        rows.append(row)
    for name in MEASURES:
        if (summed := sum(row[name] for row in rows)) != total[name]:
            raise LedgerMismatch(f"{name}: the groups add up to {summed}, the ledger to {total[name]}")
    rows.sort(key=lambda row: (row["day"] if "day" in by else "", -row["cost_nanousd"], *(row[name] for name in by)))
    return Report(by=list(by), since=_iso(since), until=_iso(until), rows=rows, total=total)


class Explanation(msgspec.Struct, kw_only=True):
    """Everything on record about one request: the decision (None if none was taken), what other tiers would have cost,
    its rows by attempt, and what was noted of it, in the order in which it happened."""

    request_id: str
    decision: dict[str, Any] | None
    tiers: list[dict[str, Any]]
    rows: list[dict[str, Any]]
    notes: list[dict[str, Any]]


async def explain(database: Database, named: str) -> Explanation | None:
    """What is on record about a request, named by its id or by the id of its answer; None when nothing is."""
    async with database.read() as connection:
        request_id = await request_of(connection, named)
        text = await connection.scalar(select(decisions.c.json).where(decisions.c.request_id == request_id))
        statement = select(ledger).where(ledger.c.request_id == request_id).order_by(ledger.c.attempt)
        rows = [
            {str(name): value for name, value in row._asdict().items()} for row in await connection.execute(statement)
        ]
        happened = select(notes).where(notes.c.request_id == request_id).order_by(notes.c.ts_ms, notes.c.id)
        noted = [
            {"ts_ms": note.ts_ms, "kind": note.kind, **msgspec.json.decode(note.json)}
            for note in await connection.execute(happened)
        ]
    for row in rows:
        row["tags"] = msgspec.json.decode(row["tags"])
    if text is None and not rows:
        return None
    decision = msgspec.json.decode(text) if text else None
    tiers = alternatives(decision, rows) if decision else []
    return Explanation(request_id=request_id, decision=decision, tiers=tiers, rows=rows, notes=noted)


async def request_of(connection: AsyncConnection, named: str) -> str:
    """The id of the request that has this answer. One that the gateway gave is made from the request's, else it is in
    the ledger.
    """
    if named.startswith("req-"):
        return named
    _, _, unique = named.replace("_", "-").partition("-")
    try:
        made = f"req-{UUID(unique)}"
    except ValueError:
        made = named
    # The condition without a parameter is the index's own: it is used only if it stands here.
    named_so = (ledger.c.answer_id == named, ledger.c.answer_id != literal_column("''"))
    given = select(ledger.c.request_id).where(*named_so)
    return await connection.scalar(given.limit(1)) or made


def _moment(text: str | None, now: datetime, field: str) -> datetime | None:
    try:
        return parse_moment(text, now) if text else None
    except InvalidReport as error:
        raise InvalidReport(str(error), field) from None


def parse_moment(text: str, now: datetime | None = None) -> datetime:
    """`2026-11-30`, `2026-11-30T12:00`, or a time ago: `90m`, `24h`, `7d`, `4w`. Without a zone it is UTC.

    Raises:
        InvalidReport: neither.
    """
    units = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
    if text[:-1].isdecimal() and text[-1:] in units:
        try:
            return (now or datetime.now(UTC)) - timedelta(**{units[text[-1]]: int(text[:-1])})
        except OverflowError:
            raise InvalidReport(f"'{text}' ago is before the calendar begins") from None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidReport(f"'{text}' is neither a date (2026-11-30) nor a time ago (7d, 24h)") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def parse_span(
    since: str | None, until: str | None, now: datetime | None = None
) -> tuple[datetime | None, datetime | None]:
    """The two ends of a report as a person gives them; None where nothing is given.

    Raises:
        InvalidReport: one cannot be read, or no moment up to now lies between them, so that the report would be empty.
    """
    now = now or datetime.now(UTC)
    begins, ends = (_moment(text, now, field) for text, field in ((since, "since"), (until, "until")))
    if begins and begins >= (ends or now):
        end = f"'{until}' ({_short(ends)})" if ends else f"now ({_short(now)})"
        raise InvalidReport(f"'{since}' ({_short(begins)}) is not before {end}: no time lies between them", "since")
    return begins, ends


def _measures() -> list[Label[Any]]:
    sums = [func.coalesce(func.sum(ledger.c[name]), 0).label(name) for name in MEASURES[2:]]
    requests = func.coalesce(func.sum(case((ledger.c.attempt == 1, 1), else_=0)), 0).label("requests")
    return [requests, func.count().label("attempts"), *sums]


def _dimension(name: str, dialect: str) -> Label[Any]:
    if name == "day":
        return (ledger.c.ts_ms - ledger.c.ts_ms % DAY_MS).label("day")
    if name == "batch":
        return func.coalesce(_batch(dialect), literal_column("''")).label("batch")
    return ledger.c[f"{name}_id" if name in _NAMED else name].label(name)


def _batch(dialect: str) -> ColumnElement[Any]:
    """The batch that a row belongs to, or NULL. No parameters, which PostgreSQL would take for different ones where
    rows are grouped by it."""
    if dialect == "postgresql":
        return cast(ledger.c.tags, JSON).op("->>")(literal_column(f"'{BATCH_TAG}'"))
    return func.json_extract(ledger.c.tags, literal_column(f"'$.\"{BATCH_TAG}\"'"))


async def batch_spent(database: Database, batch_id: str, key_id: str, since_ms: int) -> tuple[int, int]:
    """What the rows of a batch cost, in nano-dollars, and how many there are; `since_ms`: when it was made."""
    mine = (ledger.c.ts_ms >= since_ms) & (ledger.c.key_id == key_id) & (_batch(database.dialect) == batch_id)
    async with database.read() as connection:
        query = select(func.coalesce(func.sum(ledger.c.cost_nanousd), 0), func.count()).where(mine)
        row = (await connection.execute(query)).one()
        return int(row[0]), int(row[1])


async def _labels(connection: AsyncConnection, dimension: str) -> dict[str, str]:
    """Names by id, with parents in front where a name alone would be ambiguous."""
    path = [keys, projects, teams, organisations]
    tables = path[path.index(_NAMED[dimension]) :]
    joined: Any = tables[0]
    for table in tables[1:]:
        joined = joined.join(table)
    names = [table.c.name for table in tables]
    found = (await connection.execute(select(tables[0].c.id, *names).select_from(joined))).all()
    count = Counter(row[1] for row in found)
    labels = {row[0]: row[1] if count[row[1]] == 1 else "/".join(reversed(row[1:])) for row in found}
    full = Counter(labels.values())
    # Two keys of one project may share a name: then only the id tells them apart.
    return {id_: label if full[label] == 1 else f"{label} ({id_})" for id_, label in labels.items()}


def _show(dimension: str, value: Any, labels: dict[str, str] | None) -> str:
    if dimension == "day":
        return datetime.fromtimestamp(int(value) // 1000, UTC).date().isoformat()
    return str(value) if labels is None else labels.get(value, str(value))


def _dollars(row: dict[str, Any]) -> dict[str, str]:
    return {"cost_usd": format_usd(row["cost_nanousd"]), "saved_usd": format_usd(row["saved_nanousd"])}


def _no_formula(value: str) -> str:
    """Names come from outside: a spreadsheet must not run them."""
    return f"'{value}" if value[:1] in ("=", "+", "-", "@", "\t", "\r") else value


def _to_ms(moment: datetime) -> int:
    return int(moment.timestamp() * 1000)


def _iso(moment: datetime | None) -> str | None:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z") if moment else None


def _short(moment: datetime) -> str:
    return f"{moment.astimezone(UTC):%Y-%m-%d %H:%MZ}"
