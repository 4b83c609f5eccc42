"""One checked policy, and who asks: whom it matches, and what of its document everything else looks at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import msgspec

from policies.guards import Guards
from policies.rules import Rule
from policies.schema.cache import CachePolicy
from policies.schema.document import PolicyDocument
from policies.schema.limits import Budget, Limits
from tiers import TIERS

# The fields of `applies_to`, most specific first, with the field of `Subject` that each one matches.
SCOPES: Final = (
    ("keys", "key"),
    ("projects", "project"),
    ("teams", "team"),
    ("organisations", "organisation"),
    ("models", "model"),
)


class Subject(msgspec.Struct, frozen=True):
    """Who asks for which model: what policies are chosen by."""

    organisation: str = ""
    team: str = ""
    project: str = ""
    key: str = ""
    model: str = "auto"


@dataclass(frozen=True, slots=True)
class Policy:
    """A checked policy. `version` is a hash of its text; `tiers_served` are the tiers that have a model, or None
    where that is not known (then all count as served: `served`, smallest first). `budget_nanousd` is the monthly
    budget, if there is one; `raised` names the raises in force, whose values the document then has; `text` is the
    file's, `examples_at` where its examples stand: line and column; `guards` are its guardrails, ready for use."""

    document: PolicyDocument
    file: str
    version: str
    rules: tuple[Rule, ...]
    tiers_served: tuple[str, ...] | None = None
    text: str = field(default="", repr=False)
    examples_at: tuple[tuple[int, int], ...] = ()
    raised: str = ""
    guards: Guards | None = None
    variables: frozenset[str] = field(init=False)
    served: tuple[str, ...] = field(init=False)
    needs_profile: bool = field(init=False)
    budget_nanousd: int | None = field(init=False)

    def __post_init__(self) -> None:
        budget = self.document.budget
        # Exact: the schema allows nine decimals.
        object.__setattr__(self, "budget_nanousd", None if budget is None else int(budget.monthly_usd * 10**9))
        conditions = [rule.condition for rule in self.rules if rule.condition]
        object.__setattr__(self, "variables", frozenset().union(*(c.variables for c in conditions)))
        served = tuple(tier for tier in TIERS if self.tiers_served is None or tier in self.tiers_served)
        object.__setattr__(self, "served", served)
        auto = any(rule.route.tier == "auto" for rule in self.rules)
        object.__setattr__(self, "needs_profile", auto or any(c.needs_profile for c in conditions))

    @property
    def name(self) -> str:
        return self.document.name

    @property
    def cache(self) -> CachePolicy:
        return self.document.cache

    @property
    def limits(self) -> Limits:
        return self.document.limits

    @property
    def budget(self) -> Budget | None:
        return self.document.budget

    def matches(self, subject: Subject) -> bool:
        """Whether `applies_to` admits the subject."""
        scope = self.document.applies_to
        return all(
            not getattr(scope, plural) or getattr(subject, single) in getattr(scope, plural)
            for plural, single in SCOPES
        )

    def specificity(self) -> tuple[bool, ...]:
        """Larger is more specific: names keys, projects, teams, organisations, models."""
        return tuple(bool(getattr(self.document.applies_to, plural)) for plural, _ in SCOPES)
