"""How a policy takes the place of another one: in silence, on a part of the traffic, step by step, under guard."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from policies.schema.base import Duration, Name, Strict

_PERCENT = re.compile(r"^([0-9]+(?:\.[0-9]+)?) ?%$")
_MARGIN = re.compile(r"^([+-])([0-9]+(?:\.[0-9]+)?) ?%$")


def _percent(value: Any) -> Any:
    match = _PERCENT.match(value) if isinstance(value, str) else None
    return float(match[1]) if match else value


def _margin(sign: str, example: str) -> BeforeValidator:
    """Reads a margin as a share: `+2%` is 0.02, and so is `-2%` where less is worse."""

    def read(value: Any) -> float:
        match = _MARGIN.match(value) if isinstance(value, str) else None
        if not match or match[1] != sign or float(match[2]) == 0:
            raise ValueError(f"a margin is a sign and a percentage above 0, such as '{example}'; got {value!r}")
        return float(match[2]) / 100

    pattern = rf"^\{sign}[0-9]+(\.[0-9]+)? ?%$"
    return BeforeValidator(read, json_schema_input_type=Annotated[str, Field(pattern=pattern)])


Percent = Annotated[
    float,
    BeforeValidator(_percent, json_schema_input_type=float | Annotated[str, Field(pattern=_PERCENT.pattern)]),
    Field(ge=0, le=100),
]


class Guard(Strict):
    """How much worse than the old policy the new one may be, at the same time on the other traffic. What is proved to
    be worse ends the rollout: nobody gets the new policy any more."""

    error_rate: Annotated[float, _margin("+", "+2%")] | None = Field(
        None, description="Percentage points by which the share of requests that fail at a server may be higher."
    )
    p95_latency: Annotated[float, _margin("+", "+30%")] | None = Field(
        None, description="By how much the time that 95 % of the answers keep within may be longer."
    )
    cost_per_request: Annotated[float, _margin("+", "+20%")] | None = Field(
        None, description="By how much an answer may cost more on average."
    )
    quality: Annotated[float, _margin("-", "-5%")] | None = Field(
        None, description="Percentage points by which the share of good answers among those judged may be lower."
    )
    min_requests: int = Field(50, ge=10, le=1_000_000, description="Requests of each side before anything is judged.")
    window: Duration = Field(3600.0, description="How long one comparison goes on before the next begins afresh.")

    @model_validator(mode="after")
    def _guards_something(self) -> Self:
        if all(margin is None for margin in (self.error_rate, self.p95_latency, self.cost_per_request, self.quality)):
            raise ValueError("a guard needs one of 'error_rate', 'p95_latency', 'cost_per_request' and 'quality'")
        if not 60 <= self.window <= 7 * 86_400:
            raise ValueError("'window' must lie between 1m and 7d")
        return self


class Rollout(Strict):
    """Try a policy in the place of another one, on some of its traffic."""

    instead_of: Name = Field(description="Name of the policy that it replaces; the other requests keep that one.")
    mode: Literal["canary", "shadow"] = Field(
        "canary",
        description="canary: its share of the traffic is served by it; shadow: nothing is, the decisions of both are"
        " compared and put on record.",
    )
    by: Literal["key", "team", "request"] = Field(
        "key", description="What stays on one side: all requests of a key, all of a team, or each request by itself."
    )
    percent: Percent | None = Field(None, description="Share that gets this policy; of a shadow: that is compared.")
    teams: tuple[str, ...] = Field((), description="Names of teams that get it, whatever the percentage.")
    keys: tuple[str, ...] = Field((), description="Ids of keys that get it, whatever the percentage.")
    steps: tuple[Percent, ...] = Field((), description="Percentages to go through, in place of 'percent'.")
    every: Duration = Field(3600.0, description="How long each step lasts at least.")
    guard: Guard | None = Field(None, description="When to end it by itself.")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.steps and self.percent is not None:
            raise ValueError("'percent' and 'steps' both say how much: drop one of them")
        if list(self.steps) != sorted(set(self.steps)):
            raise ValueError("'steps' must grow from one to the next")
        if self.mode == "canary" and self.percent is None and not (self.steps or self.teams or self.keys):
            raise ValueError("say who gets it: 'percent', 'steps', 'teams' or 'keys'")
        return self

    @property
    def named_only(self) -> bool:
        """Whether nobody gets it but the teams and keys that are named."""
        return bool(self.teams or self.keys) and self.percent is None and not self.steps

    def share(self, step: int = 0) -> float:
        """The percentage at a step."""
        if self.steps:
            return self.steps[min(step, len(self.steps) - 1)]
        return (0.0 if self.named_only else 100.0) if self.percent is None else self.percent
