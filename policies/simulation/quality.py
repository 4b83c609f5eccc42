"""The share of good answers that the success table predicts, and how sure it is of that.

Two things are uncertain: which requests came (the replicates of `sums.py`), and the table itself, whose cells are Beta
posteriors. Of the latter each replicate draws one table, the same for both sides, so that a difference between the
sides is not blurred by what both have in common.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from policies.simulation.sums import REPLICATES, Sums, Vector, nothing, part_of, ratio
from tiers import TIERS
from tiers.success import SuccessTable
from tiers.task import TaskProfile

_LEAST_KIND: Final = 0.01


class Quality:
    """Predicted success of both sides."""

    def __init__(self) -> None:
        self._good: Sums[str] = Sums()
        self._asked: Sums[str] = Sums()
        self._shares: dict[tuple[str, str, str], float] = {}
        self._deviation: dict[tuple[str, str], float] = {}

    def add(self, side: str, table: SuccessTable, profile: TaskProfile | None, tier: str, weights: Vector) -> None:
        """A request that a tier answers; one that nobody can judge is left out."""
        if profile is None or not profile.in_distribution or tier not in TIERS:
            return
        self._good.add(side, weights, table.p_success(profile, tier).mean)
        self._asked.add(side, weights)
        for kind, share in profile.kinds.items():
            if share >= _LEAST_KIND:
                key = (side, kind, tier)
                self._shares[key] = self._shares.get(key, 0.0) + share
                if (kind, tier) not in self._deviation:
                    cell = table.cells[kind][tier]
                    self._deviation[kind, tier] = math.sqrt(cell.p * (1 - cell.p) / (cell.weight + 1))

    def judged(self, side: str) -> int:
        return round(sum(float(self._asked.of(part)[0]) for part in part_of(side)))

    def mean(self, side: str) -> Vector:
        """Predicted share of good answers."""
        good, asked = (
            sum((sums.of(part) for part in part_of(side)), start=nothing()) for sums in (self._good, self._asked)
        )
        found = ratio(good, asked) + self._of_the_table(side)
        return np.clip(found, 0.0, 1.0)

    def _of_the_table(self, side: str) -> Vector:
        """How the mean of a side would move with the tables that the posteriors allow, to first order."""
        moved = nothing()
        requests = max(1, self.judged(side))
        random = np.random.default_rng(20_261_130)
        for kind, tier in sorted(self._deviation):
            drawn = random.standard_normal(REPLICATES)  # drawn for each cell, so that both sides draw the same
            share = sum(self._shares.get((part, kind, tier), 0.0) for part in part_of(side))
            moved[1:] += share / requests * self._deviation[kind, tier] * drawn
        return moved
