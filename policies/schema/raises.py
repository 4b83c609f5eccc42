"""More than usual for a while: limits and a budget that hold until a moment; after it the old ones do by themselves."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Self

from pydantic import Field, model_validator

from policies.schema.base import ONE_LINE, Strict
from policies.schema.limits import Limits
from policies.schema.moments import Moment


class RaisedBudget(Strict):
    """The month's money, as long as the raise holds."""

    monthly_usd: Decimal = Field(gt=0, max_digits=15, decimal_places=9)


class Raise(Strict):
    """Higher limits or a higher budget until a moment."""

    until: Moment = Field(description="When the policy's own values hold again: date, time and time zone.")
    reason: Annotated[str, Field(min_length=1, max_length=200), ONE_LINE] = Field(
        description="Why; explanations and records name it."
    )
    limits: Limits = Limits()
    budget: RaisedBudget | None = None

    @model_validator(mode="after")
    def _raises_something(self) -> Self:
        if self.limits == Limits() and self.budget is None:
            raise ValueError("a raise needs 'limits' or 'budget'")
        return self
