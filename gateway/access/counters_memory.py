"""The `Limiter` of a single gateway process: plain numbers in memory, taken without an await in between.

Budgets start from the ledger's sum of the month and then follow every settle, so that `settled` equals the ledger at
all times. Holds die with the process; what their attempts cost comes back from the journal as ledger rows.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Final

import msgspec

from gateway.access.holds import Hold
from gateway.access.limits import Admission, BudgetExhausted, Grant, LimitExceeded, LimitKind, Scope
from gateway.ledger.money import format_usd

# When running requests stand in the way, nobody knows when one ends.
_SOON_S: Final = 1.0
_DUST: Final = 1e-6
# How long an expired hold can still be settled: longer than any request may run.
LATE_SETTLE_S: Final = 86_400.0


class _Bucket(msgspec.Struct):
    """A leaking level: `used` drains by `limit` per minute. Negative room is debt."""

    used: float = 0.0
    at_s: float = 0.0

    def drain(self, now_s: float, limit: int) -> None:
        self.used = max(0.0, self.used - (now_s - self.at_s) * limit / 60.0)
        self.at_s = now_s


class _Counters(msgspec.Struct):
    """What one scope has used. `settled` and `held` are of the budget month `month`, in nano-dollars."""

    month: int
    requests: _Bucket
    tokens: _Bucket
    settled: int = 0
    held: int = 0
    parallel: int = 0
    tokens_limit: int | None = None


class MemoryLimiter:
    """Counters of this process. `spent` is the ledger's sum of the running month by scope id."""

    def __init__(
        self,
        spent: Mapping[str, int] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._scopes: dict[str, _Counters] = {}
        self._holds: dict[str, Hold] = {}
        self._grants: dict[str, Grant] = {}
        self._expiries: list[tuple[float, str]] = []
        self._month = 0
        self._month_ends_at = 0.0
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
        taken = [(scope, self._counters(scope.id)) for scope in admission.scopes]
        for scope, counters in taken:
            self._check(scope, counters, admission, now)
        for scope, counters in taken:
            counters.requests.used += scope.requests_per_minute is not None
            counters.tokens.used += admission.tokens if scope.tokens_per_minute is not None else 0
            counters.tokens_limit = scope.tokens_per_minute
            counters.parallel += 1
            counters.held += admission.cost_nanousd
        expires = now + admission.ttl_s
        ids = tuple(scope.id for scope in admission.scopes)
        self._holds[admission.hold_id] = Hold(
            admission.hold_id, ids, admission.tokens, admission.cost_nanousd, self._month, expires
        )
        heapq.heappush(self._expiries, (expires, admission.hold_id))
        grant = self._grants[admission.hold_id] = _grant(admission.hold_id, taken)
        return grant

    async def settle(self, hold_id: str, tokens: int, cost_nanousd: int) -> bool:
        if tokens < 0 or cost_nanousd < 0:
            raise ValueError(f"hold {hold_id} cannot be settled with {tokens} tokens, {cost_nanousd} nano-dollars")
        now = self._clock()
        self._reclaim(now)
        hold = self._holds.pop(hold_id, None)
        if hold is None:
            return False
        self._grants.pop(hold_id, None)
        if len(self._expiries) > 1024 + 2 * len(self._holds):
            # Settled holds leave their expiries behind: sweep before they outnumber the living.
            self._expiries = [(other.expires_s, other.hold_id) for other in self._holds.values()]
            heapq.heapify(self._expiries)
        for counters in map(self._counters, hold.scope_ids):
            if counters.tokens_limit is not None:
                counters.tokens.drain(now, counters.tokens_limit)
                counters.tokens.used = max(0.0, counters.tokens.used + tokens - hold.tokens)
            if hold.state == "open":
                counters.parallel -= 1
            if hold.month == counters.month:
                counters.settled += cost_nanousd
                if hold.state == "open":
                    counters.held -= hold.cost_nanousd
        return True

    async def touch(self, hold_id: str, ttl_s: float, tokens: int = 0, cost_nanousd: int = 0) -> bool:
        now = self._clock()
        self._reclaim(now)
        hold = self._holds.get(hold_id)
        if hold is None or hold.state != "open":
            return False
        hold.expires_s = max(hold.expires_s, now + ttl_s)
        more_tokens, more_cost = max(0, tokens - hold.tokens), max(0, cost_nanousd - hold.cost_nanousd)
        for counters in map(self._counters, hold.scope_ids):
            if counters.tokens_limit is not None:
                counters.tokens.used += more_tokens
            if hold.month == counters.month:
                counters.held += more_cost
        hold.tokens += more_tokens
        hold.cost_nanousd += more_cost
        return True

    async def budget_used(self, scopes: Iterable[Scope]) -> dict[str, float]:
        self._reclaim(self._clock())
        return _budget_used([(scope, self._counters(scope.id)) for scope in scopes])

    def balance(self, scope_id: str) -> tuple[int, int]:
        """What a scope has settled and what is held, this month, in nano-dollars."""
        self._reclaim(self._clock())
        counters = self._counters(scope_id)
        return counters.settled, counters.held

    def _check(self, scope: Scope, counters: _Counters, admission: Admission, now: float) -> None:
        if scope.parallel is not None and counters.parallel >= scope.parallel:
            text = f"{scope.id} has {counters.parallel} requests running, its limit is {scope.parallel}."
            raise LimitExceeded(scope.id, "parallel", _SOON_S, text)
        if scope.requests_per_minute is not None:
            counters.requests.drain(now, scope.requests_per_minute)
            _check_bucket(scope.id, "requests_per_minute", counters.requests, scope.requests_per_minute, 1)
        if scope.tokens_per_minute is not None:
            counters.tokens.drain(now, scope.tokens_per_minute)
            _check_bucket(scope.id, "tokens_per_minute", counters.tokens, scope.tokens_per_minute, admission.tokens)
        if scope.budget_nanousd is not None:
            self._check_budget(scope.id, scope.budget_nanousd, counters, admission.cost_nanousd)

    def _check_budget(self, scope_id: str, budget: int, counters: _Counters, needed: int) -> None:
        settled, held = counters.settled, counters.held
        # A spent budget stops free requests too: their price may be unknown rather than nothing.
        if settled + held + needed <= budget and settled < budget:
            return
        amounts = f"${format_usd(settled)} is spent, ${format_usd(held)} is held for running requests"
        text = (
            f"{scope_id} has a monthly budget of ${format_usd(budget)}; {amounts}, this one needs ${format_usd(needed)}"
        )
        if settled < budget and settled + needed <= budget:
            retry, text = _SOON_S, f"{text}. Try again when one has ended."
        else:
            retry = max(_SOON_S, self._month_ends_at - self._wall_clock())
            text = f"{text}. Raise the budget, ask for fewer tokens, or wait for the next month."
        raise BudgetExhausted(scope_id, retry, text, budget=budget, settled=settled, held=held, needed=needed)

    def _counters(self, scope_id: str) -> _Counters:
        counters = self._scopes.get(scope_id)
        if counters is None:
            now = self._clock()
            counters = self._scopes[scope_id] = _Counters(self._month, _Bucket(at_s=now), _Bucket(at_s=now))
        if counters.month != self._month:
            # A new month: holds of the old one settle into the old one, as their ledger rows do.
            counters.month, counters.settled, counters.held = self._month, 0, 0
        return counters

    def _reclaim(self, now: float) -> None:
        """Give back holds that nobody settled in time, and turn the month when it is time."""
        if self._wall_clock() >= self._month_ends_at:
            self._turn_month()
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
        for counters in map(self._counters, hold.scope_ids):
            counters.parallel -= 1
            if hold.month == counters.month:
                counters.held -= hold.cost_nanousd
        self._grants.pop(hold.hold_id, None)
        self.expired_holds += 1
        hold.state, hold.expires_s = "expired", now + LATE_SETTLE_S
        heapq.heappush(self._expiries, (hold.expires_s, hold.hold_id))

    def _turn_month(self) -> None:
        today = datetime.fromtimestamp(self._wall_clock(), UTC)
        self._month = today.year * 12 + today.month - 1
        year, month = divmod(self._month + 1, 12)
        self._month_ends_at = datetime(year, month + 1, 1, tzinfo=UTC).timestamp()


def _check_bucket(scope_id: str, kind: LimitKind, bucket: _Bucket, limit: int, amount: int) -> None:
    # More than a whole bucket waits for a full one, then overdraws it.
    excess = bucket.used + min(amount, limit) - limit
    # Draining in floats leaves dust; a millionth of a request is nobody's.
    if excess > _DUST:
        unit = "request" if kind == "requests_per_minute" else "tokens"
        wait = excess * 60.0 / limit
        text = f"{scope_id} allows {limit} {kind.replace('_', ' ')}; room for {amount} {unit} in {wait:.1f} s."
        raise LimitExceeded(scope_id, kind, wait, text)


def _grant(hold_id: str, taken: list[tuple[Scope, _Counters]]) -> Grant:
    requests = [_state(limit, c.requests) for s, c in taken if (limit := s.requests_per_minute) is not None]
    tokens = [_state(limit, c.tokens) for s, c in taken if (limit := s.tokens_per_minute) is not None]
    remaining_requests, reset_requests, limit_requests = min(requests, default=(None, None, None))
    remaining_tokens, reset_tokens, limit_tokens = min(tokens, default=(None, None, None))
    return Grant(
        hold_id=hold_id,
        limit_requests=limit_requests,
        remaining_requests=remaining_requests,
        reset_requests_s=reset_requests,
        limit_tokens=limit_tokens,
        remaining_tokens=remaining_tokens,
        reset_tokens_s=reset_tokens,
        budget_used=_budget_used(taken),
    )


def _state(limit: int, bucket: _Bucket) -> tuple[int, float, int]:
    """Remaining, seconds until full, limit: in the order that makes the tightest the smallest."""
    return max(0, int(limit - bucket.used + _DUST)), bucket.used * 60.0 / limit, limit


def _budget_used(scopes: list[tuple[Scope, _Counters]]) -> dict[str, float]:
    return {
        scope.id: (counters.settled + counters.held) / scope.budget_nanousd if scope.budget_nanousd else 1.0
        for scope, counters in scopes
        if scope.budget_nanousd is not None
    }
