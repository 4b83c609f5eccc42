"""`/v1/messages/batches`: Anthropic's form of batches. The same batches as those of files, under another name.

    requests ─► a file with a line for each ─► a batch of /v1/messages ─► its two files ─► results, a line for each

What a batch is, how it is asked and what it costs is as with `/v1/batches`; ids differ by how they begin.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import msgspec

from gateway.access.principal import Principal
from gateway.batches.checking import Wrong, read_line
from gateway.batches.record import Batch
from gateway.batches.routes import add, line_headers, new_batch
from gateway.dialects.anthropic_messages import MESSAGES
from gateway.dialects.errors import BadRequest, GatewayError, NotFound
from gateway.dialects.reading import convert, decode
from gateway.files.asking import after_of, answer, caller, find_file, id_of, limit_of, query, said
from gateway.files.store import File, lines_of
from gateway.http import Exchange
from gateway.permissions import check_route

if TYPE_CHECKING:
    from gateway.services import Services

PREFIX: Final = "/v1/messages/batches/"
ENDPOINT: Final = "/v1/messages"
_PAGE, _MOST_LISTED = 20, 100
_MOST_OF_CANCEL: Final = 1024
_OURS, _THEIRS = "batch_", "msgbatch_"
_STATES: Final[Mapping[str, str]] = {"validating": "in_progress", "finalizing": "in_progress",
                                     "in_progress": "in_progress", "cancelling": "canceling"}  # fmt: skip
# What became of a line that has no answer, by the code of the error that stands in its place.
_UNASKED: Final[Mapping[str, str]] = {"batch_cancelled": "canceled", "batch_expired": "expired"}
_encode = msgspec.json.Encoder().encode


class BatchedMessage(msgspec.Struct, forbid_unknown_fields=True):
    """One request: `params` is what `POST /v1/messages` takes."""

    custom_id: str
    params: dict[str, Any]


class MessageBatchRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A batch to make: its requests, each with a `custom_id` of its own."""

    requests: list[BatchedMessage]


class _Response(msgspec.Struct):
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Kept(msgspec.Struct):
    """A line of an output or error file."""

    custom_id: str
    response: _Response | None = None
    error: _Error | None = None


_kept = msgspec.json.Decoder(_Kept)


async def create(services: Services, exchange: Exchange) -> None:
    """`POST /v1/messages/batches`."""
    principal = await caller(services, exchange)
    query(exchange, ())
    check_route(principal, MESSAGES.route)
    headers = line_headers(exchange, principal)
    room = services.bodies.room(principal.key_id, None)
    try:
        body = await exchange.body(services.settings.server.max_body_bytes, None, room)
        given = convert(decode(body), MessageBatchRequest)
        del body
        lines = list(_lines(given.requests, services.settings.batches.max_requests))
        with said():
            file = await _written(services, principal, lines)
    finally:
        room.close()
    batch = msgspec.structs.replace(new_batch(principal, ENDPOINT, file.id, headers), total=len(lines))
    await add(services, batch)
    await answer(exchange, await _shown(services, exchange, batch))


async def listed(services: Services, exchange: Exchange) -> None:
    """`GET /v1/messages/batches`."""
    principal = await caller(services, exchange)
    given = query(exchange, ("after_id", "limit"))
    limit, after = limit_of(given, _PAGE, _MOST_LISTED), after_of(given, "after_id")
    behind = None if after is None else _ours(after)
    with said():
        found = await services.batches.store.page(
            project_id=principal.project_id, endpoint=ENDPOINT, after=behind, limit=limit + 1
        )
    page = [await _shown(services, exchange, batch) for batch in found[:limit]]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    await answer(exchange, {"data": page, **ends, "has_more": len(found) > limit})


async def retrieve(services: Services, exchange: Exchange) -> None:
    """`GET /v1/messages/batches/{message_batch_id}`."""
    batch = await _known(services, exchange, await caller(services, exchange))
    await answer(exchange, await _shown(services, exchange, batch))


async def cancel(services: Services, exchange: Exchange) -> None:
    """`POST /v1/messages/batches/{message_batch_id}/cancel`. One that has ended stays as it is."""
    principal = await caller(services, exchange)
    if (await exchange.body(_MOST_OF_CANCEL)).strip() not in (b"", b"{}"):
        raise BadRequest("There is nothing to say in the body of a cancellation; leave it out.", code="invalid_type")
    batch = await _known(services, exchange, principal)
    with said():
        batch = await services.batches.store.cancel(batch.id, principal.project_id) or batch
    services.batches.look()
    await answer(exchange, await _shown(services, exchange, batch))


async def results(services: Services, exchange: Exchange) -> None:
    """`GET /v1/messages/batches/{message_batch_id}/results`: a JSON line for each request, answered ones first."""
    principal = await caller(services, exchange)
    batch = await _known(services, exchange, principal)
    if not batch.ended:
        text = "The batch has not ended: its results are there when 'processing_status' is ended."
        raise GatewayError(text, status=404, type="not_found_error", code="batch_not_ended")
    files = [await find_file(services, principal, id) for id in (batch.output_file_id, batch.error_file_id) if id]
    await exchange.start(200, [(b"content-type", b"application/x-jsonl"), (b"cache-control", b"no-store"),
                               (b"x-request-id", exchange.request_id.encode())])  # fmt: skip
    async for kept in _lines_in(services, files):
        if exchange.left():
            return
        await exchange.write(_encode({"custom_id": kept.custom_id, "result": _result(kept)}) + b"\n")
    await exchange.end()


def _lines(requests: list[BatchedMessage], most: int) -> list[bytes]:
    """The lines of the input file.

    Raises:
        BadRequest: there is none, there are too many, or one is wrong.
    """
    if not requests or len(requests) > most:
        raise BadRequest(f"'requests' must hold 1 to {most} requests (batches.max_requests).", param="requests")
    lines, seen = [], set[str]()
    for number, request in enumerate(requests):
        where = f"requests.{number}"
        if request.custom_id in seen:
            text = f"'custom_id' is '{request.custom_id[:100]}' in an earlier request, too."
            raise BadRequest(text, code="duplicate_custom_id", param=f"{where}.custom_id")
        seen.add(request.custom_id)
        line = {"custom_id": request.custom_id, "method": "POST", "url": ENDPOINT, "body": request.params}
        lines.append(_encode(line))
        try:
            read_line(number + 1, lines[-1], ENDPOINT)
        except Wrong as wrong:
            raise BadRequest(f"{where}: {wrong.message}", code=wrong.code, param=where) from None
    return lines


async def _written(services: Services, principal: Principal, lines: list[bytes]) -> File:
    writing = await services.files.write(principal.project_id, "batch", bounded=True)
    try:
        for line in lines:
            await writing.add(line + b"\n")
        return await writing.finish("requests.jsonl", None)
    except BaseException:
        await writing.abandon()
        raise


async def _known(services: Services, exchange: Exchange, principal: Principal) -> Batch:
    """The batch that the path names.

    Raises:
        NotFound: it is not there, of another project, or was made of a file for another endpoint.
    """
    query(exchange, ())
    id = id_of(exchange, PREFIX)
    with said():
        batch = await services.batches.store.get(_ours(id), principal.project_id)
    if batch is None or batch.endpoint != ENDPOINT:
        raise NotFound(f"There is no batch of messages '{id[:100]}' here.", code="batch_not_found")
    return batch


async def _shown(services: Services, exchange: Exchange, batch: Batch) -> dict[str, Any]:
    """As Anthropic's API shows it."""
    id = f"{_THEIRS}{batch.id.removeprefix(_OURS)}"
    counts = Counter(succeeded=batch.completed, errored=batch.failed)
    if batch.ended:
        if batch.status in ("cancelled", "expired") and batch.error_file_id is not None:
            file = await services.files.get(batch.project_id, batch.error_file_id)
            counts = Counter(succeeded=batch.completed)
            async for kept in _lines_in(services, [] if file is None else [file]):
                counts[_result(kept)["type"]] += 1
    else:
        counts["processing"] = max(0, batch.total - batch.completed - batch.failed)
    names = ("processing", "succeeded", "errored", "canceled", "expired")
    return {
        "id": id,
        "type": "message_batch",
        "processing_status": "ended" if batch.ended else _STATES[batch.status],
        "request_counts": {name: counts[name] for name in names},
        "created_at": _moment(batch.created_ms),
        "expires_at": _moment(batch.expires_ms),
        "ended_at": _moment(batch.ended_ms),
        "cancel_initiated_at": _moment(batch.cancelling_ms),
        "archived_at": None,
        "results_url": f"{_origin(exchange)}{PREFIX}{id}/results" if batch.ended else None,
    }


async def _lines_in(services: Services, files: list[File]) -> AsyncIterator[_Kept]:
    for file in files:
        async for line in lines_of(services.files.content.read(file.id), 1 << 62):
            if line:
                yield _kept.decode(line)


def _result(kept: _Kept) -> dict[str, Any]:
    """What a line came to, in Anthropic's words."""
    if kept.error is not None:
        unasked = _UNASKED.get(kept.error.code)
        if unasked is not None:
            return {"type": unasked}
        error = {"type": "invalid_request_error", "message": kept.error.message}
        return {"type": "errored", "error": {"type": "error", "error": error}}
    assert kept.response is not None
    body = msgspec.json.decode(kept.response.body)
    if body.get("type") == "error":
        return {"type": "errored", "error": body}
    return {"type": "succeeded", "message": kept.response.body}


def _ours(id: str) -> str:
    """The id of the batch behind one of Anthropic's; one that is of no such form is nobody's."""
    return f"{_OURS}{id.removeprefix(_THEIRS)}" if id.startswith(_THEIRS) else ""


def _moment(ms: int | None) -> str | None:
    return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")


def _origin(exchange: Exchange) -> str:
    """Where the client reached this gateway."""
    return f"{exchange.scope.get('scheme', 'http')}://{exchange.header(b'host') or 'localhost'}"
