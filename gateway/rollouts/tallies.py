"""What became of the requests of one side of a rollout: counts and sums, small enough to be put on record every second.

They are kept apart in a few groups, into which keys (teams, requests) fall by a hash. What differs between the groups
of one side says how far two sides may differ by chance: requests of one key are alike, so that a thousand of them tell
less than a thousand of as many keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import msgspec

from policies.load import bucket

GROUPS: Final = 32
_GROWTH: Final = math.log(1.02)  # from one bound of a latency to the next


class Group(msgspec.Struct, array_like=True):
    """Requests, and what they came to. `faults`: failed at a server. `answers` had an answer, whose cost (nano-dollars)
    and latency count; `judged` were found `good` or not."""

    requests: int = 0
    faults: int = 0
    answers: int = 0
    cost_nanousd: int = 0
    judged: int = 0
    good: int = 0
    latencies: dict[int, int] = {}  # answers by how long they took: see `step_of`


class Tally(msgspec.Struct):
    """One side of a rollout, in one window, as one process or all of them counted it."""

    groups: dict[int, Group] = {}

    def finished(self, unit: str, fault: bool, latency_ms: float, cost_nanousd: int) -> None:
        """Count a request that failed at a server, or got an answer."""
        group = self._group(unit)
        group.requests += 1
        if fault:
            group.faults += 1
            return
        group.answers += 1
        group.cost_nanousd += cost_nanousd
        step = step_of(latency_ms)
        group.latencies[step] = group.latencies.get(step, 0) + 1

    def judged(self, unit: str, good: bool) -> None:
        """Count what an answer turned out to be."""
        group = self._group(unit)
        group.judged += 1
        group.good += good

    def add(self, other: Tally) -> None:
        """Take in what another process counted."""
        for number, theirs in other.groups.items():
            ours = self.groups.setdefault(number, Group())
            for field in ("requests", "faults", "answers", "cost_nanousd", "judged", "good"):
                setattr(ours, field, getattr(ours, field) + getattr(theirs, field))
            for step, count in theirs.latencies.items():
                ours.latencies[step] = ours.latencies.get(step, 0) + count

    def total(self, field: str) -> int:
        """The sum of a field over all groups."""
        return sum(getattr(group, field) for group in self.groups.values())

    def latency_step(self, quantile: float) -> int | None:
        """The step within which this share of the answers lies; None without any."""
        counts: dict[int, int] = {}
        for group in self.groups.values():
            for step, count in group.latencies.items():
                counts[step] = counts.get(step, 0) + count
        wanted = quantile * sum(counts.values())
        seen = 0
        for step in sorted(counts):
            seen += counts[step]
            if seen >= wanted:
                return step
        return None

    def _group(self, unit: str) -> Group:
        number = int(bucket("", unit) * GROUPS / 100)
        return self.groups.setdefault(number, Group())


def step_of(latency_ms: float) -> int:
    """Latencies of one step differ by 2 % at most."""
    return max(0, math.ceil(math.log(max(latency_ms, 1e-9)) / _GROWTH))


def latency_of(step: int) -> float:
    """The longest latency of a step, in milliseconds."""
    return math.exp(step * _GROWTH)


def steps_in(factor: float) -> int:
    """How many steps further a latency is that is larger by this factor."""
    return math.ceil(math.log(factor) / _GROWTH)


def merged(tallies: Iterable[Tally]) -> Tally:
    """What all of them counted together."""
    whole = Tally()
    for tally in tallies:
        whole.add(tally)
    return whole
