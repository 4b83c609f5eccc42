"""One request and its answer: uvicorn's, but for how the answer is written.

The head waits for the first piece of the body and leaves with it, in one write; if none comes in the same turn of the
event loop, it leaves alone. Headers are checked as a whole instead of one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

_NO_BODY = frozenset((204, 304))


class Cycle(RequestResponseCycle):
    """Made by `edge.connection.Connection` for every request."""

    _head: bytes | None = None

    async def send(self, message: Any) -> None:
        """ASGI's `send`.

        Raises:
            RuntimeError: the application breaks ASGI or HTTP.
        """
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        kind = message["type"]
        if kind == "http.response.body" and self.response_started and not self.response_complete:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))
        elif kind == "http.response.start" and not self.response_started:
            self._start(message["status"], message.get("headers", ()))
        else:
            raise RuntimeError(f"the application sent {kind} out of turn")

    def _start(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        self.waiting_for_100_continue = False
        lines = [STATUS_LINE[status][:-2]]
        closes = False
        for name, value in (*self.default_headers, *headers):
            lines.append(b"%b: %b" % (name, value))
            match name.lower():
                case b"content-length":
                    self.expected_content_length = int(value)
                    self.chunked_encoding = False
                case b"transfer-encoding":
                    raise RuntimeError("the server chooses the transfer encoding itself")
                case b"connection" if b"close" in value.lower():
                    self.keep_alive, closes = False, True
        if not self.keep_alive and not closes:
            lines.append(b"connection: close")
        if self.chunked_encoding is None and self.scope["method"] != "HEAD" and status not in _NO_BODY:
            self.chunked_encoding = True
            lines.append(b"transfer-encoding: chunked")
        head = b"\r\n".join(lines)
        if head.count(b"\n") != len(lines) - 1 or head.count(b"\r") != len(lines) - 1 or b"\0" in head:
            raise RuntimeError("a header of the answer holds a line break or a null character")
        self._head = head + b"\r\n\r\n"
        asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        if self._head is not None and not self.transport.is_closing():
            self._write(b"")

    def _write(self, data: bytes) -> None:
        if self._head is not None:
            data, self._head = self._head + data, None
        if data:
            self.transport.write(data)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            self.expected_content_length = 0
            self._write(b"")
        elif self.chunked_encoding:
            chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
            self._write(chunk if more else chunk + b"0\r\n\r\n")
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
        if not self.keep_alive:
            self.transport.close()
        self.on_response()
