"""What changed requests would cost: their recorded tokens at other prices, the output stretched as models differ.

Models answer the same question at different lengths. How much is measured where the recording has answers of both
models to like requests (`strata.py`): the ratio of their mean outputs. The less alike, the wider the interval; where
there are no such answers the recorded length stands, with much doubt, and the report says for how many requests.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from typing import Final

import numpy as np

from policies.simulation.recorded import Recorded, World
from policies.simulation.strata import ANY, CLOSE, DOUBT, NOTHING, TASK, Stratum, stratum
from policies.simulation.sums import REPLICATES, Sums, Vector, nothing, part_of, ratio

LEAST_ANSWERS: Final = 30  # of each model, for a ratio of their outputs
_Group = tuple[str, str, str, Stratum]  # side, model that answered, model that would, stratum


class Costing:
    """Costs of both sides, in nano-dollars, summed as requests come."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._outputs: Sums[tuple[str, Stratum]] = Sums()
        self._answers: Sums[tuple[str, Stratum]] = Sums()
        self._known: Sums[str] = Sums()
        self._inputs: Sums[_Group] = Sums()
        self._stretched: Sums[_Group] = Sums()
        self._requests: Sums[_Group] = Sums()

    def learn(self, request: Recorded, weights: Vector) -> None:
        """How long an answer was, of whom to what."""
        if request.fate == "answered" and request.served is not None:
            at = (request.served.model, stratum(request))
            self._outputs.add(at, weights, float(request.tokens.output))
            self._answers.add(at, weights)

    def known(self, side: str, weights: Vector, cost_nanousd: int) -> None:
        """A request that costs what it did."""
        self._known.add(side, weights, float(cost_nanousd))

    def elsewhere(self, side: str, request: Recorded, model: str, weights: Vector) -> None:
        """A request that another model would answer."""
        answered = request.served.model if request.served is not None else model
        group = (side, answered, model, stratum(request))
        of_input, of_output = self._world.cost(model, request.tokens)
        self._inputs.add(group, weights, float(of_input))
        self._stretched.add(group, weights, float(of_output))
        self._requests.add(group, weights)

    def total(self, side: str) -> Vector:
        """What all requests of a side cost."""
        found = nothing()
        for part in part_of(side):
            found = found + self._known.of(part)
        for group in self._inputs:
            if group[0] == side:
                factor, _ = self._ratio(*group[1:])
                found = found + self._inputs.of(group) + self._stretched.of(group) * factor
        return found

    def ratios(self, side: str) -> dict[tuple[str, str], tuple[int, float | None]]:
        """By model that answered and model that would: requests, and the factor on their output; None: nothing is
        known of it for most of them."""
        pairs: dict[tuple[str, str], list[tuple[float, float, int]]] = defaultdict(list)
        for group in self._requests:
            if group[0] == side and group[1] != group[2]:
                factor, level = self._ratio(*group[1:])
                pairs[group[1], group[2]].append((float(self._requests.of(group)[0]), float(factor[0]), level))
        found = {}
        for pair, members in pairs.items():
            requests = sum(number for number, _, _ in members)
            guessed = sum(number for number, _, level in members if level == NOTHING)
            mean = sum(number * factor for number, factor, _ in members) / requests
            found[pair] = (round(requests), None if guessed > requests / 2 else mean)
        return found

    def factor(self, answered: str, model: str, at: Stratum) -> float:
        """How much longer a model would answer a request of a stratum than the one that did; 1 where nobody knows."""
        return float(self._ratio(answered, model, at)[0][0])

    def _ratio(self, answered: str, model: str, at: Stratum) -> tuple[Vector, int]:
        """How much longer a model answers than another, and what tells."""
        if answered == model:
            return nothing() + 1.0, CLOSE
        # Only strata that both answered are compared: else the ratio would be that of the tasks they are given.
        shared = {one for of, one in self._answers if of == model} & {
            one for of, one in self._answers if of == answered
        }
        of_task = sorted(one for one in shared if one[0] == at[0])
        for level, strata in ((CLOSE, [at] if at in shared else []), (TASK, of_task), (ANY, sorted(shared))):
            found = self._compared(answered, model, strata)
            if found is not None:
                return found * _doubt(answered, model, level), level
        return _doubt(answered, model, NOTHING), NOTHING

    def _compared(self, answered: str, model: str, strata: list[Stratum]) -> Vector | None:
        """The ratio of mean outputs, strata weighed by what both know of them (Mantel and Haenszel, 1959); None:
        too few answers tell."""
        above, below, least = nothing(), nothing(), [0.0, 0.0]
        for at in strata:
            ours, theirs = self._answers.of((model, at)), self._answers.of((answered, at))
            whole = np.maximum(ours + theirs, 1.0)
            above = above + self._outputs.of((model, at)) * theirs / whole
            below = below + self._outputs.of((answered, at)) * ours / whole
            least = [least[0] + float(ours[0]), least[1] + float(theirs[0])]
        return ratio(above, below) if min(least) >= LEAST_ANSWERS and below[0] > 0 else None


def _doubt(answered: str, model: str, level: int) -> Vector:
    """A factor of one that is as uncertain as that level is, drawn once for each pair of models."""
    random = np.random.default_rng(zlib.crc32(f"{answered}\0{model}".encode()))
    factor = nothing() + 1.0
    factor[1:] = np.exp(DOUBT[level] * random.standard_normal(REPLICATES))
    return factor
