"""How rollouts stand, in the database: so that all processes and replicas see the same, and a restart changes nothing.

A rollout is a policy at a version, the hash of its file: a changed file begins anew. What changes is changed by
conditional updates, so that of several processes that see the same, one does it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, delete, or_, select, update

from gateway.access import audit
from gateway.access.audit import Actor
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import rollout_tallies, rollouts
from gateway.rollouts.judging import Verdict
from gateway.rollouts.tallies import Tally, merged

Key = tuple[str, str]  # name and version of the policy that is tried

GATEWAY: Final = Actor("gateway")
_MOST_AHEAD_MS: Final = 5000  # that the clock of another host may be
_verdicts = msgspec.json.Decoder(list[Verdict])
_tally = msgspec.json.Decoder(Tally)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A rollout as it stands. Times are UTC milliseconds; `verdicts` are of the last comparison."""

    policy: str
    version: str
    instead_of: str
    began_ms: int
    step: int
    step_ms: int
    comparison: int
    comparison_ms: int
    checked_ms: int
    rolled_back_ms: int | None
    reason: str
    verdicts: list[Verdict]

    @property
    def key(self) -> Key:
        return self.policy, self.version


async def read(database: Database, names: Collection[str]) -> dict[Key, Row]:
    """All versions of these policies that were ever tried."""
    async with database.read() as connection:
        found = (await connection.execute(select(rollouts).where(rollouts.c.policy.in_(names)))).mappings().all()
    return {(row["policy"], row["version"]): _row(row) for row in found}


async def begin(database: Database, key: Key, instead_of: str) -> None:
    """Put on record that a rollout begins, if it is not there."""
    now = now_ms()
    values = {
        "policy": key[0], "version": key[1], "instead_of": instead_of, "began_ms": now, "step": 0, "step_ms": now,
        "comparison": 0, "comparison_ms": now, "checked_ms": 0, "reason": "", "verdicts": "[]",
    }  # fmt: skip
    async with database.write() as connection:
        await connection.execute(database.insert_if_absent(rollouts, **values))


async def claim(database: Database, key: Key, interval_ms: int) -> bool:
    """Whether it falls to this process to compare now; none other will within the interval."""
    now = now_ms()
    async with database.write() as connection:
        # One that is later than now was noted by a clock that has been set back since, or goes ahead of this one.
        due = or_(rollouts.c.checked_ms <= now - interval_ms, rollouts.c.checked_ms > now + _MOST_AHEAD_MS)
        statement = update(rollouts).where(*_is(key), due)
        return (await connection.execute(statement.values(checked_ms=now))).rowcount == 1


async def put(database: Database, key: Key, comparison: int, writer: str, sides: Mapping[str, Tally]) -> None:
    """Replace what this process has counted in a comparison."""
    async with database.write() as connection:
        for side, tally in sides.items():
            where = {"policy": key[0], "version": key[1], "comparison": comparison, "side": side, "writer": writer}
            text = msgspec.json.encode(tally).decode()
            await connection.execute(database.insert_if_absent(rollout_tallies, **where, json=text))
            same = [rollout_tallies.c[name] == value for name, value in where.items()]
            await connection.execute(update(rollout_tallies).where(*same).values(json=text))


async def counted(database: Database, key: Key, comparison: int) -> tuple[Tally, Tally]:
    """What all processes have counted in a comparison: the old side and the new one."""
    columns = rollout_tallies.c
    statement = select(columns.side, columns.json).where(
        columns.policy == key[0], columns.version == key[1], columns.comparison == comparison
    )
    async with database.read() as connection:
        found = (await connection.execute(statement)).all()
    old, new = (merged(_tally.decode(row.json) for row in found if row.side == side) for side in ("old", "new"))
    return old, new


async def compared(database: Database, key: Key, verdicts: list[Verdict]) -> None:
    """Put the last comparison on record."""
    async with database.write() as connection:
        text = msgspec.json.encode(verdicts).decode()
        await connection.execute(update(rollouts).where(*_is(key)).values(verdicts=text))


async def roll_back(database: Database, row: Row, reason: str, verdicts: list[Verdict]) -> bool:
    """Take the traffic from the policy. False where that was done already."""
    now = now_ms()
    async with database.write() as connection:
        statement = update(rollouts).where(
            *_is(row.key), rollouts.c.rolled_back_ms.is_(None), rollouts.c.comparison == row.comparison
        )
        values = {"rolled_back_ms": now, "reason": reason, "verdicts": msgspec.json.encode(verdicts).decode()}
        done = (await connection.execute(statement.values(**values))).rowcount == 1
        if done:
            after = {"version": row.version, "reason": reason}
            await audit.record(connection, GATEWAY, "rollout.roll_back", f"policy:{row.policy}", after=after)
    return done


async def go_on(database: Database, row: Row, step: int) -> bool:
    """Begin the next comparison, at a step. False where another process did."""
    now = now_ms()
    values: dict[str, Any] = {"comparison": row.comparison + 1, "comparison_ms": now, "step": step}
    if step != row.step:
        values["step_ms"] = now
    async with database.write() as connection:
        statement = update(rollouts).where(
            *_is(row.key), rollouts.c.comparison == row.comparison, rollouts.c.rolled_back_ms.is_(None)
        )
        done = (await connection.execute(statement.values(**values))).rowcount == 1
        if done:
            await _forget(connection, row)
    return done


async def resume(database: Database, row: Row, actor: Actor | None = None) -> None:
    """Let a rollout that was rolled back begin again, at its first step."""
    now = now_ms()
    values = {
        "rolled_back_ms": None, "reason": "", "verdicts": "[]", "step": 0, "step_ms": now,
        "comparison": row.comparison + 1, "comparison_ms": now,
    }  # fmt: skip
    async with database.write() as connection:
        await connection.execute(update(rollouts).where(*_is(row.key)).values(**values))
        await _forget(connection, row)
        before = {"version": row.version, "reason": row.reason}
        await audit.record(connection, actor, "rollout.resume", f"policy:{row.policy}", before=before, after={})


async def _forget(connection: Any, row: Row) -> None:
    """Of the counts keep those of the comparison that ends, to look at; none reads the ones before."""
    columns = rollout_tallies.c
    await connection.execute(
        delete(rollout_tallies).where(
            columns.policy == row.policy, columns.version == row.version, columns.comparison < row.comparison
        )
    )


def _is(key: Key) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return rollouts.c.policy == key[0], rollouts.c.version == key[1]


def _row(found: Mapping[Any, Any]) -> Row:
    return Row(**{**found, "verdicts": _verdicts.decode(found["verdicts"])})
