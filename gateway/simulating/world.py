"""What policies decide about in a simulation: the models, prices and learnt tables of this installation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gateway.ledger.prices import ModelPrice, PriceBook, cost
from gateway.ledger.usage import Usage
from gateway.outcomes.service import learned
from gateway.outcomes.weighing import Counted
from gateway.routing.hard_rules import elsewhere
from gateway.settings import Settings
from policies.evaluate import Decision
from policies.facts import Facts
from policies.load import Policy
from policies.simulation.recorded import Served, Tokens
from tiers.success import SuccessTable, default_table

Conditions = Sequence[tuple[str, str | None]]


class Installation:
    """Implements `policies.simulation.recorded.World`. Prices are those of now, on both sides."""

    def __init__(
        self, settings: Settings, outcomes: list[Counted], conditions: Mapping[tuple[str, str], Conditions]
    ) -> None:
        self._settings = settings
        self._outcomes = outcomes
        self._conditions = conditions
        book = PriceBook(settings)
        self._prices: dict[str, ModelPrice] = {name: book.price_for(name) for name in settings.models}
        self._tables: dict[str, SuccessTable] = {}

    def serve(self, decision: Decision, facts: Facts, known: str | None = None) -> Served | None:
        """The first model that can take the request: that of the decision, else of its tier, else of the others."""
        settings = self._settings
        names = [decision.model] if decision.model is not None else []
        tiers = [tier for tier in (decision.tier, *decision.fallback_tiers) if tier]
        names += [name for tier in tiers for name in settings.tier_models(tier)]
        if (wider := elsewhere(settings, decision)) is not None:
            names += [name for tier in wider.fallback_tiers for name in settings.tier_models(tier)]
        if known in settings.tier_models(decision.tier or ""):
            names.insert(0, known)
        asked = (("tools", facts.has_tools), ("vision", facts.has_images), ("json_schema", facts.wants_json))
        needs = {capability for capability, needed in asked if needed}
        able = [
            (name, model)
            for name in names
            if (model := settings.models.get(name)) is not None
            and needs <= settings.abilities(name)
            and facts.prompt_tokens < model.context_length
        ]
        if facts.language:
            able.sort(key=lambda one: not one[1].knows(facts.language))
        return Served(able[0][0], able[0][1].shown_tier) if able else None

    def cost(self, model: str, tokens: Tokens) -> tuple[int, int]:
        price = self._prices.get(model)
        if price is None:
            return 0, 0
        usage = Usage(
            input_tokens=tokens.input,
            output_tokens=tokens.output,
            cached_input_tokens=tokens.cached_input,
            cache_write_tokens=tokens.cache_write,
            reasoning_tokens=tokens.reasoning,
        )
        found = cost(price, usage)
        output = found.output + found.reasoning
        return found.total_nanousd - output, output

    def table(self, policy: Policy) -> SuccessTable:
        if policy.document.learn == "off":
            return default_table()
        found = self._tables.get(policy.name)
        if found is None:
            found = self._tables[policy.name] = learned(self._outcomes, policy.name)[0]
        return found

    def conditions(self, policy: str, version: str) -> Conditions | None:
        return self._conditions.get((policy, version))
