"""`tierline keys`: what the commands make, say and refuse."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.access.keys import (
    KeyStore,
)
from gateway.access.secret import is_token, load_secret
from gateway.cli.main import build
from gateway.ledger.database import Database


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierline.yaml"
    path.write_text(
        "version: 1\nstorage: {data_dir: var}\nmodels: {small-one: {tier: small, backend: b}}\n"
        'backends: {b: {base_urls: ["http://127.0.0.1:1/v1"]}}\n'
    )
    return path


def test_two_processes_make_keys_while_a_store_reads(config: Path) -> None:
    command = "from gateway.cli import main; main()"
    program = [sys.executable, "-c", command, "keys", "create", "--json", "--config", str(config)]

    async def watch() -> list[str]:
        database = await Database.open(f"sqlite:///{config.parent}/var/tierline.db")
        store = KeyStore(database, load_secret(config.parent / "var" / "secret"))
        await store.start()
        started = [
            await asyncio.create_subprocess_exec(*program, "--team", f"t{n % 2}", stdout=subprocess.PIPE)
            for n in range(2)
        ]
        made = []
        for process in started:
            output, _ = await process.communicate()
            assert process.returncode == 0
            created = json.loads(output)
            who = await store.authenticate_fresh(created["key"])
            assert who.key_id == created["key_id"]
            made.append(who.team_id)
        await store.stop()
        await database.close()
        return made

    assert len(set(asyncio.run(watch()))) == 2


def test_the_commands(config: Path) -> None:
    runner = CliRunner()
    app = build("keys")

    def run(*words: str, code: int = 0) -> str:
        result = runner.invoke(app, ["keys", *words, "--config", str(config)])
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.output

    options = "--team support --name bot --rpm 5 --tpm 1000 --parallel 3 --budget-usd 12.50 --expires 30d --model auto"
    shown = run("create", *options.split())
    token = shown.split()[0]
    assert is_token(token)
    listed = json.loads(run("list", "--json"))
    assert len(listed) == 1
    known = listed[0]
    assert (known["requests_per_minute"], known["tokens_per_minute"], known["parallel"]) == (5, 1000, 3)
    assert known["budget_nanousd"] == 12_500_000_000
    assert known["allowed_models"] == ["auto"]
    assert token not in json.dumps(listed)
    table = run("list")
    for shown in (known["key_id"], known["prefix"] + "…", "bot", "support", "12.50", "active", known["created"][:10]):
        assert shown in table
    assert json.loads(run("revoke", "bot", "--json"))["state"] == "revoked"
    assert json.loads(run("list", "--json")) == []
    assert len(json.loads(run("list", "--all", "--json"))) == 1
    assert "no key has" in run("revoke", "bot", code=2)
    assert "nano-dollar" in run("create", "--budget-usd", "0.00000000001", code=2)
    assert "neither a date" in run("create", "--expires", "soon", code=2)
    assert "no name for a team" in run("create", "--team", "a/b", code=2)
    run("create", "--rpm", "0", code=2)
    refused = run("create", "--model", "small-one", "--model", "smal-one", code=2)
    assert "there is no model 'smal-one'. Did you mean 'small-one'? The models are: auto, small-one." in refused
    assert len(json.loads(run("list", "--all", "--json"))) == 1, "what was refused made no key"


@pytest.mark.parametrize(
    ("text", "from_now"),
    [("5m", timedelta(minutes=5)), ("90s", timedelta(seconds=90)), ("30d", timedelta(days=30)), ("2w", timedelta(14))],
)
def test_a_key_ends_after_a_time_from_now(config: Path, text: str, from_now: timedelta) -> None:
    before = datetime.now(UTC)
    words = ["keys", "create", "--expires", text, "--json", "--config", str(config)]
    made = json.loads(CliRunner().invoke(build("keys"), words).stdout)
    ends = datetime.fromisoformat(made["expires"])
    assert before - timedelta(milliseconds=1) <= ends - from_now <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("text", "day"), [("2099-01-31", "2099-01-31"), ("20990131", "2099-01-31"), ("2099-01-31T12:00", "2099-01-31")]
)
def test_a_key_ends_at_a_moment(config: Path, text: str, day: str) -> None:
    words = ["keys", "create", "--expires", text, "--json", "--config", str(config)]
    assert json.loads(CliRunner().invoke(build("keys"), words).stdout)["expires"].startswith(day)


@pytest.mark.parametrize("text", ["5y", "0d", "-5m", "99999999999w", "2020-01-01"])
def test_a_key_that_cannot_end_then_is_refused(config: Path, text: str) -> None:
    refused = CliRunner().invoke(build("keys"), ["keys", "create", "--expires", text, "--config", str(config)])
    assert refused.exit_code == 2
    assert isinstance(refused.exception, SystemExit)
