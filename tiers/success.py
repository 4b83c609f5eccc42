"""How likely a tier is to succeed at a kind of request: a table measured on public outcomes, its gaps filled openly.

Each cell says how it came about: `measured` (right or wrong answers of a reference model of that size), `interpolated`
(this kind was measured on neighbouring tiers) or `prior` (a judgement: no public outcomes exist). Made by
`tiers/train/outcomes.py`; read next: `choose.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal

from tiers import TIERS
from tiers.task import KINDS, TaskProfile

TABLE_FILE: Final = Path(__file__).with_name("success.json")
_NEGLIGIBLE: Final = 0.005  # kinds less likely than this are left out of the mixture
Source = Literal["measured", "interpolated", "prior"]


@dataclass(frozen=True, slots=True)
class Cell:
    """One (kind, tier): probability of success in (0, 1), number of outcomes behind it, and how it came about."""

    p: float
    trials: int
    source: Source


@dataclass(frozen=True, slots=True)
class SuccessTable:
    """P(success | kind, tier), shifted by how hard the single request looks among its kind.

    Attributes:
        cells: kind -> tier -> cell; never falls from a tier to a larger one.
        complexity: kind -> mean complexity of its training prompts.
        slope: change of the log-odds of success per unit of complexity above that mean (0 or negative).
    """

    cells: Mapping[str, Mapping[str, Cell]]
    complexity: Mapping[str, float]
    slope: float

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
        return cls(cells, data["complexity"], data["slope"])

    def save(self, path: Path = TABLE_FILE) -> None:
        cells = {
            kind: {
                tier: {"p": round(cell.p, 4), "trials": cell.trials, "source": cell.source}
                for tier, cell in row.items()
            }
            for kind, row in self.cells.items()
        }
        complexity = {kind: round(value, 4) for kind, value in self.complexity.items()}
        data = {"cells": cells, "complexity": complexity, "slope": round(self.slope, 3)}
        path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")

    def kind(self, kind: str, tier: str) -> float:
        """P(success) of an average request of a kind."""
        return self.cells[kind][tier].p

    def p_success(self, profile: TaskProfile, tier: str) -> float:
        """P(success) of this request: its kinds weigh the table, its complexity shifts the log-odds of each kind.

        A kind whose row is a prior is not shifted: how complexity matters within it was never measured.
        """
        p = total = 0.0
        for kind, weight in profile.kinds.items():
            if weight < _NEGLIGIBLE:
                continue
            cell = self.cells[kind][tier]
            shift = 0.0 if cell.source == "prior" else self.slope * (profile.complexity - self.complexity[kind])
            p += weight * (sigmoid(logit(cell.p) + shift) if shift else cell.p)
            total += weight
        return p / total

    def source(self, kind: str, tier: str) -> Source:
        """How the cell of a kind and a tier came about."""
        return self.cells[kind][tier].source


def logit(p: float) -> float:
    """ln(p / (1 - p)), with p kept inside (0, 1)."""
    p = min(1 - 1e-6, max(1e-6, p))
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


@lru_cache(maxsize=1)
def default_table() -> SuccessTable:
    """The shipped table, loaded once per process."""
    return SuccessTable.load()
