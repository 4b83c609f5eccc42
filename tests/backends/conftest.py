"""Fixtures of the backends' tests: a mock upstream on a real socket, pools and a dispatcher in front of it."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from backends.connection import Origin
from backends.dispatch import Attempt, Call, Candidate, Dispatched, Dispatcher
from backends.http import HttpClient
from backends.pool import Pool, Timeouts
from bench.mock_upstream import MockUpstream

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
Serve = Callable[..., Awaitable[Origin]]


def pytest_asyncio_loop_factories(config: pytest.Config, item: pytest.Item) -> dict[str, Any]:
    """The gateway runs on uvloop, but nothing here may depend on it."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest_asyncio.fixture
async def mock() -> AsyncIterator[MockUpstream]:
    upstream = MockUpstream()
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest_asyncio.fixture
async def second() -> AsyncIterator[MockUpstream]:
    upstream = MockUpstream()
    await upstream.start()
    yield upstream
    await upstream.stop()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[HttpClient]:
    http = HttpClient()
    yield http
    await http.aclose()


@dataclasses.dataclass
class Observer:
    """Remembers what it is told, and the outcome at that time."""

    started: list[Attempt] = dataclasses.field(default_factory=list)
    ended: list[Attempt] = dataclasses.field(default_factory=list)
    cut: list[Attempt] = dataclasses.field(default_factory=list)

    def attempt_started(self, attempt: Attempt) -> None:
        assert attempt.outcome == "running"
        self.started.append(attempt)

    def attempt_ended(self, attempt: Attempt) -> None:
        assert attempt.outcome != "running"
        assert attempt in self.started
        assert attempt not in self.ended
        assert attempt not in self.cut
        self.ended.append(attempt)

    def attempt_cut(self, attempt: Attempt) -> None:
        assert attempt.outcome in ("cut", "timeout")
        assert attempt in self.started
        assert attempt not in self.ended
        assert attempt not in self.cut
        self.cut.append(attempt)


class Bench:
    """One dispatcher over named pools, with short deadlines and the defaults of a test."""

    def __init__(self, client: HttpClient) -> None:
        self.client = client
        self.pools: dict[str, Pool] = {}
        self.dispatcher = Dispatcher(self.pools)
        self.observer = Observer()

    def pool(self, name: str, *upstreams: MockUpstream | str, **options: Any) -> Pool:
        urls = [u if isinstance(u, str) else u.base_url for u in upstreams]
        timeouts = Timeouts(
            connect_s=options.pop("connect_s", 1.0),
            first_token_s=options.pop("first_token_s", 1.0),
            between_tokens_s=options.pop("between_tokens_s", 1.0),
            total_s=options.pop("total_s", 10.0),
        )
        self.pools[name] = Pool(name, urls, client=self.client, timeouts=timeouts, **options)
        return self.pools[name]

    async def open(self, *models: str, stream: bool = True, **options: Any) -> Dispatched:
        """Ask for `models`, each NAME@POOL or NAME (on the pool `main`).

        `about` are further fields of each candidate, in turn, `payload` of the payload; the rest goes to the call.
        """
        candidates = []
        about: list[dict[str, Any]] = options.pop("about", [{}])
        for model, fields in zip(models or ("mock",), itertools.cycle(about)):
            name, _, pool = model.partition("@")
            candidates.append(Candidate(name.partition(",")[0], "small", pool or "main", name, **fields))
        payload = {"model": "public", "messages": [{"role": "user", "content": "hello"}], **options.pop("payload", {})}
        call = Call(payload, "chat", stream, "req-1", **options)
        return await self.dispatcher.open(call, candidates, self.observer)

    def outcomes(self) -> list[str]:
        return [attempt.outcome for attempt in self.observer.started]

    def outstanding(self) -> int:
        return sum(replica.outstanding for pool in self.pools.values() for replica in pool.replicas)


@pytest_asyncio.fixture
async def bench(client: HttpClient) -> AsyncIterator[Bench]:
    made = Bench(client)
    yield made
    for pool in made.pools.values():
        await pool.aclose()
    assert made.outstanding() == 0, "a replica was acquired and not released"


@pytest.fixture
def deaf_url() -> Iterator[str]:
    """The base URL of a listener whose backlog is full: further connections are neither accepted nor refused."""
    with contextlib.ExitStack() as sockets:
        listener = sockets.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(4):
            filler = sockets.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


Eventually = Callable[[Callable[[], object]], Awaitable[None]]


@pytest.fixture
def eventually() -> Eventually:
    """Wait for something that no event announces. Raises TimeoutError after three seconds."""

    async def until(true: Callable[[], object]) -> None:
        async with asyncio.timeout(3):
            while not true():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    return until


@pytest.fixture
def refused_url(unused_tcp_port_factory: Callable[[], int]) -> str:
    """The base URL of a port on which nobody listens."""
    return f"http://127.0.0.1:{unused_tcp_port_factory()}/v1"


@pytest_asyncio.fixture
async def serve() -> AsyncIterator[Serve]:
    """Start a server that answers each connection with the given bytes, or by the given function."""
    servers = []

    async def start(answer: bytes | Handler) -> Origin:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                if isinstance(answer, bytes):
                    await reader.readuntil(b"\r\n\r\n")
                    writer.write(answer)
                    await writer.drain()
                else:
                    await answer(reader, writer)
            finally:
                writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        servers.append(server)
        return Origin(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")

    yield start
    for server in servers:
        server.close()
