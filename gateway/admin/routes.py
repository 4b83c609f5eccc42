"""The table of the admin API: every route with who may call it, what it takes and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from gateway.admin import (
    answer_cache,
    audit_log,
    batches,
    gateway_state,
    keys,
    openapi,
    owners,
    policy_versions,
    rollouts,
    spending,
    standing,
)
from gateway.admin.call import AdminRoute, Call
from gateway.dialects.errors import MethodNotAllowed, NotFound
from gateway.http import Exchange

if TYPE_CHECKING:
    from gateway.services import Services

PREFIX: Final = "/admin/"


async def _described(call: Call[None, None]) -> dict[str, Any]:
    return openapi.document(ADMIN_ROUTES)


ADMIN_ROUTES: Final[tuple[AdminRoute, ...]] = (
    *owners.routes(),
    *keys.ROUTES,
    *standing.ROUTES,
    *spending.ROUTES,
    *batches.ROUTES,
    *gateway_state.ROUTES,
    *policy_versions.ROUTES,
    *rollouts.ROUTES,
    *answer_cache.ROUTES,
    *audit_log.ROUTES,
    AdminRoute("GET", "/admin/v1/openapi.json", "This API, as an OpenAPI document.", _described, dict[str, Any]),
)
_BY_LENGTH: Final[Mapping[int, list[tuple[list[str], AdminRoute]]]] = {
    length: [(parts, route) for parts, route in ((r.path.split("/"), r) for r in ADMIN_ROUTES) if len(parts) == length]
    for length in {len(route.path.split("/")) for route in ADMIN_ROUTES}
}


async def serve_beside_models(services: Services, exchange: Exchange) -> None:
    """Answer a request that came to the models' address.

    Raises:
        NotFound: the admin API is off, or elsewhere.
    """
    if services.settings.admin.listen is not None:
        raise NotFound("The admin API is not at this address.", code="unknown_url")
    await serve(services, exchange)


async def serve(services: Services, exchange: Exchange) -> None:
    """Answer a request to the admin API.

    Raises:
        NotFound, MethodNotAllowed: there is no such route. Else as `AdminRoute.serve`.
    """
    method, path = exchange.scope["method"], exchange.scope["path"]
    if services.admin is None:
        raise NotFound("The admin API is off here (admin.enabled).", code="unknown_url")
    found = _matches(path)
    for route, parts in found:
        if route.method == method:
            await route.serve(services, exchange, parts)
            return
    if found:
        allowed = ", ".join(sorted({route.method for route, _ in found}))
        raise MethodNotAllowed(f"{path[:200]} takes {allowed}, not {method}.", headers={"allow": allowed})
    text = f"There is nothing at {method} {path[:200]}. See /admin/v1/openapi.json."
    raise NotFound(text, code="unknown_url")


def _matches(path: str) -> list[tuple[AdminRoute, dict[str, str]]]:
    """The routes of a path, literal ones first, with the parts that they name."""
    given = path.split("/")
    found = []
    for parts, route in _BY_LENGTH.get(len(given), ()):
        named = {part[1:-1]: value for part, value in zip(parts, given, strict=True) if part.startswith("{") and value}
        if all(part == value or part[1:-1] in named for part, value in zip(parts, given, strict=True)):
            found.append((route, named))
    return sorted(found, key=lambda match: len(match[1]))
