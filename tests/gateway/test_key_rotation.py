"""Rotating a key: a new secret, the same key. Both secrets work during the overlap, and spend one budget."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from alembic import command
from alembic.config import Config
from sqlalchemy import text
from typer.testing import CliRunner, Result

import gateway.ledger
from bench.mock_upstream import MockUpstream
from gateway.access import keys as access_keys
from gateway.access import keystore
from gateway.access.keys import (
    ExpiredKey,
    InvalidKeyRequest,
    KeyLimits,
    RevokedKey,
    create_key,
    find_key,
    list_keys,
    revoke_key,
    rotate_key,
)
from gateway.access.keystore import KeyStore
from gateway.access.secret import ServerSecret, is_token
from gateway.cli.main import build
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

SECRET = ServerSecret(b"0" * 32)
HOUR_MS = 3_600_000


@pytest.fixture
async def store(database: Database) -> AsyncIterator[KeyStore]:
    opened = KeyStore(database, SECRET)
    await opened.start()
    yield opened
    await opened.stop()


async def test_both_secrets_are_one_key(database: Database, store: KeyStore) -> None:
    limits = KeyLimits(requests_per_minute=5)
    old = await create_key(database, SECRET, name="ci", team="support", limits=limits, budget_nanousd=7)
    new = await rotate_key(database, SECRET, "ci", HOUR_MS)
    assert new.token != old.token
    assert is_token(new.token)
    assert new.info.key_id == old.info.key_id
    assert new.info.prefix == new.token[:9]
    assert [secret.prefix for secret in new.info.replaced] == [old.info.prefix]
    mine, theirs = await store.authenticate_fresh(new.token), await store.authenticate_fresh(old.token)
    assert mine.scope().id == theirs.scope().id
    assert msgspec.structs.replace(theirs, key_prefix=mine.key_prefix, scopes=mine.scopes) == mine
    assert [one.id for one in theirs.scopes] == [one.id for one in mine.scopes]
    assert (mine.budget_nanousd, mine.limits, mine.team_name) == (7, limits, "support")
    # A log line tells which secret is still in use.
    assert (mine.key_prefix, theirs.key_prefix) == (new.info.prefix, old.info.prefix)


async def test_the_old_secret_ends_with_the_overlap(
    database: Database, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = await create_key(database, SECRET, name="ci")
    new = await rotate_key(database, SECRET, "ci", HOUR_MS)
    await store.refresh()
    end = new.info.replaced[0].valid_until_ms
    assert end - new.info.replaced[0].replaced_ms == HOUR_MS
    monkeypatch.setattr(keystore, "now_ms", lambda: end - 1)
    store.authenticate(old.token)
    monkeypatch.setattr(keystore, "now_ms", lambda: end)
    with pytest.raises(ExpiredKey, match=f"{old.info.prefix}… was rotated"):
        store.authenticate(old.token)
    store.authenticate(new.token)


async def test_an_overlap_never_grows(database: Database, store: KeyStore) -> None:
    first = await create_key(database, SECRET, name="ci")
    second = await rotate_key(database, SECRET, "ci", HOUR_MS)
    third = await rotate_key(database, SECRET, "ci", 2 * HOUR_MS)
    kept = {secret.prefix: secret.valid_until_ms - now_ms() for secret in third.info.replaced}
    assert kept[first.info.prefix] <= HOUR_MS < kept[second.info.prefix] <= 2 * HOUR_MS
    await store.refresh()
    for made in (first, second, third):
        store.authenticate(made.token)
    # The last word counts for all: nothing but the new secret.
    fourth = await rotate_key(database, SECRET, "ci", 0)
    await store.refresh()
    store.authenticate(fourth.token)
    for made in (first, second, third):
        with pytest.raises(ExpiredKey):
            store.authenticate(made.token)


async def test_rotations_at_once_leave_every_secret_on_record(database: Database, store: KeyStore) -> None:
    made = await create_key(database, SECRET, name="ci")
    rotated = await asyncio.gather(*(rotate_key(database, SECRET, made.info.key_id, HOUR_MS) for _ in range(4)))
    await store.refresh()
    for one in (made, *rotated):
        assert store.authenticate(one.token).key_id == made.info.key_id
    assert len((await find_key(database, "ci")).replaced) == 4


async def test_revoking_ends_every_secret(database: Database, store: KeyStore) -> None:
    old = await create_key(database, SECRET, name="ci")
    new = await rotate_key(database, SECRET, "ci", HOUR_MS)
    with pytest.raises(InvalidKeyRequest, match=f"former secret of the key 'ci', now {new.info.prefix}"):
        await revoke_key(database, f"{old.info.prefix}…")
    await revoke_key(database, "ci")
    await store.refresh()
    for made in (old, new):
        with pytest.raises(RevokedKey):
            store.authenticate(made.token)


async def test_a_key_that_has_ended_gets_no_secret(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    made = await create_key(database, SECRET, name="ci")
    await revoke_key(database, "ci")
    with pytest.raises(InvalidKeyRequest, match="is revoked, for good"):
        await rotate_key(database, SECRET, made.info.key_id, HOUR_MS)
    brief = await create_key(database, SECRET, name="brief", expires_ms=now_ms() + HOUR_MS)
    monkeypatch.setattr(access_keys, "now_ms", lambda: now_ms() + HOUR_MS)
    with pytest.raises(InvalidKeyRequest, match="has expired"):
        await rotate_key(database, SECRET, "brief", HOUR_MS)
    with pytest.raises(InvalidKeyRequest, match="no key has"):
        await rotate_key(database, SECRET, "nobody", HOUR_MS)
    known = {info.name: info for info in await list_keys(database)}
    assert known["ci"].replaced == known["brief"].replaced == []
    assert known["brief"].prefix == brief.info.prefix


async def test_keys_of_the_version_before_stay_good(database: Database) -> None:
    """Down to the schema before rotation and up again: what was there then is there now."""
    made = await create_key(database, SECRET, name="ci")
    config = Config()
    config.set_main_option("script_location", str(Path(gateway.ledger.__path__[0]) / "migrations"))
    config.set_main_option("path_separator", "os")

    def go_back(connection: object) -> None:
        config.attributes["connection"] = connection
        command.downgrade(config, "0001")

    async with database.write() as connection:
        await connection.run_sync(go_back)
        assert (await connection.execute(text("SELECT version_num FROM alembic_version"))).scalar_one() == "0001"
    await database.migrate()
    assert await find_key(database, "ci") == made.info
    assert (await rotate_key(database, SECRET, "ci", HOUR_MS)).info.replaced[0].prefix == made.info.prefix


# --- through the gateway, by the command ---


@pytest.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    models = {"mock": {"tier": "small", "backend": "up", "max_output_tokens": 100, "price": PRICE}}
    async with front_door(tmp_path, configuration({"up": upstream}, models)) as running:
        yield running


async def tierline(door: FrontDoor, *words: str) -> Result:
    """A command in a thread: it has an event loop of its own, as a process of its own would."""
    arguments = [*words, "--config", str(door.root / "tierline.yaml")]
    return await asyncio.to_thread(CliRunner().invoke, build(words[0]), arguments)


async def test_both_secrets_spend_one_budget(door: FrontDoor) -> None:
    # An answer costs 80,000 nano-dollars and sets a little more aside while it runs: a few fit into the budget.
    old = await door.key(name="ci", budget_nanousd=400_000)
    assert (await door.chat(token=old, max_tokens=34)).status_code == 200
    done = await tierline(door, "keys", "rotate", "ci", "--overlap", "30m")
    assert done.exit_code == 0, done.output
    new = done.stdout.split()[0]
    assert "works until" in done.stderr
    answers = [await door.chat(token=token, max_tokens=34) for token in (new, old) * 3]
    assert answers[0].status_code == 200, answers[0].text
    # What the one secret spent, the other one cannot: both are refused in the end.
    assert {answer.json()["error"]["code"] for answer in answers[-2:]} == {"budget_exhausted"}
    rows = [row for row in await door.rows() if row["outcome"] == "success"]
    (key_id,) = {row["key_id"] for row in rows}
    assert len(rows) == 1 + sum(answer.status_code == 200 for answer in answers)
    assert await door.services.limiter.balance(f"key:{key_id}") == (sum(row["cost_nanousd"] for row in rows), 0)
    report = json.loads((await tierline(door, "cost", "report", "--by", "key", "--json")).stdout)
    assert [row["key"] for row in report["rows"]] == ["ci"]


async def test_the_command_says_and_lists_what_it_did(door: FrontDoor) -> None:
    old = await door.key(name="ci", requests_per_minute=60)
    new = (await tierline(door, "keys", "rotate", "ci")).stdout.split()[0]
    (listed,) = [
        key for key in json.loads((await tierline(door, "keys", "list", "--json")).stdout) if key["name"] == "ci"
    ]
    assert listed["prefix"] == new[:9]
    assert [secret["prefix"] for secret in listed["replaced"]] == [old[:9]]
    table = (await tierline(door, "keys", "list")).stdout
    assert f"active, and {old[:9]}… until " in table
    # At once: the next request with the old secret is refused, within the time of a look at the database.
    ended = json.loads((await tierline(door, "keys", "rotate", listed["key_id"], "--overlap", "0", "--json")).stdout)
    assert ended["key_id"] == listed["key_id"]
    assert ended["requests_per_minute"] == 60
    assert (await door.chat(token=ended["key"])).status_code == 200
    for token in (old, new):
        refused = await door.chat(token=token)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "expired_api_key")
    assert "active, and" not in (await tierline(door, "keys", "list")).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("ci", "--overlap", "soon"), "--overlap: 'soon' is no time"),
        (("ci", "--overlap", "99999999999999w"), "is no time"),
        (("ci", "--overlap", "-1h"), "is no time"),
        (("nobody",), "no key has"),
    ],
)
async def test_what_cannot_be_rotated_is_a_usage_error(door: FrontDoor, words: tuple[str, ...], message: str) -> None:
    await door.key(name="ci")
    refused = await tierline(door, "keys", "rotate", *words)
    assert refused.exit_code == 2
    assert message in refused.output
