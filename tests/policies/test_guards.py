"""What guardrails find in a text, and what they leave alone; and what a policy may not say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.guards import Guard, compile_guards
from policies.load import load_file
from policies.schema.guardrails import Guardrails
from policies.yamlfile import InvalidFile, parse
from tests.policies.policy_files import EVERYBODY, write


def guard(**rule: Any) -> Guard:
    rules = Guardrails.model_validate({"before": [{"name": "rule", **rule}]})
    guards, problems = compile_guards(parse("a: 1\n", "file"), rules)
    assert problems == []
    assert guards is not None
    return guards.before[0]


def redacted(text: str, **rule: Any) -> str:
    found = guard(action="redact", **rule)
    return found.replace(text, found.find(text))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("email", "jo.doe+x@mail.example.co.uk"),
        ("email", "jörg.müller@exämple.de"),
        ("phone", "+49 (30) 1234-5678"),
        ("phone", "0049 30 12345678"),
        ("phone", "(212) 555-0100"),
        ("phone", "212.555.0100"),
        ("phone", "13812345678"),
        ("card_number", "4111 1111 1111 1111"),
        ("card_number", "5500-0000-0000-0004"),
        ("card_number", "378282246310005"),
        ("iban", "DE89 3704 0044 0532 0130 00"),
        ("iban", "GB29NWBK60161331926819"),
        ("ip_address", "192.168.0.1"),
        ("ip_address", "2001:db8::ff00:42:8329"),
        ("us_ssn", "123-45-6789"),
        ("cn_id_card", "11010519491231002X"),
        ("secret", "sk-proj-abcdefghijklmnopqrstuvwx"),
        ("secret", "AKIAIOSFODNN7EXAMPLE"),
        ("secret", "ghp_abcdefghijklmnopqrstuvwxyz0123456789"),
        ("secret", "-----BEGIN PRIVATE KEY-----\nMIIE+/=\n-----END PRIVATE KEY-----"),
    ],
)
def test_personal_data_is_found_wherever_it_stands(kind: str, text: str) -> None:
    for before, after in (("", ""), ("it is ", " or so"), ("(", ")"), ("我的是：", "。"), ("a\n", "\nb")):
        assert redacted(before + text + after, personal_data=[kind]) == f"{before}[{kind}]{after}"


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("email", "write to me @home or user@localhost"),
        ("phone", "order 12345, 2024-10-10, 3.14159265, room 212 555"),
        ("card_number", "4111 1111 1111 1112 is order 1234567812345678"),
        ("iban", "DE89 3704 0044 0532 0130 01"),
        ("ip_address", "version 1.2.3, 999.1.1.1, 12:30:45, a::b is C++ std::vector"),
        ("us_ssn", "000-12-3456 666-12-3456 900-12-3456 123-00-6789"),
        ("cn_id_card", "110105194912310021"),
        ("secret", "risk-averse people ask-me-anything sk-8"),
    ],
)
def test_what_only_looks_like_it_passes(kind: str, text: str) -> None:
    assert redacted(text, personal_data=[kind]) == text


def test_phrases_are_whole_words_in_any_case_and_with_any_blanks() -> None:
    rule = {"phrases": ["Project Phoenix", "C++", "项目凤凰"], "replacement": "#"}
    assert redacted("the project\n \u00a0PHOENIX, projectphoenix, project phoenixes", **rule) == (
        "the #, projectphoenix, project phoenixes"
    )
    assert redacted("C++ and c++17, 关于项目凤凰的事", **rule) == "# and #17, 关于#的事"


def test_findings_that_overlap_are_replaced_as_one() -> None:
    assert redacted("key: abcabc!", patterns=["abcab", "cabc"], replacement="<{kind}>") == "key: <rule>!"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab@. -14", max_size=60))
def test_nothing_is_lost_but_what_is_found(text: str) -> None:
    rule = guard(action="redact", personal_data=["email", "phone", "card_number"], patterns=["b+a"], replacement="\x7f")
    found = rule.find(text)
    pieces, at = [], 0
    for start, end, _ in found:
        assert at <= start < end <= len(text)
        pieces.append(text[at:start])
        at = end
    assert rule.replace(text, found) == "\x7f".join([*pieces, text[at:]])
    assert rule.find(rule.replace(text, found)) == [] or "b" in text


def test_no_text_is_looked_through_for_ever() -> None:
    rule = guard(personal_data=["email", "phone", "card_number", "iban", "ip_address", "secret"], patterns=["(a*)*b"])
    for piece in ("a", "1 ", "a@", "a.", ":", "+1-", "-----BEGIN "):
        rule.find(piece * (400_000 // len(piece)))


@pytest.mark.parametrize(
    ("rules", "line", "words"),
    [
        ("before: [{name: a}]", 5, "looks for nothing"),
        ("before: [{name: a, patterns: ['(']}]", 5, "missing )"),
        ("before: [{name: a, patterns: ['x(?=y)']}]", 5, "invalid perl operator"),
        ("before: [{name: a, patterns: ['x*']}]", 5, "matches where there is nothing"),
        ("before: [{name: a, phrases: [x], action: redact, message: no}]", 5, "'message' has a meaning only"),
        ("before: [{name: a, max_tokens: 5, action: redact}]", 5, "deny or flag"),
        ("before: [{name: a, phrases: [x]}, {name: a, phrases: [y]}]", 4, "same name"),
        ("after: [{name: a, max_tokens: 5}]", 4, "'max_tokens' is for 'before'"),
        ("after: [{name: a, check: {url: 'http://a/b'}}]", 4, "streams: hold"),
        ("after: [{name: a, check: {url: 'ftp://a/b'}}]", 5, "pattern"),
        ("before: [{name: a, phrases: [x], replacement: 'a\"b', action: redact}]", 5, "pattern"),
        ("before: [{name: a, personal_data: [emial]}]", 5, "email"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_place(tmp_path: Path, rules: str, line: int, words: str) -> None:
    write(tmp_path, policy=f"{EVERYBODY}guardrails:\n  {rules}\n")
    with pytest.raises(InvalidFile) as caught:
        load_file(tmp_path / "policy.yaml")
    [problem] = caught.value.problems
    assert words in f"{problem.message} {problem.suggestion}"
    assert problem.line >= line


def test_the_fingerprint_tells_answers_apart(tmp_path: Path) -> None:
    def fingerprint(rules: str) -> str:
        write(tmp_path, policy=f"{EVERYBODY}guardrails:\n  {rules}\n")
        guards = load_file(tmp_path / "policy.yaml")[0].guards
        assert guards is not None
        return guards.fingerprint

    one = fingerprint("after: [{name: a, phrases: [x]}]")
    assert one == fingerprint("{after: [{name: a, phrases: [x]}], before: [{name: b, phrases: [x]}]}")
    assert one != fingerprint("after: [{name: a, phrases: [y]}]")
    assert fingerprint("before: [{name: a, phrases: [y]}]") == ""
