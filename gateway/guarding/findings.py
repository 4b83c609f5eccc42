"""What the rules of a policy find in texts, and what they make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import msgspec

from gateway.guarding.texts import Parts, Place
from policies.guards import Guard

Side = Literal["before", "after"]


class Findings(msgspec.Struct):
    """`denied`: the rule that lets it not pass, if one does. `kinds`: by rule, how often what was found."""

    denied: Guard | None = None
    changed: bool = False
    kinds: dict[str, Counter[str]] = {}
    actions: dict[str, str] = {}

    def add(self, guard: Guard, kinds: Iterable[str]) -> None:
        self.kinds.setdefault(guard.rule.name, Counter()).update(kinds)
        self.actions[guard.rule.name] = guard.rule.action


def apply(guards: Sequence[Guard], texts: Sequence[Place | Parts], findings: Findings) -> None:
    """Look through the texts rule by rule; replace what is to be replaced. Ends at the first rule that denies."""
    for guard in guards:
        for place in texts:
            found = guard.find(place.text)
            if not found:
                continue
            findings.add(guard, (finding.kind for finding in found))
            if guard.rule.action == "deny":
                findings.denied = guard
                return
            if guard.rule.action == "redact":
                place.put(guard.replace(place.text, found))
                findings.changed = True


def as_notes(findings: Findings, side: Side) -> list[dict[str, Any]]:
    """What goes on record: rule, what was done, and how often which kind was found. Never what was found."""
    return [
        {"when": side, "rule": rule, "action": findings.actions[rule], "found": dict(kinds)}
        for rule, kinds in findings.kinds.items()
    ]
