"""Whom a policy is for, and its rules."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from policies.schema.base import Duration, RouteName, Strict, TierName
from policies.schema.escalation import Escalate, ascending


class AppliesTo(Strict):
    """Whom the policy is for. Every list that is given must contain the request's value; none given means everybody.

    The most specific policy wins: one that names keys over one that names projects, then teams, then organisations,
    then none of them.
    """

    organisations: tuple[str, ...] = Field((), description="Names of organisations.")
    teams: tuple[str, ...] = Field((), description="Names of teams.")
    projects: tuple[str, ...] = Field((), description="Names of projects.")
    keys: tuple[str, ...] = Field((), description="Ids of API keys, as `tierline keys list` shows them.")
    models: tuple[str, ...] = Field(
        (),
        description="Model names that clients ask for; 'auto' means that the policy chooses. Naming a real model here"
        " lets the rules redirect it; otherwise a client that names a model gets that model.",
    )


class OnAbort(Strict):
    """What becomes of a stream whose client leaves in the middle of it, and so what the request is charged."""

    mode: Literal["cancel", "count", "drain"] = Field(
        "cancel",
        description="cancel: stop the backend at once and charge what had been passed on; count: stop it, and charge"
        " all that had arrived; drain: read on to the end, for the usage that the server reports there.",
    )
    max_time: Duration = Field(30.0, description="With drain: how long to read on, such as 30s.")
    max_tokens: int = Field(4096, ge=1, description="With drain: how many more tokens of output to read.")


class Route(Strict):
    """One rule. The first whose `when` is true decides; a rule without `when` always matches."""

    name: RouteName | None = Field(None, description="Shown in explanations and in the log.")
    when: str | None = Field(None, min_length=1, description="CEL expression that must be true.")
    tier: Literal["small", "medium", "large", "xlarge", "auto"] | None = Field(
        None, description="Tier to use; 'auto': the smallest tier that is good enough for the request."
    )
    model: str | None = Field(None, min_length=1, description="Model to use, in place of a tier.")
    cascade: tuple[TierName, ...] | None = Field(
        None,
        description="In place of a tier, for short answers that can be checked: begin at the first of these tiers, stop"
        " at the first whose answer passes the checks of 'escalate'.",
    )
    quality_target: float | None = Field(
        None, gt=0, le=1, description="For `tier: auto`: probability of success to reach; default: the policy's."
    )
    sticky: bool = Field(
        True,
        description="With 'session': false sends the requests of this rule where it says, whatever tier their"
        " conversation is on, which stays there.",
    )
    on_abort: OnAbort | None = Field(None, description="For requests that this rule decides; default: the policy's.")
    escalate: Escalate | None = Field(None, description="For requests that this rule decides; default: the policy's.")

    @field_validator("when", mode="before")
    @classmethod
    def _condition(cls, when: Any) -> Any:
        if when is not None and not isinstance(when, str):
            text = "it must be text: a CEL expression, in quotes"
            raise PydanticCustomError("condition", text, {"at_value": True})  # where its other faults are
        return when

    @field_validator("cascade")
    @classmethod
    def _steps(cls, cascade: tuple[TierName, ...] | None) -> tuple[TierName, ...] | None:
        return cascade if cascade is None else ascending(cascade, least=2)

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if [self.tier, self.model, self.cascade].count(None) != 2:
            raise ValueError("a route needs one of 'tier', 'model' and 'cascade'")
        if self.cascade is not None and self.escalate is not None:
            for name in ("to", "at_most"):
                if name in self.escalate.model_fields_set:
                    raise ValueError(f"'cascade' says which tiers are asked: drop '{name}' of 'escalate'")
            if not self.escalate.when:
                raise ValueError("a cascade needs a check: name one in 'when' of 'escalate'")
        return self
