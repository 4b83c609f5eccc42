"""How long answers would take: what the recording shows of the model that would give them.

Of a request that goes where it went, the time is that of its record. Of one that goes elsewhere it is any of those that
the other model took for like requests (`strata.py`), where there are enough; else what its times follow: so much, and
so much for each token of input and of output, with the spread that is around it.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Final

import numpy as np
from numpy.typing import NDArray

from policies.simulation.recorded import Recorded
from policies.simulation.strata import ANY, DOUBT, Stratum, doublings, stratum
from policies.simulation.sums import REPLICATES, STEP, Sums, Vector, nothing, part_of, step

LEAST_ANSWERS: Final = 20
_Steps = Mapping[int, Vector]
# How much longer a model would answer a request of a stratum than the one that did.
Factor = Callable[[str, str, Stratum], float]
# Where a normal distribution is looked at to spread a time: the middles of nine parts of equal weight.
_SPREAD: Final = [NormalDist().inv_cdf((2 * i + 1) / 18) for i in range(9)]


class _Line:
    """time = a + b * input + c * output, by least squares of the relative error."""

    def __init__(self) -> None:
        self.answers = 0
        self.least_ms = math.inf
        self._squares: NDArray[np.float64] = np.zeros((3, 3))
        self._products: NDArray[np.float64] = np.zeros(3)

    def add(self, tokens_in: int, tokens_out: int, ms: float) -> None:
        ms = max(ms, 1.0)
        terms = np.array([1.0, tokens_in, tokens_out]) / ms
        self._squares += np.outer(terms, terms)
        self._products += terms
        self.answers += 1
        self.least_ms = min(self.least_ms, ms)

    def fit(self) -> tuple[NDArray[np.float64], float]:
        """The three numbers, none below 0, and the standard deviation of the relative error."""
        used = [0, 1, 2]
        found = np.zeros(3)
        while used:
            part = np.linalg.lstsq(self._squares[np.ix_(used, used)], self._products[used], rcond=None)[0]
            if (part >= 0).all():
                found[used] = part
                break
            used.pop(int(part.argmin()))
        rest = self.answers - 2 * found @ self._products + found @ self._squares @ found
        return found, math.sqrt(max(0.0, float(rest)) / self.answers)


class Latency:
    """One kind of time (to the first token, or to the end) of both sides."""

    def __init__(self, factor: Factor) -> None:
        self._factor = factor
        self._of_stratum: Sums[tuple[str, Stratum, int]] = Sums()  # model, stratum, step of time
        self._lines: dict[str, _Line] = defaultdict(_Line)
        self._known: Sums[tuple[str, int]] = Sums()
        self._elsewhere: Sums[tuple[str, str, str, Stratum, int]] = Sums()  # side, answered, instead, ..., doublings

    def learn(self, request: Recorded, model: str, weights: Vector, ms: float) -> None:
        self._of_stratum.add((model, stratum(request), step(ms)), weights)
        self._lines[model].add(request.tokens.input, request.tokens.output, ms)

    def known(self, side: str, weights: Vector, ms: float) -> None:
        self._known.add((side, step(ms)), weights)

    def elsewhere(self, side: str, model: str, request: Recorded, weights: Vector) -> None:
        answered = request.served.model if request.served is not None else model
        length = doublings(request.tokens.output)
        self._elsewhere.add((side, answered, model, stratum(request), length), weights)

    def distribution(self, side: str) -> tuple[_Steps, int]:
        """Requests by step of time, and how many requests nothing can be said of."""
        found: dict[int, Vector] = defaultdict(nothing)
        for of, at in self._known:
            if of in part_of(side):
                found[at] = found[at] + self._known.of((of, at))
        untold = 0
        alike = self._alike()
        told: dict[tuple[str, str, Stratum, int], _Steps | None] = {}
        for of, answered, model, where, length in self._elsewhere:
            if of != side:
                continue
            requests = self._elsewhere.of((of, answered, model, where, length))
            key = (answered, model, where, length)
            if key not in told:
                told[key] = alike.get((model, where)) or self._by_line(*key)
            shares = told[key]
            if shares is None:
                untold += round(float(requests[0]))
                continue
            for at, share in shares.items():
                found[at] = found[at] + requests * share
        return found, untold

    def _alike(self) -> dict[tuple[str, Stratum], _Steps]:
        """Share of each step of time by model and stratum, where there are enough."""
        steps: dict[tuple[str, Stratum], dict[int, Vector]] = defaultdict(dict)
        for model, where, at in self._of_stratum:
            steps[model, where][at] = self._of_stratum.of((model, where, at))
        found: dict[tuple[str, Stratum], _Steps] = {}
        for group, parts in steps.items():
            total: Vector = sum(parts.values(), start=nothing())
            if total[0] >= LEAST_ANSWERS:
                found[group] = {at: part / np.where(total > 0, total, 1.0) for at, part in parts.items()}
        return found

    def _by_line(self, answered: str, model: str, where: Stratum, length: int) -> _Steps | None:
        """Share of each step of time by what a model's times follow; None: too few to tell."""
        line = self._lines.get(model)
        if line is None or line.answers < LEAST_ANSWERS:
            return None
        terms, spread = line.fit()
        # The middles of what a stratum and a doubling hold.
        tokens_in, tokens_out = 4.0 ** (where[1] + 0.5), 2.0 ** (length + 0.5) * self._factor(answered, model, where)
        middle = max(float(terms @ np.array([1.0, tokens_in, tokens_out])), line.least_ms)
        doubt = DOUBT[ANY] * np.random.default_rng(zlib.crc32(f"{answered}\0{model}".encode())).standard_normal(
            REPLICATES
        )
        moved = np.concatenate([[0], np.rint(doubt / STEP).astype(np.int64)])
        found: dict[int, Vector] = defaultdict(nothing)
        every = np.arange(1 + REPLICATES)
        for point in _SPREAD:
            at = np.maximum(0, step(middle * math.exp(spread * point)) + moved)
            for to in np.unique(at):
                found[int(to)][every[at == to]] += 1 / len(_SPREAD)
        return found
