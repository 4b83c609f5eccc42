"""A turn of a conversation: before it, where it stays or goes; after it, where the conversation is from then on.

    decide ─► hold: which conversation, where it is, stay or switch ─► select ─► prefer: the model it knows
    an answer, from wherever ─► follow: the pin goes to where the answer came from

It stands between what the policy decided and the candidates. What a client or the policy settles by itself (a named
model, a pinned tier, a cascade) is not touched, and the conversation stays where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from backends.dispatch import Candidate
from gateway.access.secret import ServerSecret
from gateway.ledger.money import cost_nanousd
from gateway.ledger.prices import estimate
from gateway.sessions.identity import identify
from gateway.sessions.pins import Pins
from gateway.sessions.rereading import Rereading
from gateway.sessions.turn import Turn
from gateway.settings import Settings
from policies.evaluate import Decision, with_tier
from policies.load import Policy
from policies.schema.session import SessionPolicy
from tiers import TIERS
from tiers.session import NO_COST, Pin, SwitchCost, Terms, Wish, answered, step

if TYPE_CHECKING:
    from gateway.life import Life
    from gateway.services import Services

# Decisions that are nobody's to change.
_SETTLED = ("pinned", "named model")
# After these the model has the conversation in its prompt cache, if it has one.
_READ = ("success", "cancelled")


class Sessions:
    """What this process knows of conversations."""

    def __init__(self, secret: ServerSecret, pins: Pins) -> None:
        self.secret = secret
        self.pins = pins
        self.rereading = Rereading()

    async def close(self) -> None:
        await self.pins.close()


async def open_sessions(settings: Settings, secret: ServerSecret) -> Sessions:
    """Pins in memory, and in Redis where `storage.redis_url` names one."""
    if settings.storage.redis_url is None:
        return Sessions(secret, Pins())
    from gateway.access.redis_shared import open_channel
    from gateway.sessions.shared import SCRIPT, SharedPins

    shared = SharedPins(open_channel(settings.storage, SCRIPT))
    await shared.start()
    return Sessions(secret, Pins(shared))


async def hold(services: Services, life: Life, policy: Policy, session: SessionPolicy) -> None:
    """Let a conversation stay where it is, or move: sets `life.session`, and `life.decision` anew where that differs.

    Raises:
        BadRequest: `x-tierline-session` names nothing.
    """
    decision = life.decision
    assert decision is not None
    if life.internal or life.line is not None or decision.rule in _SETTLED:
        return
    wish = _wish(services.settings, policy, decision)
    if wish is None or session.pin is None:
        return
    identity = identify(life, policy.name, session, services.sessions.secret)
    if identity is None:
        return
    pin = None if identity.begins else await services.sessions.pins.find(identity.id)
    if pin is not None and not services.settings.tier_models(pin.tier):
        pin = None  # the platform has that tier no more
    terms = Terms(session.margin, None if session.downgrade_after == "never" else session.downgrade_after)
    cost = _cost(services, life, pin, wish)
    taken = step(pin, wish, terms, cost)
    life.session = Turn(identity, session.pin, pin, wish, terms, cost, taken)
    why = f"{decision.why}; session: {taken.why}"
    if taken.tier != wish.tier or (wish.model is not None and taken.model != wish.model):
        # A tier, within which `prefer` looks for the model that the conversation knows.
        by_session = taken.tier != wish.tier
        held = replace(decision, model=None, fallback_reason=None, by_session=by_session)
        decision = with_tier(policy, held, taken.tier)
    life.decision = replace(decision, why=why)


def prefer(life: Life, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The candidates with the model that the conversation knows before the others of its tier that fit as well."""
    turn = life.session
    ordered = list(candidates)
    if turn is None or turn.step.model is None:
        return ordered

    def fits(candidate: Candidate) -> tuple[str, bool]:
        return candidate.tier, life.input_estimate < candidate.context_length

    for at, candidate in enumerate(ordered):
        if candidate.model == turn.step.model and fits(candidate) == fits(ordered[0]):
            ordered.insert(0, ordered.pop(at))
            break
    return ordered


def follow(services: Services, life: Life) -> dict[str, Any] | None:
    """Keep where the conversation is after this turn. Called before the client has its last byte, and returns at once.

    Returns:
        Where it went that was not decided, for the record.
    """
    turn, row = life.session, life.served
    if turn is None or row is None or turn.followed:
        return None
    turn.followed = True
    pin = turn.step.pin
    went_elsewhere = None
    if row.outcome == "cache_hit":
        if not pin.model:  # nothing was read, and the next turn goes where this one would have gone
            pin = answered(pin, pin.tier, life.candidates[0].model, 0)
    elif row.outcome not in _READ:
        return None
    else:
        _observe(services.sessions.rereading, life)
        if turn.step.outcome != "moved":
            pin = answered(pin, row.tier, row.model, row.input_tokens + row.output_tokens)
        if (said := turn.said(row.tier, row.model)) != turn.step.outcome:
            went_elsewhere = {"session": said, "tier": row.tier, "model": row.model}
    _keep(services.sessions.pins, turn, pin)
    return went_elsewhere


def _keep(pins: Pins, turn: Turn, pin: Pin) -> None:
    pins.keep(turn.identity.id, pin, turn.seconds)
    if turn.identity.also is not None:
        pins.keep(turn.identity.also, pin, turn.seconds)


def _observe(rereading: Rereading, life: Life) -> None:
    attempt, row = life.attempt, life.served
    if attempt is not None and row is not None and life.stream and attempt.first_content_s is not None:
        rereading.observe(row.model, row.input_tokens - row.cached_input_tokens, attempt.first_content_s)


def _wish(settings: Settings, policy: Policy, decision: Decision) -> Wish | None:
    """What the policy decided, as a wish; None where it leaves nothing to stay on."""
    sticky = decision.rule != "budget exhausted"
    if decision.rule_index is not None:
        route = policy.rules[decision.rule_index].route
        if route.cascade is not None:
            return None
        sticky = route.sticky
    tier = decision.tier if decision.model is None else settings.models[decision.model].tier
    if tier is None:
        return None
    odds = None if decision.auto is None else decision.auto.p_success
    return Wish(tier, decision.model, known=odds is None or bool(odds), sticky=sticky, p_success=odds)


def _cost(services: Services, life: Life, pin: Pin | None, wish: Wish) -> SwitchCost:
    """What it costs to leave the pinned model for a larger tier; not reckoned where nobody would look at it."""
    if pin is None or not wish.p_success or TIERS.index(wish.tier) <= TIERS.index(pin.tier):
        return NO_COST
    assert life.principal is not None
    models = services.settings.tier_models(wish.tier)
    target = wish.model or (models[0] if models else None)
    if target is None:
        return NO_COST
    rates = services.prices.price_for(pin.model).rates(pin.tokens)
    asked = life.asked
    output = services.estimator.estimate(life.principal.key_id, target, asked.max_tokens if asked else None)
    prompt = life.facts.prompt_tokens if life.facts else 0
    return SwitchCost(
        lost_nanousd=cost_nanousd(pin.tokens, max(0, rates.input - rates.cached_input)),
        turn_nanousd=estimate(services.prices.price_for(target), prompt, output),
        reread_s=services.sessions.rereading.seconds(target, pin.tokens),
    )
