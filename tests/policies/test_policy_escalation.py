"""What a policy says about checking answers: which rule's counts, cascades, streams, and curves that are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.evaluate import Decision, decide
from policies.explain import explain
from policies.facts import Facts
from policies.load import PolicySet, Subject, load
from policies.schema.escalation import PLAIN_CHECKS
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import policy, write

ALL = ("small", "medium", "large", "xlarge")
GENERAL = "escalate: {when: [refusal], at_most: 2}\n"


def loaded(folder: Path, body: str, **options: object) -> PolicySet:
    return load(write(folder, p=policy("p", body)), ALL, **options)  # type: ignore[arg-type]


def decided(folder: Path, body: str, facts: Facts = Facts()) -> Decision:
    return decide(loaded(folder, body).named("p"), facts)


def test_a_rule_has_the_policys_checks_unless_it_has_its_own(tmp_path: Path) -> None:
    routes = (
        "routes:\n"
        "  - {when: messages == 2, tier: small, escalate: {when: [empty]}}\n"
        "  - {when: messages == 3, tier: small, escalate: {when: []}}\n"
        "  - {when: messages == 4, tier: small}\n"
    )
    found = {n: decided(tmp_path, GENERAL + routes, Facts(messages=n)).escalate for n in (1, 2, 3, 4)}
    assert found[1] == found[4]
    assert found[1] is not None
    assert (found[1].when, found[1].at_most) == (("refusal",), 2)
    assert found[2] is not None
    assert (found[2].when, found[2].at_most) == (("empty",), 1)
    assert found[3] is None


def test_what_the_client_chose_and_what_is_out_of_money_is_not_checked(tmp_path: Path) -> None:
    body = GENERAL + "budget: {monthly_usd: 1, when_exhausted: downgrade}\n"
    for facts in (Facts(pinned_tier="small"), Facts(model="mine"), Facts(budget_used=1.0)):
        assert decided(tmp_path, body, facts).escalate is None


def test_a_stream_is_checked_only_where_it_may_be_held_back(tmp_path: Path) -> None:
    for streams, checked in (("no", False), ("buffer", True)):
        body = f"escalate: {{when: [refusal], streams: {streams}}}\n"
        assert (decided(tmp_path, body, Facts(stream=True)).escalate is not None) is checked


def test_a_cascade_begins_at_its_smallest_tier_and_names_the_others(tmp_path: Path) -> None:
    body = "routes:\n  - cascade: [small, medium, large]\n"
    found = decided(tmp_path, body)
    assert (found.tier, found.requested_tier) == ("small", "small")
    assert found.escalate is not None
    assert (found.escalate.when, found.escalate.to, found.escalate.at_most) == (
        PLAIN_CHECKS, ("small", "medium", "large"), 2,
    )  # fmt: skip
    assert found.escalate.streams == "buffer"
    assert decided(tmp_path, body, Facts(stream=True)).tier == "small"
    assert decided(tmp_path, GENERAL + body).escalate.when == ("refusal",)  # type: ignore[union-attr]


def test_a_cascade_that_cannot_be_checked_is_answered_by_its_last_tier(tmp_path: Path) -> None:
    body = "routes:\n  - {cascade: [small, large], escalate: {when: [empty], streams: no}}\n"
    found = decided(tmp_path, body, Facts(stream=True))
    assert (found.tier, found.escalate) == ("large", None)
    assert "not checked" in found.why
    assert decided(tmp_path, body).tier == "small"


def test_a_cascade_over_tiers_without_a_model_begins_at_the_first_that_has_one(tmp_path: Path) -> None:
    text = policy("p", "routes:\n  - cascade: [small, medium, large]\n")
    found = decide(load(write(tmp_path, p=text), ["medium", "large"]).named("p"), Facts())
    assert (found.tier, found.requested_tier, found.fallback_reason) == ("medium", "medium", None)


def test_it_is_explained(tmp_path: Path) -> None:
    found = explain(loaded(tmp_path, "routes:\n  - {name: labels, cascade: [small, large]}\n"), Subject(), Facts())
    assert "small > large" in found.as_text()
    assert "checked  empty, truncated" in found.as_text()
    assert found.as_json()["settings"]["escalate"]["when"] == list(PLAIN_CHECKS)


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    found = loaded(tmp_path, "escalate: {when: [empty], confidence: 0.9}\n")
    assert [problem.message for problem in found.warnings if "confidence" in problem.message]


@pytest.mark.parametrize(
    ("body", "uncalibrated", "line"),
    [
        ("escalate: {when: [low_confidence]}\n", {"tiny": "medium"}, 4),
        ("default: large\nescalate: {when: [low_confidence]}\n", {"tiny": "medium"}, None),
        ("escalate: {when: [low_confidence], mean_logprob: -0.5}\n", {"tiny": "medium"}, None),
        ("escalate: {when: [refusal]}\n", {"tiny": "medium"}, None),
        ("escalate: {when: [low_confidence]}\n", {}, None),
        ("routes:\n  - {model: tiny, escalate: {when: [low_confidence]}}\n", {"tiny": "small"}, 5),
        ("routes:\n  - {model: other, escalate: {when: [low_confidence]}}\n", {"tiny": "small"}, None),
        ("routes:\n  - {cascade: [small, large], escalate: {when: [low_confidence]}}\n", {"tiny": "small"}, 5),
        ("routes:\n  - {cascade: [small, large], escalate: {when: [low_confidence]}}\n", {"tiny": "large"}, None),
        ("routes:\n  - {tier: auto, escalate: {when: [low_confidence]}}\n", {"tiny": "large"}, 5),
        ("routes:\n  - {tier: auto, escalate: {when: [low_confidence]}}\n", {"tiny": "xlarge"}, None),
        ("routes:\n  - {tier: small}\nescalate: {when: [low_confidence], to: [large]}\n", {"tiny": "small"}, 6),
    ],
)
def test_a_confidence_needs_a_curve_of_each_model_that_may_answer_first(
    tmp_path: Path, body: str, uncalibrated: dict[str, str], line: int | None
) -> None:
    if line is None:
        loaded(tmp_path, body, uncalibrated=uncalibrated)
        return
    with pytest.raises(InvalidFile) as caught:
        loaded(tmp_path, body, uncalibrated=uncalibrated)
    (problem,) = caught.value.problems
    assert problem.line == line
    assert "'tiny' has none" in problem.message
    assert "tierline tiers calibrate" in problem.message


def test_tiers_without_a_model_are_named(tmp_path: Path) -> None:
    body = "routes:\n  - {cascade: [small, large]}\nescalate: {when: [empty], to: xlarge}\n"
    found = load(write(tmp_path, p=policy("p", body)), ["small", "medium"])
    lines = {problem.line: problem.message for problem in found.warnings}
    assert "the cascade passes over 'large'" in lines[5]
    assert "'escalate' passes over 'xlarge'" in lines[6]
