"""What the users of an answer say of it: noted once for each request, and learnt from.

The request is looked up in the database, long after it has ended or a moment after. What it is noted with, its kinds
and who answered, stands in its record: nothing is kept in memory for a rating that may never come.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from sqlalchemy import select

from gateway.ledger.database import Database
from gateway.ledger.reports import request_of
from gateway.ledger.rows import Note, now_ms
from gateway.ledger.schema import decisions, ledger
from gateway.outcomes import store
from gateway.outcomes.service import teaching
from gateway.outcomes.store import DAY_MS, Outcome
from policies.load import PolicySet

# Rows that are answers somebody got whole.
ANSWERED: Final = ("success", "cache_hit")


class Answered(msgspec.Struct, frozen=True):
    """An answer, and the features that its request was decided by."""

    request_id: str
    policy: str
    policy_version: str
    team_id: str
    key_id: str
    tier: str
    model: str
    cache: str
    features: dict[str, Any]


async def find(database: Database, named: str, team_id: str) -> Answered | None:
    """The answer of a request of this team, named by its id or the answer's; None where there is none."""
    async with database.read() as connection:
        request_id = await request_of(connection, named)
        mine = (ledger.c.request_id == request_id, ledger.c.team_id == team_id, ledger.c.outcome.in_(ANSWERED))
        columns = (
            ledger.c.policy,
            ledger.c.policy_version,
            ledger.c.team_id,
            ledger.c.key_id,
            ledger.c.tier,
            ledger.c.model,
            ledger.c.cache,
        )
        rows = select(*columns).where(*mine).order_by(ledger.c.attempt.desc()).limit(1)
        row = (await connection.execute(rows)).one_or_none()
        if row is None:
            return None
        text = await connection.scalar(select(decisions.c.json).where(decisions.c.request_id == request_id))
    features = msgspec.json.decode(text)["features"] if text else {}
    return Answered(request_id, *row, features)


async def rate(database: Database, policies: PolicySet, answered: Answered, *, good: bool) -> tuple[bool, bool]:
    """Note what was said of an answer, the first time, and learn from it.

    Returns:
        Whether it was the first time, and whether it was learnt from.
    """
    moment = now_ms()
    data = {"rating": "good" if good else "bad"}
    note = Note(
        id=f"feedback-{answered.request_id}", request_id=answered.request_id, ts_ms=moment, kind="feedback", data=data
    )
    outcome = _outcome(policies, answered, good)
    return await store.add_once(database, note, outcome, moment // DAY_MS)


def _outcome(policies: PolicySet, answered: Answered, good: bool) -> Outcome | None:
    """None where the answer says nothing about a tier: the policy learns nothing (or is no more), nobody could tell
    what kind of request it was, or the answer was one to other words."""
    features = answered.features
    try:
        learns = policies.named(answered.policy).document.learn == "on"
    except KeyError:
        learns = False
    if not learns or answered.cache == "semantic":
        return None
    kinds = teaching(features.get("in_distribution", False), features.get("kinds", {}))
    if not kinds:
        return None
    return Outcome(
        source="feedback",
        policy=answered.policy,
        team=answered.team_id,
        key_id=answered.key_id,
        tier=answered.tier,
        model=answered.model,
        kinds=kinds,
        good=good,
    )
