"""The record of a decision: all that it takes to make it again, and what its price would have been elsewhere.

Made for every request, so it refers to what is there already: models are described once per price, the classifier's
numbers are passed on as they are. What things cost is computed when somebody looks (`gateway/ledger/alternatives.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.ledger.prices import ModelPrice, PriceBook
from gateway.ledger.rows import Decision, now_ms
from gateway.life import Life
from gateway.outcomes.service import SHIPPED
from gateway.settings import Settings
from policies.evaluate import Decision as PolicyDecision
from policies.evaluate import decide
from policies.load import Policy
from policies.recorded import NEGLIGIBLE, facts_of, recorded
from tiers import TIERS
from tiers.choose import TierChoice, choose
from tiers.success import Estimate, SuccessTable
from tiers.task import TaskProfile

if TYPE_CHECKING:
    from gateway.services import Services

Described = dict[str, Any]


class Descriptions:
    """Models as records name them: with backend, tier and price. One object for each model and price, used again."""

    def __init__(self, settings: Settings, prices: PriceBook) -> None:
        self._settings = settings
        self._prices = prices
        self._known: dict[tuple[str, str, int], Described] = {}
        self._able: dict[frozenset[str], list[tuple[str, str]]] = {}

    def of(self, model: str, input_tokens: int, *, batch: bool = False) -> Described:
        """One model, with the rates for an input of this length: nano-dollars per million tokens of fresh input, cached
        input, input written to a cache, output and reasoning, and a fee per request where there is one."""
        price = self._prices.price_for(model, batch=batch)
        rates = price.rates(input_tokens)
        known = self._known.get((model, price.version, rates.above_input_tokens))
        if known is None:
            known = self._describe(model, price, input_tokens)
            self._known[model, price.version, rates.above_input_tokens] = known
        return known

    def beside(
        self, needs: Collection[str], input_tokens: int, tiers: Collection[str], *, batch: bool = False
    ) -> list[Described]:
        """Of every tier but these the first model that could do what the request needs.

        Args:
            needs: capabilities that it needs.
            tiers: those of which the record has a model already.
        """
        able = self._able.get(key := frozenset(needs))  # capabilities are few, so these are
        if able is None:
            able = self._able[key] = self._first_able(key)
        return [self.of(model, input_tokens, batch=batch) for tier, model in able if tier not in tiers]

    def _first_able(self, needs: frozenset[str]) -> list[tuple[str, str]]:
        settings = self._settings
        first: dict[str, str] = {}
        for tier in TIERS:
            for model in settings.tier_models(tier):
                if needs <= settings.abilities(model):
                    first.setdefault(tier, model)
        return list(first.items())

    def _describe(self, model: str, price: ModelPrice, input_tokens: int) -> Described:
        settings, rates = self._settings.models[model], price.rates(input_tokens)
        described: Described = {
            "model": model,
            "tier": settings.shown_tier,
            "backend": settings.backend,
            "price": price.version,
            "rates": [rates.input, rates.cached_input, rates.cache_write, rates.output, rates.reasoning],
        }
        if price.request_nanousd:
            described["request_nanousd"] = price.request_nanousd
        return described


def record_of(services: Services, life: Life) -> Decision | None:
    """What is to be put on record of a routed request; None for one that was not."""
    decision, facts, principal = life.decision, life.facts, life.principal
    if decision is None or facts is None or life.policy is None or principal is None:
        return None
    features = recorded(facts)
    features["input_estimate"] = life.input_estimate
    if life.embedding is not None:
        features["embedding"] = life.embedding
    first, batch = life.candidates[0], life.line is not None
    asked = life.asked
    most = None if asked is None else asked.max_tokens
    features["output_estimate"] = services.estimator.expect(principal.key_id, first.model, most) * life.choices
    if decision.auto is not None:
        features["quality_target"] = decision.quality_target
        features["p_success"] = decision.auto.p_success
        features["p_success_lower"] = decision.auto.lower
        features["bounds"] = [[e.lower for e in estimates.values()] for _, estimates in decision.auto.by_kind]
        table, version = services.outcomes.table_for(life.policy)
        features["table"] = version
        if version != SHIPPED and facts.profile is not None:
            features["outcomes"] = _outcomes(table, facts.profile)
    if decision.rule_errors:
        features["rule_errors"] = list(decision.rule_errors)
    if life.policy.raised:
        features["raised"] = life.policy.raised
    if life.deadline is not None:
        features["deadline_ms"] = round((life.deadline - life.started) * 1000)
        features["expected_ms"] = life.expected_ms
    if life.fallback:
        features["fallback"] = life.fallback
    if life.session is not None:
        features["session"] = life.session.recorded()
    describe, tokens = services.descriptions, life.input_estimate
    tiers = {candidate.tier for candidate in life.candidates}
    return Decision(
        request_id=life.request_id,
        ts_ms=now_ms(),
        policy=decision.policy,
        policy_version=decision.policy_version,
        rule=decision.rule,
        why=decision.why,
        reason=decision.reason,
        tier=decision.requested_tier or "",
        model=first.model,
        features=features,
        candidates=[describe.of(candidate.model, tokens, batch=batch) for candidate in life.candidates],
        beside=[] if first.tier not in TIERS else describe.beside(_needs(life), tokens, tiers, batch=batch),
    )


def _needs(life: Life) -> Collection[str]:
    return life.asked.needs if life.asked is not None else ()


def _outcomes(table: SuccessTable, profile: TaskProfile) -> dict[str, float]:
    """How many own outcomes are behind the estimate of each tier, the kinds weighed as the request weighs them."""
    kinds = [(table.cells[kind], weight) for kind, weight in profile.kinds.items() if weight >= NEGLIGIBLE]
    return {tier: round(sum(weight * row[tier].learned for row, weight in kinds), 2) for tier in TIERS}


@dataclass(frozen=True, slots=True)
class _AsRecorded(SuccessTable):
    """A table that says of every request what is on record of one."""

    kinds: Sequence[tuple[float, dict[str, Estimate]]] = ()

    def by_kind(self, profile: TaskProfile) -> list[tuple[float, dict[str, Estimate]]]:
        return list(self.kinds)


def decide_again(policy: Policy, features: Mapping[str, Any]) -> PolicyDecision:
    """Decide from the features of a record, with the posterior that they hold.

    Rules that look at what somebody wrote see empty texts: `policy.variables` says whether there are any.

    Raises:
        KeyError, TypeError: the record is of an earlier version, which did not hold enough.
    """
    table = _AsRecorded({}, {}, {}, kinds=_by_kind(features))

    def as_recorded(
        profile: TaskProfile, tiers_available: Iterable[str], quality_target: float, default_tier: str
    ) -> TierChoice:
        return choose(profile, tiers_available, quality_target, default_tier, table)

    return decide(policy, facts_of(features), as_recorded)


def _by_kind(features: Mapping[str, Any]) -> list[tuple[float, dict[str, Estimate]]]:
    """The posterior of each kind. Of means only the mixture is on record: no choice goes by them."""
    means = features.get("p_success", {})
    shares = features.get("kinds", {}).values()
    total = sum(shares)
    return [
        (share / total, {tier: Estimate(means[tier], bound) for tier, bound in zip(TIERS, bounds, strict=True)})
        for share, bounds in zip(shares, features.get("bounds", ()), strict=False)
    ]
