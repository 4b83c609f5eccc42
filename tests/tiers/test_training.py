"""Training and its measures, on patterns and made-up outcomes: no data set is needed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tiers import TIERS
from tiers.task import KINDS, TaskClassifier, TaskProfile
from tiers.train import evaluate, foreign, labels, outcomes, templates
from tiers.train.corpus import Example
from tiers.train.fit import fit
from tiers.train.slopes import fit_slopes
from tiers.train.vectors import PromptVectors
from tiers.vector import SIZE, asked

TEXTS = ["The parcel came late.", "I love the new design.", "Order 4711 was refunded on 3 May.", "The battery is weak."]


PROFILE = TaskProfile("coding", 1.0, 0.4, True, {}, {}, {"write_function": 0.75, "software_work": 0.25})


def examples(per_kind: int, seed: int) -> list[Example]:
    return [
        Example("patterns", kind, messages, {})
        for kind in templates.kinds()
        for messages in templates.prompts(kind, per_kind, TEXTS, seed)
    ]


def test_a_classifier_learns_the_patterns_and_is_the_same_twice() -> None:
    table = outcomes.build([])
    weights = fit(examples(40, 1), table)
    again = fit(examples(40, 1), table)
    assert np.array_equal(weights.words.terms, again.words.terms)
    classifier = TaskClassifier(weights)
    fresh = examples(10, 2)
    right = [classifier.classify(e.messages).task == KINDS[e.kind] for e in fresh]
    assert sum(right) / len(right) > 0.8


def test_vectors_are_learned_beside_the_words_and_leave_them_as_they_are() -> None:
    """Vectors that tell the kind, of all prompts but those of one kind, which have none."""
    table = outcomes.build([])
    known, fresh = examples(20, 1), examples(10, 2)
    directions = np.random.default_rng(0).standard_normal((len(KINDS), SIZE)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    vectors = PromptVectors()
    for example in [*known, *fresh]:
        if (text := asked(example.messages)) is not None:
            kind = list(KINDS).index(example.kind)
            vectors.add(text, None if example.kind == "translate_text" else directions[kind])
    weights = fit(known, table, vectors)
    assert np.array_equal(weights.words.terms, fit(known, table).words.terms)
    assert weights.vector is not None
    classifier = TaskClassifier(weights)
    for example in fresh:
        vector = vectors.asked(example.messages)
        profile = classifier.classify(example.messages, vector=vector)
        assert profile.features.get("by_vector") == (None if vector is None else 1.0)
        assert profile.unfamiliarity == classifier.classify(example.messages).unfamiliarity
        if vector is not None:
            assert profile.task == KINDS[example.kind]
    assert {e.kind for e in fresh if vectors.asked(e.messages) is not None} == set(templates.kinds()) - {
        "translate_text"
    }


def test_vectors_survive_saving(tmp_path: Path) -> None:
    vectors = PromptVectors()
    unit = np.full(SIZE, SIZE**-0.5, np.float32)
    vectors.add("one", unit)
    vectors.add("refused", None)
    vectors.save(tmp_path / "vectors.npz")
    again = PromptVectors.load(tmp_path / "vectors.npz")
    np.testing.assert_allclose(again.of("one"), unit, rtol=1e-3)
    assert again.of("refused") is None
    assert len(again) == 2
    with pytest.raises(KeyError):
        again.of("never seen")


def test_patterns_are_deterministic_and_differ_by_seed() -> None:
    assert templates.prompts("label_text", 5, TEXTS, 1) == templates.prompts("label_text", 5, TEXTS, 1)
    assert templates.prompts("label_text", 5, TEXTS, 1) != templates.prompts("label_text", 5, TEXTS, 2)
    assert set(templates.kinds()) <= KINDS.keys()


def test_labels_fit_their_files() -> None:
    for letters, count in ((labels.SEED_TASKS, 175), (labels.USER_ORIENTED, 252), (labels.ARENA_HARD, 500)):
        found = labels.kinds(letters, count)
        assert all(kind is None or kind in KINDS for kind in found)
        with pytest.raises(ValueError, match="another version"):
            labels.kinds(letters, count + 1)


def outcome(source: str, kind: str, **scores: float) -> Example:
    return Example(source, kind, [], {outcomes.reference(source)[tier]: score for tier, score in scores.items()})


def test_the_table_counts_outcomes_and_fills_gaps_openly() -> None:
    gsm = [
        outcome(
            "zeroeval/gsm",
            "word_problem",
            small=float(i < 50),
            medium=float(i < 80),
            large=float(i < 85),
            xlarge=float(i < 95),
        )
        for i in range(98)
    ]
    mbpp = [outcome("llmrouter/mbpp", "write_function", medium=float(i < 49), xlarge=float(i < 73)) for i in range(98)]
    table = outcomes.build(gsm + mbpp)
    row = table.cells["word_problem"]
    assert [round(row[t].p, 2) for t in ("small", "medium", "large", "xlarge")] == [0.51, 0.81, 0.86, 0.96]
    assert all(cell.source == "measured" and cell.trials == 98 for cell in row.values())
    row = table.cells["write_function"]
    assert (row["small"].source, row["large"].source) == ("interpolated", "interpolated")
    assert row["small"].p < row["medium"].p < row["large"].p < row["xlarge"].p
    assert table.cells["label_text"]["small"].source == "prior"


def hard_or_easy(kind: str, complexity: float) -> TaskProfile:
    return TaskProfile(KINDS[kind], 1.0, complexity, True, {}, {}, {name: float(name == kind) for name in KINDS})


def test_complexity_counts_in_each_kind_by_its_own_slope() -> None:
    """Outcomes drawn by known slopes are found again; a kind with few of them keeps to the others."""
    rng = np.random.default_rng(3)
    slopes = {"trace_code": -6.0, "word_problem": -1.0, "recall_fact": 0.0}
    source = {"trace_code": "zeroeval/crux", "word_problem": "zeroeval/gsm", "recall_fact": "llmrouter/trivia_qa"}
    table = outcomes.build(
        [outcome(source[kind], kind, medium=float(i % 2), xlarge=float(i % 2)) for kind in slopes for i in range(4)]
    )
    few = outcome("llmrouter/mbpp", "write_function", medium=1.0)
    found, profiles = [few], [hard_or_easy("write_function", 0.6)]
    for kind, slope in slopes.items():
        for complexity in rng.uniform(0.0, 1.0, 1500):
            odds = math.log(table.kind(kind, "medium").mean / (1 - table.kind(kind, "medium").mean))
            p = 1 / (1 + math.exp(-(odds + slope * (complexity - 0.5))))
            found.append(outcome(source[kind], kind, medium=float(rng.random() < p)))
            profiles.append(hard_or_easy(kind, complexity))
    fitted = fit_slopes(table, found, [profiles, profiles])
    assert {kind: fitted[kind] for kind in slopes} == pytest.approx(slopes, abs=0.7)
    assert set(fitted) == set(slopes), "judgement is shifted by nothing"
    assert fit_slopes(table, [replace(one, scores={}) for one in found], [profiles]) == {}


def test_a_kind_with_few_outcomes_keeps_to_the_slope_of_all() -> None:
    rng = np.random.default_rng(4)
    both = [("zeroeval/gsm", "word_problem", 2000), ("zeroeval/crux", "trace_code", 3)]
    table = outcomes.build(
        [outcome(source, kind, medium=float(i % 2), xlarge=float(i % 2)) for source, kind, _ in both for i in range(4)]
    )
    found, profiles = [], []
    for source, kind, count in both:
        for complexity in rng.uniform(0.0, 1.0, count):
            p = 1 / (1 + math.exp(3 * (complexity - 0.5)))
            found.append(outcome(source, kind, medium=float(rng.random() < p)))
            profiles.append(hard_or_easy(kind, complexity))
    fitted = fit_slopes(table, found, [profiles])
    assert fitted["word_problem"] == pytest.approx(-3, abs=0.5)
    assert fitted["trace_code"] == pytest.approx(fitted["word_problem"], abs=1.0)


def test_the_table_never_falls_with_size() -> None:
    worse = [outcome("llmrouter/trivia_qa", "recall_fact", medium=1.0, xlarge=0.0) for _ in range(20)]
    row = outcomes.build(worse).cells["recall_fact"]
    assert row["medium"].p <= row["large"].p <= row["xlarge"].p


def test_apgr_of_known_orders() -> None:
    weak, strong = [0.0] * 50 + [1.0] * 50, [1.0] * 100
    perfect = evaluate.deferral([1 - w for w in weak], weak, strong)
    assert perfect.apgr == pytest.approx(0.75, abs=0.01)
    assert (perfect.cpt50, perfect.cpt80) == pytest.approx((0.25, 0.40), abs=0.01)
    assert evaluate.deferral(weak, weak, strong).apgr == pytest.approx(0.25, abs=0.01)
    constant = [evaluate.deferral([0.0] * 100, weak, strong, seed).apgr for seed in range(40)]
    assert sum(constant) / 40 == pytest.approx(0.5, abs=0.02)
    with pytest.raises(ValueError, match="not better"):
        evaluate.deferral([0.0, 1.0], [1.0, 1.0], [1.0, 0.0])


def test_calibration_error_of_known_cases() -> None:
    assert evaluate.calibration_error([0.75] * 4, [True, True, True, False]) == pytest.approx(0)
    assert evaluate.calibration_error([1.0] * 4, [True, True, False, False]) == pytest.approx(0.5)


def test_success_is_calibrated_against_the_reference_models() -> None:
    answers = [outcome("zeroeval/gsm", "word_problem", small=float(i < 3), medium=1.0) for i in range(4)]
    held = [evaluate.HeldOut(e, PROFILE, dict.fromkeys(TIERS, 0.75)) for e in answers]
    assert evaluate.success_calibration(held, ["small"])[0] == pytest.approx(0)
    assert evaluate.success_calibration(held, ["medium"])[0] == pytest.approx(0.25)
    assert evaluate.success_calibration(held)[1] == 8


def test_labels_are_shared_out_by_kind() -> None:
    answers = [outcome("llmrouter/mbpp", "write_function", medium=1.0, xlarge=0.0) for _ in range(30)]
    counts = evaluate._labelled(answers, [PROFILE] * 30, 20, np.random.default_rng(1))
    assert counts["write_function", "medium"] == pytest.approx((15, 0))
    assert counts["software_work", "xlarge"] == pytest.approx((0, 5))


def test_disguises_leave_the_shape_and_take_the_words() -> None:
    plain = [[{"role": "user", "content": "Translate this, please: good morning!"}] for _ in range(6)]
    strange = foreign.disguises(plain)
    assert strange == foreign.disguises(plain)
    for messages in strange:
        text = str(messages[0]["content"])
        assert len(text) == len(str(plain[0][0]["content"]))
        assert text.endswith("!")
        assert "Translate" not in text or "morning" not in text
    assert any(not str(messages[0]["content"]).isascii() for messages in strange)


def test_rank_correlation_of_known_cases() -> None:
    assert evaluate.rank_correlation([1, 2, 3], [10, 20, 90]) == pytest.approx(1)
    assert evaluate.rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    assert not math.isnan(evaluate.rank_correlation([1, 1, 2], [1, 2, 2]))
