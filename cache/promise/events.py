"""What changes a promise, as values: a lesson (a judged candidate) and a refit (bar and chances found anew).

Whoever applies the same events in the same order to the same promise has the same promise: clock, chance and the
traffic decide which events there are, never what they do. So a promise can be shared by telling its events.
"""

from __future__ import annotations

import msgspec

from cache.promise.rule import Kind, Rule

NO_REGIME = -1


class Lesson(msgspec.Struct, frozen=True, tag="lesson"):
    """A candidate on which somebody has spoken.

    Attributes:
        regime: the number of the regime in which it was decided, in which alone it counts as an audit; `NO_REGIME`: it
            teaches, and counts in no bound.
        features: in the verifier's standard units.
        at: when it was judged, Unix time in seconds.
    """

    rule: Rule
    kind: Kind
    regime: int
    features: tuple[float, ...]
    answer_id: int
    right: bool
    at: float


class Refit(msgspec.Struct, frozen=True, tag="refit"):
    """A fit to the first `seen` labels of a promise; see `Fit`."""

    rule: Rule
    seen: int
    coefficients: tuple[float, ...]
    shifts: dict[int, float]
    bar: float | None
    at: float


Event = Lesson | Refit
