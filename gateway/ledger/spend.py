"""What limits, budgets and their owners ask of the ledger: the month's sums by scope, and what single requests used.

The sums can leave out requests that are counted elsewhere: those from an id on, and some before it by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, case, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.database import Database
from gateway.ledger.schema import ledger

SCOPES: Final = {
    "key": "key_id",
    "project": "project_id",
    "team": "team_id",
    "organisation": "organisation_id",
    "policy": "policy",
}
# Ids per statement; databases take only so many parameters.
_CHUNK: Final = 500


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """Sums over the ledger's rows. `requests` counts those with a row, however many attempts each made."""

    requests: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    cost_nanousd: int = 0
    saved_nanousd: int = 0


async def month_use(database: Database, month: int) -> dict[str, Used]:
    """What was used in a UTC calendar month (year * 12 + month - 1), by scope: `key:ID`, `team:ID`, …"""
    owners = {kind: ledger.c[column] for kind, column in SCOPES.items() if kind != "policy"}
    sums = [ledger.c[name] for name in ("input_tokens", "output_tokens", "cost_nanousd", "saved_nanousd")]
    statement = (
        # The first attempt stands for its request, so that requests add up over keys as tokens and money do.
        select(*owners.values(), func.sum(case((ledger.c.attempt == 1, 1), else_=0)), *(func.sum(one) for one in sums))
        .where(ledger.c.ts_ms >= _start_ms(month), ledger.c.ts_ms < _start_ms(month + 1))
        .group_by(*owners.values())
    )
    found: dict[str, list[int]] = {}
    async with database.read() as connection:
        for row in await connection.execute(statement):
            for kind, id_ in zip(owners, row, strict=False):
                total = found.setdefault(f"{kind}:{id_}", [0] * (1 + len(sums)))
                for i, amount in enumerate(row[len(owners) :]):
                    total[i] += int(amount)
    return {scope: Used(**dict(zip(Used.__struct_fields__, total, strict=True))) for scope, total in found.items()}


async def month_spend(
    database: Database,
    month: int,
    *,
    before: str | None = None,
    without: Callable[[], Awaitable[Collection[str]]] | None = None,
) -> dict[str, int]:
    """Nano-dollars spent in a UTC calendar month, by scope: `key:ID`, `team:ID`, …, `policy:NAME`.

    month: year * 12 + month - 1. before: only requests with ids smaller than this. without: nor these; it is asked when
    the state of the database that is summed stands.
    """
    span = [ledger.c.ts_ms >= _start_ms(month), ledger.c.ts_ms < _start_ms(month + 1)]
    spent: Counter[str] = Counter()
    async with database.read() as connection:
        # Request ids all have one form, but PostgreSQL's usual collations would look at their hyphens last.
        request_id = ledger.c.request_id.collate("C") if database.dialect == "postgresql" else ledger.c.request_id
        wanted = span if before is None else [*span, request_id < before]
        await _add(connection, spent, 1, wanted)
        for ids in _chunks(list(await without()) if without else []):
            await _add(connection, spent, -1, [*wanted, ledger.c.request_id.in_(ids)])
    return dict(spent)


async def _add(
    connection: AsyncConnection, spent: Counter[str], sign: int, where: Sequence[ColumnElement[bool]]
) -> None:
    """One scan for all kinds of scope: there are few combinations, and many rows."""
    columns = [ledger.c[column] for column in SCOPES.values()]
    statement = select(*columns, func.sum(ledger.c.cost_nanousd)).where(*where).group_by(*columns)
    for *names, total in await connection.execute(statement):
        for scope, name in zip(SCOPES, names, strict=True):
            if name:
                spent[f"{scope}:{name}"] += sign * int(total)


async def used_by(database: Database, request_ids: Collection[str]) -> dict[str, tuple[int, int]]:
    """Tokens and nano-dollars of each of these requests that has rows, over all its attempts."""
    tokens = func.sum(ledger.c.input_tokens + ledger.c.output_tokens)
    used: dict[str, tuple[int, int]] = {}
    async with database.read() as connection:
        for ids in _chunks(list(request_ids)):
            statement = select(ledger.c.request_id, tokens, func.sum(ledger.c.cost_nanousd))
            found: Any = await connection.execute(
                statement.where(ledger.c.request_id.in_(ids)).group_by(ledger.c.request_id)
            )
            used.update({request_id: (int(count), int(cost)) for request_id, count, cost in found})
    return used


def _start_ms(month: int) -> int:
    year, number = divmod(month, 12)
    return int(datetime(year, number + 1, 1, tzinfo=UTC).timestamp() * 1000)


def _chunks(ids: list[str]) -> Iterator[list[str]]:
    for start in range(0, len(ids), _CHUNK):
        yield ids[start : start + _CHUNK]
