"""The limits and budgets of policies in a simulation: the gateway's own counters, with the recording's clock.

Keys' own limits and those of teams are not counted here: what is on record has passed them. A request that would wait
for its turn is let in, and named; how long it would wait is not told.
"""

from __future__ import annotations

import heapq
from collections.abc import Coroutine, Mapping
from typing import Any, Final, TypeVar

from gateway.access.counters_memory import MemoryLimiter
from gateway.access.limits import Admission, BudgetExhausted, Refused, Scope
from gateway.access.policy_scopes import budget_scope, ceilings_of
from policies.load import Policy
from policies.simulation.recorded import Recorded

_Result = TypeVar("_Result")
_HOLD_S: Final = 86_400.0
_QUICK_MS: Final = 1.0


class ReplayedLimits:
    """Implements `policies.simulation.recorded.Gate`. `spent`: by policy, what the month had cost when it begins."""

    def __init__(self, begins_ms: int, spent: Mapping[str, int]) -> None:
        self._now_s = begins_ms / 1000
        self._limiter = MemoryLimiter(
            {f"policy:{name}": amount for name, amount in spent.items()},
            clock=lambda: self._now_s,
            wall_clock=lambda: self._now_s,
        )
        self._ends: list[tuple[float, str, int, int]] = []

    def ask(self, request: Recorded, policy: Policy, cost_nanousd: int, *, hit: bool) -> str | None:
        budget, ceilings = budget_scope(policy, enforced=True), ceilings_of(policy, request.facts.key)
        scopes = (budget,) if ceilings is None else (budget, ceilings)
        tokens = 0 if hit else request.tokens.input + request.tokens.output
        self._move_to(request.ts_ms / 1000)
        if not _limited(scopes) and policy.budget is None:
            return None
        admission = Admission(request.request_id, scopes, tokens, cost_nanousd, _HOLD_S)
        stopped: str | None = None
        try:
            _at_once(self._limiter.admit(admission))
        except BudgetExhausted:
            if policy.budget is None or policy.budget.when_exhausted != "queue":
                return "budget"
            stopped = "queue"
        except Refused as refused:
            if refused.limit != "parallel":
                return refused.limit
            stopped = "parallel"
        if stopped is not None:
            self._limiter.restore(admission)
        ends = self._now_s + max(request.duration_ms or 0.0, _QUICK_MS) / 1000
        heapq.heappush(self._ends, (ends, request.request_id, tokens, cost_nanousd))
        return stopped

    def budget_used(self, policy: Policy) -> float | None:
        if policy.budget is None:
            return None
        scope = budget_scope(policy, enforced=False)
        return _at_once(self._limiter.budget_used([scope]))[scope.id]

    def _move_to(self, now_s: float) -> None:
        """Have the requests end that end until then."""
        while self._ends and self._ends[0][0] <= now_s:
            ends, hold_id, tokens, cost = heapq.heappop(self._ends)
            self._now_s = max(self._now_s, ends)
            _at_once(self._limiter.settle(hold_id, tokens, cost))
        self._now_s = max(self._now_s, now_s)


def _limited(scopes: tuple[Scope, ...]) -> bool:
    return any(
        value is not None
        for scope in scopes
        for value in (scope.requests_per_minute, scope.tokens_per_minute, scope.parallel, scope.budget_nanousd)
    )


def _at_once(work: Coroutine[Any, Any, _Result]) -> _Result:
    """The result of a coroutine that waits for nothing: counters in memory never do."""
    try:
        work.send(None)
    except StopIteration as done:
        result: _Result = done.value
        return result
    raise RuntimeError("the counters waited for something")
