"""Choose policy, tier and candidates of a request, and record why."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from msgspec.structs import replace

from backends.attempt import Operation
from gateway.access.policy_scopes import terms_of
from gateway.access.principal import Principal
from gateway.dialects.errors import BadRequest, NotFound
from gateway.life import Life
from gateway.logs import log
from gateway.measuring import check_length, is_large
from gateway.permissions import check_model, check_pin, check_route
from gateway.routing.cheapest import cheapest_first
from gateway.routing.hard_rules import able, suited
from gateway.sessions.holding import hold, prefer
from gateway.settings import Settings
from policies.evaluate import decide
from policies.facts import Context, Facts, from_chat
from policies.load import Subject
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services

KINDS: Mapping[Operation, str] = {
    "chat": "chat",
    "completions": "chat",
    "embeddings": "embedding",
    "rerank": "rerank",
}


async def route(services: Services, life: Life) -> None:
    """Choose policy, tier and candidates, and record why.

    Raises:
        NotFound: the model is unknown.
        NotAllowed: the key may not use it, its tier or this route.
        BadRequest: no candidate can do what the request asks.
    """
    principal, asked = life.principal, life.asked
    assert principal is not None
    assert asked is not None
    check_route(principal, life.dialect.route)
    life.patient = life.patient or asked.patient
    settings = services.settings
    name = asked.model
    kind = KINDS[asked.operation]
    if kind != "chat":
        name = _named(settings, principal, name, kind)
    if name != "auto" and name not in settings.models:
        known = ", ".join(["auto", *settings.models])
        raise NotFound(
            f"The model '{name[:100]}' does not exist here. Models: {known}.", code="model_not_found", param="model"
        )
    if name != "auto":
        check_model(settings, principal, name)
    if name != "auto" and settings.models[name].kind != kind:
        text = f"The model '{name}' is for {settings.models[name].kind}, not for {kind}."
        raise BadRequest(text, code="wrong_kind_of_model", param="model")
    pinned = life.exchange.header(b"x-tierline-tier")
    if pinned is not None and kind != "chat":
        raise BadRequest(f"'x-tierline-tier' is for chat; models for {kind} have no tier.", code="invalid_tier")
    if pinned is not None and pinned not in TIERS:
        raise BadRequest(f"'x-tierline-tier' must be one of {', '.join(TIERS)}.", code="invalid_tier")
    if pinned is not None:
        check_pin(principal, pinned)
    subject = Subject(
        organisation=principal.organisation_name,
        team=principal.team_name,
        project=principal.project_name,
        key=principal.key_id,
        model=name,
    )
    policies = services.policies.current
    policy = policies.resolve(subject, life.request_id)
    if policies.shadows and kind == "chat" and not life.internal:
        life.shadow = policies.shadow(policy, subject, life.request_id)
    budgets = terms_of(principal, policy).budgets
    used = await services.limiter.budget_used(budgets) if budgets else {}
    context = Context(
        organisation=subject.organisation,
        team=subject.team,
        project=subject.project,
        key=subject.key,
        tags=tuple(f"{tag}={value}" for tag, value in life.tags.items()),
        budget_used=max(used.values(), default=0.0),
        pinned_tier=pinned,
    )
    chat = asked.chat()
    needs_profile = policy.needs_profile and (name == "auto" or name in policy.document.applies_to.models)

    vector = None
    if needs_profile:
        vector, life.embedding = await services.embedding.of(asked.messages)

    def read() -> Facts:
        profile = None
        if needs_profile:
            profile = services.classifier.classify(
                asked.messages,
                tools=bool(chat.get("tools")),
                response_format=chat.get("response_format"),
                max_tokens=asked.max_tokens,
                vector=vector,
            )
        return from_chat({**chat, "model": name} if name != asked.model else chat, context, profile)

    if is_large(life):
        check_length(settings, asked, kind)
    life.facts = await services.measuring.run(life, read)
    life.policy = policy
    life.decision = decide(policy, life.facts, services.outcomes.chooser(policy))
    life.input_estimate = life.facts.prompt_tokens
    if policy.document.session is not None and kind == "chat":
        await hold(services, life, policy, policy.document.session)
    longest = None if asked.longest is None else await services.measuring.run(life, asked.longest)
    tokens = life.input_estimate if longest is None else longest
    selection = able(settings, life, life.decision, tokens)
    candidates = selection.candidates
    if life.patient and life.decision.model is None:
        candidates = cheapest_first(
            services.prices, candidates, life.input_estimate, asked.max_tokens, batch=life.line is not None
        )
    if life.session is not None:
        candidates = prefer(life, candidates)
    selection = replace(selection, candidates=candidates)
    life.candidates, life.fallback = suited(services, life, life.decision, selection, tokens)
    if life.fallback:
        log(
            logging.INFO,
            "another tier than decided",
            request_id=life.request_id,
            requested_tier=life.decision.requested_tier,
            tier=life.candidates[0].tier,
            reason=life.fallback,
        )


def _named(settings: Settings, principal: Principal, name: str, kind: str) -> str:
    """What `auto` means where there are no tiers: the first model of that kind that the key may use."""
    if name != "auto":
        return name
    for model, described in settings.models.items():
        if described.kind == kind and principal.may_use(model):
            return model
    raise NotFound(f"No model for {kind} is configured that this key may use.", code="model_not_found", param="model")
