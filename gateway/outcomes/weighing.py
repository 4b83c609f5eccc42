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
# Outcomes from outside a policy: worth a quarter; to a kind and tier one team adds no more than 4, and all together no
# more than the weakest shipped cell counts as. How near a bound lies to somebody's quality target is not known, so no
# cap on one team is small enough: what nobody else has seen counts for nothing (`_borne_out`).
OTHERS_WEIGHT: Final = 0.25
MOST_OF_A_TEAM: Final = 4.0
MOST_OF_OTHERS: Final = 12.0
# What one key may add in a day, from each source: nobody alone moves the table for everybody.
MOST_OF_A_KEY: Final = 100

Cell = tuple[str, str]  # kind, tier


class Counted(NamedTuple):
    """Outcomes of one source, policy, team, kind and tier, weighed by age. Fractions: a request is a mixture of kinds.

    Attributes:
        team: id of the team whose keys asked; empty for those of a time when it was not kept, which count as one team.
    """

    source: Source
    policy: str
    team: str
    kind: str
    tier: str
    wins: float
    losses: float


Seen = dict[tuple[Source, str, str], tuple[float, float]]  # source, kind, tier -> wins, losses


def of_policy(counted: Iterable[Counted], policy: str) -> Seen:
    """Wins and losses by source, kind and tier as this policy sees them: its own, and what others agree on."""
    own: Seen = {}
    teams: dict[str, Seen] = {}
    for item in counted:
        seen = own if item.policy == policy else teams.setdefault(item.team, {})
        _add(seen, (item.source, item.kind, item.tier), item.wins, item.losses)
    for at, (wins, losses) in _borne_out([_of_a_team(seen) for seen in teams.values()]).items():
        _add(own, at, wins, losses)
    return own


def _of_a_team(seen: Seen) -> Seen:
    """What a team's outcomes are worth to policies that they are not of.

    Each source is bounded before the sum: many passes hide no ratings.
    """
    parts = {at: _share(sum(sums), MOST_OF_A_TEAM, OTHERS_WEIGHT) for at, sums in seen.items()}
    return _at_most({at: (parts[at] * wins, parts[at] * losses) for at, (wins, losses) in seen.items()}, MOST_OF_A_TEAM)


def _borne_out(teams: Iterable[Seen]) -> Seen:
    """The sum over teams without the largest count at each place, of wins and of losses.

    So one team, whatever it does, makes of wins and of losses never more than the other teams have counted together.
    """
    given: dict[tuple[Source, str, str], list[tuple[float, float]]] = {}
    for seen in teams:
        for at, sums in seen.items():
            given.setdefault(at, []).append(sums)
    agreed: Seen = {}
    for at, sums_of_teams in given.items():
        wins, losses = ([sums[side] for sums in sums_of_teams] for side in (0, 1))
        agreed[at] = (sum(sorted(wins)[:-1]), sum(sorted(losses)[:-1]))
    return _at_most(agreed, MOST_OF_OTHERS)


def _at_most(seen: Seen, most: float) -> Seen:
    """No more than so many at each kind and tier, from all sources together."""
    totals: dict[Cell, float] = {}
    for (_, kind, tier), sums in seen.items():
        totals[kind, tier] = totals.get((kind, tier), 0.0) + sum(sums)
    parts = {cell: _share(total, most) for cell, total in totals.items()}
    return {at: (parts[at[1:]] * wins, parts[at[1:]] * losses) for at, (wins, losses) in seen.items()}


def _share(total: float, most: float, weight: float = 1.0) -> float:
    """The part of so many outcomes that counts, at this weight and up to a bound."""
    return min(weight, most / total) if total else 0.0


def _add(seen: Seen, at: tuple[Source, str, str], wins: float, losses: float) -> None:
    before = seen.get(at, (0.0, 0.0))
    seen[at] = (before[0] + wins, before[1] + losses)


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
