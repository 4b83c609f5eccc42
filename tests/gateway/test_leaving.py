"""A client that leaves reaches the backend within a second, whatever its request is at: through a whole gateway.

Each test ends by asking that nothing is left of the request: no exchange, no outstanding call, no hold, no place in a
queue. Leaving the queue before admission is in test_concurrency.py, leaving a rescue in test_failover.py, and what is
charged in test_abort.py.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import POLICY, PRICE, FrontDoor, configuration, front_door
from tests.gateway.test_http_edge import eventually

WITHIN_S = 1.0
HELLO = [{"role": "user", "content": "hi"}]


@pytest_asyncio.fixture
async def servers() -> AsyncIterator[tuple[MockUpstream, MockUpstream]]:
    pair = MockUpstream(), MockUpstream()
    for server in pair:
        await server.start()
    yield pair
    for server in pair:
        await server.stop()


@pytest.fixture
def deaf_url() -> Iterator[str]:
    """An address where connections are not accepted and not refused: its queue is full."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(address)
        yield f"http://127.0.0.1:{address[1]}/v1"
        for one in waiting:
            one.close()


@asynccontextmanager
async def opened(root: Path, *servers: MockUpstream, one: dict[str, Any] | None = None) -> AsyncIterator[FrontDoor]:
    """A gateway with a small model on the first server, and a medium one, its fallback, on the second."""
    upstreams = dict(zip(("one", "two"), servers, strict=False))
    models: dict[str, Any] = {
        f"on-{name}": {"tier": tier, "backend": name, "price": PRICE, "max_output_tokens": 100}
        for name, tier in zip(upstreams, ("small", "medium"), strict=False)
    }
    models["vectors"] = {"kind": "embedding", "backend": "one", "price": PRICE}
    document = configuration(upstreams, models)
    for backend in document["backends"].values():
        backend["timeouts"] = {"connect_s": 30, "first_token_s": 30, "between_tokens_s": 30, "total_s": 60}
        backend["attempts"] = 1
    document["backends"]["one"] |= one or {}
    async with front_door(root, document, policy=POLICY) as door:
        yield door


async def leave(door: FrontDoor, call: asyncio.Task[Any], *asked: MockUpstream) -> list[str]:
    """Leave, see these servers' calls end within a second, and nothing left; returns the outcomes of the rows."""
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    for server in asked:
        await server.until(lambda server=server: server.records[-1].outcome == "client-gone", WITHIN_S)  # type: ignore[misc]
    services = door.services
    await eventually(lambda: services.limiter.open_holds == 0 and not services.http.active)
    pools = services.pools.values()
    assert [replica.outstanding for pool in pools for replica in pool.replicas] == [0] * len(pools)
    assert [pool.queued for pool in pools] == [0] * len(pools)
    assert services.queue.running == services.queue.waiting == 0
    return [row["outcome"] for row in await door.rows()]


@pytest.mark.parametrize(
    ("upstream", "stream"),
    [
        ("hang", False),  # no head has come
        ("hang", True),
        ("stall", False),  # half of the body
        ("stall", True),  # before the first content
        ("stall,after=3", True),  # in mid-stream, and silent
        ("answer,chunks=100000,interval_ms=2", True),  # in mid-stream
        ("answer,delay_ms=60000", False),
    ],
)
async def test_while_the_backend_is_at_it(
    tmp_path: Path, servers: tuple[MockUpstream, MockUpstream], upstream: str, stream: bool
) -> None:
    server = servers[0]
    server.override = upstream
    async with opened(tmp_path, server) as door:
        call = asyncio.create_task(door.chat("on-one", stream=stream))
        await server.until(lambda: server.requests == 1)
        if "after" in upstream or "interval" in upstream:
            await eventually(lambda: server.records[-1].events > 2)
        assert await leave(door, call, server) == ["cancelled"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"model": "on-one", "prompt": "hi"}),
        ("/v1/completions", {"model": "on-one", "prompt": "hi", "stream": True}),
        ("/v1/messages", {"model": "on-one", "max_tokens": 50, "messages": HELLO}),
        ("/v1/messages", {"model": "on-one", "max_tokens": 50, "messages": HELLO, "stream": True}),
        ("/v1/embeddings", {"model": "vectors", "input": "hi"}),
    ],
)
async def test_on_every_route(
    tmp_path: Path, servers: tuple[MockUpstream, MockUpstream], path: str, body: dict[str, Any]
) -> None:
    server = servers[0]
    server.override = "hang"
    async with opened(tmp_path, server) as door:
        call = asyncio.create_task(door.client.post(path, json=body, headers=door.headers()))
        await server.until(lambda: server.requests == 1)
        assert await leave(door, call, server) == ["cancelled"]


async def test_while_it_is_connecting(
    tmp_path: Path, servers: tuple[MockUpstream, MockUpstream], deaf_url: str
) -> None:
    async with opened(tmp_path, servers[0], one={"base_urls": [deaf_url]}) as door:
        call = asyncio.create_task(door.chat("on-one"))
        await eventually(lambda: door.services.pools["one"].replicas[0].outstanding == 1)
        assert await leave(door, call) == ["cancelled"]


async def test_while_it_waits_for_a_busy_backend(tmp_path: Path, servers: tuple[MockUpstream, MockUpstream]) -> None:
    server = servers[0]
    server.override = "hang"
    async with opened(tmp_path, server, one={"max_outstanding": 1}) as door:
        running = asyncio.create_task(door.chat("on-one"))
        await server.until(lambda: server.requests == 1)
        waiting = asyncio.create_task(door.chat("on-one", stream=True))
        await eventually(lambda: door.services.pools["one"].queued == 1)
        waiting.cancel()
        await eventually(lambda: door.services.pools["one"].queued == 0)
        assert await leave(door, running, server) == ["cancelled"]
        assert server.requests == 1


async def test_while_it_pauses_before_a_retry(tmp_path: Path, servers: tuple[MockUpstream, MockUpstream]) -> None:
    server = servers[0]
    server.override = "status,status=500"
    async with opened(tmp_path, server, one={"attempts": 10, "retry_share": 1.0}) as door:
        call = asyncio.create_task(door.chat("on-one"))
        await server.until(lambda: server.requests == 3)  # the next one is 0.2 s away or more
        await server.until(lambda: server.records[-1].outcome == "answered")
        outcomes = await leave(door, call)
        asked = server.requests
        assert outcomes == ["error"] * asked
        await asyncio.sleep(1)  # longer than the pause that it was in
        assert server.requests == asked


async def test_while_a_retry_runs(tmp_path: Path, servers: tuple[MockUpstream, MockUpstream]) -> None:
    server = servers[0]
    server.override = "status,status=500,times=1,then=hang"
    async with opened(tmp_path, server, one={"attempts": 2, "retry_share": 1.0}) as door:
        call = asyncio.create_task(door.chat("on-one", stream=True))
        await server.until(lambda: server.requests == 2)
        assert await leave(door, call, server) == ["error", "cancelled"]


async def test_while_a_server_asked_to_be_left_alone(
    tmp_path: Path, servers: tuple[MockUpstream, MockUpstream]
) -> None:
    server = servers[0]
    server.override = "status,status=429,retry_after=5,times=1"
    async with opened(tmp_path, server, one={"attempts": 2, "retry_share": 1.0, "queue_timeout_s": 30}) as door:
        call = asyncio.create_task(door.chat("on-one"))
        await eventually(lambda: door.services.pools["one"].queued == 1)
        assert await leave(door, call) == ["error"]
        assert server.requests == 1


async def test_while_a_fallback_runs(tmp_path: Path, servers: tuple[MockUpstream, MockUpstream]) -> None:
    first, second = servers
    first.override, second.override = "status,status=500", "hang"
    async with opened(tmp_path, *servers) as door:
        call = asyncio.create_task(door.chat("auto", stream=True))
        await second.until(lambda: second.requests == 1)
        assert await leave(door, call, second) == ["error", "cancelled"]


async def test_while_two_run_side_by_side(tmp_path: Path, servers: tuple[MockUpstream, MockUpstream]) -> None:
    first, second = servers
    one = {
        "base_urls": [first.base_url, second.base_url],
        "hedge": {"max_share": 1.0, "min_delay_s": 0.05},
    }
    async with opened(tmp_path, first, one=one) as door:
        for _ in range(31):  # before there are figures nothing is hedged
            assert (await door.chat("on-one", stream=True)).status_code == 200
        for server in servers:
            server.override = "hang"
        asked = [server.requests for server in servers]
        call = asyncio.create_task(door.chat("on-one", stream=True))
        for server, before in zip(servers, asked, strict=True):
            await server.until(lambda server=server, before=before: server.requests == before + 1)  # type: ignore[misc]
        await eventually(lambda: len(door.services.http.active) == 2)
        call.cancel()
        for server in servers:
            await server.until(lambda server=server: server.records[-1].outcome == "client-gone", WITHIN_S)  # type: ignore[misc]
        await eventually(lambda: door.services.limiter.open_holds == 0 and not door.services.http.active)
        assert [row["outcome"] for row in (await door.rows())[-2:]] == ["cancelled", "cancelled"]
        assert [replica.outstanding for replica in door.services.pools["one"].replicas] == [0, 0]
