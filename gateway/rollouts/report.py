"""How rollouts stand and what was measured of them: for `tierline policy rollout` and the admin API."""

from __future__ import annotations

from typing import Final

import msgspec
from sqlalchemy import select

from gateway.ledger.database import Database
from gateway.ledger.schema import notes
from gateway.rollouts import state
from gateway.rollouts.judging import Verdict
from gateway.rollouts.state import Key, Row
from policies.load import Policy, PolicySet
from policies.policyset import is_valid

_AT_ONCE: Final = 1000  # notes in memory at a time


class ShadowSum(msgspec.Struct, kw_only=True):
    """What the shadow's decisions add up to. `tiers`: requests by the old policy's tier, then by the shadow's. Costs
    are what the tokens that were used would cost by the decision of each."""

    requests: int = 0
    same: int = 0
    cost_nanousd: int = 0
    shadow_cost_nanousd: int = 0
    tiers: dict[str, dict[str, int]] = {}


class _Noted(msgspec.Struct):
    policy: str
    version: str
    same: bool
    tier: str
    shadow_tier: str
    cost_nanousd: int
    shadow_cost_nanousd: int


class Rollout(msgspec.Struct, kw_only=True):
    """A policy of the folder that is tried. `state`: running, rolled_back, shadow, waiting (its time is not now, or no
    gateway has seen it). `percent` is its share now; `requests` are those of each side in the present comparison, where
    there is a guard."""

    policy: str
    version: str
    instead_of: str
    file: str
    by: str
    state: str
    percent: float
    steps: list[float]
    step: int
    began_ms: int | None
    step_ms: int | None
    rolled_back_ms: int | None
    reason: str
    requests: dict[str, int]
    verdicts: list[Verdict]
    shadow: ShadowSum | None


async def report(database: Database, policies: PolicySet) -> list[Rollout]:
    """The rollouts of a folder, by the names of their policies."""
    tried = [policy for policy in policies.written if policy.document.rollout is not None]
    rows = await state.read(database, [policy.name for policy in tried]) if tried else {}
    found = [await _describe(database, policy, rows.get((policy.name, policy.version)), policies) for policy in tried]
    return sorted(found, key=lambda one: one.policy)


async def _describe(database: Database, policy: Policy, row: Row | None, policies: PolicySet) -> Rollout:
    rollout = policy.document.rollout
    assert rollout is not None
    begun = row is not None and is_valid(policy, policies.made)
    if not begun:
        standing = "waiting"
    elif rollout.mode == "shadow":
        standing = "shadow"
    else:
        standing = "running" if row is not None and row.rolled_back_ms is None else "rolled_back"
    requests: dict[str, int] = {}
    if row is not None and rollout.guard is not None:
        old, new = await state.counted(database, row.key, row.comparison)
        requests = {"old": old.total("requests"), "new": new.total("requests")}
    step = 0 if row is None else row.step
    return Rollout(
        policy=policy.name,
        version=policy.version,
        instead_of=rollout.instead_of,
        file=policy.file,
        by=rollout.by,
        state=standing,
        percent=rollout.share(step) if standing in ("running", "shadow") else 0.0,
        steps=list(rollout.steps),
        step=step,
        began_ms=None if row is None else row.began_ms,
        step_ms=None if row is None else row.step_ms,
        rolled_back_ms=None if row is None else row.rolled_back_ms,
        reason="" if row is None else row.reason,
        requests=requests,
        verdicts=[] if row is None else row.verdicts,
        shadow=await _shadow(database, row) if row is not None and rollout.mode == "shadow" else None,
    )


async def _shadow(database: Database, row: Row) -> ShadowSum:
    """Add up what was noted of a shadow since it began."""
    found = ShadowSum()
    decoder = msgspec.json.Decoder(_Noted)
    statement = (
        select(notes.c.json)
        .where(notes.c.kind == "shadow", notes.c.ts_ms >= row.began_ms)
        .execution_options(yield_per=_AT_ONCE)
    )
    async with database.read() as connection:
        async for text in (await connection.stream(statement)).scalars():
            _add(found, decoder.decode(text), row.key)
    return found


def _add(found: ShadowSum, noted: _Noted, key: Key) -> None:
    if (noted.policy, noted.version) != key:
        return
    found.requests += 1
    found.same += noted.same
    found.cost_nanousd += noted.cost_nanousd
    found.shadow_cost_nanousd += noted.shadow_cost_nanousd
    of_tier = found.tiers.setdefault(noted.tier, {})
    of_tier[noted.shadow_tier] = of_tier.get(noted.shadow_tier, 0) + 1
