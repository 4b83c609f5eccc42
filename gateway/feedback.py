"""`POST /v1/feedback`: what the users of an answer think of it.

A bad answer is forgotten by the cache, so that nobody gets it again, and both ratings teach: the promise under which it
was given, and the table that `tier: auto` chooses by. Taken from keys of the team whose request it was; to all others
there is no such request. Counts as a request against the limits per minute; it asks no model, so it costs nothing and
has no row in the ledger.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Final, Literal, TypeVar
from uuid import UUID

import msgspec
from sqlalchemy.exc import SQLAlchemyError

from cache.client import CacheUnavailable, Feedback
from gateway.admission import admit, authenticate, receive
from gateway.beside import serve_beside
from gateway.dialects.errors import BadRequest, NotFound, Unavailable
from gateway.dialects.openai_chat import CHAT
from gateway.dialects.reading import convert, decode
from gateway.http import Exchange, Header
from gateway.life import Life
from gateway.outcomes.rating import Answered, find, rate
from policies.load import Subject

if TYPE_CHECKING:
    from gateway.services import Services

ROUTE = "feedback"
MAX_ID_CHARACTERS = 128
_PATIENCE_S: Final = 5.0
_OTHERS_LAG_S: Final = 0.5
_NEW_S: Final = 600.0  # an answer may take long, and its request's id is as old as the request
_UNKNOWN: Final = Feedback(known=False, evicted=0)
_T = TypeVar("_T")


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
        answered = await _answered(services, given.request_id, principal.team_id)
        request_id = given.request_id if answered is None else answered.request_id
        taken = _UNKNOWN
        if services.cache is not None:
            try:
                taken = await services.cache.feedback(request_id, principal.team_id, given.rating == "good")
            except CacheUnavailable as error:
                raise Unavailable(f"The answer cache cannot take it now: {error}", code="cache_unavailable") from None
        learned = False
        if answered is not None:
            good = given.rating == "good"
            first, learned = await _in_time(rate(services.database, services.policies.current, answered, good=good))
            if first:
                policy, version = answered.policy, answered.policy_version
                services.rollouts.judged(policy, version, answered.key_id, good, "feedback")
            if learned:
                services.metrics.outcomes.labels("feedback", given.rating).inc()
    finally:
        life.standing = await services.queue.settle(life.grant.hold_id, 0, 0) or life.standing
    if answered is None and not taken.known:
        text = (
            f"Nothing is known here of an answer to a request '{given.request_id}' of your team: there was none, or the"
            " id is another's."
        )
        raise NotFound(text, code="request_not_found", param="request_id")
    said = {"request_id": request_id, "rating": given.rating, "evicted": taken.evicted, "learned": learned}
    return msgspec.json.encode(said), []


async def _answered(services: Services, named: str, team_id: str) -> Answered | None:
    """The answer that is meant. Its row comes to the database a moment after the answer to the client."""
    found = await _in_time(find(services.database, named, team_id))
    if found is None:
        await _in_time(services.writer.flush())
        found = await _in_time(find(services.database, named, team_id))
    if found is None and _is_new(named):
        await asyncio.sleep(_OTHERS_LAG_S)  # another process has it, and writes as often
        found = await _in_time(find(services.database, named, team_id))
    return found


def _is_new(named: str) -> bool:
    """Whether this may be the id of a request that has hardly ended: ids say when they were made."""
    try:
        made = UUID(named.removeprefix("req-"))
    except ValueError:
        return False
    return made.version == 7 and 0 <= time.time() - (made.int >> 80) / 1000 < _NEW_S


async def _in_time(work: Awaitable[_T]) -> _T:
    """Raises Unavailable where the database does not do it."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            return await work
    except (SQLAlchemyError, OSError) as error:  # a TimeoutError, too
        text = "The database does not answer now; send it again."
        raise Unavailable(text, code="database_unavailable", headers={"retry-after": "5"}) from error


def _parse(body: bytes) -> FeedbackRequest:
    given = convert(decode(body), FeedbackRequest)
    if not 1 <= len(given.request_id) <= MAX_ID_CHARACTERS or not given.request_id.isprintable():
        raise BadRequest(
            f"'request_id' must have 1 to {MAX_ID_CHARACTERS} printable characters: the 'x-request-id' of an answer.",
            code="invalid_value",
            param="request_id",
        )
    return given
