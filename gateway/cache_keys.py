"""Whose answers a request may get: the key of its own model's, and where the policy shares them, of larger ones.

An answer is kept under the model that gave it, and nowhere else. A request looks there, and where `cache.share_tiers`
is on also in the places in which the same request, sent to a model of a larger tier, would look. So an answer can only
ever go from a larger tier to a smaller one, and a request that names its model or pins its tier looks in one place.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cache.eligibility import too_varied
from cache.key import CacheKey, build_key
from gateway.guarding.request import guards_of
from gateway.life import Life
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services


def own_key(services: Services, life: Life) -> CacheKey:
    """The key under which the answer of the chosen model is looked for and kept."""
    return _key(services, life, life.candidates[0].model)


def larger_keys(services: Services, life: Life) -> list[CacheKey]:
    """The keys under which models of larger tiers keep theirs, the next larger tier first; none unless shared."""
    decision, own = life.decision, life.candidates[0]
    assert decision is not None
    if not decision.cache.share_tiers or decision.model is not None or decision.rule == "pinned":
        return []
    return [_key(services, life, model) for model in _larger_models(services, life, own.model, own.tier)]


def scope(life: Life) -> str:
    """The tenant whose answers these are: those who may receive each other's, as the policy says."""
    principal, decision = life.principal, life.decision
    assert principal is not None
    assert decision is not None
    share = decision.cache.share
    owner = {"key": principal.key_id, "team": principal.team_id, "organisation": principal.organisation_id}[share]
    return f"{share}:{owner}"


def _key(services: Services, life: Life, model: str) -> CacheKey:
    assert life.asked is not None
    assert life.decision is not None
    escalate = life.decision.escalate
    return build_key(
        life.asked.payload,
        scope=scope(life),
        # Answers that have been checked are kept apart from those that have not.
        model_group=model if escalate is None else f"{model}\n{escalate.model_dump_json()}",
        guards="" if (guards := guards_of(life)) is None else guards.fingerprint,
        defaults=services.model_defaults[model],
    )


def _larger_models(services: Services, life: Life, own: str, tier: str) -> list[str]:
    """Models of larger tiers that the key may use, and whose answers to this request vary no more than is allowed."""
    asked, principal, decision = life.asked, life.principal, life.decision
    assert asked is not None
    assert principal is not None
    assert decision is not None
    allowed = decision.cache.allow_temperature
    return [
        model
        for larger in TIERS[TIERS.index(tier) + 1 :]
        if principal.may_use_tier(larger)
        for model in services.settings.tier_models(larger)
        if model != own and (principal.may_use(model) or principal.may_use("auto"))
        if not too_varied(
            asked.payload, allowed, cast("float | None", services.model_defaults[model].get("temperature"))
        )
    ]
