"""What is on record of a request is enough to decide it again, and holds nothing that anybody wrote."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from policies.evaluate import decide
from policies.facts import Facts
from policies.load import load
from policies.recorded import facts_of, recorded
from tests.policies.policy_files import policy, write
from tiers.task import default_classifier

TEXTS = (
    "Hi, how are you today?",
    "Classify the sentiment of this review as positive or negative: I loved it.",
    "Prove that there are infinitely many primes.",
    "Write a Python function that merges two sorted lists.",
    "zxqv wkjh qqpl mnbvc",
)
FACTS = [
    Facts(
        prompt_tokens=17 * number, max_tokens=number, stream=bool(number % 2), temperature=0.1 + 0.2, team="support",
        tags=("priority=high",), budget_used=1 / 3, user_text=text, system_text="Be kind to Alice.",
        profile=default_classifier().classify([{"role": "user", "content": text}], tools=number == 3),
        pinned_tier="large" if number == 4 else None,
    )
    for number, text in enumerate(TEXTS)
]  # fmt: skip


@pytest.mark.parametrize("facts", FACTS, ids=TEXTS)
def test_a_record_decides_as_the_request_did(tmp_path: Path, facts: Facts) -> None:
    routes = "routes:\n  - {when: 'complexity < 0.2', tier: small}\n  - {tier: auto, quality_target: 0.75}\n"
    known = load(write(tmp_path, p=policy("p", routes))).named("p")
    again = facts_of(json.loads(msgspec.json.encode(recorded(facts))))
    assert again.profile is not None
    assert facts.profile is not None
    assert (again.profile.kinds, again.prompt_tokens) == (
        {kind: weight for kind, weight in facts.profile.kinds.items() if weight >= 0.005}, facts.prompt_tokens,
    )  # fmt: skip
    assert decide(known, again) == decide(known, facts)


def test_texts_stay_out(tmp_path: Path) -> None:
    for facts in FACTS:
        written = msgspec.json.encode(recorded(facts)).decode()
        assert "Alice" not in written
        assert facts.user_text not in written
        assert replace(facts_of(json.loads(written)), profile=None) == replace(
            facts, profile=None, user_text="", system_text=""
        )


def test_without_a_profile(tmp_path: Path) -> None:
    plain = Facts(prompt_tokens=3, model="auto")
    assert facts_of(json.loads(msgspec.json.encode(recorded(plain)))) == plain
