"""A test that may be looked at all the time: whether a difference is really larger than what is allowed.

A fixed test at 1 %, looked at every second for a day, raises a false alarm sooner or later. Here the evidence against
"no worse than allowed" is an e-value, a bet that wins on average nothing while that is true: by Ville's inequality it
ever exceeds 1/alpha with probability alpha at most, however often one looks. The bet is the likelihood ratio of
Robbins' normal mixture (Robbins 1970; Johari et al., "Always valid inference", 2022), over excesses above zero only.
"""

from __future__ import annotations

import math
from typing import Final

# Of a whole rollout, for each of its guards: the probability that it is rolled back although it is no worse.
ALPHA: Final = 0.01


def e_value(excess: float, variance: float, spread: float) -> float:
    """How strongly a measured excess speaks against there being none.

    With `x` normal around the true excess with this variance `V`, and the excesses bet on spread as a half-normal of
    scale `t`: 2 sqrt(V / (V + t²)) exp(x² t² / (2 V (V + t²))) Φ(x t / sqrt(V (V + t²))).

    Args:
        excess: the measured difference, less what is allowed.
        variance: of the difference, as it was measured.
        spread: scale of the excesses worth finding.
    """
    if variance <= 0:
        return 0.0
    total = variance + spread**2
    z = excess * spread / math.sqrt(variance * total)
    shrink = 2 * math.sqrt(variance / total)
    if z < -30:
        return 0.0
    # exp(z²/2) Φ(z), in logarithms where it would overflow.
    log_e = math.log(shrink) + z * z / 2 + math.log(0.5 * math.erfc(-z / math.sqrt(2)))
    return math.exp(min(log_e, 700.0))


def least_evidence(window: int) -> float:
    """The e-value that proves a breach in the window of this number, counted from 0.

    Each window is a test of its own. The k-th gets alpha / ((k + 1) (k + 2)) of the whole, which adds up to alpha over
    all there can ever be.
    """
    return (window + 1) * (window + 2) / ALPHA
