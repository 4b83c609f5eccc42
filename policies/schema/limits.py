"""Ceilings of requests and tokens, and the month's money."""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

from pydantic import Field

from policies.schema.base import Duration, Strict


class Limits(Strict):
    """Ceilings of each key the policy applies to; a key's own limits apply as well."""

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, description="Prompt and answer together.")
    parallel: int | None = Field(None, ge=1, description="Requests at the same time.")


class Budget(Strict):
    """Money per calendar month for the team the policy applies to."""

    monthly_usd: Decimal = Field(gt=0, max_digits=15, decimal_places=9)
    when_exhausted: Literal["reject", "downgrade", "queue"] = Field(
        "reject",
        description="reject: refuse with 429; downgrade: keep answering with the smallest tier; queue: let requests"
        " wait for money, then refuse.",
    )
    queue_at_most: Duration = Field(
        3600.0,
        description="With queue: how long requests wait whose answers may come late (service_tier flex); the others"
        " wait for limits.queue_timeout_s of tierline.yaml.",
    )
