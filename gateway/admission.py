"""Before a request runs: who asks, under which policy, on which tier, and whether limits and budget allow it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from gateway.access.limits import Admission, BudgetExhausted, Refused, Scope
from gateway.access.principal import AuthenticationError, Principal
from gateway.candidates import select
from gateway.dialects import openai_chat
from gateway.dialects.errors import BadRequest, NotAllowed, NotFound, OutOfBudget, RateLimited, Unauthenticated
from gateway.http import Exchange
from gateway.ledger.money import parse_usd
from gateway.ledger.prices import estimate
from gateway.ledger.rows import new_id
from gateway.life import Life
from gateway.logs import log
from policies.evaluate import decide
from policies.facts import Context, from_chat
from policies.load import Policy, Subject
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services

MAX_TAGS = 16
MAX_TAG_LENGTH = 64


async def authenticate(services: Services, exchange: Exchange) -> Principal:
    """Who asks.

    Raises:
        Unauthenticated: no key, or one that is unknown, expired or revoked.
    """
    header = exchange.header(b"authorization")
    if header is None:
        raise Unauthenticated("No API key given. Send 'Authorization: Bearer YOUR_KEY'.", code="missing_api_key")
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated("The Authorization header must be 'Bearer YOUR_KEY'.", code="invalid_authorization")
    try:
        return await services.keys.authenticate_fresh(token.strip())
    except AuthenticationError as error:
        raise Unauthenticated(f"{str(error)[0].upper()}{str(error)[1:]}.", code=error.code) from None


def read_headers(life: Life) -> None:
    """Take Tierline's own request headers into account.

    Raises:
        BadRequest: a header that cannot be understood or honoured.
    """
    exchange = life.exchange
    if (deadline := exchange.header(b"x-tierline-deadline-ms")) is not None:
        if not deadline.isdigit() or not 0 < int(deadline) <= 86_400_000:
            raise BadRequest("'x-tierline-deadline-ms' must be a whole number of milliseconds, up to a day.")
        life.deadline = life.started + int(deadline) / 1000
    if (tags := exchange.header(b"x-tierline-tags")) is not None:
        life.tags = _tags(tags)
    if exchange.header(b"idempotency-key") is not None:
        raise BadRequest(
            "'idempotency-key' is not supported yet, so a repeated request would be billed twice; leave it out.",
            code="unsupported_header",
        )


def _tags(header: str) -> dict[str, str]:
    tags: dict[str, str] = {}
    for pair in header.split(","):
        name, separator, value = pair.strip().partition("=")
        if not separator or not name or max(len(name), len(value)) > MAX_TAG_LENGTH:
            raise BadRequest(
                f"'x-tierline-tags' takes NAME=VALUE pairs separated by commas, each part at most {MAX_TAG_LENGTH} "
                f"characters.",
                code="invalid_tags",
            )
        tags[name.strip()] = value.strip()
    if len(tags) > MAX_TAGS:
        raise BadRequest(f"'x-tierline-tags' takes at most {MAX_TAGS} pairs.", code="invalid_tags")
    return tags


async def route(services: Services, life: Life) -> None:
    """Choose policy, tier and candidates, and record why.

    Raises:
        NotFound: the model is unknown.
        NotAllowed: the key may not use it.
        BadRequest: no candidate can do what the request asks.
    """
    principal, request = life.principal, life.request
    assert principal is not None
    assert request is not None
    settings = services.settings
    name = request.model
    if name != "auto" and name not in settings.models:
        known = ", ".join(["auto", *settings.models])
        raise NotFound(
            f"The model '{name[:100]}' does not exist here. Models: {known}.", code="model_not_found", param="model"
        )
    if name != "auto" and not principal.may_use(name):
        allowed = ", ".join(sorted(principal.allowed_models or ()))
        raise NotAllowed(
            f"This key may not use the model '{name}'. It may use: {allowed}.", code="model_not_allowed", param="model"
        )
    pinned = life.exchange.header(b"x-tierline-tier")
    if pinned is not None and pinned not in TIERS:
        raise BadRequest(f"'x-tierline-tier' must be one of {', '.join(TIERS)}.", code="invalid_tier")
    subject = Subject(
        organisation=principal.organisation_name,
        team=principal.team_name,
        project=principal.project_name,
        key=principal.key_id,
        model=name,
    )
    policy = services.policies.current.resolve(subject)
    used = await services.limiter.budget_used((principal.scope(), _budget_scope(policy, enforced=False)))
    context = Context(
        organisation=subject.organisation,
        team=subject.team,
        project=subject.project,
        key=subject.key,
        tags=tuple(f"{tag}={value}" for tag, value in life.tags.items()),
        budget_used=max(used.values(), default=0.0),
        pinned_tier=pinned,
    )
    profile = None
    if policy.needs_profile and (name == "auto" or name in policy.document.applies_to.models):
        profile = services.classifier.classify(
            life.payload["messages"],
            tools=bool(request.tools),
            response_format=request.response_format,
            max_tokens=openai_chat.output_limit(request),
        )
    life.facts = from_chat(life.payload, context, profile)
    life.policy = policy
    life.decision = decide(policy, life.facts)
    life.input_estimate = life.facts.prompt_tokens
    selection = select(
        settings,
        life.decision,
        openai_chat.needs(request),
        life.input_estimate,
        openai_chat.named_output_limit(request),
        principal,
    )
    life.candidates = selection.candidates
    life.fallback = selection.fallback
    if life.fallback:
        log(
            logging.INFO,
            "another tier than decided",
            request_id=life.request_id,
            requested_tier=life.decision.requested_tier,
            tier=life.candidates[0].tier,
            reason=life.fallback,
        )


async def admit(services: Services, life: Life) -> None:
    """Take the request off the limits and set its money aside, in one round trip.

    Raises:
        RateLimited, OutOfBudget: with `retry-after`.
    """
    principal, request = life.principal, life.request
    assert principal is not None
    assert request is not None
    assert life.policy is not None
    limit = openai_chat.output_limit(request)
    models = {candidate.model for candidate in life.candidates}
    life.output_estimate = life.choices * max(
        services.estimator.estimate(principal.key_id, model, limit) for model in models
    )
    dearest = max(
        estimate(services.prices.price_for(model), life.input_estimate, life.output_estimate) for model in models
    )
    admission = Admission(
        hold_id=new_id(),
        scopes=_scopes(principal, life.policy),
        tokens=life.input_estimate + life.output_estimate,
        cost_nanousd=dearest,
        ttl_s=services.settings.hold_ttl_seconds,
    )
    try:
        life.grant = await services.limiter.admit(admission)
    except Refused as error:
        services.metrics.limited.labels(error.limit).inc()
        kind = OutOfBudget if isinstance(error, BudgetExhausted) else RateLimited
        raise kind(error.message, headers=error.headers()) from None


def _scopes(principal: Principal, policy: Policy) -> tuple[Scope, ...]:
    """Everything that a request counts against: its key, the policy's ceilings of that key, the policy's budget."""
    limits = policy.limits
    ceilings = Scope(
        f"policy:{policy.name}/key:{principal.key_id}",
        limits.requests_per_minute,
        limits.tokens_per_minute,
        limits.parallel,
    )
    return principal.scope(), ceilings, _budget_scope(policy, enforced=True)


def _budget_scope(policy: Policy, *, enforced: bool) -> Scope:
    """The policy's monthly budget. One that downgrades counts as well, but refuses nobody."""
    budget = policy.budget
    if budget is None or (enforced and budget.when_exhausted != "reject"):
        return Scope(f"policy:{policy.name}")
    return Scope(f"policy:{policy.name}", budget_nanousd=parse_usd(budget.monthly_usd))
