"""What an evaluation gives: every decision, and the rates that sum them up."""

from __future__ import annotations

import math
from collections import Counter

import msgspec

from cache.promise.rule import Standing


class Decision(msgspec.Struct, frozen=True):
    """What the cache did with one question.

    Attributes:
        outcome: `exact`, `semantic` or `miss`.
        correct: whether a hit gave the right answer; None for a miss.
        score: cosine similarity of the candidate, where there was one.
        reason: why not, for a miss; `audit` and `shadow` for would-be hits that a promise sends upstream.
        matched: the cached question whose answer was given, or that of the candidate.
        p: under a promise, the chance that the candidate's answer is right.
    """

    text: str
    outcome: str
    correct: bool | None = None
    score: float | None = None
    reason: str | None = None
    matched: str | None = None
    p: float | None = None


class Summary(msgspec.Struct, frozen=True):
    """Rates are shares in [0, 1]; None where nothing was there to count.

    Attributes:
        threshold: the static rule's; None under a promise.
        requests: pairs, or questions of the stream.
        eligible: of these, what the cache may answer at all; the others are about time, the asker's own data ...
        hit_rate: hits / requests; hit_rate_of_eligible: hits / eligible.
        false_hit_rate: wrong hits / hits.
        false_hit_rate_upper_95: upper end of its two-sided 95 % Wilson score interval (Wilson 1927).
        wrong_per_request: wrong hits / requests.
        recall: of the pairs marked same, the share that hit. Pairs only.
        false_accept_rate: of the pairs marked different, the share that hit. Pairs only.
        misses: how many per reason.
        standing: how the promise stands at the end, where there is one.
    """

    threshold: float | None
    embedder: str
    requests: int
    eligible: int
    hits: int
    exact_hits: int
    wrong_hits: int
    hit_rate: float | None
    hit_rate_of_eligible: float | None
    false_hit_rate: float | None
    false_hit_rate_upper_95: float | None
    wrong_per_request: float | None
    misses: dict[str, int]
    recall: float | None = None
    false_accept_rate: float | None = None
    standing: Standing | None = None


class Evaluation(msgspec.Struct, frozen=True):
    summary: Summary
    decisions: list[Decision]


def summarise(decisions: list[Decision], embedder: str, threshold: float | None, refused: int) -> Summary:
    """The rates of `decisions`, of which `refused` were about questions that the cache never answers."""
    hits = [decision for decision in decisions if decision.outcome != "miss"]
    wrong = sum(not decision.correct for decision in hits)
    eligible = len(decisions) - refused
    return Summary(
        threshold=threshold,
        embedder=embedder,
        requests=len(decisions),
        eligible=eligible,
        hits=len(hits),
        exact_hits=sum(decision.outcome == "exact" for decision in hits),
        wrong_hits=wrong,
        hit_rate=share(len(hits), len(decisions)),
        hit_rate_of_eligible=share(len(hits), eligible),
        false_hit_rate=share(wrong, len(hits)),
        false_hit_rate_upper_95=_wilson_upper(wrong, len(hits)),
        wrong_per_request=share(wrong, len(decisions)),
        misses=dict(Counter(decision.reason or "" for decision in decisions if decision.outcome == "miss")),
    )


def share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _wilson_upper(events: int, trials: int, z: float = 1.959964) -> float | None:
    """Upper end of the Wilson score interval for a proportion (E. B. Wilson, JASA 22, 1927)."""
    if not trials:
        return None
    found = events / trials
    centre = found + z * z / (2 * trials)
    spread = z * math.sqrt(found * (1 - found) / trials + z * z / (4 * trials * trials))
    return min(1.0, (centre + spread) / (1 + z * z / trials))
