"""Which text's vector the classifier may look at, and what it makes of one."""

from __future__ import annotations

import numpy as np
import pytest

from tiers.task import TaskClassifier
from tiers.vector import SIZE, asked, inputs_of


def said(*texts: str, role: str = "user") -> list[dict[str, str]]:
    return [{"role": role, "content": text} for text in texts]


def test_the_last_message_of_the_user_is_asked_as_it_is() -> None:
    text = "  Could you tell me what the capital of Peru is? "
    messages = [*said("Be brief.", role="system"), *said("Hello.", text), *said("Lima", role="assistant")]
    assert asked(messages) == text
    parts = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert asked(parts) == "one\ntwo"


@pytest.mark.parametrize(
    ("text", "bare"),
    [
        ("", None),
        (" \n", None),
        ("What is 2 + 2? Let's think step by step.", "What is 2 + 2?"),
        ("I'll tip you $500 for a perfect answer. What is 2 + 2?", "for a perfect answer. What is 2 + 2?"),
        ("What is 2 + 2?\n" * 50, "What is 2 + 2?"),
        ("What is 2 + 2?\n" * 500, "What is 2 + 2?"),
        ("".join(f"The a{number}x b{number}y was c{number}z. " for number in range(80)), None),
    ],
)
def test_what_begs_is_taken_out_and_what_is_long_is_judged_by_words(text: str, bare: str | None) -> None:
    assert asked(said(text)) == bare


def test_nobody_asks() -> None:
    assert asked(said("Be brief.", role="system")) is None


def test_a_vector_of_another_model_is_refused() -> None:
    assert inputs_of(np.ones(SIZE, np.float32)).shape == (SIZE,)
    with pytest.raises(ValueError, match="has 384 numbers"):
        inputs_of(np.ones(512, np.float32))


def test_the_shipped_weights_look_at_a_vector_and_say_so() -> None:
    classifier = TaskClassifier.load()
    messages = said("Kannst du mir helfen?")
    by_words = classifier.classify(messages)
    unit = np.zeros(SIZE, np.float32)
    unit[0] = 1.0
    by_vector = classifier.classify(messages, vector=unit)
    assert "by_vector" not in by_words.features
    assert by_vector.features["by_vector"] == 1.0
    assert by_vector.kinds != by_words.kinds
    assert by_vector.unfamiliarity == by_words.unfamiliarity
    assert sum(by_vector.kinds.values()) == pytest.approx(1.0)
