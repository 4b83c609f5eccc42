"""A request's place in the flight of its question: wait for another's answer, or fly for all who wait.

While somebody waits, the one that flies goes on though its own client reads slowly or leaves: its key pays for the
answer, as it does for any that its client has begun.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING

from cache.flight import Following, Run, Ticket
from gateway.dialects.errors import BadRequest, GatewayError
from gateway.flights.messages import Elsewhere, Landing
from gateway.life import Life

if TYPE_CHECKING:
    from gateway.flights.shared import Lease
    from gateway.services import Services


class Flying:
    """Enter it to take the place; it is left in the end, whatever happens."""

    def __init__(self, services: Services, life: Life, key: str) -> None:
        self._services = services
        self._life = life
        self._key = key
        self._joining: AbstractAsyncContextManager[Ticket[Landing]] = services.flight.join(key)
        self._ticket: Ticket[Landing] | None = None
        self._lease: Lease | None = None
        self._run: Run[Landing] | None = None
        self._parts: list[bytes] = []
        self._alone = False

    async def __aenter__(self) -> Flying:
        self._ticket = await self._joining.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        ticket = self._ticket
        assert ticket is not None
        if ticket.leader and not ticket.landed and isinstance(error[1], BadRequest) and self._refused():
            ticket.fail(lambda: _again(error[1]))
        await self._joining.__aexit__(None, None, None)
        self._life.exchange.needed = None
        if self._lease is not None and self._services.shared_flights is not None:
            self._services.shared_flights.land(self._lease)

    @property
    def alone(self) -> bool:
        """Whether it no longer waits for anybody: its time was over, or it has been sent off."""
        return self._alone

    @property
    def leads(self) -> bool:
        assert self._ticket is not None
        return self._ticket.leader and not self._ticket.landed

    async def wait(self, patience_s: float) -> Landing | Following[Landing] | None:
        """What another request found or was answered, as it comes if both want streams; None: nobody will say.

        Raises:
            GatewayError: a backend refused the same request.
        """
        assert self._ticket is not None
        wait = self._ticket.follow if self._life.stream else self._ticket.result
        found = await wait(patience_s)
        self._alone = not self._ticket.leader
        return found

    async def take_off(self) -> bool:
        """Fly for all who wait, in other processes too. False: another process does already; wait for it.

        Until the landing, the request goes on though its client reads slowly or leaves, as long as anybody waits.
        """
        ticket, shared = self._ticket, self._services.shared_flights
        assert ticket is not None
        if shared is not None:
            found = await shared.take(self._key, ticket)
            if isinstance(found, Elsewhere):
                shared.follow(self._key, found, ticket.delegate())
                return False
            self._lease = found
        exchange = self._life.exchange
        exchange.needed = lambda: ticket.leader and not ticket.landed and ticket.awaited
        ticket.watch(exchange.run_ahead, exchange.leave_if_gone)
        return True

    def add(self, data: bytes) -> None:
        """An event of the stream, in the common form, as it comes."""
        self._parts.append(data)
        if self._run is None:
            assert self._ticket is not None
            if self.leads:
                self._run = self._ticket.begin(self._parts)
        else:
            self._run.grew()

    def land(self, landing: Landing) -> None:
        """The answer has been given: to whoever waits, if it is one for others too, else its end to who follows it."""
        if self.leads:
            assert self._ticket is not None
            self._ticket.complete(landing, shared=landing.found is not None)

    def _refused(self) -> bool:
        attempt = self._life.attempt
        return attempt is not None and attempt.outcome == "refused"


def _again(error: object) -> GatewayError:
    """The same refusal for another request."""
    assert isinstance(error, BadRequest)
    return BadRequest(error.message, status=error.status, type=error.type, code=error.code, param=error.param)
