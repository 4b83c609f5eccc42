"""`/admin/v1/audit` and `/admin/v1/self`: who changed what, and who one is."""

from __future__ import annotations

from typing import Any

import msgspec

from gateway.access.audit import AuditRow, audit_rows
from gateway.admin.call import AdminRoute, Call
from gateway.admin.forms import when
from gateway.admin.paging import Page, Paged, page
from gateway.ledger.database import Database


class AuditFilter(Paged, frozen=True, kw_only=True):
    """Each filter is a whole value: `actor` as admin:ID or cli:USER, `action` as key.create, `object` as key:ID."""

    actor: str | None = None
    action: str | None = None
    object: str | None = None


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A change. `before` is null where it was made, `after` where nothing is left of it; else what of it changed."""

    id: str
    time: str | None
    actor: str
    action: str
    object: str
    organisation_id: str | None
    before: dict[str, Any] | None
    after: dict[str, Any] | None
    request_id: str
    address: str


class Self(msgspec.Struct, frozen=True, kw_only=True):
    """The admin key that asks. `organisation_id`: the only one that it is for, or null."""

    id: str
    name: str
    prefix: str
    role: str
    organisation_id: str | None
    expires: str | None


async def listed(call: Call[AuditFilter, None]) -> Page[AuditEntry]:
    query, before_id = call.query, call.query.after()

    async def work(database: Database) -> list[AuditRow]:
        return await audit_rows(
            database,
            limit=query.limit + 1,
            before_id=before_id,
            organisation_id=call.caller.organisation_id,
            actor=query.actor,
            action=query.action,
            object=query.object,
        )

    found = page(await call.database(work), query.limit, lambda row: row.id)
    return Page([shown(row) for row in found.data], found.next_cursor)


async def myself(call: Call[None, None]) -> Self:
    caller = call.caller
    return Self(
        id=caller.key_id,
        name=caller.name,
        prefix=caller.prefix,
        role=caller.role,
        organisation_id=caller.organisation_id,
        expires=when(caller.expires_ms),
    )


ROUTES = [
    AdminRoute("GET", "/admin/v1/audit", "Changes, the latest first.", listed, Page[AuditEntry], query=AuditFilter),
    AdminRoute("GET", "/admin/v1/self", "The admin key that asks.", myself, Self),
]


def shown(row: AuditRow) -> AuditEntry:
    same = {name: getattr(row, name) for name in AuditEntry.__struct_fields__ if hasattr(row, name)}
    return AuditEntry(time=when(row.ts_ms), **same)
