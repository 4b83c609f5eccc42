"""What can be done with a kept answer: look it up, list what it was made from, delete it.

Only keys of the project that asked for it know of it; to all others it is not there. These routes reach no model, so
they cost nothing and have no row in the ledger.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qsl, unquote

import msgspec

from backends.protocol import Json, whole_number
from gateway.access.principal import Principal
from gateway.admission import authenticate
from gateway.bodies import FREE_BYTES
from gateway.dialects.errors import BadRequest, NotFound
from gateway.dialects.openai_responses import RESPONSES
from gateway.dialects.responses_input import unsupported
from gateway.http import JSON_TYPE, Exchange
from gateway.permissions import check_route
from gateway.responses.store import Kept, StoreUnavailable
from gateway.responses.turns import conversation, items_of, unavailable

if TYPE_CHECKING:
    from gateway.services import Services

PREFIX: Final = "/v1/responses/"
_PAGE, _MAX_PAGE = 20, 100
# What is in every answer and item, whether `include` asks for it or not.
_THERE: Final = ("message.output_text.logprobs", "message.input_image.image_url")
_encode = msgspec.json.Encoder().encode


async def retrieve(services: Services, exchange: Exchange) -> None:
    """`GET /v1/responses/{response_id}`."""
    principal, kept = await _find(services, exchange)
    query = _query(exchange, ("stream", "starting_after", "include_obfuscation"))
    for name, value in query.items():
        if value != "false":
            raise unsupported("Only answers in the background can be streamed again; there are none here.", name)
    async with _room(services, principal, kept.body_bytes):
        await _json(exchange, kept.read().response)


async def remove(services: Services, exchange: Exchange) -> None:
    """`DELETE /v1/responses/{response_id}`."""
    principal, id = await _caller(services, exchange), _id(exchange)
    _query(exchange, ())
    try:
        if not await services.responses.remove(principal.project_id, id):
            raise _not_found(services, id)
    except StoreUnavailable as error:
        raise unavailable() from error
    await _json(exchange, {"id": id, "object": "response", "deleted": True})


async def input_items(services: Services, exchange: Exchange) -> None:
    """`GET /v1/responses/{response_id}/input_items`: all that the model was given, the earlier turns included."""
    principal, kept = await _find(services, exchange)
    query = _query(exchange, ("after", "limit", "order"))
    limit = whole_number(query.get("limit", str(_PAGE)), 4)
    if limit is None or not 1 <= limit <= _MAX_PAGE:
        raise _invalid(f"must be a whole number from 1 to {_MAX_PAGE}", "limit")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise _invalid("must be asc or desc", "order")
    async with _room(services, principal, kept.total_bytes):
        *earlier, own = await conversation(services, kept)
        items = [*items_of(earlier), *own.input]
        if order == "desc":
            items.reverse()
        start = 0
        if "after" in query:
            start = next((i + 1 for i, item in enumerate(items) if item["id"] == query["after"]), 0)
            if not start:
                raise _invalid("names no item of this response", "after")
        page = items[start : start + limit]
        ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
        await _json(exchange, {"object": "list", "data": page, **ends, "has_more": start + limit < len(items)})


async def cancel(services: Services, exchange: Exchange) -> None:
    """`POST /v1/responses/{response_id}/cancel`: nothing here runs in the background, so nothing can be cancelled."""
    _, kept = await _find(services, exchange)
    text = f"The response '{kept.id}' is complete: only answers in the background can be cancelled. To cancel one that "
    raise BadRequest(f"{text}is still being written, close its connection.", code="not_in_background")


async def _caller(services: Services, exchange: Exchange) -> Principal:
    principal = await authenticate(services, exchange)
    check_route(principal, RESPONSES.route)
    return principal


@asynccontextmanager
async def _room(services: Services, principal: Principal, needed_bytes: int) -> AsyncIterator[None]:
    """Memory for what is read from the database, shared with the bodies of requests.

    Raises:
        RateLimited, Unavailable: there is none.
    """
    room = services.bodies.room(principal.key_id)
    try:
        if needed_bytes > FREE_BYTES:
            await room.add(needed_bytes)
        yield
    finally:
        room.close()


async def _find(services: Services, exchange: Exchange) -> tuple[Principal, Kept]:
    principal, id = await _caller(services, exchange), _id(exchange)
    try:
        kept = await services.responses.get(principal.project_id, id)
    except StoreUnavailable as error:
        raise unavailable() from error
    if kept is None:
        raise _not_found(services, id)
    return principal, kept


def _id(exchange: Exchange) -> str:
    return unquote(exchange.scope["path"].removeprefix(PREFIX).partition("/")[0])


def _not_found(services: Services, id: str) -> NotFound:
    why = "it may have expired, or was not stored"
    if not services.responses.enabled:
        why = "this gateway keeps no answers (responses.keep_days is 0)"
    return NotFound(f"There is no response '{id[:100]}' here: {why}.", code="response_not_found")


def _query(exchange: Exchange, known: Collection[str]) -> dict[str, str]:
    """The parameters behind the question mark, `include` taken out.

    Raises:
        BadRequest: one that is not `known`, or that asks to include what is not there.
    """
    found: dict[str, str] = {}
    for name, value in parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name.removesuffix("[]") == "include":
            if value not in _THERE:
                raise unsupported(f"'include': only {' and '.join(_THERE)} can be given.", "include")
        elif name not in known:
            raise BadRequest(f"Unknown parameter '{name[:80]}'.", code="unknown_parameter", param=name[:80])
        else:
            found[name] = value
    return found


def _invalid(what: str, param: str) -> BadRequest:
    return BadRequest(f"'{param}' {what}.", code="invalid_value", param=param)


async def _json(exchange: Exchange, document: Json) -> None:
    headers = [JSON_TYPE, (b"x-request-id", exchange.request_id.encode())]
    await exchange.respond(200, headers, _encode(document))
