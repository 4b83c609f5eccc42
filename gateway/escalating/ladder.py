"""Who is asked next: models of larger tiers that may and can serve the request; whether there is time and money for it.

A step is asked only where all of that is given; otherwise the answer that there is will have to do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from msgspec.structs import replace

from backends.dispatch import Candidate
from gateway.access.limits import BudgetExhausted
from gateway.admission import set_aside
from gateway.dialects.errors import GatewayError
from gateway.life import Life
from gateway.routing.candidates import select
from gateway.settings import Settings
from policies.schema.escalation import Check, Escalate
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services

Obstacle = Literal["steps", "tier", "time", "budget"]


def tiers_after(escalate: Escalate, tier: str, settings: Settings) -> Iterator[str]:
    """The tiers to ask after this one, in order; none where it is no tier, as of a model for embeddings."""
    if tier not in TIERS:
        return
    larger = TIERS[TIERS.index(tier) + 1 :]
    if escalate.to == "next":
        yield from (other for other in larger if settings.tier_models(other))
    else:
        wanted = (escalate.to,) if isinstance(escalate.to, str) else escalate.to
        yield from (other for other in wanted if other in larger)


async def candidates_after(services: Services, life: Life, last: Candidate, reason: Check) -> list[Candidate]:
    """The models to ask after the answer of `last`; empty where no larger tier has one that may and can serve this."""
    decision, principal, asked = life.decision, life.principal, life.asked
    assert decision is not None
    assert decision.escalate is not None
    assert principal is not None
    assert asked is not None
    settings = services.settings
    tokens = life.input_estimate if asked.longest is None else await services.measuring.run(life, asked.longest)
    language = "" if life.facts is None else life.facts.language
    for tier in tiers_after(decision.escalate, last.tier, settings):
        if not principal.may_use_tier(tier):
            continue
        step = replace(decision, tier=tier, model=None, requested_tier=tier, fallback_tiers=())
        try:
            found = select(settings, step, asked.needs, tokens, asked.output_limit, principal, asked.input_field)
        except GatewayError:
            continue
        able = [candidate for candidate in found.candidates if candidate.tier == tier]
        if reason == "truncated":  # it was cut where its model had no more room
            able = [candidate for candidate in able if _room(settings, candidate) > _room(settings, last)]
        if language and settings.models[last.model].knows(language):
            able = [one for one in able if settings.models[one.model].knows(language)]
        if able:
            return able
    return []


def _room(settings: Settings, candidate: Candidate) -> int:
    """The most tokens that a model may write of itself."""
    model = settings.models[candidate.model]
    return min(model.max_output_tokens or model.context_length, model.context_length)


def ends_at(services: Services, life: Life) -> float:
    """When the last step has to be over, in monotonic seconds, so that what there is can still be given in time."""
    ends = life.started + services.settings.failover.total_s
    if life.deadline is not None:
        left = life.deadline - time.monotonic()
        ends = min(ends, life.deadline - min(0.5, left / 10))
    return ends


async def covered(services: Services, life: Life, candidates: list[Candidate]) -> bool:
    """Set aside what a step at one of these candidates may cost, beside what the steps before it have cost."""
    assert life.grant is not None
    tokens, cost_nanousd = set_aside(services, life, candidates)
    ttl_s = services.settings.hold_ttl_seconds
    try:
        await services.limiter.touch(life.grant.hold_id, ttl_s, life.tokens + tokens, life.cost_nanousd + cost_nanousd)
    except BudgetExhausted:
        return False
    return True
