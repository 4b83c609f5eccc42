"""Fitting: from labelled candidates to the chance that an answer is right, and the bar that keeps a promise.

A logistic regression whose prior is the shipped verifier (MAP, by Newton's method), and a shift per answer: some
answers attract questions that are not theirs. The shifts are drawn from a common normal distribution whose variance is
taken from the labels (empirical Bayes), so an answer with one label moves little and one without has none. Learning per
answer is vCache's idea (Schroeder et al. 2025); there the answers share nothing, and errors are bounded per request.

Pure: `fit` reads its arguments only and may run in another thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

_NEWTON_STEPS = 25
_LARGEST_SHIFT = 4.0
# In wrong answers, each as many requests as a label stands for.
_BELIEF = 10.0


@dataclass(frozen=True, slots=True)
class Labels:
    """Judged candidates, oldest first; one row each.

    Attributes:
        x: features in the verifier's standard units, [labels, features].
        answers: whose answer was the candidate, [labels].
        right: 1.0 where the fresh answer was the same, else 0.0, [labels].
        weights: how many requests the label stands for, 1 / the chance of having been compared, [labels].
        drawn: whether the label was drawn from the traffic by lot. Users' feedback is not: it teaches, but says nothing
            of rates, [labels].
    """

    x: Array
    answers: NDArray[np.int64]
    right: Array
    weights: Array
    drawn: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Fit:
    """Coefficients [1 + features], intercept first; log-odds to add per answer; the bar, None if none is found."""

    coefficients: Array
    shifts: dict[int, float] = field(default_factory=dict)
    bar: float | None = None


def fit(labels: Labels, prior: Array, *, strength: float, promise: float, fewest: int, trusted: int = 0) -> Fit:
    """Fit everything to `labels`.

    Args:
        prior: coefficients to start from, [1 + features].
        strength: precision of the prior, in standard units.
        promise: the share of wrong answers above the bar, in (0, 1).
        fewest: labels above the bar that a bar needs.
        trusted: the first label that says something of today's rates; earlier ones still teach what is alike.
    """
    x = np.concatenate([np.ones((len(labels.x), 1)), labels.x], axis=1)
    # Users speak about what they please: their word moves the answer that they speak about, and nothing else.
    drawn = labels.drawn
    coefficients, covariance = _newton(x[drawn], labels.right[drawn], labels.weights[drawn], prior, strength)
    logits = x @ coefficients
    chances = _chance(logits)
    unsure = chances * (1.0 - chances)
    surprise = labels.right - chances

    # Leave one out: what the fit would have said of a label had it not seen it.
    leverage = np.minimum(labels.weights * unsure * np.einsum("ij,jk,ik->i", x, covariance, x), 0.9)
    without = logits - leverage / (1.0 - leverage) * surprise / np.maximum(unsure, 1e-6)
    answers, group = np.unique(labels.answers, return_inverse=True)
    gained, known = np.zeros(len(answers)), np.zeros(len(answers))
    own = labels.answers >= 0  # below 0: of an answer that is known no longer
    np.add.at(gained, group[own], surprise[own])
    np.add.at(known, group[own], unsure[own])
    # Method of moments: the squared sum of an answer's surprises has the mean `known + variance * known ** 2`.
    variance = max(0.0, float((gained**2 - known).sum() / max((known**2).sum(), 1e-9))) if len(answers) else 0.0
    shifts = _shift(gained, known, variance)
    without[own] += _shift(gained[group] - surprise, known[group] - unsure, variance)[own]

    counts = labels.drawn & (np.arange(len(x)) >= trusted)
    bar = choose_bar(_chance(without[counts]), labels.right[counts], labels.weights[counts], promise, fewest)
    kept = {int(answer): float(shift) for answer, shift in zip(answers, shifts, strict=True) if shift and answer >= 0}
    return Fit(coefficients, kept, bar)


def choose_bar(chances: Array, right: Array, weights: Array, promise: float, fewest: int) -> float | None:
    """The lowest chance at which the estimated share of wrong answers among those above stays within the promise.

    The estimate is what the chances expect, times how many wrong answers were found for each expected one. Half a wrong
    answer more than was found is counted, the middle between this number and the next. `_BELIEF` wrong answers as
    expected are added on both sides: a few audits do not throw over what all labels say.
    """
    if not len(chances):
        return None
    order = np.argsort(-chances, kind="stable")
    chances, wrong, weights = chances[order], 1.0 - right[order], weights[order]
    whole, expected = np.cumsum(weights), np.cumsum(weights * (1.0 - chances))
    one = np.cumsum(weights**2) / whole  # what a label stands for, in the mean
    found = np.cumsum(weights * wrong) / one
    rate = (found + 0.5 + _BELIEF) / (expected / one + _BELIEF) * expected / whole
    # A bar lies between two labels: of equal chances all are above it.
    last = np.append(chances[1:] < chances[:-1], True)
    kept = np.flatnonzero((rate <= promise) & last & (np.arange(1, len(chances) + 1) >= fewest))
    return float(chances[kept[-1]]) if len(kept) else None


def _newton(x: Array, right: Array, weights: Array, prior: Array, strength: float) -> tuple[Array, Array]:
    """The most probable coefficients and their covariance there (Laplace)."""
    coefficients = prior.copy()
    for _ in range(_NEWTON_STEPS):
        chances = _chance(x @ coefficients)
        slope = x.T @ (weights * (right - chances)) - strength * (coefficients - prior)
        curvature = (x * (weights * chances * (1.0 - chances))[:, None]).T @ x + strength * np.eye(len(prior))
        step = np.linalg.solve(curvature, slope)
        largest = float(np.abs(step).max())
        coefficients = coefficients + step * min(1.0, 2.0 / max(largest, 1e-12))
        if largest < 1e-6:
            break
    return coefficients, np.linalg.inv(curvature).astype(np.float64)


def _chance(logits: Array) -> Array:
    return 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))


def _shift(gained: Array, known: Array, variance: float) -> Array:
    """One Newton step from 0 of each answer's own log-odds, under a normal prior."""
    return np.clip(variance * gained / (1.0 + variance * np.maximum(known, 0.0)), -_LARGEST_SHIFT, _LARGEST_SHIFT)
