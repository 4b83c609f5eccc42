"""Simulate a change of policies on the database of this installation."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import func, select

from gateway.ledger.database import Database
from gateway.ledger.policy_versions import history
from gateway.ledger.schema import ledger
from gateway.outcomes import store
from gateway.settings import Settings
from gateway.simulating.limits import ReplayedLimits
from gateway.simulating.reading import Unusable, recorded
from gateway.simulating.world import Conditions, Installation
from policies import yamlfile
from policies.load import PolicySet
from policies.simulation.report import Report
from policies.simulation.simulate import Simulation
from policies.simulation.summing_up import report


async def simulate(
    settings: Settings, database: Database, old: PolicySet, new: PolicySet, since: datetime, until: datetime | None
) -> tuple[Report, int]:
    """What the requests of `[since, until)` come to under both sets, and how many records were unusable.

    Raises:
        SQLAlchemyError: the database cannot be read.
    """
    begins_ms = int(since.timestamp() * 1000)
    ends_ms = int((until or datetime.now(UTC)).timestamp() * 1000)
    outcomes = await store.read(database, int(time.time() * 1000) // store.DAY_MS)
    spent = await _spent(database, since, begins_ms)
    world = Installation(settings, outcomes, await _conditions(database, old, new))
    simulation = Simulation(old, new, world, [ReplayedLimits(begins_ms, spent) for _ in (old, new)])
    unusable = Unusable()
    async for page in recorded(database, begins_ms, ends_ms, unusable):
        for request in page:
            simulation.take(request)
    return report(simulation), unusable.count


async def _spent(database: Database, since: datetime, begins_ms: int) -> dict[str, int]:
    """What the month had cost when the recording begins, by policy."""
    month = since.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    span = (ledger.c.ts_ms >= int(month.timestamp() * 1000), ledger.c.ts_ms < begins_ms)
    statement = select(ledger.c.policy, func.sum(ledger.c.cost_nanousd)).where(*span).group_by(ledger.c.policy)
    async with database.read() as connection:
        return {name: int(amount) for name, amount in (await connection.execute(statement)).all()}


class _Kept(Mapping[tuple[str, str], Conditions]):
    """Names and conditions of the rules of versions, read from their text when they are asked for."""

    def __init__(self, texts: dict[tuple[str, str], str]) -> None:
        self._texts = texts
        self._read: dict[tuple[str, str], Conditions] = {}

    def __getitem__(self, key: tuple[str, str]) -> Conditions:
        found = self._read.get(key)
        if found is None:
            data: Any = yamlfile.parse(self._texts[key], "").data
            routes = data.get("routes") or [] if isinstance(data, dict) else []
            found = self._read[key] = [
                (str(route.get("name") or f"rule {number}"), route.get("when"))
                for number, route in enumerate(routes, 1)
            ]
        return found

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


async def _conditions(database: Database, *sets: PolicySet) -> Mapping[tuple[str, str], Conditions]:
    texts = {(one.name, one.version): one.text for one in await history(database)}
    texts |= {(policy.name, policy.version): policy.text for policies in sets for policy in policies.policies}
    return _Kept(texts)
