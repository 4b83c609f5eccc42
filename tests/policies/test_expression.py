"""Conditions: what is wrong is found at load, with its place; what fails later never kills a request."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies import cel
from policies.expression import ConditionError, InvalidCondition, compile_condition
from policies.facts import MEMBERS, VARIABLES, Facts
from tiers.task import default_classifier

PROFILE = default_classifier().classify([{"role": "user", "content": "Translate to French: good morning"}])
FACTS = Facts(profile=PROFILE, tags=("env=prod",))


@pytest.mark.parametrize(
    "source",
    [
        "prompt_tokens > 6000",
        "prompt_tokens > 6000.5",
        'task in ["classification", "extraction"] && complexity < 0.4',
        "budget.used > 0.9 || !(stream)",
        "hour >= 22 || hour < 6",
        "tags.exists(t, t.startsWith('env='))",
        '"env=prod" in tags',
        "size(user_text) > 10 && user_text.contains('refund')",
        "user_text.matches('(?i)order [0-9]+')",
        "(has_tools ? 1 : 2) == 1",
        "double(prompt_tokens) * 1.5 > 100.0",
        "max_tokens == 0 || max_tokens > 500 // long answers",
        "messages % 2 == 1",
        "-prompt_tokens < 0",
        "true",
    ],
)
def test_good(source: str) -> None:
    condition = compile_condition(source)
    assert isinstance(condition.holds(cel.Context(variables=FACTS.variables(condition.variables))), bool)


@pytest.mark.parametrize(
    ("source", "at", "words", "suggestion"),
    [
        ("promt_tokens > 3", "promt_tokens", "unknown variable", "prompt_tokens"),
        ("true || promt_tokens > 3", "promt_tokens", "unknown variable", "prompt_tokens"),
        ("budget.usd > 0.5", "usd", "has no 'usd'", "used"),
        ("size(task) > 3 && taks == 'chat'", "taks", "unknown variable", "task"),
        ("task == 'clasification'", "'clasification'", "is never", "classification"),
        ("task in ['chat', 'summarization']", "'summarization'", "is never", "summarisation"),
        ("'summarization' == task", "'summarization'", "is never", "summarisation"),
        ("complexity", "complexity", "must be true or false", None),
        ("complexity > 'high'", ">", "cannot be compared", None),
        ("hour == '12'", "==", "never equal", None),
        ("team == null", "==", "never null", None),
        ("prompt_tokens + 1.5 > 3.0", "+", "with a point", None),
        ("stream && prompt_tokens", "prompt_tokens", "needs true or false, this is an int;", None),
        ("tags < tags", "tags", "needs an order", None),
        ("budget > 0.5", "budget", "needs an order", None),
        ("!hour", "hour", "needs true or false", None),
        ("tags.contains('x')", "tags", "needs text, this is a list.", None),
        ("task in 'chat'", "'chat'", "needs a list", None),
        ("user_text.matches('[')", "'['", "not a regular expression", None),
        ("user_text.containz('x')", "containz", "unknown function", "contains"),
        ("hour.used > 1", "used", "has no field", None),
        ("task = 'chat'", "=", "compare with '=='", None),
        ("stream and has_tools", "and", "'&&' for and", None),
        ("stream or has_tools", "or", "'||' for or", None),
        ("not stream", "stream", "'!' for not", None),
        ("hour >", "", "not a CEL expression", None),
        ("1 / 0 > 1", "1", "always fails", None),
    ],
)
def test_bad(source: str, at: str, words: str, suggestion: str | None) -> None:
    with pytest.raises(InvalidCondition) as caught:
        compile_condition(source)
    fault = caught.value.faults[0]
    assert words in fault.message
    assert fault.suggestion == suggestion
    assert source[fault.offset :].startswith(at)


def test_several_faults_are_reported_together() -> None:
    with pytest.raises(InvalidCondition) as caught:
        compile_condition("taks == 'chat' && compexity > 1")
    assert [fault.suggestion for fault in caught.value.faults] == ["task", "complexity"]


@pytest.mark.parametrize("source", ["(" * 400 + "true" + ")" * 400, "!" * 1500 + "true", "a" * 3000])
def test_monsters_are_refused(source: str) -> None:
    with pytest.raises(InvalidCondition):
        compile_condition(source)


def test_constants_are_known() -> None:
    assert compile_condition("1 < 2").constant is True
    assert compile_condition("false").constant is False
    assert compile_condition("stream").constant is None


def test_whether_the_classifier_is_needed() -> None:
    assert compile_condition("complexity > 0.5").needs_profile
    assert not compile_condition("prompt_tokens > 5").needs_profile


def test_a_failure_at_run_time_is_one_kind_of_error() -> None:
    condition = compile_condition("tags[3] == 'x'")
    with pytest.raises(ConditionError, match="IndexError"):
        condition.holds(cel.Context(variables=FACTS.variables(["tags"])))


@pytest.mark.parametrize("name", VARIABLES)
def test_every_variable_has_the_type_that_is_documented(name: str) -> None:
    """The type checker, the CEL library and the facts must agree."""
    value = FACTS.variables([name])[name]
    python = {"int": int, "double": float, "string": str, "bool": bool, "list": list, "map": dict}
    assert type(value) is python[VARIABLES[name].type]
    assert VARIABLES[name].meaning.endswith(".")
    same = compile_condition(f"{name} == {name}")
    assert same.holds(cel.Context(variables=FACTS.variables(same.variables)))


def test_members_are_what_the_facts_hold() -> None:
    for name, members in MEMBERS.items():
        assert set(FACTS.variables([name])[name]) == set(members)


_ATOMS = st.sampled_from(
    [
        "prompt_tokens",
        "complexity",
        "task",
        "stream",
        "tags",
        "budget.used",
        "1",
        "2.5",
        "'chat'",
        "true",
        "[1, 2]",
        "hour",
    ]
)
_EXPRESSIONS = st.recursive(
    _ATOMS,
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["&&", "||", "==", "<", "in", "+", "*", "!="]), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        inner.map(lambda e: f"!({e})"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} ? {t[1]} : {t[2]})"),
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(_EXPRESSIONS)
def test_what_the_checker_accepts_the_library_can_decide(source: str) -> None:
    """An accepted condition of typed parts gives a truth value, never a type error."""
    try:
        condition = compile_condition(source)
    except InvalidCondition:
        return
    context = cel.Context(variables=FACTS.variables(condition.variables))
    if "?" in source:  # branches of different types are `dyn`: the library decides
        try:
            condition.holds(context)
        except ConditionError:
            return
    else:
        assert condition.holds(context) in (True, False)
