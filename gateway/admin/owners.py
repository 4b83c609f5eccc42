"""`/admin/v1/organisations`, `teams`, `projects`: list, make, look at, give limits and a budget, see what was used."""

from __future__ import annotations

import re
import time

import msgspec
from sqlalchemy.exc import IntegrityError

from gateway.access.ceilings import ChangedMeanwhile
from gateway.access.counting import month_of
from gateway.access.levels import (
    KINDS,
    InvalidLevel,
    LevelExists,
    LevelInfo,
    LevelKind,
    change_level,
    create_level,
    find_level,
    level_usage,
    list_levels,
)
from gateway.admin.call import AdminRoute, AnyCall, Call, etag_of
from gateway.admin.errors import Conflict, PreconditionFailed
from gateway.admin.forms import Ceilings, limit_change, usd, when
from gateway.admin.paging import Page, Paged, page
from gateway.dialects.errors import BadRequest, NotAllowed, NotFound
from gateway.ledger.database import Database


class OwnerFilter(Paged, frozen=True, kw_only=True):
    """`organisation` and `team` are ids or names: only what lies in them."""

    organisation: str | None = None
    team: str | None = None


class NewOrganisation(Ceilings, frozen=True, kw_only=True):
    name: str


class NewTeam(Ceilings, frozen=True, kw_only=True):
    """`organisation`: its name; made if new."""

    organisation: str
    name: str


class NewProject(Ceilings, frozen=True, kw_only=True):
    """`organisation`, `team`: their names; made if new."""

    organisation: str
    team: str
    name: str


class Owner(msgspec.Struct, frozen=True, kw_only=True):
    """An organisation, a team or a project. A limit is null where it has none; `keys` counts those in force."""

    id: str
    kind: LevelKind
    name: str
    organisation_id: str
    organisation: str
    team: str | None
    project: str | None
    created: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel: int | None
    budget_usd: str | None
    keys: int


class MonthQuery(msgspec.Struct, frozen=True, kw_only=True):
    """`month` as in 2026-11; the running one (UTC) if left out."""

    month: str | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """What was used in a UTC calendar month, by the ledger. `budget_used` is the share of the present budget."""

    id: str
    kind: LevelKind
    month: str
    requests: int
    input_tokens: int
    output_tokens: int
    cost_nanousd: int
    cost_usd: str | None
    saved_nanousd: int
    saved_usd: str | None
    budget_usd: str | None
    budget_used: float | None


def shown(info: LevelInfo) -> Owner:
    same = ("id", "kind", "name", "organisation_id", "organisation", "team", "project", "keys")
    limits = ("requests_per_minute", "tokens_per_minute", "parallel")
    return Owner(
        created=when(info.created_ms),
        budget_usd=usd(info.budget_nanousd),
        **{name: getattr(info, name) for name in (*same, *limits)},
    )


def routes() -> list[AdminRoute]:
    """The routes of all three kinds, which differ in little but their names."""
    bodies: dict[LevelKind, type[msgspec.Struct]] = {
        "organisation": NewOrganisation,
        "team": NewTeam,
        "project": NewProject,
    }
    return [route for kind in KINDS for route in _routes(kind, bodies[kind])]


def _routes(kind: LevelKind, body: type[msgspec.Struct]) -> list[AdminRoute]:
    async def listed(call: Call[OwnerFilter, None]) -> Page[Owner]:
        query = call.query
        if (kind == "organisation" and query.organisation) or (kind != "project" and query.team):
            param = "team" if query.team else "organisation"
            raise BadRequest(f"{kind}s are not filtered by '{param}': leave it out.", code="invalid_value", param=param)
        found = await call.database(lambda database: list_levels(database, kind))
        mine = call.caller.organisation_id
        kept = [info for info in found if mine in (None, info.organisation_id) and _lies_in(info, query)]
        # Names stand in order, and a name is what a page ends with: what is made meanwhile is not skipped.
        after = query.after()
        rest = [info for info in sorted(kept, key=_place) if after is None or _place(info) > after]
        answer = page(rest[: query.limit + 1], query.limit, _place)
        return Page([shown(info) for info in answer.data], answer.next_cursor)

    async def made(call: Call[None, NewOrganisation | NewTeam | NewProject]) -> Owner:
        given = call.body
        names = [getattr(given, name) for name in ("organisation", "team", "name") if hasattr(given, name)]
        if mine := call.caller.organisation_id:
            if kind == "organisation":
                raise NotAllowed("This admin key is for one organisation.", code="organisation_key")
            own = await call.database(lambda database: find_level(database, f"organisation:{mine}"))
            if names[0] != own.name:
                text = f"This admin key is for the organisation '{own.name}' only."
                raise NotAllowed(text, code="organisation_key")
        if any("/" in name for name in names):
            raise BadRequest("A name has no '/' in it.", code="invalid_value", param="name")
        change, reference = limit_change(given), f"{kind}:{'/'.join(names)}"
        try:
            info = await call.database(lambda database: create_level(database, reference, change, actor=call.actor))
        except (LevelExists, IntegrityError):
            raise Conflict(f"The {kind} '{'/'.join(names)}' exists.") from None
        except InvalidLevel as error:  # its own name is in `name` here
            raise InvalidLevel(str(error), "name" if error.field == kind else error.field) from None
        return shown(info)

    async def one(call: Call[None, None]) -> Owner:
        return shown(await _find(call, kind))

    async def changed(call: Call[None, Ceilings]) -> Owner:
        info = await _find(call, kind)
        expected = info if call.check_unchanged(etag_of(shown(info))) else None
        change = limit_change(call.body)

        async def work(database: Database) -> LevelInfo:
            return await change_level(database, info.scope, change, expected=expected, actor=call.actor)

        try:
            return shown(await call.database(work))
        except ChangedMeanwhile as error:
            raise PreconditionFailed(f"{error}: read it again.") from None

    async def used(call: Call[MonthQuery, None]) -> Usage:
        info = await _find(call, kind)
        month = _month(call.query.month)
        found = (await call.database(lambda database: level_usage(database, kind, info.scope, month)))[0]
        return Usage(
            id=info.id,
            kind=kind,
            month=found.month,
            cost_usd=usd(found.used.cost_nanousd),
            saved_usd=usd(found.used.saved_nanousd),
            budget_usd=usd(info.budget_nanousd),
            budget_used=found.budget_used,
            **msgspec.structs.asdict(found.used),
        )

    path = f"/admin/v1/{kind}s"
    single = f"{path}/{{{kind}}}"
    article = "an" if kind == "organisation" else "a"
    return [
        AdminRoute("GET", path, f"List {kind}s.", listed, Page[Owner], query=OwnerFilter),
        AdminRoute(
            "POST", path, f"Make {article} {kind}.", made, Owner,
            body=body, role="write", status=201, tagged=True,
        ),
        AdminRoute("GET", single, f"One {kind}.", one, Owner, tagged=True),
        AdminRoute(
            "PATCH", single, f"Set limits and budget of {article} {kind}.", changed, Owner,
            body=Ceilings, role="write", tagged=True,
        ),
        AdminRoute("GET", f"{single}/usage", f"What {article} {kind} used in a month.", used, Usage, query=MonthQuery),
    ]  # fmt: skip


async def _find(call: AnyCall, kind: LevelKind) -> LevelInfo:
    """The level that the path names by its id.

    Raises:
        NotFound: there is none, or not for this caller.
    """
    id = call.path[kind]
    what = f"{kind} '{id[:100]}'"
    try:
        info = await call.database(lambda database: find_level(database, f"{kind}:{id}"))
    except InvalidLevel:
        raise NotFound(f"There is no {what}.") from None
    call.check_mine(info.organisation_id, what)
    if info.id != id:  # a name is no id: it may mean another one tomorrow
        named = "An organisation" if kind == "organisation" else f"A {kind}"
        raise NotFound(f"{named} is named by its id here; that of '{id[:100]}' is {info.id}.")
    return info


def _lies_in(info: LevelInfo, query: OwnerFilter) -> bool:
    return query.organisation in (None, info.organisation, info.organisation_id) and query.team in (None, info.team)


def _place(info: LevelInfo) -> str:
    return "\0".join((info.organisation, info.team or "", info.project or "", info.id))


def _month(text: str | None) -> int:
    """Year * 12 + month - 1.

    Raises:
        BadRequest: not a month.
    """
    if text is None:
        return month_of(time.time())[0]
    match = re.fullmatch(r"(\d{4})-(0[1-9]|1[0-2])", text)
    if not match or match[1] == "0000":
        raise BadRequest(f"'month' is written as in 2026-11, not '{text[:40]}'.", code="invalid_value", param="month")
    return int(match[1]) * 12 + int(match[2]) - 1
