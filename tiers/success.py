"""How likely a tier is to succeed at a kind of request, and how sure that is: Beta posteriors by kind and tier.

A cell begins with what is known before the first own request: `measured` (right or wrong answers of a reference model
of that size), `interpolated` (this kind was measured on neighbouring tiers) or `prior` (a judgement: no public outcomes
exist). Its weight says how many own outcomes it is worth; `learned` adds these. Made by `tiers/train/outcomes.py`; read
next: `choose.py`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from tiers import TIERS
from tiers.beta import logit, lower_bound, pool, sigmoid
from tiers.task import KINDS, TaskProfile

TABLE_FILE: Final = Path(__file__).with_name("success.json")
NEGLIGIBLE: Final = 0.005  # kinds less likely than this are left out of the mixture
Source = Literal["measured", "interpolated", "prior"]

# How many own outcomes each beginning is worth. However often a reference model was tried, yours is another one: models
# of one size class differ in a kind by about as much as chance does in 30 trials (`make bench-routing`,
# `worth_of_another_model`). Judgement gives way to a dozen.
PRIOR_WEIGHT: Final[dict[Source, float]] = {"measured": 30.0, "interpolated": 20.0, "prior": 12.0}


@dataclass(frozen=True, slots=True)
class Cell:
    """One (kind, tier), the distribution Beta(p * weight, (1 - p) * weight).

    Attributes:
        p: mean probability of success, in (0, 1).
        trials: public outcomes behind the beginning.
        source: how the beginning came about.
        learned: own outcomes added since; fractions count, since a request is a mixture of kinds.
    """

    p: float
    trials: int
    source: Source
    learned: float = 0.0

    @property
    def weight(self) -> float:
        """Outcomes that the cell is worth: those of its beginning, and its own."""
        return PRIOR_WEIGHT[self.source] + self.learned

    def updated(self, wins: float, losses: float) -> Cell:
        """The posterior after more outcomes.

        Raises:
            ValueError: a count is negative or not a number.
        """
        if not (wins >= 0 and losses >= 0):
            raise ValueError(f"outcomes must be counts of 0 or more, got {wins} wins and {losses} losses")
        total = self.weight + wins + losses
        return replace(self, p=(self.p * self.weight + wins) / total, learned=self.learned + wins + losses)


class Estimate(NamedTuple):
    """P(success) of one request at one tier: its mean, and the bound that it reaches with three to one."""

    mean: float
    lower: float


@dataclass(frozen=True, slots=True)
class _Curve:
    """What is concluded about one kind; neither mean nor bound ever falls from a tier to a larger one.

    Attributes:
        average: the estimates of an average request of the kind.
        odds: tier, log-odds of the mean, log-odds of the bound; empty where complexity shifts nothing.
    """

    average: dict[str, Estimate]
    odds: tuple[tuple[str, float, float], ...]


def _curve(row: Mapping[str, Cell]) -> _Curve:
    """A larger tier is at least as good: where the posteriors say otherwise they are pooled.

    For the same reason what is sure of a tier is sure of every larger one: bounds take the largest so far. A kind that
    began as a judgement is not shifted by complexity: how that matters within it was never measured.
    """
    weights = [row[tier].weight for tier in TIERS]
    means = pool([row[tier].p for tier in TIERS], weights)
    bounds = itertools.accumulate(map(lower_bound, means, weights), max)
    average = {tier: Estimate(mean, lower) for tier, mean, lower in zip(TIERS, means, bounds, strict=True)}
    if all(cell.source == "prior" for cell in row.values()):
        return _Curve(average, ())
    return _Curve(average, tuple((tier, logit(e.mean), logit(e.lower)) for tier, e in average.items()))


@dataclass(frozen=True, slots=True)
class SuccessTable:
    """P(success | kind, tier), shifted by how hard the single request looks among its kind.

    Attributes:
        cells: kind -> tier -> posterior, as counted; what is concluded from them never falls with size.
        complexity: kind -> mean complexity of its training prompts.
        slopes: kind -> change of the log-odds of success per unit of complexity above that mean (0 or negative).
    """

    cells: Mapping[str, Mapping[str, Cell]]
    complexity: Mapping[str, float]
    slopes: Mapping[str, float]
    _curves: dict[str, _Curve] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_curves", {kind: _curve(row) for kind, row in self.cells.items()})

    @classmethod
    def load(cls, path: Path = TABLE_FILE) -> SuccessTable:
        """Read the table.

        Raises:
            ValueError: a kind or a tier is missing, or a probability is not in (0, 1).
        """
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        cells = {kind: {tier: Cell(**cell) for tier, cell in row.items()} for kind, row in data["cells"].items()}
        for kind in KINDS:
            if set(cells.get(kind, {})) != set(TIERS):
                raise ValueError(f"{path}: kind '{kind}' needs one cell for each of {', '.join(TIERS)}")
        if not all(0 < cell.p < 1 for row in cells.values() for cell in row.values()):
            raise ValueError(f"{path}: probabilities must lie between 0 and 1")
        return cls(cells, data["complexity"], data["slopes"])

    def save(self, path: Path = TABLE_FILE) -> None:
        """Write the table as it ships: own outcomes are not part of it."""
        cells = {
            kind: {
                tier: {"p": round(cell.p, 4), "trials": cell.trials, "source": cell.source}
                for tier, cell in row.items()
            }
            for kind, row in self.cells.items()
        }
        complexity = {kind: round(value, 4) for kind, value in self.complexity.items()}
        slopes = {kind: round(value, 2) for kind, value in self.slopes.items()}
        data = {"cells": cells, "complexity": complexity, "slopes": slopes}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def learned(self, outcomes: Mapping[tuple[str, str], tuple[float, float]]) -> SuccessTable:
        """This table after own outcomes: (kind, tier) -> (wins, losses), fractions allowed.

        Counts add up: learning twice is learning the sum.

        Raises:
            ValueError: a kind or a tier is unknown, or a count is negative.
        """
        cells = {kind: dict(row) for kind, row in self.cells.items()}
        for (kind, tier), (wins, losses) in outcomes.items():
            if kind not in cells or tier not in cells[kind]:
                raise ValueError(f"there is no kind '{kind}' at tier '{tier}' in the success table")
            cells[kind][tier] = cells[kind][tier].updated(wins, losses)
        return SuccessTable(cells, self.complexity, self.slopes)

    def kind(self, kind: str, tier: str) -> Estimate:
        """P(success) of an average request of a kind."""
        return self._curves[kind].average[tier]

    def by_kind(self, profile: TaskProfile) -> list[tuple[float, dict[str, Estimate]]]:
        """What the request may be: the share of each likely kind (they sum to 1), and P(success) if it is that.

        Complexity shifts the log-odds of each kind where that was measured.
        """
        likely = [(kind, share) for kind, share in profile.kinds.items() if share >= NEGLIGIBLE]
        total = sum([share for _, share in likely])
        return [(share / total, self._shifted(kind, profile.complexity)) for kind, share in likely]

    def _shifted(self, kind: str, complexity: float) -> dict[str, Estimate]:
        curve = self._curves[kind]
        if not curve.odds:
            return curve.average
        shift = self.slopes.get(kind, 0.0) * (complexity - self.complexity[kind])
        return {tier: Estimate(sigmoid(mean + shift), sigmoid(lower + shift)) for tier, mean, lower in curve.odds}

    def p_success(self, profile: TaskProfile, tier: str) -> Estimate:
        """P(success) of this request at one tier, over all that it may be."""
        return mixed(self.by_kind(profile), tier)

    def source(self, kind: str, tier: str) -> Source:
        """How the cell of a kind and a tier began."""
        return self.cells[kind][tier].source


def mixed(by_kind: Sequence[tuple[float, Mapping[str, Estimate]]], tier: str) -> Estimate:
    """The mean over what a request may be; its bound is the mean of the bounds, as if all kinds erred together."""
    mean = lower = 0.0
    for share, estimates in by_kind:
        mean += share * estimates[tier].mean
        lower += share * estimates[tier].lower
    return Estimate(mean, lower)


@lru_cache(maxsize=1)
def default_table() -> SuccessTable:
    """The shipped table, loaded once per process."""
    return SuccessTable.load()
