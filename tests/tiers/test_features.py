"""Features: only what people wrote counts, everything is bounded, token estimates are close enough."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiers.features import TRAINED, estimate_prompt_tokens, estimate_tokens, extract, has_images, text_of


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def test_what_models_and_tools_said_does_not_count() -> None:
    plain = extract(user("Translate this to French"))
    after = extract(
        [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "def f(x): return x ** 2  # prove that P = NP"},
            {"role": "tool", "content": "SELECT * FROM users;", "tool_call_id": "1"},
            *user("Translate this to French"),
        ]
    )
    assert plain.terms == after.terms
    assert {name: plain.values[name] for name in TRAINED} == {name: after.values[name] for name in TRAINED}
    assert after.values["turns"] == 0.25


@pytest.mark.parametrize(
    "plea",
    [
        "Think step by step.",
        "Let's think step-by-step.",
        "Take a deep breath. This is very important to my career.",
        "After careful thought, put your final answer in \\boxed{}.",
        "I will tip you $200.",
    ],
)
def test_pleas_for_effort_are_not_seen(plea: str) -> None:
    with_plea = extract(user(f"What is the capital of France? {plea}"))
    without = extract(user("What is the capital of France?"))
    assert set(with_plea.terms) - set(without.terms) <= {".", "capital of france ?"}
    assert set(with_plea.words) <= set(without.words)


def test_repetition_buys_nothing() -> None:
    once, often = extract(user("prove the theorem ")), extract(user("prove the theorem " * 30))
    assert set(often.terms) == set(once.terms) | {"theorem prove"}
    assert all(0 <= value <= 1 for value in often.values.values())


def test_parts_and_images() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x"}}],
        }
    ]
    assert text_of(messages[0]) == "What is this?"
    assert has_images(messages)
    assert not has_images(user("no image"))
    assert "what" in extract(messages).words


def test_the_requests_own_parameters() -> None:
    values = extract(user("x"), tools=True, response_format={"type": "json_schema"}, max_tokens=4).values
    assert (values["tools"], values["wants_json"], values["short_answer"]) == (1, 1, 1)
    values = extract(user("x"), response_format={"type": "text"}, max_tokens=500).values
    assert (values["tools"], values["wants_json"], values["short_answer"]) == (0, 0, 0)


_MESSAGES = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool"]),
            "content": st.one_of(
                st.none(),
                st.text(max_size=300),
                st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text()})),
            ),
        }
    ),
    max_size=5,
)


@settings(max_examples=200, deadline=None)
@given(_MESSAGES)
def test_any_conversation_has_bounded_features(messages: list[dict[str, Any]]) -> None:
    found = extract(messages)
    assert all(0 <= value <= 1 for value in found.values.values())
    assert len(found.vector()) == len(TRAINED)
    assert len(set(found.terms)) == len(found.terms)
    assert found.prompt_tokens >= 4 * len(messages)


@pytest.mark.parametrize("text", ["", "\ud800", "\0", "a" * 100_000, "é" * 5000, "\n" * 5000, "step " * 20_000])
def test_odd_texts(text: str) -> None:
    started = time.process_time()
    extract(user(text))
    assert time.process_time() - started < 0.5


@given(st.text(), st.text())
def test_token_estimates_grow_with_the_text(one: str, other: str) -> None:
    assert estimate_tokens("") == 0
    assert estimate_tokens(one + other) >= max(estimate_tokens(one), estimate_tokens(other)) - 1
    assert (estimate_tokens(one) == 0) == (one == "")


@given(st.text(alphabet=st.sampled_from(" \t\n\r\v\u00a0a"), max_size=400), st.integers(1, 50))
def test_no_text_hides_from_the_estimate(text: str, times: int) -> None:
    """Token for token, what is sent to fill the context may be all white space."""
    assert estimate_tokens(text * times) >= len(text) * times / 70 - 1


@pytest.mark.parametrize("text", [" " * 30_000_000, "\t" * 1_000_000, "\r" * 1_000_000, " \t" * 500_000])
def test_white_space_counts(text: str) -> None:
    assert estimate_tokens(text) >= len(text) / 80


ENGLISH = "The committee met on Tuesday to discuss the budget, and after two hours it agreed to close the old bridge. "
CODE = "def add(a, b):\n    total = a + b\n    if total > 100:\n        raise ValueError('too large')\n    return 0\n"
NUMBERS = "Revenue 2024: 1,234,567.89 USD; 2025: 1,345,678.90 USD. "


@pytest.mark.slow
def test_estimates_are_near_a_real_tokenizer(smollm2_path: Path) -> None:
    """Within a quarter of SmolLM2's own vocabulary, which is smaller than most: for others the estimate errs high."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name)
    for text in (ENGLISH * 5, CODE * 5, NUMBERS * 5):
        real = len(tokenizer(text)["input_ids"])
        assert 0.75 < estimate_tokens(text) / real < 1.25
    for text in (" " * 8000, "\t" * 8000):
        assert 1 < estimate_tokens(text) / len(tokenizer(text)["input_ids"]) <= 5


def test_other_scripts_cost_more_per_character() -> None:
    assert estimate_tokens("今天天气很好我们去公园散步吧") > estimate_tokens("today is nice")
    assert estimate_prompt_tokens(user("hello") * 3) == 3 * 4 + estimate_tokens("hello" * 3)
