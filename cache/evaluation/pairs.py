"""Pairs of questions: would the answer to the one be given to the other; and should it.

Each pair is a cache of one answer, so no other answer votes. Under a promise a pair hits where the verifier's chance
reaches 1 - the promised rate: there is no traffic to find a bar by, and no guard may object.
"""

from __future__ import annotations

import msgspec

from cache.evaluation.files import Pair
from cache.evaluation.prepare import Prepared, TextEmbedder, prepare
from cache.evaluation.result import Decision, Evaluation, share, summarise
from cache.verifier.model import Verifier, prior, probability
from cache.verifier.neighbours import Neighbour, candidate
from cache.words.guards import objection, verify
from cache.words.text import normal_form
from cache.words.writing import folded_form


def evaluate_pairs(
    pairs: list[Pair],
    embedder: TextEmbedder,
    *,
    threshold: float = 0.95,
    max_false_hit_rate: float | None = None,
    verifier: Verifier | None = None,
) -> Evaluation:
    """Ask `text_a` of a cache that holds the answer to `text_b`, pair by pair.

    Args:
        threshold: of the static rule, where no promise is given.
        max_false_hit_rate: decide by the verifier instead, as under a promise of this rate.
        verifier: the shipped one by default.
    """
    prepared = prepare(embedder, [text for pair in pairs for text in (pair.text_a, pair.text_b)])
    least = None if max_false_hit_rate is None else 1.0 - max_false_hit_rate
    judge = prior() if verifier is None else verifier
    decisions = []
    refused = 0
    for pair in pairs:
        asked, cached = prepared[pair.text_a], prepared[pair.text_b]
        refused += "off" in (asked.mode, cached.mode)
        decisions.append(_known(pair, asked, cached) or _near(pair, asked, cached, threshold, least, judge))
    same = [decision for pair, decision in zip(pairs, decisions, strict=True) if pair.same]
    different = [decision for pair, decision in zip(pairs, decisions, strict=True) if not pair.same]
    summary = msgspec.structs.replace(
        summarise(decisions, embedder.name, threshold if least is None else None, refused),
        recall=share(sum(decision.outcome != "miss" for decision in same), len(same)),
        false_accept_rate=share(sum(decision.outcome != "miss" for decision in different), len(different)),
    )
    return Evaluation(summary, decisions)


def _known(pair: Pair, asked: Prepared, cached: Prepared) -> Decision | None:
    """What needs no vectors' nearness: the same text, the same words in another writing, or what is never compared."""
    if "off" not in (asked.mode, cached.mode) and normal_form(pair.text_a) == normal_form(pair.text_b):
        return Decision(pair.text_a, "exact", pair.same, 1.0, matched=pair.text_b)
    if asked.vector is None or cached.vector is None:
        return Decision(pair.text_a, "miss", reason=asked.reason or cached.reason, matched=pair.text_b)
    form = folded_form(pair.text_a)
    if form is not None and form == folded_form(pair.text_b) and objection(pair.text_a, pair.text_b) is None:
        return Decision(pair.text_a, "semantic", pair.same, 1.0, matched=pair.text_b)
    return None


def _near(
    pair: Pair, asked: Prepared, cached: Prepared, threshold: float, least: float | None, judge: Verifier
) -> Decision:
    assert asked.vector is not None
    assert cached.vector is not None
    cosine = float(asked.vector @ cached.vector)
    p = None
    if least is None:
        verdict = verify(pair.text_a, pair.text_b, cosine, threshold)
        accepted, reason = verdict.accepted, verdict.reason
    else:
        found = candidate(pair.text_a, [Neighbour(pair.text_b, 0, cosine)])
        assert found is not None
        p = probability(judge.logit(found.features))
        reason = found.objection or (None if p >= least else "below_bar")
        accepted = reason is None
    outcome, correct = ("semantic", pair.same) if accepted else ("miss", None)
    return Decision(pair.text_a, outcome, correct, cosine, reason, pair.text_b, p)
