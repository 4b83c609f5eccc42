"""`tierline policy explain --learnt`: where `tier: auto` sends a request by what was learnt from others."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.outcomes import store
from gateway.outcomes.store import DAY_MS
from tests.gateway.test_outcomes_store import outcome
from tiers.success import default_table

SETTINGS = """\
version: 1
storage: {data_dir: var}
policies_dir: policies
backends: {up: {base_urls: ["http://127.0.0.1:1/v1"]}}
models:
  little: {tier: small, backend: up}
  big: {tier: large, backend: up}
"""
POLICY = "version: 1\nname: p\nowner: tests\nroutes: [{tier: auto}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder whose database has many successes of the small tier, of two teams, for every kind of request."""
    (tmp_path / "tierline.yaml").write_text(SETTINGS)
    (tmp_path / "policies").mkdir()
    (tmp_path / "policies" / "p.yaml").write_text(POLICY)
    (tmp_path / "request.json").write_text(
        '{"messages": [{"role": "user", "content": "Good or bad? The pizza was cold."}]}'
    )

    async def fill() -> None:
        database = await Database.open(f"sqlite:///{tmp_path}/var/tierline.db")
        for kind in default_table().cells:
            for team in ("a", "b"):
                await store.add(
                    database, [outcome(True, kinds={kind: 1.0}, policy="p", team=team)] * 40, now_ms() // DAY_MS
                )
        await database.close()

    asyncio.run(fill())
    return tmp_path


def explained(folder: Path, *words: str, text: bool = False) -> Any:
    at = ["--file", str(folder / "request.json"), "--config", str(folder / "tierline.yaml")]
    found = CliRunner().invoke(build("policy"), ["policy", "explain", *at, *words, *([] if text else ["--json"])])
    assert found.exit_code == 0, found.output
    return found.stdout if text else json.loads(found.stdout)["decision"]


def test_what_was_learnt_counts_where_it_is_asked_for(folder: Path) -> None:
    shipped, learnt = explained(folder), explained(folder, "--learnt")
    for told in ("p_success", "p_success_lower"):
        assert learnt[told]["small"] > shipped[told]["small"]
    assert "table    as shipped" in explained(folder, text=True)
    assert "table    as learnt until now" in explained(folder, "--learnt", text=True)


def test_a_policy_that_does_not_learn_goes_by_the_shipped_table(folder: Path) -> None:
    (folder / "policies" / "p.yaml").write_text(POLICY + 'learn: "off"\n')
    assert explained(folder, "--learnt") == explained(folder)
