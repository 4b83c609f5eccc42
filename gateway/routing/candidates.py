"""From a decided tier to the models that can serve it: capabilities, context length, and what the key may use."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from backends.dispatch import Candidate
from gateway.access.principal import Principal
from gateway.dialects.errors import BadRequest, NotAllowed, Unavailable
from gateway.measuring import FAR_TOO_LONG
from gateway.permissions import nearest_tiers
from gateway.settings import Settings
from policies.evaluate import Decision


class Selection(msgspec.Struct, frozen=True):
    """Candidates in the order in which to try them; `fallback` says why the first is not of the decided tier."""

    candidates: list[Candidate]
    fallback: str | None


def select(
    settings: Settings,
    decision: Decision,
    needs: Mapping[str, str],
    prompt_tokens: int,
    limit: tuple[str, int] | None,
    principal: Principal,
    input_field: str = "messages",
) -> Selection:
    """Models of the decided tier first, then those of its fallback tiers. Where the key may use none of these tiers,
    those of the nearest that it may use.

    Args:
        needs: capabilities that the request needs, each with the field that asks for it.
        prompt_tokens: what the model must take at once, estimated; `input_field` is where it stands.
        limit: the most output tokens that the request allows, behind the name of the field that says so.

    Raises:
        Unavailable: `no_model`.
        NotAllowed: `model_not_allowed` or `tier_not_allowed`.
        BadRequest: `unsupported_parameter`, `max_tokens_too_large` or `context_length_exceeded`, with the field.
    """
    names = [] if decision.model is None else [decision.model]
    tiers = [tier for tier in (decision.tier, *decision.fallback_tiers) if tier]
    if principal.allowed_tiers is not None:
        names, tiers = _within_tiers(settings, principal, names, tiers)
    names += [name for tier in tiers for name in settings.tier_models(tier) if name != decision.model]
    if not names and tiers and principal.allowed_tiers is not None:
        text = (
            f"This key may use the tiers {', '.join(sorted(principal.allowed_tiers))} only, and no model serves these."
        )
        raise NotAllowed(text, code="tier_not_allowed")
    if not names:
        raise Unavailable("No model is configured here; tell whoever runs the gateway.", code="no_model")
    allowed_models = principal.allowed_models
    if allowed_models is not None and "auto" not in allowed_models:
        names = [name for name in names if name in allowed_models]
        if not names:
            allowed = ", ".join(sorted(allowed_models))
            raise NotAllowed(
                f"This key may use {allowed} only, and none of these serves the tier '{decision.requested_tier}'.",
                code="model_not_allowed",
                param="model",
            )
    able = [name for name in names if needs.keys() <= settings.abilities(name)] if needs else names
    if not able:
        raise _incapable(settings, needs, names, principal)
    if limit is not None:
        field, tokens = limit
        able, refused = [name for name in able if tokens <= (_most(settings, name) or tokens)], able
        if not able:
            most = max(_most(settings, name) or 0 for name in refused)
            raise BadRequest(
                f"'{field}' is {tokens}; at most {most} output tokens can be asked for here.",
                code="max_tokens_too_large",
                param=field,
            )
    # The estimate is rough: only what is far too long is refused here, the backend knows the exact length.
    fitting = [name for name in able if prompt_tokens < FAR_TOO_LONG * settings.models[name].context_length]
    if not fitting:
        longest = max(settings.models[name].context_length for name in able)
        raise BadRequest(
            f"The prompt has about {prompt_tokens} tokens; the longest context here is {longest}. Shorten it.",
            code="context_length_exceeded",
            param=input_field,
        )
    fitting.sort(key=lambda name: prompt_tokens >= settings.models[name].context_length)
    candidates = [_candidate(settings, name) for name in fitting]
    return Selection(candidates, _fallback(settings, decision, able, candidates[0], principal))


def _within_tiers(
    settings: Settings, principal: Principal, names: list[str], tiers: list[str]
) -> tuple[list[str], list[str]]:
    """Of the models and tiers of a decision those that the key may use; where it may use none, the nearest tiers."""
    decided = tiers[0] if tiers else settings.models[names[0]].tier if names else None
    names = [name for name in names if principal.may_use_tier(settings.models[name].tier)]
    tiers = [tier for tier in tiers if principal.may_use_tier(tier)]
    if names or tiers or decided is None:
        return names, tiers
    return names, nearest_tiers(principal, decided)


def _incapable(settings: Settings, needs: Mapping[str, str], names: list[str], principal: Principal) -> BadRequest:
    """Which field asks for what the first choice cannot do, and who could."""
    lacking = [capability for capability in needs if capability not in settings.abilities(names[0])]
    asked = "; ".join(f"'{needs[capability]}' needs the capability '{capability}'" for capability in lacking)
    others = [
        name
        for name, model in settings.models.items()
        if needs.keys() <= settings.abilities(name) and principal.may_use(name) and principal.may_use_tier(model.tier)
    ]
    advice = f"Models that can: {', '.join(others)}." if others else "No model that this key may use can; leave it out."
    return BadRequest(
        f"{asked}, which '{names[0]}' does not have. {advice}", code="unsupported_parameter", param=needs[lacking[0]]
    )


def _most(settings: Settings, name: str) -> int | None:
    return settings.models[name].max_output_tokens


def _candidate(settings: Settings, name: str) -> Candidate:
    model = settings.models[name]
    return Candidate(
        model=name,
        tier=model.shown_tier,
        backend=model.backend,
        upstream_model=model.upstream_model or name,
        context_length=model.context_length,
        prefill="prefill" in settings.abilities(name),
        output_limit_field=settings.backends[model.backend].limits_output_by,
        flex=settings.backends[model.backend].knows_flex,
    )


def _fallback(
    settings: Settings, decision: Decision, able: list[str], first: Candidate, principal: Principal
) -> str | None:
    """Why the first candidate is not of the tier that was decided on; None if it is."""
    wanted = decision.requested_tier
    if wanted is None or first.tier == wanted:
        return None
    in_tier = settings.tier_models(wanted)
    if not in_tier:
        return "tier_not_served"
    if not principal.may_use_tier(wanted):
        return "tier_not_allowed"
    if not any(name in able for name in in_tier):
        return "capability"
    return "context_length"
