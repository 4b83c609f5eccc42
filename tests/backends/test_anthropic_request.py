"""Parameters of chat requests as an Anthropic server takes them; what it has no word for is refused."""

from __future__ import annotations

import pytest

from tests.backends.anthropic_types import HELLO, refused, translated

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"properties": {"city": {}}}}}
SCHEMA = {"type": "object", "properties": {"rivers": {"type": "integer"}}, "additionalProperties": False}


def test_the_least():
    assert translated() == {
        "model": "claude-opus-5",
        "max_tokens": 4096,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
    }
    assert translated(stream=True)["stream"] is True


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_tokens": None, "max_completion_tokens": 7}, {"max_tokens": 7}),
        ({"temperature": 0, "top_p": 0.5, "top_k": 40}, {"temperature": 0, "top_p": 0.5, "top_k": 40}),
        ({"temperature": 1.0}, {"temperature": 1.0}),
        ({"stop": "END"}, {"stop_sequences": ["END"]}),
        ({"stop": ["a", "b"]}, {"stop_sequences": ["a", "b"]}),
        ({"user": "u1"}, {"metadata": {"user_id": "u1"}}),
        ({"user": "u1", "safety_identifier": "s1"}, {"metadata": {"user_id": "s1"}}),
        ({"service_tier": "auto"}, {"service_tier": "auto"}),
        ({"service_tier": "default"}, {"service_tier": "standard_only"}),
        ({"service_tier": "flex"}, {}),
        ({"thinking": {"type": "adaptive"}}, {"thinking": {"type": "adaptive"}}),
        ({"cache_control": {"type": "ephemeral"}}, {"cache_control": {"type": "ephemeral"}}),
        ({"response_format": {"type": "text"}}, {}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "r", "schema": SCHEMA, "strict": True},
                }
            },
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA, "description": "Rivers"}}},
            {"output_config": {"format": {"type": "json_schema", "schema": {**SCHEMA, "description": "Rivers"}}}},
        ),
    ],
)
def test_parameters(fields, expected):
    request = translated(**fields)
    plain = translated()
    assert request == {**plain, **expected}


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "logprobs": False},
        {"seed": None, "store": False, "modalities": ["text"], "verbosity": "medium", "functions": []},
        {"stream_options": {"include_usage": True}, "metadata": {"a": "b"}},
        {"prompt_cache_key": "k", "prompt_cache_retention": "24h", "cache_salt": "s"},
        {"parallel_tool_calls": True, "tools": [], "stop": [], "user": None, "temperature": None},
        {"continue_final_message": False, "add_generation_prompt": True},
    ],
)
def test_what_changes_no_answer(neutral):
    assert translated(**neutral) == translated()


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("n", 2),
        ("seed", 0),
        ("logprobs", True),
        ("logit_bias", {"50256": -100}),
        ("frequency_penalty", 0.5),
        ("presence_penalty", -1),
        ("verbosity", "low"),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "alloy"}),
        ("prediction", {"type": "content", "content": "x"}),
        ("store", True),
        ("web_search_options", {"search_context_size": "low"}),
        ("min_p", 0.1),
        ("temperature", 1.1),
        ("service_tier", "priority"),
        ("reasoning_effort", "tremendous"),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"name": "r"}}),
        ("max_tokens", None),
        ("continue_final_message", True),
        ("add_generation_prompt", False),
    ],
)
def test_what_the_api_has_no_word_for(param, value):
    error = refused(*HELLO, **{param: value})
    assert error.param == param
    assert param in str(error)


# Thinking.


@pytest.mark.parametrize(
    ("effort", "word"),
    [("minimal", "low"), ("low", "low"), ("medium", "medium"), ("high", "high"), ("xhigh", "xhigh"), ("max", "max")],
)
@pytest.mark.parametrize("model", ["claude-sonnet-4-6", "us.anthropic.claude-opus-4-7-v1", "claude-opus-5", "other"])
def test_effort(model, effort, word):
    request = translated(model=model, reasoning_effort=effort)
    assert request["thinking"] == {"type": "adaptive"}
    assert request["output_config"] == {"effort": word}


@pytest.mark.parametrize(
    ("effort", "budget"),
    [("minimal", 2500), ("low", 2500), ("medium", 5000), ("high", 7500), ("xhigh", 8750), ("max", 8750)],
)
@pytest.mark.parametrize(
    "model", ["claude-3-7-sonnet-20250219", "claude-sonnet-4-20250514", "claude-haiku-4-5-20251001", "claude-opus-4-1"]
)
def test_budget(model, effort, budget):
    request = translated(model=model, reasoning_effort=effort, max_tokens=10_000)
    assert request["thinking"] == {"type": "enabled", "budget_tokens": budget}
    assert "output_config" not in request


def test_budgets_have_a_floor_and_must_leave_room():
    assert translated(model="claude-opus-4-5", reasoning_effort="low", max_tokens=1025)["thinking"] == {
        "type": "enabled",
        "budget_tokens": 1024,
    }
    assert refused(*HELLO, model="claude-opus-4-5", reasoning_effort="low", max_tokens=1024).param == "reasoning_effort"


@pytest.mark.parametrize("model", ["claude-opus-4-5", "claude-opus-5"])
def test_no_thinking(model):
    assert translated(model=model, reasoning_effort="none")["thinking"] == {"type": "disabled"}


def test_effort_and_format_share_one_object():
    request = translated(
        reasoning_effort="low", response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA}}
    )
    assert request["output_config"] == {"effort": "low", "format": {"type": "json_schema", "schema": SCHEMA}}


def test_effort_beside_thinking_is_refused():
    assert refused(*HELLO, reasoning_effort="low", thinking={"type": "adaptive"}).param == "reasoning_effort"


def test_budgets_do_not_go_with_tool_results():
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    said = [*HELLO, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": "3"}]
    assert refused(*said, model="claude-opus-4-5", reasoning_effort="low").param == "reasoning_effort"
    assert translated(said, reasoning_effort="low")["thinking"] == {"type": "adaptive"}


# Tools.


def test_tools():
    function = {"name": "find", "description": "Finds", "parameters": SCHEMA, "strict": True}
    marked = {"type": "function", "function": {"name": "now"}, "cache_control": {"type": "ephemeral"}}
    request = translated(tools=[{"type": "function", "function": function}, WEATHER, marked])
    assert request["tools"] == [
        {"name": "find", "description": "Finds", "input_schema": SCHEMA, "strict": True},
        {"name": "weather", "input_schema": {"type": "object", "properties": {"city": {}}}},
        {"name": "now", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
    ]
    assert "tool_choice" not in request


@pytest.mark.parametrize(
    ("fields", "choice"),
    [
        ({"tool_choice": "auto"}, {"type": "auto"}),
        ({"tool_choice": "none"}, {"type": "none"}),
        ({"tool_choice": "required"}, {"type": "any"}),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, {"type": "tool", "name": "weather"}),
        ({"parallel_tool_calls": False}, {"type": "auto", "disable_parallel_tool_use": True}),
        ({"parallel_tool_calls": False, "tool_choice": "none"}, {"type": "none"}),
        (
            {"parallel_tool_calls": False, "tool_choice": "required"},
            {"type": "any", "disable_parallel_tool_use": True},
        ),
    ],
)
def test_tool_choice(fields, choice):
    assert translated(tools=[WEATHER], **fields)["tool_choice"] == choice


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0]"),
        ({"tools": [WEATHER, {"type": "function", "function": {"name": "f", "x": 1}}]}, "tools[1].function.x"),
        ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice"),
    ],
)
def test_other_tools_are_refused(fields, param):
    assert refused(*HELLO, **fields).param == param
