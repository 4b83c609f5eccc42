"""How long answers would take: what the recording shows of the model that would give them, at about that length.

Of a request that goes where it went, the time is that of its record. Of one that goes elsewhere it is any of those that
the other model took for answers of about that length: a distribution is exchanged for a distribution.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

from policies.simulation.recorded import Recorded
from policies.simulation.sums import Histogram, Sums, Vector, nothing, quantile, step

LEAST_ANSWERS: Final = 20
_ANY: Final = -1
_Group = tuple[str, int]  # model, length of the answer


class Latency:
    """One kind of time (to the first token, or to the end) of both sides."""

    def __init__(self) -> None:
        self._evidence: dict[_Group, Histogram] = defaultdict(Histogram)
        self._known: Sums[tuple[str, int]] = Sums()
        self._elsewhere: Sums[tuple[str, str, int]] = Sums()

    def learn(self, model: str, output: int, weights: Vector, ms: float) -> None:
        self._evidence[model, _length(output)].add(weights, ms)
        self._evidence[model, _ANY].add(weights, ms)

    def known(self, side: str, weights: Vector, ms: float) -> None:
        self._known.add((side, step(ms)), weights)

    def elsewhere(self, side: str, model: str, request: Recorded, weights: Vector) -> None:
        self._elsewhere.add((side, model, _length(request.tokens.output)), weights)

    def distribution(self, side: str) -> tuple[dict[int, Vector], int]:
        """Requests by step of time, and how many requests nothing can be said of."""
        found: dict[int, Vector] = defaultdict(nothing)
        for of, at in self._known:
            if of == side:
                found[at] = found[at] + self._known.of((of, at))
        untold = 0
        for of, model, length in self._elsewhere:
            if of != side:
                continue
            requests = self._elsewhere.of((of, model, length))
            evidence = self._of(model, length)
            if evidence is None:
                untold += round(float(requests[0]))
                continue
            for at, share in evidence.shares().items():
                found[at] = found[at] + requests * share
        return found, untold

    def quantile(self, side: str, share: float) -> Vector:
        return quantile(self.distribution(side)[0], share)

    def _of(self, model: str, length: int) -> Histogram | None:
        for group in ((model, length), (model, _ANY)):
            if group in self._evidence and self._evidence[group].total[0] >= LEAST_ANSWERS:
                return self._evidence[group]
        return None


def _length(output: int) -> int:
    """The power of four of a number of tokens."""
    return int(math.log(max(1, output), 4))
