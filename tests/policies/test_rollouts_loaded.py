"""Policies that stand in for others: who gets them, and what is said of them when the folder is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.load import Subject, bucket, load
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import EVERYBODY, policy, write


def rollout(percent: float, target: str = "everybody") -> str:
    return policy("next", f"default: large\nrollout: {{percent: {percent}, instead_of: {target}}}\n")


def test_rollout_takes_its_share_and_keeps_it(tmp_path: Path) -> None:
    policies = load(write(tmp_path, a=EVERYBODY, b=rollout(10)))
    keys = [f"key-{i}" for i in range(4000)]
    sides = [policies.resolve(Subject(key=key)).name for key in keys]
    assert 0.08 < sides.count("next") / len(keys) < 0.12
    assert sides == [policies.resolve(Subject(key=key)).name for key in keys]
    wider = load(write(tmp_path, b=rollout(30)))
    moved = [policies.resolve(Subject(key=k)).name == "next" for k in keys]
    still = [wider.resolve(Subject(key=k)).name == "next" for k in keys]
    assert all(later or not earlier for earlier, later in zip(moved, still, strict=True))


@pytest.mark.parametrize(("percent", "name"), [(0, "everybody"), (100, "next")])
def test_rollout_ends(tmp_path: Path, percent: float, name: str) -> None:
    policies = load(write(tmp_path, a=EVERYBODY, b=rollout(percent)))
    assert {policies.resolve(Subject(key=f"k{i}")).name for i in range(50)} == {name}


PROTECTED = policy("team", "guardrails: {before: [{name: mail, personal_data: [email]}]}\nbudget: {monthly_usd: 5}\n")


@pytest.mark.parametrize("mode", ["canary", "shadow"])
def test_a_rollout_without_the_protection_of_what_it_replaces_is_a_warning(tmp_path: Path, mode: str) -> None:
    protected = PROTECTED + "limits: {parallel: 3}\n"
    head = f"rollout: {{instead_of: team, percent: 100, mode: {mode}}}\n"
    write(tmp_path, a=protected, b=policy("next", head))
    (warning,) = load(tmp_path).warnings
    assert (Path(warning.file).name, warning.line, warning.severity) == ("b.yaml", 4, "warning")
    assert "'team' has guardrails, a budget and limits, this one has none" in warning.message
    write(tmp_path, b=policy("next", head + "limits: {parallel: 1}\n"))
    (warning,) = load(tmp_path).warnings
    assert "'team' has guardrails and a budget, this one has none" in warning.message
    write(tmp_path, b=protected.replace("name: team", "name: next") + head)
    assert not load(tmp_path).warnings
    write(tmp_path, a=policy("team"), b=policy("next", head))
    assert not load(tmp_path).warnings


def test_buckets_cover_the_range_evenly() -> None:
    values = [bucket("p", f"k{i}") for i in range(5000)]
    assert all(0 <= value < 100 for value in values)
    assert all(400 < sum(low <= value < low + 10 for value in values) < 600 for low in range(0, 100, 10))


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"b": rollout(5, "everbody")}, "there is no policy"),
        ({"b": rollout(5), "c": rollout(5).replace("next", "third")}, "already"),
        ({"b": rollout(5), "c": policy("c", "rollout: {percent: 5, instead_of: next}\n")}, "itself being rolled out"),
        ({"b": policy("b", "rollout: {percent: 5, instead_of: everybody}\n", "{teams: [x]}")}, "drop it"),
    ],
)
def test_rollout_that_points_nowhere(tmp_path: Path, files: dict[str, str], words: str) -> None:
    with pytest.raises(InvalidFile, match=words):
        load(write(tmp_path, a=EVERYBODY, **files))
