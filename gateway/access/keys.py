"""API keys: made, changed, rotated and revoked here; a token is shown once, when it is made.

A key belongs to a project of a team of an organisation; those come into being with their first key. Its id is what
limits, budgets, spend and policies hold on to; its secret can be replaced. Every change moves the key version, by which
running gateways notice within a second, and stands in the audit log. See `keystore.py` for authentication.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import UNSET
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError

from gateway.access.audit import Actor
from gateway.access.ceilings import ChangedMeanwhile, InvalidCeiling, KeyChange, columns
from gateway.access.created import Created
from gateway.access.key_info import (
    InvalidKeyRequest,
    KeyInfo,
    ReplacedSecret,
    audit_key,
    audit_key_change,
    audited,
    find_key,
    get_key,
    list_keys,
)
from gateway.access.keystore import KeyStore, SecretMismatch, check_secret, check_token, open_secret
from gateway.access.levels import InvalidLevel, check_name, ensure_levels, move_version
from gateway.access.principal import AuthenticationError, ExpiredKey, InvalidKey, KeyLimits, Principal, RevokedKey
from gateway.access.secret import ServerSecret, kept_token, load_secret, new_token, shown_prefix
from gateway.ledger.database import Database
from gateway.ledger.rows import new_id, now_ms
from gateway.ledger.schema import keys, replaced_secrets

__all__ = [
    "AuthenticationError", "CreatedKey", "ExpiredKey", "InvalidKey", "InvalidKeyRequest", "KeyChange", "KeyInfo",
    "KeyLimits", "KeyStore", "Principal", "ReplacedSecret", "RevokedKey", "SecretMismatch", "ServerSecret",
    "change_key", "check_secret", "check_token", "create_key", "ensure_first_key", "find_key", "list_keys",
    "load_secret", "open_secret", "revoke_key", "rotate_key",
]  # fmt: skip

logger = logging.getLogger("tierline.access")


CreatedKey: TypeAlias = Created[KeyInfo]


async def create_key(
    database: Database,
    secret: ServerSecret,
    *,
    organisation: str = "default",
    team: str = "default",
    project: str = "default",
    name: str = "default",
    expires_ms: int | None = None,
    limits: KeyLimits | None = None,
    budget_nanousd: int | None = None,
    allowed_models: Collection[str] | None = None,
    allowed_tiers: Collection[str] | None = None,
    allowed_routes: Collection[str] | None = None,
    token: str | None = None,
    actor: Actor | None = None,
) -> CreatedKey:
    """Make a key, and its organisation, team and project where they do not exist.

    `actor` is who the audit log names, here and below: None is the user who runs this program.

    Raises:
        InvalidKeyRequest: a name, limit, budget, expiry or scope that makes no sense.
    """
    terms = _terms(
        KeyChange(
            name=name,
            expires_ms=expires_ms,
            budget_nanousd=budget_nanousd,
            allowed_models=allowed_models,
            allowed_tiers=allowed_tiers,
            allowed_routes=allowed_routes,
            **msgspec.structs.asdict(limits or KeyLimits()),
        )
    )
    await check_secret(database, secret)
    token = token or new_token()
    key_id = new_id()
    async with database.write() as connection:
        try:
            *_, project_id = await ensure_levels(database, connection, actor, organisation, team, project)
        except InvalidLevel as error:
            raise InvalidKeyRequest(str(error), error.field) from None
        values = {
            "id": key_id,
            "project_id": project_id,
            "prefix": shown_prefix(token),
            "digest": secret.digest(token),
            "created_ms": now_ms(),
            **terms,
        }
        await connection.execute(keys.insert().values(values))
        await move_version(database, connection)
        info = await get_key(connection, key_id)
        await audit_key(connection, actor, "key.create", info, after=audited(info))
    return CreatedKey(token, info)


async def change_key(
    database: Database,
    reference: str,
    change: KeyChange,
    *,
    expected: KeyInfo | None = None,
    actor: Actor | None = None,
) -> KeyInfo:
    """Set name, limits, budget, expiry or what it may use. Running gateways keep to it within a second.

    Raises:
        ChangedMeanwhile: it is not as in `expected`.
        InvalidKeyRequest: see `find_key`; a value that makes no sense; or the key is revoked, for good.
    """
    values = _terms(change)
    info = await find_key(database, reference)
    if info.revoked_ms is not None:
        raise InvalidKeyRequest(f"the key '{info.name}' is revoked, for good: create a new one")
    if not values:
        return info
    async with database.write() as connection:
        await connection.execute(select(keys.c.id).where(keys.c.id == info.key_id).with_for_update())
        before = audited(await get_key(connection, info.key_id))
        if expected is not None and before != audited(expected):
            raise ChangedMeanwhile(f"the key '{info.name}' was changed meanwhile")
        await connection.execute(update(keys).where(keys.c.id == info.key_id).values(values))
        changed = await get_key(connection, info.key_id)
        await move_version(database, connection)
        await audit_key_change(connection, actor, "key.change", changed, before=before, after=audited(changed))
    return changed


async def revoke_key(database: Database, reference: str, *, actor: Actor | None = None) -> KeyInfo:
    """Revoke a key for good; running gateways refuse it within a second. Revoking twice changes nothing.

    Raises:
        InvalidKeyRequest: see `find_key`.
    """
    info = await find_key(database, reference)
    if info.revoked_ms is not None:
        return info
    async with database.write() as connection:
        match = (keys.c.id == info.key_id) & keys.c.revoked_ms.is_(None)
        done = await connection.execute(update(keys).where(match).values(revoked_ms=now_ms()))
        revoked = await get_key(connection, info.key_id)
        if done.rowcount:
            await move_version(database, connection)
            after = {"revoked_ms": revoked.revoked_ms}
            await audit_key(connection, actor, "key.revoke", info, before={"revoked_ms": None}, after=after)
    return revoked


async def rotate_key(
    database: Database, secret: ServerSecret, reference: str, overlap_ms: int, *, actor: Actor | None = None
) -> CreatedKey:
    """Give a key a new token. The old one is good for `overlap_ms` more; so, at most, are those before it.

    Raises:
        InvalidKeyRequest: see `find_key`; or the key is revoked or has expired, so that no token would open anything.
    """
    info = await find_key(database, reference)
    await check_secret(database, secret)
    token = new_token()
    async with database.write() as connection:
        # Read under the lock: of two rotations at once, the second replaces the first one's token.
        row = (await connection.execute(select(keys).where(keys.c.id == info.key_id).with_for_update())).one()
        now = now_ms()
        if row.revoked_ms is not None:
            raise InvalidKeyRequest(f"the key '{info.name}' is revoked, for good: create a new one")
        if row.expires_ms is not None and row.expires_ms <= now:
            raise InvalidKeyRequest(f"the key '{info.name}' has expired, and a new secret does not change that")
        until = now + overlap_ms
        former = replaced_secrets.c
        longer = (former.key_id == info.key_id) & (former.valid_until_ms > until)
        await connection.execute(update(replaced_secrets).where(longer).values(valid_until_ms=until))
        values = {"key_id": info.key_id, "digest": row.digest, "prefix": row.prefix}
        await connection.execute(replaced_secrets.insert().values(**values, replaced_ms=now, valid_until_ms=until))
        fresh = {"digest": secret.digest(token), "prefix": shown_prefix(token)}
        await connection.execute(update(keys).where(keys.c.id == info.key_id).values(**fresh))
        await move_version(database, connection)
        before = {"prefix": row.prefix}
        after = {"prefix": fresh["prefix"], "former_valid_until_ms": until}
        await audit_key(connection, actor, "key.rotate", info, before=before, after=after)
        rotated = await get_key(connection, info.key_id)
    return CreatedKey(token, rotated)


async def ensure_first_key(database: Database, path: Path, secret: ServerSecret | None = None) -> CreatedKey | None:
    """On a database without keys, make default/default/default one and write its token to `path` (mode 0600).

    The server secret is by default the file `secret` beside it.

    The token is written before the key exists, and taken from the file if it is there: a crash in between leaves
    nothing half done.

    Returns:
        The key, or None when the database has keys already.
    """
    async with database.read() as connection:
        if await connection.scalar(select(func.count()).select_from(keys)):
            return None
    secret = secret or await open_secret(database, path.parent / "secret")
    try:
        return await create_key(database, secret, name="first-key", token=kept_token(path))
    except IntegrityError:
        # Another process was faster with the same token.
        return None


def _terms(change: KeyChange) -> dict[str, Any]:
    """The columns that a change sets.

    Raises:
        InvalidKeyRequest: a value that makes no sense.
    """
    try:
        if change.name is not UNSET:
            check_name("key", change.name)
        values = columns(change)
    except (InvalidCeiling, InvalidLevel) as error:
        raise InvalidKeyRequest(str(error), error.field) from None
    if values.get("expires_ms") is not None and values["expires_ms"] <= now_ms():
        raise InvalidKeyRequest("the key would have expired already", "expires")
    return values
