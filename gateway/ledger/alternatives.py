"""What a request would have cost at other tiers, and why it did not go there: computed from its record when asked for.

Before an answer is there the cost is an estimate, of the tokens that were expected; afterwards it is exact for the
tokens that were used, at the prices that held. How many tokens another model would have written nobody knows: the same
number is taken for all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gateway.ledger.prices import ModelPrice, Rates, cost
from gateway.ledger.usage import Usage
from tiers import TIERS
from tiers.choose import bound_text, target_text

# Outcomes of rows whose usage is that of a whole answer.
_WHOLE = ("success", "cache_hit")


def alternatives(decision: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry per tier that the record knows something of, smallest first.

    Each has `tier`, `model` (the first that would have served there; null: none), `p` and `lower` (P(success) and its
    lower bound; null where `tier: auto` was not asked), `outcomes` (own ones behind them), `estimated_nanousd`,
    `cost_nanousd` (null before there is an answer), `role` (`chosen`, `answered`, `fallback` or null) and `why`.
    """
    features = decision.get("features", {})
    models = _first_of_each_tier(decision)
    means, lowers = features.get("p_success", {}), features.get("p_success_lower", {})
    expected = _usage(features.get("input_estimate", 0), features.get("output_estimate", 0))
    answer = next((row for row in reversed(rows) if row["outcome"] in _WHOLE), None)
    used = None if answer is None else _usage_of(answer)
    target, chosen = features.get("quality_target"), decision.get("tier")
    stay = _stay(features, chosen)
    listed = {candidate.get("tier") for candidate in decision.get("candidates", [])}
    found = []
    for tier in TIERS:
        model = models.get(tier)
        if model is None and tier not in means:
            continue
        lower = lowers.get(tier)
        found.append(
            {
                "tier": tier,
                "model": model["model"] if model else None,
                "p": means.get(tier),
                "lower": lower,
                "outcomes": features.get("outcomes", {}).get(tier),
                "estimated_nanousd": _cost(model, expected),
                "cost_nanousd": None if used is None else _cost(model, used),
                "role": _role(tier, chosen, answer, listed),
                "why": _after_another(tier, chosen, lower, rows, answer)
                or _why(tier, chosen, lower, target, models, stay),
            }
        )
    return found


def _first_of_each_tier(decision: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """By tier the first model of the record that says its price; records of earlier versions have none."""
    found: dict[str, Mapping[str, Any]] = {}
    for model in (*decision.get("candidates", []), *decision.get("beside", [])):
        if "rates" in model:
            found.setdefault(model["tier"], model)
    return found


def _role(tier: str, chosen: str | None, answer: Mapping[str, Any] | None, listed: set[Any]) -> str | None:
    if answer is not None and answer["tier"] == tier:
        return "answered"
    if tier == chosen:
        return "chosen"
    return "fallback" if tier in listed else None


class _Stay(NamedTuple):
    """A turn of a conversation that was decided for one tier, and that another tier got."""

    wanted: str
    kept: bool  # where the conversation was; else it goes only a part of the way


def _stay(features: Mapping[str, Any], chosen: str | None) -> _Stay | None:
    turn = features.get("session")
    if turn is None or turn["wanted"] == chosen or turn["outcome"] not in ("kept", "downgraded"):
        return None
    return _Stay(turn["wanted"], turn["outcome"] == "kept")


def _after_another(
    tier: str,
    chosen: str | None,
    lower: float | None,
    rows: Sequence[Mapping[str, Any]],
    answer: Mapping[str, Any] | None,
) -> str | None:
    """Why a tier answered that was not the first to be asked."""
    if answer is None or answer["outcome"] != "success" or answer["tier"] != tier or chosen in (tier, None, ""):
        return None
    if any(row["outcome"] == "escalated" for row in rows):
        return "escalated to"
    return "fallen back to" if lower is None else None


def _why(
    tier: str,
    chosen: str | None,
    lower: float | None,
    target: float | None,
    models: Mapping[str, object],
    stay: _Stay | None,
) -> str:
    """Why a tier was chosen, or not."""
    wanted = chosen if stay is None else stay.wanted
    reaches = lower is not None and target is not None and lower >= target
    if tier == chosen:
        served = "" if tier in models else ", but no model of it could serve"
        if stay is not None:
            return f"where the conversation {'is' if stay.kept else 'goes'}{served}"
        return f"the smallest that is good enough{served}" if reaches else f"chosen{served}"
    if tier == wanted:
        said = "the smallest that is good enough" if reaches else "decided on"
        return f"{said}, but the conversation {'stays on' if stay and stay.kept else 'goes to'} '{chosen}'"
    if tier not in models:
        return "no model of it could serve"
    if lower is None or target is None or wanted not in TIERS:
        return "not decided on"
    if lower < target:
        return f"may fail: at least {bound_text(lower, target)} is below the target {target_text(target)}"
    if TIERS.index(tier) > TIERS.index(wanted):
        return "good enough, and larger than it takes"
    return "good enough, but not fit for what the request needs"


def _cost(model: Mapping[str, Any] | None, usage: Usage) -> int | None:
    if model is None:
        return None
    fresh, cached, written, output, reasoning = model["rates"]
    rates = Rates(input=fresh, cached_input=cached, cache_write=written, output=output, reasoning=reasoning)
    price = ModelPrice(
        version=model["price"], source="override", bands=(rates,), request_nanousd=model.get("request_nanousd", 0)
    )
    return cost(price, usage).total_nanousd


def _usage(input_tokens: int, output_tokens: int) -> Usage:
    return Usage(input_tokens=input_tokens, output_tokens=output_tokens, source="estimated")


def _usage_of(row: Mapping[str, Any]) -> Usage:
    names = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
    return Usage(**{name: row[name] for name in names}, source=row["usage_source"])
