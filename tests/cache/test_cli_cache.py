"""`tierline cache stats|purge|evaluate` against the real process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cache.client import CacheClient
from cache.entry import Entry
from cache.key import CacheKey
from gateway.cli.cache import app

runner = CliRunner()


@pytest.fixture
def config(tmp_path: Path, cache_socket: Path) -> Path:
    """A configuration whose cache socket is the running process's."""
    run = tmp_path / "var" / "run"
    run.mkdir(parents=True)
    (run / "cache.sock").symlink_to(cache_socket)
    path = tmp_path / "tierline.yaml"
    path.write_text("version: 1\nstorage: {data_dir: var}\n")
    return path


def keep(socket: Path, key: CacheKey, entry: Entry) -> None:
    async def run() -> None:
        async with CacheClient(socket, timeout_ms=20_000) as client:
            assert await client.wait_ready(60)
            assert await client.store(key, entry, "exact") is None

    asyncio.run(run())


def test_stats(config: Path) -> None:
    found = runner.invoke(app, ["stats", "--config", str(config), "--json"])
    assert found.exit_code == 0, found.output
    document = json.loads(found.stdout)
    assert document["state"] in ("warming", "ready")
    assert {"entries", "bytes", "hit_rate", "exact_hits", "semantic_hits", "misses", "evictions", "lookup"} <= set(
        document
    )
    table = runner.invoke(app, ["stats", "--config", str(config)])
    assert table.exit_code == 0
    assert "hits: exact / semantic" in table.stdout


def test_purge_by_scope(
    config: Path,
    cache_socket: Path,
    scope: str,
    make_key: Callable[..., CacheKey],
    make_entry: Callable[..., Entry],
) -> None:
    keep(cache_socket, make_key("a"), make_entry("a"))
    keep(cache_socket, make_key("b"), make_entry("b"))
    young = runner.invoke(app, ["purge", "--scope", scope, "--older-than", "1h", "--config", str(config), "--json"])
    assert json.loads(young.stdout) == {"removed": 0}
    found = runner.invoke(app, ["purge", "--scope", scope, "--config", str(config)])
    assert (found.exit_code, found.stdout) == (0, "2 answers forgotten\n")


@pytest.mark.parametrize("arguments", [[], ["--all", "--scope", "x"], ["--older-than", "a while"]])
def test_purge_must_be_told_what(config: Path, arguments: list[str]) -> None:
    assert runner.invoke(app, ["purge", *arguments, "--config", str(config)]).exit_code == 2


def test_without_a_process_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.cli.cache._CONNECT_S", 0.05)
    path = tmp_path / "tierline.yaml"
    path.write_text("version: 1\n")
    found = runner.invoke(app, ["stats", "--config", str(path)])
    assert found.exit_code == 1
    assert "no cache process answers" in found.stderr


def test_evaluate_hands_on_the_exit_code(config: Path, tmp_path: Path) -> None:
    assert runner.invoke(app, ["evaluate", "--config", str(config)]).exit_code == 2
    missing = ["evaluate", "--pairs", str(tmp_path / "none.tsv"), "--config", str(config)]
    assert runner.invoke(app, missing).exit_code == 2
