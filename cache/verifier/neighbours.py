"""From the nearest questions to one candidate answer: which answer they vote for, and whether a guard objects.

An answer may have been given to several questions, so the neighbours are grouped by answer. The groups are tried by the
weight of their votes; within a group the nearest question to which no guard objects speaks for it. If the guards object
to every question of every group, the candidate of the heaviest group says so and must never be served.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from cache.verifier.features import Group, extract
from cache.words.guards import objection

# How many neighbours the store is asked for.
NEIGHBOURS = 8
# A neighbour's vote weighs exp(-(distance behind the nearest) / this).
VOTE_SCALE = 0.05


class Neighbour(msgspec.Struct, frozen=True):
    """A question in the cache, the answer it got, and its cosine similarity to what is asked, in [-1, 1]."""

    question: str
    answer_id: int
    cosine: float


class Candidate(msgspec.Struct, frozen=True):
    """The answer that would be given.

    Attributes:
        question: of that answer's questions among the neighbours, the nearest to which no guard objects.
        cosine: that question's similarity to what is asked.
        features: what `Verifier.logit` weighs, in the order of `features.FEATURES`.
        objection: the guard that objects to every question of the neighbourhood; None when the answer may be served.
        others: the other answers of the neighbourhood, the heaviest first. A fresh answer that differs from the
            candidate's may equal one of theirs.
    """

    answer_id: int
    question: str
    cosine: float
    features: tuple[float, ...]
    objection: str | None = None
    others: tuple[int, ...] = ()


def candidate(asked: str, neighbours: Sequence[Neighbour]) -> Candidate | None:
    """The candidate among `neighbours` (any order, duplicates of an answer welcome); None when there are none."""
    if not neighbours:
        return None
    ranked = sorted(neighbours, key=lambda neighbour: -neighbour.cosine)
    groups = _groups(ranked)
    chosen, reason = groups[0], None
    spokesman = chosen.questions[0]
    for group in groups:
        speaking, objected = _spokesman(asked, group)
        if speaking is not None:
            chosen, reason, spokesman = group, None, speaking
            break
        if group is groups[0]:
            reason = objected
    else:
        reason = reason or "guards"
    question, cosine = spokesman
    rivals = [group for group in groups if group is not chosen]
    found = extract(asked, question, cosine, chosen, rivals)
    return Candidate(chosen.answer_id, question, cosine, found, reason, tuple(group.answer_id for group in rivals))


def _groups(ranked: Sequence[Neighbour]) -> list[Group]:
    """Neighbours by answer, the heaviest group first; equal weights in the order of their nearest question."""
    nearest = ranked[0].cosine
    questions: dict[int, list[tuple[str, float]]] = {}
    weights: dict[int, float] = {}
    for neighbour in ranked:
        questions.setdefault(neighbour.answer_id, []).append((neighbour.question, neighbour.cosine))
        vote = math.exp((neighbour.cosine - nearest) / VOTE_SCALE)
        weights[neighbour.answer_id] = weights.get(neighbour.answer_id, 0.0) + vote
    whole = sum(weights.values())
    groups = [Group(answer_id, tuple(asked), weights[answer_id] / whole) for answer_id, asked in questions.items()]
    return sorted(groups, key=lambda group: -group.share)


def _spokesman(asked: str, group: Group) -> tuple[tuple[str, float] | None, str | None]:
    """The nearest question of a group without an objection, or None and the objection to the nearest."""
    first = None
    for question, cosine in group.questions:
        objected = objection(asked, question)
        if objected is None:
            return (question, cosine), None
        first = first or objected
    return None, first
