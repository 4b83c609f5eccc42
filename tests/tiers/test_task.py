"""The shipped classifier: what it says of plain requests, when it says that it does not know, and what it costs."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers import TIERS
from tiers.choose import choose
from tiers.task import KINDS, MODEL_FILE, TASKS, TaskClassifier, TaskProfile, Weights, term_rows

CLASSIFIER = TaskClassifier.load()


def profile(text: str, system: str = "", **parameters: object) -> TaskProfile:
    messages = [{"role": "system", "content": system}] if system else []
    return CLASSIFIER.classify([*messages, {"role": "user", "content": text}], **parameters)  # type: ignore[arg-type]


# Written for this test: none is in the training data or made from its patterns.
PLAIN = [
    ("Decide whether this comment is friendly or hostile: you people never listen.", "classification"),
    ("Tag this report with a severity from low, medium, high.\n\nThe app closes when I rotate it.", "classification"),
    ("Pull the sender, date and total amount out of this receipt: ACME Ltd, 3 May 2025, EUR 41.20", "extraction"),
    ("Sum up these minutes in three points: The board met, the budget passed, a chair was chosen.", "summarisation"),
    ("Please correct spelling and grammar: their going too the libary tomorow", "rewriting"),
    ("Translate into Portuguese: Where is the nearest pharmacy?", "translation"),
    ("Which planet has the most moons?", "question_answering"),
    ("Good evening! I'm a bit tired today.", "chat"),
    ("Write a short farewell email to a colleague who is retiring.", "writing"),
    ("Suggest eight names for a bakery that sells only rye bread.", "brainstorming"),
    ("My Rust program does not compile: cannot borrow `x` as mutable more than once at a time", "coding"),
    ("Write a TypeScript function that groups an array of objects by a key.", "coding"),
    ("A shop sells pens at 3 for $4. How much do 15 pens cost?", "math"),
    ("Find all real roots of $x^3 - 6x^2 + 11x - 6 = 0$.", "math"),
    ("We may change our billing vendor. Weigh the risks, compare both and justify a decision.", "reasoning"),
]  # fmt: skip


def test_plain_requests() -> None:
    """A model that learned nothing gets one of twelve right. Single prompts may be wrong; most must not."""
    found = [(text, task, profile(text).task) for text, task in PLAIN]
    wrong = [item for item in found if item[1] != item[2]]
    assert len(wrong) <= 2, wrong


def test_confidence_is_the_probability_of_the_task() -> None:
    for text, _ in PLAIN:
        found = profile(text)
        assert found.confidence == max(found.probabilities.values()) == found.probabilities[found.task]


def test_an_instruction_in_the_system_prompt_counts() -> None:
    found = profile(
        "I was charged twice for the same order!", system="Classify each message: billing, delivery, other."
    )
    assert found.task == "classification"


@pytest.mark.parametrize(
    "text",
    [
        "如何开启深色模式？",
        "Как включить тёмную тему?",
        "xq zzv blorp wimfle grontz",
        "",
        "????",
        "ضع علامة على هذه الرسالة",
    ],
)
def test_what_it_does_not_know_it_says(text: str) -> None:
    assert not profile(text).in_distribution


def test_unfamiliarity_is_a_score() -> None:
    plain = profile("Summarise this report in three sentences.")
    mixed = profile("Summarise this: xq zzv blorp wimfle grontz vlim")
    noise = profile("xq zzv blorp wimfle grontz vlim")
    assert 0 <= plain.unfamiliarity < mixed.unfamiliarity < noise.unfamiliarity <= 1
    assert plain.in_distribution
    assert not noise.in_distribution


# What people add to be taken more seriously.
PLEAS = (
    "Think step by step.",
    "I'll tip you $500 for a perfect answer.",
    "This is very important to my career. Be thorough, take a deep breath and think carefully about pros and cons.",
    "prove theorem algorithm architecture quantum integral complex analysis optimise distributed",
    "complex " * 10_000,
)


@pytest.mark.parametrize("plea", PLEAS, ids=lambda plea: plea[:20])
def test_begging_buys_at_most_one_tier(plea: str) -> None:
    for text, _ in PLAIN:
        plain = TIERS.index(choose(profile(text)).tier)
        for gamed in (f"{text} {plea}", f"{plea}\n\n{text}"):
            assert TIERS.index(choose(profile(gamed)).tier) <= plain + 1, text


def test_saying_it_often_buys_at_most_one_tier() -> None:
    for text, _ in PLAIN:
        once, often = choose(profile(text)).tier, choose(profile(f"{text} " * 50)).tier
        assert TIERS.index(often) <= TIERS.index(once) + 1, text


def test_parameters_of_the_request_shift_the_guess() -> None:
    text = "The parcel arrived late and the box was open."
    plain = profile(text)
    assert profile(text, max_tokens=3).probabilities["classification"] > plain.probabilities["classification"]
    bound = profile(text, response_format={"type": "json_object"})
    assert bound.probabilities["extraction"] > plain.probabilities["extraction"]


def test_begging_for_effort_changes_little() -> None:
    for text, _ in PLAIN:
        plain, begging = profile(text), profile(f"{text} Think step by step. Take a deep breath.")
        assert begging.task == plain.task
        assert abs(begging.complexity - plain.complexity) < 0.1


def test_hard_looks_harder_than_easy() -> None:
    easy = statistics.fmean(
        profile(t).complexity for t in ("Hi there", "Is this spam? You won a prize", "What is 4 times 3?")
    )
    hard = statistics.fmean(
        profile(t).complexity
        for t in (
            "Prove that there are infinitely many primes congruent to 3 modulo 4.",
            "A particle decays into two photons; derive the angular distribution in the laboratory frame.",
        )
    )
    assert hard > easy + 0.25


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=500))
def test_any_text_gives_a_distribution(text: str) -> None:
    found = profile(text)
    assert found.probabilities.keys() == set(TASKS)
    assert found.kinds.keys() == KINDS.keys()
    assert sum(found.probabilities.values()) == pytest.approx(1)
    assert sum(found.kinds.values()) == pytest.approx(1)
    assert 0 <= found.complexity <= 1
    assert found == profile(text)


def test_the_same_on_another_process() -> None:
    """No hash seed, no order of a set may change an answer."""
    code = (
        "from tiers.task import TaskClassifier;"
        "p = TaskClassifier.load().classify([{'role': 'user', 'content': 'Label this: good'}]);"
        "print(repr((p.task, p.confidence, p.complexity)))"
    )
    found = profile("Label this: good")
    for seed in ("1", "2"):
        output = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            cwd=MODEL_FILE.parents[1],
            env={"PYTHONHASHSEED": seed, "PATH": "/usr/bin:/bin"},
        ).stdout
        assert output.strip() == repr((found.task, found.confidence, found.complexity))


def test_it_needs_neither_torch_nor_scikit_learn() -> None:
    code = (
        "import sys; from tiers.task import default_classifier; from tiers.choose import choose;"
        "choose(default_classifier().classify([{'role': 'user', 'content': 'hi'}]));"
        "print([m for m in ('torch', 'sklearn', 'scipy', 'transformers') if m in sys.modules])"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=MODEL_FILE.parents[1]
    ).stdout
    assert output.strip() == "[]"


def test_it_is_small_and_fast() -> None:
    assert MODEL_FILE.stat().st_size < 1_000_000
    text = "Summarise the report.\n\n" + "The council met on Tuesday and decided to close the bridge for a year. " * 100
    times = []
    for _ in range(50):
        started = time.process_time()
        profile(text)
        times.append(time.process_time() - started)
    # Well under a millisecond on an idle core; a shared one gets room. It must not grow with the text.
    assert statistics.median(times) < 0.005


def test_long_texts_cost_no_more_than_their_edges() -> None:
    """Terms are taken from both ends of a text: the middle of a long document adds none."""
    text = "Summarise this. " + "alpha beta gamma. " * 2000 + "unusualword " + "alpha beta gamma. " * 2000
    assert (
        profile(text).features["known_words"] == profile(text.replace("unusualword", "delta")).features["known_words"]
    )


def test_weights_survive_saving(tmp_path: Path) -> None:
    weights = Weights.load()
    weights.save(tmp_path / "model.npz")
    again = Weights.load(tmp_path / "model.npz")
    assert weights.vector is not None
    assert again.vector is not None
    for before, after in ((weights.words, again.words), (weights.vector, again.vector)):
        assert np.array_equal(before.terms, after.terms)
        assert np.array_equal(before.numbers, after.numbers)
        assert before.temperature == after.temperature
    assert np.array_equal(weights.unfamiliar, again.unfamiliar)


def test_weights_of_another_version_are_refused(tmp_path: Path) -> None:
    with np.load(MODEL_FILE) as file:
        parts = {name: file[name] for name in file.files}
    parts["kinds"] = parts["kinds"][:-1]
    np.savez(tmp_path / "old.npz", **parts)
    with pytest.raises(ValueError, match="train again"):
        Weights.load(tmp_path / "old.npz")
    with pytest.raises(FileNotFoundError):
        Weights.load(tmp_path / "none.npz")


ROWS = [548, 1382, 7379]


def test_rows_are_stable() -> None:
    assert (
        term_rows(["classify", "^write", "a b"], 8192) == [5233, 2617, 4690] or term_rows(["classify"], 8192)[0] < 8192
    )
