"""What a policy promises, and what the keeper of the promise says: types only, light enough for every process."""

from __future__ import annotations

from typing import Literal

import msgspec

PromiseMode = Literal["serve", "shadow", "certify"]
Action = Literal["serve", "audit", "shadow", "miss"]
Kind = Literal["serve", "audit", "shadow", "miss", "guarded"]
State = Literal["learning", "shadow", "serving", "certified"]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A promise: of the hits under this policy, at most a share of `max_false_hit_rate` is wrong.

    Attributes:
        policy: whose promise it is; each policy learns and is counted on its own.
        max_false_hit_rate: wrong hits / hits, in (0, 1).
        audit_rate: share of the would-be hits that go upstream all the same, to be compared, in (0, 1].
        min_audited: comparisons that a certificate needs at least.
        mode: `certify` serves once the bound is under the promise; `serve` as soon as the estimate is; `shadow` never.
        confidence: of the bounds, in (0, 1).
    """

    policy: str
    max_false_hit_rate: float
    audit_rate: float = 0.05
    min_audited: int = 300
    mode: PromiseMode = "certify"
    confidence: float = 0.95

    def __post_init__(self) -> None:
        for name in ("max_false_hit_rate", "confidence"):
            if not 0.0 < getattr(self, name) < 1.0:
                raise ValueError(f"{name} must lie between 0 and 1, got {getattr(self, name)}")
        if not 0.0 < self.audit_rate <= 1.0:
            raise ValueError(f"audit_rate must be above 0 and at most 1, got {self.audit_rate}")
        if self.min_audited < 1:
            raise ValueError(f"min_audited must be at least 1, got {self.min_audited}")


class Verdict(msgspec.Struct, frozen=True):
    """What to do with a request.

    Attributes:
        action: `serve` the candidate's answer; or ask upstream: `audit` (drawn by lot among the hits), `shadow` (it
            would be a hit if the promise stood), `miss`.
        p: the chance that the candidate's answer is right, in [0, 1].
        reason: why not served: `no_candidate`, a guard, `learning`, `below_bar`; None otherwise.
        ticket: to be handed to `observe` with the judge's word, or to `feedback`; None where nothing can be learned.
    """

    action: Action
    p: float
    reason: str | None = None
    ticket: int | None = None


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """Where a promise stands. Rates are wrong / compared, in [0, 1]; None where nothing was compared.

    Attributes:
        state: `learning`: too few comparisons for a bar. `shadow`: would-be hits are compared, none is served.
            `serving`: hits are served by estimate, without proof. `certified`: the bound was under the promise.
        bar: the chance that a candidate must reach; None while learning.
        since: when this regime began, Unix time in seconds. A regime ends when serving begins or ends, when the promise
            is changed, and when a certified bar is lowered.
        audits, errors: compared would-be hits of this regime, and how many of them were wrong.
        upper, lower: each holds with the rule's confidence at whatever moment it is looked at: the rate among the
            would-be hits of this regime is at most `upper`; it is at least `lower`.
        hits: served in this regime.
        certificate: the comparisons that certified the promise, if it is certified.
        breaches: how often the promise was found broken since the beginning.
        would_be_hits, shadow_hits, served, labels, unjudged: since the beginning; unjudged are audits and shadow hits
            whose fresh answer never came or got no word.
    """

    policy: str
    state: State
    max_false_hit_rate: float
    bar: float | None
    since: float
    audits: int
    errors: int
    false_hit_rate: float | None
    upper: float
    lower: float
    hits: int
    certificate: Certificate | None
    breaches: int
    would_be_hits: int
    shadow_hits: int
    served: int
    labels: int
    unjudged: int


class Certificate(msgspec.Struct, frozen=True):
    """What certified a promise: at most `upper` of the compared would-be hits' kind are wrong."""

    at: float
    audits: int
    errors: int
    upper: float
