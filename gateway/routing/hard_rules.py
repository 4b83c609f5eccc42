"""What a model must be fit for, whatever tier was decided on: capabilities, length, the key's models, the request's
language and deadline.

    decided tiers ─► able: capabilities, context, output, allowed models ─► none? the other tiers, the nearest first
                  ─► suited: knows the language, likely in time, before those that do not

What a client or a spent budget has settled stays: a named model or a pinned tier is never left for another tier. What
nobody is able to do is refused; a language that nobody knows, or a deadline that nobody will keep, is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from backends.dispatch import Candidate
from gateway.dialects.errors import BadRequest, GatewayError, NotAllowed
from gateway.life import Life
from gateway.routing.candidates import Selection, select
from gateway.settings import Settings
from policies.evaluate import Decision
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services

# Decisions that name the tiers that come into question, and no others.
_SETTLED: Final = ("pinned", "named model", "budget exhausted")


# Whether a model keeps it.
Rule = Callable[[Candidate], bool]


def able(settings: Settings, life: Life, decision: Decision, tokens: int) -> Selection:
    """As `candidates.select`; where no model of the decided tiers is able, those of the other tiers: the next larger
    ones, then the next smaller ones. `tokens`: what a model must take at once.

    Raises:
        Unavailable, NotAllowed, BadRequest: no model here is able; said of the decided tiers.
    """
    try:
        return _selected(settings, life, decision, tokens)
    except (BadRequest, NotAllowed) as refused:
        wider = elsewhere(settings, decision)
        if wider is None:
            raise
        try:
            return _selected(settings, life, wider, tokens)
        except GatewayError:
            raise refused from None


def elsewhere(settings: Settings, decision: Decision) -> Decision | None:
    """The decision with all further tiers behind its own, the next larger one first; None where it is settled."""
    wanted = decision.requested_tier
    if wanted is None and decision.model is not None:
        wanted = settings.models[decision.model].tier
    if decision.rule in _SETTLED or wanted not in TIERS:
        return None
    at = TIERS.index(wanted)
    listed = decision.fallback_tiers
    further = [tier for tier in (*TIERS[at + 1 :], *reversed(TIERS[:at])) if tier not in (decision.tier, *listed)]
    return replace(decision, fallback_tiers=(*listed, *further)) if further else None


def suited(
    services: Services, life: Life, decision: Decision, selection: Selection, tokens: int
) -> tuple[list[Candidate], str | None]:
    """The candidates with those first that keep all rules, of other tiers where none of these does; and why the first
    is not of the decided tier, if it is not."""
    candidates, why = selection.candidates, selection.fallback
    rules = _rules(services, life, candidates, tokens)
    if not rules:
        return candidates, why

    def broken(candidate: Candidate) -> list[str]:
        return [name for name, keeps in rules.items() if not keeps(candidate)]

    if all(map(broken, candidates)) and (wider := elsewhere(services.settings, decision)) is not None:
        found = _selected(services.settings, life, wider, tokens).candidates
        candidates = [*candidates, *(one for one in found if one not in candidates and not broken(one))]
    ordered = sorted(candidates, key=lambda candidate: len(broken(candidate)))
    if ordered[0].tier != candidates[0].tier:
        why = broken(candidates[0])[0] if ordered[0].tier != decision.requested_tier else None
    return ordered, why


def _rules(services: Services, life: Life, candidates: list[Candidate], tokens: int) -> dict[str, Rule]:
    """Those that not every model may keep: the length where a candidate is likely to be too short for it, the language
    where models say theirs, the deadline where there is one."""
    models = services.settings.models
    language = "" if life.facts is None else life.facts.language
    rules: dict[str, Rule] = {}
    if any(tokens >= candidate.context_length for candidate in candidates):
        rules["context_length"] = lambda one: tokens < one.context_length
    if language and services.settings.tells_languages:
        rules["language"] = lambda one: models[one.model].knows(language)
    if life.deadline is not None:
        left_ms = (life.deadline - time.monotonic()) * 1000
        rules["deadline"] = lambda one: _expected_ms(services, life, one.model) <= left_ms
    return rules


def _expected_ms(services: Services, life: Life, model: str) -> float:
    """What an answer of this model is expected to take, asked once and put on record; 0 where nothing is known."""
    asked, principal = life.asked, life.principal
    assert asked is not None
    assert principal is not None
    if model not in life.expected_ms:
        output = services.estimator.expect(principal.key_id, model, asked.max_tokens)
        seconds = services.paces.seconds(model, output)
        life.expected_ms[model] = None if seconds is None else round(seconds * 1000)
    return life.expected_ms[model] or 0


def _selected(settings: Settings, life: Life, decision: Decision, tokens: int) -> Selection:
    asked, principal = life.asked, life.principal
    assert asked is not None
    assert principal is not None
    return select(settings, decision, asked.needs, tokens, asked.output_limit, principal, asked.input_field)
