"""What a policy in the shadow would have done with a request: decided after the answer was given, and put on record.

Both decide from the same facts. What each decision would cost is reckoned with the tokens that were really used;
another model would have used others. An answer from the cache costs what was charged for it; the shadow is taken to
find it as well where it has the same model and the same mode of caching, and else to ask its model.

Whatever goes wrong here ends here: the request is over.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gateway.accounting import Accounting
from gateway.dialects.errors import GatewayError
from gateway.ledger.prices import cost
from gateway.life import Life
from gateway.routing.hard_rules import able
from policies.evaluate import Decision, decide
from policies.facts import Facts
from policies.load import Policy

if TYPE_CHECKING:
    from gateway.services import Services

logger = logging.getLogger("tierline.rollouts")


async def compare(services: Services, life: Life, accounting: Accounting) -> None:
    """Decide the request by its policy's shadow as well, and note the difference."""
    shadow = life.shadow
    if shadow is None or life.facts is None or life.decision is None:
        return
    try:
        facts = await services.measuring.run(life, lambda: _facts(services, life, shadow))
        noted = _difference(services, life, shadow, facts)
        accounting.note("shadow", noted)
        services.journal.flush()
    except Exception:
        services.metrics.shadow_decisions.labels(shadow.name, "", "", "failed").inc()
        logger.exception("the shadow %s could not decide request %s", shadow.name, life.request_id)
        return
    same = "yes" if noted["same"] else "no"
    services.metrics.shadow_decisions.labels(shadow.name, noted["tier"], noted["shadow_tier"], same).inc()
    services.metrics.shadow_cost.labels(shadow.name, "old").inc(noted["cost_nanousd"] / 1e9)
    services.metrics.shadow_cost.labels(shadow.name, "new").inc(noted["shadow_cost_nanousd"] / 1e9)


def _facts(services: Services, life: Life, shadow: Policy) -> Facts:
    """The facts of the request, with what the shadow looks at and its own policy does not."""
    facts, asked = life.facts, life.asked
    assert facts is not None
    assert asked is not None
    if facts.profile is not None or not shadow.needs_profile:
        return facts
    profile = services.classifier.classify(
        asked.messages,
        tools=facts.has_tools,
        response_format=asked.chat().get("response_format"),
        max_tokens=asked.max_tokens,
    )
    return replace(facts, profile=profile)


def _difference(services: Services, life: Life, shadow: Policy, facts: Facts) -> dict[str, Any]:
    policy, made = life.policy, life.decision
    assert policy is not None
    assert made is not None
    assert life.facts is not None
    if life.session is not None:  # the conversation has kept its model, which says nothing of the policy
        made = decide(policy, life.facts, services.outcomes.chooser(policy))
    would = decide(shadow, facts, services.outcomes.chooser(shadow))
    model, price = _model(services, life, made)
    shadow_model, shadow_price = _model(services, life, would)
    if (row := life.served) is not None and row.outcome == "cache_hit":
        if (shadow_model, would.cache.mode) == (model, made.cache.mode):
            shadow_price = would.cache.charged(row.cost_nanousd + row.saved_nanousd)
        price = row.cost_nanousd
    tier, shadow_tier = _tier(services, made, model), _tier(services, would, shadow_model)
    return {
        "policy": shadow.name,
        "version": shadow.version,
        "same": (tier, model, made.cache) == (shadow_tier, shadow_model, would.cache),
        "tier": tier,
        "shadow_tier": shadow_tier,
        "model": model,
        "shadow_model": shadow_model,
        "rule": made.rule,
        "shadow_rule": would.rule,
        "cache": made.cache.mode,
        "shadow_cache": would.cache.mode,
        "cost_nanousd": price,
        "shadow_cost_nanousd": shadow_price,
    }


def _model(services: Services, life: Life, decision: Decision) -> tuple[str, int]:
    """The model that a decision leads to first, and what the tokens that were used cost there; a code and nothing where
    it leads to none."""
    assert life.asked is not None
    assert life.principal is not None
    try:
        first = able(services.settings, life, decision, life.input_estimate).candidates[0]
    except GatewayError as refused:
        return refused.code or "refused", 0
    if life.served is None:
        return first.model, 0
    return first.model, cost(services.prices.price_for(first.model), life.served.usage()).total_nanousd


def _tier(services: Services, decision: Decision, model: str) -> str:
    """The tier that was decided, or that of the model that was."""
    if decision.requested_tier:
        return decision.requested_tier
    known = services.settings.models.get(model)
    return known.shown_tier if known is not None else ""
