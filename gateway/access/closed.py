"""Scopes that have used up their requests per minute, as this process has learnt: until then nothing needs to be read.

A limiter that refuses says exactly when there is room again, and nothing makes it sooner but another limit. So a
request that comes before can be refused by its key alone, before its body is read, without asking the limiter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from gateway.access.limits import LimitExceeded, Refused, Scope, Standing

_SWEEP_AT = 4096


class Closed:
    """What was refused, by scope and limit: a limit that is changed is another one, of which nothing is known."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[tuple[str, int], float] = {}

    def learn(self, scopes: Sequence[Scope], refused: Refused) -> None:
        """A limiter refused a request against these scopes."""
        if refused.limit != "requests_per_minute":
            return
        now = self._clock()
        if len(self._until) >= _SWEEP_AT:
            self._until = {known: until for known, until in self._until.items() if until > now}
        for scope in scopes:
            if scope.id == refused.scope and scope.requests_per_minute is not None:
                self._until[scope.id, scope.requests_per_minute] = now + refused.retry_after_s

    def check(self, scopes: Sequence[Scope]) -> None:
        """Whether a request against these scopes may pass, for all that is known.

        Raises:
            LimitExceeded: it may not.
        """
        if not self._until:
            return
        for scope in scopes:
            limit = scope.requests_per_minute
            if limit is None or (until := self._until.get((scope.id, limit))) is None:
                continue
            left_s = until - self._clock()
            if left_s <= 0:
                del self._until[scope.id, limit]
                continue
            most = f"{limit} request{'s' if limit > 1 else ''}"
            text = f"{scope.label or scope.id} allows {most} per minute; there is room for the next one in"
            error = LimitExceeded(scope.id, "requests_per_minute", left_s, f"{text} {left_s:.1f} s.")
            error.standing = Standing(
                limit_requests=limit, remaining_requests=0, reset_requests_s=_reset_s(left_s, limit)
            )
            raise error


def _reset_s(left_s: float, limit: int) -> float:
    """Until the bucket is full: it has room for one after `left_s`, and gains one every `60 / limit` seconds."""
    return left_s + (limit - 1) * 60.0 / limit
