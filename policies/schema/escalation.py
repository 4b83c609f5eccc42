"""When an answer is not good enough, and which tier is asked next.

Answers are checked before the client sees any of them. What a check looks at is in `gateway/escalating/`; here stands
which checks a policy wants, how far it goes, and what it does with streams.
"""

from __future__ import annotations

from typing import Any, Final, Literal, Self

from pydantic import Field, field_validator, model_validator

from policies.schema.base import Strict, TierName
from tiers import TIERS

Check = Literal["empty", "truncated", "refusal", "invalid_json", "invalid_tool_call", "low_confidence"]
# What a cascade checks where nothing is said: all that needs no measurement of the model.
PLAIN_CHECKS: Final[tuple[Check, ...]] = ("empty", "truncated", "refusal", "invalid_json", "invalid_tool_call")
_OF_CONFIDENCE: Final = ("confidence", "mean_logprob")


class Escalate(Strict):
    """Repeat a request on a larger tier where its answer fails a check."""

    when: tuple[Check, ...] = Field(
        description="Checks whose failure asks the next tier; an empty list: answers are not checked."
    )
    at_most: int = Field(1, ge=1, le=3, description="How many further tiers are asked at most.")
    to: Literal["next"] | TierName | tuple[TierName, ...] = Field(
        "next",
        description="The next larger tier that has a model, a tier, or tiers in this order; never a smaller one.",
    )
    streams: Literal["no", "buffer"] = Field(
        "no",
        description="no: a stream is passed on as it comes, unchecked; buffer: it is held back until the answer has"
        " been checked.",
    )
    otherwise: Literal["answer", "error"] = Field(
        "answer", description="Where no answer passes: give the best one, or an error."
    )
    confidence: float = Field(
        0.7, gt=0, lt=1, description="For low_confidence: the least calibrated probability that the answer is right."
    )
    mean_logprob: float | None = Field(
        None,
        le=0,
        description="For low_confidence, in place of confidence: the least mean log-probability of the tokens.",
    )

    @field_validator("when")
    @classmethod
    def _once(cls, when: tuple[Check, ...]) -> tuple[Check, ...]:
        if len(set(when)) != len(when):
            raise ValueError("it names a check twice")
        return when

    @field_validator("to", mode="before")
    @classmethod
    def _known(cls, to: Any) -> Any:
        if isinstance(to, str) and to not in ("next", *TIERS):
            raise ValueError(f"it must be next, a tier ({', '.join(TIERS)}) or a list of tiers, not '{to}'")
        return to

    @field_validator("to")
    @classmethod
    def _ascending(cls, to: str | tuple[TierName, ...]) -> str | tuple[TierName, ...]:
        return to if isinstance(to, str) else ascending(to, least=1)

    @model_validator(mode="after")
    def _of_confidence(self) -> Self:
        if {*_OF_CONFIDENCE} <= self.model_fields_set and self.mean_logprob is not None:
            raise ValueError("give either 'confidence' or 'mean_logprob'")
        return self

    @property
    def asks_confidence(self) -> bool:
        """Whether a request is to bring the log-probabilities of its tokens."""
        return "low_confidence" in self.when


def ascending(tiers: tuple[TierName, ...], *, least: int) -> tuple[TierName, ...]:
    """The tiers, if there are so many of them and each is larger than the one before.

    Raises:
        ValueError: they are not.
    """
    places = [TIERS.index(tier) for tier in tiers]
    if len(tiers) < least:
        raise ValueError(f"it must name at least {least} tier{'s' if least > 1 else ''}")
    if places != sorted(set(places)):
        raise ValueError("each tier must be larger than the one before it")
    return tiers


def in_force(
    own: Escalate | None, general: Escalate | None, cascade: tuple[TierName, ...] | None = None
) -> Escalate | None:
    """What holds for a rule with `own` in a policy with `general`; a cascade says itself where its steps go."""
    said = own or general
    if cascade is not None:
        said = said or Escalate(when=PLAIN_CHECKS)
        streams = said.streams if "streams" in said.model_fields_set else "buffer"
        update = {"to": cascade, "at_most": len(cascade) - 1, "streams": streams}
        said = said.model_copy(update=update)
    return said if said is not None and said.when else None
