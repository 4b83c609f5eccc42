"""`/admin/v1/policies/{policy}/versions`: every text of a policy that was in force, and when."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.admin.call import AdminRoute, Call
from gateway.dialects.errors import NotFound
from gateway.ledger.policy_versions import PolicyVersion, UnknownVersion, find, history


class VersionLine(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a policy. `first_seen` and `last_seen` (UTC) are when a gateway had it in force; `seen_by` is the
    process that saw it first, as HOST/WORKER."""

    name: str
    version: str
    file: str
    seen_by: str
    first_seen: datetime
    last_seen: datetime


class VersionWhole(VersionLine, frozen=True, kw_only=True):
    """`text` is the YAML as it was written."""

    text: str


class Versions(msgspec.Struct, frozen=True):
    """The latest first."""

    data: list[VersionLine]


async def versions(call: Call[None, None]) -> Versions:
    name = call.path["policy"]
    found = await call.database(lambda database: history(database, name))
    if not found:
        raise NotFound(f"No policy '{name[:100]}' was ever in force here.")
    return Versions([VersionLine(**_line(one)) for one in found])


async def version(call: Call[None, None]) -> VersionWhole:
    name, wanted = call.path["policy"], call.path["version"]
    try:
        found = await call.database(lambda database: find(database, name[:200], wanted[:200]))
    except UnknownVersion as error:
        raise NotFound(f"{str(error)[0].upper()}{str(error)[1:]}.") from None
    return VersionWhole(text=found.text, **_line(found))


ROUTES = [
    AdminRoute(
        "GET", "/admin/v1/policies/{policy}/versions", "The versions of a policy that were in force.", versions,
        Versions, gateway_wide=True,
    ),
    AdminRoute(
        "GET", "/admin/v1/policies/{policy}/versions/{version}", "One version of a policy, with its text.", version,
        VersionWhole, gateway_wide=True,
    ),
]  # fmt: skip


def _line(one: PolicyVersion) -> dict[str, Any]:
    return {
        "name": one.name,
        "version": one.version,
        "file": one.file,
        "seen_by": one.seen_by,
        "first_seen": datetime.fromtimestamp(one.first_seen_ms / 1000, UTC),
        "last_seen": datetime.fromtimestamp(one.last_seen_ms / 1000, UTC),
    }
