"""One form for the ways of asking the same, and what it buys with the real embedder."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.embedding.embedder import Embedder
from cache.words.asking import asked_form
from cache.words.guards import verify

FRANCE = "What is the capital of France?"


@pytest.mark.parametrize(
    ("text", "form"),
    [
        (FRANCE, FRANCE),
        ("what's the capital of France", "what is the capital of France?"),
        ("whats the capital of France", "what is the capital of France?"),
        ("What’s the capital of France?", FRANCE),
        ("Tell me the capital of France.", FRANCE),
        ("Please tell me the capital of France", FRANCE),
        ("Could you tell me what the capital of France is?", "what is the capital of France?"),
        ("Hi, what is the capital of France, please?", "what is the capital of France?"),
        ("I'd like to know how to fly", "how to fly?"),
        ("Can you tell me how I get to Rome, thanks", "how I get to Rome?"),
        ("is pi 3.14", "is pi 3.14?"),
    ],
)
def test_one_form(text: str, form: str) -> None:
    assert asked_form(text) == form


@pytest.mark.parametrize(
    "text",
    [
        "Tell me about France.",
        "Tell me if it rains",
        "My card is lost.",
        "Book a table, please",
        "How do I pay? I lost my card.",
        "What is\nthis",
        "",
        "法国的首都是哪里",
    ],
)
def test_what_asks_nothing_or_more_than_one_thing_stays(text: str) -> None:
    assert asked_form(text) == text


pieces = st.sampled_from(
    [
        *("what's", "whats", "tell me", "could you tell me", "do you know", "I'd like to know", "how", "is", "the"),
        *("capital", "please", "hi,", "thanks", ",", ".", "?", "!"),
    ]
)


@given(st.lists(pieces, max_size=8).map(" ".join))
def test_a_form_keeps_the_words_behind_the_frame(text: str) -> None:
    form = asked_form(text)
    assert form.count("capital") == text.count("capital")
    assert form == text or form.endswith("?")


@pytest.mark.parametrize(
    "asked",
    [
        "what's the capital of France",
        "whats the capital of france",
        "Tell me the capital city of France.",
        "Could you tell me what the capital of France is?",
        "please tell me the capital of France",
        "I would like to know the capital of France",
        "Do you know what the capital of France is",
    ],
)
def test_common_rewordings_are_found(embedder: Embedder, asked: str) -> None:
    first, second = embedder.embed([asked_form(asked), asked_form(FRANCE)])
    assert verify(asked, FRANCE, float(first @ second), 0.95).accepted
