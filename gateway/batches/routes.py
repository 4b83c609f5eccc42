"""`/v1/batches`: a file of requests goes in, files of answers and errors come out. Keys of one project share them.

These routes themselves reach no model: the lines of a batch do, each as a request of the key that made the batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import msgspec

from gateway.access.principal import Principal
from gateway.admission import MAX_TAGS, read_tags
from gateway.batches.line import ENDPOINTS
from gateway.batches.record import WINDOW_MS, Batch
from gateway.batches.store import NoInput, TooManyBatches
from gateway.cache_headers import read as read_cache_headers
from gateway.dialects.errors import BadRequest, GatewayError, NotFound, RateLimited
from gateway.dialects.openai_responses import MAX_NAME, MAX_PAIRS, MAX_VALUE
from gateway.dialects.reading import convert, decode
from gateway.files.asking import after_of, answer, caller, find_file, id_of, invalid, limit_of, query, said
from gateway.files.routes import kept_for
from gateway.http import Exchange
from gateway.ledger.rows import new_id, now_ms
from gateway.permissions import check_pin, check_route
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services

PREFIX: Final = "/v1/batches/"
_MOST_BYTES: Final = 64 * 1024
_PAGE, _MOST_LISTED = 20, 100
# Headers that each line is asked with, as they came with the batch.
_FOR_LINES: Final = ("x-tierline-tags", "x-tierline-tier", "x-tierline-cache", "cache-control")


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    """`anchor` is created_at: `seconds`, from 3600 to 2592000, are counted from when the files are made."""

    anchor: str
    seconds: int


class BatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A batch to make. `endpoint`: what each line asks; `input_file_id`: a file of the purpose `batch`;
    `completion_window` is 24h."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


async def create(services: Services, exchange: Exchange) -> None:
    """`POST /v1/batches`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    headers = line_headers(exchange, principal)
    given = convert(decode(await exchange.body(_MOST_BYTES)), BatchRequest)
    dialect = ENDPOINTS.get(given.endpoint)
    if dialect is None:
        raise invalid(f"must be one of {', '.join(ENDPOINTS)}", "endpoint")
    if given.completion_window != "24h":
        raise invalid("must be 24h", "completion_window")
    check_route(principal, dialect.route)
    _check_metadata(given.metadata or {})
    kept = given.output_expires_after
    file = await find_file(services, principal, given.input_file_id)
    if file.purpose != "batch":
        raise invalid("must name a file of the purpose batch", "input_file_id")
    batch = new_batch(
        principal,
        given.endpoint,
        file.id,
        headers,
        metadata=None if given.metadata is None else msgspec.json.encode(given.metadata).decode(),
        output_expires_s=None if kept is None else kept_for(kept.anchor, kept.seconds, "output_expires_after"),
    )
    await add(services, batch)
    await answer(exchange, batch.shown())


async def listed(services: Services, exchange: Exchange) -> None:
    """`GET /v1/batches`."""
    principal = await caller(services, exchange)
    given = query(exchange, ("after", "limit"))
    limit, after = limit_of(given, _PAGE, _MOST_LISTED), after_of(given)
    with said():
        found = await services.batches.store.page(project_id=principal.project_id, after=after, limit=limit + 1)
    page = [batch.shown() for batch in found[:limit]]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    await answer(exchange, {"object": "list", "data": page, **ends, "has_more": len(found) > limit})


async def retrieve(services: Services, exchange: Exchange) -> None:
    """`GET /v1/batches/{batch_id}`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    id = id_of(exchange, PREFIX)
    with said():
        batch = await services.batches.store.get(id, principal.project_id)
    await answer(exchange, _known(batch, id).shown())


async def cancel(services: Services, exchange: Exchange) -> None:
    """`POST /v1/batches/{batch_id}/cancel`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    if (await exchange.body(_MOST_BYTES)).strip() not in (b"", b"{}"):
        raise BadRequest("There is nothing to say in the body of a cancellation; leave it out.", code="invalid_type")
    id = id_of(exchange, PREFIX)
    with said():
        batch = await services.batches.store.cancel(id, principal.project_id)
    batch = _known(batch, id)
    if batch.ended or batch.status == "finalizing":
        raise GatewayError(
            f"The batch '{id}' is {batch.status}: there is nothing left to cancel.",
            status=409,
            type="invalid_request_error",
            code="batch_ended",
            headers={"x-should-retry": "false"},  # client libraries try again on 409 by themselves
        )
    services.batches.look()
    await answer(exchange, batch.shown())


def new_batch(
    principal: Principal,
    endpoint: str,
    input_file_id: str,
    headers: Mapping[str, str],
    *,
    metadata: str | None = None,
    output_expires_s: int | None = None,
) -> Batch:
    """A batch of this key, with nothing done yet."""
    now = now_ms()
    return Batch(
        id=f"batch_{new_id().replace('-', '')}",
        organisation_id=principal.organisation_id,
        project_id=principal.project_id,
        key_id=principal.key_id,
        endpoint=endpoint,
        input_file_id=input_file_id,
        created_ms=now,
        expires_ms=now + WINDOW_MS,
        metadata=metadata,
        headers=msgspec.json.encode(headers).decode(),
        output_expires_s=output_expires_s,
    )


async def add(services: Services, batch: Batch) -> None:
    """Put a new batch where it is worked on.

    Raises:
        RateLimited: the project has too many.
        NotFound: its file was deleted meanwhile.
        Unavailable: the database is away.
    """
    most = services.settings.batches.max_unfinished
    try:
        with said():
            await services.batches.store.add(batch, most)
    except TooManyBatches:
        text = f"This project has {most} batches that have not ended, as many as it may (batches.max_unfinished)."
        headers = {"retry-after": "60", "x-should-retry": "false"}
        raise RateLimited(f"{text} Wait for one of them.", code="too_many_batches", headers=headers) from None
    except NoInput:
        raise NotFound("The input file is not there any more.", code="file_not_found", param="input_file_id") from None
    services.batches.look()


def line_headers(exchange: Exchange, principal: Principal) -> dict[str, str]:
    """What each line of a batch is asked with.

    Raises:
        BadRequest: a header that makes no sense; NotAllowed: a tier that the key may not use.
    """
    found = {name: value for name in _FOR_LINES if (value := exchange.header(name.encode())) is not None}
    if exchange.has(b"x-tierline-deadline-ms"):
        text = "'x-tierline-deadline-ms' is not for batches, which have 24 hours; leave it out."
        raise BadRequest(text, code="unsupported_header")
    if (tags := found.get("x-tierline-tags")) is not None:
        read_tags(tags, MAX_TAGS - 1)  # a line has one of the gateway's own as well
    read_cache_headers(found.get("cache-control"), found.get("x-tierline-cache"))
    if (tier := found.get("x-tierline-tier")) is not None:
        if tier not in TIERS:
            raise BadRequest(f"'x-tierline-tier' must be one of {', '.join(TIERS)}.", code="invalid_tier")
        check_pin(principal, tier)
    return found


def _known(batch: Batch | None, id: str) -> Batch:
    if batch is None:
        raise NotFound(f"There is no batch '{id[:100]}' here.", code="batch_not_found")
    return batch


def _check_metadata(pairs: Mapping[str, str]) -> None:
    if len(pairs) > MAX_PAIRS or any(len(name) > MAX_NAME or len(value) > MAX_VALUE for name, value in pairs.items()):
        text = f"takes at most {MAX_PAIRS} pairs, names of up to {MAX_NAME} and values of up to {MAX_VALUE} characters"
        raise invalid(text, "metadata")
