"""Several real gateway processes under `tierline up`, on one Redis, in front of the mock upstream of the test."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import yaml

from bench.mock_upstream import MockUpstream
from gateway import lifeline
from gateway.access.keys import CreatedKey, KeyLimits, create_key
from gateway.access.secret import load_secret
from gateway.ledger.database import Database
from gateway.ledger.schema import ledger
from tests.conftest import unused_port
from tests.gateway.front_door import POLICY, configuration

PATIENCE_S = 120.0


@dataclass
class Several:
    """The running workers: where they are and what they have written. `client` opens a connection per request, so that
    the kernel spreads the requests over the workers."""

    url: str
    root: Path
    database_url: str
    workers: int
    client: httpx.AsyncClient

    async def chat(self, key: CreatedKey, model: str = "mock", **body: Any) -> httpx.Response:
        """POST a chat completion; a stream is read to its end."""
        messages = [{"role": "user", "content": "Hello there"}]
        headers = {"authorization": f"Bearer {key.token}", "connection": "close"}
        document = {"model": model, "messages": messages, **body}
        return await self.client.post("/v1/chat/completions", json=document, headers=headers)

    async def ask(self, worker: int, path: str, key: CreatedKey | None = None) -> httpx.Response:
        """GET from one worker, over its own socket."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.root / f"var/run/gateway-{worker}.sock"))
        headers = {"authorization": f"Bearer {key.token}"} if key else {}
        async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=60) as client:
            return await client.get(path, headers=headers)

    async def post(self, worker: int, key: CreatedKey, model: str = "mock", **body: Any) -> httpx.Response:
        """POST a chat completion to one worker, over its own socket."""
        document = {"model": model, "messages": [{"role": "user", "content": "Hello there"}], **body}
        headers = {"authorization": f"Bearer {key.token}"}
        transport = httpx.AsyncHTTPTransport(uds=str(self.root / f"var/run/gateway-{worker}.sock"))
        async with httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=60) as client:
            return await client.post("/v1/chat/completions", json=document, headers=headers)

    async def key(self, name: str, *, budget_nanousd: int | None = None, **limits: int) -> CreatedKey:
        """A new key, once every worker knows it."""
        async with self.database() as database:
            secret = load_secret(self.root / "var/secret")
            made = await create_key(
                database, secret, name=name, budget_nanousd=budget_nanousd, limits=KeyLimits(**limits)
            )
        for worker in range(1, self.workers + 1):
            await until(lambda worker=worker: self._knows(worker, made), f"worker {worker} to know a new key")
        return made

    async def _knows(self, worker: int, key: CreatedKey) -> bool:
        return (await self.ask(worker, "/v1/models", key)).status_code == 200

    @asynccontextmanager
    async def database(self) -> AsyncIterator[Database]:
        opened = await Database.open(self.database_url)
        try:
            yield opened
        finally:
            await opened.close()

    async def rows(self) -> list[dict[str, Any]]:
        async with self.database() as database, database.read() as connection:
            return [dict(row) for row in (await connection.execute(ledger.select())).mappings()]

    async def settled_rows(self, count: int) -> list[dict[str, Any]]:
        """All rows, once there are so many and no worker holds any back."""

        async def written() -> bool:
            return len(await self.rows()) >= count and sum(await self.metric("tierline_ledger_lag_rows")) == 0

        await until(written, f"{count} rows in the ledger")
        return await self.rows()

    async def metric(self, name: str) -> list[float]:
        """A metric's value in each worker, summed over its other labels."""
        page = (await self.client.get("/metrics")).text
        values = [0.0] * self.workers
        for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", page, re.MULTILINE):
            found = re.search(r'worker="(\d+)"', labels)
            assert found is not None, f"{name} has no worker label"
            values[int(found[1]) - 1] += float(value)
        return values

    def pid(self, worker: int) -> int:
        return int(self.state()[f"gateway-{worker}"]["pid"])

    def state(self) -> dict[str, dict[str, Any]]:
        found: dict[str, dict[str, Any]] = json.loads((self.root / "var/run/up.json").read_text())["processes"]
        return found

    def log(self, worker: int) -> str:
        return (self.root / f"var/log/gateway-{worker}.log").read_text()


async def until(condition: Any, what: str) -> None:
    """Wait for something; `condition` may be a coroutine function or a plain one. Errors of the wire mean: not yet."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.HTTPError):
            met = condition()
            if await asyncio.wait_for(met, PATIENCE_S) if asyncio.iscoroutine(met) else met:
                return
        await asyncio.sleep(0.05)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")


@asynccontextmanager
async def several(
    root: Path,
    redis_url: str,
    upstream: MockUpstream,
    *,
    workers: int = 4,
    database_url: str | None = None,
    policy: str = POLICY,
    settings: Mapping[str, Any] | None = None,
) -> AsyncIterator[Several]:
    """Start them and wait until all are ready. The time-out of Redis is long, because the machine may be busy."""
    port = unused_port()
    document = configuration({"mock": upstream})
    document["server"] = {"port": port, "workers": workers, "drain_seconds": 5}
    document["storage"] = {"redis_url": redis_url, "redis_timeout_ms": 10_000}
    if database_url:
        document["storage"]["database_url"] = database_url
    document["backends"]["mock"]["timeouts"] = {"connect_s": 20, "first_token_s": 60, "between_tokens_s": 60}
    document["backends"]["mock"]["max_outstanding"] = 2000
    for section, values in (settings or {}).items():
        document[section] = {**document.get(section, {}), **values}
    (root / "policies").mkdir(parents=True, exist_ok=True)
    (root / "policies/default.yaml").write_text(policy)
    config = root / "tierline.yaml"
    config.write_text(yaml.safe_dump(document))
    output = root / "up.jsonl"
    with output.open("ab") as file:
        up = (sys.executable, "-m", "gateway.cli", "up", "--json", "--config", str(config))
        process = await asyncio.create_subprocess_exec(*lifeline.command(up), stdout=file, stderr=file)
    try:
        await until(
            lambda: b'"event": "up"' in output.read_bytes() or process.returncode is not None, "tierline up to come up"
        )
        assert process.returncode is None, output.read_text()
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S) as client:
            url = database_url or f"sqlite:///{root}/var/tierline.db"
            yield Several(f"http://127.0.0.1:{port}", root, url, workers, client)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
            await process.wait()
        output.unlink()


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
