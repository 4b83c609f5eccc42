"""Admission: what a request must pass before it runs, and what is settled after it. One call each.

A request is admitted against several scopes at once (its key, the project, team and organisation above it, its
policy): all of them, or none. What it may use is set aside as a hold; `settle` replaces the hold by what was used. One
process counts in `counters_memory.py`, several count together in `counters_redis.py`: the same `Limiter`, the same
tests.

Semantics, which every implementation keeps:

- requests and tokens per minute are token buckets that hold one minute's worth and refill evenly. So a burst of a
  full minute is allowed, and in any T seconds at most `limit * (1 + T / 60)` pass. Buckets need one number per scope,
  `retry_after_s` is exact, and clients know them from the vendors. A request larger than a whole bucket waits for a
  full one and then overdraws it: nobody is locked out, and the rate over time holds.
- tokens are taken by estimate and corrected by `settle`; a bucket may go below zero, which later requests wait out.
- parallel counts open holds.
- budgets are per UTC calendar month: `used = settled + held`. A request is admitted, and a hold raised by `touch`,
  while `used + what is added <= budget`. So spending passes a budget by at most the sum, over the requests then
  running, of what each used beyond its hold (docs/finance.md says how much that can be).
- a scope's limits are those that it had when the request was admitted, until its hold is settled.
- a scope without any limit takes nothing and refuses nobody, but what is spent there is counted: a budget that it is
  given later in the month starts from all that was spent in it. Requests that run at that moment count when they end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Literal, Protocol

import msgspec

LimitKind = Literal["requests_per_minute", "tokens_per_minute", "parallel", "concurrency", "budget"]


class Scope(msgspec.Struct, frozen=True):
    """Something with limits, such as `key:UUID`, `team:UUID` or `policy:NAME`. None is unlimited.

    `label` is what a refusal calls it, to stand before "allows" or "has", such as "Your key 'ci' (tl-abc…)".
    """

    id: str
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None
    budget_nanousd: int | None = None
    label: str = ""


class Admission(msgspec.Struct, frozen=True):
    """A request at the door. `tokens`: estimated input plus output. `cost_nanousd`: what to set aside for it.

    `unlimited` are ids of further scopes that it belongs to, none of which has a limit.
    """

    hold_id: str
    scopes: tuple[Scope, ...]
    tokens: int
    cost_nanousd: int
    ttl_s: float
    unlimited: tuple[str, ...] = ()


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a request's scopes stand: the tightest one of each kind of limit (None: no scope has such a limit).

    `reset_*_s` is the time until that bucket is full again.
    """

    limit_requests: int | None = None
    remaining_requests: int | None = None
    reset_requests_s: float | None = None
    limit_tokens: int | None = None
    remaining_tokens: int | None = None
    reset_tokens_s: float | None = None
    limit_parallel: int | None = None
    remaining_parallel: int | None = None

    def lines(self) -> list[str]:
        """The headers `x-ratelimit-*`, as clients of the OpenAI dialect know them: counts, and seconds such as
        `0.250s`."""
        lines: list[str] = []
        if self.limit_requests is not None:
            lines += (
                f"x-ratelimit-limit-requests: {self.limit_requests}",
                f"x-ratelimit-remaining-requests: {self.remaining_requests}",
                f"x-ratelimit-reset-requests: {self.reset_requests_s:.3f}s",
            )
        if self.limit_tokens is not None:
            lines += (
                f"x-ratelimit-limit-tokens: {self.limit_tokens}",
                f"x-ratelimit-remaining-tokens: {self.remaining_tokens}",
                f"x-ratelimit-reset-tokens: {self.reset_tokens_s:.3f}s",
            )
        if self.limit_parallel is not None:
            lines += (
                f"x-ratelimit-limit-parallel: {self.limit_parallel}",
                f"x-ratelimit-remaining-parallel: {self.remaining_parallel}",
            )
        return lines


class ScopeStanding(msgspec.Struct, frozen=True, kw_only=True):
    """Where one scope stands: `standing` as for a request of it alone, its month's money, how many requests run."""

    scope: Scope
    standing: Standing
    settled_nanousd: int
    held_nanousd: int
    running: int


class Grant:
    """An admitted request. Where its scopes stand with it is said as of its admission or of the moment when somebody
    asks, whichever the limiter knows: computed then, because a plain answer says how they stand once it is settled."""

    __slots__ = ("_budget_used", "_standing", "hold_id")

    def __init__(
        self,
        hold_id: str,
        standing: Callable[[], Standing] = Standing,
        budget_used: Callable[[], dict[str, float]] = dict,
    ) -> None:
        self.hold_id = hold_id
        self._standing = standing
        self._budget_used = budget_used

    @property
    def standing(self) -> Standing:
        """Where its scopes stand with it."""
        return self._standing()

    @property
    def budget_used(self) -> dict[str, float]:
        """The used share of each scope that has a budget, this hold included; it can exceed 1."""
        return self._budget_used()


class Refused(Exception):
    """Not admitted. Nothing was taken from any scope; after `retry_after_s` the same request can pass.

    Nobody knows when a running request will end: where only those stand in the way, it is a second. `standing` is
    where the scopes stand without the request; a limiter sets it.
    """

    standing = Standing()

    def __init__(self, scope: str, limit: LimitKind, retry_after_s: float, message: str) -> None:
        super().__init__(message)
        self.scope = scope
        self.limit = limit
        self.retry_after_s = retry_after_s
        self.message = message

    def headers(self) -> dict[str, str]:
        """`retry-after` in whole seconds, rounded up, and what refused: its level and limit, as in `team parallel`."""
        level = self.scope.partition(":")[0]
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s))), "x-tierline-limit": f"{level} {self.limit}"}


class LimitExceeded(Refused):
    """A rate limit says not now."""


class BudgetExhausted(Refused):
    """A monthly budget does not cover this request. Amounts in nano-dollars; `used = settled + held`.

    `retry_after_s` is a second when holds of running requests stand in the way, else the time until the next month.
    """

    def __init__(
        self, scope: str, retry_after_s: float, message: str, *, budget: int, settled: int, held: int, needed: int
    ) -> None:
        super().__init__(scope, "budget", retry_after_s, message)
        self.budget_nanousd = budget
        self.settled_nanousd = settled
        self.held_nanousd = held
        self.needed_nanousd = needed


class Limiter(Protocol):
    """What the life of a request needs. One call per admission, one per settle; both safe to repeat by `hold_id`."""

    async def admit(self, admission: Admission) -> Grant:
        """Take from every scope or from none. The same `hold_id` again returns its grant and takes nothing.

        Raises:
            LimitExceeded, BudgetExhausted: which scope, which limit, when to come back.
        """
        ...

    async def settle(self, hold_id: str, tokens: int, cost_nanousd: int) -> Standing | None:
        """Replace a hold by what was used. Late is fine, also after the hold expired.

        Returns:
            Where its scopes stand now, or None when there is nothing to settle: it was settled before, or never
            admitted.
        """
        ...

    async def touch(self, hold_id: str, ttl_s: float, tokens: int = 0, cost_nanousd: int = 0) -> bool:
        """Extend a hold, and raise it to at least these amounts. Tokens are raised whatever a bucket holds: it goes
        into debt, as by `settle`.

        Returns:
            False when the hold is gone: settled or expired.

        Raises:
            BudgetExhausted: a budget does not cover the raised hold; nothing was changed.
        """
        ...

    async def budget_used(self, scopes: Iterable[Scope]) -> dict[str, float]:
        """Used share of the monthly budget of each scope that has one, by scope id."""
        ...
