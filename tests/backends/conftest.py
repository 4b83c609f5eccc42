"""Fixtures of the backends' tests: a mock upstream on a real socket, pools and a dispatcher in front of it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import uvloop

from backends.dispatch import Attempt, Call, Candidate, Dispatched, Dispatcher
from backends.http import HttpClient
from backends.pool import Pool, Timeouts
from bench.mock_upstream import MockUpstream


@pytest.fixture(params=[uvloop.EventLoopPolicy, asyncio.DefaultEventLoopPolicy], ids=["uvloop", "asyncio"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    """The gateway runs on uvloop, but nothing here may depend on it."""
    return request.param()


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

    def attempt_started(self, attempt: Attempt) -> None:
        assert attempt.outcome == "running"
        self.started.append(attempt)

    def attempt_ended(self, attempt: Attempt) -> None:
        assert attempt.outcome != "running"
        assert attempt in self.started
        assert attempt not in self.ended
        self.ended.append(attempt)


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
        """Ask for `models`, each NAME@POOL or NAME (on the pool `main`)."""
        candidates = []
        for model in models or ("mock",):
            name, _, pool = model.partition("@")
            candidates.append(Candidate(name.partition(",")[0], "small", pool or "main", name))
        payload = {"model": "public", "messages": [{"role": "user", "content": "hello"}], **options.pop("payload", {})}
        call = Call(payload, "/chat/completions", stream, "req-1", **options)
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
def refused_url(unused_tcp_port_factory: Callable[[], int]) -> str:
    """The base URL of a port on which nobody listens."""
    return f"http://127.0.0.1:{unused_tcp_port_factory()}/v1"
