"""Requests beside those that models answer: counted and limited like them, and free."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from gateway.admission import count_fault
from gateway.dialects.dialect import Dialect
from gateway.dialects.errors import GatewayError
from gateway.http import JSON_TYPE, Exchange, Header
from gateway.life import Life

if TYPE_CHECKING:
    from gateway.services import Services

# The body of the answer, and the headers that it has beside Tierline's own.
Take = Callable[["Services", Life], Awaitable[tuple[bytes, list[Header]]]]


async def serve_beside(services: Services, exchange: Exchange, dialect: Dialect, route: str, take: Take) -> None:
    """Answer with what `take` returns, or the error that it raises in the words of `dialect`; count it as `route`."""
    life = Life(exchange, dialect, exchange.request_id)
    try:
        try:
            body, more = await take(services, life)
            life.status = 200
        except GatewayError as fault:
            error = await count_fault(services, life, fault)
            life.status = error.status
            body = dialect.error(error, life.request_id)
            more = [(name.encode(), value.encode()) for name, value in error.headers.items()]
        outcome = "success" if life.status == 200 else "refused" if life.status < 500 else "error"
        services.metrics.requests.labels(route, outcome, str(life.status)).inc()
        await exchange.respond(life.status, [JSON_TYPE, *life.headers(), *more], body)
    finally:
        if life.room is not None:
            life.room.close()
