"""One address of a backend: where it is, how it does, and what the operator has said about it."""

from __future__ import annotations

import dataclasses
from typing import Literal

from backends.balance import Latency
from backends.breaker import Breaker, State
from backends.endpoint import Endpoint
from backends.placement.place import USUAL, Place


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica as health pages and metrics show it. `back_in_s` is 0 unless it is cooling, limited or closed: outside
    its hours, so that it finishes what it has and gets nothing new."""

    base_url: str
    state: State | Literal["closed"]
    outstanding: int
    failures: int  # in a row
    requests_total: int
    failures_total: int
    back_in_s: float
    last_error: str | None
    work_tokens: int  # that its requests still take, where there is a choice between replicas


class Replica:
    """Changed by its pool only; `work` by the requests that it has."""

    __slots__ = (
        "base_url",
        "breaker",
        "endpoint",
        "failures_total",
        "last_error",
        "latency",
        "outstanding",
        "pace",
        "place",
        "requests_total",
        "work",
    )

    def __init__(self, endpoint: Endpoint, place: Place = USUAL) -> None:
        self.endpoint = endpoint
        self.place = place
        self.base_url = endpoint.base_url
        self.breaker = Breaker()
        self.latency = Latency()
        self.pace = Latency()  # seconds per token that had to be computed before an answer could begin
        self.outstanding = 0
        self.work = 0.0  # tokens that its requests still take, where they say so
        self.requests_total = 0
        self.failures_total = 0
        self.last_error: str | None = None

    @property
    def closed(self) -> bool:
        """Whether it is outside its hours: it finishes what it has, and gets nothing new."""
        hours = self.place.hours
        return hours is not None and not hours.open()

    def opens_in_s(self) -> float:
        """Seconds until its hours begin; 0 within them."""
        return 0.0 if self.place.hours is None else self.place.hours.opens_in_s()

    def seen(self, now: float) -> ReplicaState:
        breaker = self.breaker
        return ReplicaState(
            base_url=self.base_url,
            state="closed" if self.closed else breaker.state(now),
            outstanding=self.outstanding,
            failures=breaker.failures,
            requests_total=self.requests_total,
            failures_total=self.failures_total,
            back_in_s=max(0.0, max(breaker.cooled_until, breaker.limited_until) - now, self.opens_in_s()),
            last_error=self.last_error,
            work_tokens=round(self.work),
        )
