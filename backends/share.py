"""Extra calls as a share of ordinary ones: what keeps retries and hedges from multiplying an outage or a bill.

It promises that over any stretch of time extra calls are at most `share` of the ordinary calls in it, plus `reserve`
and `per_second`: the allowance that lets a quiet backend be asked again at all. A token bucket, filled by traffic.
"""

from __future__ import annotations

import time


class Share:
    """Call `earn` for every ordinary call, `spend` before an extra one.

    `share` 0 forbids extra calls altogether, whatever the reserve.
    """

    __slots__ = ("_at", "_balance", "_per_second", "_reserve", "_share", "refused", "spent")

    def __init__(self, share: float, *, reserve: float, per_second: float = 0.0, full: bool = True) -> None:
        self._share = share
        self._reserve = max(1.0, reserve)
        self._per_second = per_second
        self._balance = self._reserve if full else 0.0
        self._at = time.monotonic()
        self.spent = 0  # extra calls made
        self.refused = 0  # extra calls that there was no share for

    def earn(self) -> None:
        """An ordinary call is made."""
        self._balance += self._share
        if self._balance > self._reserve:
            self._balance = self._reserve

    def spend(self) -> bool:
        """Whether an extra call may be made; if so it counts."""
        now = time.monotonic()
        self._balance = min(self._balance + (now - self._at) * self._per_second, self._reserve)
        self._at = now
        # A whole call is often the sum of many shares: ten times a tenth must be enough.
        if self._share <= 0 or self._balance < 1.0 - 1e-9:
            self.refused += 1
            return False
        self._balance -= 1.0
        self.spent += 1
        return True
