"""What audits prove about a rate: bounds that hold at every moment, not only at one agreed beforehand.

Audited hits are right or wrong, each with a chance of being wrong that may depend on all that came before: the bar
moves, the traffic drifts. A bound made for one look at a fixed number of equal trials (Clopper and Pearson 1934) fails
more often than it says when it is looked at after each audit until it pleases. These bounds do not: with the stated
confidence they hold for all n at once, for the mean of the n chances.

For any real λ, exp(λ S_n) / prod_i (1 - m_i + m_i e^λ) is a martingale, where S_n counts the wrong ones and m_i is the
chance of the i-th. ln(1 - m + m e^λ) is concave in m, so putting the mean of the m_i in place of each makes it smaller,
and a mixture of such terms over several λ exceeds 1/α at some n with probability at most α (Ville 1939). The bound is
the rate at which the mixture is 1/α (Robbins 1970; Howard, Ramdas, McAuliffe and Sekhon 2021, section 3.1).
"""

from __future__ import annotations

import math
from functools import lru_cache

# e^λ of the mixtures with their weights. Below 1 they look for rates under the bound; 0 alone is Clopper and Pearson's
# bound for no error at all, which most certificates rest on. Above 1 they look for rates over the bound.
_UNDER = ((0.0, 0.4), *((ratio, 0.06) for ratio in (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)))
_OVER = tuple((ratio, 0.1) for ratio in (1.1, 1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0))
_STEPS = 60


@lru_cache(maxsize=1024)
def upper_bound(errors: int, audits: int, confidence: float) -> float:
    """The mean chance of being wrong is at most this, with `confidence`, whenever one looks. 1 for no audits."""
    if not audits:
        return 1.0
    limit = -math.log1p(-confidence)
    low, high = errors / audits, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _log_mixture(_UNDER, errors, audits, middle) < limit:
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=1024)
def lower_bound(errors: int, audits: int, confidence: float) -> float:
    """The mean chance of being wrong is at least this, with `confidence`, whenever one looks. 0 for no errors."""
    if not errors:
        return 0.0
    limit = -math.log1p(-confidence)
    low, high = 0.0, errors / audits
    for _ in range(_STEPS):
        middle = (low + high) / 2
        if _log_mixture(_OVER, errors, audits, middle) < limit:
            high = middle
        else:
            low = middle
    return low


def _log_mixture(tilts: tuple[tuple[float, float], ...], errors: int, audits: int, rate: float) -> float:
    """ln of the mixture's value if the mean chance were `rate`; monotone in it."""
    terms = []
    for ratio, weight in tilts:
        if ratio == 0.0 and errors:
            continue
        gained = errors * math.log(ratio) if errors else 0.0
        # 1 - rate + rate * ratio is 0 where rate is 1 and the ratio 0: no such audits are possible.
        kept = 1.0 + rate * (ratio - 1.0)
        if kept <= 0.0:
            return math.inf
        terms.append(math.log(weight) + gained - audits * math.log(kept))
    top = max(terms)
    return top + math.log(sum(math.exp(term - top) for term in terms))


class Alarm:
    """A sum that grows with every wrong audit and shrinks with every right one; it tells when a rate has risen.

    Page's (1954) cumulative sum for a rate of `TIMES` times the promise. While the rate stays within the promise, the
    mean number of audits between false alarms is at least `exp(HEIGHT)` (Lorden 1971), which is 2,000. Some five
    wrong audits close together set it off, however long the good times before them were.
    """

    TIMES = 4.0
    HEIGHT = math.log(2000.0)

    def __init__(self, promise: float, level: float = 0.0) -> None:
        worse = min(self.TIMES * promise, (1.0 + promise) / 2)
        self._wrong = math.log(worse / promise)
        self._right = math.log((1.0 - worse) / (1.0 - promise))
        self.level = level

    @property
    def most_wrong_in_a_row(self) -> int:
        """After so many wrong audits in a row it is set off, whatever was before."""
        return math.ceil(self.HEIGHT / self._wrong)

    def add(self, wrong: bool) -> bool:
        """Count one audit; True when the alarm is set off."""
        self.level = max(0.0, self.level + (self._wrong if wrong else self._right))
        return self.level >= self.HEIGHT
