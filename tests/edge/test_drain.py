"""Stopping: what clients see from the signal to the end. Real signals are in tests/gateway/test_http_edge.py."""

from __future__ import annotations

import asyncio

import pytest

from edge import server as edge_server
from edge.limits import Limits
from tests.edge.conftest import Client, Edge, edge

GET = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"
HOLD = b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n"


async def stop(door: Edge) -> None:
    """As a signal does, and until the server has noticed."""
    door.server.drain()
    door.server.should_exit = True


async def listening(door: Edge) -> bool:
    try:
        (await Client.connect(door.port)).close()
    except ConnectionError:
        return False
    return True


async def until_the_listener_is_closed(door: Edge) -> None:
    async with asyncio.timeout(20):
        while await listening(door):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_without_requests_the_end_comes_at_once() -> None:
    async with edge(Limits(drain_s=3600)) as door:
        await stop(door)
        assert door.stopping is not None
        await asyncio.wait_for(door.stopping, 20)


async def test_during_the_delay_it_serves_and_sends_clients_away() -> None:
    async with edge(Limits(shutdown_delay_s=3600)) as door:
        kept = await door.connect()
        assert "connection" not in (await kept.ask(GET)).headers
        await stop(door)
        answer = await kept.ask(GET)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await kept.is_closed()
        new = await door.connect()
        assert (await new.ask(GET)).headers["connection"] == "close"
        door.server.force_exit = True


async def test_a_running_request_is_completed_and_kept_connections_are_answered_meanwhile() -> None:
    async with edge(Limits(drain_s=3600)) as door:
        running, kept = await door.connect(), await door.connect()
        assert (await kept.ask(GET)).status == 200
        await running.send(HOLD)
        await door.application.until(lambda: len(door.application.asked) == 2)
        await stop(door)
        await until_the_listener_is_closed(door)
        answer = await kept.ask(GET)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert await kept.is_closed()
        door.application.let_go.set()
        answer = await running.answer()
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert door.stopping is not None
        await asyncio.wait_for(door.stopping, 20)


async def test_idle_connections_do_not_prolong_it_beyond_the_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_server, "GRACE_S", 0.05)
    async with edge(Limits(drain_s=3600)) as door:
        idle, fresh = await door.connect(), await door.connect()
        assert (await idle.ask(GET)).status == 200
        await stop(door)
        assert door.stopping is not None
        await asyncio.wait_for(door.stopping, 20)
        assert await idle.is_closed()
        assert await fresh.is_closed()


@pytest.mark.parametrize("path", [b"/hold", b"/stream"])
async def test_what_takes_too_long_is_cancelled(path: bytes) -> None:
    async with edge(Limits(drain_s=0.1)) as door:
        client = await door.connect()
        await client.send(HOLD.replace(b"/hold", path))
        await door.application.until(lambda: len(door.application.asked) == 1)
        await stop(door)
        assert door.stopping is not None
        if path == b"/stream":
            await client.reader.read()
        await asyncio.wait_for(door.stopping, 20)
        assert door.application.cancelled == 1


async def test_told_twice_it_waits_for_nothing() -> None:
    async with edge(Limits(shutdown_delay_s=3600, drain_s=3600)) as door:
        client = await door.connect()
        await client.send(HOLD)
        await door.application.until(lambda: len(door.application.asked) == 1)
        await stop(door)
        answer = asyncio.create_task(client.reader.read())
        await asyncio.sleep(0)
        door.server.force_exit = True
        assert door.stopping is not None
        await asyncio.wait_for(door.stopping, 20)
        assert await answer == b""
