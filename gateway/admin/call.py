"""The life of an admin request: who asks, may they, what do they want, do it, answer.

A route is a row of the table in `routes.py`: its handler gets a `Call` with everything read and checked, and returns
plain data. Unknown fields in a body or a query are refused, with the name that was probably meant.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec

from gateway.access.admin_keys import AdminPrincipal, AdminRole
from gateway.access.audit import Actor
from gateway.access.ceilings import InvalidCeiling
from gateway.access.key_info import InvalidKeyRequest
from gateway.access.levels import InvalidLevel
from gateway.access.owners import UnknownOwner
from gateway.admin.errors import PreconditionFailed
from gateway.admin.service import AdminService, client_address
from gateway.dialects import reading
from gateway.dialects.errors import BadRequest, NotAllowed, NotFound
from gateway.http import JSON_TYPE, Exchange, Header
from gateway.ledger.database import Database
from gateway.ledger.money import InvalidAmount
from gateway.ledger.reports import InvalidReport
from gateway.logs import log

if TYPE_CHECKING:
    from gateway.services import Services

_Query = TypeVar("_Query")
_Body = TypeVar("_Body")
_Result = TypeVar("_Result")

MAX_BODY_BYTES = 1 << 20
_PASSING = ("keys", "state", "former_secrets")
# What the functions behind the API say of a request that makes no sense; the message names the field.
_INVALID = (InvalidKeyRequest, InvalidLevel, InvalidCeiling, InvalidReport, InvalidAmount, UnknownOwner)
# Words of the commands, and the fields that mean the same here.
_ALSO = {"all": "everything", "rpm": "requests_per_minute", "tpm": "tokens_per_minute"}
_encoder = msgspec.json.Encoder()


@dataclass(frozen=True, slots=True)
class Call(Generic[_Query, _Body]):
    """One request, read and checked. `path` holds the parts of the path by the names that the route gives them."""

    services: Services
    admin: AdminService
    exchange: Exchange
    caller: AdminPrincipal
    path: Mapping[str, str]
    query: _Query
    body: _Body

    @property
    def actor(self) -> Actor:
        """Who the audit log names."""
        return Actor(f"admin:{self.caller.key_id}", self.exchange.request_id, client_address(self.exchange))

    async def database(self, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
        """Run `work` on the database, off this event loop."""
        return await self.admin.database.run(work)

    def check_mine(self, organisation_id: str | None, what: str) -> None:
        """Hide what belongs to an organisation that the caller's key is not for.

        Raises:
            NotFound: as if it did not exist.
        """
        mine = self.caller.organisation_id
        if mine is not None and organisation_id != mine:
            raise NotFound(f"There is no {what}.")

    def check_unchanged(self, etag: str) -> bool:
        """Keep to the client's `if-match`. Returns whether it names a state, which must then be there until the change.

        Raises:
            PreconditionFailed: it names another state than `etag`.
        """
        wanted = self.exchange.header(b"if-match")
        if wanted is None or wanted.strip() == "*":
            return False
        if wanted.strip() != etag:
            raise PreconditionFailed(f"It was changed meanwhile: read it again. It is {etag} now, not {wanted[:80]}.")
        return True


@dataclass(frozen=True, slots=True)
class Text:
    """An answer that is not JSON."""

    body: str
    content_type: str


# A table holds handlers of every kind of query and body; each handler says its own.
AnyCall = Call[Any, Any]
Handler = Callable[[AnyCall], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """A row of the table. `gateway_wide`: what it shows or does belongs to no single organisation.

    `answer` is the type of what the handler returns; with `tagged` the answer carries an ETag. `text` is the media type
    of the `Text` that it may return instead.
    """

    method: str
    path: str
    summary: str
    handler: Handler
    answer: Any
    query: type[msgspec.Struct] | None = None
    body: type[msgspec.Struct] | None = None
    role: AdminRole = "read"
    status: int = 200
    gateway_wide: bool = False
    tagged: bool = False
    text: str | None = None

    async def serve(self, services: Services, exchange: Exchange, path: Mapping[str, str]) -> None:
        """Answer one request.

        Raises:
            GatewayError: what is wrong with it.
        """
        admin = services.admin
        assert admin is not None  # routes are found only where the admin API is on
        caller = await admin.authenticate(exchange)
        if self.role == "write" and not caller.may_write:
            raise NotAllowed(
                "This admin key may read, not change. Use one with the role 'write'.", code="read_only_key"
            )
        if self.gateway_wide and caller.organisation_id is not None:
            text = "This admin key is for one organisation; this belongs to the whole gateway."
            raise NotAllowed(text, code="organisation_key")
        self._refuse_headers(exchange)
        query = _query(exchange, self.query)
        body = await self._read(exchange)
        call = Call(services, admin, exchange, caller, path, query, body)
        try:
            answer = await self.handler(call)
        except _INVALID as error:
            raise BadRequest(_sentence(str(error)), code="invalid_value", param=error.field) from None
        if self.role == "write":
            log(
                logging.INFO,
                "admin change",
                request_id=exchange.request_id,
                admin_key=caller.prefix,
                change=f"{self.method} {exchange.scope['path']}",
            )
        await self._respond(exchange, answer)

    def _refuse_headers(self, exchange: Exchange) -> None:
        """Raises BadRequest for a header that asks for what this route does not do."""
        if exchange.header(b"idempotency-key") is not None:
            text = (
                "'idempotency-key' is not supported here; leave it out. PATCH and revoke may be repeated as they are."
            )
            raise BadRequest(text, code="unsupported_header")
        if exchange.header(b"if-match") is not None and not (self.tagged and self.method == "PATCH"):
            text = "'if-match' is for PATCH of what has an ETag; leave it out."
            raise BadRequest(text, code="unsupported_header")

    async def _read(self, exchange: Exchange) -> Any:
        data = await exchange.body(MAX_BODY_BYTES)
        if self.body is None:
            if data.strip():
                raise BadRequest(f"{self.method} {self.path} takes no body.", code="invalid_type")
            return None
        payload = reading.decode(data or b"{}")
        _refuse_unknown(payload, self.body, "the body")
        return reading.convert(payload, self.body)

    async def _respond(self, exchange: Exchange, answer: Any) -> None:
        headers: list[Header] = [(b"x-request-id", exchange.request_id.encode()), (b"cache-control", b"no-store")]
        if isinstance(answer, Text):
            headers.append((b"content-type", answer.content_type.encode()))
            await exchange.respond(self.status, headers, answer.body.encode())
            return
        if self.tagged:
            headers.append((b"etag", etag_of(answer).encode()))
        await exchange.respond(self.status, [JSON_TYPE, *headers], _encoder.encode(answer))


def etag_of(answer: msgspec.Struct) -> str:
    """A short name for the state of an object: of what can be changed in it, not of what changes by itself."""
    terms = {name: value for name, value in msgspec.structs.asdict(answer).items() if name not in _PASSING}
    return f'"{hashlib.sha256(_encoder.encode(terms)).hexdigest()[:16]}"'


def _query(exchange: Exchange, kind: type[msgspec.Struct] | None) -> Any:
    try:
        pairs = parse_qsl(exchange.scope["query_string"].decode(), keep_blank_values=True, errors="strict")
    except UnicodeDecodeError:
        raise BadRequest("The query is not UTF-8.") from None
    given = dict(pairs)
    if len(given) < len(pairs):
        twice = next(name for name, _ in pairs if [other for other, _ in pairs].count(name) > 1)
        raise BadRequest(f"'{twice[:100]}' stands twice in the query.", param=twice[:100])
    if kind is None:
        if given:
            name = next(iter(given))[:100]
            raise BadRequest(
                f"The query has '{name}', but nothing is asked here.", code="unknown_parameter", param=name
            )
        return None
    _refuse_unknown(given, kind, "the query")
    try:
        return msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        text, _, where = str(error).partition(" - at `$.")
        name = where.rstrip("`")
        raise BadRequest(f"'{name}' in the query: {text}.", code="invalid_value", param=name or None) from None


def _refuse_unknown(given: Mapping[str, Any], kind: type[msgspec.Struct], where: str) -> None:
    known = kind.__struct_encode_fields__
    for name in given:
        if name not in known:
            near = [_ALSO[name]] if _ALSO.get(name) in known else difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean '{near[0]}'?" if near else f" Known are: {', '.join(known) or 'none'}."
            shown = name[:100]
            raise BadRequest(f"Unknown field '{shown}' in {where}.{hint}", code="unknown_parameter", param=shown)


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}" + ("" if text.endswith((".", "?")) else ".")
