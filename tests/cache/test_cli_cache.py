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
from gateway.access.keys import check_token, create_key
from gateway.access.secret import ServerSecret
from gateway.cli.cache import app
from gateway.ledger.database import Database

runner = CliRunner()


@pytest.fixture
def config(tmp_path: Path, cache_socket: Path) -> Path:
    """A configuration whose cache socket is the running process's."""
    run = tmp_path / "var" / "run"
    run.mkdir(parents=True)
    (run / "cache.sock").symlink_to(cache_socket)
    path = tmp_path / "tierline.yaml"
    models = "{smollm2-135m: {tier: small, backend: b}, other: {tier: large, backend: b}}"
    backends = '{b: {base_urls: ["http://127.0.0.1:1/v1"]}}'
    path.write_text(f"version: 1\nstorage: {{data_dir: var}}\nmodels: {models}\nbackends: {backends}\n")
    return path


def keep(socket: Path, key: CacheKey, entry: Entry) -> None:
    async def run() -> None:
        async with CacheClient(socket, timeout_ms=20_000) as client:
            assert await client.wait_ready(60)
            assert await client.store(key, entry, "exact") is None

    asyncio.run(run())


def kept(socket: Path, keys: dict[str, CacheKey]) -> set[str]:
    """Whose answers are still there."""

    async def run() -> set[str]:
        async with CacheClient(socket, timeout_ms=20_000) as client:
            assert await client.wait_ready(60)
            return {name for name, key in keys.items() if (await client.lookup(key, "exact", 1.0)).entry is not None}

    return asyncio.run(run())


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


@pytest.fixture
def owners(config: Path) -> dict[str, str]:
    """Scopes of two keys, their teams and their organisation, by name."""

    async def make() -> dict[str, str]:
        database = await Database.open(f"sqlite:///{config.parent}/var/tierline.db")
        secret, made = ServerSecret(b"0" * 32), {}
        for team, name in (("support", "bot"), ("search", "ranker")):
            token = (await create_key(database, secret, organisation="acme", team=team, name=name)).token
            who = await check_token(database, secret, token)
            made |= {
                "acme": f"organisation:{who.organisation_id}",
                team: f"team:{who.team_id}",
                name: f"key:{who.key_id}",
            }
        await create_key(database, secret, organisation="globex", team="search")
        await database.close()
        return made

    return asyncio.run(make())


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["--scope", "key:bot"], {"bot"}),
        (["--scope", "team:support"], {"support", "bot"}),
        (["--scope", "team:acme/search"], {"search", "ranker"}),
        (["--scope", "organisation:acme"], {"acme", "support", "search", "bot", "ranker"}),
        (["--scope", "organisation:acme", "--model", "smollm2-135m"], {"acme", "support", "search", "bot", "ranker"}),
        (["--scope", "organisation:acme", "--model", "other"], set()),
        (["--scope", "team:support", "--older-than", "1h"], set()),
    ],
)
def test_a_purge_takes_whoever_is_meant_by_name(
    config: Path,
    cache_socket: Path,
    owners: dict[str, str],
    make_key: Callable[..., CacheKey],
    make_entry: Callable[..., Entry],
    words: list[str],
    gone: set[str],
) -> None:
    keys = {name: make_key(name, scope=scope) for name, scope in owners.items()}
    for name, key in keys.items():
        keep(cache_socket, key, make_entry(name))
    found = runner.invoke(app, ["purge", *words, "--config", str(config), "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["removed"] == len(gone)
    assert kept(cache_socket, keys) == set(owners) - gone


def test_a_purge_says_what_it_did(
    config: Path,
    cache_socket: Path,
    owners: dict[str, str],
    make_key: Callable[..., CacheKey],
    make_entry: Callable[..., Entry],
) -> None:
    keep(cache_socket, make_key("a", scope=owners["support"]), make_entry("a"))
    words = ["--scope", "team:support", "--model", "smollm2-135m", "--config", str(config)]
    first, again = runner.invoke(app, ["purge", *words]), runner.invoke(app, ["purge", *words])
    assert first.stdout == "forgotten: 1 answer of team:support by smollm2-135m\n"
    assert again.stdout == "forgotten: 0 answers of team:support by smollm2-135m\n"
    by_id = runner.invoke(app, ["purge", "--scope", owners["support"], "--config", str(config)])
    assert by_id.exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--scope", "team:suport"], "there is no team 'suport'. Did you mean 'support'?"),
        (["--scope", "organisation:nobody-like-this"], "Known are: acme, globex."),
        (["--scope", "team:search"], "could be any of team:"),
        (["--scope", "support"], "write organisation:NAME, team:NAME or key:NAME"),
        (["--scope", "project:default"], "write organisation:NAME, team:NAME or key:NAME"),
        (["--scope", "team:"], "names nobody"),
        (["--model", "smolm2-135m"], "there is no model 'smolm2-135m'. Did you mean 'smollm2-135m'?"),
    ],
)
def test_a_purge_of_nobody_is_refused(config: Path, owners: dict[str, str], words: list[str], message: str) -> None:
    refused = runner.invoke(app, ["purge", *words, "--config", str(config)])
    assert refused.exit_code == 2
    assert message in refused.stderr


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
