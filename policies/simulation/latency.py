"""How long answers would take: what the recording shows of the model that would give them.

Of a request that goes where it went, the time is that of its record. Of one that goes elsewhere it is any of those that
the other model took: for like requests (`strata.py`) where there are enough, else for answers as long as its answer
would be, else for all. So a distribution is exchanged for a distribution, the more doubtful the less alike.
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

import numpy as np

from policies.simulation.recorded import Recorded
from policies.simulation.strata import ANY, CLOSE, DOUBT, TASK, Stratum, doublings, stratum
from policies.simulation.sums import REPLICATES, STEP, Sums, Vector, nothing, part_of, step

LEAST_ANSWERS: Final = 20
_Steps = Mapping[int, Vector]
_What = TypeVar("_What", Stratum, int)
# How much longer a model would answer a request of a stratum than the one that did.
Factor = Callable[[str, str, Stratum], float]


class Latency:
    """One kind of time (to the first token, or to the end) of both sides."""

    def __init__(self, factor: Factor) -> None:
        self._factor = factor
        self._of_stratum: Sums[tuple[str, Stratum, int]] = Sums()  # model, stratum, step of time
        self._of_length: Sums[tuple[str, int, int]] = Sums()  # model, doublings of the answer, step of time
        self._known: Sums[tuple[str, int]] = Sums()
        self._elsewhere: Sums[tuple[str, str, str, Stratum, int]] = Sums()  # side, answered, instead, ..., doublings

    def learn(self, request: Recorded, model: str, weights: Vector, ms: float) -> None:
        at = step(ms)
        self._of_stratum.add((model, stratum(request), at), weights)
        self._of_length.add((model, doublings(request.tokens.output), at), weights)

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
        told: dict[tuple[str, str, Stratum, int], _Steps | None] = {}
        strata, lengths = _by_model(self._of_stratum), _by_model(self._of_length)
        for of, answered, model, where, length in self._elsewhere:
            if of != side:
                continue
            requests = self._elsewhere.of((of, answered, model, where, length))
            key = (answered, model, where, length)
            if key not in told:
                longer = length + math.log2(max(self._factor(answered, model, where), 1e-6))
                evidence, doubt = _enough(_candidates(where, longer, strata.get(model, {}), lengths.get(model, {})))
                seed = zlib.crc32(f"{answered}\0{model}".encode())
                told[key] = _blurred(evidence, doubt, seed) if evidence is not None and doubt else evidence
            shares = told[key]
            if shares is None:
                untold += round(float(requests[0]))
                continue
            for at, share in shares.items():
                found[at] = found[at] + requests * share
        return found, untold


def _by_model(sums: Sums[tuple[str, _What, int]]) -> dict[str, dict[_What, dict[int, Vector]]]:
    found: dict[str, dict[_What, dict[int, Vector]]] = defaultdict(lambda: defaultdict(dict))
    for model, what, at in sums:
        found[model][what][at] = sums.of((model, what, at))
    return found


def _candidates(
    where: Stratum, length: float, strata: Mapping[Stratum, _Steps], lengths: Mapping[int, _Steps]
) -> Iterator[tuple[list[_Steps], float]]:
    """Answers of a model that may tell, from the likest on, and how doubtful that is."""
    yield [strata[where]] if where in strata else [], DOUBT[CLOSE]
    # As long as the answer would be; a length between two doublings may have become either.
    near = {math.floor(length), math.floor(length + 0.5)}
    yield [steps for one, steps in lengths.items() if one in near], DOUBT[TASK]
    yield list(strata.values()), DOUBT[ANY]


def _enough(candidates: Iterator[tuple[list[_Steps], float]]) -> tuple[_Steps | None, float]:
    """Share of each step of time among the likest answers of which there are enough, and how doubtful they are."""
    for parts, doubt in candidates:
        steps: dict[int, Vector] = defaultdict(nothing)
        for part in parts:
            for at, requests in part.items():
                steps[at] = steps[at] + requests
        total: Vector = sum(steps.values(), start=nothing())
        if total[0] >= LEAST_ANSWERS:
            return {at: requests / np.where(total > 0, total, 1.0) for at, requests in steps.items()}, doubt
    return None, 0.0


def _blurred(steps: _Steps, doubt: float, seed: int) -> _Steps:
    """The same with every time longer or shorter by a factor that each replicate draws for itself."""
    moved = np.zeros(1 + REPLICATES, dtype=np.int64)
    moved[1:] = np.rint(doubt * np.random.default_rng(seed).standard_normal(REPLICATES) / STEP)
    rows = np.maximum(0, np.array(list(steps))[:, None] + moved)  # [steps, 1 + REPLICATES]: where each share goes
    found = np.zeros((int(rows.max()) + 1, 1 + REPLICATES))
    np.add.at(found, (rows, np.arange(1 + REPLICATES)), np.array(list(steps.values())))
    return {int(at): found[at] for at in np.flatnonzero(found.any(axis=1))}
