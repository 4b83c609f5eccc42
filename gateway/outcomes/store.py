"""Outcomes in the database: summed by day, one key's share bounded, old days gone.

A transaction counts first how much of the day's share of each key is left, then adds what may be added, so the bound
holds over all processes and replicas that share the database.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
from sqlalchemy import case, delete, func, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.database import Database
from gateway.ledger.rows import Note
from gateway.ledger.schema import notes, outcome_shares, outcomes
from gateway.outcomes.weighing import AGES, MOST_OF_A_KEY, Counted, Source

DAY_MS: Final = 86_400_000
_AT_ONCE: Final = 50  # rows of one statement
_T = TypeVar("_T")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What one answer came to. `team` is an id, `kinds` the weights of the kinds that the request is a mixture of."""

    source: Source
    policy: str
    team: str
    key_id: str
    tier: str
    model: str
    kinds: Mapping[str, float]
    good: bool


async def add(database: Database, found: Sequence[Outcome], day: int) -> int:
    """Add outcomes to those of a day, as far as the keys' shares allow.

    Returns:
        How many were added.
    """
    async with database.write() as connection:
        return await _add(database, connection, found, day)


async def add_once(database: Database, note: Note, outcome: Outcome | None, day: int) -> tuple[bool, bool]:
    """Note something of a request, and add its outcome, unless a note of this id is there.

    Returns:
        Whether the note is new, and whether the outcome was added.
    """
    values = {"id": note.id, "request_id": note.request_id, "ts_ms": note.ts_ms, "kind": note.kind}
    text = msgspec.json.encode(note.data).decode()
    async with database.write() as connection:
        made = await connection.execute(database.insert_if_absent(notes, json=text, **values))
        if not made.rowcount:
            return False, False
        return True, outcome is not None and await _add(database, connection, [outcome], day) > 0


async def read(database: Database, today: int) -> list[Counted]:
    """All outcomes that still count, weighed by age, in a fixed order."""
    weight = case(*((outcomes.c.day > today - days, weight) for days, weight in AGES), else_=0.0)
    by = (outcomes.c.source, outcomes.c.policy, outcomes.c.team, outcomes.c.kind, outcomes.c.tier)
    sums = (func.sum(outcomes.c.wins * weight), func.sum(outcomes.c.losses * weight))
    statement = select(*by, *sums).where(outcomes.c.day > today - AGES[-1][0]).group_by(*by).order_by(*by)
    async with database.read() as connection:
        return [Counted(*row) for row in (await connection.execute(statement)).all()]


async def purge(database: Database, today: int) -> None:
    """Forget what counts no more."""
    async with database.write() as connection:
        await connection.execute(delete(outcomes).where(outcomes.c.day <= today - AGES[-1][0]))
        await connection.execute(delete(outcome_shares).where(outcome_shares.c.day < today - 1))


async def _add(database: Database, connection: AsyncConnection, found: Sequence[Outcome], day: int) -> int:
    allowed = await _allowed(database, connection, found, day)
    sums: dict[tuple[str, ...], list[float]] = {}
    added = 0
    for outcome in found:
        share = (outcome.source, outcome.key_id)
        if not allowed[share]:
            continue
        allowed[share] -= 1
        added += 1
        for kind, weight in outcome.kinds.items():
            at = (outcome.source, outcome.policy, outcome.team, kind, outcome.tier, outcome.model)
            cell = sums.setdefault(at, [0.0, 0.0])
            cell[0 if outcome.good else 1] += weight
    names = ("source", "policy", "team", "kind", "tier", "model")
    rows = [
        {"day": day, **dict(zip(names, at, strict=True)), "wins": wins, "losses": losses}
        for at, (wins, losses) in sorted(sums.items())  # two processes lock rows in the same order
    ]
    for some in _chunks(rows):
        insert = database.insert(outcomes).values(some)
        grown = {name: outcomes.c[name] + insert.excluded[name] for name in ("wins", "losses")}
        await connection.execute(insert.on_conflict_do_update(index_elements=["day", *names], set_=grown))
    return added


async def _allowed(
    database: Database, connection: AsyncConnection, found: Iterable[Outcome], day: int
) -> dict[tuple[str, str], int]:
    """How many of these may be added, by source and key; they are taken off the shares."""
    wanted: dict[tuple[str, str], int] = {}
    for outcome in found:
        share = (outcome.source, outcome.key_id)
        wanted[share] = wanted.get(share, 0) + 1
    rows = [{"day": day, "source": s, "key_id": k, "given": wanted[s, k]} for s, k in sorted(wanted)]
    allowed: dict[tuple[str, str], int] = {}
    for some in _chunks(rows):
        insert = database.insert(outcome_shares).values(some)
        taken = insert.on_conflict_do_update(
            index_elements=["day", "source", "key_id"],
            set_={"given": outcome_shares.c.given + insert.excluded.given},
        ).returning(outcome_shares.c.source, outcome_shares.c.key_id, outcome_shares.c.given)
        for source, key_id, given in (await connection.execute(taken)).all():
            before = given - wanted[source, key_id]
            allowed[source, key_id] = max(0, min(given, MOST_OF_A_KEY) - before)
    return allowed


def _chunks(rows: list[_T]) -> Iterator[list[_T]]:
    for start in range(0, len(rows), _AT_ONCE):
        yield rows[start : start + _AT_ONCE]
