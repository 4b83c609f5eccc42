"""What the routes for files and batches have in common: who asks, what stands behind the question mark, answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Collection
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, unquote

import msgspec
from sqlalchemy.exc import DBAPIError

from backends.protocol import whole_number
from gateway.access.principal import Principal
from gateway.admission import authenticate
from gateway.dialects.errors import BadRequest, NotFound, TooLarge, Unavailable
from gateway.files.content import StorageFull, is_full
from gateway.files.store import File, FileStore, FilesUnavailable, TooMuch, reason
from gateway.http import JSON_TYPE, Exchange, Header
from gateway.permissions import check_route

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gateway.services import Services

logger = logging.getLogger("tierline.files")

ROUTE: Final = "batches"  # what keys call these routes in `allowed_routes`
_encode = msgspec.json.Encoder().encode


async def caller(services: Services, exchange: Exchange) -> Principal:
    """Who asks; a key that may.

    Raises:
        Unauthenticated, NotAllowed: it may not.
        BadRequest: a header that asks for what is not done here.
    """
    principal = await authenticate(services, exchange)
    check_route(principal, ROUTE)
    if exchange.has(b"idempotency-key"):
        raise BadRequest("'idempotency-key' is not supported here; leave it out.", code="unsupported_header")
    return principal


def query(exchange: Exchange, known: Collection[str]) -> dict[str, str]:
    """The parameters behind the question mark.

    Raises:
        BadRequest: one that is not `known`, or that stands there twice.
    """
    found: dict[str, str] = {}
    for name, value in parse_qsl(exchange.scope["query_string"].decode("latin-1"), keep_blank_values=True):
        if name not in known:
            raise BadRequest(f"Unknown parameter '{name[:80]}'.", code="unknown_parameter", param=name[:80])
        if name in found:
            raise invalid("stands twice in the query", name)
        found[name] = value
    return found


def limit_of(given: dict[str, str], default: int, most: int) -> int:
    """How many items a page shall have. Raises BadRequest."""
    limit = whole_number(given.get("limit", str(default)), 5)
    if limit is None or not 1 <= limit <= most:
        raise invalid(f"must be a whole number from 1 to {most}", "limit")
    return limit


def after_of(given: dict[str, str], name: str = "after") -> str | None:
    """The item that a page goes on behind. Raises BadRequest."""
    after = given.get(name)
    if after is not None and not (after.isascii() and after.isprintable() and 1 <= len(after) <= 100):
        raise invalid("is no id of a list", name)
    return after


def id_of(exchange: Exchange, prefix: str) -> str:
    """The id in a path, as it can be looked for."""
    id = unquote(exchange.scope["path"].removeprefix(prefix).partition("/")[0])
    return id if id.isprintable() else ""


def invalid(what: str, param: str) -> BadRequest:
    return BadRequest(f"'{param}' {what}.", code="invalid_value", param=param)


@contextmanager
def said() -> Iterator[None]:
    """Say in the API's words what storage does not do.

    Raises:
        Unavailable, TooLarge.
    """
    try:
        yield
    except TooMuch as error:
        most = f"{error.most_bytes} bytes in all (batches.max_project_bytes)"
        text = f"The files of this project may have {most}, which leaves no room for this one. Delete some."
        raise TooLarge(text, code="project_files_full") from None
    except (StorageFull, FilesUnavailable, DBAPIError, OSError) as error:
        if isinstance(error, StorageFull) or is_full(error):
            text = "The gateway has no space left for files; tell whoever runs it. Nothing of this file was kept."
            raise Unavailable(text, code="storage_full", headers={"x-should-retry": "false"}) from None
        logger.error("files and batches cannot be reached: %s", reason(error))
        text = "Files and batches cannot be reached now, because the database is away. Try again."
        raise Unavailable(text, code="files_unavailable", headers={"retry-after": "5"}) from error


async def find_file(services: Services, principal: Principal, id: str) -> File:
    """A file of the key's project. Raises NotFound, Unavailable."""
    with said():
        file = await services.files.get(principal.project_id, id) if id.startswith("file-") else None
    if file is None:
        raise NotFound(f"There is no file '{id[:100]}' here; it may have expired.", code="file_not_found")
    return file


async def answer(exchange: Exchange, document: Any) -> None:
    await exchange.respond(200, [JSON_TYPE, *_headers(exchange)], _encode(document))


async def send_file(exchange: Exchange, files: FileStore, file: File, content_type: bytes) -> None:
    """The bytes of a file. A client that leaves ends it.

    Raises:
        NotFound: they are gone.
        RuntimeError: they end in the middle; the connection then ends, too.
    """
    pieces = files.content.read(file.id)
    with said():
        try:
            piece = await anext(pieces, b"")
        except FileNotFoundError:
            raise NotFound("The content of this file is gone.", code="file_not_found") from None
    left = file.bytes
    headers = [(b"content-type", content_type), (b"content-length", b"%d" % left), *_headers(exchange)]
    await exchange.start(200, headers)
    async for data in _all(piece, pieces):
        left -= len(data)
        if left < 0 or exchange.left():
            return
        await exchange.write(data)
    if left:
        raise RuntimeError(f"the file {file.id} has {left} bytes less than it should")
    await exchange.end()


async def _all(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    if first:
        yield first
    async for data in rest:
        yield data


def _headers(exchange: Exchange) -> list[Header]:
    return [(b"x-request-id", exchange.request_id.encode()), (b"cache-control", b"no-store")]
