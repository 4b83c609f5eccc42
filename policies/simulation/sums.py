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
# Durations are counted in steps of 2 %, from 0.1 ms.
STEP: Final = math.log(1.02)
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


# What is the same on both sides is added once, under a side of its own.
BOTH: Final = "both"


def part_of(side: str) -> tuple[str, str]:
    """The sides whose sums make up one side."""
    return side, BOTH


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


def nothing() -> Vector:
    return np.zeros(1 + REPLICATES)


def step(ms: float) -> int:
    """The step that a duration falls into."""
    return max(0, math.ceil(math.log(max(ms, _LEAST_MS) / _LEAST_MS) / STEP))


def quantile(steps: Mapping[int, Vector], share: float) -> Vector:
    """The duration in milliseconds that this share of the requests does not exceed, in every replicate."""
    order = sorted(steps)
    if not order:
        return nothing()
    counted = np.array([steps[at] for at in order])  # [steps, 1 + REPLICATES]
    running = np.cumsum(counted, axis=0)
    wanted = share * running[-1]
    reached = (running >= wanted).argmax(axis=0)
    every = np.arange(running.shape[1])
    inside = counted[reached, every]
    # Within its step the quantile lies as far as the step's requests are needed.
    part = 1 - (running[reached, every] - wanted) / np.where(inside > 0, inside, 1.0)
    found: Vector = _LEAST_MS * np.exp(STEP * (np.array(order)[reached] - 1 + np.clip(part, 0.0, 1.0)))
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
