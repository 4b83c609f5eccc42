"""An upstream that answers as fast as Python can and misbehaves on request; it speaks the OpenAI dialect or another.

It is the other end of the gateway's benchmarks and of the tests of `backends/`: a raw asyncio protocol on one core,
whose behaviour is chosen by the model name because every gateway forwards that. A name is `KIND,option=value,...`;
any KIND that is not in `KINDS` is an ordinary answer (`mock`, `mock,chunks=64,interval_ms=5`). `Behaviour` lists kinds
and options. Every streamed content starts with its send time (`t=NANOSECONDS `, CLOCK_MONOTONIC), so that a client on
the same machine can tell the delay of each event. Run it by `python -m bench.mock_upstream --port 9100`.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import signal
import socket
import struct
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import cast

import httptools
import msgspec
import uvloop

from bench import mock_faults
from bench.mock_faults import STREAM_END, STREAM_HEAD
from bench.mock_wire import OpenAIWire, Record, Wire, http_answer, sse

KINDS = ("answer", "status", "hang", "close", "drop", "cut", "end", "stall", "error", "garbage", *mock_faults.KINDS)


class Behaviour(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the mock does with a request. Times in milliseconds, sizes in bytes.

    answer: the answer; status: an HTTP error; hang: silence, no response head; close: the connection closes without a
    byte; drop: the answer, then the idle connection closes unannounced. After `after` content events of a stream, or
    in place of the plain answer: cut: the connection breaks (plain: in the middle of the body); end: a well-formed end
    of the body with neither finish_reason nor [DONE]; stall: silence; error: an error object, status 200; garbage: not
    JSON. Faults of HTTP itself: `mock_faults.py`.
    """

    kind: str = "answer"
    times: int = 1 << 60  # only the first `times` requests with this model name get the fault
    then: str = "answer"  # the kind of those after them
    status: int = 500
    retry_after: str = ""
    after: int = 0
    chunks: int = 16
    first_ms: float = 0.0
    interval_ms: float = 0.0
    delay_ms: float = 0.0  # before a plain answer
    pad: int = 0  # bytes added to each content
    piece: int = 0  # write the stream in pieces of so many bytes, one loop turn each
    pings: int = 0  # SSE comments instead of content, one per interval, before the first content
    linger: int = 0  # keep the stream open after [DONE]
    code: int = 0  # `code` of an error object
    held: int = 0  # hold the last content of a stream back until GET /__mock/release


@functools.lru_cache(maxsize=4096)
def behaviour(model: str) -> Behaviour:
    """Read a model name. Raises ValueError for an option that does not exist."""
    name, *options = model.split(",")
    values = dict(option.partition("=")[::2] for option in options)
    return msgspec.convert({**values, "kind": name if name in KINDS else "answer"}, Behaviour, strict=False)


class _Asked(msgspec.Struct):
    model: str = "mock"
    stream: bool | None = False
    stream_options: dict[str, bool] | None = None


_ASK = msgspec.json.Decoder(_Asked)
_EMBEDDING = {
    "object": "list",
    "model": "mock",
    "data": [{"object": "embedding", "index": 0, "embedding": [0.125] * 16}],
    "usage": {"prompt_tokens": 5, "total_tokens": 5},
}


class MockUpstream:
    """The server. `records` are the latest requests; `override` replaces every request's behaviour by a model name."""

    def __init__(self, wire: Wire | None = None) -> None:
        self.wire: Wire = wire or OpenAIWire()
        self.records: deque[Record] = deque(maxlen=2000)
        self.connections: set[_Connection] = set()
        self.accepted = 0  # connections, ever
        self.requests = 0
        self.healthy = True
        self.override: str | None = None
        self.asked: dict[str, int] = {}
        self.release = asyncio.Event()  # for streams that are held back now; later ones wait for the next
        self.port = 0
        self._server: asyncio.Server | None = None
        self._waiters: list[asyncio.Future[None]] = []

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    async def start(self, port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen. Port 0 takes a free one; `port` says which."""
        create = asyncio.get_running_loop().create_server
        self._server = await create(lambda: _Connection(self), host, port, backlog=1024)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Stop listening and break every connection, as a crash would."""
        if self._server is not None:
            self._server.close()
            for connection in list(self.connections):
                connection.abort()
            self._server = None

    async def until(self, true: Callable[[], bool], timeout_s: float = 5.0) -> None:
        """Wait until something that the mock records has happened. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not true():
                waiter = asyncio.get_running_loop().create_future()
                self._waiters.append(waiter)
                await waiter

    def changed(self) -> None:
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    def choose(self, model: str) -> Behaviour:
        model = self.override or model
        chosen = behaviour(model)
        if chosen.kind != "answer":
            self.asked[model] = self.asked.get(model, 0) + 1
            if self.asked[model] > chosen.times:
                return msgspec.structs.replace(chosen, kind=chosen.then)
        return chosen


class _Connection(asyncio.Protocol):
    def __init__(self, mock: MockUpstream) -> None:
        self.mock = mock
        self.parser = httptools.HttpRequestParser(self)
        self.record: Record | None = None
        self.task: asyncio.Task[None] | None = None
        self.writable = asyncio.Event()
        self.writable.set()
        self.url = b""
        self.headers: dict[str, str] = {}
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.mock.connections.add(self)
        self.mock.accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.mock.connections.discard(self)
        if self.task is not None:
            self.task.cancel()
        self._ended("client-gone")

    def abort(self) -> None:
        self._ended("fault")
        self.transport.abort()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.transport.close()

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self.body = self.body + body if self.body else body

    def on_message_complete(self) -> None:
        url, headers, body = self.url.decode(), self.headers, self.body
        self.url, self.headers, self.body = b"", {}, b""
        if not body:
            self.transport.write(self._get(url))
            return
        try:
            asked = _ASK.decode(body)
            chosen = self.mock.choose(asked.model)
        except (msgspec.MsgspecError, ValueError) as error:
            self.transport.write(http_answer(400, self.mock.wire.error(str(error), 400)))
            return
        usage = bool(asked.stream_options and asked.stream_options.get("include_usage"))
        self.record = Record(url, asked.model, bool(asked.stream), headers, body, time.monotonic(), usage)
        self.mock.records.append(self.record)
        self.mock.requests += 1
        if url.endswith("/embeddings") and chosen.kind == "answer":
            self._finish(http_answer(200, msgspec.json.encode(_EMBEDDING)))
        elif refusal := self.mock.wire.refusal(self.record):
            self._finish(refusal)
        elif chosen.kind == "answer" and not asked.stream and not chosen.delay_ms:
            self._finish(self.mock.wire.answer(self.record))
        else:
            serve = self._stream(chosen, self.record) if asked.stream else self._plain(chosen, self.record)
            self.task = asyncio.get_running_loop().create_task(serve)
        self.mock.changed()

    def _get(self, url: str) -> bytes:
        if url.endswith("/health"):
            return http_answer(200 if self.mock.healthy else 503, b"{}")
        if url.endswith("/models"):
            return http_answer(200, b'{"object":"list","data":[{"id":"mock","object":"model","owned_by":"mock"}]}')
        if url.endswith("/__mock/records"):
            return http_answer(200, msgspec.json.encode([dataclasses.replace(r, body=b"") for r in self.mock.records]))
        if url.endswith("/__mock/release"):
            self.mock.release.set()
            self.mock.release = asyncio.Event()
            return http_answer(200, b"{}")
        if url.endswith("/__mock/counts"):
            events = sum(record.events for record in self.mock.records)
            return http_answer(200, msgspec.json.encode({"requests": self.mock.requests, "events": events}))
        return http_answer(404, self.mock.wire.error("no such path", 404))

    def _ended(self, outcome: str) -> None:
        if self.record is not None and self.record.outcome == "running":
            self.record.outcome = outcome
            self.record.ended_at = time.monotonic()
        self.mock.changed()

    def _finish(self, data: bytes) -> None:
        self.transport.write(data)
        self._ended("answered")

    async def _play(self, script: mock_faults.Script, interval_ms: float) -> None:
        """Write what the script says and end as it says."""
        for number, piece in enumerate(script.pieces):
            if number:
                await asyncio.sleep(interval_ms / 1000)
            self.transport.write(piece)
        if script.ending == "silence":
            self.mock.changed()
            await asyncio.Event().wait()
        self._ended("fault")
        if script.ending == "close":
            self.transport.close()
        elif script.ending == "reset":
            await asyncio.sleep(0.05)  # what was written has to arrive first
            linger = struct.pack("ii", 1, 0)
            self.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self.transport.abort()

    async def _fault(self, chosen: Behaviour, record: Record) -> bool:
        """Faults that look the same for plain answers and streams. True: this was one."""
        script = mock_faults.script(chosen.kind, self.mock.wire, record, chosen.after)
        if script is not None:
            await self._play(script, chosen.interval_ms)
        elif chosen.kind == "status":
            extra = f"retry-after: {chosen.retry_after}\r\n".encode() if chosen.retry_after else b""
            message = f"the mock was asked for status {chosen.status}"
            self._finish(http_answer(chosen.status, self.mock.wire.error(message, chosen.status), extra=extra))
        elif chosen.kind == "hang":
            await asyncio.Event().wait()
        elif chosen.kind == "close":
            self.abort()
        else:
            return False
        return True

    async def _plain(self, chosen: Behaviour, record: Record) -> None:
        if chosen.delay_ms:
            await asyncio.sleep(chosen.delay_ms / 1000)
        if await self._fault(chosen, record):
            return
        wire = self.mock.wire
        if chosen.kind in ("answer", "drop"):
            self._finish(wire.answer(record))
            if chosen.kind == "drop":
                self.transport.close()
        elif chosen.kind in ("cut", "stall", "end"):
            self.transport.write(wire.answer(record)[:-100])
            if chosen.kind == "stall":
                await asyncio.Event().wait()
            self._ended("fault")
            self.transport.close()
        else:
            wrong = wire.error("upstream failed", chosen.code) if chosen.kind == "error" else b"{oops"
            self._finish(http_answer(200, wrong))

    async def _stream(self, chosen: Behaviour, record: Record) -> None:
        if await self._fault(chosen, record):
            return
        async for piece in self._events(chosen, record):
            await self.writable.wait()
            if chosen.piece:
                for start in range(0, len(piece), chosen.piece):
                    self.transport.write(piece[start : start + chosen.piece])
                    await asyncio.sleep(0)
            else:
                self.transport.write(piece)
            record.events += 1
        if chosen.kind == "cut":
            self.abort()
        elif chosen.kind == "stall" or chosen.linger:
            self.mock.changed()
            await asyncio.Event().wait()
        else:
            self._finish(STREAM_END)
            if chosen.kind == "drop":
                self.transport.close()

    async def _events(self, chosen: Behaviour, record: Record) -> AsyncIterator[bytes]:
        wire = self.mock.wire
        yield STREAM_HEAD + wire.start(record)
        whole = chosen.kind in ("answer", "drop")
        if chosen.first_ms:
            await asyncio.sleep(chosen.first_ms / 1000)
        for _ in range(chosen.pings):
            await asyncio.sleep(chosen.interval_ms / 1000)
            yield wire.ping
        pad = b"\xc3\xa4" * (chosen.pad // 2) + b"x" * (chosen.pad % 2)
        last = (chosen.chunks if whole else chosen.after) - 1
        for number in range(last + 1):
            if chosen.held and number == last:
                await self.mock.release.wait()
            if number and chosen.interval_ms:
                await asyncio.sleep(chosen.interval_ms / 1000)
            yield wire.text(record, pad)
        if chosen.kind == "error":
            yield wire.error_event("upstream failed in mid-stream", chosen.code)
        elif chosen.kind == "garbage":
            yield sse(b"{oops")
        elif whole:
            yield wire.finish(record)


async def serve(host: str, port: int, wire: Wire | None = None) -> None:
    """Serve until SIGTERM or SIGINT; prints the base URL once it listens."""
    mock = MockUpstream(wire)
    await mock.start(port, host)
    print(mock.base_url, flush=True)
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()
    await mock.stop()


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description="OpenAI-compatible mock upstream with faults by model name")
    arguments.add_argument("--host", default="127.0.0.1")
    arguments.add_argument("--port", type=int, default=0, help="default: a free port, printed")
    given = arguments.parse_args()
    uvloop.run(serve(given.host, given.port))
