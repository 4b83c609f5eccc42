"""What is learnt from the answers of a policy's requests, and how often one is compared with a larger tier's."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from policies.schema.base import Strict, TierName


def _switch(value: Any) -> Any:
    """Older readers of YAML take bare `on` and `off` for true and false; here they are words."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Switch = Annotated[Literal["on", "off"], BeforeValidator(_switch)]


class Audit(Strict):
    """A share of the answers is compared with that of a larger tier, beside the requests; both cost what they cost."""

    rate: float = Field(gt=0, le=1, description="Share of the answers of smaller tiers that are compared.")
    against: Literal["medium", "large", "xlarge"] = Field(description="Tier that is asked the same.")
    judge_tier: TierName = Field(description="Tier of the model that says which answer serves better.")
