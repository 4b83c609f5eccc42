"""Keys: made once, kept as hashes, served from memory, refused in time; no secret shown anywhere."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from sqlalchemy import text

from gateway.access import keystore
from gateway.access.keys import (
    ExpiredKey,
    InvalidKey,
    InvalidKeyRequest,
    KeyLimits,
    KeyStore,
    RevokedKey,
    SecretMismatch,
    create_key,
    ensure_first_key,
    find_key,
    list_keys,
    revoke_key,
)
from gateway.access.limits import Scope
from gateway.access.secret import InvalidSecret, ServerSecret, is_token, load_secret, new_token, write_private
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.settings import LimitSettings

SECRET = ServerSecret(b"0" * 32)


@pytest.fixture
async def store(database: Database) -> AsyncIterator[KeyStore]:
    opened = KeyStore(database, SECRET)
    await opened.start()
    yield opened
    await opened.stop()


async def test_a_key_says_whose_it_is(database: Database) -> None:
    made = await create_key(
        database, SECRET, organisation="acme", team="support", project="bot", name="ci",
        limits=KeyLimits(requests_per_minute=5, parallel=2), budget_nanousd=7, allowed_models={"auto", "m"},
    )  # fmt: skip
    store = KeyStore(database, SECRET, LimitSettings(requests_per_minute=100, tokens_per_minute=1000))
    await store.refresh()
    who = store.authenticate(made.token)
    assert (who.organisation_name, who.team_name, who.project_name, who.key_name) == ("acme", "support", "bot", "ci")
    assert who.key_id == made.info.key_id
    # Its own ceilings where it has them, the configured ones elsewhere.
    assert who.scope() == Scope(f"key:{who.key_id}", 5, 1000, 2, 7, f"Your key 'ci' ({made.info.prefix}…)")
    assert who.may_use("m")
    assert not who.may_use("other")
    other = await create_key(database, SECRET, organisation="acme", team="support")
    await store.refresh()
    assert store.authenticate(other.token).team_id == who.team_id
    assert store.authenticate(other.token).may_use("anything")
    assert len(store) == 2


async def test_tokens_and_secrets_are_nowhere_to_be_seen(
    database: Database, store: KeyStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        made = await create_key(database, SECRET)
        wrong = new_token()
        with pytest.raises(InvalidKey) as unknown:
            await store.authenticate_fresh(wrong)
        who = await store.authenticate_fresh(made.token)
        await revoke_key(database, made.info.key_id)
        await store.refresh()
        with pytest.raises(RevokedKey) as revoked:
            store.authenticate(made.token)
    async with database.read() as connection:
        dump = str((await connection.execute(text("SELECT * FROM keys"))).all())
    seen = " ".join(
        [repr(made), repr(SECRET), repr(store), repr(who), str(made.info), str(unknown.value), str(revoked.value), dump]
    )
    for secret in (made.token[3:], wrong[3:], "0" * 32):
        assert secret not in seen + caplog.text
    assert made.token.startswith(made.info.prefix)
    assert len(made.info.prefix) == 9
    assert SECRET.digest(made.token) in dump


@pytest.mark.parametrize("token", ["", "sk-abc", "tl-", "tl-" + "x" * 1000, "tl-" + "é" * 43, "tl-\udcff", "Bearer x"])
async def test_what_is_no_key_is_refused(store: KeyStore, token: str) -> None:
    with pytest.raises(InvalidKey) as caught:
        await store.authenticate_fresh(token)
    assert caught.value.code == "invalid_api_key"


async def test_a_new_key_works_at_once(database: Database, store: KeyStore) -> None:
    made = await create_key(database, SECRET)
    with pytest.raises(InvalidKey):
        store.authenticate(made.token)
    assert (await store.authenticate_fresh(made.token)).key_id == made.info.key_id


async def test_unknown_tokens_share_one_look_at_the_database(
    database: Database, store: KeyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = 0
    refresh = store.refresh

    async def counted() -> None:
        nonlocal looked
        looked += 1
        await refresh()

    monkeypatch.setattr(store, "refresh", counted)
    made = await create_key(database, SECRET)
    tokens = [new_token() for _ in range(200)] + [made.token]
    found = await asyncio.gather(*(store.authenticate_fresh(token) for token in tokens), return_exceptions=True)
    assert [isinstance(result, InvalidKey) for result in found] == [True] * 200 + [False]
    assert looked <= 2
    started = time.monotonic()
    for _ in range(10):
        with pytest.raises(InvalidKey):
            await store.authenticate_fresh(new_token())
    # However fast they come, it is at most ten looks a second (and the watcher's two).
    assert looked <= 4 + (time.monotonic() - started) * 12


async def test_a_cancelled_caller_does_not_take_the_others_along(database: Database, store: KeyStore) -> None:
    made = await create_key(database, SECRET)
    first = asyncio.create_task(store.authenticate_fresh(made.token))
    second = asyncio.create_task(store.authenticate_fresh(made.token))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).key_id == made.info.key_id


async def test_a_revoked_key_is_refused_within_a_second(database: Database, store: KeyStore) -> None:
    made = await create_key(database, SECRET)
    await store.authenticate_fresh(made.token)
    await revoke_key(database, made.info.prefix)
    revoked_at = time.monotonic()

    async def use_it() -> None:
        while time.monotonic() < revoked_at + 5:
            store.authenticate(made.token)
            await asyncio.sleep(0.01)

    with pytest.raises(RevokedKey, match="has been revoked") as caught:
        await use_it()
    assert time.monotonic() - revoked_at < 1.0
    assert caught.value.code == "revoked_api_key"


async def test_a_key_expires_on_time(database: Database, store: KeyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    expires = now_ms() + 3_600_000
    made = await create_key(database, SECRET, expires_ms=expires)
    await store.authenticate_fresh(made.token)
    monkeypatch.setattr(keystore, "now_ms", lambda: expires - 1)
    store.authenticate(made.token)
    monkeypatch.setattr(keystore, "now_ms", lambda: expires)
    with pytest.raises(ExpiredKey, match="has expired"):
        store.authenticate(made.token)


async def test_keys_stay_known_while_the_database_is_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keystore, "POLL_S", 0.02)
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    made = await create_key(database, SECRET)
    store = KeyStore(database, SECRET)
    await store.start()
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE facts RENAME TO gone"))
    with pytest.raises(InvalidKey):
        await store.authenticate_fresh(new_token())
    await asyncio.sleep(0.1)
    assert store.authenticate(made.token).key_id == made.info.key_id
    assert caplog.text.count("cannot read the keys") == 1
    assert store.age_s >= 0.1
    async with database.write() as connection:
        await connection.execute(text("ALTER TABLE gone RENAME TO facts"))
    await store.authenticate_fresh(made.token)
    late = await create_key(database, SECRET)
    assert (await store.authenticate_fresh(late.token)).key_id == late.info.key_id
    await store.stop()
    await database.close()


async def test_another_secret_is_noticed_at_start(database: Database) -> None:
    await create_key(database, SECRET)
    other = ServerSecret(b"1" * 32)
    with pytest.raises(SecretMismatch, match="bring back"):
        await KeyStore(database, other).start()
    with pytest.raises(SecretMismatch):
        await create_key(database, other)


async def test_keys_are_found_by_id_prefix_or_name(database: Database) -> None:
    first = (await create_key(database, SECRET, name="one")).info
    for reference in (first.key_id, first.prefix, first.prefix + "…", "one"):
        assert await find_key(database, reference) == first
    second = (await create_key(database, SECRET, name="one", team="other")).info
    with pytest.raises(InvalidKeyRequest, match="could be any of"):
        await find_key(database, "one")
    revoked = await revoke_key(database, second.key_id)
    assert revoked.state == "revoked"
    assert await revoke_key(database, second.key_id) == revoked
    assert await find_key(database, "one") == first
    with pytest.raises(InvalidKeyRequest, match="no key has"):
        await find_key(database, "two")
    assert [info.state for info in await list_keys(database)] == ["active", "revoked"]


@pytest.mark.parametrize(
    "fields",
    [
        {"name": ""},
        {"team": "a/b"},
        {"organisation": "x" * 65},
        {"project": "=cmd"},
        {"limits": KeyLimits(requests_per_minute=0)},
        {"limits": KeyLimits(parallel=2**31)},
        {"budget_nanousd": -1},
        {"expires_ms": 1},
    ],
)
async def test_keys_that_make_no_sense_are_refused(database: Database, fields: dict[str, object]) -> None:
    with pytest.raises(InvalidKeyRequest):
        await create_key(database, SECRET, **fields)  # type: ignore[arg-type]
    assert await list_keys(database) == []


async def test_the_first_key_is_made_once(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "data" / "first-key"
    made = await ensure_first_key(database, path)
    assert made is not None
    token = path.read_text().strip()
    assert token == made.token
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE(os.stat(path.parent / "secret").st_mode) == 0o600
    assert (made.info.organisation, made.info.team, made.info.project) == ("default",) * 3
    store = KeyStore(database, load_secret(path.parent / "secret"))
    await store.refresh()
    assert store.authenticate(token).key_name == "first-key"
    assert await ensure_first_key(database, path) is None
    os.unlink(path)
    assert await ensure_first_key(database, path) is None
    assert len(await list_keys(database)) == 1


async def test_a_first_key_half_made_is_finished(database: Database, tmp_path: Path) -> None:
    path = tmp_path / "first-key"
    token = new_token()
    write_private(path, token + "\n", replace=False)  # and then the power went
    made = await ensure_first_key(database, path)
    assert made is not None
    assert made.token == token


async def test_first_keys_made_at_once_are_one(database: Database, tmp_path: Path) -> None:
    made = await asyncio.gather(*(ensure_first_key(database, tmp_path / "first-key") for _ in range(5)))
    assert sum(key is not None for key in made) == 1
    assert len(await list_keys(database)) == 1


def test_the_secret_is_made_once_and_private(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "var" / "secret"
    first = load_secret(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert load_secret(path).digest("x") == first.digest("x")
    path.chmod(0o644)
    load_secret(path)
    assert "readable by others" in caplog.text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.write_text("short")
    with pytest.raises(InvalidSecret, match="at least 32 bytes"):
        load_secret(path)


def test_the_secret_can_come_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIERLINE_SECRET", "e" * 40)
    assert load_secret(tmp_path / "secret").digest("x") == ServerSecret(b"e" * 40).digest("x")
    assert not (tmp_path / "secret").exists()


def test_tokens_are_long_distinct_and_recognised() -> None:
    tokens = {new_token() for _ in range(1000)}
    assert len(tokens) == 1000
    assert all(is_token(token) and len(token) == 46 for token in tokens)
    assert not any(map(is_token, ["", "tl-", "sk-" + "a" * 43, "tl-" + "a" * 42, "tl-" + "a" * 42 + "-"]))
