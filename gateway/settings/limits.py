"""How much may run at once, and how much a key may ask for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from gateway.settings.strict import Strict


class LimitSettings(Strict):
    """Ceilings of a key that sets none of its own; a policy's limits apply as well."""

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    parallel: int | None = Field(None, ge=1)


class WhenRedisIsDown(Strict):
    """What a gateway does with limits that it shares through Redis while Redis is away.

    `local_share`: go on with its part of each limit, and of what was left of each budget. `refuse`: refuse requests
    that have such a limit.
    """

    rates: Literal["local_share", "refuse"] = "local_share"
    budgets: Literal["local_share", "refuse"] = "local_share"


class ConcurrencySettings(Strict):
    """What happens to requests that only running ones keep out, and while the shared limits cannot be reached."""

    max_concurrency: int | None = Field(None, ge=1, description="Requests at once per gateway process.")
    max_queued: int = Field(
        256, ge=0, description="Requests per process that may wait for a place, their key's `parallel` included."
    )
    queue_timeout_s: float = Field(10.0, gt=0, description="How long one of them waits.")
    when_redis_is_down: WhenRedisIsDown = WhenRedisIsDown()
