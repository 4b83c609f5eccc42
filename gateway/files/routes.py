"""`/v1/files`: what clients upload for batches, and fetch of them. Keys of one project share its files.

These routes reach no model, so they cost nothing and have no row in the ledger.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from backends.protocol import whole_number
from gateway.dialects.errors import BadRequest, GatewayError, NotFound
from gateway.files.asking import after_of, answer, caller, find_file, id_of, invalid, limit_of, query, said, send_file
from gateway.files.store import PURPOSES, FileInUse
from gateway.files.upload import FRAMING_BYTES, read_form
from gateway.http import Exchange

if TYPE_CHECKING:
    from gateway.services import Services

PREFIX: Final = "/v1/files/"
MOST_LISTED: Final = 10_000
# How long a client may have a file kept.
LEAST_KEPT_S: Final = 3600
MOST_KEPT_S: Final = 30 * 86_400
_FIELDS: Final = ("purpose", "expires_after[anchor]", "expires_after[seconds]")


async def create(services: Services, exchange: Exchange) -> None:
    """`POST /v1/files`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    most = services.settings.batches.max_file_bytes
    with said():
        writing = await services.files.write(principal.project_id, "batch", bounded=True)
    try:
        with said():
            content_type, pieces = exchange.header(b"content-type"), exchange.pieces(most + FRAMING_BYTES)
            form = await read_form(content_type, pieces, writing.add, most)
            keep_s = _checked(form.fields)
            assert form.filename is not None
            file = await writing.finish(form.filename, keep_s)
    except BaseException:
        await writing.abandon()
        raise
    await answer(exchange, file.shown())


async def listed(services: Services, exchange: Exchange) -> None:
    """`GET /v1/files`."""
    principal = await caller(services, exchange)
    given = query(exchange, ("after", "limit", "order", "purpose"))
    limit, after = limit_of(given, MOST_LISTED, MOST_LISTED), after_of(given)
    order, purpose = given.get("order", "desc"), given.get("purpose")
    if order not in ("asc", "desc"):
        raise invalid("must be asc or desc", "order")
    purposes = [one for one in PURPOSES if purpose in (None, one)]  # of any other purpose there is none
    with said():
        found = await services.files.page(
            principal.project_id, purposes=purposes, after=after, limit=limit + 1, newest_first=order == "desc"
        )
    page = [file.shown() for file in found[:limit]]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    await answer(exchange, {"object": "list", "data": page, **ends, "has_more": len(found) > limit})


async def retrieve(services: Services, exchange: Exchange) -> None:
    """`GET /v1/files/{file_id}`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    await answer(exchange, (await find_file(services, principal, id_of(exchange, PREFIX))).shown())


async def content(services: Services, exchange: Exchange) -> None:
    """`GET /v1/files/{file_id}/content`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    file = await find_file(services, principal, id_of(exchange, PREFIX))
    await send_file(exchange, services.files, file, b"application/octet-stream")


async def remove(services: Services, exchange: Exchange) -> None:
    """`DELETE /v1/files/{file_id}`."""
    principal, id = await caller(services, exchange), id_of(exchange, PREFIX)
    query(exchange, ())
    try:
        with said():
            gone = await services.files.remove(principal.project_id, id)
    except FileInUse as error:
        raise GatewayError(
            f"The batch '{error.batch_id}' needs this file. Delete it when that has ended, or cancel it first.",
            status=409,
            type="invalid_request_error",
            code="file_in_use",
            headers={"x-should-retry": "false"},  # client libraries try again on 409 by themselves
        ) from None
    if not gone:
        raise NotFound(f"There is no file '{id[:100]}' here; it may have expired.", code="file_not_found")
    await answer(exchange, {"id": id, "object": "file", "deleted": True})


def _checked(fields: dict[str, str]) -> int | None:
    """For how many seconds the file is kept, if the form says so.

    Raises:
        BadRequest: a field that is unknown, missing or wrong.
    """
    for name in fields:
        if name not in _FIELDS:
            shown = re.sub(r"[^\x20-\x7e]", "?", name)[:80]
            raise BadRequest(f"Unknown field '{shown}' in the form.", code="unknown_parameter", param=shown)
    purpose = fields.get("purpose")
    if purpose is None:
        raise BadRequest("The form has no 'purpose'.", code="missing_required_parameter", param="purpose")
    if purpose != "batch":
        raise invalid("must be batch: files are taken for batches only", "purpose")
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    return kept_for(anchor, whole_number(seconds or "", 9), "expires_after")


def kept_for(anchor: str | None, seconds: int | None, name: str) -> int:
    """The seconds of an `expires_after`. Raises BadRequest."""
    if anchor != "created_at":
        raise invalid("must be created_at", f"{name}[anchor]")
    if seconds is None or not LEAST_KEPT_S <= seconds <= MOST_KEPT_S:
        raise invalid(f"must be a whole number from {LEAST_KEPT_S} to {MOST_KEPT_S}", f"{name}[seconds]")
    return seconds
