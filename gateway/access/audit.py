"""The audit log: who changed what, when, from where, and how it was before and after.

A row is written in the transaction of the change, so that neither exists without the other. Nothing here or elsewhere
alters a row once it is there; the database itself refuses to. No secret ever stands in one.
"""

from __future__ import annotations

import getpass
import os
from collections.abc import Mapping
from typing import Any

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.database import Database
from gateway.ledger.rows import new_id, now_ms
from gateway.ledger.schema import audit


class Actor(msgspec.Struct, frozen=True):
    """Who makes a change: `admin:KEY_ID` over HTTP, `cli:USER` on the machine. `request_id` and `address` over HTTP."""

    name: str
    request_id: str = ""
    address: str = ""


class AuditRow(msgspec.Struct, frozen=True, kw_only=True):
    """One change. `object` is what was changed, such as `key:ID`; `before` is None where it was made.

    `organisation_id` is whose object it is; None where it belongs to no single organisation. `ts_ms` is UTC.
    """

    id: str
    ts_ms: int
    actor: str
    action: str
    object: str
    organisation_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str
    address: str


def local_actor() -> Actor:
    """The user of this machine who runs this program."""
    try:
        return Actor(f"cli:{getpass.getuser()}")
    except (KeyError, OSError):  # a user id without a name, as in containers
        return Actor(f"cli:{os.getuid()}")


async def record(
    connection: AsyncConnection,
    actor: Actor | None,
    action: str,
    object: str,
    *,
    organisation_id: str | None = None,
    before: Mapping[str, Any] | None = None,
    after: Mapping[str, Any] | None = None,
) -> None:
    """Write one row in the transaction of `connection`.

    Args:
        actor: who; None is the user who runs this program.
        action: what was done, as `key.create`: the kind of object, a dot, a verb.
        before, after: what of the object changed, as plain data without secrets.
    """
    actor = actor or local_actor()
    await connection.execute(
        audit.insert().values(
            id=new_id(),
            ts_ms=now_ms(),
            actor=actor.name,
            action=action,
            object=object,
            organisation_id=organisation_id,
            before=None if before is None else _json(before),
            after=None if after is None else _json(_given(after) if before is None else after),
            request_id=actor.request_id,
            address=actor.address,
        )
    )


async def record_change(
    connection: AsyncConnection,
    actor: Actor | None,
    action: str,
    object: str,
    *,
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    organisation_id: str | None = None,
) -> bool:
    """Like `record`, with only those fields that differ. Writes nothing and returns False where none does."""
    changed = [name for name in after if before.get(name) != after[name]]
    if not changed:
        return False
    old, new = ({name: fields.get(name) for name in changed} for fields in (before, after))
    await record(connection, actor, action, object, organisation_id=organisation_id, before=old, after=new)
    return True


async def audit_rows(
    database: Database,
    *,
    limit: int = 100,
    before_id: str | None = None,
    organisation_id: str | None = None,
    actor: str | None = None,
    action: str | None = None,
    object: str | None = None,
) -> list[AuditRow]:
    """The latest changes first, at most `limit` of them.

    Args:
        before_id: only rows older than the one with this id.
        organisation_id: only changes of what belongs to this organisation.
    """
    statement = select(audit).order_by(audit.c.id.desc()).limit(limit)
    if before_id is not None:
        statement = statement.where(audit.c.id < before_id)
    exact = {"organisation_id": organisation_id, "actor": actor, "action": action, "object": object}
    for name, wanted in exact.items():
        if wanted is not None:
            statement = statement.where(audit.c[name] == wanted)
    async with database.read() as connection:
        found = (await connection.execute(statement)).mappings().all()
    return [AuditRow(**{**row, "before": _decoded(row["before"]), "after": _decoded(row["after"])}) for row in found]


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is None: of a new thing that goes without saying."""
    return {name: value for name, value in fields.items() if value is not None}


def _json(fields: Mapping[str, Any]) -> str:
    return msgspec.json.encode(fields, order="sorted").decode()


def _decoded(text: str | None) -> dict[str, Any] | None:
    return None if text is None else msgspec.json.decode(text, type=dict[str, Any])
