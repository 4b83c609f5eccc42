"""`/admin/v1/cache`: what the answer cache holds and does, and how to empty it."""

from __future__ import annotations

import msgspec

from cache.client import CacheClient, CacheUnavailable
from cache.stats import CacheStats
from gateway.access.owners import named_scopes, scopes_to_purge
from gateway.admin.call import AdminRoute, AnyCall, Call
from gateway.admin.forms import check_known, duration_ms
from gateway.dialects.errors import BadRequest, NotFound, Unavailable
from gateway.ledger.database import Database


class CacheState(msgspec.Struct, frozen=True, kw_only=True):
    """Counts since the cache process started. `hit_rate`: hits per look-up."""

    hit_rate: float
    stats: CacheStats


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """Which answers to forget: those that meet every condition given, or all, where `everything` is true.

    `scope`: organisation:NAME, team:NAME, team:ORGANISATION/NAME or key:NAME; an id may stand for a name.
    `older_than`: 90s, 30m, 12h, 7d. `tag`: NAME=VALUE, of the request that was answered; `policy`: under which it was.
    `entry`: the one of this id, as the header x-tierline-cache-entry names it.
    """

    scope: str | None = None
    model: str | None = None
    older_than: str | None = None
    tag: str | None = None
    policy: str | None = None
    entry: str | None = None
    everything: bool = False


class Purged(msgspec.Struct, frozen=True):
    """`removed` answers of this host's cache process. `confirmed`: cache processes that have followed, this one
    included; `unconfirmed`: those that have not, and why.
    """

    removed: int
    confirmed: int
    unconfirmed: list[str]


async def state(call: Call[None, None]) -> CacheState:
    cache = _cache(call)
    try:
        stats = await cache.stats()
    except CacheUnavailable as error:
        raise Unavailable(str(error), code="cache_unavailable") from None
    return CacheState(hit_rate=stats.hit_rate, stats=stats)


async def purge(call: Call[None, Purge]) -> Purged:
    cache, given = _cache(call), call.body
    conditions = {name: getattr(given, name) for name in ("model", "older_than", "tag", "policy", "entry")}
    if given.everything == bool(given.scope or any(conditions.values())):
        text = "Say which: 'scope', 'model', 'older_than', 'tag', 'policy', 'entry', or 'everything' alone for all."
        raise BadRequest(text, code="invalid_value")
    check_known([given.model] if given.model else None, call.services.settings.models, "model")
    age_s = None if given.older_than is None else duration_ms(given.older_than, "older_than") / 1000
    mine = call.caller.organisation_id
    scope = given.scope or (f"organisation:{mine}" if mine else None)

    async def work(database: Database) -> list[str | None]:
        return await scopes_to_purge(database, scope, conditions, within=mine, actor=call.actor)

    scopes = named_scopes(await call.database(work))
    try:
        done = await cache.purge(
            scopes,
            model=given.model,
            older_than_s=age_s,
            tag=given.tag or None,
            policy=given.policy or None,
            entry=given.entry or None,
        )
        return Purged(done.removed, done.confirmed, done.unconfirmed)
    except CacheUnavailable as error:
        raise Unavailable(str(error), code="cache_unavailable") from None


ROUTES = [
    AdminRoute("GET", "/admin/v1/cache", "Statistics of the answer cache.", state, CacheState, gateway_wide=True),
    AdminRoute("POST", "/admin/v1/cache/purge", "Forget cached answers.", purge, Purged, body=Purge, role="write"),
]


def _cache(call: AnyCall) -> CacheClient:
    if call.services.cache is None:
        raise NotFound("The answer cache is off (cache.enabled).", code="cache_off")
    return call.services.cache
