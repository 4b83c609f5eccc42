"""Keys of the admin API: made, listed, rotated and revoked here, and asked here who holds one.

They are apart from the keys for models: another table, another prefix, so that neither opens what the other is for. A
key has a role and may be bound to one organisation. Whoever asks is looked up in the database each time: a revoked
key is refused by the next request, everywhere.
"""

from __future__ import annotations

import hmac
import re
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, get_args

import msgspec
from sqlalchemy import func, select, update
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.access.audit import Actor, record
from gateway.access.created import Created
from gateway.access.keystore import check_secret, open_secret
from gateway.access.principal import ExpiredKey, InvalidKey, RevokedKey
from gateway.access.secret import ADMIN_PREFIX, ServerSecret, is_token, kept_token, new_token, shown_prefix
from gateway.ledger.database import Database
from gateway.ledger.rows import new_id, now_ms
from gateway.ledger.schema import admin_keys, admin_secrets, organisations

AdminRole = Literal["read", "write"]
ROLES: Final[tuple[AdminRole, ...]] = get_args(AdminRole)
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@+-]{0,63}")


class InvalidAdminKeyRequest(ValueError):
    """An admin key cannot be made or found as asked; the message says what to write instead."""


class InvalidAdminKey(InvalidKey):
    """No such admin key."""

    code = "invalid_admin_key"


class AdminPrincipal(msgspec.Struct, frozen=True, kw_only=True):
    """Who asks the admin API. `organisation_id`: the only one it may see and change; None: all, and the gateway."""

    key_id: str
    name: str
    prefix: str
    role: AdminRole
    organisation_id: str | None
    expires_ms: int | None

    @property
    def may_write(self) -> bool:
        return self.role == "write"


class AdminSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret of an admin key. `valid_until_ms` (UTC) is None for the present one."""

    prefix: str
    created_ms: int
    valid_until_ms: int | None

    @property
    def valid(self) -> bool:
        return self.valid_until_ms is None or now_ms() < self.valid_until_ms


class AdminKeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An admin key as it may be shown. Times are UTC milliseconds; `replaced` are its former secrets, latest first."""

    key_id: str
    prefix: str
    name: str
    role: AdminRole
    organisation_id: str | None
    organisation: str | None
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    replaced: list[AdminSecret]

    @property
    def state(self) -> str:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms() else "active"


CreatedAdminKey: TypeAlias = Created[AdminKeyInfo]


async def create_admin_key(
    database: Database,
    secret: ServerSecret,
    *,
    name: str,
    role: AdminRole = "read",
    organisation: str | None = None,
    expires_ms: int | None = None,
    token: str | None = None,
    actor: Actor | None = None,
) -> CreatedAdminKey:
    """Make an admin key.

    Args:
        organisation: name or id of the only organisation that it is for; it must exist.
        expires_ms: UTC milliseconds; None: never.
        actor: who the audit log names, here and below; None is the user who runs this program.

    Raises:
        InvalidAdminKeyRequest: a name, role, organisation or time that makes no sense.
    """
    if not _NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, spaces or . _ @ + -, beginning with a letter or digit"
        raise InvalidAdminKeyRequest(f"{name!r} is no name for an admin key: use {allowed}")
    if role not in ROLES:
        raise InvalidAdminKeyRequest(f"'{role}' is no role: choose from {', '.join(ROLES)}")
    if expires_ms is not None and expires_ms <= now_ms():
        raise InvalidAdminKeyRequest("the key would have expired already")
    await check_secret(database, secret)
    token = token or new_token(ADMIN_PREFIX)
    key_id, now = new_id(), now_ms()
    async with database.write() as connection:
        organisation_id = None if organisation is None else await _organisation(connection, organisation)
        terms = {"name": name, "role": role, "organisation_id": organisation_id, "expires_ms": expires_ms}
        await connection.execute(admin_keys.insert().values(id=key_id, created_ms=now, **terms))
        await connection.execute(admin_secrets.insert().values(**_secret(secret, token, key_id, now)))
        after = {**terms, "prefix": shown_prefix(token)}
        await record(connection, actor, "admin_key.create", _object(key_id), after=after)
        return CreatedAdminKey(token, (await _infos(connection, key_id))[0])


async def list_admin_keys(database: Database) -> list[AdminKeyInfo]:
    """All admin keys, revoked ones too, oldest first."""
    async with database.read() as connection:
        return await _infos(connection)


async def find_admin_key(database: Database, reference: str) -> AdminKeyInfo:
    """An admin key by id, by shown prefix or by name; the latter two only among keys that are not revoked.

    Raises:
        InvalidAdminKeyRequest: none fits, or several do.
    """
    known = await list_admin_keys(database)
    found = [info for info in known if info.key_id == reference]
    shown = reference.rstrip("…")
    found = found or [info for info in known if info.revoked_ms is None and shown in (info.prefix, info.name)]
    if not found:
        raise InvalidAdminKeyRequest(
            f"no admin key has the id, prefix or name {reference!r}; see `tierline admin keys list`"
        )
    if len(found) > 1:
        choices = ", ".join(f"{info.key_id} ({info.prefix}…)" for info in found)
        raise InvalidAdminKeyRequest(f"{reference!r} could be any of {choices}; name one by its id")
    return found[0]


async def revoke_admin_key(database: Database, reference: str, *, actor: Actor | None = None) -> AdminKeyInfo:
    """Revoke an admin key for good, with all its secrets. Revoking twice changes nothing.

    Raises:
        InvalidAdminKeyRequest: see `find_admin_key`.
    """
    info = await find_admin_key(database, reference)
    now = now_ms()
    async with database.write() as connection:
        match = (admin_keys.c.id == info.key_id) & admin_keys.c.revoked_ms.is_(None)
        if (await connection.execute(update(admin_keys).where(match).values(revoked_ms=now))).rowcount:
            before, after = {"revoked_ms": None}, {"revoked_ms": now}
            await record(connection, actor, "admin_key.revoke", _object(info.key_id), before=before, after=after)
        return (await _infos(connection, info.key_id))[0]


async def rotate_admin_key(
    database: Database, secret: ServerSecret, reference: str, overlap_ms: int, *, actor: Actor | None = None
) -> CreatedAdminKey:
    """Give an admin key a new token. The old one is good for `overlap_ms` more; so, at most, are those before it.

    Raises:
        InvalidAdminKeyRequest: see `find_admin_key`; or the key is revoked or has expired.
    """
    info = await find_admin_key(database, reference)
    await check_secret(database, secret)
    token = new_token(ADMIN_PREFIX)
    async with database.write() as connection:
        # Under the lock: of two rotations at once, the second replaces the first one's token.
        row = (await connection.execute(select(admin_keys).where(_is(info.key_id)).with_for_update())).one()
        now = now_ms()
        if row.revoked_ms is not None:
            raise InvalidAdminKeyRequest(f"the admin key '{info.name}' is revoked, for good: create a new one")
        if row.expires_ms is not None and row.expires_ms <= now:
            raise InvalidAdminKeyRequest(f"the admin key '{info.name}' has expired: create a new one")
        until = now + overlap_ms
        present = (await _infos(connection, info.key_id))[0].prefix
        column = admin_secrets.c.valid_until_ms
        longer = (admin_secrets.c.admin_key_id == info.key_id) & (column.is_(None) | (column > until))
        await connection.execute(update(admin_secrets).where(longer).values(valid_until_ms=until))
        await connection.execute(admin_secrets.insert().values(**_secret(secret, token, info.key_id, now)))
        after = {"prefix": shown_prefix(token), "former_valid_until_ms": until}
        before = {"prefix": present}
        await record(connection, actor, "admin_key.rotate", _object(info.key_id), before=before, after=after)
        return CreatedAdminKey(token, (await _infos(connection, info.key_id))[0])


async def authenticate_admin(database: Database, secret: ServerSecret, token: str) -> AdminPrincipal:
    """Who holds this token, by the database as it is now.

    Raises:
        InvalidAdminKey, ExpiredKey, RevokedKey: why nobody does. DBAPIError, OSError: the database is out.
    """
    if not is_token(token, ADMIN_PREFIX):
        raise InvalidAdminKey(f"this is not a key of the admin API: those start with '{ADMIN_PREFIX}'")
    digest = secret.digest(token)
    statement = select(
        admin_secrets.c.digest, admin_secrets.c.prefix, admin_secrets.c.valid_until_ms, *admin_keys.c
    ).select_from(admin_secrets.join(admin_keys))
    async with database.read() as connection:
        row = (await connection.execute(statement.where(admin_secrets.c.digest == digest))).one_or_none()
    # The look-up is by a keyed hash, whose timing tells nothing about tokens; comparing takes constant time anyway.
    if row is None or not hmac.compare_digest(row.digest, digest):
        raise InvalidAdminKey("this admin key is not known here")
    now = now_ms()
    if row.revoked_ms is not None:
        raise RevokedKey(f"the admin key {row.prefix}… has been revoked")
    if row.expires_ms is not None and row.expires_ms <= now:
        raise ExpiredKey(f"the admin key {row.prefix}… has expired")
    if row.valid_until_ms is not None and row.valid_until_ms <= now:
        raise ExpiredKey(f"the admin key {row.prefix}… was rotated and has expired: use its new secret")
    return AdminPrincipal(
        key_id=row.id,
        name=row.name,
        prefix=row.prefix,
        role=row.role,
        organisation_id=row.organisation_id,
        expires_ms=row.expires_ms,
    )


async def ensure_first_admin_key(
    database: Database, path: Path, secret: ServerSecret | None = None
) -> CreatedAdminKey | None:
    """On a database without admin keys, make one that may write and put its token into `path` (mode 0600).

    The token is written before the key exists, and taken from the file if it is there: a crash in between leaves
    nothing half done.

    Returns:
        The key, or None when the database has admin keys already.
    """
    async with database.read() as connection:
        if await connection.scalar(select(func.count()).select_from(admin_keys)):
            return None
    secret = secret or await open_secret(database, path.parent / "secret")
    token = kept_token(path, ADMIN_PREFIX)
    try:
        return await create_admin_key(database, secret, name="first-admin-key", role="write", token=token)
    except IntegrityError:
        # Another process was faster with the same token.
        return None


async def _infos(connection: AsyncConnection, key_id: str | None = None) -> list[AdminKeyInfo]:
    named = select(admin_keys, organisations.c.name.label("organisation")).select_from(
        admin_keys.outerjoin(organisations)
    )
    kept = select(admin_secrets).order_by(admin_secrets.c.created_ms.desc())
    if key_id is not None:
        named, kept = named.where(_is(key_id)), kept.where(admin_secrets.c.admin_key_id == key_id)
    secrets: dict[str, list[AdminSecret]] = {}
    for row in (await connection.execute(kept)).mappings():
        fields = {name: row[name] for name in AdminSecret.__struct_fields__}
        secrets.setdefault(row["admin_key_id"], []).append(AdminSecret(**fields))
    infos = []
    for row in (await connection.execute(named.order_by(admin_keys.c.id))).mappings():
        of_key = secrets[row["id"]]
        present = next(one for one in of_key if one.valid_until_ms is None)
        fields = {name: row[name] for name in AdminKeyInfo.__struct_fields__ if name in row}
        replaced = [one for one in of_key if one is not present]
        infos.append(AdminKeyInfo(key_id=row["id"], prefix=present.prefix, replaced=replaced, **fields))
    return infos


async def _organisation(connection: AsyncConnection, reference: str) -> str:
    table = organisations
    match = (table.c.id == reference) | (table.c.name == reference)
    found = await connection.scalar(select(table.c.id).where(match))
    if found is None:
        raise InvalidAdminKeyRequest(f"there is no organisation '{reference}'")
    return str(found)


def _secret(secret: ServerSecret, token: str, key_id: str, now: int) -> dict[str, Any]:
    return {
        "digest": secret.digest(token),
        "admin_key_id": key_id,
        "prefix": shown_prefix(token),
        "created_ms": now,
        "valid_until_ms": None,
    }


def _is(key_id: str) -> Any:
    return admin_keys.c.id == key_id


def _object(key_id: str) -> str:
    return f"admin_key:{key_id}"
