"""A server of the edge on a real socket, a small application behind it, and a client that writes bytes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import pytest
import pytest_asyncio
import uvloop

from edge.connection import Connection
from edge.limits import Limits
from edge.server import Server

CHUNK = b"x" * 32_768


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """Gateway and engine run on uvloop, but nothing here may depend on it."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(autouse=True)
def no_tracebacks(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever a client does, it is no failure of ours."""
    yield
    for record in caplog.get_records("call"):
        assert record.exc_info is None, record.getMessage()
        assert record.levelno < logging.ERROR, record.getMessage()


class Application:
    """/echo says what it was sent; /ignore answers without reading; /hold waits; /stream writes for ever; /idle begins
    a stream that has a sign of life, and ends it when it is let go."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.let_go = asyncio.Event()
        self.written = 0  # chunks of /stream
        self.disconnects = 0
        self.cancelled = 0
        self.changed = asyncio.Event()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():
                self.changed.clear()
                await self.changed.wait()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.asked.append(scope)
        self.changed.set()
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            self.cancelled += 1
            if scope["path"] == "/hold":
                await send({"type": "http.response.start", "status": 503, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.changed.set()

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        if path == "/stream":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            watcher = asyncio.create_task(self._watch(receive))
            while not watcher.done():
                await send({"type": "http.response.body", "body": CHUNK, "more_body": True})
                self.written += 1
                await asyncio.sleep(0)
            self.disconnects += 1
            return
        if path == "/idle":
            start = {"type": "http.response.start", "status": 200, "headers": [], "tierline.keep_alive": b": alive\n\n"}
            await send(start)
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            await self.let_go.wait()
            await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": False})
            return
        body = b"" if path in ("/ignore", "/hold") else await self._body(receive)
        if body is None:
            self.disconnects += 1
            return
        if path == "/hold":
            await self.let_go.wait()
        said = json.dumps(
            {"path": path, "body": body.decode(), "headers": [name.decode() for name, _ in scope["headers"]]}
        ).encode()
        headers = [(b"content-length", b"%d" % len(said))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": said, "more_body": False})

    async def _body(self, receive: Any) -> bytes | None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message["body"]
            if not message["more_body"]:
                return body

    async def _watch(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def said(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    """One connection to the server."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def connect(cls, port: int, *, receive_buffer: int | None = None) -> Self:
        connected = socket.socket()
        if receive_buffer:
            connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connected.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connected, ("127.0.0.1", port))
        except OSError:
            connected.close()
            raise
        # A limit that is never reached: otherwise the stream stops reading when nobody reads it.
        return cls(*await asyncio.open_connection(sock=connected, limit=4096 if receive_buffer else 1 << 24))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def answer(self) -> Answer:
        """The next answer, of those with a content length."""
        async with asyncio.timeout(20):
            head = await self.reader.readuntil(b"\r\n\r\n")
            status, *lines = head.decode().split("\r\n")
            headers = dict(line.lower().split(": ", 1) for line in lines if line)
            body = await self.reader.readexactly(int(headers["content-length"]))
        return Answer(int(status.split()[1]), headers, body)

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def is_closed(self) -> bool:
        """Wait for the server to close. True: it did, and sent nothing more."""
        async with asyncio.timeout(20):
            try:
                return await self.reader.read() == b""
            except ConnectionResetError:
                return True

    def close(self) -> None:
        self.writer.close()


@dataclass
class Edge:
    """A running server. `later` moves its clock on."""

    server: Server
    application: Application
    port: int
    clients: list[Client] = field(default_factory=list)
    stopping: asyncio.Task[None] | None = None

    async def connect(self, *, receive_buffer: int | None = None) -> Client:
        before = len(self.server.connections())
        client = await Client.connect(self.port, receive_buffer=receive_buffer)
        self.clients.append(client)
        await self.until(lambda: len(self.server.connections()) > before)
        return client

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    def later(self, seconds: float) -> None:
        """What the sweep does when so much time has passed."""
        self.server.sweep(asyncio.get_running_loop().time() + seconds)

    @property
    def connection(self) -> Connection:
        [only] = self.server.connections()
        return only


@asynccontextmanager
async def edge(limits: Limits) -> AsyncIterator[Edge]:
    application = Application()
    server = Server(application, limits, port=0, lifespan="off")
    serving = asyncio.create_task(server.serve())
    while not server.started:
        if serving.done():
            serving.result()
            raise RuntimeError("the server did not start: see the log above")
        await asyncio.sleep(0.001)
    port = server.servers[0].sockets[0].getsockname()[1]
    running = Edge(server, application, port, stopping=serving)
    yield running
    for client in running.clients:
        client.close()
    application.let_go.set()
    server.should_exit = True
    await serving


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Edge]:
    """With the default times; tests move the clock."""
    async with edge(Limits(drain_s=5)) as running:
        yield running
