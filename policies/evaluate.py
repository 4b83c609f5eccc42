"""What a policy means for one request: which tier or model, by which rule, and with which settings.

Order: a tier pinned by the client, while there is money; a model named by the client; an exhausted budget that
downgrades; the first rule that matches; the policy's default. A rule that fails counts as not matched and is recorded:
no condition can kill a request. A tier without a model falls back visibly. Read next: `explain.py`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec
from msgspec.structs import replace

from policies import cel
from policies.expression import ConditionError
from policies.facts import Facts
from policies.load import Policy, Subject
from policies.rules import Rule
from policies.schema.cache import CachePolicy
from policies.schema.escalation import Escalate, in_force
from policies.schema.limits import Budget, Limits
from policies.schema.routes import OnAbort
from tiers import TIERS
from tiers.choose import TierChoice, choose
from tiers.task import TaskProfile

__all__ = ["Chooser", "Decision", "Facts", "Subject", "decide"]


class Chooser(Protocol):
    """What `tier: auto` calls; `tiers.choose.choose` is the one that ships."""

    def __call__(
        self, profile: TaskProfile, tiers_available: Iterable[str], quality_target: float, default_tier: str
    ) -> TierChoice: ...


class Decision(msgspec.Struct, frozen=True):
    """Where a request goes and why.

    Attributes:
        policy, policy_version: which policy, at which content.
        tier: tier to serve from; None where `model` is set, or where no tier has a model at all.
        model: model to serve from, where the client or a rule named one.
        requested_tier: what was decided before falling back; differs from `tier` only if `fallback_reason` is set.
        rule, rule_index: the rule that decided; index None for a pin, a named model, a downgrade and the default.
        why: one sentence for people.
        fallback_tiers: tiers to try next, in this order, where no backend of `tier` or `model` answers; none where the
            client named the model.
        fallback_reason: why `tier` is not `requested_tier`.
        auto: the choice behind `tier: auto`; `quality_target` is what it looked for.
        rule_errors: rules that failed on this request, with the reason.
        on_abort: what becomes of a stream whose client leaves: the rule's setting, else the policy's.
        by_session: the conversation was held at another tier than was decided: at `requested_tier`.
        escalate: how the answer is checked before anybody sees it, and who is asked next; None: it is not checked.
        cache, limits, budget: the policy's settings.
    """

    policy: str
    policy_version: str
    tier: str | None
    model: str | None
    requested_tier: str | None
    rule: str
    rule_index: int | None
    why: str
    fallback_tiers: tuple[str, ...]
    fallback_reason: str | None
    auto: TierChoice | None
    rule_errors: tuple[str, ...]
    on_abort: OnAbort
    cache: CachePolicy
    limits: Limits
    budget: Budget | None
    escalate: Escalate | None = None
    quality_target: float | None = None
    by_session: bool = False

    @property
    def reason(self) -> str:
        """Why, in one word: `session`, or what `tier: auto` found, or `rule`, `default`, `pinned`, `named_model`,
        `budget_exhausted`.

        `auto_target`: the tier reaches the target; `auto_best`: none does, and it is near the best; `auto_unknown`: the
        request is unlike anything known.
        """
        if self.by_session:
            return "session"
        if self.auto is not None and self.quality_target is not None:
            if not self.auto.lower:
                return "auto_unknown"
            return "auto_target" if self.auto.lower[self.auto.tier] >= self.quality_target else "auto_best"
        return "rule" if self.rule_index is not None else self.rule.replace(" ", "_")


def decide(policy: Policy, facts: Facts, choose_auto: Chooser = choose) -> Decision:
    """Decide one request.

    Raises:
        ValueError: the policy looks at the classifier's profile (`needs_profile`) and `facts.profile` is None, or
            `facts.pinned_tier` is not one of `TIERS`.
    """
    if facts.pinned_tier is not None and facts.pinned_tier not in TIERS:
        raise ValueError(f"there is no tier '{facts.pinned_tier}'; tiers are {', '.join(TIERS)}")
    document = policy.document
    base = Decision(
        policy=policy.name,
        policy_version=policy.version,
        tier=None,
        model=None,
        requested_tier=None,
        rule="default",
        rule_index=None,
        why="",
        fallback_tiers=(),
        fallback_reason=None,
        auto=None,
        rule_errors=(),
        on_abort=document.on_abort,
        cache=document.cache,
        limits=document.limits,
        budget=document.budget,
    )
    spent = document.budget and document.budget.when_exhausted == "downgrade" and facts.budget_used >= 1
    if facts.pinned_tier is not None and not spent:
        pinned = replace(base, rule="pinned", why=f"the client pinned tier '{facts.pinned_tier}'")
        return with_tier(policy, pinned, facts.pinned_tier)
    if facts.model not in ("", "auto", *document.applies_to.models):
        return replace(base, model=facts.model, rule="named model", why=f"the client asked for model '{facts.model}'")
    if spent:
        smallest = policy.served[0] if policy.served else TIERS[0]
        why = f"the month's budget is spent ({facts.budget_used:.0%}): the smallest tier"
        return with_tier(policy, replace(base, rule="budget exhausted", why=why), smallest)
    rule, errors = _first_match(policy, facts)
    if errors:
        base = replace(base, rule_errors=errors)
    if rule is None:
        why = "no rule matches" if policy.rules else "the policy has no rules"
        checked = _checked(in_force(None, document.escalate), facts)
        return with_tier(policy, replace(base, why=f"{why}: the default tier", escalate=checked), document.default)
    base = replace(
        base,
        rule=rule.name,
        rule_index=rule.index,
        why=_why(rule),
        on_abort=rule.route.on_abort or document.on_abort,
        escalate=_checked(rule.escalate, facts),
    )
    if rule.route.cascade is not None:
        return _cascade(policy, base, rule.route.cascade)
    if rule.route.model is not None:
        rest = tuple(tier for tier in document.fallback if tier in policy.served)
        return replace(base, model=rule.route.model, fallback_tiers=rest)
    if rule.route.tier == "auto":
        return _auto(policy, facts, base, rule, choose_auto)
    assert rule.route.tier is not None  # the schema wants one of tier, model and cascade
    return with_tier(policy, base, rule.route.tier)


def _first_match(policy: Policy, facts: Facts) -> tuple[Rule | None, tuple[str, ...]]:
    errors: list[str] = []
    context: cel.Context | None = None
    for rule in policy.rules:
        if rule.condition is None:
            return rule, tuple(errors)
        if context is None:
            context = cel.Context(variables=facts.variables(policy.variables))
        try:
            if rule.condition.holds(context):
                return rule, tuple(errors)
        except ConditionError as error:
            errors.append(f"'{rule.name}' (line {rule.line}) could not be evaluated: {error}")
    return None, tuple(errors)


def _why(rule: Rule) -> str:
    if rule.route.when is None:
        return f"'{rule.name}' (line {rule.line}) has no condition"
    return f"'{rule.name}' (line {rule.line}) matches: {' '.join(rule.route.when.split())}"


def _checked(escalate: Escalate | None, facts: Facts) -> Escalate | None:
    """The checks of the answer; a stream has none unless it may be held back."""
    if escalate is None or (facts.stream and escalate.streams == "no"):
        return None
    return escalate


def _cascade(policy: Policy, base: Decision, tiers: tuple[str, ...]) -> Decision:
    """Begin at the smallest. What cannot be checked goes where an answer is given unchecked: to the last."""
    served = [tier for tier in tiers if tier in policy.served] or list(tiers)
    if base.escalate is None:
        why = f"{base.why}; a stream that is not held back is not checked: the last tier of the cascade"
        return with_tier(policy, replace(base, why=why), served[-1])
    why = f"{base.why}; a cascade, which begins at its smallest tier"
    return with_tier(policy, replace(base, why=why), served[0])


def _auto(policy: Policy, facts: Facts, base: Decision, rule: Rule, choose_auto: Chooser) -> Decision:
    if facts.profile is None:
        raise ValueError("`tier: auto` needs the task classifier's profile, and these facts have none")
    target = rule.route.quality_target or policy.document.quality_target
    if not policy.served:
        return with_tier(policy, base, policy.document.default)
    # The choice is made over all tiers: what a request needs does not depend on what happens to be installed, and
    # the fallback then says openly that a larger model would have been better.
    choice = choose_auto(facts.profile, TIERS, target, policy.document.default)
    chosen = replace(base, auto=choice, quality_target=target, why=f"{base.why}; {choice.reason}")
    return with_tier(policy, chosen, choice.tier)


def with_tier(policy: Policy, decision: Decision, wanted: str) -> Decision:
    """Put the tier into the decision, or the nearest one that has a model."""
    served = policy.served
    if wanted in served:
        rest = tuple([tier for tier in policy.document.fallback if tier in served and tier != wanted])
        return replace(decision, tier=wanted, requested_tier=wanted, fallback_tiers=rest)
    if not served:
        reason = "no tier has a model: add one to 'models' in tierline.yaml"
        return replace(decision, requested_tier=wanted, fallback_reason=reason)
    listed = [tier for tier in policy.document.fallback if tier in served]
    at = TIERS.index(wanted)
    # Without a list: the next larger tier, else the next smaller one.
    larger = [tier for tier in served if TIERS.index(tier) > at]
    smaller = [tier for tier in reversed(served) if TIERS.index(tier) < at]
    order = [*listed, *(tier for tier in larger + smaller if tier not in listed)]
    return replace(
        decision,
        tier=order[0],
        requested_tier=wanted,
        fallback_tiers=tuple(tier for tier in listed if tier != order[0]),
        fallback_reason=f"tier '{wanted}' has no model, served by '{order[0]}'",
    )
