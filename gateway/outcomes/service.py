"""The outcomes of a process: taken in memory, brought to the database in the background, read back with all others'.

    answer ─► record ─► waiting (bounded) ─► database ─► read every few seconds ─► a success table per policy

Nothing here is awaited by a request. While the database is away outcomes wait, as many as there is room for: they are
statistics, and what is dropped then is counted. A policy whose outcomes, and everybody's, are none has the shipped
table itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.outcomes import store
from gateway.outcomes.store import DAY_MS, Outcome
from gateway.outcomes.weighing import FAULTS_ONLY, MOST_OF_A_KEY, Counted, Source, evidence, of_policy
from policies.evaluate import Chooser
from policies.load import Policy
from tiers.choose import choose
from tiers.success import SuccessTable, default_table

if TYPE_CHECKING:
    from gateway.life import Life
    from gateway.telemetry import Metrics

logger = logging.getLogger("tierline.outcomes")

INTERVAL_S: Final = 5.0
PATIENCE_S: Final = 10.0
MOST_WAITING: Final = 10_000
PURGE_INTERVAL_S: Final = 3600.0
FIRST_PURGE_S: Final = 60.0  # a process that starts has better things to do
SHIPPED: Final = "shipped"  # version of the table before anything was learnt
# A kind that is less of a request than this learns nothing from it.
_LEAST_KIND: Final = 0.1
# Of the faults' sources a key's share of the day is spread over the day: so many at once, and then as they come.
_AT_ONCE: Final = 20.0
_PER_SECOND: Final = MOST_OF_A_KEY / 86_400
_MOST_SHARES: Final = 10_000


class Outcomes:
    """`start` it, `stop` it; it belongs to one event loop."""

    def __init__(self, database: Database, metrics: Metrics, *, interval_s: float = INTERVAL_S) -> None:
        self._database = database
        self._metrics = metrics
        self._interval_s = interval_s
        self.watch: Callable[[str, str, str, bool, Source], None] | None = None  # whoever compares policies
        self._at_intervals: list[Callable[[], None]] = []
        self._waiting: list[Outcome] = []
        self._shares: OrderedDict[tuple[str, Source], tuple[float, float]] = OrderedDict()
        self._counted: list[Counted] = []
        self._tables: dict[str, tuple[SuccessTable, str]] = {}
        self._purged_at = time.monotonic() - PURGE_INTERVAL_S + FIRST_PURGE_S
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what is known, and keep up with it."""
        await self._safely()
        self._task = asyncio.create_task(self._run(), name="outcomes")

    def at_intervals(self, callback: Callable[[], None]) -> None:
        """Have something done every few seconds."""
        self._at_intervals.append(callback)

    async def stop(self) -> None:
        """Bring what waits to the database, as far as it takes it."""
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        await self._safely()

    def record(
        self, life: Life, good: bool, source: Source, *, tier: str | None = None, model: str | None = None
    ) -> None:
        """Take what an answer of a request came to.

        Args:
            tier, model: of the answer; default: those that the client's answer is of.
        """
        tell = self.teller(life, source, tier=tier, model=model)
        if tell is not None:
            tell(good)

    def teller(
        self, life: Life, source: Source, *, tier: str | None = None, model: str | None = None
    ) -> Callable[[bool], None] | None:
        """Takes later what an answer came to; holds nothing of the request. None where it would be told in vain."""
        row, policy, principal = life.served, life.policy, life.principal
        if row is not None:
            tier, model = tier or row.tier, model or row.model
        if policy is None or principal is None or tier is None or model is None:
            return None
        watch, profile, outcome = self.watch, life.facts.profile if life.facts is not None else None, None
        if profile is not None and self.learns_from(life):
            kinds = teaching(profile.in_distribution, profile.kinds)
            outcome = Outcome(
                source=source,
                policy=policy.name,
                team=principal.team_id,
                key_id=principal.key_id,
                tier=tier,
                model=model,
                kinds=kinds,
                good=True,
            )
        elif watch is None:
            return None
        name, version, key_id = policy.name, policy.version, principal.key_id

        def tell(good: bool) -> None:
            if watch is not None:
                watch(name, version, key_id, good, source)
            if outcome is not None and (source not in FAULTS_ONLY or self._takes_room(key_id, source)):
                self.take(msgspec.structs.replace(outcome, good=good))

        return tell

    def learns_from(self, life: Life) -> bool:
        """Whether what the answer of this request comes to would be learnt from."""
        policy, facts = life.policy, life.facts
        if policy is None or facts is None or facts.profile is None or life.principal is None:
            return False
        return policy.document.learn == "on" and facts.profile.in_distribution

    def take(self, outcome: Outcome) -> None:
        """Take an outcome, if there is room."""
        if len(self._waiting) >= MOST_WAITING:
            self._metrics.outcomes.labels(outcome.source, "dropped").inc()
            return
        self._waiting.append(outcome)
        self._metrics.outcomes.labels(outcome.source, "good" if outcome.good else "bad").inc()

    def chooser(self, policy: Policy) -> Chooser:
        """What `tier: auto` of this policy chooses by."""
        table, version = self.table_for(policy)
        return choose if version == SHIPPED else partial(choose, table=table)

    def table_for(self, policy: Policy) -> tuple[SuccessTable, str]:
        """The table that this policy chooses by, and a name for its content."""
        return (default_table(), SHIPPED) if policy.document.learn == "off" else self._of(policy.name)

    def table(self, policy: str) -> SuccessTable:
        """The success table of a policy: the shipped one, and what was learnt."""
        return self._of(policy)[0]

    def _of(self, policy: str) -> tuple[SuccessTable, str]:
        found = self._tables.get(policy)
        if found is None:
            found = self._tables[policy] = learned(self._counted, policy)
        return found

    async def refresh(self) -> None:
        """Bring to the database what waits, then read what all have brought.

        Raises:
            SQLAlchemyError, OSError, TimeoutError: the database is away; nothing is lost.
        """
        today = now_ms() // DAY_MS
        batch, known = self._waiting, list(self._tables)
        async with asyncio.timeout(PATIENCE_S):
            if batch:
                self._waiting = []
                try:
                    await store.add(self._database, batch, today)
                except BaseException:
                    self._waiting = [*batch, *self._waiting][:MOST_WAITING]
                    raise
            counted = await store.read(self._database, today)
            if time.monotonic() - self._purged_at >= PURGE_INTERVAL_S:
                await store.purge(self._database, today)
                self._purged_at = time.monotonic()
        if counted != self._counted:
            # Beside the requests: a table takes a millisecond or two to make.
            tables = await asyncio.to_thread(lambda: {policy: learned(counted, policy) for policy in known})
            self._counted, self._tables = counted, tables

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            for callback in self._at_intervals:
                callback()
            await self._safely()

    async def _safely(self) -> None:
        try:
            await self.refresh()
        except Exception as error:  # whatever it is, routing goes on by what is known
            if not self._failing:
                reason = error.orig if isinstance(error, DBAPIError) else error
                known = isinstance(error, SQLAlchemyError | OSError)
                logger.error(
                    "outcomes wait, the database does not take them: %s", reason or type(error).__name__,
                    exc_info=None if known else error,
                )  # fmt: skip
            self._failing = True
        else:
            if self._failing:
                logger.info("the database takes outcomes again")
            self._failing = False

    def has_room(self, key_id: str, source: Source) -> bool:
        """Whether one more outcome of this key may count now: its share of a day is not for the first minute."""
        return self._room(key_id, source) >= 1

    def _takes_room(self, key_id: str, source: Source) -> bool:
        left = self._room(key_id, source)
        taken = left >= 1
        self._shares[key_id, source] = (left - 1 if taken else left, time.monotonic())
        self._shares.move_to_end((key_id, source))
        if len(self._shares) > _MOST_SHARES:
            self._shares.popitem(last=False)
        return taken

    def _room(self, key_id: str, source: Source) -> float:
        now = time.monotonic()
        left, at = self._shares.get((key_id, source), (_AT_ONCE, now))
        return min(_AT_ONCE, left + (now - at) * _PER_SECOND)


def teaching(in_distribution: bool, kinds: Mapping[str, float]) -> dict[str, float]:
    """The kinds that a request teaches something of; none where it is unlike anything known."""
    return {kind: weight for kind, weight in kinds.items() if weight >= _LEAST_KIND} if in_distribution else {}


def learned(counted: list[Counted], policy: str) -> tuple[SuccessTable, str]:
    """The table of a policy by these outcomes, and a name for its content."""
    shipped = default_table()
    strength = {(kind, tier): cell.weight for kind, row in shipped.cells.items() for tier, cell in row.items()}
    seen = {at: sums for at, sums in of_policy(counted, policy).items() if at[1:] in strength}  # of today's kinds
    added = evidence(seen, strength)
    if not added:
        return shipped, SHIPPED
    text = repr(sorted((*cell, round(wins, 6), round(losses, 6)) for cell, (wins, losses) in added.items()))
    return shipped.learned(added), hashlib.sha256(text.encode()).hexdigest()[:12]
