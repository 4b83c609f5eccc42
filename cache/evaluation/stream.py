"""A stream of questions through a cache that starts empty: by the static rule, or under a promise.

Under a promise the decisions are those of the real verifier and keeper. The judge knows the true answers: a fresh
answer is the same as a cached one where the `answer_id` is, and the other way round where the judge errs.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import msgspec

from cache.evaluation.memory import Answers
from cache.evaluation.prepare import TextEmbedder, prepare
from cache.evaluation.result import Decision, Evaluation, summarise
from cache.promise.keeper import Keeper
from cache.promise.rule import Rule, Standing
from cache.store.index import Vector
from cache.verifier.corpus import Asked
from cache.verifier.model import Verifier
from cache.verifier.neighbours import candidate
from cache.words.guards import first_accepted

# What decides on a question that nothing in the cache equals, and keeps its answer where it is a miss.
_Decide = Callable[[Asked, Vector], Decision]


def evaluate_stream(
    stream: list[Asked],
    embedder: TextEmbedder,
    *,
    threshold: float = 0.95,
    rule: Rule | None = None,
    verifier: Verifier | None = None,
    judge_error: float = 0.0,
    seed: int = 0,
    admit_all: bool = False,
) -> Evaluation:
    """Ask the questions in order of a cache that starts empty and keeps the answer of every miss it may keep.

    Args:
        threshold: of the static rule, where no promise is given.
        rule: the promise to decide by.
        verifier: where the promise starts; the shipped one by default.
        judge_error: share of comparisons that the judge gets wrong.
        seed: of the audits' lot and of the judge's errors.
        admit_all: ask the cache those questions, too, that the rules of eligibility keep from it.
    """
    prepared = prepare(embedder, (asked.text for asked in stream), admit_all=admit_all)
    answers = Answers(embedder.dimension)
    promised = None if rule is None else _Promised(answers, rule, verifier, judge_error, seed)
    decide: _Decide = _Static(answers, threshold).decide if promised is None else promised.decide
    decisions = []
    refused = 0
    for asked in stream:
        form = prepared[asked.text]
        refused += form.mode == "off"
        if form.mode == "off":
            decisions.append(Decision(asked.text, "miss", reason=form.reason))
            continue
        known = answers.known(asked.text, fuzzy=form.vector is not None)
        if known is not None:
            correct = answers.truth(known.answer_id) == asked.answer_id
            outcome = "exact" if known.exact else "semantic"
            decisions.append(Decision(asked.text, outcome, correct, 1.0, None, known.question))
        elif form.vector is None:
            answers.put(asked, None)
            decisions.append(Decision(asked.text, "miss", reason=form.reason))
        else:
            decisions.append(decide(asked, form.vector))
    summary = summarise(decisions, embedder.name, None if promised else threshold, refused)
    if promised is not None:
        summary = msgspec.structs.replace(summary, standing=promised.standing)
    return Evaluation(summary, decisions)


class _Static:
    """The rule without a promise: the nearest neighbour that no guard objects to, if it is near enough."""

    def __init__(self, answers: Answers, threshold: float) -> None:
        self._answers = answers
        self._threshold = threshold

    def decide(self, asked: Asked, vector: Vector) -> Decision:
        decision = self._judged(asked, vector)
        if decision.outcome == "miss":
            self._answers.put(asked, vector)
        return decision

    def _judged(self, asked: Asked, vector: Vector) -> Decision:
        nearest = self._answers.nearest(vector)
        if not nearest:
            return Decision(asked.text, "miss", reason="no_entry")
        questions = [(near.question, near.cosine) for near in nearest]
        place, reason = first_accepted(asked.text, questions, self._threshold)
        if place is not None:
            near = nearest[place]
            correct = self._answers.truth(near.answer_id) == asked.answer_id
            return Decision(asked.text, "semantic", correct, near.cosine, None, near.question)
        return Decision(asked.text, "miss", None, nearest[0].cosine, reason, nearest[0].question)


class _Promised:
    """The promise: what is not served is compared, and the bar is found anew whenever enough was learned."""

    def __init__(
        self,
        answers: Answers,
        rule: Rule,
        verifier: Verifier | None,
        judge_error: float,
        seed: int,
    ) -> None:
        self._answers = answers
        self._rule = rule
        self._judge_error = judge_error
        self._lot = random.Random(seed)
        self._keeper = Keeper(verifier, clock=lambda: 0.0, chance=random.Random(f"audits {seed}").random)

    @property
    def standing(self) -> Standing | None:
        return self._keeper.standing(self._rule.policy)

    def decide(self, asked: Asked, vector: Vector) -> Decision:
        found = candidate(asked.text, self._answers.nearest(vector))
        verdict = self._keeper.decide(self._rule, found)
        if found is None:
            self._answers.put(asked, vector)
            return Decision(asked.text, "miss", reason="no_entry")
        if verdict.action == "serve":
            correct = self._answers.truth(found.answer_id) == asked.answer_id
            return Decision(asked.text, "semantic", correct, found.cosine, None, found.question, verdict.p)
        same = [id for id in (found.answer_id, *found.others) if self._says_same(asked, id)]
        if verdict.ticket is not None:
            self._keeper.observe(verdict.ticket, found.answer_id in same)
        for work in self._keeper.due():
            self._keeper.adopt(work.run())
        if same:
            self._answers.alias(asked, vector, same[0])
        else:
            self._answers.put(asked, vector)
        reason = verdict.reason if verdict.action == "miss" else verdict.action
        return Decision(asked.text, "miss", None, found.cosine, reason, found.question, verdict.p)

    def _says_same(self, asked: Asked, answer_id: int) -> bool:
        errs = self._judge_error > 0 and self._lot.random() < self._judge_error
        return (self._answers.truth(answer_id) == asked.answer_id) != errs
