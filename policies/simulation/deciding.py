"""Decide a recorded request again, as far as the record tells.

Texts are not on record, and what the classifier sees is only where a policy asked for it. A condition that looks at
either cannot be evaluated; but where the policy that decided the request held the very same condition, the record says
what came of it: the rule that decided was true, those before it were not. What is known neither way leaves the request
undecided, and the simulation counts it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from policies.evaluate import Chooser, Decision, decide
from policies.facts import TEXT_VARIABLES, Facts
from policies.load import Policy
from policies.rules import Rule
from policies.simulation.recorded import Recorded, World
from tiers.choose import choose

_MOST_KEPT: Final = 5000


class Undecided(Exception):
    """The record does not tell; `rule` is the first that would have to be known."""

    def __init__(self, rule: Rule) -> None:
        super().__init__(rule.name)
        self.rule = rule


class Decider:
    """Decides recorded requests by the policies of one set."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._blind: dict[tuple[str, str, bool], list[Rule]] = {}
        self._choosers: dict[str, Chooser] = {}
        self._known: dict[tuple[str, str, str], Mapping[str, bool]] = {}
        self._adapted: dict[tuple[str, str, bool, tuple[bool | None, ...]], tuple[Policy, Mapping[int, Rule]]] = {}

    def decide(self, policy: Policy, request: Recorded, facts: Facts) -> Decision:
        """The decision of a policy.

        Raises:
            Undecided: a rule that would have to be looked at cannot be.
        """
        chooser = self._choosers.get(policy.name)
        if chooser is None:
            chooser = self._choosers[policy.name] = partial(choose, table=self._world.table(policy))
        has_profile = facts.profile is not None
        if TEXT_VARIABLES.isdisjoint(policy.variables) and (has_profile or not policy.needs_profile):
            return decide(policy, facts, chooser)
        adapted, undecidable = self._adapt(policy, request, has_profile)
        decision = decide(adapted, facts, chooser)
        if decision.rule_index is not None and decision.rule_index in undecidable:
            raise Undecided(undecidable[decision.rule_index])
        return decision

    def _adapt(self, policy: Policy, request: Recorded, has_profile: bool) -> tuple[Policy, Mapping[int, Rule]]:
        """The policy with what is known of its conditions in their place; and the rules that decide nothing, because
        they cannot be looked at."""
        known = self._outcomes(request)
        which = (policy.name, policy.version, has_profile)
        blind = self._blind.get(which)
        if blind is None:
            blind = self._blind[which] = [rule for rule in policy.rules if _blind(rule, has_profile)]
        said = tuple(known.get(_source(rule.route.when)) for rule in blind)
        key = (*which, said)
        found = self._adapted.get(key)
        if found is None:
            if len(self._adapted) >= _MOST_KEPT:
                self._adapted.clear()
            outcome = {rule.index: value for rule, value in zip(blind, said, strict=True)}
            found = self._adapted[key] = _adapted(policy, outcome, has_profile)
        return found

    def _outcomes(self, request: Recorded) -> Mapping[str, bool]:
        """What the record says of conditions: by their text, without the blanks."""
        key = (request.policy, request.version, request.rule)
        found = self._known.get(key)
        if found is None:
            rules = self._world.conditions(request.policy, request.version)
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            found = self._known[key] = {} if rules is None else _known(rules, request.rule)
        return found


def _known(rules: Sequence[tuple[str, str | None]], decided: str) -> dict[str, bool]:
    """The rules before the deciding one did not match; where none decided, none did."""
    names = [name for name, _ in rules]
    if decided != "default" and decided not in names:
        return {}  # a pin, a named model, a spent budget: no rule was looked at
    known: dict[str, bool] = {}
    for name, when in rules:
        known[_source(when)] = name == decided
        if name == decided:
            break
    return known


def _adapted(
    policy: Policy, outcome: Mapping[int, bool | None], has_profile: bool
) -> tuple[Policy, Mapping[int, Rule]]:
    rules: list[Rule] = []
    undecidable: dict[int, Rule] = {}
    for rule in policy.rules:
        condition, route = rule.condition, rule.route
        if rule.index in outcome:
            if outcome[rule.index] is False:
                continue
            if outcome[rule.index] is None:
                undecidable[rule.index] = rule
            condition = None
        if route.tier == "auto" and not has_profile:
            undecidable.setdefault(rule.index, rule)
            route = route.model_copy(update={"tier": "small"})  # a place for it; where it goes is not told
        rules.append(replace(rule, condition=condition, route=route))
    return replace(policy, rules=tuple(rules)), undecidable


def _blind(rule: Rule, has_profile: bool) -> bool:
    """Whether the condition looks at what is not on record."""
    condition = rule.condition
    if condition is None:
        return False
    return not TEXT_VARIABLES.isdisjoint(condition.variables) or (condition.needs_profile and not has_profile)


def _source(when: str | None) -> str:
    return " ".join((when or "true").split())
