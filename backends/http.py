"""The HTTP/1.1 client that requests to model servers go through: keep-alive connections around httptools' parser.

It promises: a request is one write; a connection that the server closed while it was idle is replaced unseen; no
proxies, redirects, decompression or cookies behind the caller's back. It knows nothing of models: a dialect writes
requests, `dispatch.py` reads answers, `connection.py` is a connection from the inside. Why not a bigger library:
`docs/decisions/001-http-client.md`; `bench/http_clients.py` measures it again.
"""

from __future__ import annotations

import asyncio
import email.utils
import math
import re
import ssl
import time
from collections.abc import Mapping

from backends.connection import Connection, Exchange, FailureKind, HttpFailure, Origin

__all__ = ["Exchange", "FailureKind", "HttpClient", "HttpFailure", "Origin", "retry_after_s"]

# How late a deadline may be noticed. With thousands of exchanges it is later, so that looking at all of them takes no
# more than a fraction of a percent of the time.
TICK_S = 0.05
LONGEST_TICK_S = 0.5
EXCHANGES_PER_TICK = 500


class HttpClient:
    """Sends requests and keeps connections. Belongs to one event loop; shared by all pools; no limit of its own."""

    def __init__(self, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._ticking = False
        self._origins: set[Origin] = set()
        self.active: set[Exchange] = set()

    async def send(
        self,
        origin: Origin,
        request: bytes,
        *,
        connect_s: float,
        deadline: float,
        deadline_kind: FailureKind = "total_timeout",
        first_token_deadline: float = float("inf"),
    ) -> Exchange:
        """Send `request` (head and body) and wait for the head of the answer.

        Args:
            connect_s: how long a new connection may take.
            deadline: monotonic seconds at which the exchange fails with `deadline_kind`, whatever its state.
            first_token_deadline: the same for silence until then; the reader moves it on as `quiet_deadline`.

        Raises:
            HttpFailure: no connection, no answer in time, or no HTTP.
        """
        loop = asyncio.get_running_loop()
        fresh = False
        while True:
            now = time.monotonic()
            connection = None if fresh else origin.take(now)
            if connection is None:
                connection = await self._connect(loop, origin, min(connect_s, deadline - now), deadline_kind, connect_s)
                now = time.monotonic()
            exchange = Exchange(self.active, connection, loop)
            exchange.deadline, exchange.deadline_kind = deadline, deadline_kind
            exchange.quiet_deadline = first_token_deadline
            if not self._ticking:
                self._ticking = True
                loop.call_later(TICK_S, self._tick, loop)
            connection.start(exchange, request, now)
            try:
                await exchange.head()
            except HttpFailure:
                if not exchange.stale:
                    raise
                fresh = True
            except BaseException:
                exchange.close()
                raise
            else:
                return exchange

    def release(self, origin: Origin) -> None:
        """Close the idle connections of an origin that will not be used again."""
        self._origins.discard(origin)
        for connection in list(origin.idle):
            connection.abandon()

    async def aclose(self) -> None:
        """Break every connection."""
        for exchange in list(self.active):
            exchange.fail("disconnected", "the client is closing")
        for origin in list(self._origins):
            self.release(origin)

    async def _connect(
        self,
        loop: asyncio.AbstractEventLoop,
        origin: Origin,
        wait_s: float,
        deadline_kind: FailureKind,
        connect_s: float,
    ) -> Connection:
        self._origins.add(origin)
        try:
            async with asyncio.timeout(wait_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(origin), origin.host, origin.port, ssl=self._tls_for(origin)
                )
        except TimeoutError:
            if wait_s < connect_s:
                raise HttpFailure(deadline_kind, f"no time was left to connect to {origin}") from None
            raise HttpFailure("connect_timeout", f"{origin} did not accept a connection in {connect_s} s") from None
        except (OSError, ssl.CertificateError) as error:
            raise HttpFailure("connect", f"cannot connect to {origin}: {error}") from error
        return connection

    def _tls_for(self, origin: Origin) -> ssl.SSLContext | None:
        if origin.tls and self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls if origin.tls else None

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        now = time.monotonic()
        for exchange in list(self.active):
            exchange.expire(now)
        self._ticking = bool(self.active)
        if self._ticking:
            crowd = max(1.0, len(self.active) / EXCHANGES_PER_TICK)
            loop.call_later(min(TICK_S * crowd, LONGEST_TICK_S), self._tick, loop)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds to wait according to `retry-after-ms` or `retry-after` (seconds or date, RFC 9110 section 10.2.3)."""
    try:
        if "retry-after-ms" in headers:
            seconds = float(headers["retry-after-ms"]) / 1000
        elif re.fullmatch(r"[0-9]+(\.[0-9]+)?", value := headers.get("retry-after", "")):
            seconds = float(value)
        else:
            seconds = email.utils.parsedate_to_datetime(value).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None  # missing or neither form: the server said nothing
    return max(0.0, seconds) if math.isfinite(seconds) else None
