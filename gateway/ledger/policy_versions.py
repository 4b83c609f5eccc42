"""Every policy that was ever in force, as it was written: name, version, text, and from when to when it was seen.

Decisions and ledger rows name a policy with its version; here is what that said. Rows are added and their
`last_seen_ms` moves; nothing is deleted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec
from sqlalchemy import Select, select, update

from gateway.ledger.database import Database
from gateway.ledger.schema import policy_versions

LEAST_PREFIX: Final = 4


class PolicyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One text of one policy. `file` is the name of its file, `seen_by` the process that saw it first (HOST/WORKER)."""

    name: str
    version: str
    file: str
    text: str
    seen_by: str
    first_seen_ms: int
    last_seen_ms: int


class UnknownVersion(Exception):
    """No such version is kept, or several begin like that."""


async def keep(database: Database, seen: Iterable[PolicyVersion]) -> None:
    """Add versions that are new; of the others note when they were last seen."""
    async with database.write() as connection:
        for one in seen:
            await connection.execute(database.insert_if_absent(policy_versions, **msgspec.structs.asdict(one)))
            table = policy_versions.c
            this = (table.name == one.name) & (table.version == one.version)
            later = this & (table.last_seen_ms < one.last_seen_ms)
            await connection.execute(update(policy_versions).where(later).values(last_seen_ms=one.last_seen_ms))


async def history(database: Database, name: str | None = None) -> list[PolicyVersion]:
    """All versions, or those of one policy: the latest first."""
    statement = select(policy_versions)
    if name is not None:
        statement = statement.where(policy_versions.c.name == name)
    return await _read(database, statement)


async def find(database: Database, name: str, version: str) -> PolicyVersion:
    """A version by its hash, or the beginning of it.

    Raises:
        UnknownVersion: see there.
    """
    if len(version) < LEAST_PREFIX:
        raise UnknownVersion(f"'{version}' is too short for a version: write at least {LEAST_PREFIX} characters of it")
    found = [one for one in await history(database, name) if one.version.startswith(version)]
    if len(found) == 1:
        return found[0]
    if found:
        raise UnknownVersion(f"{len(found)} versions of '{name}' begin with '{version}': write more of it")
    raise UnknownVersion(f"no version '{version}' of a policy '{name}' was ever in force here")


async def texts(database: Database, versions: Iterable[tuple[str, str]]) -> dict[tuple[str, str], PolicyVersion]:
    """The kept ones of these names and versions."""
    wanted = set(versions)
    names = {name for name, _ in wanted}
    found = await _read(database, select(policy_versions).where(policy_versions.c.name.in_(names)))
    return {(one.name, one.version): one for one in found if (one.name, one.version) in wanted}


async def _read(database: Database, statement: Select[tuple[object, ...]]) -> list[PolicyVersion]:
    order = (policy_versions.c.last_seen_ms.desc(), policy_versions.c.first_seen_ms.desc(), policy_versions.c.name)
    async with database.read() as connection:
        rows = (await connection.execute(statement.order_by(*order))).mappings().all()
    return [PolicyVersion(**dict(row)) for row in rows]
