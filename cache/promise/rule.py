"""What a policy asks of the cache, what the cache decides about one question, and how a promise stands."""

from __future__ import annotations

from typing import Literal

import msgspec

Mode = Literal["serve", "shadow", "certify"]
Action = Literal["serve", "audit", "shadow", "miss"]
State = Literal["learning", "shadow", "certified", "serving"]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """A promise of one policy.

    Attributes:
        policy: its name; one promise per name.
        max_false_hit_rate: the most of the hits in other words that may be wrong, in (0, 1).
        audit_rate: share of the would-be hits that are answered afresh to be compared, in (0, 1].
        min_audited: audits that a certificate needs at least.
        mode: `certify` serves once the bound is proved, `serve` at once by estimate, `shadow` never.
        confidence: of the bounds, in (0, 1).
        seed: of the coin that chooses audits.
    """

    policy: str
    max_false_hit_rate: float
    audit_rate: float = 0.05
    min_audited: int = 100
    mode: Mode = "certify"
    confidence: float = 0.95
    seed: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """What to do with a candidate.

    `p` is the probability that its answer fits. `ticket` names the decision when the fresh answer has been compared;
    0: nothing is to be compared. `reason` says why a miss is one, as a stable word.
    """

    action: Action
    p: float
    reason: str | None = None
    ticket: int = 0


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """How a promise stands. Rates are shares of would-be hits of the present regime; bounds have the rule's confidence.

    Attributes:
        state: what is done with would-be hits now.
        bar: the least `p` of a would-be hit.
        audits, errors: answers compared, and of these the different ones, since the regime began.
        false_hit_rate: errors per audit; None before the first audit. `lower`, `upper`: its bounds.
        hits: served; would_be_hits: served, audited and shadowed; shadow_hits: of these the shadowed.
        labels: comparisons learned from, misses included. unjudged: those that came to nothing.
        breaches: how often a regime that served broke its promise.
        since: when the regime began, Unix time in seconds.
    """

    policy: str
    mode: Mode
    state: State
    max_false_hit_rate: float
    bar: float
    audits: int
    errors: int
    false_hit_rate: float | None
    lower: float
    upper: float
    hits: int
    would_be_hits: int
    shadow_hits: int
    labels: int
    unjudged: int
    breaches: int
    since: float
