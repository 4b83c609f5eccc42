"""The arithmetic of one scope, for every limiter: when there is room, what a refusal says, what a grant shows.

Plain functions over plain numbers. `counters_memory.py` keeps the numbers in this process, `counters_redis.py` gets
them from Redis; that both refuse the same requests with the same words is because both come here.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Final

import msgspec

from gateway.access.limits import Admission, BudgetExhausted, Grant, LimitExceeded, LimitKind, Scope
from gateway.ledger.money import format_usd

# When running requests stand in the way, nobody knows when one ends.
SOON_S: Final = 1.0
DUST: Final = 1e-6
# How long an expired hold can still be settled: longer than any request may run.
LATE_SETTLE_S: Final = 86_400.0


class Bucket(msgspec.Struct):
    """A leaking level: `used` drains by `limit` per minute. Negative room is debt."""

    used: float = 0.0
    at_s: float = 0.0

    def drain(self, now_s: float, limit: int) -> None:
        self.used = max(0.0, self.used - (now_s - self.at_s) * limit / 60.0)
        self.at_s = now_s


class Counters(msgspec.Struct):
    """What one scope has used. `settled` and `held` are of the budget month `month`, in nano-dollars."""

    month: int
    requests: Bucket
    tokens: Bucket
    settled: int = 0
    held: int = 0
    parallel: int = 0
    tokens_limit: int | None = None


def check(scope: Scope, counters: Counters, admission: Admission, now_s: float, month_left_s: float) -> None:
    """Whether a request fits. Drains the buckets to `now_s` and takes nothing.

    Raises:
        LimitExceeded, BudgetExhausted: it does not.
    """
    if scope.parallel is not None and counters.parallel >= scope.parallel:
        text = f"{scope.id} has {counters.parallel} requests running, its limit is {scope.parallel}."
        raise LimitExceeded(scope.id, "parallel", SOON_S, text)
    if scope.requests_per_minute is not None:
        counters.requests.drain(now_s, scope.requests_per_minute)
        _check_bucket(scope.id, "requests_per_minute", counters.requests, scope.requests_per_minute, 1)
    if scope.tokens_per_minute is not None:
        counters.tokens.drain(now_s, scope.tokens_per_minute)
        _check_bucket(scope.id, "tokens_per_minute", counters.tokens, scope.tokens_per_minute, admission.tokens)
    if scope.budget_nanousd is not None:
        _check_budget(scope.id, scope.budget_nanousd, counters, admission.cost_nanousd, month_left_s)


def _check_bucket(scope_id: str, kind: LimitKind, bucket: Bucket, limit: int, amount: int) -> None:
    # More than a whole bucket waits for a full one, then overdraws it.
    excess = bucket.used + min(amount, limit) - limit
    # Draining in floats leaves dust; a millionth of a request is nobody's.
    if excess > DUST:
        unit = "request" if kind == "requests_per_minute" else "tokens"
        wait = excess * 60.0 / limit
        text = f"{scope_id} allows {limit} {kind.replace('_', ' ')}; room for {amount} {unit} in {wait:.1f} s."
        raise LimitExceeded(scope_id, kind, wait, text)


def _check_budget(scope_id: str, budget: int, counters: Counters, needed: int, month_left_s: float) -> None:
    settled, held = counters.settled, counters.held
    # A spent budget stops free requests too: their price may be unknown rather than nothing.
    if settled + held + needed <= budget and settled < budget:
        return
    amounts = f"${format_usd(settled)} is spent, ${format_usd(held)} is held for running requests"
    text = f"{scope_id} has a monthly budget of ${format_usd(budget)}; {amounts}, this one needs ${format_usd(needed)}"
    if settled < budget and settled + needed <= budget:
        retry, text = SOON_S, f"{text}. Try again when one has ended."
    else:
        retry = max(SOON_S, month_left_s)
        text = f"{text}. Raise the budget, ask for fewer tokens, or wait for the next month."
    raise BudgetExhausted(scope_id, retry, text, budget=budget, settled=settled, held=held, needed=needed)


def grant(hold_id: str, taken: list[tuple[Scope, Counters]]) -> Grant:
    """What the client of an admitted request is told, from the counters after it was admitted."""
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
        budget_used=budget_used(taken),
    )


def _state(limit: int, bucket: Bucket) -> tuple[int, float, int]:
    """Remaining, seconds until full, limit: in the order that makes the tightest the smallest."""
    return max(0, int(limit - bucket.used + DUST)), bucket.used * 60.0 / limit, limit


def budget_used(scopes: Iterable[tuple[Scope, Counters]]) -> dict[str, float]:
    """Used share of the budget of each scope that has one."""
    return {
        scope.id: (counters.settled + counters.held) / scope.budget_nanousd if scope.budget_nanousd else 1.0
        for scope, counters in scopes
        if scope.budget_nanousd is not None
    }


def month_of(wall_s: float) -> tuple[int, float]:
    """The UTC calendar month of a moment, as a number that grows by one a month, and when it ends."""
    today = datetime.fromtimestamp(wall_s, UTC)
    month = today.year * 12 + today.month - 1
    year, following = divmod(month + 1, 12)
    return month, datetime(year, following + 1, 1, tzinfo=UTC).timestamp()
