"""One request and its answer: uvicorn's, but for how the answer is written.

The head waits for the first piece of the body and leaves with it, in one write; if none comes in the same turn of the
event loop, it leaves alone. An answer without a length is chunked, and for a client of HTTP/1.0, which knows no chunks,
ends with the connection. Headers are checked as a whole instead of one by one; an application that answers often can
have them as lines of text all along (`header_lines`). A stream whose application says what
keeps it alive sends that when nothing else was sent for a while. Closing is left to the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

# In a request's scope: a list of functions that are called when the client leaves before the answer is complete.
LEAVING = "tierline.leaving"
_NO_BODY = frozenset((204, 304))
# Header names in an application's answer are in lower case, by ASGI.
_FRAMING = frozenset((b"content-length", b"transfer-encoding", b"connection"))


def header_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as they are sent: a line each, with its end.

    Raises:
        RuntimeError: one of them holds a line break or a null character, and would be more than a header.
    """
    lines = [name + b": " + value for name, value in headers]
    lines.append(b"")
    return checked_lines(b"\r\n".join(lines), len(lines) - 1)


def checked_lines(text: bytes, number: int) -> bytes:
    """The text, if it is so many whole lines. Raises as `header_lines`."""
    if text.count(b"\r\n") != number or text.count(b"\n") != number or text.count(b"\r") != number or b"\0" in text:
        raise RuntimeError("a header of the answer holds a line break or a null character")
    return text


class Cycle(RequestResponseCycle):
    """Made by `edge.connection.Connection` for every request."""

    default_lines = b""  # of headers that every answer has
    _head: bytes | None = None
    _until_close = False  # the end of the connection is the end of the body
    sign_of_life = b""  # what an idle stream sends, as a piece of the body
    _silent = False  # nothing was sent since the latest sweep
    _silent_since = 0.0
    _ahead = False
    _draining: asyncio.Future[None] | None = None
    leaving: Sequence[Callable[[], None]] = ()  # what the scope has as `LEAVING`

    def leave(self) -> None:
        """The client is gone, or nothing that it sends is listened to any more."""
        if self.disconnected or self.response_complete:
            return
        self.disconnected = True
        self.message_event.set()
        for left in self.leaving:
            left()

    def whole_body(self, most_bytes: int) -> bytes | None:
        """The body of the request, if all of it is there and it is no larger: what `receive` would give, at once."""
        if self.more_body or self.disconnected or self.response_complete or len(self.body) > most_bytes:
            return None
        body, self.body = bytes(self.body), bytearray()
        self.flow.resume_reading()
        return body

    async def send(self, message: Any) -> None:
        """ASGI's `send`. The start of a stream may say what keeps it alive while it is idle, as `tierline.keep_alive`:
        bytes that are whole in themselves, because they are sent between two pieces of the body.

        Raises:
            RuntimeError: the application breaks ASGI or HTTP.
        """
        if self.flow.write_paused and not self.disconnected and not self._ahead:
            await self._drained()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
            if (piece := message.get("tierline.keep_alive")) and (self.chunked_encoding or self._until_close):
                self.sign_of_life = b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked_encoding else piece
        else:
            raise RuntimeError(f"the application sent {kind} out of turn")

    def run_ahead(self) -> None:
        """From now on wait for no slow reader, as others need the answer: what it has yet to take is kept in memory."""
        self._ahead = True
        if self._draining is not None and not self._draining.done():
            self._draining.set_result(None)

    async def _drained(self) -> None:
        """Wait until the client has read enough, or is waited for no more."""
        loop = asyncio.get_running_loop()
        self._draining = loop.create_future()
        drain = loop.create_task(self.flow.drain())
        try:
            await asyncio.wait((drain, self._draining), return_when=asyncio.FIRST_COMPLETED)
        finally:
            drain.cancel()

    def writable(self) -> bool:
        """Whether a piece of the body can be written with nothing to wait for."""
        return not (self.flow.write_paused or self.disconnected or self.response_complete) and self.response_started

    def write_now(self, data: bytes) -> None:
        """Write a piece of the body, while `writable`."""
        if data and self.chunked_encoding and self._head is None:  # the usual case, in short
            self._silent = False
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        else:
            self._send_body(data, more=True)

    def answer_now(self, status: int, lines: bytes, body: bytes) -> bool:
        """Give a whole answer, if there is nothing to wait for; False where there is.

        Args:
            lines: from `header_lines`; none says how long the body is, or what becomes of the connection.
        """
        if self.response_started or self.flow.write_paused or self.disconnected:
            return False
        self.expected_content_length = len(body)
        self.chunked_encoding = False
        self._compose(status, b"%bcontent-length: %d\r\n" % (lines, len(body)))
        self._send_body(body, more=False)
        return True

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._begin(status, headers)
        asyncio.get_running_loop().call_soon(self._flush)

    def _begin(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        headers = list(headers)
        for name, value in headers:
            if name not in _FRAMING:
                continue
            if name == b"content-length":
                self.expected_content_length = int(value)
                self.chunked_encoding = False
            elif name == b"transfer-encoding":
                raise RuntimeError("the server chooses the transfer encoding itself")
            elif b"close" in value.lower():
                self.keep_alive = False
        # Whether the connection stays is said in one place.
        self._compose(status, header_lines(header for header in headers if header[0] != b"connection"))

    def _compose(self, status: int, lines: bytes) -> None:
        """Make the head of the answer."""
        self.response_started = True
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # its body may come or not: nothing behind it could be told from it
        self.waiting_for_100_continue = False
        if not self.keep_alive:
            lines += b"connection: close\r\n"
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _NO_BODY:
            self._until_close = self.scope["http_version"] == "1.0"
            if not self._until_close:
                self.chunked_encoding = True
                lines += b"transfer-encoding: chunked\r\n"
        self._head = b"%b%b%b\r\n" % (STATUS_LINE[status], self.default_lines, lines)

    def _flush(self) -> None:
        if self._head is not None and not self.transport.is_closing():
            self._write(b"")

    def _write(self, data: bytes) -> None:
        if self._head is not None:
            data, self._head = self._head + data, None
        if data:
            self.transport.write(data)

    def keep_alive_by(self, now: float, after_s: float) -> None:
        """Send the sign of life of a stream that has been silent for `after_s` and whose client has read everything.

        `now` is on the clock of the event loop. Called by each sweep, so a piece of the body costs no look at a clock.
        """
        if not self._silent:
            self._silent, self._silent_since = True, now
        elif now - self._silent_since >= after_s and not self.transport.get_write_buffer_size():
            self._silent_since = now
            self._write(self.sign_of_life)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        self._silent = False
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            self._write(b"")
        elif self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(chunk if more else chunk + b"0\r\n\r\n")
        elif self._until_close:
            self._write(body)
        else:
            self.expected_content_length -= len(body)
            if self.expected_content_length < 0:
                raise RuntimeError("the answer is longer than its content-length")
            self._write(body)
        if more:
            return
        if self.expected_content_length != 0:
            raise RuntimeError("the answer is shorter than its content-length")
        self.response_complete = True
        self.message_event.set()
        self.on_response()
