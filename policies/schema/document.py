"""A whole policy file: its keys at the top level, and the JSON Schema that editors complete it with."""

from __future__ import annotations

import json
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from policies.schema.base import ONE_LINE, Name, Strict, TierName
from policies.schema.cache import CachePolicy
from policies.schema.escalation import Escalate
from policies.schema.examples import MOST_EXAMPLES, Example
from policies.schema.guardrails import Guardrails
from policies.schema.learning import Audit, Switch
from policies.schema.limits import Budget, Limits
from policies.schema.moments import Moment
from policies.schema.raises import Raise
from policies.schema.rollout import Rollout
from policies.schema.routes import AppliesTo, OnAbort, Route
from policies.schema.session import SessionPolicy


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
    priority: int = Field(
        0, ge=-100, le=100, description="Before whom its requests run on bundled engines: smaller is more urgent."
    )
    on_abort: OnAbort = OnAbort()
    escalate: Escalate | None = Field(None, description="When answers are checked and repeated on a larger tier.")
    learn: Switch = Field(
        "on", description="Whether `tier: auto` learns from what answers came to, and others from this policy's."
    )
    audit: Audit | None = Field(None, description="Compare some answers with those of a larger tier, to learn from.")
    session: SessionPolicy | None = Field(
        None, description="Whether conversations stay on the tier and model that they are on; off unless given."
    )
    cache: CachePolicy = CachePolicy()
    guardrails: Guardrails | None = Field(None, description="What is looked for in requests and answers.")
    limits: Limits = Limits()
    budget: Budget | None = None
    rollout: Rollout | None = None
    raises: tuple[Raise, ...] = Field((), description="Higher limits or a higher budget for a while.")
    valid_from: Moment | None = Field(
        None,
        description="When it begins: date, time and time zone. From then on it takes the place of an earlier one of the"
        " same name.",
    )
    valid_until: Moment | None = Field(None, description="When it ends: date, time and time zone.")
    examples: tuple[Example, ...] = Field(
        (), max_length=MOST_EXAMPLES, description="Requests, and what should become of them: `tierline policy test`."
    )
    examples_must_pass: bool = Field(
        False, description="Refuse an edit with which an example fails; else the check warns, and the edit counts."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.fallback)) != len(self.fallback):
            raise ValueError("'fallback' names a tier twice")
        if self.rollout and self.applies_to != AppliesTo():
            raise ValueError("with 'rollout', 'applies_to' is that of the policy it stands in for: drop it")
        if self.valid_from and self.valid_until and self.valid_from >= self.valid_until:
            raise ValueError("'valid_until' must lie after 'valid_from'")
        for index, one in enumerate(self.raises):
            _check_raise(index, one, self.limits, self.budget)
        return self


def _check_raise(index: int, one: Raise, limits: Limits, budget: Budget | None) -> None:
    """A raise that lowers something, or raises what has no bound, is a mistake.

    Raises:
        PydanticCustomError: says which, and where it stands.
    """
    raised = {f"limits.{name}": (value, getattr(limits, name)) for name, value in one.limits if value is not None}
    if one.budget is not None:
        raised["budget.monthly_usd"] = (one.budget.monthly_usd, None if budget is None else budget.monthly_usd)
    for name, (value, usual) in raised.items():
        if usual is None:
            text = f"there is no '{name}' to raise"
        elif value <= usual:
            text = f"'{name}' is {usual} without it, so {value} is no raise"
        else:
            continue
        raise PydanticCustomError("no_raise", "{text}", {"text": text, "path": ("raises", index, *name.split("."))})


# Keys that are planned and do nothing yet. Accepting them in silence would promise what does not happen.
NOT_YET: dict[tuple[str, ...], str] = {
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
