"""Beta distributions in closed form: a lower bound of a probability, and pooling that keeps a row monotone.

Numbers only, no table and no request; numpy and scipy are not needed where Tierline runs. Used by `success.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

# One side of the bound: a share of 1/4 of the distribution lies below it ("we would bet three to one").
LEVEL: Final = 0.25
_Z: Final = -0.674490  # the standard normal quantile at LEVEL
_RECURRENCE_UP_TO: Final = 6.0


def logit(p: float) -> float:
    """ln(p / (1 - p)), with p kept inside (0, 1)."""
    p = min(1 - 1e-6, max(1e-6, p))
    return math.log(p / (1 - p))


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x)."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def lower_bound(mean: float, weight: float) -> float:
    """The `LEVEL` quantile of Beta(mean * weight, (1 - mean) * weight), never above the mean.

    By the normal approximation of the log-odds, whose mean and variance are exact: within 0.012 of the true quantile
    from a weight of 6 on; below that it errs by up to 0.03. No cell weighs less than 12.
    """
    a, b = mean * weight, (1 - mean) * weight
    centre = _digamma(a) - _digamma(b)
    spread = math.sqrt(_trigamma(a) + _trigamma(b))
    return min(mean, sigmoid(centre + _Z * spread))


def pool(means: Sequence[float], weights: Sequence[float]) -> list[float]:
    """The nearest means that never fall, by weighted least squares: pool adjacent violators.

    Neighbours that contradict the order are given their common weighted mean.
    """
    blocks: list[list[float]] = []  # [mean, weight, length]
    for mean, weight in zip(means, weights, strict=True):
        blocks.append([mean, weight, 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            right, left = blocks.pop(), blocks.pop()
            total = left[1] + right[1]
            blocks.append([(left[0] * left[1] + right[0] * right[1]) / total, total, left[2] + right[2]])
    return [mean for mean, _, length in blocks for _ in range(int(length))]


def _digamma(x: float) -> float:
    """Derivative of ln gamma: recurrence up to 6, then the asymptotic series (Abramowitz and Stegun 6.3.18)."""
    result = 0.0
    while x < _RECURRENCE_UP_TO:
        result -= 1 / x
        x += 1
    y = 1 / (x * x)
    return result + math.log(x) - 0.5 / x - y * (1 / 12 - y * (1 / 120 - y / 252))


def _trigamma(x: float) -> float:
    """Second derivative of ln gamma, in the same way (6.4.12)."""
    result = 0.0
    while x < _RECURRENCE_UP_TO:
        result += 1 / (x * x)
        x += 1
    y = 1 / (x * x)
    return result + 1 / x + y / 2 + y / x * (1 / 6 - y * (1 / 30 - y / 42))
