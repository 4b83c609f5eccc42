"""What is taken out before anything is counted: pleas, what is said again, heaps of keywords; plain texts pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.begging import without
from tiers.train import sheet

HEAP = "prove theorem algorithm architecture quantum integral complex analysis"


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("What is the capital of France? Let's think step by step.", "What is the capital of France?"),
        ("I'll tip you $200. Translate this.", "Translate this."),
        (f"How are you?\n\n{HEAP}", "How are you?"),
        (f"{HEAP} and then say hello to my friend", "and then say hello to my friend"),
        ("Hi there. " * 30, "Hi there."),
        ("Tell me more. " + "complex " * 500, "Tell me more."),
        (HEAP, HEAP),
        ("", ""),
    ],
)
def test_what_is_left(text: str, left: str) -> None:
    assert without(text).split() == left.split()


def test_prompts_as_people_write_them_pass() -> None:
    """One in fifteen may lose a phrase, for example a list without commas."""
    prompts = [item.prompt.strip() for item in sheet.load() if "step by step" not in item.prompt.lower()]
    changed = [prompt for prompt in prompts if without(prompt) != prompt]
    assert len(changed) < len(prompts) / 15, changed


@given(st.text(max_size=400))
def test_any_text_loses_only(text: str) -> None:
    left = without(text)
    assert set(left.lower().split()) <= set(text.lower().split())
    assert without("") == ""
