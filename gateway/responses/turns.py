"""A request's part in a conversation that is remembered: the earlier turns before it, its own answer after it.

`recall` runs before anything is decided, so that the whole conversation is what is routed, counted and compared with
the cache. The answer is kept before the client has its end (see `gateway.dialects.dialect.Writer`): whoever saw it can
go on from its id, also at another process and after this one was killed. A database that cannot keep it does not cost
the client an answer that is paid for: its `store` then says false.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from backends.protocol import Json
from gateway.bodies import FREE_BYTES
from gateway.dialects.dialect import Memory
from gateway.dialects.errors import BadRequest, NotFound, Unavailable
from gateway.dialects.responses_answer import response_id, with_ids
from gateway.dialects.responses_input import MAX_ITEMS
from gateway.ledger.rows import now_ms
from gateway.life import Life
from gateway.permissions import check_route
from gateway.responses.store import Body, ConversationGone, Kept, StoreUnavailable

if TYPE_CHECKING:
    from gateway.services import Services

_encode = msgspec.json.Encoder().encode
_FIELD = "previous_response_id"


async def recall(services: Services, life: Life) -> None:
    """Put the earlier turns into the request, and let its answer be kept, where the request says so.

    Raises:
        NotFound: the answer to go on from is not there, or not the project's.
        NotAllowed: the key may not use this route.
        BadRequest: nothing is kept here, or the conversation has become too long.
        RateLimited: there is no memory left for the key's conversations.
        Unavailable: nor for anybody's, or the database does not say.
    """
    asked, principal = life.asked, life.principal
    assert asked is not None
    assert principal is not None
    memory = asked.memory
    if memory is None:
        return
    if not services.responses.enabled:
        for name, wanted in (("store", memory.store), (_FIELD, memory.previous)):
            if wanted:
                text = f"This gateway keeps no answers (responses.keep_days is 0); leave '{name}' out."
                raise BadRequest(text, code="unsupported_parameter", param=name)
        return
    last: Kept | None = None
    if memory.previous is not None:
        check_route(principal, life.dialect.route)  # what a key may not use, it may not read either
        last = await _previous(services, principal.project_id, memory.previous)
        if life.room is not None and last.total_bytes > FREE_BYTES:
            await life.room.add(last.total_bytes)
        life.conversation = last.conversation_id
        memory.go_on(items_of(await conversation(services, last)))
    if memory.store is not False:
        life.conversation = life.conversation or response_id(life.request_id)
        memory.keep = partial(_keep, services, principal.project_id, memory, last)


async def conversation(services: Services, last: Kept) -> list[Body]:
    """The answers that led to `last`, and `last` itself.

    Raises:
        NotFound: one of them was deleted.
        Unavailable: the database does not say.
    """
    try:
        return await services.responses.conversation(last)
    except ConversationGone as gone:
        text = f"The conversation goes back to the response '{gone.id}', which was deleted: send its turns in 'input'."
        raise NotFound(text, code="previous_response_not_found", param=_FIELD) from None
    except StoreUnavailable as error:
        raise unavailable() from error


def items_of(bodies: Sequence[Body]) -> list[Json]:
    """Input and output of all of them, in their order."""
    return [item for body in bodies for item in (*body.input, *body.response["output"])]


def unavailable() -> Unavailable:
    return Unavailable("Kept answers cannot be read at the moment; try again later.", code="responses_unavailable")


async def _previous(services: Services, project_id: str, id: str) -> Kept:
    try:
        last = await services.responses.get(project_id, id)
    except StoreUnavailable as error:
        raise unavailable() from error
    if last is None:
        text = f"There is no response '{id[:100]}' to go on from: it may have expired, or was not stored."
        raise NotFound(text, code="previous_response_not_found", param=_FIELD)
    most = services.settings.server.max_body_bytes
    if last.total_bytes > most or last.total_items > MAX_ITEMS:
        text = (
            f"The conversation has {last.total_items} items and {last.total_bytes} bytes; at most {MAX_ITEMS} and "
            f"{most} can be gone on from. Begin a new one with a summary."
        )
        raise BadRequest(text, code="conversation_too_long", param=_FIELD)
    return last


async def _keep(services: Services, project_id: str, memory: Memory, last: Kept | None, response: Json) -> bool:
    """Keep a finished answer; False if the database did not take it."""
    body = _encode(Body(response, with_ids(memory.items, response["id"])))
    kept = Kept(
        id=response["id"],
        conversation_id=last.conversation_id if last else response["id"],
        previous_id=last.id if last else None,
        project_id=project_id,
        created_ms=now_ms(),
        body_bytes=len(body),
        total_bytes=len(body) + (last.total_bytes if last else 0),
        total_items=len(memory.items) + len(response["output"]) + (last.total_items if last else 0),
        body=body,
    )
    try:
        await services.responses.put(kept)
    except StoreUnavailable:  # the store has logged it
        services.metrics.responses_kept.labels("failed").inc()
        return False
    services.metrics.responses_kept.labels("kept").inc()
    return True
