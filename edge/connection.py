"""One HTTP/1.1 connection: uvicorn's protocol around httptools, with limits on what a client may send and how slowly.

    accept → between requests → head → body → between requests …       what the client sends: `_stage`
                                 └─ running ── response ──┘             what the application does: `_running`

It promises: a head is bounded in bytes and headers, a body in bytes per second, an unread answer in time; what is not
HTTP/1 gets a clean error and the end of the connection, never in the middle of an answer. No timer is made per
request: the server sweeps over its connections once a second.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import Any, cast
from urllib.parse import unquote

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from edge.cycle import LEAVING, Cycle
from edge.flow import Flow
from edge.limits import (
    LINGER_S,
    MAX_FRAMING_BYTES,
    MAX_FRAMING_PER_BODY_BYTE,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    MAX_UNWANTED_BYTES,
    MIN_BYTES_PER_SECOND,
    READ_TIMEOUT,
    Refused,
    framing_too_large,
    head_too_large,
    malformed,
    read_timed_out,
    unknown_coding,
)
from edge.state import State

logger = logging.getLogger("tierline.edge")

_BETWEEN, _HEAD, _BODY = range(3)
_FRAMING = frozenset((b"host", b"transfer-encoding", b"expect"))


class Connection(HttpToolsProtocol):
    """Made by uvicorn for each accepted socket; `Server` calls `sweep`, `shutdown` and `is_busy`."""

    # Apart from the instance's dictionary: with more than thirty names it could share its keys with no other instance.
    # fmt: off
    __slots__ = (
        "_body_bytes", "_body_read_at", "_body_since", "_content_bytes", "_deaf", "_fed", "_head_bytes", "_head_since",
        "_heard_at", "_hosts", "_idle_since", "_line_bytes", "_linger_since", "_running", "_served", "_stage",
        "_unread", "_unwanted_bytes", "limits", "state",
    )
    # fmt: on

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.state = cast(State, self.server_state)
        self.limits = self.state.limits
        self._stage = _BETWEEN
        self._running: Cycle | None = None
        self.cycle: Cycle = None  # type: ignore[assignment]  # as uvicorn has it: none before the first request
        self._served = False  # whether a request was answered
        self._fed = 0  # bytes that the parser is at
        self._hosts = 0
        self._codings = 0  # lines that say how the body is transferred
        # Of a head that came in pieces: when it began, at most how many bytes it has (the first piece may also hold the
        # end of an earlier request), and those of the line that has no end yet.
        self._head_since: float | None = None
        self._head_bytes = 0
        self._line_bytes = 0
        # Of a body that came in pieces: when it began, when the last piece came, all its bytes, and those of content.
        self._body_since: float | None = None
        self._body_read_at = 0.0
        self._body_bytes = 0
        self._content_bytes = 0
        self._idle_since = self.loop.time()
        self._unread: tuple[float, int] | None = None  # since when the client takes nothing, and of how many bytes
        self._deaf = False  # what still comes is thrown away
        self._unwanted_bytes = 0  # how much that was
        # Of a connection whose last answer is written: since when it lingers, and when the client last sent something.
        self._linger_since: float | None = None
        self._heard_at = 0.0

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow: Flow = Flow(transport, self.pipeline)

    # -- bytes from the client ---------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            self._heard_at = self.loop.time()
            self._throw_away(data)
            return
        self._fed = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._stay_with_http(data[upgrade.args[0] :])
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, Refused) else malformed("The URL of the request is not valid."))
        except httptools.HttpParserError as error:
            self._refuse(malformed(f"This is not a valid HTTP/1.1 request: {error}."))
        else:
            if self._stage != _BETWEEN:
                self._came_in_pieces(data)

    def _came_in_pieces(self, data: bytes) -> None:
        """Account for the latest piece of a request that is not complete."""
        now = self.loop.time()
        if self._stage == _HEAD:
            if self._head_since is None:
                self._head_since = now if self._served else self._idle_since
            self._head_bytes += len(data)
            end = data.rfind(b"\n")
            self._line_bytes = len(data) - end - 1 if end >= 0 else self._line_bytes + len(data)
            if len(self.headers) > MAX_HEADERS or self._head_is_too_large():
                self._refuse(head_too_large())
            return
        self._body_read_at = now
        if self._body_since is None:
            self._body_since = now
            return
        self._body_bytes += len(data)
        framing = self._body_bytes - self._content_bytes
        if framing > MAX_FRAMING_BYTES + MAX_FRAMING_PER_BODY_BYTE * self._content_bytes:
            self._refuse(framing_too_large())

    def _throw_away(self, data: bytes) -> None:
        self._unwanted_bytes += len(data)
        if self._unwanted_bytes > MAX_UNWANTED_BYTES and self._running is None:
            self.transport.close()

    def _head_is_too_large(self) -> bool:
        if self._head_bytes <= MAX_HEAD_BYTES:
            return False
        lines = sum(len(name) + len(value) + 4 for name, value in self.headers)
        url = len(self.url) if self.headers else 0  # or it is in the line that has no end
        return url + lines + self._line_bytes > MAX_HEAD_BYTES

    def _stay_with_http(self, rest: bytes) -> None:
        """Parse a request that offers another protocol again, without the offer.

        The parser takes everything behind such a head for the other protocol, the body too. Java's client offers
        HTTP/2 on each new connection.
        """
        head = [self.parser.get_method(), b" ", self.url, b" HTTP/1.1\r\n"]
        for name, value in self.headers:
            if name != b"upgrade":
                head += [name, b": ", value, b"\r\n"]
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join([*head, b"\r\n", rest]))

    # -- callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._stage = _HEAD
        self._hosts = self._codings = 0
        self._head_since = None
        self._head_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._stage == _BODY:
            return  # a trailer: it must not pass for a header that the front of the request has shown to others
        name = name.lower()
        if name in _FRAMING:
            self._on_framing(name, value)
        self.headers.append((name, value))

    def _on_framing(self, name: bytes, value: bytes) -> None:
        if name == b"host":
            self._hosts += 1
        elif name == b"transfer-encoding":
            self._codings += 1
            if value.strip().lower() != b"chunked":
                raise unknown_coding()
        elif value.lower() == b"100-continue":
            self.expect_100_continue = True

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if version not in ("1.1", "1.0"):
            raise malformed("This server speaks HTTP/1.1.")
        if self._hosts != 1 and (self._hosts or version == "1.1"):
            raise malformed("An HTTP/1.1 request needs the header 'host', once.")
        if self._codings and (self._codings > 1 or version == "1.0"):
            raise malformed("The header 'transfer-encoding' is for HTTP/1.1, once.")
        self._head_bytes += self._fed
        self._line_bytes = 0
        if len(self.headers) > MAX_HEADERS or self._head_is_too_large():
            raise head_too_large()
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                raise malformed("This server is not a proxy.")
            return  # to `_stay_with_http`
        self._begin(version)
        self._stage = _BODY
        self._body_since = None
        self._body_bytes = self._content_bytes = self._unwanted_bytes = 0
        if self.state.draining:
            self.cycle.keep_alive = False
        if not self.pipeline:
            self._running = self.cycle

    def _begin(self, version: str) -> None:
        """Start the application on this request, or let it wait for the one before."""
        scope = cast(dict[str, Any], self.scope)
        url = httptools.parse_url(self.url)
        path = url.path.decode("ascii")
        scope["method"] = self.parser.get_method().decode("ascii")
        scope["http_version"] = version
        scope["path"] = unquote(path) if "%" in path else path
        scope["raw_path"] = url.path
        scope["query_string"] = url.query or b""
        before = self.cycle
        self.cycle = Cycle(
            scope=self.scope,
            transport=self.transport,
            flow=self.flow,
            logger=self.logger,
            access_logger=self.access_logger,
            access_log=False,
            default_headers=self.state.default_headers,
            message_event=asyncio.Event(),
            expect_100_continue=self.expect_100_continue and version != "1.0",
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            on_response=self.on_response_complete,
        )
        self.cycle.default_lines = self.state.default_lines
        self.cycle.leaving = scope[LEAVING] = []
        if before is None or before.response_complete:
            self._start_asgi_task(self.cycle, self.app)
        else:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, self.app))

    def on_body(self, body: bytes) -> None:
        self._content_bytes += len(body)
        cycle = self.cycle
        if cycle.response_complete:
            self._throw_away(body)
            return
        cycle.body += body
        if len(cycle.body) > HIGH_WATER_LIMIT:
            self.flow.pause_reading()
        cycle.message_event.set()

    def on_message_complete(self) -> None:
        if self._stage == _HEAD:
            return  # to `_stay_with_http`
        self._stage = _BETWEEN
        if not self.cycle.response_complete:
            self.cycle.more_body = False
            self.cycle.message_event.set()

    # -- answers -----------------------------------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """As uvicorn's, without a timer for the idle time, and with an end that a client can read."""
        self.state.total_requests += 1
        self._served = True
        answered, self._running = self._running, None
        if self.transport.is_closing():
            return
        if answered is not None and not answered.keep_alive:
            if answered.more_body or self._deaf:
                self._linger()
            else:
                self.transport.close()
            return
        self._idle_since = self.loop.time()
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._running = cast(Cycle, cycle)
            self._start_asgi_task(cycle, app)
        self.flow.resume_reading()

    def resume_writing(self) -> None:
        self._unread = None
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        # The request that runs, and the newest one.
        for cycle in (self._running, self.cycle):
            if cycle is not None:
                cycle.leave()
        super().connection_lost(exc)
        self.pipeline.clear()

    def _refuse(self, why: Refused) -> None:
        """Say why and end the connection. An answer that is being given is completed instead, and ends it."""
        self._deaf = True
        faulty = self.cycle if self._stage == _BODY else None
        if faulty is not None:
            if self.pipeline and self.pipeline[0][0] is faulty:
                self.pipeline.popleft()
            elif self._running is faulty:
                self._running = None
            faulty.leave()
        if self._running is not None:
            last = self.pipeline[0][0] if self.pipeline else self._running
            last.keep_alive = False
            self.flow.throw_away()  # or its leaving would go unseen
            return
        logger.info("refused a request of %s: %d %s (%s)", self._peer(), why.status, why, why.request_id)
        if faulty is None or not faulty.response_started:
            self.transport.write(why.answer(self.state.default_headers))
        self._linger()

    def _linger(self) -> None:
        """Nothing more is written: say so, and read on for a while what the client is still sending."""
        self._deaf = True
        self._linger_since = self._heard_at = self.loop.time()
        self._unwanted_bytes = 0
        self.flow.throw_away()
        if self.transport.can_write_eof():
            with suppress(OSError):  # asyncio's own loop: the client has just closed, which is read in the next turn
                self.transport.write_eof()

    def _peer(self) -> str:
        return f"{self.client[0]}:{self.client[1]}" if self.client else "a client"

    # -- time --------------------------------------------------------------------------------------------------------

    def is_busy(self) -> bool:
        """Whether a request is being read or answered."""
        if self._linger_since is not None:
            return False
        return self._running is not None or self._stage == _HEAD or self.transport.get_write_buffer_size() > 0

    def shutdown(self) -> None:
        """The answer that is being given, or the last of those that were asked for, ends the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.keep_alive = False

    def sweep(self, now: float) -> None:
        """End what has taken too long by `now`, on the clock of the event loop; keep a silent stream alive."""
        running = self._running
        if running is not None and running.sign_of_life and not self.transport.is_closing():
            running.keep_alive_by(now, self.state.silence_s)
        if self._takes_nothing(now):
            logger.info("ended the connection of %s, which stopped reading its answer", self._peer())
            self.transport.abort()
        elif self.transport.is_closing():
            pass
        elif self._linger_since is not None:
            if now - self._heard_at > LINGER_S or now - self._linger_since > self.limits.read_timeout_s:
                self.transport.close()
        elif self._stage == _BODY:
            self._sweep_body(now)
        elif self._stage == _HEAD:
            if self._head_since is not None and now - self._head_since > self.limits.read_timeout_s:
                self._refuse(read_timed_out())
        elif self._running is None:
            idle_s = self.limits.keep_alive_s if self._served else self.limits.read_timeout_s
            if now - self._idle_since > idle_s:
                self.transport.close()

    def _takes_nothing(self, now: float) -> bool:
        """Whether the client reads too slowly what nothing is added to: a full buffer, or the end of an answer."""
        unread = self.transport.get_write_buffer_size()
        if not unread or not (self.flow.write_paused or self._running is None or self.transport.is_closing()):
            self._unread = None
            return False
        if self._unread is None or unread > self._unread[1]:
            self._unread = (now, unread)
        since, at_first = self._unread
        return now - since > self.limits.write_timeout_s + (at_first - unread) / MIN_BYTES_PER_SECOND

    def _sweep_body(self, now: float) -> None:
        if self.flow.read_paused or self._body_since is None:
            self._body_since = self._body_read_at = now  # it is the application that takes its time
            return
        if self._running is None:  # answered without the body, which is still coming
            if now - self._idle_since > self.limits.read_timeout_s:
                self.transport.close()
            return
        timeout_s = self.limits.read_timeout_s
        earned_s = min(self._content_bytes / MIN_BYTES_PER_SECOND, self.limits.body_timeout_s)
        if now - self._body_read_at <= timeout_s and now - self._body_since <= timeout_s + earned_s:
            return
        if READ_TIMEOUT not in self.scope:
            # The application knows best how to say it, and is waiting for the body. If not, it is done here next time.
            cast(dict[str, Any], self.scope)[READ_TIMEOUT] = True
            self.cycle.message_event.set()
        elif self.cycle.response_started:
            self.transport.close()
        else:
            self._refuse(read_timed_out())
