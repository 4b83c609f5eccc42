"""`/admin/v1/keys/{key}/standing`: what limits and budgets leave a key now, at each level that applies to it."""

from __future__ import annotations

import msgspec

from gateway.access.limits import Scope, ScopeStanding
from gateway.admin.call import AdminRoute, Call
from gateway.admin.forms import usd
from gateway.admin.keys import find
from gateway.dialects.errors import NotFound


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One level and its limits in force, null where it has none. Money is of the running UTC month.

    `remaining_…` is what is left now; `held_usd` is set aside for running requests.
    """

    scope: str
    requests_per_minute: int | None
    remaining_requests: int | None
    tokens_per_minute: int | None
    remaining_tokens: int | None
    parallel: int | None
    running: int
    budget_usd: str | None
    spent_usd: str | None
    held_usd: str | None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """The key's own level first, then its project, team and organisation. A request must fit at all of them.

    `degraded`: limits are the share of the answering process, because Redis is away.
    """

    key: str
    degraded: bool
    levels: list[Level]


async def standing(call: Call[None, None]) -> Standing:
    info = await find(call)
    services = call.services
    principal = await services.keys.holder(info.key_id)
    if principal is None:
        raise NotFound(f"The key '{info.name}' is {info.state}: nothing counts against it.", code="key_not_in_force")
    scopes = [*principal.scopes, *(Scope(scope) for scope in principal.unlimited)]
    order = ("key", "project", "team", "organisation")
    scopes.sort(key=lambda scope: order.index(scope.id.partition(":")[0]))
    found = await services.limiter.standings(scopes)
    return Standing(key=info.key_id, degraded=services.limiter.degraded, levels=[_level(one) for one in found])


ROUTES = [
    AdminRoute("GET", "/admin/v1/keys/{key}/standing", "What limits leave a key now.", standing, Standing),
]


def _level(one: ScopeStanding) -> Level:
    scope, now = one.scope, one.standing
    return Level(
        scope=scope.id,
        requests_per_minute=scope.requests_per_minute,
        remaining_requests=now.remaining_requests,
        tokens_per_minute=scope.tokens_per_minute,
        remaining_tokens=now.remaining_tokens,
        parallel=scope.parallel,
        running=one.running,
        budget_usd=usd(scope.budget_nanousd),
        spent_usd=usd(one.settled_nanousd),
        held_usd=usd(one.held_nanousd),
    )
