"""The `Limiter` of a single gateway process: plain numbers in memory, taken without an await in between.

Budgets start from the ledger's sum of the month and then follow every settle, so that `settled` equals the ledger at
all times. Holds die with the process; what their attempts cost comes back from the journal as ledger rows.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping

from gateway.access.counting import (
    LATE_SETTLE_S,
    Bucket,
    Counters,
    budget_used,
    check,
    check_raise,
    grant,
    month_of,
    scope_standing,
    standing,
)
from gateway.access.holds import Hold
from gateway.access.limits import Admission, Grant, Refused, Scope, ScopeStanding, Standing


class MemoryLimiter:
    """Counters of this process. `spent` is the ledger's sum of the running month by scope id."""

    degraded = False  # nothing that it depends on can be away

    def __init__(
        self,
        spent: Mapping[str, int] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._scopes: dict[str, Counters] = {}
        self._holds: dict[str, Hold] = {}
        self._grants: dict[str, Grant] = {}
        self._expiries: list[tuple[float, str]] = []
        self._month = 0
        self._month_ends_at = 0.0
        self._month_left_s = 0.0  # when the clocks were last looked at
        self.expired_holds = 0
        self._turn_month()
        for scope, amount in (spent or {}).items():
            self._counters(scope).settled = amount

    @property
    def open_holds(self) -> int:
        return len(self._grants)

    async def admit(self, admission: Admission) -> Grant:
        now = self._clock()
        self._reclaim(now)
        if admission.hold_id in self._holds:
            earlier = self._grants.get(admission.hold_id)
            if earlier is None:
                raise ValueError(f"hold {admission.hold_id} has expired; a new attempt needs a new hold")
            return earlier
        if admission.tokens < 0 or admission.cost_nanousd < 0:
            raise ValueError(f"a hold needs amounts >= 0: {admission}")
        taken = self._with_counters(admission.scopes)
        try:
            for scope, counters in taken:
                check(scope, counters, admission, now, self._month_left_s)
        except Refused as refused:
            refused.standing = standing(taken, now)
            raise
        return self._take(admission, taken, now)

    def restore(self, admission: Admission) -> None:
        """Count a request that runs already, whatever the limits say. Nothing happens when it is counted."""
        now = self._clock()
        self._reclaim(now)
        if admission.hold_id not in self._holds:
            self._take(admission, self._with_counters(admission.scopes), now)

    def _take(self, admission: Admission, taken: list[tuple[Scope, Counters]], now: float) -> Grant:
        for scope, counters in taken:
            if scope.requests_per_minute is not None:
                counters.requests.used += 1
            if scope.tokens_per_minute is not None:
                counters.tokens.used += admission.tokens
            counters.parallel += 1
            counters.held += admission.cost_nanousd
        expires = now + admission.ttl_s
        self._holds[admission.hold_id] = Hold(
            admission.hold_id,
            taken,
            admission.tokens,
            admission.cost_nanousd,
            self._month,
            expires,
            admission.unlimited,
        )
        heapq.heappush(self._expiries, (expires, admission.hold_id))
        granted = self._grants[admission.hold_id] = grant(admission.hold_id, taken)
        return granted

    async def settle(self, hold_id: str, tokens: int, cost_nanousd: int) -> Standing | None:
        if tokens < 0 or cost_nanousd < 0:
            raise ValueError(f"hold {hold_id} cannot be settled with {tokens} tokens, {cost_nanousd} nano-dollars")
        now = self._clock()
        self._reclaim(now)
        hold = self._holds.pop(hold_id, None)
        if hold is None:
            return None
        self._grants.pop(hold_id, None)
        if len(self._expiries) > 1024 + 2 * len(self._holds):
            # Settled holds leave their expiries behind: sweep before they outnumber the living.
            self._expiries = [(other.expires_s, other.hold_id) for other in self._holds.values()]
            heapq.heapify(self._expiries)
        taken = hold.taken
        was_open, this_month = hold.state == "open", hold.month == self._month
        for scope, counters in taken:
            if scope.tokens_per_minute is not None:
                bucket = counters.tokens
                bucket.drain(now, scope.tokens_per_minute)
                used = bucket.used + tokens - hold.tokens
                bucket.used = used if used > 0.0 else 0.0
            if was_open:
                counters.parallel -= 1
            if this_month:
                counters.settled += cost_nanousd
                if was_open:
                    counters.held -= hold.cost_nanousd
        if this_month:
            for scope_id in hold.unlimited:
                counters = self._scopes.get(scope_id) or self._counters(scope_id)
                counters.settled += cost_nanousd
        return standing(taken, now)

    async def touch(self, hold_id: str, ttl_s: float, tokens: int = 0, cost_nanousd: int = 0) -> bool:
        now = self._clock()
        self._reclaim(now)
        hold = self._holds.get(hold_id)
        if hold is None or hold.state != "open":
            return False
        more_tokens, more_cost = max(0, tokens - hold.tokens), max(0, cost_nanousd - hold.cost_nanousd)
        taken = hold.taken
        for scope, counters in taken:
            if hold.month == counters.month:
                check_raise(scope, counters, more_cost, self._month_left_s)
        for scope, counters in taken:
            if scope.tokens_per_minute is not None:
                counters.tokens.drain(now, scope.tokens_per_minute)
                counters.tokens.used += more_tokens
            if hold.month == counters.month:
                counters.held += more_cost
        hold.expires_s = max(hold.expires_s, now + ttl_s)
        hold.tokens += more_tokens
        hold.cost_nanousd += more_cost
        return True

    async def budget_used(self, scopes: Iterable[Scope]) -> dict[str, float]:
        self._reclaim(self._clock())
        return budget_used(self._with_counters(scopes))

    async def standings(self, scopes: Iterable[Scope]) -> list[ScopeStanding]:
        """Where each scope stands now; nothing is taken."""
        self._reclaim(self._clock())
        seen = self._with_counters(scopes)
        now = self._clock()  # not before the counters that were made just now
        return [scope_standing(scope, counters, now) for scope, counters in seen]

    async def stop(self) -> None:
        """Nothing runs in the background, and nothing outlives the process."""

    async def balance(self, scope_id: str) -> tuple[int, int]:
        """What a scope has settled and what is held, this month, in nano-dollars."""
        self._reclaim(self._clock())
        counters = self._counters(scope_id)
        return counters.settled, counters.held

    def _with_counters(self, scopes: Iterable[Scope]) -> list[tuple[Scope, Counters]]:
        known = self._scopes
        return [(scope, known.get(scope.id) or self._counters(scope.id)) for scope in scopes]

    def _counters(self, scope_id: str) -> Counters:
        counters = self._scopes.get(scope_id)
        if counters is None:
            now = self._clock()
            counters = self._scopes[scope_id] = Counters(self._month, Bucket(at_s=now), Bucket(at_s=now))
        return counters

    def _reclaim(self, now: float) -> None:
        """Give back holds that nobody settled in time, and turn the month when it is time."""
        wall_s = self._wall_clock()
        if wall_s >= self._month_ends_at:
            self._turn_month()
        self._month_left_s = self._month_ends_at - wall_s
        while self._expiries and self._expiries[0][0] <= now:
            _, hold_id = heapq.heappop(self._expiries)
            hold = self._holds.get(hold_id)
            if hold is None:
                continue
            if hold.expires_s > now:
                heapq.heappush(self._expiries, (hold.expires_s, hold_id))
            elif hold.state == "open":
                self._expire(hold, now)
            else:
                del self._holds[hold_id]

    def _expire(self, hold: Hold, now: float) -> None:
        for _, counters in hold.taken:
            counters.parallel -= 1
            if hold.month == counters.month:
                counters.held -= hold.cost_nanousd
        self._grants.pop(hold.hold_id, None)
        self.expired_holds += 1
        hold.state, hold.expires_s = "expired", now + LATE_SETTLE_S
        heapq.heappush(self._expiries, (hold.expires_s, hold.hold_id))

    def _turn_month(self) -> None:
        self._month, self._month_ends_at = month_of(self._wall_clock())
        for counters in self._scopes.values():
            # Holds of the old month settle into the old one, as their ledger rows do.
            counters.month, counters.settled, counters.held = self._month, 0, 0
