"""`POST /v1/feedback`: what the users of an answer think of it.

A bad answer is forgotten by the cache, so that nobody gets it again, and both ratings teach the promise under which it
was given. Taken from keys of the team whose request it was; to all others there is no such request. Counts as a request
against the limits per minute; it asks no model, so it costs nothing and has no row in the ledger.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from cache.client import CacheUnavailable
from gateway.admission import admit, authenticate, receive
from gateway.beside import serve_beside
from gateway.dialects.errors import BadRequest, NotFound, Unavailable
from gateway.dialects.openai_chat import CHAT
from gateway.dialects.reading import convert, decode
from gateway.http import Exchange, Header
from gateway.life import Life
from policies.load import Subject

if TYPE_CHECKING:
    from gateway.services import Services

ROUTE = "feedback"
MAX_ID_CHARACTERS = 128


class FeedbackRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`request_id`: the `x-request-id` of the answer."""

    request_id: str
    rating: Literal["good", "bad"]


async def feedback(services: Services, exchange: Exchange) -> None:
    """Answer `{"request_id", "rating", "evicted"}`, or an error in the OpenAI dialect."""
    await serve_beside(services, exchange, CHAT, ROUTE, _take)


async def _take(services: Services, life: Life) -> tuple[bytes, list[Header]]:
    life.principal = principal = await authenticate(services, life.exchange)
    given = _parse(await receive(services, life))
    subject = Subject(
        organisation=principal.organisation_name,
        team=principal.team_name,
        project=principal.project_name,
        key=principal.key_id,
    )
    life.policy = services.policies.current.resolve(subject)
    await admit(services, life, free=True)
    assert life.grant is not None
    try:
        if services.cache is None:
            raise NotFound("Feedback is for the answer cache, which is off here (cache.enabled).", code="cache_off")
        try:
            taken = await services.cache.feedback(given.request_id, principal.team_id, given.rating == "good")
        except CacheUnavailable as error:
            raise Unavailable(f"The answer cache cannot take it now: {error}", code="cache_unavailable") from None
    finally:
        life.standing = await services.queue.settle(life.grant.hold_id, 0, 0) or life.standing
    if not taken.known:
        text = (
            f"Nothing is known here of a request '{given.request_id}' of your team: its answer was neither taken from"
            " the cache nor kept there, or that is too long ago."
        )
        raise NotFound(text, code="request_not_found", param="request_id")
    said = {"request_id": given.request_id, "rating": given.rating, "evicted": taken.evicted}
    return msgspec.json.encode(said), []


def _parse(body: bytes) -> FeedbackRequest:
    given = convert(decode(body), FeedbackRequest)
    if not 1 <= len(given.request_id) <= MAX_ID_CHARACTERS or not given.request_id.isprintable():
        raise BadRequest(
            f"'request_id' must have 1 to {MAX_ID_CHARACTERS} printable characters: the 'x-request-id' of an answer.",
            code="invalid_value",
            param="request_id",
        )
    return given
