"""The verifier: who is the candidate, what is read off it, what the guards keep from being served; and its file."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.cache_swaps import swaps
from cache.embedding.embedder import Embedder
from cache.evaluation.files import Pair
from cache.evaluation.pairs import evaluate_pairs
from cache.evaluation.stream import evaluate_stream
from cache.promise.rule import Rule
from cache.verifier.corpus import Asked, thinned
from cache.verifier.features import FEATURES
from cache.verifier.model import PRIOR_FILE, UnusableVerifier, Verifier, prior, probability, read
from cache.verifier.neighbours import Neighbour, candidate

ASKED = "How do I activate my new card?"


def test_without_neighbours_there_is_no_candidate() -> None:
    assert candidate(ASKED, []) is None


def test_the_answer_with_the_heaviest_vote_is_the_candidate() -> None:
    found = candidate(
        ASKED,
        [
            Neighbour("How can I order a new card?", 1, 0.90),
            Neighbour("How can I activate a card?", 2, 0.89),
            Neighbour("Activate my card", 2, 0.88),
            Neighbour("Steps to activate the new card", 2, 0.87),
        ],
    )
    assert found is not None
    assert (found.answer_id, found.question, found.cosine, found.objection) == (
        2,
        "How can I activate a card?",
        0.89,
        None,
    )
    assert found.others == (1,)


def test_a_question_of_the_group_without_objection_speaks_for_it() -> None:
    found = candidate(
        "How do I get a refund for 2 tickets?",
        [
            Neighbour("How do I get a refund for 3 tickets?", 1, 0.99),
            Neighbour("How can I get a refund for 2 tickets?", 1, 0.9),
        ],
    )
    assert found is not None
    assert (found.question, found.objection) == ("How can I get a refund for 2 tickets?", None)


def test_when_every_question_is_objected_to_the_candidate_says_why() -> None:
    found = candidate(
        "Is it safe?", [Neighbour("Is it not safe?", 1, 0.97), Neighbour("Is it not really safe?", 2, 0.95)]
    )
    assert found is not None
    assert (found.answer_id, found.objection) == (1, "negation")


def test_the_features_tell_what_speaks_for_and_against() -> None:
    neighbours = [
        Neighbour("How can I activate a card?", 1, 0.9),
        Neighbour("Activate a card please", 1, 0.88),
        Neighbour("Why was my card payment declined?", 2, 0.8),
    ]
    fits = candidate("How can I activate a card", neighbours)
    other = candidate("How can I activate a declined card", neighbours)
    assert fits is not None
    assert other is not None
    one, two = (dict(zip(FEATURES, found.features, strict=True)) for found in (fits, other))
    assert (one["overlap"], one["novel"], one["claimed"], one["same_content"]) == (1.0, 0.0, 0.0, 1.0)
    assert (two["novel"], two["claimed"], two["only_asked"]) == (1.0, 1.0, 1.0)
    assert one["margin"] == pytest.approx(0.1)
    assert one["share"] == pytest.approx((1 + math.exp(-0.4)) / (1 + math.exp(-0.4) + math.exp(-2)))
    assert prior().logit(fits.features) > prior().logit(other.features)


TEXTS = st.text(max_size=60)


@given(TEXTS, st.lists(st.tuples(TEXTS, st.integers(0, 3), st.floats(-1, 1)), min_size=1, max_size=8))
def test_any_texts_give_finite_features(asked: str, near: list[tuple[str, int, float]]) -> None:
    found = candidate(asked, [Neighbour(*one) for one in near])
    assert found is not None
    assert len(found.features) == len(FEATURES)
    assert all(math.isfinite(x) and abs(x) <= 10 for x in found.features)
    assert 0.0 <= probability(prior().logit(found.features)) <= 1.0
    assert {found.answer_id, *found.others} == {answer for _, answer, _ in near}


@given(st.permutations([("a card", 1, 0.9), ("a lost card", 2, 0.8), ("cards", 1, 0.7), ("my card", 3, 0.6)]))
def test_the_order_of_the_neighbours_says_nothing(near: list[tuple[str, int, float]]) -> None:
    expected = candidate("the card", [Neighbour(*one) for one in sorted(near)])
    assert candidate("the card", [Neighbour(*one) for one in near]) == expected


def test_the_shipped_verifier_is_of_these_features() -> None:
    assert prior().features == FEATURES
    assert read(PRIOR_FILE) == prior()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"features": ("x",)}, "weighs other features"),
        ({"features": tuple(reversed(FEATURES))}, "their order"),
        ({"coefficients": (1.0,)}, "lacks numbers"),
        ({"scales": (0.0,) * len(FEATURES)}, "lacks numbers"),
    ],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, change: dict[str, object], says: str) -> None:
    path = tmp_path / "v.json"
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(prior(), **change)))
    with pytest.raises(UnusableVerifier, match=says):
        read(path)
    path.write_text("{")
    with pytest.raises(UnusableVerifier, match="no verifier"):
        read(path)
    with pytest.raises(UnusableVerifier, match="no verifier"):
        read(tmp_path / "none.json")


def test_logits_are_standardised_weighed_and_calibrated() -> None:
    n = len(FEATURES)
    verifier = Verifier("t", FEATURES, (1.0,) * n, (2.0,) * n, (0.5, *(0.0,) * (n - 1)), 3.0, 2.0, -1.0)
    assert verifier.logit((5.0, *(0.0,) * (n - 1))) == pytest.approx(-1.0 + 2.0 * (3.0 + 0.5 * 2.0))


def test_no_swap_of_a_number_date_or_code_is_accepted_under_a_loose_promise(embedder: Embedder) -> None:
    found = evaluate_pairs(list(swaps(300)), embedder, max_false_hit_rate=0.2)
    assert [decision.text for decision in found.decisions if decision.outcome != "miss"] == []


def test_pairs_under_a_promise_are_decided_by_the_verifier(embedder: Embedder) -> None:
    pairs = [
        Pair("How can I activate my card?", "How do I activate my card?", True),
        Pair("How can I activate my card?", "How can I not activate my card?", False),
        Pair("How can I activate my card?", "What is the best film about the sea?", False),
    ]
    found = evaluate_pairs(pairs, embedder, max_false_hit_rate=0.3)
    assert [decision.outcome for decision in found.decisions] == ["semantic", "miss", "miss"]
    assert [decision.reason for decision in found.decisions] == [None, "negation", "below_bar"]
    assert found.summary.threshold is None


def test_a_stream_under_a_promise_shows_audits_and_how_it_stands(embedder: Embedder) -> None:
    stream = [
        Asked(frame.format(thing), thing)
        for frame in (
            "How do I activate my {}?",
            "how can i activate the {}",
            "Tell me how to activate a {}",
            "{} activation, how",
        )
        for thing in ("card", "phone", "alarm", "sprinkler", "heater", "printer", "router", "camera", "oven", "lamp")
    ]
    rule = Rule(policy="p", max_false_hit_rate=0.3, audit_rate=0.5, mode="serve")
    found = evaluate_stream(stream * 3, embedder, rule=rule, seed=3)
    summary = found.summary
    assert summary.standing is not None
    assert summary.eligible == summary.requests == 120
    assert summary.exact_hits + summary.standing.served <= summary.hits
    assert summary.misses.get("learning", 0) > 0
    again = evaluate_stream(stream * 3, embedder, rule=rule, seed=3)
    assert again == found


def test_thinned_streams_keep_a_few_questions_of_each_answer() -> None:
    stream = [Asked(f"{answer} {n}", str(answer)) for answer in range(5) for n in range(20)]
    found = thinned(stream, 3, 1)
    assert len(found) == 15
    assert found != sorted(found, key=lambda asked: asked.answer_id)
    assert thinned(stream, 3, 1) == found
