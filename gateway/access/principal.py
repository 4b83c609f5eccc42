"""Who is asking: the key behind a request, whose it is and what it may do. No secret in it."""

from __future__ import annotations

import msgspec

from gateway.access.limits import Scope


class AccessError(Exception):
    """A request that nobody may make. Messages never contain more of a token than its shown prefix."""


class InvalidKey(AccessError):
    """No such key."""


class ExpiredKey(AccessError):
    """The key was good until a date that has passed."""


class RevokedKey(AccessError):
    """The key was revoked."""


class KeyLimits(msgspec.Struct, frozen=True):
    """Ceilings of one key; None is unlimited."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    parallel: int | None = None


class Principal(msgspec.Struct, frozen=True, kw_only=True):
    """An authenticated key. An empty `allowed_models` allows every model."""

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
    allowed_models: frozenset[str] = frozenset()
    expires_ms: int | None = None

    def may_use(self, model: str) -> bool:
        return not self.allowed_models or model in self.allowed_models

    def scope(self) -> Scope:
        """This key's own limits and budget, for admission."""
        return Scope(
            f"key:{self.key_id}",
            self.limits.requests_per_minute,
            self.limits.tokens_per_minute,
            self.limits.parallel,
            self.budget_nanousd,
        )
