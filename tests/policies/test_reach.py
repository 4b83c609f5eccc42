"""Rules that never decide are named, and no rule that may decide is: compared with what conditions really say."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies import cel
from policies.expression import compile_condition
from policies.load import load_file
from policies.reach import unreachable
from policies.rules import Rule
from policies.schema.routes import AppliesTo, Route


def rules(*conditions: str | None) -> list[Rule]:
    found = []
    for index, when in enumerate(conditions):
        route = Route(when=when, tier="small")
        found.append(Rule(index, f"r{index}", route, compile_condition(when) if when else None, index + 1))
    return found


def dead(*conditions: str | None, applies_to: AppliesTo | None = None) -> list[int]:
    return [item.rule.index for item in unreachable(rules(*conditions), applies_to)]


@pytest.mark.parametrize(
    "conditions",
    [
        (None, "stream"),
        ("prompt_tokens > 6000", "prompt_tokens > 8000"),
        ("prompt_tokens >= 6000", "prompt_tokens > 5999"),
        ("6000 < prompt_tokens", "prompt_tokens > 8000 && has_tools"),
        ('task in ["math", "coding"]', 'task == "math"'),
        ("stream", "!stream", "prompt_tokens > 5"),
        ("prompt_tokens > 100", "prompt_tokens <= 100", "has_tools"),
        ("prompt_tokens > 100 || has_tools", 'has_tools && team == "x"'),
        ('user_text.contains("refund")', 'stream && user_text.contains( "refund" )'),
        ("weekday >= 6", "weekday in [6, 7]"),
        ("weekday < 6", "weekday == 6", "weekday > 5 && weekday != 6 && weekday != 7"),
        ("!(stream || has_tools)", "!stream && !has_tools"),
        ("budget.used > 0.5", "budget.used > 0.9"),
        ("true", "stream"),
    ],
)
def test_what_earlier_rules_take(conditions: tuple[str | None, ...]) -> None:
    assert dead(*conditions) == [len(conditions) - 1]


@pytest.mark.parametrize(
    "condition",
    [
        "complexity > 1.0",
        "hour > 23",
        "weekday == 0",
        "prompt_tokens < 10 && prompt_tokens > 20",
        "prompt_tokens > 5 && prompt_tokens < 6",
        'task == "math" && task == "coding"',
        "stream && !stream",
        'task != "math" && task in ["math"]',
    ],
)
def test_what_is_never_true(condition: str) -> None:
    assert dead(condition) == [0]
    found = unreachable(rules(condition), None)[0]
    assert found.by == ()
    assert found.variables


def test_the_scope_of_the_policy_counts() -> None:
    support = AppliesTo(teams=("support",))
    assert dead('team == "research"', applies_to=support) == [0]
    assert dead('team == "research"') == []
    assert dead('model == "gpt"', applies_to=support) == [0]
    assert dead('model == "gpt"', applies_to=AppliesTo(models=("gpt", "auto"))) == []


@pytest.mark.parametrize(
    "conditions",
    [
        ("prompt_tokens > 8000", "prompt_tokens > 6000"),
        ("stream && has_tools", "stream"),
        ('user_text.contains("a")', '!user_text.contains("a")', "stream"),  # a failing one is neither
        ('user_text.contains("a")', 'user_text.contains("b")'),
        ("tags[3] == 'x=y'", "tags[3] != 'x=y'", "has_tools"),
        ("complexity > 0.5", "complexity >= 0.5"),
        ("temperature < 1.0", "temperature > 1.0", "temperature == 1.0"),
        ("size(tags) > 2", "size(tags) > 3"),
        ('task == "math" ? stream : has_tools', "stream"),
    ],
)
def test_no_false_alarm(conditions: tuple[str, ...]) -> None:
    assert dead(*conditions) == []


ATOMS = st.sampled_from(
    [
        "prompt_tokens > 3", "prompt_tokens >= 3", "prompt_tokens == 2", "3 > prompt_tokens", "prompt_tokens != 4",
        "prompt_tokens in [1, 2, 5]", "hour > 22", "hour <= 3", "complexity > 0.5", "complexity <= 0.5",
        'task == "math"', 'task in ["math", "coding"]', 'task != "coding"', "stream", "!stream", "stream == false",
        "has_tools", 'team == "a"', 'team != "a"', 'user_text.contains("x")', "prompt_tokens > 2.5", "true", "false",
    ]
)  # fmt: skip
CONDITIONS = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}) && ({pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]}) || ({pair[1]})"),
        inner.map(lambda one: f"!({one})"),
    ),
    max_leaves=5,
)
REQUESTS = st.fixed_dictionaries(
    {
        "prompt_tokens": st.integers(0, 6),
        "hour": st.integers(0, 23),
        "complexity": st.sampled_from([0.0, 0.4, 0.5, 0.6, 1.0]),
        "task": st.sampled_from(["math", "coding", "chat"]),
        "stream": st.booleans(),
        "has_tools": st.booleans(),
        "team": st.sampled_from(["", "a", "b"]),
        "user_text": st.sampled_from(["", "x"]),
    }
)


@settings(max_examples=80, deadline=None)
@given(st.lists(CONDITIONS, min_size=1, max_size=4), st.lists(REQUESTS, min_size=20, max_size=20))
def test_no_rule_that_is_called_dead_ever_decides(conditions: list[str], requests: list[dict[str, object]]) -> None:
    made = rules(*conditions)
    named = {item.rule.index for item in unreachable(made, None)}
    for request in requests:
        context = cel.Context(variables=request)
        first = next((rule.index for rule in made if rule.condition and rule.condition.holds(context)), None)
        assert first not in named, (conditions, request)


def test_the_warning_names_the_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "version: 1\nname: a\nowner: me\nroutes:\n"
        "  - {name: long, when: prompt_tokens > 100, tier: large}\n"
        "  - {name: longer, when: prompt_tokens > 200, tier: large}\n"
        "  - {name: short, when: prompt_tokens <= 100, tier: small}\n"
        "  - {name: tools, when: has_tools, tier: small}\n"
        "  - {name: hard, when: complexity > 1.5, tier: small}\n"
    )
    _, _, warnings = load_file(path)
    said = [(w.line, w.message) for w in warnings]
    assert (6, "never reached: 'long' (line 5) takes every request that it would match.") in said
    assert (8, "never reached: the rules in lines 5, 7 together take every request that it would match.") in said
    assert (9, "the condition is never true: 'complexity' cannot be so.") in said
