"""Single flight: of many identical requests at once, one goes upstream and the others get its answer, as it comes.

    leader   the first to join; must end with `complete` or `fail`, or leave
    waiter   joined while a leader flew: `result` gives its answer, `follow` its stream from the first event on

How a flight ends:
    complete(answer)                every waiter gets the same answer object
    complete(answer, shared=False)  only those who follow its stream get its end; the others go upstream alone
    fail(error)                     every waiter gets the error, which would be its own as well
    leader leaves                   by a failure of its own: the next waiter in line becomes the leader; who follows its
                                    stream gets `Broken`. After two such failures the others go upstream alone

The leader is told when somebody begins to wait and when nobody does any more, so that it can fly on though its own
client is gone. Waiting is bounded: a waiter whose time is over goes upstream alone. One process, one event loop.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
# Failures of leaders, after which waiting in line would take longer than it is worth.
MOST_LEADERS = 3


class Broken(Exception):
    """The leader failed after a part of its answer had been given."""


class Run(Generic[Answer]):
    """One leader's way to the answer. `parts` are the events of its stream so far, once it has `begun`."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.begun = False
        self.running = True
        self.answer: Answer | None = None
        self._watching: list[asyncio.Future[None]] = []

    def grew(self) -> None:
        """Wake who follows."""
        watching, self._watching = self._watching, []
        for one in watching:
            if not one.done():
                one.set_result(None)

    async def changed(self, timeout_s: float | None = None) -> None:
        """Wait until there are more parts, or the run has ended, or the time is over."""
        watcher = asyncio.get_running_loop().create_future()
        self._watching.append(watcher)
        await asyncio.wait((watcher,), timeout=timeout_s)

    def end(self, answer: Answer | None) -> None:
        self.running = False
        self.answer = answer
        self.grew()


class Following(Generic[Answer]):
    """The leader's stream, for one who gets it as it comes: iterate over the events, then look at `answer`."""

    def __init__(self, run: Run[Answer]) -> None:
        self._run = run

    @property
    def answer(self) -> Answer:
        """What the stream came to, once it has ended."""
        assert self._run.answer is not None
        return self._run.answer

    async def parts(self) -> AsyncIterator[bytes]:
        """The events from the first one on.

        Raises:
            Broken: the leader failed.
        """
        run, position = self._run, 0
        while True:
            while position < len(run.parts):
                position += 1
                yield run.parts[position - 1]
            if not run.running:
                break
            await run.changed()
        if run.answer is None:
            raise Broken


class Ticket(Generic[Answer]):
    """One request's place in a flight.

    Attributes:
        leader: whether this request must go upstream for the others. A waiter may become the leader: after `result`
            returned None, look again.
    """

    def __init__(self, flight: _Flight[Answer], *, leader: bool) -> None:
        self.leader = leader
        self.released = False  # to go upstream alone
        self._flight = flight
        self._waiter: asyncio.Future[None] | None = None

    # -- for a waiter ------------------------------------------------------------------------------------------------

    async def result(self, timeout_s: float) -> Answer | None:
        """The leader's answer.

        None means: call upstream yourself. Either this ticket is the leader now (`leader` is true), or it flies alone
        because the answer cannot be shared or `timeout_s` passed.

        Raises:
            RuntimeError: asked of the leader, who would wait for itself.
            Exception: the leader's, from `fail`.
        """
        found = await self._wait(timeout_s, stream=False)
        assert not isinstance(found, Following)
        return found

    async def follow(self, timeout_s: float) -> Answer | Following[Answer] | None:
        """The leader's answer or, as soon as it streams one, that stream; None and errors as `result`."""
        return await self._wait(timeout_s, stream=True)

    async def _wait(self, timeout_s: float, *, stream: bool) -> Answer | Following[Answer] | None:
        if self.leader:
            raise RuntimeError("the leader of a flight has nobody to wait for: call upstream, then complete()")
        flight = self._flight
        try:
            async with asyncio.timeout(timeout_s):
                while not (self.leader or self.released or flight.landed or (stream and flight.run.begun)):
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError:
            # Being made leader and running out of time can coincide: leadership, once given, is kept.
            if not self.leader:
                flight.leave(self)
            return None
        if self.leader or self.released:
            return None
        if flight.landed:
            if flight.error is not None:
                raise flight.error()
            return flight.run.answer if flight.shared else None
        return flight.follow(self)

    def wake(self) -> None:
        """Look again. For the flight only."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- for the leader ----------------------------------------------------------------------------------------------

    @property
    def awaited(self) -> bool:
        """Whether anybody but the leader waits for the answer."""
        return self._flight.awaited

    def watch(self, joined: Callable[[], None], deserted: Callable[[], None]) -> None:
        """Have `joined` called when somebody waits, now or later, and `deserted` when nobody does any more."""
        self._flight.watched_by = (joined, deserted)
        if self.awaited:
            joined()

    def begin(self, parts: list[bytes]) -> Run[Answer]:
        """A stream has begun: its events are added to `parts`, each time followed by `grew` of what is returned."""
        self._must_lead()
        run = self._flight.run
        run.parts, run.begun = parts, True
        self._flight.wake()
        return run

    def complete(self, answer: Answer | None, *, shared: bool = True) -> None:
        """End the flight: give the answer to every waiter, or release them all if it cannot be shared (None).

        Raises:
            RuntimeError: the ticket is not the leader's, or has completed already.
        """
        self._must_lead()
        self._flight.land(answer, shared=shared and answer is not None)

    def fail(self, error: Callable[[], Exception]) -> None:
        """End the flight by an error that every waiter would get as well. `error` makes one for each."""
        self._must_lead()
        self._flight.land(None, shared=False, error=error)

    def delegate(self) -> Ticket[Answer]:
        """Somebody else goes upstream, in another process: a ticket that leads in this one's place, which waits now.

        Whoever holds it must `leave` it in the end.
        """
        self._must_lead()
        return self._flight.delegate(self)

    def leave(self) -> None:
        """The end of the place. `SingleFlight.join` does it by itself."""
        self._flight.leave(self)

    def attach(self) -> Callable[[], None]:
        """Somebody in another process waits too, until what is returned is called."""
        return self._flight.attach()

    @property
    def run(self) -> Run[Answer]:
        return self._flight.run

    @property
    def landed(self) -> bool:
        return self._flight.landed

    @property
    def shared(self) -> bool:
        """Whether the flight has landed with an answer for everybody."""
        return self._flight.shared

    @property
    def error(self) -> Exception | None:
        """The error that the flight has landed with."""
        return None if self._flight.error is None else self._flight.error()

    def _must_lead(self) -> None:
        if not self.leader:
            raise RuntimeError("only the leader of a flight can do this")
        if self._flight.landed:
            raise RuntimeError("this flight has been completed already")


class _Flight(Generic[Answer]):
    """The requests that share one key. Exactly one ticket leads until the flight has landed."""

    def __init__(self, flights: dict[str, _Flight[Answer]], key: str) -> None:
        self._flights = flights
        self._key = key
        self.waiters: OrderedDict[Ticket[Answer], None] = OrderedDict()
        self._following: set[Ticket[Answer]] = set()
        self._attached = 0
        self._leaders = 1
        self.watched_by: tuple[Callable[[], None], Callable[[], None]] | None = None
        self.run: Run[Answer] = Run()
        self.landed = False
        self.shared = False
        self.error: Callable[[], Exception] | None = None

    @property
    def awaited(self) -> bool:
        return bool(self.waiters or self._following or self._attached)

    def wake(self) -> None:
        for ticket in self.waiters:
            ticket.wake()

    def join(self, ticket: Ticket[Answer]) -> None:
        self.waiters[ticket] = None
        self._joined()

    def follow(self, ticket: Ticket[Answer]) -> Following[Answer]:
        self.waiters.pop(ticket, None)
        self._following.add(ticket)
        return Following(self.run)

    def attach(self) -> Callable[[], None]:
        run: Run[Answer] | None = self.run
        self._attached += 1
        self._joined()

        def detach() -> None:
            nonlocal run
            if run is self.run:  # else its leader has failed, and it is not counted any more
                self._attached -= 1
                self._look_whether_deserted()
            run = None

        return detach

    def delegate(self, ticket: Ticket[Answer]) -> Ticket[Answer]:
        ticket.leader = False
        self.watched_by = None
        self.waiters[ticket] = None
        self.waiters.move_to_end(ticket, last=False)
        return Ticket(self, leader=True)

    def land(self, answer: Answer | None, *, shared: bool, error: Callable[[], Exception] | None = None) -> None:
        # Gone before anybody wakes: who asks from now on starts a flight of its own, or finds the stored answer.
        del self._flights[self._key]
        self.landed = True
        self.shared, self.error = shared, error
        self.run.end(answer)
        self.wake()
        self.waiters.clear()

    def leave(self, ticket: Ticket[Answer]) -> None:
        """A request goes away. A leader that did not complete has failed: the next waiter takes its place."""
        waited = ticket in self.waiters or ticket in self._following
        self.waiters.pop(ticket, None)
        self._following.discard(ticket)
        if self.landed:
            return
        if not ticket.leader:
            if waited:
                self._look_whether_deserted()
            return
        self.run.end(None)
        self.watched_by = None
        if not self.waiters:
            self._land_nowhere()
            return
        if self._leaders >= MOST_LEADERS:
            for waiter in self.waiters:
                waiter.released = True
                waiter.wake()
            self.waiters.clear()
            self._land_nowhere()
            return
        self._leaders += 1
        self.run = Run()
        self._following.clear()  # they have the run that broke
        self._attached = 0
        successor, _ = self.waiters.popitem(last=False)
        successor.leader = True
        successor.wake()

    def _land_nowhere(self) -> None:
        del self._flights[self._key]
        self.landed = True

    def _joined(self) -> None:
        if self.watched_by is not None:
            self.watched_by[0]()

    def _look_whether_deserted(self) -> None:
        if not self.landed and not self.awaited and self.watched_by is not None:
            self.watched_by[1]()


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
            flight.join(ticket)
            self.shared += 1
        try:
            yield ticket
        finally:
            flight.leave(ticket)
