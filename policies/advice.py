"""What is worth a look in a policy that is right: the warnings of `tierline policy check`. They block nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

from policies.leftovers import Leftover
from policies.pattern_width import longest
from policies.policy import Policy
from policies.reach import Unreachable, unreachable
from policies.schema.document import PolicyDocument
from policies.schema.escalation import Escalate
from policies.schema.limits import Limits
from policies.yamlfile import Document, Problem
from policies.yamlread import Location

# What protects those whose requests a policy takes: in words, and whether a policy has it.
_PROTECTION: Final[Mapping[str, Callable[[PolicyDocument], bool]]] = {
    "guardrails": lambda document: document.guardrails is not None,
    "a budget": lambda document: document.budget is not None,
    "limits": lambda document: document.limits != Limits(),
}


def warnings_of(document: Document, policy: Policy, leftovers: Sequence[Leftover]) -> list[Problem]:
    """Keys without effect, rules that never decide, tiers that nobody serves."""
    found: list[Problem] = []

    def warn(path: Location, message: str) -> None:
        found.append(replace(document.problem(path, message), severity="warning"))

    for place, message in leftovers:
        warn(place, message)
    for place, message in (*_over(policy, datetime.now(UTC)), *_too_long(policy)):
        warn(place, message)
    # A policy that is rolled out has the scope of another one, which is not known here.
    scope = None if policy.document.rollout else policy.document.applies_to
    for item in unreachable(policy.rules, scope):
        path: Location = ("routes", item.rule.index)
        warn(path if item.by else (*path, "when"), _why_unreachable(item))
    if policy.document.audit is not None and not policy.needs_profile:
        warn(("audit",), "no rule looks at what is asked, nor is one 'tier: auto': nothing is learnt, nor compared.")
    cache = policy.cache
    if cache.mode == "semantic" and cache.max_false_hit_rate is not None and cache.judge == "embedding":
        key = "judge" if "judge" in cache.model_fields_set else "max_false_hit_rate"
        warn(
            ("cache", key),
            "judge 'embedding' reads labels and short facts; of answers in prose it calls most that say the same"
            " different, so few hits are given. For prose: 'judge: model' with a 'judge_tier'; for labels: 'exact'.",
        )
    judges = cache.judge_tier
    served = policy.tiers_served
    if served is None:
        return found
    if judges is not None and judges not in served:
        warn(("cache", "judge_tier"), f"tier '{judges}' has no model: no answer is judged, and no promise certified.")
    if audit := policy.document.audit:
        for key, tier in (("against", audit.against), ("judge_tier", audit.judge_tier)):
            if tier not in served:
                warn(("audit", key), f"tier '{tier}' has no model: no answer is compared.")
    told: set[str] = set()
    for rule in policy.rules:
        wanted = rule.route.tier
        if wanted and wanted != "auto" and wanted not in served and wanted not in told:
            told.add(wanted)
            warn(("routes", rule.index, "tier"), f"tier '{wanted}' has no model: requests for it fall back.")
    for path, asked, what in _asked_next(policy):
        if missing := [other for other in asked if other not in served]:
            names = ", ".join(f"'{other}'" for other in missing)
            warn(path, f"{what} passes over {names}: no model there.")
    fallback = policy.document.fallback
    if fallback and not any(tier in served for tier in fallback):
        warn(("fallback",), "none of these tiers has a model: nothing falls back to them.")
    return found


def left_out(loaded: Sequence[tuple[Policy, Document]]) -> list[Problem]:
    """Rollouts without the protection of the policy that they stand in for: who gets them has none of it."""
    found = []
    for policy, document in loaded:
        if policy.document.rollout is None:
            continue
        target = policy.document.rollout.instead_of
        replaced = [other for other, _ in loaded if other.name == target and other.document.rollout is None]
        missing = [
            words
            for words, has in _PROTECTION.items()
            if not has(policy.document) and any(has(other.document) for other in replaced)
        ]
        if missing:
            message = f"'{target}' has {_listed(missing)}, this one has none: requests that it takes go without."
            found.append(replace(document.problem(("rollout", "instead_of"), message), severity="warning"))
    return found


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _asked_next(policy: Policy) -> Iterator[tuple[Location, tuple[str, ...], str]]:
    """Where tiers are named that are asked one after another."""
    general = policy.document.escalate
    places: list[tuple[Location, Escalate]] = [(("escalate", "to"), general)] if general is not None else []
    for rule in policy.rules:
        path: Location = ("routes", rule.index)
        if rule.route.cascade is not None:
            yield (*path, "cascade"), rule.route.cascade, "the cascade"
        elif rule.route.escalate is not None:
            places.append(((*path, "escalate", "to"), rule.route.escalate))
    for place, escalate in places:
        if escalate.to != "next":
            yield place, (escalate.to,) if isinstance(escalate.to, str) else escalate.to, "'escalate'"


def _over(policy: Policy, now: datetime) -> list[Leftover]:
    """What has ended, and so has no effect any more."""
    found: list[Leftover] = []
    ended = policy.document.valid_until
    if ended is not None and ended <= now:
        found.append((("valid_until",), f"it ended on {ended:%Y-%m-%d %H:%M} UTC: nothing of it counts any more."))
    for index, one in enumerate(policy.document.raises):
        if one.until <= now:
            found.append((("raises", index), f"over since {one.until:%Y-%m-%d %H:%M} UTC: it can be deleted."))
    rollout = policy.document.rollout
    if rollout is not None and rollout.steps and rollout.guard is None:
        found.append((("rollout", "steps"), "there is no 'guard': the steps go on whatever becomes of the requests."))
    return found


def _too_long(policy: Policy) -> Iterator[Leftover]:
    """What guardrails look for in answers that the window of a stream cannot hold."""
    guardrails = policy.document.guardrails
    if guardrails is None or guardrails.streams != "window":
        return
    for index, rule in enumerate(guardrails.after):
        sought = [("patterns", number, longest(pattern)) for number, pattern in enumerate(rule.patterns)]
        sought += [("phrases", number, len(phrase)) for number, phrase in enumerate(rule.phrases)]
        for name, number, length in sought:
            if length is not None and length > guardrails.window:
                yield (
                    ("guardrails", "after", index, name, number),
                    f"a match may be longer than the {guardrails.window} characters that a stream holds back, and then"
                    " it passes unseen: bound its repetitions, raise 'window', or give 'streams: hold'.",
                )


def _why_unreachable(item: Unreachable) -> str:
    if not item.by:
        names = " and ".join(f"'{name}'" for name in item.variables)
        return f"the condition is never true: {names} cannot be so." if names else "the condition is never true."
    if len(item.by) > 1:
        lines = ", ".join(str(rule.line) for rule in item.by)
        return f"never reached: the rules in lines {lines} together take every request that it would match."
    earlier = item.by[0]
    named = f"'{earlier.name}' (line {earlier.line})"
    if earlier.condition is None or earlier.condition.constant:
        return f"never reached: {named} always matches."
    if " ".join((item.rule.route.when or "").split()) == " ".join((earlier.route.when or "").split()):
        return f"never reached: {named} has the same condition."
    return f"never reached: {named} takes every request that it would match."
