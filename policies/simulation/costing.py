"""What changed requests would cost: their recorded tokens at other prices, the output stretched as models differ.

Models answer the same question at different lengths. How much is measured where the recording has both models on like
requests (the same task and about the same length of prompt): the ratio of their mean outputs there. Where it has not,
the recorded length stands, and the report says for how many requests.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Final

import numpy as np

from policies.simulation.recorded import Recorded, World
from policies.simulation.sums import Sums, Vector, nothing, ratio

LEAST_ANSWERS: Final = 30  # of each model, for a ratio of their outputs
# What is taken for alike: task, and the power of four of the prompt's length.
Stratum = tuple[str, int]
_Group = tuple[str, str, str, Stratum]  # side, model that answered, model that would, stratum


def stratum(request: Recorded) -> Stratum:
    profile, tokens = request.facts.profile, request.facts.prompt_tokens
    return ("" if profile is None else profile.task, int(math.log(max(1, tokens), 4)))


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

    def elsewhere(self, side: str, request: Recorded, model: str, weights: Vector) -> int:
        """A request that another model would answer. Returns its cost with the output as it was."""
        answered = request.served.model if request.served is not None else model
        group = (side, answered, model, stratum(request))
        of_input, of_output = self._world.cost(model, request.tokens)
        self._inputs.add(group, weights, float(of_input))
        self._stretched.add(group, weights, float(of_output))
        self._requests.add(group, weights)
        return of_input + of_output

    def total(self, side: str) -> Vector:
        """What all requests of a side cost."""
        found = self._known.of(side) + nothing()
        for group in self._inputs:
            if group[0] == side:
                factor = self._ratio(group[1], group[2], group[3])
                found = found + self._inputs.of(group) + self._stretched.of(group) * (1.0 if factor is None else factor)
        return found

    def ratios(self, side: str) -> dict[tuple[str, str], tuple[int, float | None]]:
        """By model that answered and model that would: requests, and the factor on their output; None: not known."""
        groups = [group for group in self._requests if group[0] == side and group[1] != group[2]]
        pairs: dict[tuple[str, str], list[_Group]] = defaultdict(list)
        for group in groups:
            pairs[group[1], group[2]].append(group)
        found = {}
        for pair, members in pairs.items():
            requests = sum(float(self._requests.of(group)[0]) for group in members)
            factors = [(self._ratio(*pair, group[3]), float(self._requests.of(group)[0])) for group in members]
            told = [(float(factor[0]), count) for factor, count in factors if factor is not None]
            mean = sum(f * count for f, count in told) / sum(count for _, count in told) if told else None
            found[pair] = (round(requests), mean)
        return found

    def _ratio(self, answered: str, model: str, at: Stratum) -> Vector | None:
        """How much longer a model answers than another, on requests of a stratum, else on all that both answered."""
        if answered == model:
            return None
        if self._enough(answered, at) and self._enough(model, at):
            return self._compared(answered, model, [at])
        both = [s for m, s in self._answers if m == model and self._enough(model, s) and self._enough(answered, s)]
        return self._compared(answered, model, both) if both else None

    def _enough(self, model: str, at: Stratum) -> bool:
        return float(self._answers.of((model, at))[0]) >= LEAST_ANSWERS

    def _compared(self, answered: str, model: str, strata: list[Stratum]) -> Vector:
        """The ratio of mean outputs, strata weighed by what both know of them (Mantel and Haenszel's weights)."""
        above, below = nothing(), nothing()
        for at in strata:
            ours, theirs = self._answers.of((model, at)), self._answers.of((answered, at))
            whole = np.maximum(ours + theirs, 1.0)
            above = above + self._outputs.of((model, at)) * theirs / whole
            below = below + self._outputs.of((answered, at)) * ours / whole
        return ratio(above, below) if below[0] > 0 else nothing() + 1.0
