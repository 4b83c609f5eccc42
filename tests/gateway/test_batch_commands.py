"""Batches for those who run the gateway: `tierline batches`, the cost report by batch, the admin API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
from typer.testing import CliRunner

from bench.mock_upstream import MockUpstream
from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.reports import batch_spent, cost_report
from gateway.ledger.rows import BATCH_TAG, LedgerRow, new_id
from tests.gateway.admin_door import admin
from tests.gateway.batching import begin, document, ended, line, sdk_at
from tests.gateway.front_door import front_door


async def test_the_report_sums_by_batch_on_both_databases(database: Database) -> None:
    def row(cost: int, **tags: str) -> LedgerRow:
        known = {"attempt_id": new_id(), "request_id": new_id(), "attempt": 1, "ts_ms": 5, "key_id": "k"}
        return msgspec.convert({**known, "cost_nanousd": cost, "tags": tags}, LedgerRow)

    mine = {BATCH_TAG: "batch_1"}
    await database.insert_rows(
        [row(1), row(2, other="x"), row(3, **mine), row(4, **mine), row(5, **{BATCH_TAG: "batch_2"})]
    )
    report = await cost_report(database, ["batch"])
    assert {one["batch"]: one["cost_nanousd"] for one in report.rows} == {"": 3, "batch_1": 7, "batch_2": 5}
    assert report.total["cost_nanousd"] == 15
    assert await batch_spent(database, "batch_1", "k", 0) == (7, 2)


async def test_commands_and_admin_api(tmp_path: Path, upstream: MockUpstream) -> None:
    def command(*words: str) -> tuple[int, str]:
        name = words[0]
        result = CliRunner().invoke(build(name), [*words, "--config", str(tmp_path / "tierline.yaml")])
        return result.exit_code, result.output

    async def run(*words: str) -> tuple[int, str]:
        return await asyncio.to_thread(command, *words)

    async with front_door(tmp_path, document(upstream)) as door, sdk_at(door) as sdk:
        done = await ended(sdk, await begin(sdk, [line("a"), line("b", "nobody")]))
        running = await begin(sdk, [line("a", "hanging")])
        rows = await door.rows()
        code, said = await run("batches", "list", "--json")
        assert (code, [one["id"] for one in json.loads(said)]) == (0, [running.id, done.id])
        code, said = await run("batches", "list", "--status", "completed")
        assert (code, done.id in said, running.id in said) == (0, True, False)
        code, said = await run("batches", "show", done.id)
        assert code == 0
        assert "1 completed and 1 failed" in said
        code, said = await run("batches", "show", done.id, "--json")
        spent = sum(row["cost_nanousd"] for row in rows if done.id in row["tags"])
        assert json.loads(said)["cost_nanousd"] == spent > 0
        assert (await run("batches", "list", "--status", "late"))[0] == 2
        assert (await run("batches", "show", "batch_none"))[0] == 1
        assert (await run("batches", "cancel", done.id))[0] == 1
        someone = await admin(door)
        page = await door.client.get("/admin/v1/batches", headers={"authorization": f"Bearer {someone.token}"})
        assert [one["id"] for one in page.json()["data"]] == [running.id, done.id]
        one = await door.client.get(
            f"/admin/v1/batches/{done.id}", headers={"authorization": f"Bearer {someone.token}"}
        )
        assert (one.json()["batch"]["completed"], one.json()["attempts"]) == (1, 1)
        assert (await run("batches", "cancel", running.id))[0] == 0
        assert (await ended(sdk, running)).status == "cancelled"
