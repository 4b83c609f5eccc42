"""The life of a request that reaches models, top to bottom; the same for every dialect.

    authenticate → read ──idempotency key known: the answer of the first request with it──► end
      → route (policy, task, tier) → guardrails → admit (limits and hold, one round trip)
      → look up in the cache ──hit───────────────────────┐
      → ask (retry, fail over, check) → relay: guardrails, metering
      → ledger row, hold settled ←───────────────────────┘ → remember in the cache

There is one way out. Whatever happens on the way (client gone, backend cut, bug, shutdown), `finish` runs once: every
attempt has its row, the hold is settled, and the client has an answer, an error, or nobody is there to receive one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from cache.flight import Following
from gateway.accounting import Accounting
from gateway.admission import admit, authenticate, count_fault, receive
from gateway.caching import Turn, give
from gateway.dialects.dialect import Dialect
from gateway.dialects.errors import GatewayError, Unavailable
from gateway.escalating.asking import ask
from gateway.finish import finish, outcome_of
from gateway.flights.giving import give_as_it_comes
from gateway.guarding.request import guard_request
from gateway.http import JSON_TYPE, ClientGone, Exchange
from gateway.life import Life
from gateway.relay import Keep, relay
from gateway.responses.turns import recall
from gateway.routing.route import route

if TYPE_CHECKING:
    from gateway.services import Services

logger = logging.getLogger("tierline.pipeline")


def endpoint(dialect: Dialect) -> Callable[[Services, Exchange], Awaitable[None]]:
    """The handler of a route that reaches models, for clients of one dialect."""
    return partial(serve, dialect)


async def serve(dialect: Dialect, services: Services, exchange: Exchange) -> None:
    """Serve one request to its end."""
    await live(services, Life(exchange, dialect, exchange.request_id))


async def live(services: Services, life: Life) -> None:
    """The whole of it. A line of a batch comes here with its key known and nobody at the other end."""
    exchange, dialect = life.exchange, life.dialect
    accounting = Accounting(services, life)
    in_flight = False
    try:
        life.principal = life.principal or await authenticate(services, exchange)
        services.metrics.in_flight.inc()
        in_flight = True
        body = await receive(services, life)
        exchange.watch()
        life.asked = await services.measuring.run(life, dialect.parse, body)
        services.begin_span(life)
        if life.idempotency_key is not None and await services.idempotency.repeated(life, body):
            return
        del body  # a long prompt is in memory once, decoded
        await recall(services, life)
        await route(services, life)
        accounting.decided()
        await guard_request(services, life, accounting)
        await admit(services, life)
        life.writer = writer = dialect.writer(life.asked, life.request_id)
        async with Turn(services, life) as turn:
            found = await turn.look_up()
            if isinstance(found, Following):
                await give_as_it_comes(life, accounting, found, writer)
            elif found is not None:
                await give(life, accounting, found, writer)
            else:
                answer = await ask(services, life, accounting)
                good = life.climb is None or life.climb.passed
                keep: Keep | None = turn.keep if turn.writes and good else None
                if (watch := services.watching.begin(life)) is not None:
                    keep = watch.keeping(keep)
                of_one_model = await relay(services, life, accounting, answer, writer, keep=keep)
                exchange.unwatch()  # the client has everything: its leaving ends nothing now
                await turn.remember(of_one_model and good)
                if watch is not None:
                    watch.end(accounting, of_one_model)
    except ClientGone:
        pass
    except asyncio.CancelledError:
        if not exchange.gone:  # the server is stopping and the time to drain is over
            await fail(life, accounting, Unavailable("The gateway is shutting down; try again.", code="shutting_down"))
    except GatewayError as error:
        await fail(life, accounting, await count_fault(services, life, error))
    except Exception:
        logger.exception("request %s failed inside the gateway", life.request_id)
        await fail(life, accounting, GatewayError("The gateway failed on this request; its id helps to find out why."))
    finally:
        exchange.unwatch()
        if in_flight:
            services.metrics.in_flight.dec()
        try:
            await finish(services, life, accounting)
        finally:
            if life.room is not None:
                life.room.close()
            if life.recorder is not None:
                await life.recorder.close()


async def fail(life: Life, accounting: Accounting, error: GatewayError) -> None:
    """Tell the client what went wrong: as an answer, or as the last event of a stream that has begun."""
    life.error = error
    exchange = life.exchange
    if not exchange.started:
        life.status = error.status
    await accounting.settle(*outcome_of(life))
    if exchange.started:
        assert life.writer is not None
        await exchange.end(life.writer.broken(error))
        return
    headers = [JSON_TYPE, *life.headers()]
    headers += [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await exchange.respond(error.status, headers, life.dialect.error(error, life.request_id))
