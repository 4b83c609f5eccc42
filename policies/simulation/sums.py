"""Sums over requests, and how sure they are: the Poisson bootstrap.

Each request counts 1 in the sum, and in each of 200 replicates a Poisson(1) number of times. So the sums of the
replicates are those of traffic that might as well have come: in one pass, with memory that does not grow with the
requests. A vector has 1 + REPLICATES elements, the sum as it is and then the replicates'.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from typing import Final, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
_Key = TypeVar("_Key", bound=Hashable)

REPLICATES: Final = 200
_BATCH: Final = 2048
_COVERED: Final = (2.5, 97.5)
# Durations are counted in steps of 5 %, from 0.1 ms.
_STEP: Final = math.log(1.05)
_LEAST_MS: Final = 0.1


class Estimate(msgspec.Struct, frozen=True):
    """A figure and the 95 % interval around it."""

    value: float
    low: float
    high: float


class Weights:
    """How often each request counts, one vector after the other; the same in every run."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(20_261_130)
        self._drawn: NDArray[np.float64] = np.empty((0, 1 + REPLICATES))
        self._at = 0

    def next(self) -> Vector:
        if self._at == len(self._drawn):
            self._drawn = self._random.poisson(1.0, (_BATCH, 1 + REPLICATES)).astype(np.float64)
            self._drawn[:, 0] = 1.0
            self._at = 0
        self._at += 1
        drawn: Vector = self._drawn[self._at - 1]
        return drawn


class Sums(Generic[_Key]):
    """A vector for each key that something was added to."""

    def __init__(self) -> None:
        self._of: dict[_Key, Vector] = defaultdict(nothing)

    def add(self, key: _Key, weights: Vector, value: float = 1.0) -> None:
        """Add `value` to the sum of a key, as often as the request counts."""
        self._of[key] += weights if value == 1.0 else weights * value

    def of(self, key: _Key) -> Vector:
        """The sum of a key; zero where nothing was added."""
        return self._of[key] if key in self._of else nothing()

    def __iter__(self) -> Iterator[_Key]:
        return iter(list(self._of))


class Histogram:
    """How many requests took how long, per step of time."""

    def __init__(self) -> None:
        self._steps: Sums[int] = Sums()
        self.total: Vector = nothing()

    def add(self, weights: Vector, ms: float) -> None:
        self._steps.add(step(ms), weights)
        self.total = self.total + weights

    def shares(self) -> Mapping[int, Vector]:
        """Share of each step; the same as it is in replicates that drew nothing."""
        total = np.where(self.total > 0, self.total, 1.0)
        return {at: self._steps.of(at) / total for at in self._steps}


def nothing() -> Vector:
    return np.zeros(1 + REPLICATES)


def step(ms: float) -> int:
    """The step that a duration falls into."""
    return max(0, math.ceil(math.log(max(ms, _LEAST_MS) / _LEAST_MS) / _STEP))


def quantile(steps: Mapping[int, Vector], share: float) -> Vector:
    """The duration in milliseconds that this share of the requests does not exceed, in every replicate."""
    order = sorted(steps)
    if not order:
        return nothing()
    running = np.cumsum([steps[at] for at in order], axis=0)
    reached = (running >= share * running[-1]).argmax(axis=0)
    found: Vector = _LEAST_MS * np.exp(_STEP * (np.array(order)[reached] - 0.5))
    return found


def ratio(part: Vector, whole: Vector) -> Vector:
    """part / whole; where a replicate has no whole, as it is in the sum itself."""
    safe = np.where(whole == 0, 1.0, whole)
    found = np.where(whole == 0, np.nan, part / safe)
    return np.nan_to_num(found, nan=0.0 if math.isnan(found[0]) else float(found[0]))


def of_the_sample(values: Vector) -> Estimate:
    """The figure of the recorded requests, and how much it owes to chance which requests came."""
    low, high = np.percentile(values[1:], _COVERED)
    value = float(values[0])
    return Estimate(value, min(value, float(low)), max(value, float(high)))


def of_the_next(values: Vector) -> Estimate:
    """The figure expected of the next requests of the same kind, as many as were recorded: chance strikes twice, in
    what was recorded and in what will come, so the interval is the square root of two times as wide."""
    found = of_the_sample(values)
    wider = math.sqrt(2)
    low, high = found.value - wider * (found.value - found.low), found.value + wider * (found.high - found.value)
    return Estimate(found.value, max(0.0, low), high)
