"""How much complexity matters within each kind: by outcomes of prompts that the classifier has not seen.

In code that is to be traced a prompt that looks harder fails far more often, in facts that are to be recalled hardly
more. A slope of all kinds together says too much of one and too little of the other, and P(success) is off by both. A
kind has few such prompts, so its slope is drawn towards the common one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize, minimize_scalar

from tiers.beta import logit
from tiers.success import NEGLIGIBLE, SuccessTable
from tiers.task import KINDS, TaskProfile
from tiers.train.corpus import Example
from tiers.train.outcomes import reference

_KINDS = list(KINDS)
# Standard deviation of the slopes of kinds about the common one. Of 0, 0.5, 1, 2, 4 and 8 the likeliest on prompts that
# neither the classifier nor the slopes had seen, by words and with vectors alike (docs/decisions/091).
SPREAD = 2.0
_STEEPEST = -8.0


@dataclass(frozen=True, slots=True)
class _Outcomes:
    """One row per prompt and tier: shares of the kinds [n, K], log-odds of success by kind [n, K], complexity above the
    kind's mean [n, K], and how well the model did [n]."""

    shares: NDArray[np.float64]
    odds: NDArray[np.float64]
    above: NDArray[np.float64]
    won: NDArray[np.float64]

    def loss(self, slopes: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """Negative log-likelihood, and its gradient [K]."""
        each = 1 / (1 + np.exp(-(self.odds + slopes * self.above)))
        p = np.clip((self.shares * each).sum(axis=1), 1e-6, 1 - 1e-6)
        outer = (p - self.won) / (p * (1 - p))
        gradient: NDArray[np.float64] = (outer[:, None] * self.shares * each * (1 - each) * self.above).sum(axis=0)
        return float(-(self.won * np.log(p) + (1 - self.won) * np.log(1 - p)).sum()), gradient


def fit_slopes(
    table: SuccessTable, examples: Sequence[Example], views: Sequence[Sequence[TaskProfile]]
) -> dict[str, float]:
    """Slope of the log-odds over complexity of each kind that was measured, at most 0; empty without outcomes.

    Args:
        examples: that the classifier has not been trained on.
        views: what it says of them, once by words and where there are vectors once by these; they count alike.
    """
    seen = [found for profiles in views if (found := _outcomes(table, examples, profiles)) is not None]
    if not seen:
        return {}
    measured = np.array([any(cell.source != "prior" for cell in table.cells[kind].values()) for kind in _KINDS])

    def loss(slopes: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        found = [one.loss(np.where(measured, slopes, 0.0)) for one in seen]
        gradient: NDArray[np.float64] = np.mean([gradient for _, gradient in found], axis=0)
        return sum(value for value, _ in found) / len(seen), gradient

    bounds = (_STEEPEST, 0.0)
    common = float(minimize_scalar(lambda s: loss(np.full(len(_KINDS), s))[0], bounds=bounds, method="bounded").x)

    def drawn(slopes: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        value, gradient = loss(slopes)
        away = slopes - common
        return value + float((away**2).sum()) / (2 * SPREAD**2), np.where(measured, gradient, 0.0) + away / SPREAD**2

    found = minimize(drawn, np.full(len(_KINDS), common), jac=True, method="L-BFGS-B", bounds=[bounds] * len(_KINDS))
    return {kind: float(slope) for kind, slope, one in zip(_KINDS, found.x, measured, strict=True) if one}


def _outcomes(table: SuccessTable, examples: Sequence[Example], profiles: Sequence[TaskProfile]) -> _Outcomes | None:
    """None where nothing was measured."""
    means = {tier: [logit(table.kind(kind, tier).mean) for kind in _KINDS] for tier in next(iter(table.cells.values()))}
    middle = np.array([table.complexity[kind] for kind in _KINDS])
    rows = []
    for example, profile in zip(examples, profiles, strict=True):
        likely = np.array([share if (share := profile.kinds[kind]) >= NEGLIGIBLE else 0.0 for kind in _KINDS])
        for tier, model in reference(example.source).items():
            if model in example.scores:
                rows.append((likely / likely.sum(), means[tier], profile.complexity - middle, example.scores[model]))
    if not rows:
        return None
    shares, odds, above, won = (np.array(column, float) for column in zip(*rows, strict=True))
    return _Outcomes(shares, odds, above, won)
