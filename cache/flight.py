"""Single flight: of many identical requests at once, one goes upstream and the others get its answer.

    leader   the first to join; must end with `complete`, or leave
    waiter   joined while a leader flew; `result` gives the leader's answer, or makes the waiter the leader

How a flight ends:
    complete(answer)  every waiter gets the same answer object
    complete(None)    the answer cannot be shared (not storable): every waiter is released to go upstream alone
    leader leaves     by an error, or because its client went away: the next waiter in line becomes the leader
Waiting is bounded: a waiter whose time is over goes upstream alone. One process, one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Ticket(Generic[Answer]):
    """One request's place in a flight.

    Attributes:
        leader: whether this request must go upstream for the others. A waiter may become the leader: after `result`
            returned None, look again.
    """

    def __init__(self, flight: _Flight[Answer], *, leader: bool) -> None:
        self.leader = leader
        self._flight = flight
        self._woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def result(self, timeout_s: float) -> Answer | None:
        """The leader's answer.

        None means: call upstream yourself. Either this ticket is the leader now (`leader` is true), or it flies alone
        because the answer cannot be shared or `timeout_s` passed.

        Raises:
            RuntimeError: asked of the leader, who would wait for itself.
        """
        if self.leader:
            raise RuntimeError("the leader of a flight has nobody to wait for: call upstream, then complete()")
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._woken)
        except TimeoutError:
            # Being made leader and running out of time can coincide: leadership, once given, is kept.
            self._flight.waiters.pop(self, None)
            return None
        return None if self.leader else self._flight.answer

    def complete(self, answer: Answer | None) -> None:
        """End the flight: give the answer to every waiter, or release them all if it cannot be shared (None).

        Raises:
            RuntimeError: the ticket is not the leader's, or has completed already.
        """
        if not self.leader:
            raise RuntimeError("only the leader of a flight can complete it")
        if self._flight.landed:
            raise RuntimeError("this flight has been completed already")
        self._flight.land(answer)

    def wake(self) -> None:
        """Let `result` return. For the flight only."""
        if not self._woken.done():
            self._woken.set_result(None)


class _Flight(Generic[Answer]):
    """The requests that share one key. Exactly one ticket leads until the flight has landed."""

    def __init__(self, flights: dict[str, _Flight[Answer]], key: str) -> None:
        self._flights = flights
        self._key = key
        self.waiters: OrderedDict[Ticket[Answer], None] = OrderedDict()
        self.answer: Answer | None = None
        self.landed = False

    def land(self, answer: Answer | None) -> None:
        # Gone before anybody wakes: who asks from now on starts a flight of its own, or finds the stored answer.
        del self._flights[self._key]
        self.landed = True
        self.answer = answer
        for ticket in self.waiters:
            ticket.wake()
        self.waiters.clear()

    def leave(self, ticket: Ticket[Answer]) -> None:
        """A request goes away. A leader that did not complete has failed: the next waiter takes its place."""
        self.waiters.pop(ticket, None)
        if not ticket.leader or self.landed:
            return
        if not self.waiters:
            del self._flights[self._key]
            return
        successor, _ = self.waiters.popitem(last=False)
        successor.leader = True
        successor.wake()


class SingleFlight(Generic[Answer]):
    """All flights of a process, by key."""

    def __init__(self) -> None:
        self._flights: dict[str, _Flight[Answer]] = {}
        self.shared = 0

    def __len__(self) -> int:
        return len(self._flights)

    @asynccontextmanager
    async def join(self, key: str) -> AsyncIterator[Ticket[Answer]]:
        """Take a place in the flight of `key`, and leave it, however the block ends.

        async with flights.join(key.exact) as ticket:
            if not ticket.leader and (answer := await ticket.result(timeout_s)) is not None:
                return answer
            answer = await call_upstream()
            if ticket.leader:
                ticket.complete(answer if storable(answer) is None else None)
        """
        flight = self._flights.get(key)
        if flight is None:
            flight = self._flights[key] = _Flight(self._flights, key)
            ticket = Ticket(flight, leader=True)
        else:
            ticket = Ticket(flight, leader=False)
            flight.waiters[ticket] = None
            self.shared += 1
        try:
            yield ticket
        finally:
            flight.leave(ticket)
