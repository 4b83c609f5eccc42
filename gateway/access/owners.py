"""Whose cached answers a person means: from `team:support` to the scopes that the cache keeps answers under.

The cache knows ids, people know names. A policy shares answers within a key, a team or an organisation, so the answers
of a team are those of its own scope and of its keys'; those of an organisation are its own, its teams' and its keys'.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import select

from gateway.access.audit import Actor, record
from gateway.invalid import InvalidValue
from gateway.ledger.database import Database
from gateway.ledger.schema import keys, organisations, projects, teams

KINDS: Final = ("organisation", "team", "key")


class UnknownOwner(InvalidValue):
    """Nobody is called that, or several are; the message says who is."""


class Owner(msgspec.Struct):
    """An organisation, a team or a key. `names` are what it may be called by, the clearest first."""

    id: str
    names: list[str]
    scopes: list[str]


async def find_owner(database: Database, text: str) -> Owner:
    """Whom `organisation:NAME`, `team:NAME`, `team:ORGANISATION/NAME` or `key:NAME` means; an id may stand for a name.

    Raises:
        UnknownOwner: nobody, or several.
    """
    kind, _, name = text.partition(":")
    if kind not in KINDS or not name:
        raise UnknownOwner(f"'{text}' names nobody: write organisation:NAME, team:NAME or key:NAME")
    known = (await _everybody(database, kind)).values()
    found = [owner for owner in known if owner.id == name] or [owner for owner in known if name in owner.names]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{kind}:{owner.id} ({owner.names[0]})" for owner in found)
        raise UnknownOwner(f"'{text}' could be any of {choices}: name one by its id")
    raise UnknownOwner(f"there is no {kind} '{name}'.{_hint(name, [owner.names[0] for owner in known])}")


async def scopes_to_purge(
    database: Database,
    scope: str | None,
    conditions: Mapping[str, str | None],
    *,
    within: str | None = None,
    actor: Actor | None = None,
) -> list[str | None]:
    """The scopes whose cached answers shall be forgotten, [None] for all; that they shall be is in the audit log then.

    Args:
        scope: whose, as for `find_owner`; None: everybody's.
        conditions: further ones by name, for the audit log.
        within: id of the organisation that the answers must belong to.
        actor: who the audit log names; None is the user who runs this program.

    Raises:
        UnknownOwner: nobody is meant, or somebody outside of `within`.
    """
    scopes: list[str | None] = [None] if scope is None else [*(await find_owner(database, scope)).scopes]
    if within is not None and not {*scopes} <= {*(await find_owner(database, f"organisation:{within}")).scopes}:
        raise UnknownOwner(f"'{scope}' is not in this organisation")
    async with database.write() as connection:
        after = {"scope": scope, **conditions}
        await record(connection, actor, "cache.purge", "cache", organisation_id=within, after=after)
    return scopes


def named_scopes(scopes: Sequence[str | None]) -> list[str] | None:
    """What `scopes_to_purge` returned, as the cache takes it: None is everybody."""
    named = [scope for scope in scopes if scope is not None]
    return named if len(named) == len(scopes) else None


async def _everybody(database: Database, kind: str) -> dict[str, Owner]:
    """All of a kind by id, revoked keys too: their answers may still be there."""
    columns = [
        table.c[column].label(f"{word}_{column}")
        for word, table in (("organisation", organisations), ("team", teams), ("key", keys))
        for column in ("id", "name")
    ]
    joined = keys.join(projects).join(teams).join(organisations)
    async with database.read() as connection:
        # Whoever is on record came with a key, so the keys lead to everybody.
        found = (
            await connection.execute(select(*columns, keys.c.prefix).select_from(joined).order_by(keys.c.id))
        ).all()
    owners: dict[str, Owner] = {}
    for row in found:
        owner = owners.setdefault(getattr(row, f"{kind}_id"), Owner(getattr(row, f"{kind}_id"), _names(kind, row), []))
        for inner in KINDS[KINDS.index(kind) :]:
            scope = f"{inner}:{getattr(row, f'{inner}_id')}"
            if scope not in owner.scopes:
                owner.scopes.append(scope)
    return owners


def _names(kind: str, row: Any) -> list[str]:
    full = f"{row.organisation_name}/{row.team_name}"
    return {
        "organisation": [row.organisation_name],
        "team": [row.team_name, full],
        "key": [row.key_name, row.prefix, f"{row.prefix}…"],
    }[kind]


def _hint(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f" Did you mean '{near[0]}'?"
    listed = ", ".join(dict.fromkeys(known[:20])) or "none yet"
    return f" Known are: {listed}{', …' if len(known) > 20 else ''}."
