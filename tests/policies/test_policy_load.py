"""Loading a folder: faults with positions, conflicts, precedence, warnings, versions."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jsonschema
import pytest
import yaml

import policies
from policies.check import check
from policies.load import Subject, load, load_file
from policies.schema.cache import CachePolicy
from policies.schema.document import PolicyDocument, json_schema
from policies.yamlfile import InvalidFile, Problem
from tests.policies.policy_files import EVERYBODY, policy, write

ROOT = Path(policies.__file__).parent


def problems(folder: Path, **options: list[str]) -> list[Problem]:
    with pytest.raises(InvalidFile) as caught:
        load(folder, **options)
    return caught.value.problems


@pytest.mark.parametrize(
    ("body", "line", "words", "suggestion"),
    [
        ("rouets: []\n", 4, "unknown key 'rouets'", "routes"),
        ("cache: {mode: semantik}\n", 4, "must be one of", "semantic"),
        ("cache: {allow: [personal, personal]}\n", 4, "names a reason twice", None),
        ("cache: {allow: [time-bound]}\n", 4, "must be one of", "time_bound"),
        ("cache: {ttl: 24}\n", 4, "whole number and a unit", None),
        ("cache: {ttl: 1.5h}\n", 4, "whole number and a unit", None),
        ("routes:\n  - tier: huge\n", 5, "must be one of", None),
        ("routes:\n  - name: x\n", 5, "one of 'tier', 'model' and 'cascade'", None),
        ("routes:\n  - {tier: small, model: m}\n", 5, "one of 'tier', 'model' and 'cascade'", None),
        ("routes:\n  - when: taks == 'chat'\n    tier: small\n", 5, "unknown variable 'taks'", "task"),
        (
            "routes:\n  - when: |\n      stream &&\n      taks == 'chat'\n    tier: small\n",
            7,
            "unknown variable",
            "task",
        ),
        ("fallback: [small, small]\n", 1, "names a tier twice", None),
        ("on_abort: {mode: drian}\n", 4, "must be one of", "drain"),
        ("routes:\n  - {tier: small, on_abort: {mode: drain, max_tokens: 0}}\n", 5, "greater than or equal to 1", None),
        ("routes:\n  - when: 6000\n    tier: small\n", 5, "must be text: a CEL expression, in quotes", None),
        ("routes:\n  - when: [stream]\n    tier: small\n", 5, "must be text: a CEL expression, in quotes", None),
        ("budget: {monthly_usd: two}\n", 4, "must be a number", None),
        ("limits: {parallel: 2.5}\n", 4, "must be a whole number", None),
        ("limits: {requests_per_minute: 0}\n", 4, "greater than or equal to 1", None),
        ("budget: {monthly_usd: -1}\n", 4, "greater than 0", None),
        ("queue: {}\n", 4, "not supported yet", None),
        ("escalate: {}\n", 4, "when", None),
        ("escalate: true\n", 4, "keys with values", None),
        ("escalate: {when: refusal}\n", 4, "must be a list", None),
        ("escalate: {when: [refusal], to: huge}\n", 4, "next, a tier", None),
        ("escalate: {when: [refusals]}\n", 4, "must be one of", "refusal"),
        ("escalate: {when: [empty, empty]}\n", 4, "names a check twice", None),
        ("escalate: {when: [empty], at_most: 4}\n", 4, "less than or equal to 3", None),
        ("escalate: {when: [empty], to: [large, small]}\n", 4, "larger than the one before", None),
        ("escalate: {when: [low_confidence], confidence: 0.5, mean_logprob: -1}\n", 4, "either 'confidence'", None),
        ("routes:\n  - {cascade: [small]}\n", 5, "at least 2 tiers", None),
        ("routes:\n  - {cascade: [medium, small]}\n", 5, "larger than the one before", None),
        ("routes:\n  - {cascade: [small, large], tier: small}\n", 5, "one of 'tier', 'model' and 'cascade'", None),
        ("routes:\n  - {cascade: [small, large], escalate: {when: [empty], at_most: 2}}\n", 5, "drop 'at_most'", None),
        ("routes:\n  - {cascade: [small, large], escalate: {when: []}}\n", 5, "a cascade needs a check", None),
        ("cache: {max_false_hit_rate: 0}\n", 4, "greater than 0", None),
        ("cache: {max_false_hit_rate: 1}\n", 4, "less than or equal to 0.5", None),
        ("cache: {max_false_hit_rat: 0.01}\n", 4, "unknown key 'max_false_hit_rat'", "max_false_hit_rate"),
        ("cache: {threshold: 0.9, max_false_hit_rate: 0.01}\n", 4, "drop one of them", None),
        ("cache: {audit_rate: 0.1}\n", 4, "only with 'max_false_hit_rate'", None),
        ("cache: {promise: shadow}\n", 4, "only with 'max_false_hit_rate'", None),
        ("cache: {max_false_hit_rate: 0.01, promise: shaddow}\n", 4, "must be one of", "shadow"),
        ("cache: {max_false_hit_rate: 0.01, judge: modell}\n", 4, "must be one of", "model"),
        ("cache: {max_false_hit_rate: 0.01, judge: model}\n", 4, "go together", None),
        ("cache: {max_false_hit_rate: 0.01, judge_tier: small}\n", 4, "go together", None),
        ("cache: {max_false_hit_rate: 0.01, audit_rate: 0}\n", 4, "greater than or equal to 0.001", None),
        ("limits: {queue: 5}\n", 4, "not supported yet", None),
        ("rollout: {percent: 10}\n", 4, "missing", None),
        ("owner: again\n", 4, "stands twice", None),
    ],
)
def test_faults(tmp_path: Path, body: str, line: int, words: str, suggestion: str | None) -> None:
    folder = write(tmp_path, p=policy("p", body))
    (problem,) = problems(folder)
    assert problem.file.endswith("p.yaml")
    assert problem.line == line
    assert words in problem.message
    assert problem.suggestion == suggestion


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("cache:\n  max_false_hit_rate: 0.01\n", 5),
        ("cache:\n  max_false_hit_rate: 0.01\n  judge: embedding\n", 6),
        ("cache:\n  max_false_hit_rate: 0.01\n  judge: exact\n", None),
        ("cache:\n  max_false_hit_rate: 0.01\n  judge: model\n  judge_tier: small\n", None),
        ("cache:\n  threshold: 0.9\n", None),
    ],
)
def test_a_judge_that_reads_no_prose_is_warned_of(tmp_path: Path, body: str, line: int | None) -> None:
    found = load(write(tmp_path, p=policy("p", body))).warnings
    assert [warning.line for warning in found] == ([] if line is None else [line])
    assert all("'judge: model'" in warning.message for warning in found)


@pytest.mark.parametrize(
    ("body", "line", "words"),
    [
        ("cache:\n  mode: off\n  ttl: 24h\n", 6, "'ttl' has no effect with 'mode: off'"),
        ("cache: {mode: 'off', share_tiers: true}\n", 4, "'share_tiers' has no effect with 'mode: off'"),
        ("cache: {mode: 'off', allow: [personal]}\n", 4, "'allow' has no effect with 'mode: off'"),
        ("cache: {mode: 'off', max_false_hit_rate: 0.01}\n", 4, "'max_false_hit_rate' has no effect with 'mode: off'"),
        ("cache:\n  mode: exact\n  threshold: 0.9\n", 6, "only with 'mode: semantic'"),
        ("cache: {mode: exact, max_false_hit_rate: 0.01}\n", 4, "only with 'mode: semantic'"),
        ("cache: {mode: exact, judge_tier: small}\n", 4, "only with 'mode: semantic'"),
        ("routes:\n  - {tier: small, quality_target: 0.9}\n", 5, "only with 'tier: auto'"),
        ("on_abort: {mode: cancel, max_time: 31s}\n", 4, "only with 'mode: drain'"),
        ("on_abort: {max_tokens: 10}\n", 4, "only with 'mode: drain'"),
        ("routes:\n  - {tier: small, on_abort: {mode: count, max_tokens: 9}}\n", 5, "only with 'mode: drain'"),
    ],
)
def test_what_is_left_over_is_named_and_does_nothing(tmp_path: Path, body: str, line: int, words: str) -> None:
    """One word changed, such as the mode of the cache, must count at once: nobody deletes the rest first."""
    loaded = load(write(tmp_path, p=policy("p", body)))
    (warning,) = loaded.warnings
    assert (warning.line, warning.severity) == (line, "warning")
    assert words in warning.message
    document = loaded.policies[0].document
    assert document.cache == CachePolicy(mode=document.cache.mode)
    assert all(route.quality_target is None for route in document.routes)
    for on_abort in (document.on_abort, *(route.on_abort for route in document.routes)):
        assert on_abort is None or (on_abort.max_time, on_abort.max_tokens) == (30.0, 4096)


@pytest.mark.parametrize("written", ["off", "'off'", "exact", "semantic"])
def test_cache_modes(tmp_path: Path, written: str) -> None:
    """YAML 1.1 reads `off` as false; people mean the word."""
    (found,) = load(write(tmp_path, a=policy("a", f"cache: {{mode: {written}}}\n"))).policies
    assert found.cache.mode == written.strip("'")


def test_columns_point_into_conditions(tmp_path: Path) -> None:
    text = policy("p", "routes:\n  - when: stream && promt_tokens > 3\n    tier: small\n")
    (problem,) = problems(write(tmp_path, p=text))
    assert text.split("\n")[problem.line - 1][problem.column - 1 :].startswith("promt_tokens")


@pytest.mark.parametrize("when", ["true", "[stream, stream]", "promt_tokens > 3", "prompt_tokens"])
def test_every_fault_of_a_condition_is_where_it_stands(tmp_path: Path, when: str) -> None:
    (problem,) = problems(write(tmp_path, p=policy("p", f"routes:\n  - when: {when}\n    tier: small\n")))
    assert (problem.line, problem.column) == (5, 11)


def test_all_files_are_reported(tmp_path: Path) -> None:
    found = problems(write(tmp_path, a=policy("a", "x: 1\n"), b=policy("b", "y: 1\n"), c=EVERYBODY))
    assert [Path(problem.file).name for problem in found] == ["a.yaml", "b.yaml"]


def test_empty_folder(tmp_path: Path) -> None:
    assert "no policy here" in problems(tmp_path)[0].message


def test_missing_folder(tmp_path: Path) -> None:
    assert "cannot be read" in problems(tmp_path / "none")[0].message


def test_not_utf8(tmp_path: Path) -> None:
    write(tmp_path, a=EVERYBODY)
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in problems(tmp_path)[0].message


def test_empty_file(tmp_path: Path) -> None:
    assert "expected a mapping" in problems(write(tmp_path, a=""))[0].message


def test_other_files_do_not_count(tmp_path: Path) -> None:
    write(tmp_path, a=EVERYBODY)
    (tmp_path / ".b.yaml").write_text("broken: [")
    (tmp_path / "c.yaml~").write_text("broken: [")
    (tmp_path / "d").mkdir()
    (tmp_path / "..data").symlink_to("nowhere")
    assert [p.name for p in load(tmp_path).policies] == ["everybody"]


def test_what_is_no_file_but_has_the_name_of_one_is_said_and_never_read(tmp_path: Path) -> None:
    write(tmp_path, a=EVERYBODY)
    (tmp_path / "b.yaml").symlink_to("gone")
    (tmp_path / "c.yaml").mkdir()
    os.mkfifo(tmp_path / "d.yaml")
    (tmp_path / "e.yml").symlink_to("/dev/zero")
    (tmp_path / "f.yaml").symlink_to("f.yaml")
    found = [(Path(problem.file).name, problem.message) for problem in problems(tmp_path)]
    assert [name for name, _ in found] == ["b.yaml", "c.yaml", "d.yaml", "e.yml", "f.yaml"]
    words = ("a link to a file that is not there", "a folder", "a device", "a device", "Too many levels")
    assert all(word in message for (_, message), word in zip(found, words, strict=True))


def test_the_same_name_twice(tmp_path: Path) -> None:
    found = problems(write(tmp_path, a=EVERYBODY, b=policy("everybody", applies_to="{teams: [x]}")))
    assert "taken by a.yaml" in found[0].message


def test_somebody_must_apply_to_everybody(tmp_path: Path) -> None:
    found = problems(write(tmp_path, a=policy("a", applies_to="{teams: [x]}")))
    assert "no policy applies to everybody" in found[0].message


@pytest.mark.parametrize(
    ("one", "other", "tie"),
    [
        ("{teams: [x]}", "{teams: [x, y]}", True),
        ("{teams: [x]}", "{teams: [y]}", False),
        ("{teams: [x]}", "{projects: [x]}", False),
        ("{teams: [x], models: [auto]}", "{teams: [x]}", False),
        ("{teams: [x], models: [auto]}", "{teams: [x], models: [m]}", False),
        ("{organisations: [o], teams: [x]}", "{organisations: [o, p], teams: [x]}", True),
    ],
)
def test_ties_are_errors(tmp_path: Path, one: str, other: str, tie: bool) -> None:
    folder = write(tmp_path, all=EVERYBODY, one=policy("one", applies_to=one), other=policy("other", applies_to=other))
    if tie:
        assert "who should win" in problems(folder)[0].message
    else:
        assert len(load(folder).policies) == 3


def test_precedence(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        all=EVERYBODY,
        org=policy("org", applies_to="{organisations: [o]}"),
        team=policy("team", applies_to="{teams: [t]}"),
        team_auto=policy("team-auto", applies_to="{teams: [t], models: [auto]}"),
        project=policy("project", applies_to="{projects: [p]}"),
        key=policy("key", applies_to="{keys: [k]}"),
    )
    policies = load(folder)

    def chosen(**subject: str) -> str:
        return policies.resolve(Subject(**subject)).name

    assert chosen() == "everybody"
    assert chosen(organisation="o") == "org"
    assert chosen(organisation="o", team="t", model="m") == "team"
    assert chosen(organisation="o", team="t", model="auto") == "team-auto"
    assert chosen(organisation="o", team="t", project="p") == "project"
    assert chosen(organisation="o", team="t", project="p", key="k") == "key"
    assert chosen(organisation="x", team="x") == "everybody"


def test_warnings(tmp_path: Path) -> None:
    body = (
        "routes:\n"
        "  - {name: one, when: stream, tier: small}\n"
        "  - {name: two, when: ' stream', tier: small}\n"
        "  - {name: never, when: 'false', tier: small}\n"
        "  - {name: all, tier: large}\n"
        "  - {name: after, when: has_tools, tier: small}\n"
    )
    found = load(write(tmp_path, a=policy("a", body)), tiers_served=["small"]).warnings
    assert [(w.line, w.severity) for w in found] == [(6, "warning"), (7, "warning"), (8, "warning"), (9, "warning")]
    text = " ".join(w.message for w in found)
    for words in ("same condition", "never true", "tier 'large' has no model", "'all' (line 8) always matches"):
        assert words in text


def test_unknown_model(tmp_path: Path) -> None:
    folder = write(tmp_path, a=policy("a", "routes:\n  - model: smollm\n"))
    (problem,) = problems(folder, models_served=["smollm2", "other"])
    assert (problem.line, problem.suggestion) == (5, "smollm2")
    assert load(folder).policies  # without a list of models nothing is claimed


def test_versions_follow_content(tmp_path: Path) -> None:
    first = load(write(tmp_path, a=EVERYBODY))
    again = load(tmp_path)
    changed = load(write(tmp_path, a=EVERYBODY.replace("6000", "7000")))
    assert first.version == again.version != changed.version
    assert first.policies[0].version != changed.policies[0].version


def test_needs_profile(tmp_path: Path) -> None:
    def needs(body: str) -> bool:
        return load(write(tmp_path, a=policy("a", body))).policies[0].needs_profile

    assert not needs("routes:\n  - {when: stream, tier: small}\n")
    assert needs("routes:\n  - {when: complexity > 0.5, tier: small}\n")
    assert needs("routes:\n  - tier: auto\n")


def test_shipped_policies_are_good() -> None:
    report = check(ROOT, ["small", "medium", "large", "xlarge"])
    assert report.ok
    assert not report.warnings
    assert set(report.policies) == {"default", "support", "research"}
    assert load(ROOT).resolve(Subject(team="support")).name == "support"


def test_the_published_schema_is_in_step() -> None:
    assert (ROOT / "schema.json").read_text() == json_schema(), (
        "run: tierline policy schema --write policies/schema.json"
    )


def test_the_published_schema_agrees_with_the_code() -> None:
    published = json.loads((ROOT / "schema.json").read_text())
    for path in ROOT.glob("*.yaml"):
        jsonschema.validate(yaml.safe_load(path.read_text()), published)
    for body in ({"rouets": []}, {"cache": {"ttl": 24}}, {"routes": [{"tier": "huge"}]}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"version": 1, "name": "a", "owner": "b", **body}, published)


def test_every_key_is_on_the_reference_page() -> None:
    page = (ROOT.parent / "docs/reference/policies.md").read_text()

    def keys(model: type, prefix: str = "") -> list[str]:
        found = []
        for name, field in model.model_fields.items():  # type: ignore[attr-defined]
            found.append(f"{prefix}{name}")
            for part in (field.annotation, *getattr(field.annotation, "__args__", ())):
                if isinstance(part, type) and hasattr(part, "model_fields"):
                    found += keys(part, f"{name}.")
        return found

    missing = [key for key in keys(PolicyDocument) if f"`{key}`" not in page]
    assert not missing


def test_one_file_by_itself(tmp_path: Path) -> None:
    write(tmp_path, a=policy("a", applies_to="{teams: [x]}"))
    assert load_file(tmp_path / "a.yaml")[0].name == "a"
    assert check(tmp_path / "a.yaml").ok
    assert not check(tmp_path).ok


def test_a_report_names_places(tmp_path: Path) -> None:
    shutil.copy(ROOT / "default.yaml", tmp_path / "d.yaml")
    text = (tmp_path / "d.yaml").read_text().replace("quality_target", "qualty_target")
    (tmp_path / "d.yaml").write_text(text)
    line = text[: text.index("qualty")].count("\n") + 1
    report = check(tmp_path)
    assert f"d.yaml:{line}:1: error: unknown key 'qualty_target'. Did you mean 'quality_target'?" in report.as_text()
    assert report.as_json()["errors"][0]["line"] == line
