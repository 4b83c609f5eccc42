"""Examples that a policy carries: what passes, what fails and is said of it, and which edits they stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.check import check
from policies.examples import run
from policies.load import load
from policies.watch import PolicyStore
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import EVERYBODY, policy, write

SUPPORT = policy(
    "support",
    """\
routes:
  - {name: long, when: prompt_tokens > 6000, tier: large}
  - {name: urgent, when: '"priority=high" in tags', model: big}
  - {name: labels, when: 'task == "classification"', tier: small}
  - {name: tools, when: has_tools, tier: xlarge}
  - {name: night, when: hour >= 22 && weekday == 7, tier: small}
default: medium
cache: {mode: exact}
examples:
""",
    "{teams: [support]}",
)
PASSING = """\
  - {name: long, text: Hi, prompt_tokens: 7000, expect: {tier: large, rule: long, cache: exact}}
  - {name: urgent, text: Hi, tags: [priority=high], expect: {model: big}}
  - {name: label, text: "Is this review positive or negative? The pizza was cold.", expect: {tier: small}}
  - name: tools
    request: {messages: [{role: user, content: Hi}], tools: [{type: function, function: {name: f}}]}
    expect: {tier: xlarge}
  - {name: night, text: Hi, hour: 23, weekday: 7, expect: {rule: night}}
  - {name: talk, messages: [{role: user, content: Hi}, {role: assistant, content: "Yes?"}], expect: {rule: default}}
  - {name: pinned, text: Hi, pin: large, expect: {tier: large, rule: pinned}}
"""


def test_what_passes(tmp_path: Path) -> None:
    found = run(load(write(tmp_path, everybody=EVERYBODY, support=SUPPORT + PASSING)))
    assert [(result.name, result.wrong) for result in found] == [
        (name, "") for name in ("long", "urgent", "label", "tools", "night", "talk", "pinned")
    ]
    assert {result.policy for result in found} == {"support"}


@pytest.mark.parametrize(
    ("example", "wrong"),
    [
        ("{name: x, text: Hi, expect: {tier: large}}", "expected tier 'large', got 'medium': no rule matches"),
        ("{name: x, text: Hi, tags: [priority=high], expect: {tier: small}}", "got model 'big': 'urgent' (line 7)"),
        ("{name: x, text: Hi, expect: {model: big}}", "expected model 'big', got tier 'medium'"),
        ("{name: x, text: Hi, expect: {cache: 'off', rule: default}}", "expected cache 'off', got 'exact'"),
        ("{name: x, text: Hi, team: sales, expect: {tier: small}}", "does not apply to it"),
        ("{name: x, text: Hi, key: k1, expect: {tier: small}}", "policy 'one-key' decides it"),
        (
            "{name: x, request: {messages: [{role: user, content: Hi}], model: big}, expect: {rule: long}}",
            "named model",
        ),
        ("{name: x, request: {messages: [{role: user}], temperature: x}, expect: {rule: long}}", "cannot be decided"),
    ],
)
def test_what_fails_and_why(tmp_path: Path, example: str, wrong: str) -> None:
    one_key = policy("one-key", "", "{keys: [k1]}")
    folder = write(tmp_path, everybody=EVERYBODY, support=f"{SUPPORT}  - {example}\n", one=one_key)
    (found,) = run(load(folder))
    assert not found.passed
    assert wrong in found.wrong
    assert (Path(found.file).name, found.line, found.column) == ("support.yaml", 14, 5)


@pytest.mark.parametrize(
    ("example", "wrong"),
    [
        ("{name: x, text: Hi, expect: {}}", "expects something"),
        ("{name: x, text: Hi, messages: [], expect: {tier: small}}", "must not be empty"),
        ("{name: x, expect: {tier: small}}", "one of 'text', 'messages' and 'request'"),
        ("{name: x, request: {}, expect: {tier: small}}", "needs 'messages'"),
        ("{name: x, messages: [hello], expect: {tier: small}}", "keys with values"),
        ("{name: x, messages: [{content: hello}], expect: {tier: small}}", "a 'role' and a 'content'"),
        ("{name: x, text: Hi, expects: {tier: small}}", "Did you mean 'expect'"),
        ("{name: x, text: Hi, tags: [high], expect: {tier: small}}", "tags"),
    ],
)
def test_examples_that_make_no_sense_are_refused(tmp_path: Path, example: str, wrong: str) -> None:
    with pytest.raises(InvalidFile, match=r"support\.yaml:14:") as caught:
        load(write(tmp_path, everybody=EVERYBODY, support=f"{SUPPORT}  - {example}\n"))
    assert wrong in str(caught.value)


FAILING = "  - {name: x, text: Hi, expect: {tier: large}}\n"


def test_the_check_warns_or_refuses(tmp_path: Path) -> None:
    report = check(write(tmp_path, everybody=EVERYBODY, support=SUPPORT + FAILING))
    assert report.ok
    assert [(w.line, w.severity) for w in report.warnings] == [(14, "warning")]
    assert "example 'x' fails: expected tier 'large', got 'medium'" in report.warnings[0].message
    for path in (write(tmp_path, support=SUPPORT + FAILING + "examples_must_pass: true\n"), tmp_path / "support.yaml"):
        report = check(path)
        assert [(e.line, e.severity) for e in report.errors] == [(14, "error")]


def test_an_edit_whose_examples_must_pass_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    strict = "examples_must_pass: true\n"
    store = PolicyStore(write(tmp_path, everybody=EVERYBODY, support=SUPPORT + PASSING + strict))
    before = store.version
    write(tmp_path, support=(SUPPORT + PASSING + strict).replace("6000", "9000"))
    refused = store.reload()
    assert refused is not None
    assert [problem.line for problem in refused.problems] == [14]
    assert store.version == before
    write(tmp_path, support=SUPPORT.replace("6000", "9000") + PASSING)  # they need not: it counts
    accepted = store.reload()
    assert accepted is not None
    assert accepted.accepted
    # A start that has no last good set to keep says so, and starts.
    write(tmp_path, support=(SUPPORT + PASSING + strict).replace("6000", "9000"))
    assert PolicyStore(tmp_path).current.named("support")
    assert "example 'long' fails" in caplog.text
