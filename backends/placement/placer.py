"""The choice of a replica: of those in the best rank that has room, the one where the answer will begin soonest.

    wait = (work on it / weight + missing + FLOOR) x how slow it is + missing

Work is what the requests on it still take, in tokens to compute; `missing` are the tokens of the prompt that it does
not hold. They count twice: they take time now, and where they are computed they push out what others come back for. So
a replica that holds a prefix is never ahead of another by more work than twice what this saves. Replicas whose waits
differ by less than can be told are taken as equal: then the one that holds more, else one by lot, by their weights. How
slow: its time to first content per token that had to be computed, beside the fastest's. That varies by itself, so only
what is beyond `USUAL_SPREAD` counts, and at most `MOST`.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from backends.balance import MOST
from backends.placement.asked import Placement
from backends.placement.index import PrefixIndex
from backends.placement.place import Order, Preferences
from backends.replica import Replica

FLOOR_TOKENS = 128.0  # what a request takes apart from its tokens
ABOUT_EQUAL = 1.05
USUAL_SPREAD = 2.0

# prefix: it holds the most of the prompt. busy: another holds more, and has too much to do. work: none holds any of it.
# overflow: better ranks had no room. last: nobody else could take it.
Why = Literal["prefix", "busy", "work", "overflow", "last"]
WHYS: tuple[Why, ...] = ("prefix", "busy", "work", "overflow", "last")


class Placer:
    """Chooses between the replicas of one backend. `index` None: where prefixes are does not count."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        max_outstanding: int,
        preferences: Preferences | None = None,
        index: PrefixIndex | None = None,
    ) -> None:
        preferences = preferences or Preferences()
        self.order = Order(replicas, preferences)
        self.index = index
        self.chosen: Counter[Why] = Counter()
        self.expected_hit_tokens = 0
        self.hit_tokens = 0  # as the gateway says when it has read the answers
        self._replicas = replicas
        self._full = max(1, math.ceil(max_outstanding * preferences.overflow_at))

    def choose(self, ready: Sequence[Replica], placement: Placement, now: float) -> Replica | None:
        """One of those that are ready; None if the prompt is too long for all of them and not for others. To be
        followed by `begin`, if it is taken."""
        if self.order.limited:
            ready = [replica for replica in ready if self.order.takes(replica, placement)]
        if not ready:
            return None
        ranks = self.order.ranks(placement)
        why: Why | None = None
        if len(ranks) > 1:
            ready, why = self._best_rank(ready, placement)
        hits = self.index.hits(placement.chain, now) if self.index is not None else {}
        replica = _soonest(ready, hits, placement, now) if len(ready) > 1 else ready[0]
        hit = min(hits.get(replica, 0), placement.prompt_tokens)
        if why is None:
            most = max(hits.values(), default=0)
            why = "work" if not most else "prefix" if hit >= most else "busy"
        placement.why, placement.expected_hit = why, hit
        return replica

    def begin(self, replica: Replica, placement: Placement, now: float) -> None:
        """The request goes there; `Placement.end` is called when it is over."""
        self.chosen[placement.why] += 1  # type: ignore[index]
        self.expected_hit_tokens += placement.expected_hit
        placement.begin(replica, placement.expected_hit)
        if self.index is not None:
            self.index.sent(placement.chain, replica, now)

    def answered(self, replica: Replica, placement: Placement, page: str) -> None:
        """Its answer names the page in which the prompt ended, in hexadecimal; empty where it names none."""
        if page and self.index is not None and (name := _name(page)):
            self.index.answered(placement.chain, replica, name)

    def began(self, replica: Replica, placement: Placement, seconds: float, now: float) -> None:
        """The first content of its answer came after so long."""
        load = placement.computed(replica)
        if load is not None:
            replica.pace.observe(seconds / (load.ahead + load.prefill + FLOOR_TOKENS), now)

    def forget(self, replica: Replica) -> None:
        """The replica does not answer: when it is back, it may have been started anew."""
        if self.index is not None:
            self.index.forget(replica)

    def imbalance(self) -> float:
        """The most work that a replica has, as a multiple of the mean; 1 while there is none."""
        work = [replica.work for replica in self._replicas]
        mean = sum(work) / len(work)
        return max(work) / mean if mean > 0 else 1.0

    def _best_rank(self, ready: Sequence[Replica], placement: Placement) -> tuple[Sequence[Replica], Why | None]:
        """Those of the first rank in which one is ready and not full, else of the first in which one is ready."""
        able: Collection[Replica] = set(ready)
        fallback: tuple[Sequence[Replica], Why | None] | None = None
        for number, rank in enumerate(self.order.ranks(placement)):
            there = [replica for replica in rank.replicas if replica in able]
            if not there:
                continue
            why: Why | None = "last" if rank.last else "overflow" if number else None
            if rank.last:
                return fallback or (there, why)
            free = [replica for replica in there if replica.outstanding < self._full]
            if free:
                return free, why
            fallback = fallback or (there, why)
        assert fallback is not None  # every replica has a rank
        return fallback


def _name(text: str) -> bytes:
    """The name of a page; empty where the text is none."""
    try:
        return bytes.fromhex(text) if len(text) <= 64 else b""
    except ValueError:
        return b""


def _soonest(ready: Sequence[Replica], hits: Mapping[Replica, int], placement: Placement, now: float) -> Replica:
    paces = [replica.pace.value(now) for replica in ready]
    known = [pace for pace in paces if pace > 0.0]
    fastest = min(known) if len(known) == len(ready) else 0.0  # as long as one is not known, all are equal
    waits = []
    for replica, pace in zip(ready, paces, strict=True):
        missing = max(0, placement.prompt_tokens - hits.get(replica, 0))
        slow = min(max(1.0, pace / fastest / USUAL_SPREAD), MOST) if fastest else 1.0
        waits.append((replica.work / replica.place.weight + missing + FLOOR_TOKENS) * slow + missing)
    bound = min(waits) * ABOUT_EQUAL
    equal = [replica for replica, wait in zip(ready, waits, strict=True) if wait <= bound]
    if len(equal) == 1:
        return equal[0]
    most = max(hits.get(replica, 0) for replica in equal)
    equal = [replica for replica in equal if hits.get(replica, 0) == most]
    return random.choices(equal, [replica.place.weight for replica in equal])[0] if len(equal) > 1 else equal[0]
