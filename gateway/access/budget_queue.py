"""Who waits for money: requests that a budget refuses, where their policy says `when_exhausted: queue`.

    admit ──► AdmissionQueue ──► granted                                    a request ends ─┐
               └─ a budget refuses ──► the line for it ──► wait ──► a turn ◄─ now and then ─┘ ──► asked anew

A request takes nothing from any limit while it waits. First come, first served within a key, turns between keys
(`backends/waiting.py`). One for which the money would do once running ones have ended gets its turn when one ends, and
those who come later wait behind it. One that needs more than is left of the month keeps nobody waiting; it is asked
again now and then, ever more seldom, because a budget may be raised, and a month ends.

Each turn asks with the limits as they are then: a policy that was reloaded and a budget that was raised count.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

import msgspec

from backends.waiting import Displaced, FairQueue
from gateway.access.limits import Admission, BudgetExhausted, Grant, Scope
from gateway.access.queue import AdmissionQueue

# Nobody tells of a raised budget, of a new month, or of money that another process gave back.
LOOK_S: Final = 1.0
SELDOM_S: Final = 8.0


class Wait(msgspec.Struct, frozen=True):
    """How a request waits: at most `patience_s`. `renew` gives its admission with the limits of the moment, and whether
    its policy still lets it wait; it may raise what the client is to be told."""

    renew: Callable[[], tuple[Admission, bool]]
    patience_s: float


class _Line:
    """Those who wait for one budget; owners are keys. `hopeless` are those whose first request needs more than is left
    whatever ends, `trying` those with a turn of which nobody knows yet what comes, `vain` those that had one in vain
    since the last round began."""

    __slots__ = ("hopeless", "queue", "trying", "vain", "waiting")

    def __init__(self, most: int) -> None:
        self.queue: FairQueue[None] = FairQueue(most)
        self.hopeless: set[str] = set()
        self.trying: set[str] = set()
        self.vain: set[str] = set()
        self.waiting: dict[str, int] = {}  # requests of each, those with a turn included

    def serve(self) -> None:
        """The next key's first request has a turn."""
        turn = self.queue.take(self.hopeless | self.trying | self.vain)
        if turn is not None:
            owner, place = turn
            self.trying.add(owner)
            place.set_result(None)

    def round(self, *, everybody: bool) -> None:
        """Something may have changed: give turns anew; to `everybody`, or to those for whom the money would do."""
        self.vain.clear()
        if everybody:
            self.hopeless.clear()
        self.serve()

    def busy(self) -> bool:
        """Whether somebody waits who comes before a newcomer."""
        return any(owner not in self.hopeless for owner in self.waiting)

    def enter(self, owner: str) -> None:
        self.waiting[owner] = self.waiting.get(owner, 0) + 1

    def leave(self, owner: str, place: asyncio.Future[None]) -> None:
        """A request waits here no more; a turn that it had goes to the next."""
        had_turn = place.done() and not place.cancelled() and place.exception() is None
        self.queue.leave(owner, place)
        self.hopeless.discard(owner)  # its next one may need less
        self.waiting[owner] -= 1
        if not self.waiting[owner]:
            del self.waiting[owner]
        if had_turn:
            self.trying.discard(owner)
            self.queue.pass_on(owner)
            self.serve()

    def in_vain(self, owner: str, *, hopeless: bool) -> asyncio.Future[None]:
        """The turn came too early: the first place of this owner. Where no end of another request would help, others
        have a turn."""
        place = self.queue.put_back(owner)
        self.trying.discard(owner)
        self.vain.add(owner)
        if hopeless:
            self.hopeless.add(owner)
            self.serve()
        return place


class BudgetQueue:
    """Stands before an `AdmissionQueue`, for requests that may wait for money.

    Args:
        most_waiting: places in the line of each budget; 0 refuses at once.
        clock: monotonic seconds.
    """

    def __init__(
        self, queue: AdmissionQueue, *, most_waiting: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._queue = queue
        self._most_waiting = most_waiting
        self._clock = clock
        self._lines: dict[str, _Line] = {}  # by the scope whose budget is waited for
        self._look_again: asyncio.TimerHandle | None = None
        self._pause_s = LOOK_S
        queue.on_settled = self._settled

    @property
    def waiting(self) -> int:
        """Requests that wait for money."""
        return sum(sum(line.waiting.values()) for line in self._lines.values())

    async def admit(self, admission: Admission, owner: str, deadline: float | None, wait: Wait) -> Grant:
        """As `AdmissionQueue.admit`, after waiting for money if it takes that.

        Raises:
            BudgetExhausted: the time is over, or there is no place to wait.
            LimitExceeded: another limit refuses, before or after the wait.
            TimeoutError: the deadline passed.
        """
        scope, hopeless = self._line_before(admission), False
        if scope is None or not self._most_waiting:
            try:
                return await self._queue.admit(admission, owner, deadline)
            except BudgetExhausted as refused:
                if not self._most_waiting:
                    raise
                scope, hopeless = refused.scope, not _soon(refused)
        patience_ends = self._clock() + wait.patience_s
        ends = patience_ends if deadline is None else min(deadline, patience_ends)
        while True:
            try:
                return await self._wait(scope, owner, deadline, wait, ends, hopeless)
            except _ElsewhereNow as other:
                scope, hopeless = other.scope, other.hopeless

    async def _wait(
        self, scope: str, owner: str, deadline: float | None, wait: Wait, ends: float, hopeless: bool
    ) -> Grant:
        """In the line for one budget, to the end of it.

        Raises:
            _ElsewhereNow: another budget stands in the way now.
        """
        line = self._lines.get(scope) or self._lines.setdefault(scope, _Line(self._most_waiting))
        place = line.queue.join(owner)
        if place is None:
            return await self._last_try(owner, deadline, wait, "Too many requests wait for money already.")
        line.enter(owner)
        if hopeless and line.waiting[owner] == 1:
            line.hopeless.add(owner)
        self._begin_looking()
        try:
            while True:
                try:
                    async with asyncio.timeout(max(0.0, ends - self._clock())):
                        await place
                except TimeoutError:
                    if ends == deadline:
                        raise
                    text = f"No money came in {wait.patience_s:.3g} s."
                    return await self._last_try(owner, deadline, wait, text)
                except Displaced:
                    return await self._last_try(owner, deadline, wait, "The line went to keys with fewer in it.")
                admission, may_wait = wait.renew()
                if not may_wait:
                    return await self._last_try(owner, deadline, wait, "The policy lets nobody wait any more.")
                try:
                    return await self._queue.admit(admission, owner, deadline)
                except BudgetExhausted as refused:
                    if refused.scope != scope:
                        raise _ElsewhereNow(refused.scope, not _soon(refused)) from None
                    place = line.in_vain(owner, hopeless=not _soon(refused))
        finally:
            line.leave(owner, place)
            if not line.waiting:
                self._lines.pop(scope, None)

    async def _last_try(self, owner: str, deadline: float | None, wait: Wait, why: str) -> Grant:
        """For one that waits no more: as things stand now, whatever the order."""
        admission, _ = wait.renew()
        try:
            return await self._queue.admit(admission, owner, deadline, waits=False)
        except BudgetExhausted as refused:
            raise _because(refused, why) from None

    def others_first(self, admission: Admission) -> bool:
        """Whether requests wait for a budget of this one that come before a newcomer."""
        return self._line_before(admission) is not None

    def _line_before(self, admission: Admission) -> str | None:
        """The budget for which others wait who come first."""
        if self._lines:
            for scope in admission.scopes:
                line = self._lines.get(scope.id)
                if line is not None and scope.budget_nanousd is not None and line.busy():
                    return scope.id
        return None

    def _settled(self, scopes: tuple[Scope, ...]) -> None:
        """What was held for a request is settled, and may have been less."""
        if self._lines:
            for scope in scopes:
                if (line := self._lines.get(scope.id)) is not None:
                    line.round(everybody=False)

    def _begin_looking(self) -> None:
        """Within `LOOK_S` from now on, unless that is so already."""
        loop = asyncio.get_running_loop()
        self._pause_s = LOOK_S
        if self._look_again is not None:
            if self._look_again.when() <= loop.time() + LOOK_S:
                return
            self._look_again.cancel()
        self._look_again = loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        self._look_again = None
        for line in list(self._lines.values()):
            line.round(everybody=True)
        if self._lines:
            self._pause_s = min(2 * self._pause_s, SELDOM_S)
            self._look_again = asyncio.get_running_loop().call_later(self._pause_s, self._look)


class _ElsewhereNow(Exception):
    """There is money in this budget now, and none in another."""

    def __init__(self, scope: str, hopeless: bool) -> None:
        super().__init__(scope)
        self.scope = scope
        self.hopeless = hopeless


def _soon(refused: BudgetExhausted) -> bool:
    """Whether the money would do once the requests that run now have ended and used none of what is held for them."""
    return refused.settled_nanousd + refused.needed_nanousd <= refused.budget_nanousd > refused.settled_nanousd


def _because(refused: BudgetExhausted, why: str) -> BudgetExhausted:
    worded = BudgetExhausted(
        refused.scope,
        refused.retry_after_s,
        f"{refused.message} {why}",
        budget=refused.budget_nanousd,
        settled=refused.settled_nanousd,
        held=refused.held_nanousd,
        needed=refused.needed_nanousd,
    )
    worded.standing = refused.standing
    return worded
