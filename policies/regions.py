"""Sets of requests as boxes: per variable the values that it may have. The arithmetic below `reach.py`.

A `Values` is a set of numbers (as intervals between cuts) or of words (listed, or all but those listed). A `Box` maps
variables to values and holds where all do; a variable that it does not name may be anything. A region is a list of
boxes. All of it is exact: nothing is approximated, so that whoever finds a region empty may say so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

# Where an interval begins or ends: just below a number (-1) or just above it (1).
Cut = tuple[float, int]
_LOWEST: Final[Cut] = (-math.inf, -1)
_HIGHEST: Final[Cut] = (math.inf, 1)


@dataclass(frozen=True, slots=True)
class Numbers:
    """Disjoint intervals in rising order, each from one cut to a later one."""

    intervals: tuple[tuple[Cut, Cut], ...]

    @classmethod
    def between(cls, low: Cut = _LOWEST, high: Cut = _HIGHEST) -> Numbers:
        return cls(((low, high),) if low < high else ())

    @property
    def empty(self) -> bool:
        return not self.intervals

    def and_(self, other: Numbers) -> Numbers:
        pairs = [(max(a, c), min(b, d)) for a, b in self.intervals for c, d in other.intervals]
        return Numbers(tuple(sorted(pair for pair in pairs if pair[0] < pair[1])))

    def not_(self) -> Numbers:
        ends = [_LOWEST, *(cut for interval in self.intervals for cut in interval), _HIGHEST]
        pairs = zip(ends[::2], ends[1::2], strict=True)
        return Numbers(tuple((low, high) for low, high in pairs if low < high))


@dataclass(frozen=True, slots=True)
class Words:
    """The words listed, or with `others` all words but those."""

    listed: frozenset[str]
    others: bool = False

    @property
    def empty(self) -> bool:
        return not self.listed and not self.others

    def and_(self, other: Words) -> Words:
        if self.others and other.others:
            return Words(self.listed | other.listed, True)
        if self.others:
            return Words(other.listed - self.listed)
        return Words(self.listed - other.listed if other.others else self.listed & other.listed)

    def not_(self) -> Words:
        return Words(self.listed, not self.others)


Values = Numbers | Words
Box = Mapping[str, Values]
Region = list[Box]
EVERYTHING: Final[Box] = {}


def meet(one: Values, other: Values) -> Values | None:
    """What is in both; None where they are of two kinds, so that nothing is known."""
    if isinstance(one, Numbers) and isinstance(other, Numbers):
        return one.and_(other)
    if isinstance(one, Words) and isinstance(other, Words):
        return one.and_(other)
    return None


def both(one: Box, other: Box) -> Box | None:
    """The box of what is in both; None: nothing is."""
    met = dict(one)
    for name, values in other.items():
        found = meet(met[name], values) if name in met else values
        if found is None:
            continue  # left as it was: too large rather than too small
        if found.empty:
            return None
        met[name] = found
    return met


def without(box: Box, taken: Box) -> Region:
    """What is in `box` and not in `taken`, as disjoint boxes."""
    rest: Region = []
    inside = dict(box)
    for name, values in taken.items():
        outside = both(inside, {name: values.not_()})
        if outside is not None:
            rest.append(outside)
        narrowed = both(inside, {name: values})
        if narrowed is None:
            return rest
        inside = dict(narrowed)
    return rest


def subtract(region: Iterable[Box], taken: Iterable[Box], most: int) -> Region | None:
    """What is in the region and in none of `taken`; None where that takes more than `most` boxes to say."""
    rest = list(region)
    for box in taken:
        rest = [part for whole in rest for part in without(whole, box)]
        if len(rest) > most:
            return None
    return rest
