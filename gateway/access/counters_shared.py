"""The limiter of a gateway that shares its limits: Redis while it answers, this process's share while it does not.

    Redis ──a call fails──► own share: limit / processes ──Redis answers again──► told what happened ──► Redis
                            (looked for once a second)

It promises that no request waits for a Redis that is away: those that find out wait one time-out, later ones not at
all. The processes' shares together stay within every limit, and within what was left of every budget when Redis was
last heard. What is taken and used meanwhile is told to Redis when it is back, each hold once, by its id.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from gateway.access.counters_memory import MemoryLimiter
from gateway.access.counters_redis import RedisLimiter
from gateway.access.counting import month_of
from gateway.access.limits import Admission, Grant, LimitExceeded, LimitKind, Refused, Scope, ScopeStanding, Standing
from gateway.access.redis_channel import RedisDown
from gateway.ledger.rows import new_id
from gateway.settings import WhenRedisIsDown

logger = logging.getLogger("tierline.access")

BEAT_S: Final = 1.0
# How old a budget's use may be for choosing a route; whether a request fits is asked of Redis each time.
FRESH_S: Final = 1.0
# Settles that may wait for Redis. With more, budgets start over from the ledger, which has them all.
MOST_WAITING: Final = 100_000
# Holds told at once: few enough to be answered in time.
_TELL: Final = 32

# Tokens and nano-dollars of requests in the ledger, by request id; a request without rows may be left out.
UsedBy = Callable[[Collection[str]], Awaitable[Mapping[str, tuple[int, int]]]]


class _Open(msgspec.Struct):
    """A request that runs in this process. `told`: Redis has its hold."""

    admission: Admission
    told: bool


class _Settled(msgspec.Struct):
    """A request that ended while Redis was away. `admission` where Redis may not have its hold."""

    hold_id: str
    tokens: int
    cost_nanousd: int
    admission: Admission | None


class SharedLimiter:
    """`processes`: how many there are as long as Redis has not said. `spent`: the ledger's sums of this month.

    `former_owners` are processes that will not come back, whose rows are in the ledger: their holds are settled, like
    those that an earlier process of this owner left.
    """

    def __init__(
        self,
        redis: RedisLimiter,
        when_down: WhenRedisIsDown,
        *,
        processes: int,
        spent: Mapping[str, int],
        used_by: UsedBy,
        former_owners: Collection[str] = (),
    ) -> None:
        self._redis = redis
        self._when_down = when_down
        self._name = new_id()
        self._used_by: UsedBy | None = used_by  # None once the holds of earlier processes are settled
        self._former_owners = former_owners
        self._open: dict[str, _Open] = {}
        self._waiting: list[_Settled] = []
        self._overflown = False
        self._local: MemoryLimiter | None = MemoryLimiter()
        self._seen: dict[str, tuple[float, float]] = {}  # used share of a budget, and when it was seen
        self._tasks: set[asyncio.Task[None]] = set()
        self._refreshing: asyncio.Task[None] | None = None
        self._expired_here = 0
        self.processes = processes
        month, _ = month_of(time.time())
        redis.known.update({scope: (month, amount) for scope, amount in spent.items()})

    @property
    def open_holds(self) -> int:
        return len(self._open)

    @property
    def expired_holds(self) -> int:
        here = self._local.expired_holds if self._local else 0
        return self._redis.expired_holds + self._expired_here + here

    @property
    def degraded(self) -> bool:
        """Whether limits are this process's share, because Redis is away."""
        return self._local is not None

    async def start(self) -> None:
        """Connect, and keep in touch. A Redis that is away is no reason not to start."""
        problem = await self._recover()
        if problem is not None:
            self._complain(problem)
        self._spawn(self._keep_in_touch())

    async def stop(self) -> None:
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if not self.degraded:
            with suppress(RedisDown):
                await self._redis.leave(self._name)
        if self._waiting:
            logger.warning("%d requests ended without Redis knowing; their holds will expire", len(self._waiting))
        await self._redis.channel.aclose()

    async def admit(self, admission: Admission) -> Grant:
        if self._local is not None:
            return await self._admit_here(self._local, admission)
        try:
            granted = await self._redis.admit(admission)
        except RedisDown as error:
            local = self._fall_back(error)
        except asyncio.CancelledError:
            # Nobody will settle it, and it may have been taken.
            self._spawn(self._give_back(admission.hold_id))
            raise
        else:
            self._open[admission.hold_id] = _Open(admission, told=True)
            now = time.monotonic()
            self._seen.update({scope_id: (share, now) for scope_id, share in granted.budget_used.items()})
            return granted
        try:
            return await self._admit_here(local, admission)
        except Refused:
            self._put_off(_Settled(admission.hold_id, 0, 0, None))  # it may have been taken
            raise

    async def settle(self, hold_id: str, tokens: int, cost_nanousd: int) -> Standing | None:
        mine = self._open.pop(hold_id, None)
        if self._local is None:
            try:
                return await self._redis.settle(hold_id, tokens, cost_nanousd)
            except RedisDown as error:
                self._fall_back(error)
        if mine is None or self._local is None:
            return None
        self._put_off(_Settled(hold_id, tokens, cost_nanousd, None if mine.told else mine.admission))
        return await self._local.settle(hold_id, tokens, 0 if mine.told else cost_nanousd)

    async def touch(self, hold_id: str, ttl_s: float, tokens: int = 0, cost_nanousd: int = 0) -> bool:
        mine = self._open.get(hold_id)
        touched = False
        if self._local is None:
            try:
                touched = await self._redis.touch(hold_id, ttl_s, tokens, cost_nanousd)
            except RedisDown as error:
                self._fall_back(error)
        if self._local is not None and mine is not None:
            touched = await self._local.touch(hold_id, ttl_s, tokens, 0 if mine.told else cost_nanousd)
        if mine is not None:  # should Redis have to be told, then as it is now
            mine.admission = msgspec.structs.replace(
                mine.admission,
                tokens=max(tokens, mine.admission.tokens),
                cost_nanousd=max(cost_nanousd, mine.admission.cost_nanousd),
            )
        return touched

    async def budget_used(self, scopes: Iterable[Scope]) -> dict[str, float]:
        asked = [scope for scope in scopes if scope.budget_nanousd is not None]
        now = time.monotonic()
        seen = [self._seen.get(scope.id, (0.0, -FRESH_S)) for scope in asked]
        if all(now - at < FRESH_S for _, at in seen):
            return {scope.id: share for scope, (share, _) in zip(asked, seen, strict=True)}
        if self._local is None:
            try:
                used = await self._redis.budget_used(asked)
            except RedisDown as error:
                self._fall_back(error)
            else:
                self._seen.update({scope_id: (share, now) for scope_id, share in used.items()})
                return used
        return {
            scope.id: self._known(scope.id) / scope.budget_nanousd if scope.budget_nanousd else 1.0 for scope in asked
        }

    async def standings(self, scopes: Sequence[Scope]) -> list[ScopeStanding]:
        """Where each scope stands now; while Redis is away, in this process, of its share of the limits."""
        local = self._local
        if local is None:
            try:
                return await self._redis.standings(scopes)
            except RedisDown as error:
                local = self._fall_back(error)
        return await local.standings([self._share(scope) for scope in scopes])

    # -- while Redis is away -----------------------------------------------------------------------------------------

    def _fall_back(self, error: RedisDown) -> MemoryLimiter:
        """Count here from now on; nothing is awaited, so that every later call of this process does so."""
        if self._local is None:
            self._redis.channel.close()
            self._complain(error)
            self._local = MemoryLimiter()
            for one in self._open.values():
                # Goes on counting as running. Its tokens are gone, its money is in what was last known of the budgets.
                bare = tuple(Scope(scope.id) for scope in one.admission.scopes)
                self._local.restore(msgspec.structs.replace(one.admission, scopes=bare, tokens=0, cost_nanousd=0))
        return self._local

    def _complain(self, error: RedisDown) -> None:
        text = "Redis is away (%s): until it is back, this process keeps to its share of the limits, 1/%d"
        logger.error(text, error, self.processes)

    async def _admit_here(self, local: MemoryLimiter, admission: Admission) -> Grant:
        for scope in admission.scopes:
            self._refuse_if_told_to(scope)
        scopes = tuple(self._share(scope) for scope in admission.scopes)
        try:
            granted = await local.admit(msgspec.structs.replace(admission, scopes=scopes))
        except Refused as refused:
            if self.processes > 1:
                refused.message += f" (Limits are split over {self.processes} gateway processes for the moment.)"
            raise
        self._open.setdefault(admission.hold_id, _Open(admission, told=False))
        return granted

    def _refuse_if_told_to(self, scope: Scope) -> None:
        limits: tuple[tuple[LimitKind, int | None, str], ...] = (
            ("requests_per_minute", scope.requests_per_minute, self._when_down.rates),
            ("tokens_per_minute", scope.tokens_per_minute, self._when_down.rates),
            ("parallel", scope.parallel, self._when_down.rates),
            ("budget", scope.budget_nanousd, self._when_down.budgets),
        )
        for kind, limit, rule in limits:
            if limit is not None and rule == "refuse":
                what = kind.replace("_", " ")
                text = f"{scope.label or scope.id} has a limit ({what}) that cannot be checked now. Try again soon."
                raise LimitExceeded(scope.id, kind, BEAT_S, text)

    def _share(self, scope: Scope) -> Scope:
        """What this process may use on its own of a scope's limits, and of what is left of its budget."""
        budget = scope.budget_nanousd
        return msgspec.structs.replace(
            scope,
            requests_per_minute=self._part(scope.requests_per_minute),
            tokens_per_minute=self._part(scope.tokens_per_minute),
            parallel=self._part(scope.parallel),
            budget_nanousd=None if budget is None else max(0, budget - self._known(scope.id)) // self.processes,
        )

    def _part(self, limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // self.processes)

    def _known(self, scope_id: str) -> int:
        """Nano-dollars settled and held this month, when Redis last said."""
        month, amount = self._redis.known.get(scope_id, (0, 0))
        return amount if month == month_of(time.time())[0] else 0

    def _put_off(self, settled: _Settled) -> None:
        if len(self._waiting) >= MOST_WAITING:
            self._overflown = True
            self._waiting.clear()
        self._waiting.append(settled)

    async def _give_back(self, hold_id: str) -> None:
        try:
            await self._redis.settle(hold_id, 0, 0)
        except RedisDown as error:
            self._fall_back(error)
            self._put_off(_Settled(hold_id, 0, 0, None))

    # -- and when it is back -----------------------------------------------------------------------------------------

    async def _keep_in_touch(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            try:
                if self._local is None:
                    await self._beat()
                elif await self._recover() is None:
                    logger.info("Redis is back: %d processes share the limits", self.processes)
            except Exception:
                logger.exception("keeping in touch with Redis failed; it is tried again")

    async def _beat(self) -> None:
        try:
            beat = await self._redis.beat(self._name)
            self.processes = max(1, beat.processes)
            if not beat.known:  # Redis has forgotten this process, so it has lost the holds as well
                await self._tell(list(self._open))
            await self._start_over_if_need_be()
        except RedisDown as error:
            self._fall_back(error)
            return
        if beat.refresh and (self._refreshing is None or self._refreshing.done()):
            self._refreshing = self._spawn(self._refresh())

    async def _refresh(self) -> None:
        try:
            await self._redis.read_ledger()
        except RedisDown as error:
            logger.warning("the budgets are not brought up to date with the ledger now: %s", error)

    async def _recover(self) -> RedisDown | None:
        """Connect, tell Redis what happened meanwhile, and only then count there again."""
        try:
            await self._redis.channel.connect()
            await self._redis.seed()
            self.processes = max(1, (await self._redis.beat(self._name)).processes)
            await self._settle_left_over()
            await self._tell(list(self._open))
            await self._start_over_if_need_be()
            while self._waiting or any(not one.told for one in self._open.values()):
                await self._tell_settled()
                await self._tell([hold_id for hold_id, one in self._open.items() if not one.told])
        except RedisDown as error:
            self._redis.channel.close()
            return error
        # Nothing was awaited since all was told, so nothing was taken here in between.
        if self._local is not None:
            self._expired_here += self._local.expired_holds
            self._local = None
        return None

    async def _start_over_if_need_be(self) -> None:
        if self._overflown:
            await self._redis.read_ledger(start_over=True)
            self._overflown = False

    async def _settle_left_over(self) -> None:
        """Settle what earlier processes had open: their rows are in the ledger by now."""
        if self._used_by is None:
            return
        mine = {*self._open, *(ended.hold_id for ended in self._waiting)}
        left = [hold_id for hold_id in await self._redis.owned(self._former_owners) if hold_id not in mine]
        try:
            used = await self._used_by(left) if left else {}
        except Exception as error:
            raise RedisDown(f"the ledger does not tell what earlier requests used: {error}") from error
        for hold_id in left:
            await self._redis.settle(hold_id, *used.get(hold_id, (0, 0)))
        self._used_by = None
        if left:
            logger.info("%d holds of an earlier process are settled from the ledger", len(left))

    async def _tell(self, hold_ids: list[str]) -> None:
        """Restore holds that are open here; Redis skips those that it has."""
        for start in range(0, len(hold_ids), _TELL):
            await _together([self._restore(hold_id) for hold_id in hold_ids[start : start + _TELL]])

    async def _restore(self, hold_id: str) -> None:
        one = self._open.get(hold_id)
        if one is not None:  # else it was settled a moment ago: Redis must not get it back
            await self._redis.restore(one.admission)
            one.told = True

    async def _tell_settled(self) -> None:
        while self._waiting:
            ended = self._waiting[:_TELL]
            restored = [one.admission for one in ended if one.admission is not None]
            await _together([self._redis.restore(admission) for admission in restored])
            await _together([self._redis.settle(one.hold_id, one.tokens, one.cost_nanousd) for one in ended])
            del self._waiting[: len(ended)]

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _together(calls: list[Any]) -> None:
    """All at once, to the end: a failure is raised when none is on its way any more."""
    for result in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(result, BaseException):
            raise result
