"""Real parts for the cache's tests: one embedder and one cache process per session; makers of keys and entries."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cache.client import CacheClient
from cache.embedding.embedder import Embedder
from cache.entry import Entry
from cache.key import CacheKey, build_key
from cache.store.answers import Store
from tests.cache.storing import Clock, MakeEntry, MakeKey, MakeStore


class Process:
    """A cache process that a test may kill and start again on the same socket."""

    def __init__(self, socket: Path, *options: str) -> None:
        self.socket = socket
        self._options = options
        self.popen: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "cache", "--socket", str(self.socket), *self._options]
        self.popen = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        assert self.popen is not None
        self.popen.send_signal(number)
        return self.popen.wait(timeout=20)


@contextmanager
def ready_process(folder: Path) -> Iterator[Path]:
    """The socket of a cache process that has loaded its embedder."""
    process = Process(folder / "s")
    process.start()

    async def ready() -> bool:
        async with CacheClient(process.socket, timeout_ms=1000) as client:
            return await client.wait_ready(90) and client.state == "ready"

    try:
        assert asyncio.run(ready()), "the cache process did not load its embedder"
        yield process.socket
    finally:
        process.end()


@pytest.fixture(scope="session")
def embedder() -> Embedder:
    return Embedder("all-MiniLM-L6-v2", threads=1)


@pytest.fixture(scope="session")
def cache_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Socket of a process that lives for the whole session; tests keep apart by their scope."""
    with ready_process(tmp_path_factory.mktemp("cache")) as socket:
        yield socket


@pytest.fixture
async def client(cache_socket: Path) -> AsyncIterator[CacheClient]:
    # Generous, because the machine that runs the tests may be busy; the time limit has a test of its own.
    async with CacheClient(cache_socket, timeout_ms=20_000) as found:
        assert await found.wait_ready(60)
        yield found


@pytest.fixture
def scope() -> str:
    return f"team:{uuid.uuid4()}"


def ask(text: str, **fields: Any) -> dict[str, Any]:
    """A chat request of one user turn."""
    return {"model": "auto", "messages": [{"role": "user", "content": text}], **fields}


@pytest.fixture
def make_key(scope: str) -> MakeKey:
    def make(text: str, *, scope: str = scope, model_group: str = "auto", epoch: int = 0, **fields: Any) -> CacheKey:
        return build_key(ask(text, **fields), scope=scope, model_group=model_group, epoch=epoch)

    return make


@pytest.fixture
def make_entry() -> MakeEntry:
    def make(
        question: str, answer: bytes = b"{}", *, ttl_s: float = 600.0, now: float | None = None, **fields: Any
    ) -> Entry:
        created = time.time() if now is None else now
        values: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "model": "smollm2-135m",
            "tier": "small",
            "prompt_tokens": 12,
            "completion_tokens": 7,
            "cost_nanousd": 1234,
            **fields,
        }
        return Entry(answer=answer, question=question, created_at=created, expires_at=created + ttl_s, **values)

    return make


@pytest.fixture
def make_process(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """A process of the test's own, ended with it."""
    started: list[Process] = []

    def make(*options: str) -> Process:
        process = Process(tmp_path / "s", *options)
        process.start()
        started.append(process)
        return process

    yield make
    for process in started:
        if process.popen is not None and process.popen.poll() is None:
            process.end(signal.SIGKILL)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_store(clock: Clock) -> Iterator[MakeStore]:
    """Stores in memory, or in a folder; closed with the test."""
    made: list[Store] = []

    def make(folder: Path | None = None, *, max_entries: int = 100, max_bytes: int = 1 << 24, **options: Any) -> Store:
        store = Store(folder, "f", max_entries=max_entries, max_bytes=max_bytes, clock=clock, **options)
        made.append(store)
        return store

    yield make
    for store in made:
        store.close()


@pytest.fixture(params=["in memory", "on disk"])
def store(request: pytest.FixtureRequest, make_store: MakeStore, tmp_path: Path) -> Store:
    return make_store(tmp_path if request.param == "on disk" else None)
