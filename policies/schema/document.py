"""A whole policy file: its keys at the top level, and the JSON Schema that editors complete it with."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from policies.schema.base import ONE_LINE, Name, Strict, TierName
from policies.schema.cache import CachePolicy
from policies.schema.limits import Budget, Limits
from policies.schema.rollout import Rollout
from policies.schema.routes import AppliesTo, OnAbort, Route


class PolicyDocument(Strict):
    """A policy file."""

    model_config = ConfigDict(title="Tierline policy")

    version: Literal[1] = Field(description="Version of this format.")
    name: Name = Field(description="Unique name; appears in headers, log and ledger.")
    owner: Annotated[str, Field(min_length=1), ONE_LINE] = Field(description="Who answers for it: a team or a person.")
    description: str | None = None
    applies_to: AppliesTo = AppliesTo()
    routes: tuple[Route, ...] = Field((), description="Rules from top to bottom; the first match decides.")
    default: TierName = Field("medium", description="Tier where no rule matches or `tier: auto` cannot tell.")
    quality_target: float = Field(0.8, gt=0, le=1, description="Probability of success that `tier: auto` looks for.")
    fallback: tuple[TierName, ...] = Field(
        (), description="Tiers to try, in this order, where the chosen one has no model or no healthy backend."
    )
    on_abort: OnAbort = OnAbort()
    cache: CachePolicy = CachePolicy()
    limits: Limits = Limits()
    budget: Budget | None = None
    rollout: Rollout | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.fallback)) != len(self.fallback):
            raise ValueError("'fallback' names a tier twice")
        if self.rollout and self.applies_to != AppliesTo():
            raise ValueError("with 'rollout', 'applies_to' is that of the policy it stands in for: drop it")
        return self


# Keys that are planned and do nothing yet. Accepting them in silence would promise what does not happen.
NOT_YET: dict[tuple[str, ...], str] = {
    ("escalate",): "answers are not checked and repeated on a larger tier yet",
    (
        "limits",
        "queue",
    ): "the queue is the gateway's: set limits.max_queued and limits.queue_timeout_s in tierline.yaml",
    ("queue",): "the queue is the gateway's: set limits.max_queued and limits.queue_timeout_s in tierline.yaml",
}


def json_schema() -> str:
    """The published JSON Schema of a policy file, as text."""
    schema = PolicyDocument.model_json_schema(mode="validation")
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
