"""What a policy decides, why, and that no condition can kill a request."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.evaluate import decide
from policies.explain import explain
from policies.facts import TEXT_VARIABLES, VARIABLES, Context, Facts, from_chat
from policies.load import Policy, Subject, load
from tests.policies.policy_files import policy, write
from tiers import TIERS
from tiers.choose import TierChoice
from tiers.task import TaskProfile, default_classifier

ROUTES = """\
routes:
  - {name: long, when: prompt_tokens > 6000, tier: large}
  - {name: broken, when: "tags[5] == 'x'", tier: xlarge}
  - {name: labels, when: task == 'classification', tier: small}
  - {name: named, when: "'vip=yes' in tags", model: best-model}
  - {name: auto, when: stream, tier: auto, quality_target: 0.9}
default: medium
fallback: [medium, small]
"""


def profile(text: str) -> TaskProfile:
    return default_classifier().classify([{"role": "user", "content": text}])


CHAT, LABEL = profile("Hi, how are you today?"), profile("Classify the sentiment of this review: I loved it.")


def loaded(folder: Path, body: str = ROUTES, served: Iterable[str] | None = None, applies_to: str = "") -> Policy:
    text = policy("p", body, applies_to)
    everybody = policy("everybody")
    files = {"p": text, **({"e": everybody} if applies_to else {})}
    return load(write(folder, **files), None if served is None else list(served)).named("p")


def test_the_first_match_decides(tmp_path: Path) -> None:
    found = decide(loaded(tmp_path), Facts(prompt_tokens=7000, profile=LABEL))
    assert (found.tier, found.requested_tier, found.rule, found.rule_index) == ("large", "large", "long", 0)
    assert found.fallback_tiers == ("medium", "small")
    assert found.fallback_reason is None
    assert "line 5" in found.why
    assert "prompt_tokens > 6000" in found.why


def test_a_failing_rule_counts_as_not_matched_and_is_recorded(tmp_path: Path) -> None:
    found = decide(loaded(tmp_path), Facts(profile=LABEL))
    assert (found.tier, found.rule) == ("small", "labels")
    (error,) = found.rule_errors
    assert "'broken' (line 6)" in error
    assert "IndexError" in error


def test_a_rule_may_name_a_model(tmp_path: Path) -> None:
    found = decide(loaded(tmp_path), Facts(profile=CHAT, tags=("vip=yes",)))
    assert (found.model, found.tier, found.rule) == ("best-model", None, "named")
    assert found.fallback_tiers == ("medium", "small")


def test_no_match_means_the_default(tmp_path: Path) -> None:
    found = decide(loaded(tmp_path), Facts(profile=CHAT))
    assert (found.tier, found.rule, found.rule_index) == ("medium", "default", None)
    assert decide(loaded(tmp_path, "default: large\n"), Facts()).tier == "large"


def test_auto_asks_with_the_rules_target_and_records_the_choice(tmp_path: Path) -> None:
    asked: list[Any] = []

    def chooser(
        profile: TaskProfile, tiers_available: Iterable[str], quality_target: float, default_tier: str
    ) -> TierChoice:
        asked.append((profile, tuple(tiers_available), quality_target, default_tier))
        return TierChoice("large", "because", {"large": 0.9})

    found = decide(loaded(tmp_path), Facts(profile=CHAT, stream=True), chooser)
    assert asked == [(CHAT, TIERS, 0.9, "medium")]
    assert (found.tier, found.rule) == ("large", "auto")
    assert found.auto is not None
    assert found.auto.p_success == {"large": 0.9}
    assert found.why.endswith("because")


def test_auto_with_the_shipped_classifier(tmp_path: Path) -> None:
    auto = loaded(tmp_path, "routes: [{tier: auto}]\n")
    assert decide(auto, Facts(profile=LABEL)).tier == "small"
    assert decide(auto, Facts(profile=CHAT)).tier == "medium"


def test_a_profile_that_is_needed_and_missing_is_the_callers_error(tmp_path: Path) -> None:
    auto = loaded(tmp_path, "routes: [{tier: auto}]\n")
    assert auto.needs_profile
    with pytest.raises(ValueError, match="profile"):
        decide(auto, Facts())


@pytest.mark.parametrize(
    ("served", "wanted", "tier", "rest"),
    [
        (["small"], "large", "small", ()),
        (["small", "medium"], "large", "medium", ("small",)),
        (["small", "xlarge"], "large", "small", ()),
        (["xlarge"], "large", "xlarge", ()),
        (["large"], "large", "large", ()),
    ],
)
def test_a_tier_without_a_model_falls_back_openly(
    tmp_path: Path, served: list[str], wanted: str, tier: str, rest: tuple[str, ...]
) -> None:
    found = decide(loaded(tmp_path, served=served), Facts(prompt_tokens=7000, profile=CHAT))
    assert (found.requested_tier, found.tier, found.fallback_tiers) == (wanted, tier, rest)
    assert (found.fallback_reason is None) == (tier == wanted)
    if found.fallback_reason:
        assert "'large' has no model" in found.fallback_reason


def test_without_a_list_the_next_larger_tier_serves(tmp_path: Path) -> None:
    only = loaded(tmp_path, "default: medium\n", served=["small", "xlarge"])
    assert decide(only, Facts()).tier == "xlarge"


def test_no_model_at_all(tmp_path: Path) -> None:
    found = decide(loaded(tmp_path, served=[]), Facts(prompt_tokens=7000, profile=CHAT))
    assert (found.tier, found.model, found.requested_tier) == (None, None, "large")
    assert "no tier has a model" in str(found.fallback_reason)


def test_a_pin_wins(tmp_path: Path) -> None:
    found = decide(loaded(tmp_path), Facts(prompt_tokens=7000, pinned_tier="small", profile=CHAT))
    assert (found.tier, found.rule, found.rule_index) == ("small", "pinned", None)
    with pytest.raises(ValueError, match="there is no tier 'huge'"):
        decide(loaded(tmp_path), Facts(pinned_tier="huge"))


def test_a_named_model_is_served_unless_the_policy_names_it_too(tmp_path: Path) -> None:
    asked = Facts(prompt_tokens=7000, model="m", profile=CHAT)
    found = decide(loaded(tmp_path), asked)
    assert (found.model, found.rule, found.fallback_tiers) == ("m", "named model", ())
    redirecting = loaded(tmp_path, applies_to="{models: [m]}")
    assert decide(redirecting, asked).tier == "large"


@pytest.mark.parametrize(
    ("action", "used", "tier", "rule"),
    [
        ("downgrade", 1.0, "small", "budget exhausted"),
        ("downgrade", 0.99, "large", "long"),
        ("reject", 1.5, "large", "long"),
    ],
)
def test_an_exhausted_budget_downgrades(tmp_path: Path, action: str, used: float, tier: str, rule: str) -> None:
    body = ROUTES + f"budget: {{monthly_usd: 10, when_exhausted: {action}}}\n"
    found = decide(loaded(tmp_path, body), Facts(prompt_tokens=7000, budget_used=used, profile=CHAT))
    assert (found.tier, found.rule) == (tier, rule)
    assert found.budget is not None
    assert found.budget.monthly_usd == 10
    pinned = decide(loaded(tmp_path, body), Facts(budget_used=used, pinned_tier="large", profile=CHAT))
    assert pinned.rule == ("budget exhausted" if rule == "budget exhausted" else "pinned")


def test_settings_travel_with_the_decision(tmp_path: Path) -> None:
    body = "cache: {mode: semantic, threshold: 0.9, ttl: 2h, share: key}\nlimits: {parallel: 3}\n"
    chosen = loaded(tmp_path, body)
    found = decide(chosen, Facts())
    assert (found.cache.threshold, found.cache.ttl, found.cache.share) == (0.9, 7200.0, "key")
    assert (found.limits.parallel, found.budget) == (3, None)
    assert (found.policy, found.policy_version) == ("p", chosen.version)


def test_what_becomes_of_a_stream_whose_client_leaves_is_the_rules_or_the_policys(tmp_path: Path) -> None:
    body = """\
on_abort: {mode: count}
routes:
  - {when: stream, tier: small, on_abort: {mode: drain, max_time: 2m, max_tokens: 100}}
  - {when: messages > 3, tier: small}
"""
    chosen = loaded(tmp_path, body)
    drained = decide(chosen, Facts(stream=True)).on_abort
    assert (drained.mode, drained.max_time, drained.max_tokens) == ("drain", 120.0, 100)
    for facts in (Facts(messages=4), Facts(), Facts(stream=True, pinned_tier="small"), Facts(stream=True, model="m")):
        assert decide(chosen, facts).on_abort.mode == "count"
    assert decide(loaded(tmp_path / "other", "default: small\n"), Facts()).on_abort.mode == "cancel"


BODY: dict[str, Any] = {
    "model": "auto",
    "messages": [
        {"role": "system", "content": "You sort tickets."},
        {"role": "user", "content": "first"},
        {"role": "assistant", "content": "ok"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "refund please"}, {"type": "image_url", "image_url": {}}],
        },
    ],
    "tools": [{"type": "function", "function": {"name": "f", "description": "a tool " * 50}}],
    "response_format": {"type": "json_object"},
    "max_tokens": 7,
    "stream": True,
    "temperature": 0,
}
CONTEXT = Context("org", "team", "project", "key", ("a=b",), 0.5, None, datetime(2026, 11, 29, 23, 5))


@pytest.mark.parametrize(
    "condition",
    [
        "prompt_tokens > 80 && prompt_tokens < 200",
        "max_tokens == 7",
        "messages == 4",
        "turns == 2",
        "task in ['chat', 'extraction'] || task_confidence > 0.0",
        "complexity >= 0.0 && (in_distribution || !in_distribution)",
        "has_tools && has_images && wants_json && stream",
        "temperature == 0.0",
        "system_text == 'You sort tickets.' && user_text == 'refund please'",
        "model == 'auto' && organisation == 'org' && team == 'team' && project == 'project' && key == 'key'",
        "tags == ['a=b']",
        "hour == 23 && weekday == 7",
        "budget.used == 0.5",
        "language == ''",
    ],
)
def test_facts_of_a_chat_request(tmp_path: Path, condition: str) -> None:
    facts = from_chat(BODY, CONTEXT, default_classifier().classify(BODY["messages"]))
    chosen = loaded(tmp_path, f'routes:\n  - when: "{condition}"\n    tier: xlarge\n')
    found = decide(chosen, facts)
    assert (found.tier, found.rule_errors) == ("xlarge", ())


def test_the_conditions_above_cover_every_variable() -> None:
    marks = test_facts_of_a_chat_request.pytestmark  # type: ignore[attr-defined]
    text = " ".join(marks[0].args[1])
    assert [name for name in VARIABLES if name not in text] == []


def test_an_explanation_says_everything(tmp_path: Path) -> None:
    folder = write(tmp_path, p=policy("p", ROUTES))
    found = explain(load(folder, ["small"]), Subject(), Facts(profile=LABEL, user_text="secret " * 40))
    assert [item.outcome.partition(":")[0] for item in found.rules] == [
        "not matched",
        "failed",
        "matched",
        "not reached",
        "not reached",
    ]
    text, data = found.as_text(), found.as_json()
    for words in ("goes to  tier small", "because  'labels' (line 7)", "failed: IndexError", "classification"):
        assert words in text
    assert "280 characters" in text
    assert data["decision"]["rule"] == "labels"
    assert data["facts"]["task"] == "classification"
    assert set(data["facts"]) == set(VARIABLES)
    assert set(VARIABLES) >= TEXT_VARIABLES
    assert "as shipped" not in text


def test_an_explanation_of_auto_says_that_a_gateway_may_have_learnt(tmp_path: Path) -> None:
    folder = write(tmp_path, p=policy("p", "routes: [{tier: auto}]\n"))
    text = explain(load(folder, ["small"]), Subject(), Facts(profile=LABEL)).as_text()
    assert "table    as shipped; a gateway that has learnt may decide otherwise: --learnt, or tierline explain" in text


def test_an_explanation_of_a_pin_looks_at_no_rule(tmp_path: Path) -> None:
    folder = write(tmp_path, p=policy("p", ROUTES))
    found = explain(load(folder), Subject(), Facts(pinned_tier="large"))
    assert {item.outcome for item in found.rules} == {"not reached"}


_POLICIES = st.lists(
    st.tuples(
        st.sampled_from([None, "stream", "prompt_tokens > 100", "tags[1] == 'x'", "hour < 12", "complexity > 0.3"]),
        st.sampled_from([*TIERS, "auto"]),
    ),
    max_size=5,
)


@settings(max_examples=60, deadline=None)
@given(
    rules=_POLICIES,
    served=st.sets(st.sampled_from(TIERS)),
    fallback=st.lists(st.sampled_from(TIERS), unique=True),
    stream=st.booleans(),
    tokens=st.integers(0, 10_000),
)
def test_every_request_gets_a_tier_that_is_served(
    tmp_path_factory: pytest.TempPathFactory,
    rules: list[tuple[str | None, str]],
    served: set[str],
    fallback: list[str],
    stream: bool,
    tokens: int,
) -> None:
    routes = "".join(f"  - {{tier: {t}{f', when: {chr(34)}{w}{chr(34)}' if w else ''}}}\n" for w, t in rules)
    body = (f"routes:\n{routes}" if rules else "") + f"fallback: [{', '.join(fallback)}]\n"
    chosen = loaded(tmp_path_factory.mktemp("p"), body, served)
    found = decide(chosen, Facts(profile=CHAT, stream=stream, prompt_tokens=tokens))
    assert found.requested_tier in TIERS
    assert (found.tier in served) if served else found.tier is None
    assert (found.tier == found.requested_tier) == (found.fallback_reason is None)
    assert set(found.fallback_tiers) <= served - {found.tier}
    assert len(set(found.fallback_tiers)) == len(found.fallback_tiers)
