"""What outcomes are worth: by where they are known from, by age, and from whose policy.

Some sources say whether an answer was good (`feedback`, `audit`): each is a win or a loss, as it stands. Others only
ever see faults (`validation`, `escalation`, `retry`): an answer without one need not be right. Of these the share that
failed is what counts: P(success) = P(no fault) x P(right without one), and of the second factor they say nothing. So
with a share f of faults, losses are added that lower the mean to (1 - f) of what it was, and nothing that would make it
look surer than it is: of n outcomes known so far, n f / (1 - f).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, Literal, NamedTuple

Source = Literal["feedback", "audit", "validation", "escalation", "retry"]
# Judgements of a model err: two agree about as often as two people do. To ask again may be curiosity.
WEIGHTS: Final[Mapping[Source, float]] = {
    "feedback": 1.0,
    "audit": 0.5,
    "validation": 1.0,
    "escalation": 1.0,
    "retry": 0.2,
}
SOURCES: Final = tuple(WEIGHTS)
FAULTS_ONLY: Final = frozenset({"validation", "escalation", "retry"})
# Passes given in advance, so that the first request to fail is no share of one.
_GIVEN_PASSES: Final = 10.0
_MOST_ODDS: Final = 20.0  # of a fault: beyond, the tier is no good, by how much is no matter

# Up to this many days an outcome counts so much; older ones are forgotten. Models and traffic change.
AGES: Final = ((7, 1.0), (30, 0.5), (90, 0.25))
# Outcomes of other policies: worth a quarter, and no single policy adds more than so many to a kind and tier, from all
# sources together. The weakest shipped cell counts as 12, so a policy that means ill outweighs no other's beginning.
OTHERS_WEIGHT: Final = 0.25
MOST_OF_ANOTHER: Final = 4.0
# What one key may add in a day, from each source: nobody alone moves the table for everybody.
MOST_OF_A_KEY: Final = 100

Cell = tuple[str, str]  # kind, tier


class Counted(NamedTuple):
    """Outcomes of one source, policy, kind and tier, weighed by age. Fractions: a request is a mixture of kinds."""

    source: Source
    policy: str
    kind: str
    tier: str
    wins: float
    losses: float


def of_policy(counted: Iterable[Counted], policy: str) -> dict[tuple[Source, str, str], tuple[float, float]]:
    """Wins and losses by source, kind and tier as this policy sees them: its own, and a part of the others'."""
    given = list(counted)
    of_another: dict[tuple[str, str, str], float] = {}
    for item in given:
        if item.policy != policy:
            of = (item.policy, item.kind, item.tier)
            of_another[of] = of_another.get(of, 0.0) + _bounded(item)
    seen: dict[tuple[Source, str, str], tuple[float, float]] = {}
    for item in given:
        share, total = 1.0, item.wins + item.losses
        if item.policy != policy:
            all_sources = of_another[item.policy, item.kind, item.tier]
            share = _bounded(item) / total * min(1.0, MOST_OF_ANOTHER / all_sources) if total else 0.0
        at = (item.source, item.kind, item.tier)
        wins, losses = seen.get(at, (0.0, 0.0))
        seen[at] = (wins + share * item.wins, losses + share * item.losses)
    return seen


def _bounded(item: Counted) -> float:
    """What another policy's outcomes of one source come to. Bounded before the sum: many passes hide no ratings."""
    return min(OTHERS_WEIGHT * (item.wins + item.losses), MOST_OF_ANOTHER)


def evidence(
    seen: Mapping[tuple[Source, str, str], tuple[float, float]], strength: Mapping[Cell, float]
) -> dict[Cell, tuple[float, float]]:
    """Wins and losses to add to each kind and tier.

    Args:
        seen: from `of_policy`.
        strength: how many outcomes the shipped table's cell counts as.
    """
    added: dict[Cell, tuple[float, float]] = {}
    faults: dict[Cell, float] = {}
    for (source, kind, tier), (wins, losses) in seen.items():
        cell, weight = (kind, tier), WEIGHTS[source]
        if source in FAULTS_ONLY:
            share = weight * losses / (wins + losses + _GIVEN_PASSES)
            odds = min(_MOST_ODDS, share / (1 - share)) if share < 1 else _MOST_ODDS
            faults[cell] = faults.get(cell, 0.0) + odds
            added.setdefault(cell, (0.0, 0.0))
        else:
            before = added.get(cell, (0.0, 0.0))
            added[cell] = (before[0] + weight * wins, before[1] + weight * losses)
    for cell, odds in faults.items():
        wins, losses = added[cell]
        added[cell] = (wins, losses + odds * (strength[cell] + wins + losses))
    return {cell: sums for cell, sums in added.items() if sums != (0.0, 0.0)}
