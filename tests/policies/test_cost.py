"""What a condition can cost is bounded before it runs, and the bound is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.admission import MAX_TAG_LENGTH, MAX_TAGS
from policies import cost, patterns
from policies.expression import InvalidCondition, compile_condition
from policies.facts import LONGEST_TAG, LONGEST_TEXT, MOST_TAGS, Context, from_chat
from policies.load import load_file
from policies.yamlfile import InvalidFile
from tests.policies.policy_files import policy

TEN = "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]"


def nested(depth: int, over: str = TEN, body: str = "true") -> str:
    """`over.all(x0, over.all(x1, ... body))`."""
    return "".join(f"{over}.all(x{level}, " for level in range(depth)) + body + ")" * depth


def steps(source: str) -> int:
    return compile_condition(source).steps


@pytest.mark.parametrize(
    ("source", "at"),
    [
        (nested(7), "all(x0"),
        (nested(4), "all(x0"),
        (nested(4, body="prompt_tokens > x0"), "all(x0"),
        (nested(4, over="tags"), "all(x0"),
        ("stream && " + nested(5, over="tags", body="x0 == x1"), "all(x0"),
        (f"dyn({TEN})" + nested(4)[len(TEN) :], "all(x0"),
        (f"(stream ? {TEN} : {TEN} + {TEN})" + nested(4)[len(TEN) :], "all(x0"),
        (f"{{'a': {TEN}}}.a" + nested(5)[len(TEN) :], "all(x0"),
        (f"[{TEN}][0]" + nested(5)[len(TEN) :], "all(x0"),
        (f"[{', '.join(['1'] * 400)}].map(x, x).size() > 1", "map(x"),
        (f"{TEN}.map(a, {TEN}.map(b, {TEN})).map(c, c.map(d, d.map(e, e))).size() > 1", "map(c"),
        ("tags.map(x, user_text).size() > 1", "map(x"),
        ("tags.all(x, tags.all(y, user_text.contains(x)))", "all(x"),
        (" + ".join(["user_text"] * 40) + " == ''", "+"),
        ("true == [" + ", ".join(["user_text"] * 150) + "].exists(x, x == '')", "exists"),
        (r"user_text.matches(r'\w{50}')", "matches"),
        (r"user_text.matches('\\w{50}')", "matches"),
        ("user_text.matches('(?:(?:a{1,30}){1,30}){1,30}')", "matches"),
        ("user_text.matches('a{1000}')", "matches"),
        ("tags.exists(t, user_text.matches('(a|b)*(c|d)*(e|f)*'))", "exists"),
    ],
)
def test_a_costly_condition_is_refused_where_the_cost_is(source: str, at: str) -> None:
    with pytest.raises(InvalidCondition) as caught:
        compile_condition(source)
    fault = next(fault for fault in caught.value.faults if "too costly" in fault.message)
    assert source[fault.offset :].startswith(at)
    assert "at most 50,000 are allowed" in fault.message


def test_the_estimate_is_said() -> None:
    with pytest.raises(InvalidCondition, match=r"too costly: up to [\d,]+ steps, about [\d.]+ ms, for each request;"):
        compile_condition(nested(4))
    with pytest.raises(InvalidCondition, match=r"too costly: more than 1,000,000,000,000 steps for each request;"):
        compile_condition(nested(40))


@pytest.mark.parametrize(
    "source",
    [
        nested(3),
        "tags.exists(t, tags.exists(u, u == t && t != ''))",
        "tags.exists(t, user_text.contains(t))",
        "tags.filter(t, t.startsWith('a')).map(t, size(t)).exists(n, n > 3)",
        " || ".join([f"user_text.contains('word {n}')" for n in range(50)]),
        r"user_text.matches(r'(?i)\b(refund|chargeback|cancel(lation)?)\b')",
        r"user_text.matches(r'[\w.]+@[\w.]+\.\w+')",
        r"user_text.matches(r'\d{4}-\d{2}-\d{2}') && system_text.matches('^You are')",
        "model.matches('^(gpt|claude)-.*[0-9]{1,3}$')",
        f"task in [{', '.join(['task'] * 200)}]",
    ],
)
def test_what_people_write_is_not_costly(source: str) -> None:
    assert 0 < steps(source) < cost.MAX_STEPS


def test_a_plain_condition_is_a_few_steps() -> None:
    assert steps("prompt_tokens > 6000") < 10
    assert steps('task in ["classification", "extraction"] && complexity < 0.4') < 30


def test_lists_in_lists_multiply() -> None:
    one, two, three = (steps(nested(depth)) for depth in (1, 2, 3))
    assert two > 9 * one
    assert three > 9 * two


def test_a_variable_of_a_loop_hides_the_one_of_the_request() -> None:
    assert steps("[1].all(user_text, user_text + user_text > 1)") < steps("[1].all(x, user_text + user_text > '')") / 10


@pytest.mark.parametrize("pattern", ["model", "'a' + 'b'", "tags[0]", "(stream ? 'a' : 'b')"])
def test_a_pattern_must_be_written_out(pattern: str) -> None:
    """A client could bring any pattern in what it sends."""
    source = f"user_text.matches({pattern})"
    with pytest.raises(InvalidCondition) as caught:
        compile_condition(source)
    assert "a pattern that is written out" in caught.value.faults[0].message
    assert source[caught.value.faults[0].offset :].startswith(pattern)


def test_what_the_tree_does_not_have_is_refused() -> None:
    """A form that nobody has looked at could cost anything."""
    for source in ("tags.all((x), true)", "[1].exists((x), x == 1)"):
        with pytest.raises(InvalidCondition):
            compile_condition(source)


def test_a_raw_text_ends_at_its_quote() -> None:
    r"""In `r'\'` the backslash is a character like any other: nothing hides behind it."""
    hidden = rf"r'\' == ' == ' || {nested(7)} || ' == ' == ''"
    with pytest.raises(InvalidCondition, match="too costly"):
        compile_condition(hidden)


@pytest.mark.parametrize(
    ("pattern", "states"),
    [
        ("abc", 3),
        ("a{5}", 5),
        ("a{2,5}", 5),
        ("a{3,}", 4),
        ("(ab){5}", 10),
        ("(?:(?:ab){5}){5}", 50),
        ("(?P<name>a){5}", 5),
        ("[abc]{5}", 5),
        ("[]a]{5}b{3}", 8),
        ("[^]a]{5}b{3}", 8),
        (r"\x{61}{5}", 5),
        (r"\pL{5}", 5),
        (r"\p{Greek}{5}", 5),
        (r"\{5}", 1),
        ("a{ 2 , 5 }", 5),
        ("(a", 1),
        ("a)b{4}", 5),
        ("[a{5}", 5),
        ("a|b{7}", 8),
    ],
)
def test_repetitions_are_written_out(pattern: str, states: int) -> None:
    """At least so many states: the estimate may be higher, never lower."""
    assert states <= patterns.size(pattern).states <= 6 * states + 12


def test_the_verbose_flag_is_refused() -> None:
    for flags in ("(?x)", "(?ix)", "(?x-i:a)"):
        with pytest.raises(InvalidCondition, match="the flag 'x'"):
            compile_condition(f"user_text.matches('{flags} a')")
    assert compile_condition("user_text.matches('(?i-x)a')")


def test_a_policy_says_where_its_conditions_become_too_costly(tmp_path: Path) -> None:
    rule = "  - when: tags.exists(t, user_text.contains(t) || system_text.contains(t))\n    tier: small\n"
    path = tmp_path / "p.yaml"
    path.write_text(policy("p", "routes:\n" + rule * 5))
    load_file(path)
    path.write_text(policy("p", "routes:\n" + rule * 30))
    with pytest.raises(InvalidFile) as caught:
        load_file(path)
    (problem,) = caught.value.problems
    alone = steps("tags.exists(t, user_text.contains(t) || system_text.contains(t))")
    assert problem.line == 5 + 2 * (cost.MAX_POLICY_STEPS // alone)
    assert "too costly together: up to" in problem.message


def test_a_costly_condition_has_its_place_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(policy("p", f"routes:\n  - when: >-\n      stream &&\n      {nested(7)}\n    tier: small\n"))
    with pytest.raises(InvalidFile) as caught:
        load_file(path)
    (problem,) = caught.value.problems
    assert (problem.line, problem.column) == (7, 7 + len(TEN) + 1)


def test_the_bounds_are_those_of_what_is_let_in() -> None:
    assert (MOST_TAGS, LONGEST_TAG) == (MAX_TAGS, 2 * MAX_TAG_LENGTH + 1)
    text = "a" * LONGEST_TEXT + "middle" + "b" * LONGEST_TEXT
    messages = [{"role": role, "content": text} for role in ("system", "user")]
    facts = from_chat({"messages": messages}, Context())
    half = LONGEST_TEXT // 2
    assert facts.user_text == facts.system_text == "a" * half + "b" * half
    whole = from_chat({"messages": [{"role": "user", "content": "a" * LONGEST_TEXT}]}, Context())
    assert whole.user_text == "a" * LONGEST_TEXT
    assert facts.prompt_tokens > 2 * whole.prompt_tokens
