"""The audit log: in the transaction of the change, only ever longer, without secrets, whoever makes the change."""

from __future__ import annotations

import asyncio
import getpass
import json
from contextlib import suppress
from pathlib import Path

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from typer.testing import CliRunner

from gateway.access.admin_keys import (
    InvalidAdminKeyRequest,
    authenticate_admin,
    create_admin_key,
    ensure_first_admin_key,
    find_admin_key,
    list_admin_keys,
    revoke_admin_key,
    rotate_admin_key,
)
from gateway.access.audit import Actor, audit_rows, record, record_change
from gateway.access.keys import create_key, revoke_key, rotate_key
from gateway.access.levels import create_level
from gateway.access.principal import InvalidKey
from gateway.access.secret import ServerSecret
from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms

SECRET = ServerSecret(b"0" * 32)
ACTOR = Actor("admin:1", "req-1", "10.0.0.1")


async def test_every_change_has_a_row_that_says_who(database: Database) -> None:
    made = await create_key(database, SECRET, organisation="acme", name="ci", actor=ACTOR)
    await rotate_key(database, SECRET, "ci", 1000, actor=ACTOR)
    await revoke_key(database, "ci")
    rows = await audit_rows(database)
    actions = ["key.revoke", "key.rotate", "key.create", "project.create", "team.create", "organisation.create"]
    assert [row.action for row in rows] == actions
    assert [row.actor for row in rows] == [f"cli:{getpass.getuser()}", *["admin:1"] * 5]
    assert {(row.request_id, row.address) for row in rows[1:]} == {("req-1", "10.0.0.1")}
    assert {row.organisation_id for row in rows} == {made.info.organisation_id}
    created = rows[2]
    assert (created.object, created.before) == (f"key:{made.info.key_id}", None)
    assert created.after is not None
    assert created.after["prefix"] == made.info.prefix
    dump = str(rows)
    assert made.token[3:] not in dump
    assert SECRET.digest(made.token) not in dump


@pytest.mark.parametrize("statement", ["UPDATE audit SET actor = 'nobody'", "DELETE FROM audit"])
async def test_no_row_can_be_changed(database: Database, statement: str) -> None:
    await create_level(database, "organisation:acme", actor=ACTOR)
    with pytest.raises(DBAPIError, match="append-only"):
        async with database.write() as connection:
            await connection.execute(text(statement))
    if database.dialect == "postgresql":
        with pytest.raises(DBAPIError, match="append-only"):
            async with database.write() as connection:
                await connection.execute(text("TRUNCATE audit"))
    (row,) = await audit_rows(database)
    assert row.actor == "admin:1"


async def test_a_change_that_fails_leaves_no_row_and_a_row_that_fails_no_change(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    with suppress(RuntimeError):
        async with database.write() as connection:
            await record(connection, ACTOR, "key.create", "key:1")
            raise RuntimeError
    assert await audit_rows(database) == []
    await create_key(database, SECRET, name="ci")
    before = await audit_rows(database)

    async def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("gateway.access.key_info.record", full)
    with pytest.raises(OSError, match="no space"):
        await revoke_key(database, "ci")
    assert (await audit_rows(database)) == before
    monkeypatch.undo()
    assert (await revoke_key(database, "ci")).revoked_ms is not None
    assert len(await audit_rows(database)) == len(before) + 1


async def test_only_what_differs_is_recorded(database: Database) -> None:
    async with database.write() as connection:
        old, new = {"a": 1, "b": None, "c": [1]}, {"a": 2, "b": None, "c": [1], "d": 0}
        assert await record_change(connection, ACTOR, "x.change", "x:1", before=old, after=new)
        assert not await record_change(connection, ACTOR, "x.change", "x:1", before=old, after={"c": [1]})
    (row,) = await audit_rows(database)
    assert (row.before, row.after) == ({"a": 1, "d": None}, {"a": 2, "d": 0})


async def test_the_log_is_read_in_parts_and_by_filter(database: Database) -> None:
    async with database.write() as connection:
        for number in range(5):
            await record(connection, ACTOR, f"x.{number % 2}", f"x:{number}", organisation_id=str(number % 2))
    rows = await audit_rows(database)
    assert [row.object for row in rows] == [f"x:{number}" for number in (4, 3, 2, 1, 0)]
    assert await audit_rows(database, limit=2) == rows[:2]
    assert await audit_rows(database, limit=2, before_id=rows[1].id) == rows[2:4]
    assert [row.object for row in await audit_rows(database, organisation_id="1")] == ["x:3", "x:1"]
    assert [row.object for row in await audit_rows(database, action="x.0", object="x:2")] == ["x:2"]
    assert await audit_rows(database, actor="somebody") == []


# --- admin keys ---


async def test_an_admin_key_is_found_by_its_secret_alone(database: Database) -> None:
    await create_key(database, SECRET, organisation="acme")
    made = await create_admin_key(database, SECRET, name="ops", role="write", organisation="acme")
    caller = await authenticate_admin(database, SECRET, made.token)
    assert (caller.key_id, caller.role, caller.organisation_id) == (
        made.info.key_id, "write", made.info.organisation_id,
    )  # fmt: skip
    assert made.info.organisation == "acme"
    assert made.token.startswith("tla-")
    assert made.info.prefix == made.token[:10]
    assert made.token not in f"{made!r} {made.info} {caller} {await list_admin_keys(database)}"
    async with database.read() as connection:
        dump = str((await connection.execute(text("SELECT * FROM admin_secrets"))).all())
    assert made.token[4:] not in dump
    model_key = await create_key(database, SECRET)
    for token in ("", "tla-", made.token[:-1], "tla-" + "0" * 43, model_key.token, made.token.replace("tla-", "tl-")):
        with pytest.raises(InvalidKey):
            await authenticate_admin(database, SECRET, token)
    with pytest.raises(InvalidKey):
        await authenticate_admin(database, ServerSecret(b"1" * 32), made.token)


async def test_two_rotations_at_once_leave_one_present_secret(database: Database) -> None:
    made = await create_admin_key(database, SECRET, name="ops")
    tokens = [one.token for one in await asyncio.gather(*(
        rotate_admin_key(database, SECRET, "ops", 60_000) for _ in range(4)
    ))]  # fmt: skip
    info = await find_admin_key(database, made.info.key_id)
    assert len(info.replaced) == 4
    assert all(one.valid_until_ms for one in info.replaced)
    for token in (made.token, *tokens):
        assert (await authenticate_admin(database, SECRET, token)).key_id == made.info.key_id
    assert await find_admin_key(database, f"{info.prefix}…") == info


async def test_admin_keys_that_make_no_sense(database: Database) -> None:
    made = await create_admin_key(database, SECRET, name="ops")
    await create_admin_key(database, SECRET, name="twice")
    await create_admin_key(database, SECRET, name="twice")
    for options in ({"name": ""}, {"name": "a/b"}, {"name": "x", "role": "owner"}, {"name": "x", "organisation": "no"}):
        with pytest.raises(InvalidAdminKeyRequest):
            await create_admin_key(database, SECRET, **options)  # type: ignore[arg-type]
    with pytest.raises(InvalidAdminKeyRequest, match="expired already"):
        await create_admin_key(database, SECRET, name="x", expires_ms=now_ms())
    for reference in ("nobody", "twice"):
        with pytest.raises(InvalidAdminKeyRequest):
            await find_admin_key(database, reference)
    revoked = await revoke_admin_key(database, made.info.key_id)
    assert revoked == await revoke_admin_key(database, made.info.key_id)
    with pytest.raises(InvalidAdminKeyRequest, match="revoked"):
        await rotate_admin_key(database, SECRET, made.info.key_id, 0)


async def test_the_first_admin_key_is_made_once(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "admin-key"
    made = await asyncio.gather(*(ensure_first_admin_key(database, path, SECRET) for _ in range(4)))
    assert len([one for one in made if one is not None]) == 1
    assert path.stat().st_mode & 0o777 == 0o600
    caller = await authenticate_admin(database, SECRET, path.read_text().strip())
    assert (caller.role, caller.organisation_id) == ("write", None)
    path.unlink()
    assert await ensure_first_admin_key(database, path, SECRET) is None
    assert not path.exists()


# --- the commands ---


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "tierline.yaml"
    path.write_text("version: 1\nstorage: {data_dir: var}\n")
    return path


def tierline(config: Path, *words: str, code: int = 0) -> str:
    done = CliRunner().invoke(build(words[0]), [*words, "--config", str(config)])
    assert done.exit_code == code, done.output
    return done.stdout if code == 0 else done.stderr


def test_admin_keys_by_command(config: Path) -> None:
    tierline(config, "keys", "create", "--organisation", "acme")
    token = tierline(config, "admin", "keys", "create", "--name", "ops", "--role", "write").strip()
    bound = ("admin", "keys", "create", "--name", "books", "--organisation", "acme", "--expires", "30d", "--json")
    books = json.loads(tierline(config, *bound))
    assert (books["role"], books["organisation"], books["state"]) == ("read", "acme", "active")
    listed = tierline(config, "admin", "keys", "list")
    assert token[:10] in listed
    assert token not in listed
    new = tierline(config, "admin", "keys", "rotate", "ops", "--overlap", "1h").strip()
    assert f"active, and {token[:10]}… until" in tierline(config, "admin", "keys", "list")
    assert tierline(config, "admin", "keys", "revoke", "ops") == f"revoked {new[:10]}… ('ops')\n"
    names = [key["name"] for key in json.loads(tierline(config, "admin", "keys", "list", "--json"))]
    assert names == ["books"]
    assert len(json.loads(tierline(config, "admin", "keys", "list", "--all", "--json"))) == 2
    assert "no organisation 'nope'" in tierline(
        config, "admin", "keys", "create", "--name", "x", "--organisation", "nope", code=2
    )
    assert "no admin key" in tierline(config, "admin", "keys", "revoke", "nobody", code=2)


def test_what_commands_change_is_in_the_log(config: Path) -> None:
    tierline(config, "keys", "create", "--name", "ci", "--parallel", "2")
    tierline(config, "keys", "rotate", "ci")
    tierline(config, "keys", "revoke", "ci")
    tierline(config, "admin", "keys", "create", "--name", "ops")
    me = f"cli:{getpass.getuser()}"
    log = json.loads(tierline(config, "admin", "audit", "--json"))
    assert [row["action"] for row in log[:4]] == ["admin_key.create", "key.revoke", "key.rotate", "key.create"]
    assert {row["actor"] for row in log} == {me}
    assert log[3]["after"]["parallel"] == 2
    table = tierline(config, "admin", "audit", "--action", "key.create")
    assert "parallel 2" in table
    assert "key.rotate" not in table
    assert len(json.loads(tierline(config, "admin", "audit", "--limit", "2", "--json"))) == 2
