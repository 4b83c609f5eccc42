"""What a policy file may say: every key, its type, its default and what it means.

This is the one source of the reference page and of `schema.json`, which editors use to complete and check policies.
Unknown keys are errors. Read next: `load.py`.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

TierName = Literal["small", "medium", "large", "xlarge"]
Name = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


def _one_line(value: str) -> str:
    if not value.isprintable() or value != value.strip():
        raise ValueError("it must be one line of printable characters, without blanks around it")
    return value


# For text that appears in headers, in the log and in tables; in an annotation it stands after the bounds of the length.
ONE_LINE: Final = AfterValidator(_one_line)
RouteName = Annotated[str, Field(min_length=1, max_length=100), ONE_LINE]

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"^([1-9][0-9]*)(s|m|h|d|w)$")


def seconds(value: Any) -> float:
    """Seconds of a duration such as `90s`, `15m`, `24h`, `7d` or `2w`.

    Raises:
        ValueError: it is not a whole number of one of these units; a bare number is refused, its unit would be a guess.
    """
    match = _DURATION.match(value) if isinstance(value, str) else None
    if not match:
        raise ValueError(f"a duration is a whole number and a unit (s, m, h, d, w), such as 24h; got {value!r}")
    return float(int(match[1]) * _UNITS[match[2]])


Duration = Annotated[
    float,
    BeforeValidator(seconds, json_schema_input_type=Annotated[str, Field(pattern=_DURATION.pattern)]),
]


def _off(value: Any) -> Any:
    """Older readers of YAML take a bare `off` for false; here it is the word."""
    return "off" if value is False else value


class Strict(BaseModel):
    """Base of all policy models: unknown keys are errors, instances do not change."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


# Keys of `cache` that say how a promise is kept.
PROMISE_KEYS: Final = ("promise", "audit_rate", "min_audited", "judge", "judge_tier")


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
    quality_target: float | None = Field(
        None, gt=0, le=1, description="For `tier: auto`: probability of success to reach; default: the policy's."
    )
    on_abort: OnAbort | None = Field(None, description="For requests that this rule decides; default: the policy's.")

    @model_validator(mode="after")
    def _one_target(self) -> Self:
        if (self.tier is None) == (self.model is None):
            raise ValueError("a route needs either 'tier' or 'model'")
        return self


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


class Limits(Strict):
    """Ceilings of each key the policy applies to; a key's own limits apply as well."""

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, description="Prompt and answer together.")
    parallel: int | None = Field(None, ge=1, description="Requests at the same time.")


class Budget(Strict):
    """Money per calendar month for the team the policy applies to."""

    monthly_usd: Decimal = Field(gt=0, max_digits=15, decimal_places=9)
    when_exhausted: Literal["reject", "downgrade"] = Field(
        "reject", description="reject: refuse with 429; downgrade: keep answering with the smallest tier."
    )


class Rollout(Strict):
    """Try a policy on some of the keys of another one. The same key always gets the same side."""

    percent: float = Field(ge=0, le=100, description="Share of the keys that get this policy.")
    instead_of: Name = Field(description="Name of the policy that it replaces; the other keys keep that one.")


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
