"""How a policy takes the place of another one."""

from __future__ import annotations

from pydantic import Field

from policies.schema.base import Name, Strict


class Rollout(Strict):
    """Try a policy on some of the keys of another one. The same key always gets the same side."""

    percent: float = Field(ge=0, le=100, description="Share of the keys that get this policy.")
    instead_of: Name = Field(description="Name of the policy that it replaces; the other keys keep that one.")
