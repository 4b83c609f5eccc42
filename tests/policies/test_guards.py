"""What guardrails find in a text, and what they leave alone; and what a policy may not say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.guarding.findings import Findings
from gateway.guarding.text import Text
from policies.check import check
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
        ("email", "anna@exa\u0301mple.com"),
        ("phone", "+1\u00a0415\u00a0555\u00a02671"),
        ("phone", "+49\u200930\u202f901820"),
        ("phone", "+1\u2011415\u2013555\u20112671"),
        ("phone", "+1 415 555 2671x22"),
        ("phone", "415-555-2671x22"),
        ("phone", "415.555.2671, ext. 22"),
        ("phone", "415 555 2671 #3"),
        ("phone", "+49 30 \u2013 901820"),
        ("phone", "(415)5552671"),
        ("phone", "(415)555-2671"),
        ("phone", "138 0013 8000"),
        ("card_number", "4111\u00a01111\u202f1111\u20091111"),
        ("card_number", "4111\u20131111\u20111111\u20111111"),
        ("card_number", "4111.1111.1111.1111"),
        ("card_number", "4111  1111  1111  1111"),
        ("card_number", "4111 1111\r\n1111 1111"),
        ("card_number", "3782.822463.10005"),
        ("card_number", "41111111  11111111"),
        ("card_number", "411111 1111111111"),
        ("card_number", "４１１１１１１１１１１１１１１１"),
        ("iban", "DE89\u00a03704\u00a00044\u202f0532\u00a00130\u00a000"),
        ("iban", "de89 3704 0044 0532 0130 00"),
        ("iban", "be68539007547034"),
        ("iban", "DE89-3704-0044-0532-0130-00"),
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
        ("phone", "f(123)45678901, pages 100-200, 2024\u20132025, 555 2671x22"),
        ("card_number", "4111 1111 1111 1112 is order 1234567812345678"),
        ("card_number", "4.1.1.1.1.1.1.1.1.1.1.1.1.1.1.1, and 41111.11111.111111, and IMG_4111111_111111111"),
        ("card_number", "20\n24\n4111\n1111\n1111\n1112"),
        ("iban", "de89 3704 0044 0532 0130 01, xx89370400440532013000, de12345678 with 10 or more"),
        ("iban", "DE89 3704 0044 0532 0130 01"),
        ("ip_address", "version 1.2.3, 999.1.1.1, 12:30:45, a::b is C++ std::vector"),
        ("us_ssn", "000-12-3456 666-12-3456 900-12-3456 123-00-6789"),
        ("cn_id_card", "110105194912310021"),
        ("secret", "risk-averse people ask-me-anything sk-8"),
    ],
)
def test_what_only_looks_like_it_passes(kind: str, text: str) -> None:
    assert redacted(text, personal_data=[kind]) == text


@pytest.mark.parametrize("kind", ["card_number", "iban", "phone"])
def test_what_stands_beside_a_number_stays_as_it_was(kind: str) -> None:
    number = {"card_number": "4111 1111 1111 1111", "iban": "be68 5390 0754 7034", "phone": "+1 415 555 2671"}[kind]
    for before, after in (("_", "_\u00a0\u2013 so"), ("**", "** \u2011"), ("a\u00a0\u2013\u00a0", " with care, _so_")):
        assert redacted(before + number + after, personal_data=[kind]) == f"{before}[{kind}]{after}"


def test_a_card_is_found_beside_its_date_and_among_others() -> None:
    text = "1234 4111 1111 1111 1111 12/27 123, 5500 0000 0000 0004\n3782 822463 10005 4111111111111111 999"
    assert redacted(text, personal_data=["card_number"], replacement="#") == "1234 # 12/27 123, #\n# # 999"


def test_an_iban_in_small_letters_is_no_telephone_number() -> None:
    text = "pay de89 3704 0044 0532 0130 00 be68 5390 0754 7034 with care"
    assert redacted(text, personal_data=["phone", "iban"]) == "pay [iban] [iban] with care"


def test_a_low_line_is_a_border_unless_the_phrase_has_one() -> None:
    rule = {"phrases": ["project phoenix", "sales_db"], "replacement": "#"}
    assert redacted("_project phoenix_ __Project\u00a0Phoenix__ project_phoenix", **rule) == "_#_ __#__ project_phoenix"
    assert redacted("sales_db, my_sales_db, sales_db_2", **rule) == "#, my_sales_db, sales_db_2"


def test_phrases_are_whole_words_in_any_case_and_with_any_blanks() -> None:
    rule = {"phrases": ["Project Phoenix", "C++", "项目凤凰"], "replacement": "#"}
    assert redacted("the project\n \u00a0PHOENIX, projectphoenix, project phoenixes", **rule) == (
        "the #, projectphoenix, project phoenixes"
    )
    assert redacted("C++ and c++17, 关于项目凤凰的事", **rule) == "# and #17, 关于#的事"


def test_findings_that_overlap_are_replaced_as_one() -> None:
    assert redacted("key: abcabc!", patterns=["abcab", "cabc"], replacement="<{kind}>") == "key: <rule>!"


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="ab@. -14\u00a0\u2013_\n", max_size=60))
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
    for piece in (
        "a",
        "1 ",
        "a@",
        "a.",
        ":",
        "+1-",
        "-----BEGIN ",
        "4111 ",
        "1.\n",
        "de89 ",
        "(123) ",
        "12345678\u00a0",
    ):
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


@pytest.mark.parametrize(
    ("rules", "warned"),
    [
        (r"after: [{name: a, patterns: ['BEGIN[\s\S]*END']}]", True),
        (r"after: [{name: a, patterns: ['a(foo|b{250}x)c']}]", True),
        (r"{window: 20, after: [{name: a, phrases: [a phrase of more than twenty]}]}", True),
        (r"{window: 252, after: [{name: a, patterns: ['a(foo|b{250}x)']}]}", False),
        (r"after: [{name: a, patterns: ['\bTCK-\d+\b', '(?i)x.*', '\pL{3}\x{4e00}', '\Qa.b\E']}]", False),
        (r"{streams: hold, after: [{name: a, patterns: ['BEGIN[\s\S]*END']}]}", False),
        (r"before: [{name: a, patterns: ['BEGIN[\s\S]*END']}]", False),
    ],
)
def test_a_pattern_that_a_stream_cannot_hold_is_warned_of(tmp_path: Path, rules: str, warned: bool) -> None:
    write(tmp_path, policy=f"{EVERYBODY}guardrails:\n  {rules}\n")
    report = check(tmp_path / "policy.yaml")
    assert report.ok
    warnings = [problem for problem in report.warnings if "passes unseen" in problem.message]
    assert len(warnings) == warned
    assert all("guardrails:" in (tmp_path / "policy.yaml").read_text().split("\n")[one.line - 2] for one in warnings)


@pytest.mark.parametrize("size", [1, 7, 50])
def test_a_stream_finds_the_longer_forms_as_a_whole_text_does(size: int) -> None:
    rule = guard(action="redact", personal_data=["phone", "card_number", "iban"], phrases=["project phoenix"])
    said = (
        "4111 \u00a0 1111 \r\n1111  - 1111 12/27, +49 (0) 30 \u2013 901820 ext. 22, _project phoenix_ "
        "de89  3704  0044  0532  0130  00 and be68 5390 0754 7034 with 3782.822463.10005; "
    )
    whole = said * 5
    text, findings = Text(), Findings()
    given = []
    for at in range(0, len(whole), size):
        text.held += whole[at : at + size]
        given.append(text.take((rule,), 200, findings))
    given.append(text.take((rule,), None, findings))
    assert "".join(given) == rule.replace(whole, rule.find(whole))
    assert findings.kinds["rule"] == {"card_number": 10, "phone": 5, "iban": 10, "rule": 5}
