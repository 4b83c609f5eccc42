"""How many drafts pay: what a step of so many tokens takes, and which drafts are likely enough to be worth it.

With `rate` the chance that a draft holds if all before it do, a run's draft number j adds `rate ** j` tokens on
average. Drafts are taken in the order of what they add, as many as make tokens per second the most. In a small batch a
step's time goes into reading the weights and further positions are cheap; in a large one each costs its share, and no
draft pays.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Callable, Sequence

# What a request's drafts are taken to be worth before anything is known of it.
PRIOR_RATE = 0.6
_RATE_WEIGHT = 0.1
_RECOVERY_WEIGHT = 0.001  # per step without drafts
_COST_WEIGHT = 0.2
# A step that took far longer than its like says more about the machine than about the step.
_MOST_SURPRISE = 3.0
# A figure that was not renewed for so many steps is forgotten: the next step of that size is an experiment.
_FORGET_STEPS = 512
# Less gain than this is within the error of the figures.
_LEAST_GAIN = 1.05


def after_checking(rate: float, drafted: int, accepted: int) -> float:
    """A request's rate after `accepted` of `drafted` drafts held: a moving average over single drafts."""
    for held in [1.0] * accepted + [0.0] * (accepted < drafted):
        rate += _RATE_WEIGHT * (held - rate)
    return rate


def after_pausing(rate: float) -> float:
    """A request's rate after a step in which its drafts were not worth trying: it is given another chance, slowly."""
    return rate + _RECOVERY_WEIGHT * (PRIOR_RATE - rate)


class StepCost:
    """Seconds of a step by its number of tokens, learned from the steps themselves."""

    def __init__(self) -> None:
        self._seconds: dict[float, float] = {}
        self._updated: dict[float, int] = {}
        self._sizes: list[float] = []
        self._steps = 0

    def add(self, num_tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._steps += 1
        size = _size_class(num_tokens)
        known = self._seconds.get(size)
        if known is None:
            self._seconds[size] = seconds
        else:
            self._seconds[size] = known + _COST_WEIGHT * (min(seconds, _MOST_SURPRISE * known) - known)
        self._updated[size] = self._steps
        if known is None or self._steps % _FORGET_STEPS == 0:
            self._forget()

    def seconds(self, num_tokens: int) -> float:
        """What a step of so many tokens takes. Between known sizes it is in proportion.

        Beyond them it is the least that it can be: as much as the largest known size, and below the smallest one's a
        share of it by tokens. So what is not known is tried, and known then.
        """
        sizes = self._sizes
        if not sizes:
            return 1.0  # nothing is known: steps of all sizes are taken to be equal
        at = bisect_left(sizes, num_tokens)
        if at == len(sizes):
            return self._seconds[sizes[-1]]
        low, low_seconds = (sizes[at - 1], self._seconds[sizes[at - 1]]) if at else (0.0, 0.0)
        high, high_seconds = sizes[at], self._seconds[sizes[at]]
        return low_seconds + (num_tokens - low) / (high - low) * (high_seconds - low_seconds)

    @property
    def is_known(self) -> bool:
        """Whether anything was learned yet."""
        return bool(self._sizes)

    def _forget(self) -> None:
        for size, step in list(self._updated.items()):
            if self._steps - step > _FORGET_STEPS:
                del self._seconds[size], self._updated[size]
        self._sizes = sorted(self._seconds)


def _size_class(num_tokens: int) -> float:
    """The middle of the sizes that are taken as one: below 16 each for itself, above within an eighth."""
    shift = max(0, num_tokens.bit_length() - 4)
    return (num_tokens >> shift << shift) + ((1 << shift) - 1) / 2


def allot(
    rates: Sequence[float],
    offers: Sequence[int],
    *,
    num_tokens: int,
    most: int,
    step_seconds: Callable[[int], float],
    seconds_per_depth: float,
) -> list[int]:
    """How many of its `offers` drafts each request gets, so that the step yields the most tokens per second.

    `num_tokens`: of the step without drafts, in which each of these requests yields one token. `most`: drafts in all.
    `seconds_per_depth`: what it takes to make one more draft for every request, in one pass of a draft model.
    """
    counts = [0] * len(offers)
    candidates = [(-rate, i) for i, (rate, offer) in enumerate(zip(rates, offers, strict=True)) if offer]
    heapq.heapify(candidates)
    expected = float(len(offers))
    best = _LEAST_GAIN * expected / step_seconds(num_tokens)
    chosen, taken, depth = list(counts), 0, 0
    while candidates and taken < most:
        gain, i = heapq.heappop(candidates)
        counts[i] += 1
        taken += 1
        depth = max(depth, counts[i])
        expected -= gain
        per_second = expected / (step_seconds(num_tokens + taken) + depth * seconds_per_depth)
        if per_second > best:
            best, chosen = per_second, list(counts)
        if counts[i] < offers[i]:
            heapq.heappush(candidates, (gain * rates[i], i))
    return chosen
