"""How requests are sorted before they are routed."""

from __future__ import annotations

from pydantic import Field

from gateway.settings.strict import Strict


class RoutingSettings(Strict):
    """What `tier: auto` and rules about the task go by."""

    embedding_timeout_ms: float = Field(
        50.0,
        ge=0,
        description="How long a request waits for the cache's embedding of it; then its words alone decide. 0: always.",
    )
