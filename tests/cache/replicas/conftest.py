"""Cache stores that share their answers through a Redis of the test run's own."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench.redis_server import RedisServer
from cache.entry import Entry
from cache.key import CacheKey, build_key
from cache.replicas.link import Link
from cache.replicas.notes import Notes
from cache.replicas.pending import Pending
from cache.replicas.records import Sealing
from cache.replicas.replica import Replica
from cache.store.answers import Store
from cache.store.index import Vector
from tests.gateway.conftest import redis_binary, redis_server

__all__ = ["redis_binary", "redis_server"]
PATIENCE_S = 10.0
DIMENSION = 8


def key(text: str, *, scope: str = "team:a", **fields: Any) -> CacheKey:
    payload = {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}
    return build_key(payload, scope=scope, model_group="auto")


def entry(text: str, answer: str = "42", **fields: Any) -> Entry:
    now = time.time()
    about = {
        "id": f"req-{uuid.uuid4()}",
        "model": "m",
        "tier": "small",
        "prompt_tokens": 3,
        "completion_tokens": 4,
        "cost_nanousd": 5,
        "created_at": now,
        "expires_at": now + 3600,
        "question": text,
    }
    return Entry(answer=answer.encode(), **{**about, **fields})


def vector(seed: int) -> Vector:
    made = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return made / np.linalg.norm(made)


class Plain:
    """Texts are kept as they are."""

    def seal(self, value: bytes, bound_to: bytes) -> bytes:
        return value

    def unseal(self, sealed: bytes, bound_to: bytes) -> bytes:
        return sealed


class Member:
    """One cache process's store and replica, in this process."""

    def __init__(self, store: Store, replica: Replica, notes: Notes) -> None:
        self.store = store
        self.replica = replica
        self.notes = notes
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self.task = asyncio.create_task(self.replica.run())

    async def stop(self) -> None:
        """As on SIGTERM."""
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)
            self.task = None

    def put(self, text: str, answer: str = "42", *, seed: int | None = None, **fields: Any) -> Entry:
        kept = entry(text, answer, **fields)
        assert self.store.put(key(text), kept, None if seed is None else vector(seed)).reason is None
        return kept

    def answer(self, text: str) -> str | None:
        found = self.store.get_exact(key(text))
        return None if found is None else found.entry.answer.decode()


class Group:
    """Makes members on one Redis, under keys of their own. Ends them all at the end."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.prefix = f"{{{uuid.uuid4().hex}}}:cache"
        self.members: list[Member] = []

    async def member(
        self,
        folder: Path | None = None,
        *,
        url: str | None = None,
        embedder: str = "e",
        most_bytes: int = 1 << 24,
        sealing: Sealing = Plain(),
        pending: Pending | None = None,
        max_entries: int = 100_000,
        start: bool = True,
    ) -> Member:
        store = Store(None, embedder, max_entries=max_entries, max_bytes=1 << 28)
        notes = Notes(folder)
        link = Link(url or self.url, prefix=self.prefix)
        label = f"member {len(self.members) + 1}"
        replica = Replica(
            store,
            link,
            notes,
            embedder=embedder,
            label=label,
            most_bytes=most_bytes,
            sealing=sealing,
            pending=pending,
        )
        store.listener = replica.listener
        made = Member(store, replica, notes)
        self.members.append(made)
        if start:
            made.start()
            await until(lambda: replica.connected, "a member to connect")
        return made

    async def close(self) -> None:
        for member in self.members:
            await member.stop()
            member.notes.close()


async def until(condition: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s:.0f} s for {what}"
        await asyncio.sleep(0.005)


@pytest.fixture
async def group(redis_server: RedisServer) -> AsyncIterator[Group]:
    made = Group(redis_server.url)
    yield made
    await made.close()


@pytest.fixture
def own_redis(redis_binary: str) -> Iterator[RedisServer]:
    """A server that a test may stop, kill and empty."""
    server = RedisServer(redis_binary).start()
    yield server
    server.close()


@pytest.fixture
async def lonely_group(own_redis: RedisServer) -> AsyncIterator[Group]:
    """A group on a server that a test may stop, kill and empty."""
    made = Group(own_redis.url)
    yield made
    with suppress(ProcessLookupError):
        own_redis.resume()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.close)
