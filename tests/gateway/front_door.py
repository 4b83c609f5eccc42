"""A whole gateway in the test's own event loop, on a real port, in front of mock upstreams.

Everything but the models is real: HTTP server, keys, limits, policies, journal, database. The upstream is
`bench.mock_upstream`, which misbehaves on request; tests with the real engine are in `tests/e2e`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.mock_upstream import MockUpstream
from gateway import settings
from gateway.access.keys import KeyLimits, create_key
from gateway.access.secret import load_secret
from gateway.app import App
from gateway.ledger.database import Database
from gateway.ledger.schema import ledger
from gateway.server import Server
from gateway.services import Services
from gateway.tracing import Tracing

POLICY = """\
version: 1
name: default
owner: tests
routes:
  - name: everything
    tier: small
fallback: [medium, small]
cache: {mode: "off"}
"""
_EMPTY_DATABASE: list[bytes] = []  # made once
PRICE = {"version": "test-1", "input_usd_per_million": "1", "output_usd_per_million": "2"}


@dataclasses.dataclass
class FrontDoor:
    """A running gateway: where it is, what it is made of, and a key for it."""

    url: str
    token: str
    services: Services
    root: Path
    client: httpx.AsyncClient
    server: Server

    def headers(self, token: str | None = None) -> dict[str, str]:
        return {"authorization": f"Bearer {token or self.token}"}

    async def chat(
        self, model: str = "mock", *, token: str | None = None, headers: Mapping[str, str] = {}, **body: Any
    ) -> httpx.Response:
        """POST a chat completion; a stream is read to its end."""
        body.setdefault("messages", [{"role": "user", "content": "Hello there"}])
        return await self.client.post(
            "/v1/chat/completions", json={"model": model, **body}, headers={**self.headers(token), **headers}
        )

    async def key(self, **options: Any) -> str:
        """A new key; options as `create_key`, limits by their own names."""
        limits = {name: options.pop(name) for name in KeyLimits.__struct_fields__ if name in options}
        secret = load_secret(self.root / "var" / "secret")
        options.setdefault("name", f"key-{len(self.services.keys)}")
        created = await create_key(self.services.database, secret, limits=KeyLimits(**limits), **options)
        return created.token

    async def rows(self) -> list[dict[str, Any]]:
        """All ledger rows, oldest first, once the journal has been written to the database."""
        await self.services.writer.flush()
        async with self.services.database.read() as connection:
            found = await connection.execute(ledger.select().order_by(ledger.c.ts_ms, ledger.c.attempt_id))
            return [dict(row) for row in found.mappings()]

    def write_policy(self, text: str, name: str = "default.yaml") -> None:
        (self.root / "policies" / name).write_text(text)


def configuration(upstreams: Mapping[str, MockUpstream], models: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A `tierline.yaml` with one backend per upstream, and by default one model `mock` on the first."""
    first = next(iter(upstreams))
    short = {"connect_s": 1, "first_token_s": 2, "between_tokens_s": 2, "total_s": 10}
    return {
        "server": {"port": 0, "drain_seconds": 1},
        "models": models or {"mock": {"tier": "small", "backend": first, "capabilities": ["tools"], "price": PRICE}},
        "backends": {
            name: {"base_urls": [upstream.base_url], "timeouts": short} for name, upstream in upstreams.items()
        },
        "cache": {"enabled": False},
        "limits": {"max_queued": 0},  # a parallel limit refuses at once; tests of the queue set their own
    }


class _PromptServer(Server):
    """Sees within 5 ms that it is to stop, not within 100, and does not wait a second for what may still come on
    connections that clients keep open: thousands of tests wait for that."""

    async def main_loop(self) -> None:
        turns = 0
        while not await self.on_tick(turns):
            turns += 1
            for _ in range(20):
                if not self.should_exit:
                    await asyncio.sleep(0.005)

    def _drained(self, grace_is_over: bool) -> bool:
        return super()._drained(True)


@asynccontextmanager
async def front_door(
    root: Path, document: Mapping[str, Any], *, policy: str = POLICY, tracing: Tracing | None = None
) -> AsyncIterator[FrontDoor]:
    """Run a gateway with its files under `root`."""
    (root / "policies").mkdir(exist_ok=True)
    (root / "policies" / "default.yaml").write_text(policy)
    path = root / "tierline.yaml"
    path.write_text(yaml.safe_dump(dict(document)))
    configured = settings.load(path)
    database = Path(configured.storage.data_dir) / "tierline.db"
    if configured.storage.database_url is None and not database.exists():
        begin_with_schema(database, await migrated_file())
    app = App(lambda: Services.open(configured, tracing=tracing))
    server = _PromptServer(app, configured.server)
    task = asyncio.create_task(server.serve())
    while not server.started:
        if task.done():
            task.result()
            raise RuntimeError("the gateway did not start: see the log above")
        await asyncio.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    services = app.services
    assert services is not None
    secret = load_secret(configured.storage.data_dir / "secret")
    created = await create_key(services.database, secret, name="first")
    url = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=url, timeout=30) as client:
        yield FrontDoor(url, created.token, services, root, client, server)
    server.should_exit = True
    await task


async def migrated_file() -> bytes:
    """An SQLite file with the schema and no rows."""
    if not _EMPTY_DATABASE:
        with tempfile.TemporaryDirectory() as folder:
            database = await Database.open(f"sqlite:///{folder}/empty.db")
            await database.close()
            _EMPTY_DATABASE.append((Path(folder) / "empty.db").read_bytes())
    return _EMPTY_DATABASE[0]


def begin_with_schema(file: Path, migrated: bytes) -> None:
    """Spare whoever opens this SQLite database the migrations, which take as long as a test."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(mode=0o600)
    file.write_bytes(migrated)


def events(text: str) -> list[Any]:
    """The data of each event of a stream, decoded; `[DONE]` as it is."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def eventually(true: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
