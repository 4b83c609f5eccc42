"""Organisations, teams and projects: made, found, limited, and how gateways learn of it. On SQLite and PostgreSQL."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from gateway.access.audit import Actor, audit_rows
from gateway.access.ceilings import ChangedMeanwhile, InvalidCeiling, LimitChange
from gateway.access.counting import month_of
from gateway.access.keys import KeyStore, ServerSecret, create_key, revoke_key
from gateway.access.levels import (
    InvalidLevel,
    LevelExists,
    change_level,
    create_level,
    find_level,
    level_usage,
    list_levels,
)
from gateway.access.limits import Scope
from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.rows import LedgerRow, new_id

SECRET = ServerSecret(os.urandom(32))


async def test_they_come_into_being_with_a_key_or_by_themselves(database: Database) -> None:
    await create_key(database, SECRET, organisation="acme", team="support", project="bot", name="one")
    await create_key(database, SECRET, organisation="acme", team="support", project="bot", name="two")
    await revoke_key(database, "two")
    made = await create_level(database, "project:beta/research/papers", LimitChange(parallel=3))
    assert (made.path, made.parallel, made.keys, made.budget_nanousd) == ("beta/research/papers", 3, 0, None)
    known = [(info.kind, info.path, info.keys) for info in await list_levels(database)]
    assert known == [
        ("organisation", "acme", 1),
        ("team", "acme/support", 1),
        ("project", "acme/support/bot", 1),
        ("organisation", "beta", 0),
        ("team", "beta/research", 0),
        ("project", "beta/research/papers", 0),
    ]
    assert [info.path for info in await list_levels(database, "team")] == ["acme/support", "beta/research"]
    await create_key(database, SECRET, organisation="beta", team="research", project="papers")
    assert (await find_level(database, f"project:{made.id}")).keys == 1, "a key finds what was made before it"


async def test_they_are_found_by_name_path_and_id(database: Database) -> None:
    for organisation in ("acme", "beta"):
        await create_level(database, f"team:{organisation}/support")
    acme = await find_level(database, "team:acme/support")
    assert (await find_level(database, f"team:{acme.id}")) == acme
    assert acme.scope == f"team:{acme.id}"
    assert (await find_level(database, "organisation:beta")).name == "beta"
    with pytest.raises(InvalidLevel, match=r"could be any of team:acme/support, team:beta/support"):
        await find_level(database, "team:support")
    with pytest.raises(InvalidLevel, match=r"there is no team 'x'\. Known are: acme/support, beta/support"):
        await find_level(database, "team:x")
    for nonsense in ("support", "squad:support", "team:"):
        with pytest.raises(InvalidLevel, match="write organisation:NAME, team:NAME or project:NAME"):
            await find_level(database, nonsense)


async def test_what_cannot_be_made(database: Database) -> None:
    await create_level(database, "team:acme/support")
    with pytest.raises(LevelExists, match="the team 'acme/support' exists"):
        await create_level(database, "team:acme/support")
    with pytest.raises(InvalidLevel, match="write team:ORGANISATION/TEAM"):
        await create_level(database, "team:support")
    with pytest.raises(InvalidLevel, match="is no name for a team"):
        await create_level(database, "project:beta/-x/y")
    with pytest.raises(InvalidCeiling, match="'tokens_per_minute' must be between 1 and"):
        await create_level(database, "organisation:gamma", LimitChange(tokens_per_minute=0))
    assert [info.path for info in await list_levels(database, "organisation")] == ["acme"], "all of it or nothing"


async def test_a_change_says_only_what_it_changes(database: Database) -> None:
    await create_level(database, "team:acme/support", LimitChange(requests_per_minute=5, parallel=2))
    changed = await change_level(database, "team:support", LimitChange(budget_nanousd=7, parallel=None))
    assert (changed.requests_per_minute, changed.parallel, changed.budget_nanousd) == (5, None, 7)
    same = await change_level(database, "team:support", LimitChange())
    assert same == changed
    stale = await find_level(database, "organisation:acme")
    await change_level(database, "organisation:acme", LimitChange(parallel=9))
    with pytest.raises(ChangedMeanwhile):
        await change_level(database, "organisation:acme", LimitChange(parallel=8), expected=stale)
    with pytest.raises(InvalidCeiling, match="'budget_usd' must be between 0 and"):
        await change_level(database, "team:support", LimitChange(budget_nanousd=-1))


async def test_each_change_is_on_record(database: Database) -> None:
    who = Actor("admin:1", "req-1", "10.0.0.1")
    made = await create_level(database, "team:acme/support", LimitChange(parallel=2), actor=who)
    await change_level(database, "team:support", LimitChange(parallel=3, budget_nanousd=None), actor=who)
    last, *earlier = await audit_rows(database)
    assert (last.action, last.object, last.actor) == ("team.change", made.scope, "admin:1")
    assert (last.before, last.after) == ({"parallel": 2}, {"parallel": 3}), "what stays as it was is left out"
    assert last.organisation_id == made.organisation_id
    assert [row.action for row in earlier] == ["team.create", "organisation.create"]


async def test_a_gateway_counts_a_key_against_the_limits_above_it(database: Database) -> None:
    token = (await create_key(database, SECRET, organisation="acme", team="support", project="bot")).token
    store = KeyStore(database, SECRET)
    await store.refresh()
    bare = store.authenticate(token)
    project, team, organisation = (
        f"project:{bare.project_id}",
        f"team:{bare.team_id}",
        f"organisation:{bare.organisation_id}",
    )
    assert [scope.id for scope in bare.scopes] == [f"key:{bare.key_id}"]
    assert bare.unlimited == (project, team, organisation)

    await change_level(database, "team:support", LimitChange(budget_nanousd=5, tokens_per_minute=9))
    await change_level(database, "organisation:acme", LimitChange(parallel=4))
    await store.refresh()
    limited = store.authenticate(token)
    assert limited.scopes[1:] == (
        Scope(team, None, 9, None, 5, "The team 'support'"),
        Scope(organisation, None, None, 4, None, "The organisation 'acme'"),
    )
    assert limited.unlimited == (project,)

    await change_level(database, "team:support", LimitChange(budget_nanousd=None, tokens_per_minute=None))
    await store.refresh()
    assert store.authenticate(token).unlimited == (project, team)


async def test_usage_is_the_ledgers(database: Database) -> None:
    made = [
        await create_key(database, SECRET, organisation="acme", team=team, project=project)
        for team, project in (("support", "bot"), ("support", "mail"), ("research", "papers"))
    ]
    levels = {info.path: info for info in await list_levels(database)}
    now = int(time.time() * 1000)
    rows = []
    for key, cost in zip(made, (5, 70, 900), strict=True):
        path = f"acme/{key.info.team}/{key.info.project}"
        owners = {"project_id": levels[path].id, "team_id": levels[path.rpartition("/")[0]].id}
        used = {"input_tokens": 10, "output_tokens": 3, "cost_nanousd": cost, "organisation_id": levels["acme"].id}
        ids = {"request_id": f"req-{key.info.key_id}", "key_id": key.info.key_id, "ts_ms": now}
        for attempt in (1, 2):  # two attempts of one request
            fields = {"attempt_id": new_id(), "attempt": attempt, **ids, **owners, **used}
            rows.append(msgspec.convert(fields, LedgerRow))
    await database.insert_rows(rows)
    await change_level(database, "team:support", LimitChange(budget_nanousd=300))
    found = {usage.level.path: usage for usage in await level_usage(database)}
    spent = {path: (usage.used.requests, usage.used.cost_nanousd) for path, usage in found.items()}
    assert spent == {
        "acme": (3, 1950), "acme/support": (2, 150), "acme/support/bot": (1, 10), "acme/support/mail": (1, 140),
        "acme/research": (1, 1800), "acme/research/papers": (1, 1800),
    }  # fmt: skip
    assert found["acme/support"].budget_used == 0.5
    assert found["acme"].budget_used is None
    assert (found["acme"].used.input_tokens, found["acme"].used.output_tokens) == (60, 18)
    (one,) = await level_usage(database, reference="project:mail")
    assert one == found["acme/support/mail"]
    (before,) = await level_usage(database, reference="organisation:acme", month=month_of(time.time())[0] - 1)
    assert before.used.requests == 0
    assert before.month < found["acme"].month


# --- the command ---


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierline.yaml"
    path.write_text("version: 1\nstorage: {data_dir: var}\n")
    return path


def run(config: Path, *words: str, code: int = 0) -> str:
    result = CliRunner().invoke(build(words[0]), [*words, "--config", str(config)], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.output


def test_the_commands(config: Path) -> None:
    made = run(config, "owners", "create", "team:acme/support", "--rpm", "600", "--budget-usd", "12.50")
    assert made == "made team acme/support: rpm 600, tpm -, parallel -, budget $ 12.50\n"
    done = run(config, "owners", "set", "team:support", "--rpm", "none", "--tpm", "9000", "--parallel", "4")
    assert done == "set team acme/support: rpm -, tpm 9000, parallel 4, budget $ 12.50\n"
    known = {info["path"]: info for info in json.loads(run(config, "owners", "list", "--json"))}
    assert {path: info["budget_nanousd"] for path, info in known.items()} == {
        "acme": None,
        "acme/support": 12_500_000_000,
    }
    assert "acme/support" in run(config, "owners", "list", "--kind", "team")
    assert "acme/support" not in run(config, "owners", "list", "--kind", "organisation")
    (used,) = json.loads(run(config, "owners", "usage", "team:support", "--json"))
    assert (used["cost_nanousd"], used["budget_used"], used["owner"]["path"]) == (0, 0.0, "acme/support")
    assert "2026-10" in run(config, "owners", "usage", "--month", "2026-10")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["set", "team:nobody", "--rpm", "5"], "there is no team 'nobody'"),
        (["set", "organisation:acme", "--rpm", "many"], "--rpm: 'many' is neither a whole number nor 'none'"),
        (["set", "organisation:acme", "--tpm", "0"], "'tokens_per_minute' must be between 1 and"),
        (["set", "organisation:acme", "--budget-usd", "much"], "--budget-usd:"),
        (["create", "organisation:acme"], "the organisation 'acme' exists"),
        (["usage", "--month", "October"], "--month: 'October' is no month: write it as in 2026-10"),
    ],
)
def test_what_the_command_refuses(config: Path, words: list[str], said: str) -> None:
    run(config, "owners", "create", "organisation:acme")
    assert said in run(config, "owners", *words, code=2)


def test_a_keys_terms_are_changed_by_command(config: Path) -> None:
    run(
        config,
        "keys",
        "create",
        "--name",
        "ci",
        "--rpm",
        "5",
        "--tier",
        "small",
        "--route",
        "chat",
        "--route",
        "messages",
    )
    run(
        config,
        "keys",
        "set",
        "ci",
        "--name",
        "bot",
        "--rpm",
        "none",
        "--parallel",
        "3",
        "--route",
        "none",
        "--expires",
        "30d",
    )
    (info,) = json.loads(run(config, "keys", "list", "--json"))
    assert (info["name"], info["requests_per_minute"], info["parallel"]) == ("bot", None, 3)
    assert (info["allowed_tiers"], info["allowed_routes"], info["allowed_models"]) == (["small"], None, None)
    assert info["expires"] is not None
    run(config, "keys", "set", "bot", "--expires", "none")
    assert json.loads(run(config, "keys", "list", "--json"))[0]["expires"] is None
    assert "'allowed_tiers' does not know 'tiny'" in run(config, "keys", "set", "bot", "--tier", "tiny", code=2)
    assert "there is no model 'x'" in run(config, "keys", "set", "bot", "--model", "x", code=2)
