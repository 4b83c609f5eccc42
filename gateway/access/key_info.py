"""Keys as they may be shown: how they are read and found. They are made and changed in `keys.py`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.access.audit import Actor, record, record_change
from gateway.access.keystore import read_list
from gateway.invalid import InvalidValue
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import keys, organisations, projects, replaced_secrets, teams

# What the audit log has of a key besides what changed: nothing that its holder could use.
_AUDITED: Final = (
    "name", "prefix", "project_id", "expires_ms", "requests_per_minute", "tokens_per_minute", "parallel",
    "budget_nanousd", "allowed_models", "allowed_tiers", "allowed_routes",
)  # fmt: skip


class InvalidKeyRequest(InvalidValue):
    """A key cannot be made or found as asked; the message says what to write instead."""


class ReplacedSecret(msgspec.Struct, frozen=True, kw_only=True):
    """A secret that a key had before it was rotated. Times are UTC milliseconds."""

    prefix: str
    replaced_ms: int
    valid_until_ms: int

    @property
    def valid(self) -> bool:
        return now_ms() < self.valid_until_ms


class KeyInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A key as it may be shown. Times are UTC milliseconds, the budget nano-dollars per month.

    `allowed_…` is None where it may use all. `replaced` are its former secrets, the latest first.
    """

    key_id: str
    prefix: str
    name: str
    organisation_id: str
    organisation: str
    team_id: str
    team: str
    project_id: str
    project: str
    created_ms: int
    expires_ms: int | None
    revoked_ms: int | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel: int | None
    budget_nanousd: int | None
    allowed_models: list[str] | None
    allowed_tiers: list[str] | None
    allowed_routes: list[str] | None
    replaced: list[ReplacedSecret]

    @property
    def state(self) -> str:
        if self.revoked_ms is not None:
            return "revoked"
        return "expired" if self.expires_ms is not None and self.expires_ms <= now_ms() else "active"


async def list_keys(database: Database) -> list[KeyInfo]:
    """All keys, revoked ones too, oldest first."""
    async with database.read() as connection:
        return await select_keys(connection)


async def select_keys(
    connection: AsyncConnection, *conditions: ColumnElement[bool], limit: int | None = None
) -> list[KeyInfo]:
    """The keys that meet all conditions on the tables of keys and their owners, oldest first, at most `limit`."""
    joined = keys.join(projects).join(teams).join(organisations)
    statement = select(
        keys,
        keys.c.id.label("key_id"),
        projects.c.name.label("project"),
        teams.c.name.label("team"),
        organisations.c.name.label("organisation"),
        teams.c.id.label("team_id"),
        organisations.c.id.label("organisation_id"),
    )
    statement = statement.select_from(joined).where(*conditions).order_by(keys.c.id).limit(limit)
    found = (await connection.execute(statement)).mappings().all()
    former = select(replaced_secrets).order_by(replaced_secrets.c.replaced_ms.desc())
    if conditions or limit is not None:
        former = former.where(replaced_secrets.c.key_id.in_([row["key_id"] for row in found]))
    replaced: dict[str, list[ReplacedSecret]] = {}
    for row in (await connection.execute(former)).mappings():
        secret = ReplacedSecret(**{field: row[field] for field in ReplacedSecret.__struct_fields__})
        replaced.setdefault(row["key_id"], []).append(secret)
    fields = [
        field
        for field in KeyInfo.__struct_fields__
        if field not in ("allowed_models", "allowed_tiers", "allowed_routes", "replaced")
    ]
    return [
        KeyInfo(
            **{field: row[field] for field in fields},
            allowed_models=read_list(row["allowed_models"]),
            allowed_tiers=read_list(row["allowed_tiers"]),
            allowed_routes=read_list(row["allowed_routes"]),
            replaced=replaced.get(row["key_id"], []),
        )
        for row in found
    ]


async def get_key(connection: AsyncConnection, key_id: str) -> KeyInfo:
    """The key with this id.

    Raises:
        InvalidKeyRequest: there is none.
    """
    found = await select_keys(connection, keys.c.id == key_id)
    if not found:
        raise InvalidKeyRequest(f"no key has the id {key_id!r}")
    return found[0]


async def find_key(database: Database, reference: str) -> KeyInfo:
    """A key by id, by shown prefix or by name; the latter two only among keys that are not revoked.

    Raises:
        InvalidKeyRequest: none fits, or several do.
    """
    known = await list_keys(database)
    for info in known:
        if info.key_id == reference:
            return info
    shown = reference.rstrip("…")
    found = [info for info in known if info.revoked_ms is None and shown in (info.prefix, info.name)]
    if not found:
        for info in known:
            if any(secret.prefix == shown for secret in info.replaced):
                raise InvalidKeyRequest(
                    f"{shown}… is a former secret of the key '{info.name}', now {info.prefix}…: name the key by that "
                    f"or by its id, {info.key_id}"
                )
        raise InvalidKeyRequest(f"no key has the id, prefix or name {reference!r}; see `tierline keys list`")
    if len(found) > 1:
        choices = ", ".join(f"{info.key_id} ({info.organisation}/{info.team}/{info.project})" for info in found)
        raise InvalidKeyRequest(f"{reference!r} could be any of {choices}; name one by its id")
    return found[0]


def audited(info: KeyInfo) -> dict[str, Any]:
    """What the audit log says about a key: its terms, no secret."""
    return {name: getattr(info, name) for name in _AUDITED}


async def audit_key(
    connection: AsyncConnection,
    actor: Actor | None,
    action: str,
    info: KeyInfo,
    *,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write a row of the audit log about a key, in the transaction of the change."""
    where = {"organisation_id": info.organisation_id}
    await record(connection, actor, action, f"key:{info.key_id}", before=before, after=after, **where)


async def audit_key_change(
    connection: AsyncConnection,
    actor: Actor | None,
    action: str,
    info: KeyInfo,
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
) -> None:
    """The same, with only those fields that differ, and no row where none does."""
    where = {"organisation_id": info.organisation_id}
    await record_change(connection, actor, action, f"key:{info.key_id}", before=before, after=after, **where)
