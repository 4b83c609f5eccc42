"""A replica's circuit breaker: closed while it is well, open while it is not, half-open for one request to find out.

It promises that a deadline once set only moves outwards until the replica has proven itself; that a crowd of requests
that fail together counts as one outage; and that a server which limits its rate is rested, not blamed.
"""

from __future__ import annotations

import random
from typing import Literal, get_args

from backends.attempt import AttemptFailed

FAILURES_TO_OPEN = 3  # in a row; a refused connection counts as that many
COOL_FIRST_S = 1.0
COOL_MAX_S = 30.0
LIMITED_FIRST_S = 1.0  # rest after a 429 that names no time
LIMITED_MAX_S = 60.0  # longest rest because of one Retry-After

# healthy: closed. cooling: open. trial: half-open. limited: resting because the server said so.
State = Literal["healthy", "trial", "cooling", "limited"]
STATES: tuple[State, ...] = get_args(State)


class Breaker:
    """Times are monotonic seconds, and handed in. `well` spares the usual case the clock: surely healthy."""

    __slots__ = ("cool_downs", "cooled_until", "failures", "limited_until", "rate_limited", "reached", "trial", "well")

    def __init__(self) -> None:
        self.failures = 0  # in a row
        self.cool_downs = 0  # since the last success
        self.cooled_until = 0.0
        self.limited_until = 0.0
        self.rate_limited = False  # why it rests: for its limit of requests; else because it was overloaded
        self.trial = False  # back from a cool-down, not yet proven
        self.reached = True  # its last failure was an answer, not silence
        self.well = True

    def state(self, now: float) -> State:
        if self.well:
            return "healthy"
        if now < self.cooled_until:
            return "cooling"
        if now < self.limited_until:
            return "limited"
        if self.trial:
            return "trial"
        self.well = True
        return "healthy"

    def succeeded(self) -> None:
        """It answered as it should, or refused for a good reason."""
        self.failures = self.cool_downs = 0
        self.cooled_until = 0.0
        self.trial = False
        self.reached = True

    def failed(self, failure: AttemptFailed, now: float) -> bool:
        """Count a failure and honour its Retry-After. True: the breaker has opened just now."""
        if failure.kind == "rate_limited" or failure.retry_after is not None:
            rest = LIMITED_FIRST_S if failure.retry_after is None else failure.retry_after
            self.limited_until = max(self.limited_until, now + min(rest, LIMITED_MAX_S))
            self.rate_limited = failure.kind == "rate_limited"
            self.well = False
        if failure.kind == "rate_limited":
            return False  # a healthy server that protects itself
        if now < self.cooled_until:
            return False  # one of those that were on their way when it went down: already counted
        self.failures += FAILURES_TO_OPEN if failure.kind == "connect" else 1
        self.reached = failure.reached
        if self.failures < FAILURES_TO_OPEN:
            return False
        pause = min(COOL_FIRST_S * 2**self.cool_downs, COOL_MAX_S) * random.uniform(0.8, 1.2)
        self.cooled_until = max(self.cooled_until, now + pause)
        self.cool_downs += 1
        self.trial = True
        self.well = False
        return True

    def probed(self, alive: bool, until: float) -> None:
        """What a probe of an open breaker found; one that is down stays out until `until` at least.

        A replica that answers probes but failed requests stays out for its whole cool-down: what was wrong with it does
        not show in a probe.
        """
        if not alive:
            self.cooled_until = max(self.cooled_until, until)
        elif not self.reached:
            self.cooled_until = 0.0
