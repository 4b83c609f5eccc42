"""What the admin API needs besides the gateway's services: its database thread, and who may come in."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from gateway.access.admin_keys import AdminPrincipal, authenticate_admin
from gateway.access.principal import AuthenticationError
from gateway.access.secret import ServerSecret
from gateway.admin.offloop import DatabaseThread
from gateway.dialects.errors import RateLimited, Unauthenticated
from gateway.http import Exchange
from gateway.logs import log

if TYPE_CHECKING:
    from gateway.settings import Settings

# Wrong keys that one address may send in a row, and then per minute.
FAILURES: Final = 10
FAILURES_PER_MINUTE: Final = 10.0
_MOST_ADDRESSES: Final = 10_000
_MOST_KNOWN: Final = 1_000


class Failures:
    """Counts wrong keys by address: a bucket each, that drains evenly. It forgets the addresses seen longest ago."""

    def __init__(self) -> None:
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def wait_s(self, address: str, now_s: float) -> float:
        """Seconds until this address may try again; 0: now."""
        over = self._level(address, now_s) - FAILURES + 1
        return max(0.0, over * 60.0 / FAILURES_PER_MINUTE)

    def add(self, address: str, now_s: float) -> None:
        self._levels[address] = (self._level(address, now_s) + 1, now_s)
        self._levels.move_to_end(address)
        if len(self._levels) > _MOST_ADDRESSES:
            self._levels.popitem(last=False)

    def _level(self, address: str, now_s: float) -> float:
        level, at_s = self._levels.get(address, (0.0, now_s))
        return max(0.0, level - (now_s - at_s) * FAILURES_PER_MINUTE / 60.0)


class AdminService:
    """One per gateway process that serves the admin API. `close` ends its thread."""

    def __init__(self, settings: Settings, secret: ServerSecret) -> None:
        self.database = DatabaseThread(settings.database_url())
        self.secret = secret
        self._failures = Failures()
        # Digests of keys that opened the door: those are not kept out for what others at their address did.
        self._known: OrderedDict[str, None] = OrderedDict()

    async def close(self) -> None:
        await self.database.close()

    async def authenticate(self, exchange: Exchange) -> AdminPrincipal:
        """Who asks.

        Raises:
            Unauthenticated: no admin key, or one that is unknown, expired or revoked.
            RateLimited: this address has sent too many wrong ones.
            Unavailable: the database is out.
        """
        header = exchange.header(b"authorization") or ""
        scheme, _, token = header.partition(" ")
        token = token.strip()
        address = client_address(exchange)
        if scheme.lower() != "bearer" or not token:
            raise Unauthenticated(
                "No admin key given. Send 'Authorization: Bearer ADMIN_KEY'; `tierline admin keys create` makes one.",
                code="missing_admin_key",
            )
        digest = self.secret.digest(token)
        now = asyncio.get_running_loop().time()
        if digest not in self._known and (wait_s := self._failures.wait_s(address, now)) > 0:
            raise RateLimited(
                "Too many wrong admin keys came from this address; wait.",
                code="too_many_failures",
                headers={"retry-after": str(max(1, round(wait_s)))},
            )
        try:
            caller = await self.database.run(lambda database: authenticate_admin(database, self.secret, token))
        except AuthenticationError as error:
            self._known.pop(digest, None)
            self._failures.add(address, now)
            text, request_id = str(error), exchange.request_id
            log(logging.WARNING, "admin key refused", request_id=request_id, address=address, reason=text)
            raise Unauthenticated(f"{text[0].upper()}{text[1:]}.", code=error.code) from None
        self._known[digest] = None
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)
        return caller


def client_address(exchange: Exchange) -> str:
    """The other end of the connection: the client, or the proxy in front. Empty on a Unix socket."""
    client = exchange.scope.get("client")
    return str(client[0]) if client else ""
