"""A thin layer over ASGI for the hot path: read a bounded body, watch for the client's leaving, write answers.

No request and response objects of a framework: a chat completion pays only for what stands here.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import uuid_utils

from backends.protocol import whole_number
from edge.cycle import LEAVING, Cycle, header_lines
from edge.limits import READ_TIMEOUT
from gateway.bodies import FREE_BYTES, Room
from gateway.dialects.errors import BadRequest, RequestTimeout, TooLarge

Scope = MutableMapping[str, Any]
ASGIMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[ASGIMessage]]
Send = Callable[[ASGIMessage], Awaitable[None]]
Header = tuple[bytes, bytes]

JSON_TYPE: Header = (b"content-type", b"application/json")
JSON_LINE = header_lines([JSON_TYPE])
SSE_HEADERS: tuple[Header, ...] = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
)


# A request with two of these asks for two things at once: to choose one would be a guess, with keys a dangerous one.
_ONCE = frozenset({b"authorization", b"idempotency-key", b"x-api-key", b"x-tierline-deadline-ms", b"x-tierline-tier"})


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


class Exchange:
    """One HTTP request and its answer. `received_at` is when its body was complete, in monotonic seconds."""

    __slots__ = (
        "_cycle",
        "_headers",
        "_left",
        "_receive",
        "_send",
        "_task",
        "forsaken",
        "gone",
        "needed",
        "received_at",
        "request_id",
        "scope",
        "started",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        cycle = getattr(send, "__self__", None)
        self._cycle = cycle if isinstance(cycle, Cycle) else None
        self._headers: dict[bytes, bytes] | None = None
        self._task: asyncio.Task[Any] | None = None
        self._left: Callable[[], None] | None = None
        self.received_at = time.monotonic()
        self.request_id = f"req-{uuid_utils.uuid7()}"
        self.started = False  # whether the answer's status line has been sent
        self.gone = False  # whether the client left
        self.forsaken = False  # it left, but the answer is needed by others
        self.needed: Callable[[], bool] | None = None  # whether it is

    def header(self, name: bytes) -> str | None:
        """A request header by its lower-case name; several lines of one name are one list, as HTTP has it.

        Raises:
            BadRequest: the request has different values for a header that takes one.
        """
        value = self.headers().get(name)
        return None if value is None else value.decode("latin-1")

    def headers(self) -> Mapping[bytes, bytes]:
        """All request headers by their lower-case names. Raises as `header`."""
        if self._headers is None:
            self._headers = _folded(self.scope["headers"])
        return self._headers

    def has(self, name: bytes) -> bool:
        """Whether the request has a header of this lower-case name, even if something is wrong with its headers."""
        return any(given == name for given, _ in self.scope["headers"])

    async def body(self, limit: int, deadline: float | None = None, room: Room | None = None) -> bytes:
        """The whole request body. `deadline` is the client's own, in monotonic seconds; the server has one as well.
        `room` is where a large body takes memory from, before it is read.

        Raises:
            TooLarge: the body is larger than `limit` bytes; nothing beyond the limit is kept.
            RequestTimeout: the body came too slowly.
            RateLimited, Unavailable: there is no room for it.
            ClientGone: the client left while sending.
        """
        if deadline is None:
            return await self._body(limit, room)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                return await self._body(limit, room)
        except TimeoutError:
            raise RequestTimeout("The deadline of 'x-tierline-deadline-ms' passed before the body was there.") from None

    async def _body(self, limit: int, room: Room | None) -> bytes:
        taken = FREE_BYTES
        if self.headers().get(b"content-encoding", b"identity") == b"identity" and self._cycle is not None:
            whole = self._cycle.whole_body(min(limit, taken))
            if whole is not None:  # the usual request: it came with its head
                self.received_at = time.monotonic()
                return whole
        declared = self.header(b"content-length")
        expected = 0 if declared is None else whole_number(declared, 18) or 0
        if expected > limit:
            raise TooLarge(f"The body is {declared} bytes; this gateway takes at most {limit}.")
        if self.header(b"content-encoding") not in (None, "identity"):
            raise BadRequest("Compressed request bodies are not supported; send plain JSON.", code="invalid_encoding")
        if expected > taken and room is not None:
            await room.add(expected)
            taken = expected
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            size = len(body) + len(chunk)
            if size > limit:
                raise TooLarge(f"The body is larger than the {limit} bytes that this gateway takes.")
            if size > taken and room is not None:  # it did not say how large it is
                more = min(max(size, 2 * taken), limit)
                await room.add(more - (0 if taken == FREE_BYTES else taken))
                taken = more
            ended = not message.get("more_body")
            if ended and not body:
                self.received_at = time.monotonic()
                return chunk
            body += chunk  # not a list of pieces, which would leave the memory in pieces
            if ended:
                self.received_at = time.monotonic()
                return bytes(body)
            if READ_TIMEOUT in self.scope:
                raise RequestTimeout("The body of the request did not arrive in time. Send it again, without pauses.")

    async def pieces(self, limit: int) -> AsyncIterator[bytes]:
        """The body piece by piece, for what is too large to be held.

        Raises:
            TooLarge, BadRequest, RequestTimeout, ClientGone: as `body`.
        """
        declared = self.header(b"content-length")
        if (whole_number(declared or "", 18) or 0) > limit:
            raise TooLarge(f"The body is {declared} bytes; at most {limit} are taken here.")
        if self.header(b"content-encoding") not in (None, "identity"):
            raise BadRequest("Compressed request bodies are not supported; send it plain.", code="invalid_encoding")
        size, more = 0, True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientGone
            more = message.get("more_body", False)
            if more and READ_TIMEOUT in self.scope:
                raise RequestTimeout("The body of the request did not arrive in time. Send it again, without pauses.")
            data: bytes = message.get("body", b"")
            size += len(data)
            if size > limit:
                raise TooLarge(f"The body is larger than the {limit} bytes that are taken here.")
            if data:
                yield data

    def watch(self) -> None:
        """From now on, cancel the current task when the client leaves; `gone` then says why."""
        self._task = asyncio.current_task()
        self.scope[LEAVING].append(self._client_left)

    def left(self) -> bool:
        """Whether the client is gone, for what is sent without being watched."""
        return self._cycle is not None and bool(self._cycle.disconnected)

    def _client_left(self) -> None:
        if self._left is not None:
            self._left()
        else:
            self.leave()

    def leave(self) -> None:
        """The client does not wait for the answer: end the request, unless it has been given whole or others wait."""
        if self._task is None:
            return
        if self.needed is not None and self.needed():
            self.forsaken = True
            return
        self.gone = True
        self._task.cancel()

    def leave_if_gone(self) -> None:
        """Nobody else waits for the answer any more."""
        if self.forsaken:
            self.forsaken = False
            self.leave()

    def run_ahead(self) -> None:
        """Others wait for the answer: a client that reads slowly must not hold it up."""
        if self._cycle is not None:
            self._cycle.run_ahead()

    def detach(self, send: Send, left: Callable[[], None]) -> Send:
        """From now on the answer goes to `send`, and the client's leaving calls `left` instead of ending the request.

        Returns: the way to the client.
        """
        to_client, self._send, self._left = self._send, send, left
        return to_client

    def attach(self, send: Send) -> None:
        """Undo `detach`."""
        self._send, self._left = send, None

    def unwatch(self) -> None:
        """The answer is complete: a client that closes now has lost nothing."""
        self._task = None
        self.scope[LEAVING].clear()

    async def start(self, status: int, headers: Iterable[Header], keep_alive: bytes = b"") -> None:
        """Send status line and headers. `keep_alive`: what the server sends whenever the stream is silent for long."""
        self.started = True
        start = {"type": "http.response.start", "status": status, "headers": list(headers)}
        if keep_alive:
            start["tierline.keep_alive"] = keep_alive
        await self._send(start)

    async def write(self, data: bytes) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    def direct(self) -> Cycle | None:
        """What writes to the client without a task, if the answer goes straight there."""
        return self._cycle if self._left is None else None

    async def end(self, data: bytes = b"") -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def respond(self, status: int, headers: Iterable[Header], body: bytes) -> None:
        """A whole answer."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.end(body)

    async def answer(self, status: int, lines: bytes, body: bytes) -> None:
        """A whole answer in one call, as far as possible; its headers as lines (`edge.cycle.header_lines`)."""
        direct = self.direct()
        self.started = True
        if direct is None or not direct.answer_now(status, lines, body):
            await self.respond(status, headers_of(lines), body)


def headers_of(lines: bytes) -> list[Header]:
    """Names and values of header lines."""
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines.split(b"\r\n")[:-1])]


def _folded(lines: Sequence[Header]) -> dict[bytes, bytes]:
    """Header lines by name, those of one name joined by commas (RFC 9110, section 5.3)."""
    headers = dict(lines)
    if len(headers) == len(lines):
        return headers
    values: dict[bytes, list[bytes]] = {}
    for name, value in lines:
        given = values.setdefault(name, [])
        if value not in given:
            given.append(value)
    for name in _ONCE & values.keys():
        if len(values[name]) > 1:
            raise BadRequest(f"The request has '{name.decode()}' more than once, with different values; send one.")
    return {name: b", ".join(given) for name, given in values.items()}
