"""Organisations, teams and projects: listed, found, made, given limits and a budget, and what they used this month.

They come into being here or with their first key. Every change moves the key version, by which running gateways notice
within a second. How the limits of all levels are applied together is told in `limits.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import FromClause, Table, func, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.access.audit import Actor, record, record_change
from gateway.access.ceilings import ChangedMeanwhile, LimitChange, columns
from gateway.access.counting import month_of
from gateway.invalid import InvalidValue
from gateway.ledger.database import Database
from gateway.ledger.rows import new_id, now_ms
from gateway.ledger.schema import facts, keys, organisations, projects, teams
from gateway.ledger.spend import Used, month_use

LevelKind = Literal["organisation", "team", "project"]
KINDS: Final[tuple[LevelKind, ...]] = ("organisation", "team", "project")
_TABLES: Final[Mapping[LevelKind, Table]] = {"organisation": organisations, "team": teams, "project": projects}
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@+-]{0,63}")


class InvalidLevel(InvalidValue):
    """An organisation, team or project cannot be found or made as asked; the message says what to write instead."""


class LevelExists(InvalidLevel):
    """What was to be made is there."""


class LevelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, a team or a project. `team` and `project` are None above it. Times are UTC milliseconds.

    Limits are None where it has none, the budget is nano-dollars per UTC calendar month, `keys` counts those below it
    that are not revoked.
    """

    kind: LevelKind
    id: str
    name: str
    organisation_id: str
    organisation: str
    team: str | None
    project: str | None
    created_ms: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel: int | None
    budget_nanousd: int | None
    keys: int

    @property
    def path(self) -> str:
        """Its name with those above it, as in `acme/support/bot`."""
        return "/".join(name for name in (self.organisation, self.team, self.project) if name is not None)

    @property
    def scope(self) -> str:
        """What limiter and ledger count it as."""
        return f"{self.kind}:{self.id}"


class LevelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What a level used in a UTC calendar month, by the ledger. `month` as in `2026-11`."""

    level: LevelInfo
    month: str
    used: Used

    @property
    def budget_used(self) -> float | None:
        """The used share of the present budget; None without one."""
        budget = self.level.budget_nanousd
        return None if budget is None else self.used.cost_nanousd / budget if budget else 1.0


async def list_levels(database: Database, kind: LevelKind | None = None) -> list[LevelInfo]:
    """All organisations, teams and projects, or those of one kind: each before what lies in it, by name."""
    async with database.read() as connection:
        found = [info for one in KINDS if kind in (None, one) for info in await _levels(connection, one)]
    return sorted(found, key=lambda info: (info.organisation, info.team or "", info.project or ""))


async def find_level(database: Database, reference: str) -> LevelInfo:
    """What `organisation:NAME`, `team:NAME` or `project:NAME` means; the name may stand with those above it
    (`team:acme/support`), and an id may stand for it.

    Raises:
        InvalidLevel: nothing is called that, or several are.
    """
    kind, name = _reference(reference)
    known = await list_levels(database, kind)
    found = [info for info in known if info.id == name] or [info for info in known if info.path == name]
    found = found or [info for info in known if info.name == name]
    if len(found) == 1:
        return found[0]
    if found:
        choices = ", ".join(f"{kind}:{info.path}" for info in found)
        raise InvalidLevel(f"'{reference}' could be any of {choices}: name one")
    listed = ", ".join(info.path for info in known[:20]) or "none yet"
    raise InvalidLevel(f"there is no {kind} '{name}'. Known are: {listed}{', …' if len(known) > 20 else ''}")


async def create_level(
    database: Database, reference: str, limits: LimitChange = LimitChange(), *, actor: Actor | None = None
) -> LevelInfo:
    """Make `organisation:NAME`, `team:ORGANISATION/NAME` or `project:ORGANISATION/TEAM/NAME`; those above it are made
    where they do not exist.

    Raises:
        LevelExists: see there. InvalidLevel: the name makes no sense. InvalidCeiling: so do the limits.
    """
    kind, path = _reference(reference)
    names = path.split("/")
    if len(names) != KINDS.index(kind) + 1:
        form = "/".join(("ORGANISATION", "TEAM", "PROJECT")[: KINDS.index(kind) + 1])
        raise InvalidLevel(f"'{reference}' does not say where: write {kind}:{form}")
    values = columns(limits)
    async with database.write() as connection:
        above = await ensure_levels(database, connection, actor, *names[:-1])
        made = await _insert(database, connection, actor, kind, above, {**_within(above, names[-1]), **values})
        if made is None:
            raise LevelExists(f"the {kind} '{path}' exists")
        await move_version(database, connection)
    return await find_level(database, f"{kind}:{made}")


async def change_level(
    database: Database,
    reference: str,
    change: LimitChange,
    *,
    expected: LevelInfo | None = None,
    actor: Actor | None = None,
) -> LevelInfo:
    """Set limits and budget. Running gateways keep to them within a second; requests under way end as they began.

    `actor` is who the audit log names: None is the user who runs this program.

    Raises:
        InvalidLevel: see `find_level`. InvalidCeiling: a limit or budget that makes no sense.
        ChangedMeanwhile: its limits are not as in `expected`.
    """
    values = columns(change)
    level = await find_level(database, reference)
    if values:
        table = _TABLES[level.kind]
        async with database.write() as connection:
            ceilings = LimitChange.__struct_fields__
            present = select(*(table.c[name] for name in ceilings)).where(table.c.id == level.id).with_for_update()
            before = dict((await connection.execute(present)).mappings().one())
            if expected is not None and any(before[name] != getattr(expected, name) for name in ceilings):
                raise ChangedMeanwhile(f"the {level.kind} '{level.path}' was changed meanwhile")
            await connection.execute(update(table).where(table.c.id == level.id).values(values))
            await move_version(database, connection)
            action, of = f"{level.kind}.change", level.organisation_id
            await record_change(connection, actor, action, level.scope, organisation_id=of, before=before, after=values)
    return await find_level(database, level.scope)


async def level_usage(
    database: Database, kind: LevelKind | None = None, reference: str | None = None, month: int | None = None
) -> list[LevelUsage]:
    """What each level, each of a kind, or one, used in a month (year * 12 + month - 1; None: the running one).

    Raises:
        InvalidLevel: see `find_level`.
    """
    levels = await list_levels(database, kind) if reference is None else [await find_level(database, reference)]
    number = month_of(time.time())[0] if month is None else month
    used = await month_use(database, number)
    label = f"{number // 12}-{number % 12 + 1:02}"
    return [LevelUsage(level=level, month=label, used=used.get(level.scope, Used())) for level in levels]


async def ensure_levels(database: Database, connection: AsyncConnection, actor: Actor | None, *names: str) -> list[str]:
    """Ids of an organisation, and a team and a project in it as far as they are named; made where they do not exist.

    Raises:
        InvalidLevel: a name that makes no sense.
    """
    ids: list[str] = []
    for kind, name in zip(KINDS, names, strict=False):
        values = _within(ids, name)
        made = await _insert(database, connection, actor, kind, ids, values)
        if made is None:
            table = _TABLES[kind]
            match = [table.c[column] == value for column, value in values.items()]
            made = str(await connection.scalar(select(table.c.id).where(*match)))
        ids.append(made)
    return ids


def check_name(kind: str, name: str) -> None:
    """Raises InvalidLevel for what is no name."""
    if not _NAME.fullmatch(name):
        allowed = "1 to 64 letters, digits, spaces or . _ @ + -, beginning with a letter or digit"
        article = "an" if kind == "organisation" else "a"
        raise InvalidLevel(
            f"{name!r} is no name for {article} {kind}: use {allowed}", "name" if kind == "key" else kind
        )


async def move_version(database: Database, connection: AsyncConnection) -> None:
    """Tell running gateways, which look twice a second, to read keys and levels again."""
    await connection.execute(database.insert_if_absent(facts, name="keys_version", value="0"))
    # A new value suffices; a random one cannot repeat an old one, and needs no arithmetic on text.
    await connection.execute(update(facts).where(facts.c.name == "keys_version").values(value=new_id()))


async def _insert(
    database: Database,
    connection: AsyncConnection,
    actor: Actor | None,
    kind: LevelKind,
    above: list[str],
    values: dict[str, Any],
) -> str | None:
    """Make a level below the ones with the ids `above`; None when it exists."""
    made = new_id()
    insert = database.insert_if_absent(_TABLES[kind], id=made, created_ms=now_ms(), **values)
    if not (await connection.execute(insert)).rowcount:
        return None
    of = above[0] if above else made
    await record(connection, actor, f"{kind}.create", f"{kind}:{made}", organisation_id=of, after=values)
    return made


def _within(above: list[str], name: str) -> dict[str, str]:
    """The columns that tell a level from its neighbours: its name, and the id of the one it lies in."""
    check_name(KINDS[len(above)], name)
    return {"name": name, **({f"{KINDS[len(above) - 1]}_id": above[-1]} if above else {})}


def _reference(text: str) -> tuple[LevelKind, str]:
    word, _, name = text.partition(":")
    for kind in KINDS:
        if kind == word and name:
            return kind, name
    raise InvalidLevel(f"'{text}' names nothing: write organisation:NAME, team:NAME or project:NAME")


async def _levels(connection: AsyncConnection, kind: LevelKind) -> list[LevelInfo]:
    table = _TABLES[kind]
    counted = {"organisation": teams.c.organisation_id, "team": projects.c.team_id, "project": keys.c.project_id}[kind]
    below = keys.join(projects).join(teams)
    active = select(counted, func.count()).select_from(below).where(keys.c.revoked_ms.is_(None)).group_by(counted)
    number = {row[0]: int(row[1]) for row in await connection.execute(active)}
    joined: FromClause = table
    for above in ((), (organisations,), (teams, organisations))[KINDS.index(kind)]:
        joined = joined.join(above)
    names = [_TABLES[one].c.name.label(f"{one}_name") for one in KINDS[: KINDS.index(kind) + 1]]
    statement = select(table, organisations.c.id.label("organisation"), *names).select_from(joined)
    return [_info(kind, dict(row), number) for row in (await connection.execute(statement)).mappings()]


def _info(kind: LevelKind, row: dict[Any, Any], number: Mapping[str, int]) -> LevelInfo:
    own = ("id", "name", "created_ms", "requests_per_minute", "tokens_per_minute", "parallel", "budget_nanousd")
    return LevelInfo(
        kind=kind,
        organisation_id=row["organisation"],
        organisation=row["organisation_name"],
        team=row.get("team_name"),
        project=row.get("project_name"),
        keys=number.get(row["id"], 0),
        **{field: row[field] for field in own},
    )
