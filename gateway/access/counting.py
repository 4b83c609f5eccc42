"""The arithmetic of one scope, for every limiter: when there is room, what a refusal says, what a grant shows.

Plain functions over plain numbers. `counters_memory.py` keeps the numbers in this process, `counters_redis.py` gets
them from Redis; that both refuse the same requests with the same words is because both come here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final

import msgspec

from gateway.access.limits import (
    Admission,
    BudgetExhausted,
    Grant,
    LimitExceeded,
    LimitKind,
    Scope,
    ScopeStanding,
    Standing,
)
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
        if now_s != self.at_s:
            used = self.used - (now_s - self.at_s) * limit / 60.0
            self.used = used if used > 0.0 else 0.0
            self.at_s = now_s

    def excess(self, amount: int, now_s: float, limit: int) -> float:
        """How much too much `amount` would be now. More than a whole bucket waits for a full one and overdraws it."""
        self.drain(now_s, limit)
        return self.used + (amount if amount < limit else limit) - limit


class Counters(msgspec.Struct):
    """What one scope has used. `settled` and `held` are of the budget month `month`, in nano-dollars."""

    month: int
    requests: Bucket
    tokens: Bucket
    settled: int = 0
    held: int = 0
    parallel: int = 0


def check(scope: Scope, counters: Counters, admission: Admission, now_s: float, month_left_s: float) -> None:
    """Whether a request fits. Drains the buckets to `now_s` and takes nothing.

    Raises:
        LimitExceeded, BudgetExhausted: it does not.
    """
    if scope.parallel is not None and counters.parallel >= scope.parallel:
        most = _counted(scope.parallel, "request")
        label = scope.label or scope.id
        text = f"{label} allows {most} at a time; running now: {counters.parallel}. Try again when one has ended."
        raise LimitExceeded(scope.id, "parallel", SOON_S, text)
    # Draining in floats leaves dust; a millionth of a request is nobody's.
    limit = scope.requests_per_minute
    if limit is not None and (excess := counters.requests.excess(1, now_s, limit)) > DUST:
        raise _too_many(scope, "requests_per_minute", limit, excess, 1)
    limit = scope.tokens_per_minute
    if limit is not None and (excess := counters.tokens.excess(admission.tokens, now_s, limit)) > DUST:
        raise _too_many(scope, "tokens_per_minute", limit, excess, admission.tokens)
    if scope.budget_nanousd is not None:
        _check_budget(scope, scope.budget_nanousd, counters, admission.cost_nanousd, month_left_s)


def _too_many(scope: Scope, kind: LimitKind, limit: int, excess: float, amount: int) -> LimitExceeded:
    room = "the next one" if kind == "requests_per_minute" else f"the {amount} tokens of this request"
    wait = excess * 60.0 / limit
    most = _counted(limit, "request" if kind == "requests_per_minute" else "token")
    text = f"{scope.label or scope.id} allows {most} per minute; there is room for {room} in {wait:.1f} s."
    return LimitExceeded(scope.id, kind, wait, text)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _check_budget(scope: Scope, budget: int, counters: Counters, needed: int, month_left_s: float) -> None:
    settled, held = counters.settled, counters.held
    # A spent budget stops free requests too: their price may be unknown rather than nothing.
    if settled + held + needed <= budget and settled < budget:
        return
    text = f"{_budget(scope, budget, counters)}, this one needs ${format_usd(needed)}"
    if settled < budget and settled + needed <= budget:
        retry, text = SOON_S, f"{text}. Try again when one has ended."
    else:
        retry = max(SOON_S, month_left_s)
        text = f"{text}. {_advice(month_left_s)}"
    raise BudgetExhausted(scope.id, retry, text, budget=budget, settled=settled, held=held, needed=needed)


def check_raise(scope: Scope, counters: Counters, more_nanousd: int, month_left_s: float) -> None:
    """Whether a running request may set aside `more_nanousd` beyond what it holds.

    Raises:
        BudgetExhausted: it may not.
    """
    budget, settled, held = scope.budget_nanousd, counters.settled, counters.held
    if budget is None or more_nanousd <= 0 or settled + held + more_nanousd <= budget:
        return
    text = (
        f"{_budget(scope, budget, counters)}, and this answer needs ${format_usd(more_nanousd)} more. It ends here. "
        f"{_advice(month_left_s)}"
    )
    retry = SOON_S if settled + more_nanousd <= budget else max(SOON_S, month_left_s)
    raise BudgetExhausted(scope.id, retry, text, budget=budget, settled=settled, held=held, needed=more_nanousd)


def _advice(month_left_s: float) -> str:
    hours = max(1, math.ceil(month_left_s / 3600))
    begins = _counted(hours, "hour") if hours < 48 else _counted(hours // 24, "day")
    return f"Raise the budget, ask for fewer tokens, or wait for the next month (UTC), which begins in {begins}."


def _budget(scope: Scope, budget: int, counters: Counters) -> str:
    return (
        f"{scope.label or scope.id} has a monthly budget of ${format_usd(budget)}; ${format_usd(counters.settled)} is "
        f"spent, ${format_usd(counters.held)} is held for running requests"
    )


def grant(hold_id: str, taken: Sequence[tuple[Scope, Counters]]) -> Grant:
    """What an admitted request is told, from drained counters that it is taken from already."""
    return Grant(hold_id, partial(standing, taken), partial(budget_used, taken))


def standing(scopes: Iterable[tuple[Scope, Counters]], now_s: float | None = None) -> Standing:
    """Where a request's scopes stand, each kind by its tightest scope. Drains the buckets to `now_s`, if given."""
    requests: _State = _NO_LIMIT
    tokens: _State = _NO_LIMIT
    remaining_parallel = limit_parallel = None
    for scope, counters in scopes:
        if scope.requests_per_minute is not None:
            requests = _tightest(requests, scope.requests_per_minute, counters.requests, now_s)
        if scope.tokens_per_minute is not None:
            tokens = _tightest(tokens, scope.tokens_per_minute, counters.tokens, now_s)
        if (limit := scope.parallel) is not None:
            left = limit - counters.parallel if limit > counters.parallel else 0
            if limit_parallel is None or (left, limit) < (remaining_parallel, limit_parallel):
                remaining_parallel, limit_parallel = left, limit
    remaining_requests, reset_requests, limit_requests = requests
    remaining_tokens, reset_tokens, limit_tokens = tokens
    return Standing(
        limit_requests=limit_requests,
        remaining_requests=remaining_requests,
        reset_requests_s=reset_requests,
        limit_tokens=limit_tokens,
        remaining_tokens=remaining_tokens,
        reset_tokens_s=reset_tokens,
        limit_parallel=limit_parallel,
        remaining_parallel=remaining_parallel,
    )


def scope_standing(scope: Scope, counters: Counters, now_s: float) -> ScopeStanding:
    """Where one scope stands by itself. Drains its buckets to `now_s`."""
    return ScopeStanding(
        scope=scope,
        standing=standing([(scope, counters)], now_s),
        settled_nanousd=counters.settled,
        held_nanousd=counters.held,
        running=counters.parallel,
    )


# Remaining, seconds until full, limit: in the order that makes the tightest the smallest.
_State = tuple[int, float, int] | tuple[None, None, None]
_NO_LIMIT: Final = (None, None, None)


def _tightest(known: _State, limit: int, bucket: Bucket, now_s: float | None) -> _State:
    if now_s is not None:
        bucket.drain(now_s, limit)
    left = limit - bucket.used + DUST
    state = int(left) if left > 0 else 0, bucket.used * 60.0 / limit, limit
    return state if known[0] is None or state < known else known


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
