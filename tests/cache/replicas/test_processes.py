"""Real cache processes on a real Redis: they share, are killed in the middle, come back, and one purge reaches all."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bench.redis_server import RedisServer
from cache.client import CacheClient
from gateway.cli.cache import app
from tests.cache.conftest import Process
from tests.cache.replicas.conftest import entry, key

pytestmark = pytest.mark.redis
PATIENCE_S = 60.0


class Node:
    """A cache process with a data folder of its own, and a client of it."""

    def __init__(self, folder: Path, redis_url: str) -> None:
        (folder / "var/run").mkdir(parents=True)
        socket = folder / "var/run/cache.sock"
        self.folder = folder
        self.process = Process(socket, "--redis-url", redis_url, "--data-dir", str(folder / "var"))
        self.client = CacheClient(socket, timeout_ms=20_000)

    async def start(self) -> None:
        self.process.start()
        assert await self.client.wait_connected(PATIENCE_S)

    async def store(self, text: str, answer: str, **fields: object) -> None:
        assert await self.client.store(key(text), entry(text, answer, **fields), "exact") is None

    async def answer(self, text: str) -> str | None:
        found = await self.client.lookup(key(text), "exact", 0.95)
        return None if found.entry is None else found.entry.answer.decode()

    async def until(self, text: str, answer: str | None, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        while (found := await self.answer(text)) != answer:
            assert time.monotonic() < deadline, f"after {within_s} s '{text}' is {found}, not {answer}"
            await asyncio.sleep(0.01)

    async def connected(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            shared = (await self.client.stats()).replication
            if shared is not None and shared.connected and not shared.waiting and shared.replicas == 2:
                return
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)


@pytest.fixture
async def nodes(tmp_path: Path, own_redis: RedisServer) -> AsyncIterator[list[Node]]:
    async with AsyncExitStack() as stack:
        made = [Node(tmp_path / name, own_redis.url) for name in ("one", "two")]
        for node in made:
            await stack.enter_async_context(node.client)
        await asyncio.gather(*(node.start() for node in made))
        await asyncio.gather(*(node.connected() for node in made))
        yield made
        for node in made:
            assert node.process.popen is not None
            if node.process.popen.poll() is None:
                assert node.process.end() == 0


async def test_two_processes_share_what_they_keep_and_forget_through_kills_of_themselves_and_of_redis(
    nodes: list[Node], own_redis: RedisServer
) -> None:
    one, two = nodes
    await one.store("shared", "1")
    await two.until("shared", "1", 1)

    # One is killed while it writes. What it published is there when it is back, and what was purged meanwhile is gone.
    writing = [asyncio.create_task(one.client.store(key(f"w{n}"), entry(f"w{n}"), "exact")) for n in range(200)]
    await asyncio.sleep(0.01)
    one.process.end(signal.SIGKILL)
    await asyncio.gather(*writing)
    done = await two.client.purge(model="m")
    assert all("one/var/run/cache.sock" in who for who in done.unconfirmed), done
    await two.store("after", "2")
    await one.start()
    await one.connected()
    await one.until("after", "2", 5)
    assert await one.answer("shared") is None
    assert [await one.answer(f"w{n}") for n in range(200)] == [await two.answer(f"w{n}") for n in range(200)]

    # Redis is killed, and comes back with nothing.
    own_redis.kill()
    await one.store("alone", "3")
    assert await one.answer("after") == "2"
    started = time.monotonic()
    done = await two.client.purge(policy="p")
    assert len(done.unconfirmed) == 1
    assert time.monotonic() - started < 6
    own_redis.start()
    await two.until("alone", "3", 10)

    # The command waits for both.
    config = two.folder / "tierline.yaml"
    config.write_text("version: 1\n")
    await asyncio.gather(one.connected(), two.connected())
    words = await asyncio.to_thread(CliRunner().invoke, app, ["stats", "--config", str(config)])
    assert "by 2 processes" in words.stdout
    found = await asyncio.to_thread(CliRunner().invoke, app, ["purge", "--all", "--json", "--config", str(config)])
    assert found.exit_code == 0, found.output
    said = json.loads(found.stdout)
    assert (said["confirmed"], said["unconfirmed"]) == (2, [])
    assert [await node.answer(text) for node in nodes for text in ("after", "alone")] == [None] * 4
