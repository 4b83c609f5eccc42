"""A gateway that is killed in the middle of a batch: another goes on, and every line is answered and paid for once."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import openai
import pytest
import yaml

from bench.mock_upstream import MockUpstream
from gateway.access.keys import create_key
from gateway.access.secret import load_secret
from gateway.batches import store
from gateway.ledger.database import Database
from gateway.ledger.schema import batch_results, ledger
from tests.conftest import unused_port
from tests.gateway.batching import begin, document, ended, line, lines_in
from tests.gateway.front_door import POLICY

LINES = 60


@asynccontextmanager
async def process(root: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A gateway process of its own, ready."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway", env={**os.environ, "TIERLINE_CONFIG": str(root / "tierline.yaml")}
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(60):
            while True:
                try:
                    if (await client.get("/health/live")).status_code == 200:
                        break
                except httpx.TransportError:
                    assert running.returncode is None
                    await asyncio.sleep(0.05)
        yield running
    finally:
        if running.returncode is None:
            running.send_signal(signal.SIGTERM)
            await running.wait()


@pytest.mark.parametrize("kind", ["sqlite", pytest.param("postgresql", marks=[pytest.mark.postgres, pytest.mark.slow])])
async def test_a_killed_gateway_loses_no_line_and_pays_none_twice(
    tmp_path: Path, upstream: MockUpstream, request: pytest.FixtureRequest, kind: str
) -> None:
    database_url = f"sqlite:///{tmp_path}/tierline.db"
    if kind == "postgresql":
        database_url = str(request.getfixturevalue("postgres_url"))
    port = unused_port()
    made = document(upstream, concurrency=6)
    made["server"] |= {"port": port, "host": "127.0.0.1"}
    made["storage"] = {"data_dir": str(tmp_path), "database_url": database_url}
    (tmp_path / "tierline.yaml").write_text(yaml.safe_dump(made))
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "default.yaml").write_text(POLICY)
    database = await Database.open(database_url)
    key = await create_key(database, load_secret(tmp_path / "secret"), name="first")
    sdk = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key.token, max_retries=5)
    wanted = [f"line {i}" for i in range(LINES)]
    async with process(tmp_path, port) as first:
        batch = await begin(sdk, (line(name, "slow") for name in wanted))
        while (counts := (await sdk.batches.retrieve(batch.id)).request_counts) is None or counts.completed < 12:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        first.kill()
        await first.wait()
    async with database.read() as connection:
        kept = len((await connection.execute(batch_results.select())).all())
    assert 12 <= kept < LINES
    asked = upstream.requests
    async with process(tmp_path, port):
        batch = await ended(sdk, batch, timeout_s=60 + store.LEASE_MS / 1000)
        lines = await lines_in(sdk, batch.output_file_id)
        assert [one["custom_id"] for one in lines] == wanted
        assert upstream.requests - asked == LINES - kept  # only lines without a result were asked again
    async with database.read() as connection:
        rows = [row._asdict() for row in (await connection.execute(ledger.select())).all()]
    outcomes = Counter(row["outcome"] for row in rows)
    answered = {one["response"]["request_id"] for one in lines}
    assert len(answered) == LINES
    # Each line has the row of its answer; what was under way when the process died is on record as that, too.
    assert answered <= {row["request_id"] for row in rows}
    assert outcomes["success"] + outcomes["interrupted"] == len(rows) <= LINES + 6
    assert {json.loads(row["tags"])["tierline-batch"] for row in rows} == {batch.id}
    await sdk.close()
    await database.close()
