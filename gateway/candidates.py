"""From a decided tier to the models that can serve it: capabilities, context length, and what the key may use."""

from __future__ import annotations

from dataclasses import dataclass

from backends.dispatch import Candidate
from gateway.access.principal import Principal
from gateway.settings import Settings
from policies.evaluate import Decision


class NoCandidate(ValueError):
    """No model can serve this request; the message says what is missing."""

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Selection:
    """Candidates in the order in which to try them; `fallback` says why the first is not of the decided tier."""

    candidates: list[Candidate]
    fallback: str | None


def select(
    settings: Settings,
    decision: Decision,
    needs: frozenset[str],
    prompt_tokens: int,
    max_tokens: int | None,
    principal: Principal,
) -> Selection:
    """Models of the decided tier first, then those of its fallback tiers.

    Raises:
        NoCandidate: `no_model`, `model_not_allowed`, `unsupported_parameter`, `max_tokens_too_large` or
            `context_length_exceeded`.
    """
    names = [] if decision.model is None else [decision.model]
    tiers = [tier for tier in (decision.tier, *decision.fallback_tiers) if tier]
    names += [name for tier in tiers for name in settings.tier_models(tier) if name != decision.model]
    if not names:
        raise NoCandidate(
            f"No model is configured for the tier '{decision.requested_tier}' or its fallbacks.", "no_model"
        )
    allowed_models = principal.allowed_models
    if allowed_models is not None and "auto" not in allowed_models:
        names = [name for name in names if name in allowed_models]
        if not names:
            allowed = ", ".join(sorted(allowed_models))
            raise NoCandidate(
                f"This key may use {allowed} only, and none of these serves the tier '{decision.requested_tier}'.",
                "model_not_allowed",
            )
    able = [name for name in names if needs <= settings.models[name].capabilities]
    if not able:
        missing = ", ".join(sorted(needs - settings.models[names[0]].capabilities))
        raise NoCandidate(
            f"'{names[0]}' does not support: {missing}. Leave it out, or use a model that does.",
            "unsupported_parameter",
        )
    if max_tokens is not None:
        able, refused = [name for name in able if max_tokens <= (_most(settings, name) or max_tokens)], able
        if not able:
            most = max(_most(settings, name) or 0 for name in refused)
            raise NoCandidate(
                f"At most {most} output tokens can be asked for here, not {max_tokens}.", "max_tokens_too_large"
            )
    # The estimate is rough: only what is far too long is refused here, the backend knows the exact length.
    fitting = [name for name in able if prompt_tokens < 2 * settings.models[name].context_length]
    if not fitting:
        longest = max(settings.models[name].context_length for name in able)
        raise NoCandidate(
            f"The prompt has about {prompt_tokens} tokens; the longest context here is {longest}. Shorten it.",
            "context_length_exceeded",
        )
    fitting.sort(key=lambda name: prompt_tokens >= settings.models[name].context_length)
    candidates = [_candidate(settings, name) for name in fitting]
    return Selection(candidates, _fallback(settings, decision, able, candidates[0]))


def _most(settings: Settings, name: str) -> int | None:
    return settings.models[name].max_output_tokens


def _candidate(settings: Settings, name: str) -> Candidate:
    model = settings.models[name]
    return Candidate(model=name, tier=model.tier, backend=model.backend, upstream_model=model.upstream_model or name)


def _fallback(settings: Settings, decision: Decision, able: list[str], first: Candidate) -> str | None:
    """Why the first candidate is not of the tier that was decided on; None if it is."""
    wanted = decision.requested_tier
    if wanted is None or first.tier == wanted:
        return None
    in_tier = settings.tier_models(wanted)
    if not in_tier:
        return "tier_not_served"
    if not any(name in able for name in in_tier):
        return "capability"
    return "context_length"
