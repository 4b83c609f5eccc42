"""To forget outcomes that should not have taught anything; the audit log says who did, and which counts are gone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sqlalchemy import ColumnElement, delete

from gateway.access.audit import Actor, record
from gateway.ledger.database import Database
from gateway.ledger.schema import outcomes


class Forgotten(NamedTuple):
    """Counts that are gone, as they were counted, not weighed by age. Fractions: a request is a mixture of kinds."""

    wins: float
    losses: float


async def forget(
    database: Database,
    *,
    kinds: Sequence[str] | None = None,
    policy: str | None = None,
    team: str | None = None,
    since_day: int | None = None,
    actor: Actor | None = None,
) -> Forgotten:
    """Forget the outcomes that meet every condition; running gateways follow within seconds.

    Keys keep what they have used of their share of the day, and a request that was rated counts no second time.

    Args:
        kinds: only of these kinds of request.
        team: an id; empty for outcomes of before teams were kept.
        since_day: only of this day (UTC, since 1970) and later ones.
        actor: who the audit log names: None is the user who runs this program.
    """
    met: list[ColumnElement[bool]] = [] if kinds is None else [outcomes.c.kind.in_(kinds)]
    met += [outcomes.c[name] == value for name, value in (("policy", policy), ("team", team)) if value is not None]
    if since_day is not None:
        met.append(outcomes.c.day >= since_day)
    asked = {"kinds": kinds, "policy": policy, "team": team, "since_day": since_day}
    async with database.write() as connection:
        gone = delete(outcomes).where(*met).returning(outcomes.c.wins, outcomes.c.losses)
        rows = (await connection.execute(gone)).all()
        found = Forgotten(sum(row.wins for row in rows), sum(row.losses for row in rows))
        given = {name: value for name, value in asked.items() if value is not None}
        await record(connection, actor, "outcomes.forget", "outcomes", before=found._asdict(), after=given)
    return found
