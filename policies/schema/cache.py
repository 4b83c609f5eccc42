"""Which answers may come from the cache, and what is promised of them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from policies.schema.base import Duration, Strict, TierName

# Keys of `cache` that say how a promise is kept.
PROMISE_KEYS: Final = ("promise", "audit_rate", "min_audited", "judge", "judge_tier")


def _off(value: Any) -> Any:
    """Older readers of YAML take a bare `off` for false; here it is the word."""
    return "off" if value is False else value


class CachePolicy(Strict):
    """Which answers may come from the cache."""

    mode: Annotated[Literal["off", "exact", "semantic"], BeforeValidator(_off)] = Field(
        "semantic", description="off: never; exact: the same request; semantic: also the same question in other words."
    )
    threshold: float | None = Field(
        None, gt=0, le=1, description="Least cosine similarity of a semantic hit; default: cache.similarity_threshold."
    )
    ttl: Duration | None = Field(
        None, description="How long an answer may be served, such as 24h or 7d; default: cache.ttl_seconds."
    )
    share: Literal["key", "team", "organisation"] = Field("team", description="Who may receive each other's answers.")
    allow_temperature: float = Field(
        0.0, ge=0, le=2, description="Requests with a higher temperature are answered afresh."
    )
    allow: tuple[Literal["personal", "time_bound"], ...] = Field(
        (),
        description="Questions that are answered from the cache all the same: personal, where no answer depends on who"
        " asks; time_bound, where none depends on the day within 'ttl'.",
    )
    share_tiers: bool = Field(
        False, description="Where a rule or the default chose the tier, answers of larger tiers may be given, too."
    )
    charge: float = Field(
        0.0, ge=0, le=1, description="What a hit costs: this share of what its answer had cost. The rest is saved."
    )
    max_false_hit_rate: float | None = Field(
        None,
        gt=0,
        le=0.5,
        description="The most of the hits in other words that may be wrong, measured by audits: 0.01 is one in a"
        " hundred. It takes the place of 'threshold'.",
    )
    promise: Literal["serve", "shadow", "certify"] = Field(
        "certify",
        description="certify: serve hits in other words once audits prove the bound; serve: from the first day on, by"
        " estimate; shadow: never, only measure.",
    )
    audit_rate: float = Field(
        0.05, ge=0.001, le=1, description="Share of the hits that are answered afresh, to be compared."
    )
    min_audited: int = Field(300, ge=1, le=1_000_000, description="Audits that a certificate needs at least.")
    judge: Literal["exact", "embedding", "model"] = Field(
        "embedding",
        description="Who says whether two answers say the same. exact: equal texts only; embedding: near each other,"
        " and no guard objects; model: a model of 'judge_tier' is asked.",
    )
    judge_tier: TierName | None = Field(None, description="Tier of the model that judges, with 'judge: model'.")

    def charged(self, cost_nanousd: int) -> int:
        """What a hit costs whose answer had cost that much, in nano-dollars; fractions of one are dropped."""
        return int(cost_nanousd * self.charge)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.allow)) != len(self.allow):
            raise ValueError("'allow' names a reason twice")
        if self.mode != "semantic":
            return self  # what has an effect only with it is passed over: `leftovers.py`
        if self.max_false_hit_rate is None:
            for name in PROMISE_KEYS:
                if name in self.model_fields_set:
                    raise ValueError(f"'{name}' has a meaning only with 'max_false_hit_rate'")
            return self
        if self.threshold is not None:
            raise ValueError(
                "'threshold' has no meaning with 'max_false_hit_rate', which finds its own: drop one of them"
            )
        if (self.judge == "model") != (self.judge_tier is not None):
            raise ValueError("'judge: model' and 'judge_tier' go together: name both or none")
        return self
