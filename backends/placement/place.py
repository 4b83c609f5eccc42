"""What an operator says of a replica, and the order in which replicas come into question for a kind of request.

short prompts     the group `short`, those without a group, the group `long`
long prompts      the group `long`, those without a group; `short` if nothing else can take it
who waits         `on_demand`, then `overflow`; `spot`, which may vanish at any time, if nothing else can take it
who does not      `spot`, then `on_demand`, the cheapest first; `overflow` if nothing else can take it
all               the nearest region, then the next
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from backends.placement.hours import Hours

if TYPE_CHECKING:
    from backends.placement.asked import Placement
    from backends.replica import Replica

Group = Literal["short", "long"]
PoolKind = Literal["on_demand", "spot", "overflow"]


@dataclasses.dataclass(frozen=True, slots=True)
class Place:
    """One replica. `weight`: its share where all else is equal; `price_factor`: how dear it is beside the others, for
    those who do not wait; `max_prompt_tokens`: longer prompts do not go there (None: any length); `fetches`: it takes
    over long prompts that another replica has computed."""

    group: Group | None = None
    max_prompt_tokens: int | None = None
    weight: float = 1.0
    region: str | None = None
    pool: PoolKind = "on_demand"
    hours: Hours | None = None
    price_factor: float = 1.0
    fetches: bool = False


USUAL = Place()


@dataclasses.dataclass(frozen=True, slots=True)
class Preferences:
    """Of a backend. `long_from`: tokens from which a prompt counts as long; `regions`: the nearest first, others last;
    `overflow_at`: share of a replica's most requests from which the next in order is asked, too."""

    long_from: int | None = None
    regions: tuple[str, ...] = ()
    overflow_at: float = 0.8


class Rank(NamedTuple):
    """Replicas that are equal for a kind of request. `last`: they are asked only if no other can take it."""

    replicas: list[Replica]
    last: bool


class Order:
    """For each kind of request, the replicas in ranks: those of a rank are better than those after it."""

    def __init__(self, replicas: Sequence[Replica], preferences: Preferences) -> None:
        self._long_from = preferences.long_from
        limits = [replica.place.max_prompt_tokens for replica in replicas]
        self._most = None if None in limits else max(limit for limit in limits if limit is not None)
        self.limited = any(limit is not None for limit in limits)
        self._ranks = {
            (long, patient): _ranked(replicas, preferences.regions, long, patient)
            for long in (False, True)
            for patient in (False, True)
        }

    def ranks(self, placement: Placement) -> list[Rank]:
        """The best first."""
        long = self._long_from is not None and placement.prompt_tokens >= self._long_from
        return self._ranks[long, placement.patient]

    def takes(self, replica: Replica, placement: Placement) -> bool:
        """Whether the prompt is not too long for the replica. One that is too long for all goes to those that take
        most: its length is an estimate, and the server knows better."""
        most = replica.place.max_prompt_tokens
        if most is None or placement.prompt_tokens <= most:
            return True
        return self._most is not None and placement.prompt_tokens > self._most and most == self._most


def _ranked(replicas: Sequence[Replica], regions: Sequence[str], long: bool, patient: bool) -> list[Rank]:
    wanted, other = ("long", "short") if long else ("short", "long")

    def rank(replica: Replica) -> tuple[float, ...]:
        place = replica.place
        # A long prompt among short ones makes all of them wait; a short one among long ones hardly any.
        last = (long and place.group == other) or place.pool == ("overflow" if patient else "spot")
        group = {wanted: 0, None: 1, other: 2}[place.group]
        pool = 0 if place.pool == ("spot" if patient else "on_demand") else 1
        region = regions.index(place.region) if place.region in regions else len(regions)
        return (last, pool, place.price_factor, group, region) if patient else (last, group, pool, region)

    ranks: dict[tuple[float, ...], list[Replica]] = {}
    for replica in replicas:
        ranks.setdefault(rank(replica), []).append(replica)
    return [Rank(ranks[key], bool(key[0])) for key in sorted(ranks)]
