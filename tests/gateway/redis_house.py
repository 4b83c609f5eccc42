"""Gateway processes that share their limits through Redis, with the ledger beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack

from gateway.access.counters_redis import Ids, RedisLimiter
from gateway.access.counters_shared import SharedLimiter
from gateway.access.limits import Admission, Scope
from gateway.access.redis_channel import RedisDown
from gateway.ledger.rows import new_id
from gateway.limiter import _request_id_of_now
from gateway.settings import WhenRedisIsDown
from tests.gateway.limiters import new_channel, scope
from tests.gateway.several import until

KEY = scope("a", budget_nanousd=1_000_000, parallel=100)


class Books:
    """The ledger, for limiters that know no database: a row for each request, of this month, key `a` and team `t`."""

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}
        self.slowness = 0  # turns of the event loop that a reading takes

    async def sums(self, month: int, before: str, without: Ids) -> Mapping[str, int]:
        seen = {request: cost for request, cost in self.rows.items() if request < before}
        for _ in range(self.slowness):
            await asyncio.sleep(0)
        early = await without()
        total = sum(cost for request, cost in seen.items() if request not in early)
        return {"key:a": total, "team:t": total}

    async def used_by(self, requests: Collection[str]) -> Mapping[str, tuple[int, int]]:
        return {request: (7, self.rows[request]) for request in requests if request in self.rows}

    def total(self) -> int:
        return sum(self.rows.values())


class House:
    """Gateway processes with one ledger and one Redis. Closes them at the end."""

    def __init__(self, url: str, prefix: str = "{house}", timeout_s: float = 30.0) -> None:
        self.books = Books()
        self.cuts: list[str] = []  # that were proposed
        self._url, self._prefix, self._timeout_s = url, prefix, timeout_s
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> House:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def redis(self, owner: str = "one") -> RedisLimiter:
        channel = new_channel(self._url, self._prefix, self._timeout_s)
        self._stack.push_async_callback(channel.aclose)
        return RedisLimiter(channel, owner=owner, spent=self.books.sums, new_cut=self._new_cut)

    def _new_cut(self) -> str:
        self.cuts.append(_request_id_of_now())
        return self.cuts[-1]

    async def gateway(
        self,
        owner: str = "one",
        processes: int = 1,
        when_down: WhenRedisIsDown = WhenRedisIsDown(),
        former_owners: Collection[str] = (),
    ) -> SharedLimiter:
        limiter = SharedLimiter(
            self.redis(owner),
            when_down,
            processes=processes,
            spent={"key:a": self.books.total()},
            used_by=self.books.used_by,
            former_owners=former_owners,
        )
        await limiter.start()
        self._stack.push_async_callback(limiter.stop)
        return limiter

    async def balance(self) -> tuple[int, int]:
        """Of key `a`, as Redis has it."""
        limiter = self.redis()
        await limiter.channel.connect()
        return await limiter.balance("key:a")

    async def expect(self, settled: int, held: int = 0) -> None:
        await until(lambda: self._is((settled, held)), f"the balance to be {settled} and {held}")

    async def _is(self, expected: tuple[int, int]) -> bool:
        try:
            return await self.balance() == expected
        except RedisDown:
            return False


def request(cost: int = 100, *scopes: Scope, ttl_s: float = 900.0) -> Admission:
    return Admission(f"req-{new_id()}", scopes or (KEY,), 10, cost, ttl_s)


async def spend(house: House, limiter: SharedLimiter | RedisLimiter, cost: int, *, row: bool = True) -> str:
    """A whole request. Its row comes before it is settled, as in the gateway, or not yet."""
    admission = request()
    await limiter.admit(admission)
    if row:
        house.books.rows[admission.hold_id] = cost
    await limiter.settle(admission.hold_id, 10, cost)
    return admission.hold_id
