"""What a key may use: routes, models and tiers. A refusal names what was refused, and what there is instead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from gateway.access.principal import Principal
from gateway.dialects.errors import NotAllowed
from gateway.settings import Settings
from tiers import TIERS

if TYPE_CHECKING:
    from gateway.services import Services

# Dialects whose route has another name in the metrics than keys are kept to.
_SCOPE_OF: Final[Mapping[str, str]] = {"chat.completions": "chat"}
# What the routes that are not for chat are for.
_KINDS: Final[Mapping[str, str]] = {"embeddings": "embedding", "rerank": "rerank"}


def route_scope(dialect_route: str) -> str:
    """What the keys' `allowed_routes` call a dialect's route."""
    return _SCOPE_OF.get(dialect_route, dialect_route)


def check_route(principal: Principal, dialect_route: str) -> None:
    """Raises NotAllowed (`route_not_allowed`)."""
    allowed = principal.allowed_routes
    if allowed is not None and (route := route_scope(dialect_route)) not in allowed:
        text = f"This key may not use the route '{route}'. It may use: {', '.join(sorted(allowed))}."
        raise NotAllowed(text, code="route_not_allowed")


def check_model(settings: Settings, principal: Principal, name: str) -> None:
    """Raises NotAllowed (`model_not_allowed`, `tier_not_allowed`) for a model of the settings that a client names."""
    if not principal.may_use(name):
        allowed = ", ".join(sorted(principal.allowed_models or ()))
        text = f"This key may not use the model '{name}'. It may use: {allowed}."
        raise NotAllowed(text, code="model_not_allowed", param="model")
    tier = settings.models[name].tier
    if not principal.may_use_tier(tier):
        text = f"The model '{name}' is of the tier '{tier}', which this key may not use. {_tiers(principal)}"
        raise NotAllowed(text, code="tier_not_allowed", param="model")


def check_pin(principal: Principal, tier: str) -> None:
    """Raises NotAllowed (`tier_not_allowed`) for a tier that the client asks for."""
    if not principal.may_use_tier(tier):
        text = f"This key may not use the tier '{tier}' of 'x-tierline-tier'. {_tiers(principal)}"
        raise NotAllowed(text, code="tier_not_allowed")


def nearest_tiers(principal: Principal, wanted: str) -> list[str]:
    """The tiers that this key may use, the nearest to the wanted one first, of two the smaller."""
    at = TIERS.index(wanted)
    allowed = [tier for tier in TIERS if principal.may_use_tier(tier)]
    return sorted(allowed, key=lambda tier: abs(TIERS.index(tier) - at))


def usable_models(services: Services, principal: Principal) -> list[str]:
    """What `GET /v1/models` lists for this key: models of the routes, models and tiers that it may use, and `auto`
    first, if there is one that it can stand for."""
    settings, routes = services.settings, principal.allowed_routes
    kinds = {"chat", "embedding", "rerank"} if routes is None else {_KINDS.get(route, "chat") for route in routes}
    there = [
        name for name, model in settings.models.items() if model.kind in kinds and principal.may_use_tier(model.tier)
    ]
    named = [name for name in there if principal.may_use(name)]
    return ["auto", *named] if (there if principal.may_use("auto") else named) else named


def _tiers(principal: Principal) -> str:
    return f"It may use: {', '.join(tier for tier in TIERS if principal.may_use_tier(tier))}."
