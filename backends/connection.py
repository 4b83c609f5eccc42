"""One HTTP/1.1 connection and the exchange on it: httptools parses, asyncio carries, nothing else is in between.

It promises: body pieces come as the server sent them; deadlines cost nothing per piece; a slow reader stops the sender
(at most about half a mebibyte waits); closing an exchange breaks its connection within one turn of the event loop.
`http.py` opens connections and sends requests; this file is what happens from then on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Literal, cast
from urllib.parse import urlsplit

import httptools

FailureKind = Literal[
    "connect",  # no connection: refused, unreachable, name unknown, certificate not trusted
    "connect_timeout",
    "disconnected",  # the connection closed before the answer was whole
    "first_token_timeout",
    "between_tokens_timeout",
    "total_timeout",
    "deadline",  # the request's own deadline, not the backend's
    "protocol",  # what came is not HTTP, or not what was asked for
    "too_large",
]

HIGH_WATER_BYTES = 256 * 1024  # unread body bytes at which reading from the socket pauses
LOW_WATER_BYTES = 64 * 1024
MAX_HEAD_BYTES = 64 * 1024
STALE_S = 1.0  # a reused connection that dies sooner after the request was closed before it
# Header names as servers write them; any other is decoded.
_NAMES = {
    form.encode(): name.lower()
    for name in ("Connection", "Content-Length", "Content-Type", "Date", "Server", "Transfer-Encoding", "X-Request-Id")
    for form in (name, name.lower())
}
LINGER_S = 1.0  # how long a finished stream may take to end its body before its connection is given up


class HttpFailure(Exception):
    """A request that got no usable answer. `kind` is stable for programs, the message says what happened where."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Origin:
    """Scheme, host and port of a base URL, with its idle connections. Raises ValueError for a URL that has none."""

    def __init__(self, base_url: str, keep_alive_s: float = 60.0) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"a base URL looks like http://host:port/v1, got {base_url!r}")
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ValueError("a base URL has no query, fragment, user or password")
        self.tls = parts.scheme == "https"
        self.host = parts.hostname
        self.port = parts.port or (443 if self.tls else 80)
        self.path = parts.path.rstrip("/")  # prefix of every request's path, such as /v1
        self.authority = parts.netloc
        self.idle: dict[Connection, None] = {}  # in the order of their last use
        self._keep_alive_s = keep_alive_s

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def keep(self, connection: Connection) -> None:
        """Take a connection that is free again."""
        connection.used_at = time.monotonic()
        self.idle[connection] = None
        oldest = next(iter(self.idle))
        if connection.used_at - oldest.used_at > self._keep_alive_s:
            oldest.abandon()

    def take(self, now: float) -> Connection | None:
        """The idle connection that was used last, if one is young enough."""
        while self.idle:
            connection, _ = self.idle.popitem()
            if now - connection.used_at <= self._keep_alive_s:
                return connection
            connection.abandon()
        return None


class Exchange:
    """One request and its answer. `status` and `headers` (lower-case names) are set once `HttpClient.send` returns."""

    __slots__ = (
        "_active",
        "_connection",
        "_error",
        "_loop",
        "_pieces",
        "_size",
        "_waiter",
        "complete",
        "deadline",
        "deadline_kind",
        "draining",
        "headers",
        "moved",
        "patience_s",
        "quiet_deadline",
        "quiet_kind",
        "stale",
        "status",
        "tap",
    )

    def __init__(self, active: set[Exchange], connection: Connection, loop: asyncio.AbstractEventLoop) -> None:
        self._active = active  # the client's exchanges that wait for more
        active.add(self)
        self._connection: Connection | None = connection
        self._loop = loop
        self._pieces: list[bytes] = []  # seldom more than one, and a list is a tenth of an empty deque
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._error: HttpFailure | None = None
        # Is shown a piece that arrives while the reader waits, and says whether that takes care of it.
        self.tap: Callable[[bytes], bool] | None = None
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False  # the whole answer has arrived
        self.draining = False
        self.stale = False  # the server had closed the connection before the request reached it
        # Monotonic seconds. `deadline` always holds; `quiet_deadline` only while the reader waits for the server, so
        # that a slow reader is never taken for a silent server.
        self.deadline = float("inf")
        self.deadline_kind: FailureKind = "total_timeout"
        self.quiet_deadline = float("inf")
        self.quiet_kind: FailureKind = "first_token_timeout"
        # What a reader says of each event that it gets, which costs no look at a clock: the next may take so long.
        self.patience_s = float("inf")
        self.moved = False

    async def read(self) -> bytes:
        """The next piece of the body; empty at its end. Raises HttpFailure."""
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            await self._wait()
        piece = self._pieces.pop(0)
        self._size -= len(piece)
        if self._connection is not None and self._connection.paused and self._size <= LOW_WATER_BYTES:
            self._connection.resume()
        return piece

    async def read_all(self, limit_bytes: int) -> bytes:
        """The rest of the body. Raises HttpFailure, also when it is larger than `limit_bytes`."""
        first = await self.read()
        if self.complete and not self._pieces:  # the usual answer: one piece
            return first
        pieces, size = [first], len(first)
        while piece := await self.read():
            pieces.append(piece)
            size += len(piece)
            if size > limit_bytes:
                self.close()
                raise HttpFailure("too_large", f"the answer is larger than {limit_bytes} bytes")
        return b"".join(pieces)

    def ready(self) -> bool:
        """Whether `read` would return or raise at once."""
        return bool(self._pieces) or self._error is not None or self.complete

    async def changed(self) -> None:
        """Wait until there is something to look at, or `wake` was called."""
        await self._wait()

    def close(self) -> None:
        """Give the answer up: unless it has arrived whole, its connection breaks now. May be called again."""
        self._pieces.clear()
        self._size = 0
        self.fail("disconnected", "the exchange was closed")

    def finish(self) -> None:
        """The reader has all it wants and the body is about to end: keep the connection if that happens soon."""
        if self.complete or self._error is not None:
            self.close()
            return
        self.draining = True
        self._pieces.clear()
        self._size = 0
        self.deadline = min(self.deadline, time.monotonic() + LINGER_S)
        if self._connection is not None and self._connection.paused:
            self._connection.resume()

    def fail(self, kind: FailureKind, message: str) -> None:
        """End the exchange with an error that the reader gets after the pieces that have arrived."""
        if not self.complete and self._error is None:
            self._error = HttpFailure(kind, message)
        self._active.discard(self)
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abandon()
        self.wake()

    def add(self, piece: bytes) -> None:
        """Called by the connection with a piece of the body."""
        if self.draining:
            return
        if self.tap is not None and self._waiter is not None and not self._pieces and self.tap(piece):
            return
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > HIGH_WATER_BYTES and self._connection is not None:
            self._connection.pause()
        if self._waiter is not None:
            self.wake()

    def end(self) -> None:
        """Called by the connection when the answer is whole; the connection is no longer this exchange's."""
        self.complete = True
        self._connection = None
        self._active.discard(self)
        self.wake()

    async def head(self) -> None:
        """Wait for status and headers. Raises HttpFailure."""
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._wait()

    def wake(self) -> None:
        """Called by the connection when the reader has something to look at."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def expire(self, now: float) -> None:
        """Fail if a deadline has passed. Called by the client's clock."""
        if self.moved:
            self.moved = False
            self.quiet_deadline = now + self.patience_s
        if now >= self.deadline:
            self.fail(self.deadline_kind, "the answer took longer than it may in all")
        elif now >= self.quiet_deadline and self._waiter is not None:
            what = "no first token" if self.quiet_kind == "first_token_timeout" else "no further token"
            self.fail(self.quiet_kind, f"{what} came within the time allowed")

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None


class Connection(asyncio.Protocol):
    """One connection to an origin; it carries one exchange at a time."""

    __slots__ = (
        "_exchange",
        "_head_bytes",
        "_headers",
        "_keep_alive",
        "_origin",
        "_parser",
        "_transport",
        "paused",
        "used_at",
        "uses",
    )

    def __init__(self, origin: Origin) -> None:
        self._origin = origin
        self._parser = httptools.HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._transport: asyncio.Transport | None = None
        self._headers: dict[str, str] = {}
        self._head_bytes = 0
        self._keep_alive = False
        self.paused = False
        self.used_at = 0.0
        self.uses = 0

    def start(self, exchange: Exchange, request: bytes, now: float) -> None:
        """Send a request; its answer goes to `exchange`."""
        assert self._transport is not None
        self._exchange = exchange
        self.used_at = now
        self.uses += 1
        self._transport.write(request)

    def abandon(self) -> None:
        """Break the connection; what was on its way is lost."""
        self._exchange = None
        self._origin.idle.pop(self, None)
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        if not self.paused and self._transport is not None:
            self.paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.paused and self._transport is not None:
            self.paused = False
            self._transport.resume_reading()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    def data_received(self, data: bytes) -> None:
        if self._exchange is None:  # nobody asked: a server's parting words on an idle connection
            self.abandon()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if self._exchange is not None:
                self._exchange.fail("protocol", f"{self._origin} sent no valid HTTP/1.1 answer: {error}")
            self.abandon()
        else:
            if self._exchange is not None and not self._exchange.status:
                self._came_in_pieces(len(data))

    def _came_in_pieces(self, number: int) -> None:
        """Account for bytes of a head that is not complete: it has its bound, whatever it consists of."""
        assert self._exchange is not None
        self._head_bytes += number
        if self._head_bytes > MAX_HEAD_BYTES:
            text = f"{self._origin} sent no valid HTTP/1.1 answer: its headers are larger than {MAX_HEAD_BYTES} bytes"
            self._exchange.fail("protocol", text)
            self.abandon()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._origin.idle.pop(self, None)
        exchange, self._exchange = self._exchange, None
        if exchange is None:
            return
        untouched = not exchange.status and not self._head_bytes
        exchange.stale = untouched and self.uses > 1 and time.monotonic() - self.used_at < STALE_S
        delimited = "content-length" in exchange.headers or "transfer-encoding" in exchange.headers
        if exchange.status and not delimited and exc is None:  # the end of the connection is the end of the body
            exchange.end()
        else:
            why = f": {exc}" if exc else ""
            exchange.fail("disconnected", f"{self._origin} closed the connection before the answer was whole{why}")

    # What the parser calls.

    def on_message_begin(self) -> None:
        if self._exchange is None:  # what follows would be taken for the answer to the next request
            raise ValueError("an answer that nobody asked for")

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._exchange is not None and self._exchange.status:
            return  # a trailer: nobody reads it, and it must not pass for a header of the connection's next answer
        self._headers[_NAMES.get(name) or name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers, self._head_bytes = self._headers, {}, 0
        if sum(map(len, headers)) + sum(map(len, headers.values())) > MAX_HEAD_BYTES:
            raise ValueError(f"the answer's headers are larger than {MAX_HEAD_BYTES} bytes")
        if status < 200 or self._exchange is None:  # 1xx: the answer is still to come
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._exchange.headers = headers
        self._exchange.status = status
        self._exchange.wake()

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.add(body)

    def on_message_complete(self) -> None:
        exchange = self._exchange
        if exchange is None or not exchange.status:
            return
        self._exchange = None
        exchange.end()
        # An answer that came before the request was sent whole (413, say) leaves a connection that cannot be reused.
        if self._keep_alive and self._transport is not None and not self._transport.get_write_buffer_size():
            self.resume()
            self._origin.keep(self)
        else:
            self.abandon()
