"""Who is asking: the key behind a request, whose it is and what it may do. No secret in it."""

from __future__ import annotations

import msgspec

from gateway.access.limits import Scope


class AuthenticationError(Exception):
    """A token that authenticates nobody. `code` is stable; messages show no more of a token than its prefix."""

    code = "invalid_api_key"


class InvalidKey(AuthenticationError):
    """No such key."""


class ExpiredKey(AuthenticationError):
    """The key was good until a date that has passed."""

    code = "expired_api_key"


class RevokedKey(AuthenticationError):
    """The key was revoked."""

    code = "revoked_api_key"


class KeyLimits(msgspec.Struct, frozen=True):
    """Ceilings of one key; None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated key. `allowed_models` are public names, `auto` among them; None allows every model, tier, route.

    `scopes` are what its requests count against: its own, and those of its project, team and organisation that have a
    limit; `unlimited` names the others, which may be given one.
    """

    key_id: str
    key_prefix: str
    key_name: str
    project_id: str
    project_name: str
    team_id: str
    team_name: str
    organisation_id: str
    organisation_name: str
    limits: KeyLimits = KeyLimits()
    budget_nanousd: int | None = None
    allowed_models: frozenset[str] | None = None
    allowed_tiers: frozenset[str] | None = None
    allowed_routes: frozenset[str] | None = None
    scopes: tuple[Scope, ...] = ()
    unlimited: tuple[str, ...] = ()
    expires_ms: int | None = None

    def may_use(self, model: str) -> bool:
        return self.allowed_models is None or model in self.allowed_models

    def may_use_tier(self, tier: str | None) -> bool:
        """None is the tier of a model that has none, being not for chat."""
        return tier is None or self.allowed_tiers is None or tier in self.allowed_tiers

    def scope(self) -> Scope:
        """This key's own limits and budget."""
        return Scope(
            f"key:{self.key_id}",
            self.limits.requests_per_minute,
            self.limits.tokens_per_minute,
            self.limits.parallel,
            self.budget_nanousd,
            f"Your key '{self.key_name}' ({self.key_prefix}…)",
        )
