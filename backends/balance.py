"""Which of several replicas gets a request: power of two choices on outstanding requests and recent latency.

Two replicas are drawn, the one with less expected waiting wins (Mitzenmacher, "The Power of Two Choices in Randomized
Load Balancing", 2001). Expected waiting is (outstanding + 1) x latency, where latency is the time to first content of
streams, averaged so that it jumps to a peak at once and forgets it slowly ("peak EWMA"). The time of a plain answer
depends on its length more than on the replica, so it does not count: outstanding requests tell enough of it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Protocol, TypeVar

DECAY_S = 10.0  # after so long without news a latency counts for 1/e
MOST = 4.0  # a replica is taken to be at most so many times as slow as another: long prompts are slow everywhere


class Latency:
    """A peak-sensitive moving average, in seconds; 0 while nothing is known. Times are monotonic seconds."""

    __slots__ = ("_at", "_value")

    def __init__(self) -> None:
        self._value = 0.0
        self._at = 0.0

    def observe(self, seconds: float, now: float) -> None:
        weight = math.exp((self._at - now) / DECAY_S)
        self._value = max(seconds, self._value * weight + seconds * (1.0 - weight))
        self._at = now

    def forget(self) -> None:
        """What was known is no longer true: the replica is back from an outage."""
        self._value = 0.0

    def value(self, now: float) -> float:
        if not self._value:
            return 0.0
        return self._value * math.exp((self._at - now) / DECAY_S)


class Loaded(Protocol):
    """What is compared."""

    outstanding: int
    latency: Latency


R = TypeVar("R", bound=Loaded)


def choose(replicas: Sequence[R], now: float) -> R:
    """One of `replicas`, of which there is at least one."""
    number = len(replicas)
    if number == 1:
        return replicas[0]
    first = int(random.random() * number)
    one, other = replicas[first], replicas[(first + 1 + int(random.random() * (number - 1))) % number]
    return one if _waiting(one, other, now) <= _waiting(other, one, now) else other


def _waiting(this: Loaded, other: Loaded, now: float) -> float:
    """Expected waiting at `this`, bounded by what is known of `other`; without latencies, outstanding requests only."""
    mine, theirs = this.latency.value(now), other.latency.value(now)
    if mine <= 0.0 or theirs <= 0.0:
        return this.outstanding + 1.0
    return (this.outstanding + 1.0) * min(mine, MOST * theirs)
