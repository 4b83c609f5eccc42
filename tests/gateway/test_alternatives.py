"""What `tierline explain` says of each tier: conversations that stay elsewhere, answers that came after others."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ledger.alternatives import alternatives

RATES = {"rates": [10**9] * 5, "price": "v@1"}
LOWER = {"small": 0.5, "medium": 0.8964, "large": 0.91, "xlarge": 0.93}


def row(tier: str, outcome: str = "success") -> dict[str, Any]:
    tokens = ("input_tokens", "cached_input_tokens", "cache_write_tokens", "output_tokens", "reasoning_tokens")
    return {"tier": tier, "outcome": outcome, "usage_source": "backend"} | dict.fromkeys(tokens, 0)


def told(tier: str, rows: list[dict[str, Any]], **features: Any) -> dict[str, str]:
    """By tier, its part in the answer and why it has it."""
    models = [{"model": f"m-{tier}", "tier": tier, **RATES} for tier in LOWER]
    decision = {"tier": tier, "candidates": [], "beside": models, "features": features}
    return {one["tier"]: f"{one['role']}: {one['why']}" for one in alternatives(decision, rows)}


AUTO = {"p_success": LOWER, "p_success_lower": LOWER, "quality_target": 0.9}


@pytest.mark.parametrize(
    ("tier", "wanted", "outcome", "expected"),
    [
        (
            "medium", "large", "kept",
            {"medium": "answered: where the conversation is",
             "large": "None: the smallest that is good enough, but the conversation stays on 'medium'",
             "xlarge": "None: good enough, and larger than it takes"},
        ),
        (
            "xlarge", "large", "kept",
            {"medium": "None: may fail: at least 0.896 is below the target 0.90",
             "large": "None: the smallest that is good enough, but the conversation stays on 'xlarge'",
             "xlarge": "answered: where the conversation is"},
        ),
        (
            "large", "small", "downgraded",
            {"small": "None: decided on, but the conversation goes to 'large'",
             "large": "answered: where the conversation goes"},
        ),
        (
            "large", "large", "upgraded",
            {"large": "answered: the smallest that is good enough"},
        ),
    ],
)  # fmt: skip
def test_a_conversation_that_stays_elsewhere(tier: str, wanted: str, outcome: str, expected: dict[str, str]) -> None:
    found = told(tier, [row(tier)], session={"wanted": wanted, "outcome": outcome}, **AUTO)
    assert {name: found[name] for name in expected} == expected


def test_answers_after_others() -> None:
    escalated = told("small", [row("small", "escalated"), row("large")])
    assert escalated["large"] == "answered: escalated to"
    assert escalated["medium"] == "None: not decided on"
    assert told("small", [row("small", "escalated"), row("large")], **AUTO)["large"] == "answered: escalated to"
    assert told("small", [row("small", "backend_error"), row("large")])["large"] == "answered: fallen back to"
    assert told("small", [row("large", "cache_hit")])["large"] == "answered: not decided on"
