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
from gateway.accounting import Accounting
from gateway.admission import admit, authenticate, receive
from gateway.beside import serve_beside
from gateway.dialects.anthropic_messages import MESSAGES
from gateway.dispatching import native_headers
from gateway.guarding.request import guard_request
from gateway.http import Exchange, Header
from gateway.life import Life
from gateway.logs import log
from gateway.routing.route import route

if TYPE_CHECKING:
    from gateway.services import Services

ROUTE = "count_tokens"


async def count_tokens(services: Services, exchange: Exchange) -> None:
    """Answer `{"input_tokens": n}`, or an error in the Anthropic dialect."""
    await serve_beside(services, exchange, MESSAGES, ROUTE, _take)


async def _take(services: Services, life: Life) -> tuple[bytes, list[Header]]:
    tokens, how = await _count(services, life)
    model = life.candidates[0].model.encode("latin-1", "replace")
    return msgspec.json.encode({"input_tokens": tokens}), [(b"x-tierline-model", model), (b"x-tierline-count", how)]


async def _count(services: Services, life: Life) -> tuple[int, bytes]:
    life.principal = await authenticate(services, life.exchange)
    parse = partial(MESSAGES.parse_count, await receive(services, life))
    life.asked = asked = await services.measuring.run(life, parse)
    await route(services, life)
    await guard_request(services, life, Accounting(services, life))
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
