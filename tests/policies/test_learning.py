"""`learn` and `audit` of a policy: what they take, and what the check says where they do nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.load import PolicySet, load
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import policy, write

AUTO = "routes: [{tier: auto}]\n"
AUDIT = "audit: {rate: 0.02, against: large, judge_tier: medium}\n"


def loaded(folder: Path, body: str, served: tuple[str, ...] = ("small", "medium", "large")) -> PolicySet:
    return load(write(folder, p=policy("p", body)), served)


@pytest.mark.parametrize(("said", "meant"), [("", "on"), ("learn: on", "on"), ("learn: off", "off")])
def test_learning_is_on_unless_it_is_switched_off(tmp_path: Path, said: str, meant: str) -> None:
    found = loaded(tmp_path, AUTO + said + "\n")
    assert found.named("p").document.learn == meant
    assert not found.warnings


def test_an_audit_is_taken_as_it_stands(tmp_path: Path) -> None:
    found = loaded(tmp_path, AUTO + AUDIT)
    audit = found.named("p").document.audit
    assert audit is not None
    assert (audit.rate, audit.against, audit.judge_tier) == (0.02, "large", "medium")
    assert not found.warnings


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (AUTO + "learn: sometimes\n", "learn"),
        (AUTO + "audit: {rate: 0, against: large, judge_tier: medium}\n", "rate"),
        (AUTO + "audit: {rate: 2, against: large, judge_tier: medium}\n", "rate"),
        (AUTO + "audit: {rate: 0.1, against: small, judge_tier: medium}\n", "against"),
        (AUTO + "audit: {rate: 0.1, against: large}\n", "judge_tier"),
    ],
)
def test_what_makes_no_sense_is_refused(tmp_path: Path, body: str, message: str) -> None:
    with pytest.raises(InvalidFile) as refused:
        loaded(tmp_path, body)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("body", "served", "warning"),
    [
        (AUTO + AUDIT + "learn: off\n", ("small", "medium", "large"), "'audit' has no effect with 'learn: off'"),
        ("routes: [{tier: small}]\n" + AUDIT, ("small", "medium", "large"), "nothing is learnt"),
        (AUTO + AUDIT, ("small", "medium"), "tier 'large' has no model: no answer is compared."),
        (AUTO + AUDIT, ("small", "large"), "tier 'medium' has no model: no answer is compared."),
    ],
)
def test_what_has_no_effect_is_said(tmp_path: Path, body: str, served: tuple[str, ...], warning: str) -> None:
    (found,) = loaded(tmp_path, body, served).warnings
    assert warning in found.message
