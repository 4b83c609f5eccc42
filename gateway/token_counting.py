"""`POST /v1/messages/count_tokens`: how long the input of a message would be.

The request is read, routed and refused as the message itself would be, and counts as a request against the limits per
minute; it asks no model, so it costs nothing and has no row in the ledger. The server that would answer counts;
where it cannot, the estimate that rules read is given, and the header `x-tierline-count` says which of both it is.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from backends.attempt import Call
from backends.counting import NotCounted, count_input
from gateway.admission import admit, authenticate, count_fault, receive, route
from gateway.dialects.anthropic_messages import MESSAGES
from gateway.dialects.errors import GatewayError
from gateway.dispatching import native_headers
from gateway.http import JSON_TYPE, Exchange, Header
from gateway.life import Life
from gateway.logs import log

if TYPE_CHECKING:
    from gateway.services import Services

ROUTE = "count_tokens"


async def count_tokens(services: Services, exchange: Exchange) -> None:
    """Answer `{"input_tokens": n}`, or an error in the Anthropic dialect."""
    life = Life(exchange, MESSAGES, exchange.request_id)
    try:
        await _answer(services, life)
    finally:
        if life.room is not None:
            life.room.close()


async def _answer(services: Services, life: Life) -> None:
    headers: list[Header] = [JSON_TYPE]
    try:
        tokens, how = await _count(services, life)
        body = msgspec.json.encode({"input_tokens": tokens})
        life.status = 200
        headers += [*life.headers(), (b"x-tierline-model", life.candidates[0].model.encode("latin-1", "replace"))]
        headers.append((b"x-tierline-count", how))
    except GatewayError as fault:
        error = await count_fault(services, life, fault)
        life.status = error.status
        body = MESSAGES.error(error, life.request_id)
        headers += [*life.headers(), *((name.encode(), value.encode()) for name, value in error.headers.items())]
    outcome = "success" if life.status == 200 else "refused" if life.status < 500 else "error"
    services.metrics.requests.labels(ROUTE, outcome, str(life.status)).inc()
    await life.exchange.respond(life.status, headers, body)


async def _count(services: Services, life: Life) -> tuple[int, bytes]:
    life.principal = await authenticate(services, life.exchange)
    parse = partial(MESSAGES.parse_count, await receive(services, life))
    life.asked = asked = await services.measuring.run(life, parse)
    await route(services, life)
    await admit(services, life, free=True)
    assert life.grant is not None
    candidate = life.candidates[0]
    call = Call(
        payload=asked.payload,
        operation="chat",
        stream=False,
        request_id=life.request_id,
        native=asked.native,
        headers=native_headers(life),
        deadline=life.deadline,
    )
    try:
        if "vision" in asked.needs and services.settings.backends[candidate.backend].dialect != "anthropic":
            raise NotCounted("a tokenizer does not know how many tokens a model makes of an image")
        return await count_input(services.pools[candidate.backend], call, candidate), b"counted"
    except NotCounted as reason:
        log(logging.INFO, "input tokens are estimated", request_id=life.request_id, reason=str(reason))
        return life.input_estimate, b"estimated"
    finally:
        life.standing = await services.queue.settle(life.grant.hold_id, 0, 0) or life.standing
