"""What each gateway process does about rollouts, second by second: it keeps to how they stand, counts both sides of
those that are guarded, and compares them where no other process has just done so.

    request ends ─► tally in memory ─► database ─► all processes' tallies ─► judged ─► rolled back, or a step further
                                                                                 all processes read that ─► policies

Nothing here is on the way of a request but one look-up by the policy's name. Where no policy is rolled out, nothing is
asked of the database either. While it is away rollouts stand as they stood; one that is new waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from gateway.ledger.database import Database
from gateway.ledger.rows import Outcome, new_id, now_ms
from gateway.rollouts import state
from gateway.rollouts.judging import judge
from gateway.rollouts.state import Key, Row
from gateway.rollouts.tallies import Tally
from gateway.rollouts.wording import breach_of
from policies.load import Policy, PolicySet, Subject
from policies.policyset import Standing, is_valid
from policies.watch import PolicyStore

if TYPE_CHECKING:
    from gateway.life import Life
    from gateway.telemetry import Metrics

logger = logging.getLogger("tierline.rollouts")

INTERVAL_S: Final = 1.0
PATIENCE_S: Final = 10.0
# What became of a request. All other outcomes are the client's doing (it left, it was over a limit, its request is
# invalid), or not an answer of this policy's.
_ANSWERED: Final[frozenset[Outcome]] = frozenset({"success", "cache_hit"})
_FAULTS: Final[frozenset[Outcome]] = frozenset({"error", "timeout", "cut"})
# Judgements that say the same of both sides only where both policies have this key, and alike. People judge anyway.
_NEEDS: Final = {"feedback": None, "audit": "audit", "validation": "escalate", "escalation": "escalate"}


class _Sides:
    """The counts of one rollout in this process, for the comparison that is under way."""

    def __init__(self, comparison: int) -> None:
        self.comparison = comparison
        self.tallies = {"old": Tally(), "new": Tally()}
        self.changed = False


class RolloutKeeper:
    """`start` it, `stop` it; it belongs to one event loop."""

    def __init__(
        self, database: Database, policies: PolicyStore, metrics: Metrics, *, interval_s: float = INTERVAL_S
    ) -> None:
        self._database = database
        self._policies = policies
        self._metrics = metrics
        self.interval_s = interval_s
        self._writer = new_id()
        self._rows: dict[Key, Row] = {}
        self._sides: dict[Key, _Sides] = {}
        self._guarded: dict[str, tuple[Key, str]] = {}  # by name of a policy: whose side it is
        self._failing = False
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Learn how rollouts stand, and keep to it.

        Raises:
            SQLAlchemyError, OSError: the database is out, and there is nothing to go by.
        """
        self._policies.stand({})
        await self.look()
        self._task = asyncio.create_task(self._run(), name="rollouts")

    async def stop(self) -> None:
        if self._task is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        with suppress(SQLAlchemyError, OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._put()

    def rolled_back(self) -> list[Row]:
        """Those policies of the folder that were taken back."""
        return [row for row in self._rows.values() if row.rolled_back_ms is not None]

    def finished(self, life: Life, outcome: Outcome) -> None:
        """Count a request that has ended, if one of the policies under comparison decided it."""
        if not self._guarded or life.policy is None or life.internal:
            return
        found = self._guarded.get(life.policy.name)
        if found is None or not (outcome in _ANSWERED or outcome in _FAULTS):
            return
        key, side = found
        sides = self._sides[key]
        unit = self._unit(key, life)
        sides.tallies[side].finished(unit, outcome in _FAULTS, life.seconds() * 1000, life.cost_nanousd)
        sides.changed = True

    def judged(self, policy: str, version: str, key_id: str, good: bool, source: str) -> None:
        """Count what an answer of a policy was found to be: `source` as in `gateway/outcomes`."""
        found = self._guarded.get(policy)
        if found is None or source not in _NEEDS or not self._comparable(found[0], _NEEDS[source]):
            return
        key, side = found
        if side == "new" and version != key[1]:
            return  # of an answer that was given before the policy was edited
        self._sides[key].tallies[side].judged(key_id, good)
        self._sides[key].changed = True

    async def look(self) -> None:
        """Do what is to be done now.

        Raises:
            SQLAlchemyError, OSError, TimeoutError: the database is away; all stays as it is.
        """
        policies = self._policies.current
        tried = _tried(policies)
        if not tried and not self._rows:
            return
        async with asyncio.timeout(PATIENCE_S):
            await self._put()
            await self._read(tried)
            for policy in tried.values():
                row = self._rows[policy.name, policy.version]
                if row.rolled_back_ms is None and await self._compare(policy, row):
                    await self._read(tried)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.interval_s)
            try:
                await self.look()
            except Exception as error:  # whatever it is, rollouts stand as they stood, and the next look may go well
                if not self._failing:
                    reason = error.orig if isinstance(error, DBAPIError) else error
                    known = isinstance(error, SQLAlchemyError | OSError)  # TimeoutError is an OSError
                    text = "rollouts stand as they stood, the database does not say more: %s"
                    logger.error(text, reason or type(error).__name__, exc_info=None if known else error)
                self._failing = True
            else:
                if self._failing:
                    logger.info("the database says again how rollouts stand")
                self._failing = False

    async def _put(self) -> None:
        """Bring to the database what was counted since the last time."""
        for key, sides in self._sides.items():
            if sides.changed:
                sides.changed = False
                try:
                    await state.put(self._database, key, sides.comparison, self._writer, sides.tallies)
                except BaseException:
                    sides.changed = True
                    raise

    async def _read(self, tried: dict[Key, Policy]) -> None:
        """Learn how rollouts stand, and have the policies stand so."""
        before = self._rows
        names = {name for name, _ in tried}
        rows = await state.read(self._database, names) if tried else {}
        if missing := tried.keys() - rows.keys():
            for key in missing:
                rollout = tried[key].document.rollout
                assert rollout is not None
                await state.begin(self._database, key, rollout.instead_of)
            rows = await state.read(self._database, names)
        self._rows = {key: rows[key] for key in tried}
        self._policies.stand(
            {key: Standing(row.step, row.rolled_back_ms is not None) for key, row in self._rows.items()}
        )
        self._watch(tried)
        self._tell(before)

    def _watch(self, tried: dict[Key, Policy]) -> None:
        """Count for the comparisons that are under way, and for no other."""
        guarded: dict[str, tuple[Key, str]] = {}
        sides: dict[Key, _Sides] = {}
        for key, policy in tried.items():
            row, rollout = self._rows[key], policy.document.rollout
            if rollout is None or rollout.guard is None or row.rolled_back_ms is not None:
                continue
            known = self._sides.get(key)
            sides[key] = known if known is not None and known.comparison == row.comparison else _Sides(row.comparison)
            guarded[policy.name] = (key, "new")
            guarded[rollout.instead_of] = (key, "old")
        self._sides, self._guarded = sides, guarded

    def _tell(self, before: dict[Key, Row]) -> None:
        """Say in log and metrics how rollouts stand."""
        share, taken = self._metrics.rollout_percent, self._metrics.rolled_back
        share.clear()
        taken.clear()
        trials = {trial.policy.name: trial.share for trial in self._policies.current.canaries.values()}
        for key, row in self._rows.items():
            share.labels(row.policy).set(trials.get(row.policy, 0.0))
            taken.labels(row.policy).set(1 if row.rolled_back_ms is not None else 0)
            was = before.get(key)
            if row.rolled_back_ms is not None and (was is None or was.rolled_back_ms is None):
                logger.error("policy %s@%s is rolled back to %s: %s", *key, row.instead_of, row.reason)
            elif was is not None and was.rolled_back_ms is not None and row.rolled_back_ms is None:
                logger.info("policy %s@%s is tried again", *key)
            elif was is not None and was.step != row.step:
                logger.info("policy %s@%s goes to %g %%", *key, trials.get(row.policy, 0.0))

    async def _compare(self, policy: Policy, row: Row) -> bool:
        """Compare the two sides of a rollout if it is this process's turn. Whether it stands otherwise now."""
        rollout = policy.document.rollout
        assert rollout is not None
        if rollout.guard is None and not rollout.steps:
            return False
        if not await state.claim(self._database, row.key, round(self.interval_s * 1000)):
            return False
        heard = True  # nothing is quiet that nobody has listened to
        if rollout.guard is not None:
            old, new = await state.counted(self._database, row.key, row.comparison)
            verdicts = await asyncio.to_thread(judge, rollout.guard, old, new, row.comparison)
            if breaches := [verdict for verdict in verdicts if verdict.breach]:
                reason = "; ".join(map(breach_of, breaches))
                return await state.roll_back(self._database, row, reason, verdicts)
            heard = min(old.total("requests"), new.total("requests")) >= rollout.guard.min_requests
            if verdicts != row.verdicts:
                await state.compared(self._database, row.key, verdicts)
        now = now_ms()
        if not heard:
            return False
        if row.step + 1 < len(rollout.steps) and now >= row.step_ms + rollout.every * 1000:
            return await state.go_on(self._database, row, row.step + 1)
        if rollout.guard is not None and now >= row.comparison_ms + rollout.guard.window * 1000:
            return await state.go_on(self._database, row, row.step)
        return False

    def _unit(self, key: Key, life: Life) -> str:
        """What stays on one side: the request, the team or the key."""
        assert life.principal is not None
        trial = self._policies.current.canaries.get(self._rows[key].instead_of)
        if trial is None:
            return life.principal.key_id
        who = life.principal
        subject = Subject(organisation=who.organisation_name, team=who.team_name, key=who.key_id)
        return trial.unit(subject, life.request_id)

    def _comparable(self, key: Key, needed: str | None) -> bool:
        """Whether both policies of a rollout have, alike, what brings such judgements about."""
        if needed is None:
            return True
        current = self._policies.current
        with suppress(KeyError):
            new, old = (getattr(current.named(name).document, needed) for name in (key[0], self._rows[key].instead_of))
            return new is not None and new == old
        return False


def _tried(policies: PolicySet) -> dict[Key, Policy]:
    """The policies of a folder that are to be tried now, whether they serve or not."""
    now = policies.made
    return {
        (policy.name, policy.version): policy
        for policy in policies.written
        if policy.document.rollout is not None and is_valid(policy, now)
    }
