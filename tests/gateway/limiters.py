"""Limiters under test, on a clock that is moved by hand: the same tests hold for both kinds."""

from __future__ import annotations

import calendar
import itertools
from collections.abc import Mapping

import msgspec

from gateway.access.counters_memory import MemoryLimiter
from gateway.access.counters_redis import SCRIPT, Ids, RedisLimiter
from gateway.access.limits import Admission, Scope
from gateway.access.redis_channel import Channel

NOVEMBER_29 = calendar.timegm((2026, 11, 29, 0, 0, 0))
DECEMBER_1 = calendar.timegm((2026, 12, 1, 0, 0, 0))
AnyLimiter = MemoryLimiter | RedisLimiter
_prefixes = itertools.count()


class Clock:
    """Both clocks of a limiter, moved by hand. Makes limiters in memory, or on the Redis server at `redis_url`."""

    def __init__(self, redis_url: str | None = None) -> None:
        self.now = 1000.0
        self.wall = float(NOVEMBER_29)
        self._redis_url = redis_url
        self._channels: list[Channel] = []

    async def limiter(self, **spent: int) -> AnyLimiter:
        """One with `spent` nano-dollars of the keys of these names in the ledger, this month."""
        ledger = {f"key:{name}": amount for name, amount in spent.items()}
        if self._redis_url is None:
            return MemoryLimiter(ledger, clock=lambda: self.now, wall_clock=lambda: self.wall)
        channel = new_channel(self._redis_url)
        await channel.connect()
        self._channels.append(channel)
        this_month = 2026 * 12 + 10

        async def sums(month: int, before: str, without: Ids) -> Mapping[str, int]:
            return ledger if month == this_month else {}

        # All ids of these tests lie behind this cut. It stands from the start: else the ledger, which has no rows here,
        # would have to tell of requests that come before the first budget is asked for.
        limiter = RedisLimiter(channel, owner="tests", spent=sums, new_cut=lambda: " ", clock=lambda: self.wall)
        await limiter.seed()
        return limiter

    def pass_(self, seconds: float) -> None:
        self.now += seconds
        self.wall += seconds

    async def close(self) -> None:
        for channel in self._channels:
            await channel.aclose()


def new_channel(url: str, prefix: str | None = None, timeout_s: float = 30.0) -> Channel:
    """A channel with keys of its own. The long time-out is for busy machines: what is tested is not the time."""
    return Channel(url, SCRIPT, prefix or f"{{test-{next(_prefixes)}}}", timeout_s)


def scope(name: str = "a", **limits: int) -> Scope:
    return msgspec.convert({"id": f"key:{name}", **limits}, Scope)


def ask(hold: str, *scopes: Scope, tokens: int = 0, cost: int = 0, ttl_s: float = 900.0) -> Admission:
    return Admission(hold, scopes, tokens, cost, ttl_s)
