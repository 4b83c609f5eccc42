"""Why a request goes where it goes: the decision, every rule on the way to it, and what the rules saw.

The same text for `tierline policy explain`, the console and the log; `as_json` is the same for programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from policies import cel
from policies.evaluate import Chooser, Decision, decide
from policies.expression import ConditionError
from policies.facts import PROFILE_VARIABLES, VARIABLES, Facts
from policies.load import Policy, PolicySet, Subject
from policies.rules import Rule
from policies.schema.escalation import Escalate
from tiers.choose import choose
from tiers.task import BY_VECTOR

_LONG = 60  # characters of a text variable that are worth showing
_JUDGED = {
    "words": "by its words; where a cache process answers in time, a gateway goes by the text's vector as well",
    "vector": "by its words and its vector; without a cache process the words alone decide, and may do otherwise",
}


@dataclass(frozen=True, slots=True)
class RuleOutcome:
    """One rule and what it said: `matched`, `not matched`, `failed: ...`, or `not reached` after the deciding one."""

    rule: Rule
    outcome: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """A decision with its grounds."""

    subject: Subject
    policy: Policy
    facts: Facts
    decision: Decision
    rules: tuple[RuleOutcome, ...]
    tried: str = ""
    learnt: bool = False

    @property
    def judged(self) -> str | None:
        """What the classifier looked at, if the policy asks it: `words` or `vector`."""
        profile = self.facts.profile
        if profile is None or not self.policy.needs_profile:
            return None
        return "vector" if profile.features.get(BY_VECTOR) else "words"

    def as_json(self) -> dict[str, Any]:
        """Plain data: policy, decision, rules, facts, settings."""
        decision = self.decision
        budget = decision.budget
        return {
            "policy": {
                "name": self.policy.name,
                "version": self.policy.version,
                "file": self.policy.file,
                "raised": self.policy.raised,
            },
            "subject": {name: getattr(self.subject, name) for name in Subject.__struct_fields__},
            "decision": {
                "tier": decision.tier,
                "model": decision.model,
                "requested_tier": decision.requested_tier,
                "rule": decision.rule,
                "rule_index": decision.rule_index,
                "why": decision.why,
                "fallback_tiers": list(decision.fallback_tiers),
                "fallback_reason": decision.fallback_reason,
                "p_success": decision.auto.p_success if decision.auto else None,
                "p_success_lower": decision.auto.lower if decision.auto else None,
                "rule_errors": list(decision.rule_errors),
            },
            "rules": [
                {
                    "name": item.rule.name,
                    "line": item.rule.line,
                    "when": item.rule.route.when,
                    "target": target(item.rule),
                    "outcome": item.outcome,
                }
                for item in self.rules
            ],
            "facts": shown(self.facts),
            "judged": self.judged,
            "settings": {
                "on_abort": decision.on_abort.model_dump(mode="json"),
                "escalate": decision.escalate.model_dump(mode="json") if decision.escalate else None,
                "cache": decision.cache.model_dump(mode="json"),
                "limits": decision.limits.model_dump(mode="json"),
                "budget": budget.model_dump(mode="json") if budget else None,
            },
        }

    def as_text(self) -> str:
        """A few lines for people."""
        decision = self.decision
        lines = [f"policy   {self.policy.name} ({self.policy.version}), {self.policy.file}"]
        if self.tried:
            lines.append(f"tried    {self.tried}")
        if self.policy.raised:
            lines.append(f"raised   {self.policy.raised}")
        goes = f"model {decision.model}" if decision.model else f"tier {decision.tier or 'none'}"
        lines.append(f"goes to  {goes}")
        lines.append(f"because  {decision.why}")
        if decision.fallback_reason:
            lines.append(f"note     {decision.fallback_reason}")
        if decision.fallback_tiers:
            lines.append(f"then     {', '.join(decision.fallback_tiers)}, where no backend answers")
        if decision.escalate:
            lines.append(f"checked  {', '.join(decision.escalate.when)}: else {_next(decision.escalate)}")
        if decision.auto and decision.auto.p_success:
            lines.append(f"success  {_odds(decision.auto.p_success)}")
            lines.append(f"at least {_odds(decision.auto.lower)}")
            shipped = (
                "as shipped; a gateway that has learnt may decide otherwise: --learnt, or tierline explain REQUEST_ID"
            )
            lines.append(f"table    {'as learnt until now' if self.learnt else shipped}")
        if self.judged:
            lines.append(f"judged   {_JUDGED[self.judged]}")
        lines.append("rules")
        lines += [f"  line {i.rule.line:<4} {i.rule.name:<24} {target(i.rule):<14} {i.outcome}" for i in self.rules]
        if not self.rules:
            lines.append(f"  none; the default is tier {self.policy.document.default}")
        lines.append("facts")
        lines += [f"  {name:<16} {value}" for name, value in shown(self.facts).items()]
        return "\n".join(lines)


def explain(
    policies: PolicySet, subject: Subject, facts: Facts, chosen_by: Callable[[Policy], Chooser] | None = None
) -> Explanation:
    """Decide a request and say why. Raises as `PolicySet.resolve` and `evaluate.decide`.

    Args:
        chosen_by: what `tier: auto` of a policy goes by; default: the shipped table.
    """
    policy = policies.resolve(subject)
    decision = decide(policy, facts, choose if chosen_by is None else chosen_by(policy))
    outcomes = tuple(_outcomes(policy, facts, decision))
    return Explanation(subject, policy, facts, decision, outcomes, _tried(policies, policy), chosen_by is not None)


def _tried(policies: PolicySet, policy: Policy) -> str:
    """Which policy is tried here, by the files; how far it has come is not in them."""
    name = policy.name if policy.document.rollout is None else policy.document.rollout.instead_of
    trial = policies.canaries.get(name) or policies.shadows.get(name)
    if trial is None:
        return ""
    new = trial.policy.name
    return f"'{new}' in the place of '{name}'; how that stands: tierline policy rollout {new}"


def target(rule: Rule) -> str:
    """Where a rule sends requests, in words."""
    if rule.route.cascade is not None:
        return " > ".join(rule.route.cascade)
    return f"model {rule.route.model}" if rule.route.model else f"tier {rule.route.tier}"


def _odds(by_tier: Mapping[str, float]) -> str:
    return ", ".join(f"{tier} {p:.2f}" for tier, p in by_tier.items())


def _next(escalate: Escalate) -> str:
    """Whom a failed check asks, in words."""
    if escalate.to == "next":
        return "the next larger tier" if escalate.at_most == 1 else f"up to {escalate.at_most} larger tiers"
    return escalate.to if isinstance(escalate.to, str) else " > ".join(escalate.to)


def shown(facts: Facts) -> dict[str, Any]:
    """The variables and their values; long texts are cut, those of the classifier appear where it was asked."""
    values = facts.variables(name for name in VARIABLES if facts.profile is not None or name not in PROFILE_VARIABLES)
    for name, value in values.items():
        if isinstance(value, float):
            values[name] = round(value, 3)
        elif isinstance(value, str) and len(value) > _LONG:
            values[name] = f"{value[:_LONG]}… ({len(value)} characters)"
    return values


def _outcomes(policy: Policy, facts: Facts, decision: Decision) -> list[RuleOutcome]:
    """What each rule said. Rules after the deciding one, or all where no rule decided, are looked at no more."""
    asked = decision.rule == "default" or decision.rule_index is not None
    context = cel.Context(variables=facts.variables(policy.variables)) if asked else None
    found: list[RuleOutcome] = []
    for rule in policy.rules:
        if context is None or (decision.rule_index is not None and rule.index > decision.rule_index):
            found.append(RuleOutcome(rule, "not reached"))
        elif rule.condition is None:
            found.append(RuleOutcome(rule, "matched"))
        else:
            try:
                found.append(RuleOutcome(rule, "matched" if rule.condition.holds(context) else "not matched"))
            except ConditionError as error:
                found.append(RuleOutcome(rule, f"failed: {error}"))
    return found
