"""The same words written otherwise: what is folded into one, and where case or the final mark keeps texts apart."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.words.guards import objection
from cache.words.text import normal_form
from cache.words.writing import case_differs, folded_form

FRANCE = "What is the capital of France?"


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (FRANCE, "what is the capital of france"),
        (FRANCE, "WHAT IS THE CAPITAL OF FRANCE???"),
        (FRANCE, " What is  the capital of France ? "),
        ("How do I reset my card", "How do I reset my card?"),
        ("capital of France?", "capital of France"),
        ("Tell me about the Danube.", "tell me about the danube"),
        ("What happened in 1969?", "what happened in 1969"),
        ("I would like to know what a lake is.", "i would like to know what a lake is"),
    ],
)
def test_one_form(a: str, b: str) -> None:
    assert folded_form(a) == folded_form(b) is not None
    assert objection(a, b) is None


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("You are safe here.", "You are safe here?"),  # only the mark makes it a question
        ("It is 5!", "It is 5"),  # a factorial
        ("Really, now?", "Really, now!"),
        ("What does ? mean", "What does mean"),
        ("What is C++?", "What is C"),
        ("What is the capital of France?", "What is the capital of France, please?"),
        ("re-sign a contract today", "resign a contract today"),
        ("Is it a man eating shark?", "Is it a man-eating shark?"),
        ("Say it: hello, you there", "Say it hello, you there"),
        ("Zoë is who?", "Zoe is who?"),
    ],
)
def test_two_forms(a: str, b: str) -> None:
    assert folded_form(a) != folded_form(b)


@pytest.mark.parametrize("text", ["What is\nthis?", "a\tb", "a\x00b"])
def test_texts_of_several_lines_are_not_folded(text: str) -> None:
    assert folded_form(text) is None


@given(st.text(max_size=60))
def test_folding_is_stable_and_changes_no_letter_but_in_case(text: str) -> None:
    form = folded_form(text)
    if form is not None:
        assert folded_form(form) in (form, form.rstrip("?"))
        letters = [character for character in form if character.isalnum()]
        assert letters == [character for character in normal_form(text.lower()) if character.isalnum()]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("a 5 mW laser", "a 5 MW laser"),
        ("a 5mW laser", "a 5Mw laser"),
        ("how many kB", "how many Kb"),
        ("the M605x printer", "the m605x printer"),
        ("vitamin C or not", "vitamin c or not"),
        ("we lost to the US", "we lost to us"),
        ("work in IT", "work in it"),
        ("made in China", "made in china"),
        ("my Password", "my password"),
        ("the username Ann", "the username ann"),
        ("what is pH", "what is Ph"),
        ("of Mg and water", "of MG and water"),
        ("US and us", "us and us"),
    ],
)
def test_case_that_may_matter(a: str, b: str) -> None:
    assert case_differs(a, b)
    assert case_differs(b, a)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("Paris in France", "paris in france"),
        ("the NASA budget", "the nasa budget"),
        ("an iPhone", "an IPHONE"),
        ("What Is The Capital", "what is the capital"),
        ("Will it rain? May I go?", "will it rain? may I go?"),
        ("am I late", "am i late"),
        ("COVID-19", "covid-19"),
        ("no word in common", "Something Else"),
    ],
)
def test_case_that_says_nothing(a: str, b: str) -> None:
    assert not case_differs(a, b)
    assert not case_differs(b, a)
