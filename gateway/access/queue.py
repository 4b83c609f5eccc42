"""The queue before admission: requests that only running ones keep out wait for their turn, in one place.

    admit ──► room and nobody before it ──► limiter ──► granted                       settle ──► the next one's turn
       └────► the process is full, or `parallel` is ──► wait ──► its turn ──► limiter ──► granted, or first again

It promises: at most `most_running` requests of this process run; a request takes nothing from any limit while it
waits; first come, first served within a key, turns between keys, and a full queue gives the place of the key with the
most to one with fewer (`backends/waiting.py`); a key at its own limit keeps nobody else waiting. What is waited for is
what ends by itself soon: a rate or a budget refuses at once. Waiting ends by its turn, by the time allowed, by the
request's deadline, or because the client left.

Limits that are shared through Redis can free up in another process, of which nobody tells this one: so it looks again
twice a second.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from backends.waiting import Displaced, FairQueue
from gateway.access.counting import SOON_S
from gateway.access.limits import Admission, Grant, Limiter, LimitExceeded, Scope, Standing

LOOK_AGAIN_S: Final = 0.5
_LONGEST_RETRY_S: Final = 60.0
_HAS_TURN: Final = ""  # in place of a scope: what comes of it is awaited before the next of that owner has one


class _Pace:
    """How fast room is made for those who wait: requests that ended since the first of them began to."""

    __slots__ = ("ended", "since")

    def __init__(self, now: float) -> None:
        self.since = now
        self.ended = 0

    def until_turn_s(self, before: int, now: float) -> float:
        """How long `before` others and then this one take, at the pace so far."""
        return (now - self.since) / max(1, self.ended) * (before + 1)


class AdmissionQueue:
    """Stands before a limiter: `admit` here, and `settle` here what was admitted.

    Args:
        most_running: requests of this process at once; None: no bound but the keys' own.
        most_waiting: places in the queue; 0 refuses at once.
        patience_s: how long a request may wait.
        waited: told how long each request that waited in the queue did, in seconds, whatever came of it.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        limiter: Limiter,
        *,
        most_running: int | None,
        most_waiting: int,
        patience_s: float,
        waited: Callable[[float], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limiter = limiter
        self._most_running = float("inf") if most_running is None else most_running
        self._most_waiting = most_waiting
        self._patience_s = patience_s
        self._waited = waited
        self._clock = clock
        self._running: dict[str, tuple[str, tuple[Scope, ...]]] = {}  # owner and scopes by hold id
        self._turns = 0  # that were given; the limiter has not answered yet
        self._queue: FairQueue[None] = FairQueue(most_waiting)
        self._blocked: dict[str, str] = {}  # owners whose turn would be in vain: the scope without room
        self._paces: dict[str, _Pace] = {}  # by owner, of those who wait; "" for all of them
        self._look_again: asyncio.TimerHandle | None = None
        self.on_settled: Callable[[tuple[Scope, ...]], None] | None = None  # told what a request counted against

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._queue.size

    @property
    def running(self) -> int:
        """Requests that were admitted and not settled."""
        return len(self._running)

    async def admit(
        self, admission: Admission, owner: str, deadline: float | None = None, *, waits: bool = True
    ) -> Grant:
        """As `Limiter.admit`, after waiting for room where running requests are all that stands in the way.

        Args:
            owner: the key, whose turn it uses up.
            deadline: the request's own, in monotonic seconds.
            waits: False refuses at once.

        Raises:
            LimitExceeded, BudgetExhausted: as the limiter does; for `parallel` and `concurrency` only when the queue is
                full or waiting was in vain.
            TimeoutError: the deadline passed.
        """
        refusal: LimitExceeded | None = None
        if self._has_room() and not (waits and (self._blocked or self._queue.size) and self._waits_behind(owner)):
            self._turns += 1
            try:
                return await self._take_turn(admission, owner)
            except LimitExceeded as refused:
                if refused.limit != "parallel" or not waits or not self._most_waiting:
                    raise
                refusal = refused
        if not waits or not self._most_waiting:
            raise self._refused(owner, None, "")
        began = self._clock()
        try:
            return await self._wait(admission, owner, refusal, began, deadline)
        finally:
            self._waited(self._clock() - began)

    def _waits_behind(self, owner: str) -> bool:
        """Whether others of this owner wait, or its turn would be in vain."""
        return owner in self._blocked or self._queue.waiting(owner) > 0

    async def settle(self, hold_id: str, tokens: int, cost_nanousd: int) -> Standing | None:
        """As `Limiter.settle`; then it is the next one's turn."""
        try:
            return await self._limiter.settle(hold_id, tokens, cost_nanousd)
        finally:
            ended = self._running.pop(hold_id, None)
            if ended is not None and self._queue.size:
                self._freed(*ended)
            if ended is not None and self.on_settled is not None:
                self.on_settled(ended[1])

    async def _take_turn(self, admission: Admission, owner: str) -> Grant:
        """Ask the limiter. The turn that is used up was counted by whoever gave it."""
        try:
            grant = await self._limiter.admit(admission)
        except BaseException:
            self._give_turn_back()
            raise
        self._turns -= 1
        self._running[admission.hold_id] = (owner, admission.scopes)
        return grant

    async def _wait(
        self, admission: Admission, owner: str, refusal: LimitExceeded | None, began: float, deadline: float | None
    ) -> Grant:
        place = self._queue.join(owner)
        if place is None:
            raise self._refused(owner, refusal, f" {self.waiting} requests wait already.")
        if refusal is not None:
            self._blocked[owner] = refusal.scope
        for name in ("", owner):
            self._paces.setdefault(name, _Pace(began))
        self._start_looking()
        ends = began + self._patience_s
        if deadline is not None and deadline < ends:
            ends = deadline
        try:
            while True:
                try:
                    await self._turn(owner, place, ends)
                except TimeoutError:
                    if ends == deadline:
                        raise
                    raise self._refused(owner, refusal, f" No turn came in {self._patience_s:.3g} s.") from None
                except Displaced:
                    raise self._refused(owner, refusal, " The queue went to keys with fewer requests in it.") from None
                try:
                    return await self._take_turn(admission, owner)
                except LimitExceeded as refused:
                    if refused.limit != "parallel":
                        raise
                    refusal = refused
                self._blocked[owner] = refusal.scope
                place = self._queue.put_back(owner)
        finally:
            self._leave(owner, place)

    async def _turn(self, owner: str, place: asyncio.Future[None], ends: float) -> None:
        """Wait for a turn, until `ends`. Raises TimeoutError and Displaced; a turn that came too late goes back."""
        try:
            async with asyncio.timeout(ends - self._clock()):
                await place
        except BaseException:
            if place.done() and not place.cancelled() and place.exception() is None:
                self._give_turn_back()
            raise

    def _has_room(self) -> bool:
        return len(self._running) + self._turns < self._most_running

    def _serve(self) -> None:
        """Give turns to those who wait while there is room: one at a time to each key, and none to one in vain."""
        while self._queue.size and self._has_room() and (turn := self._queue.take(self._blocked)) is not None:
            owner, place = turn
            self._turns += 1
            self._blocked[owner] = _HAS_TURN
            place.set_result(None)

    def _give_turn_back(self) -> None:
        self._turns -= 1
        self._serve()

    def _freed(self, owner: str, scopes: tuple[Scope, ...]) -> None:
        for name in ("", owner):
            if name in self._paces:
                self._paces[name].ended += 1
        freed = {scope.id for scope in scopes}
        for name in [name for name, scope in self._blocked.items() if scope in freed]:
            del self._blocked[name]
        self._serve()

    def _leave(self, owner: str, place: asyncio.Future[None]) -> None:
        """A request waits no more, whatever came of it."""
        self._queue.leave(owner, place)
        if self._blocked.get(owner) == _HAS_TURN:
            del self._blocked[owner]
            self._queue.pass_on(owner)
        if not self._queue.waiting(owner):
            self._blocked.pop(owner, None)
            self._paces.pop(owner, None)
        if not self._queue.size:
            self._paces.clear()
        self._serve()

    def _start_looking(self) -> None:
        if self._look_again is None:
            self._look_again = asyncio.get_running_loop().call_later(LOOK_AGAIN_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        if self._queue.size:
            self._blocked = {owner: why for owner, why in self._blocked.items() if why == _HAS_TURN}
            self._serve()
            self._start_looking()

    def _refused(self, owner: str, refusal: LimitExceeded | None, why: str) -> LimitExceeded:
        """What a request is told that found no place or no turn, with the time until its turn at the present pace."""
        pace = self._paces.get("" if refusal is None else owner)
        before = self.waiting if refusal is None else self._queue.waiting(owner)
        expected_s = 0.0 if pace is None else pace.until_turn_s(before, self._clock())
        retry_s = min(max(SOON_S, expected_s), _LONGEST_RETRY_S)
        if refusal is None:
            text = f"The gateway runs {self.running} requests, as many as it may at a time.{why}"
            return LimitExceeded("gateway", "concurrency", retry_s, text)
        error = LimitExceeded(refusal.scope, refusal.limit, retry_s, refusal.message + why)
        error.standing = refusal.standing
        return error
