"""`/admin/v1/keys`: list, make, look at, change, rotate and revoke the keys for models. A secret is shown once."""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType
from sqlalchemy import ColumnElement

from gateway.access.ceilings import ChangedMeanwhile, KeyChange
from gateway.access.key_info import InvalidKeyRequest, KeyInfo, get_key, select_keys
from gateway.access.keys import CreatedKey, change_key, create_key, revoke_key, rotate_key
from gateway.access.levels import find_level
from gateway.access.principal import KeyLimits
from gateway.admin.call import AdminRoute, AnyCall, Call, etag_of
from gateway.admin.errors import PreconditionFailed
from gateway.admin.forms import Ceilings, check_known, duration_ms, limit_fields, moment_ahead_ms, usd, when
from gateway.admin.paging import Page, Paged, page
from gateway.dialects.errors import NotAllowed, NotFound
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import keys, organisations, projects, teams

_Value = TypeVar("_Value")
KeyState = Literal["active", "expired", "revoked"]


class KeyFilter(Paged, frozen=True, kw_only=True):
    """`organisation`, `team` and `project` are ids or names, `prefix` is the shown part of a secret, as `tl-a1B2c3`."""

    organisation: str | None = None
    team: str | None = None
    project: str | None = None
    name: str | None = None
    prefix: str | None = None
    state: KeyState | None = None


class KeyTerms(Ceilings, frozen=True, kw_only=True):
    """What a key may be changed in. Null: no such limit, all models, tiers or routes, or no end.

    `expires` is a date (2027-01-31), a moment (2027-01-31T12:00:00Z) or a time from now (30d).
    """

    name: str | UnsetType = UNSET
    expires: str | UnsetType | None = UNSET
    allowed_models: list[str] | UnsetType | None = UNSET
    allowed_tiers: list[str] | UnsetType | None = UNSET
    allowed_routes: list[str] | UnsetType | None = UNSET


class NewKey(KeyTerms, frozen=True, kw_only=True):
    """Whose the key is, by name; what does not exist yet is made."""

    organisation: str | None = None
    team: str = "default"
    project: str = "default"


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """`overlap`: how long the old secret stays good, as 30m, 24h or 7d; 0 ends it at once."""

    overlap: str = "24h"


class FormerSecret(msgspec.Struct, frozen=True, kw_only=True):
    prefix: str
    replaced: str | None
    valid_until: str | None


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """A key without its secret. Null in a limit or `allowed_…`: none, and so all."""

    id: str
    name: str
    prefix: str
    state: str
    organisation_id: str
    organisation: str
    team_id: str
    team: str
    project_id: str
    project: str
    created: str | None
    expires: str | None
    revoked: str | None
    requests_per_minute: int | None
    tokens_per_minute: int | None
    parallel: int | None
    budget_usd: str | None
    allowed_models: list[str] | None
    allowed_tiers: list[str] | None
    allowed_routes: list[str] | None
    former_secrets: list[FormerSecret]


class KeyWithSecret(Key, frozen=True, kw_only=True):
    """`key` is the secret, which is nowhere else and is not shown again."""

    key: str


async def listed(call: Call[KeyFilter, None]) -> Page[Key]:
    query, after = call.query, call.query.after()
    conditions = _conditions(query)
    if after is not None:
        conditions.append(keys.c.id > after)
    if mine := call.caller.organisation_id:
        conditions.append(organisations.c.id == mine)

    async def work(database: Database) -> list[KeyInfo]:
        async with database.read() as connection:
            return await select_keys(connection, *conditions, limit=query.limit + 1)

    found = page(await call.database(work), query.limit, lambda info: info.key_id)
    return Page([shown(info) for info in found.data], found.next_cursor)


async def made(call: Call[None, NewKey]) -> KeyWithSecret:
    given = call.body
    change = _change(call, given)
    organisation = given.organisation or "default"
    if mine := call.caller.organisation_id:
        own = await call.database(lambda database: find_level(database, f"organisation:{mine}"))
        if given.organisation not in (None, own.name):
            text = f"This admin key is for the organisation '{own.name}' only."
            raise NotAllowed(text, code="organisation_key", param="organisation")
        organisation = own.name

    async def work(database: Database) -> CreatedKey:
        return await create_key(
            database,
            call.admin.secret,
            organisation=organisation,
            team=given.team,
            project=given.project,
            name=_or(change.name, "default"),
            expires_ms=_or(change.expires_ms, None),
            limits=KeyLimits(
                _or(change.requests_per_minute, None),
                _or(change.tokens_per_minute, None),
                _or(change.parallel, None),
            ),
            budget_nanousd=_or(change.budget_nanousd, None),
            allowed_models=_or(change.allowed_models, None),
            allowed_tiers=_or(change.allowed_tiers, None),
            allowed_routes=_or(change.allowed_routes, None),
            actor=call.actor,
        )

    return _with_secret(await call.database(work))


async def one(call: Call[None, None]) -> Key:
    return shown(await find(call))


async def changed(call: Call[None, KeyTerms]) -> Key:
    info = await find(call)
    expected = info if call.check_unchanged(etag_of(shown(info))) else None
    change = _change(call, call.body)

    async def work(database: Database) -> KeyInfo:
        return await change_key(database, info.key_id, change, expected=expected, actor=call.actor)

    try:
        return shown(await call.database(work))
    except ChangedMeanwhile as error:
        raise PreconditionFailed(f"{error}: read it again.") from None


async def rotated(call: Call[None, Rotation]) -> KeyWithSecret:
    info = await find(call)
    overlap_ms = duration_ms(call.body.overlap, "overlap")

    async def work(database: Database) -> CreatedKey:
        return await rotate_key(database, call.admin.secret, info.key_id, overlap_ms, actor=call.actor)

    return _with_secret(await call.database(work))


async def revoked(call: Call[None, None]) -> Key:
    info = await find(call)
    return shown(await call.database(lambda database: revoke_key(database, info.key_id, actor=call.actor)))


ROUTES = [
    AdminRoute("GET", "/admin/v1/keys", "List keys, oldest first.", listed, Page[Key], query=KeyFilter),
    AdminRoute(
        "POST", "/admin/v1/keys", "Make a key; its secret is in the answer, this once.", made, KeyWithSecret,
        body=NewKey, role="write", status=201,
    ),
    AdminRoute("GET", "/admin/v1/keys/{key}", "One key.", one, Key, tagged=True),
    AdminRoute(
        "PATCH", "/admin/v1/keys/{key}", "Set a key's name, limits, budget, scopes or end.", changed, Key,
        body=KeyTerms, role="write", tagged=True,
    ),
    AdminRoute(
        "POST", "/admin/v1/keys/{key}/rotate", "A new secret for a key, shown this once.", rotated, KeyWithSecret,
        body=Rotation, role="write",
    ),
    AdminRoute(
        "POST", "/admin/v1/keys/{key}/revoke", "Revoke a key, for good; twice is as once.", revoked, Key, role="write",
    ),
]  # fmt: skip


async def find(call: AnyCall) -> KeyInfo:
    """The key that the path names by its id.

    Raises:
        NotFound: there is none, or not for this caller.
    """
    key_id = call.path["key"]

    async def work(database: Database) -> KeyInfo:
        async with database.read() as connection:
            return await get_key(connection, key_id)

    what = f"key '{key_id[:100]}'"
    try:
        info = await call.database(work)
    except InvalidKeyRequest:
        raise NotFound(f"There is no {what}.") from None
    call.check_mine(info.organisation_id, what)
    return info


def shown(info: KeyInfo) -> Key:
    return Key(
        id=info.key_id,
        created=when(info.created_ms),
        expires=when(info.expires_ms),
        revoked=when(info.revoked_ms),
        budget_usd=usd(info.budget_nanousd),
        former_secrets=[
            FormerSecret(prefix=one.prefix, replaced=when(one.replaced_ms), valid_until=when(one.valid_until_ms))
            for one in info.replaced
        ],
        **{name: getattr(info, name) for name in Key.__struct_fields__ if hasattr(info, name)},
    )


def _with_secret(created: CreatedKey) -> KeyWithSecret:
    return KeyWithSecret(key=created.token, **msgspec.structs.asdict(shown(created.info)))


def _change(call: AnyCall, given: KeyTerms) -> KeyChange:
    settings = call.services.settings
    check_known(given.allowed_models, ["auto", *settings.models], "allowed_models")
    expires = given.expires
    return KeyChange(
        name=given.name,
        expires_ms=moment_ahead_ms(expires, "expires") if isinstance(expires, str) else expires,
        allowed_models=given.allowed_models,
        allowed_tiers=given.allowed_tiers,
        allowed_routes=given.allowed_routes,
        **limit_fields(given),
    )


def _conditions(query: KeyFilter) -> list[ColumnElement[bool]]:
    found: list[ColumnElement[bool]] = []
    for table, owner in ((organisations, query.organisation), (teams, query.team), (projects, query.project)):
        if owner is not None:
            found.append((table.c.id == owner) | (table.c.name == owner))
    if query.name is not None:
        found.append(keys.c.name == query.name)
    if query.prefix is not None:
        found.append(keys.c.prefix == query.prefix.rstrip("…"))
    if query.state is not None:
        is_revoked = keys.c.revoked_ms.is_not(None)
        has_expired = keys.c.expires_ms.is_not(None) & (keys.c.expires_ms <= now_ms())
        states = {"revoked": is_revoked, "expired": ~is_revoked & has_expired, "active": ~is_revoked & ~has_expired}
        found.append(states[query.state])
    return found


def _or(value: _Value | UnsetType, default: _Value) -> _Value:
    return default if isinstance(value, UnsetType) else value
