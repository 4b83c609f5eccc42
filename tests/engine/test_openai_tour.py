"""The official OpenAI SDK against the real engine: schemas, tools, streams of both, choices and patterns."""

from __future__ import annotations

import json
import re
from typing import Literal

import openai
import pydantic
import pytest

from tests.engine.serving import MODEL

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]


class City(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=12)
    size: Literal["small", "large"]
    sights: list[Literal["tower", "river", "bridge"]] = pydantic.Field(max_length=2)


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0)


def ask(client, messages=ASK, **options):
    options = {"temperature": 0, "max_tokens": 120} | options
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


def test_a_pydantic_model_is_parsed_from_the_answer(client) -> None:
    asked = [{"role": "user", "content": "Describe Paris."}]
    answer = client.chat.completions.parse(
        model=MODEL, messages=asked, response_format=City, max_tokens=200, temperature=0
    )
    choice = answer.choices[0]
    assert isinstance(choice.message.parsed, City)
    assert choice.finish_reason == "stop"


@pytest.mark.slow
def test_several_seeded_answers_each_keep_to_the_schema_and_repeat(client) -> None:
    schema = {"name": "city", "strict": True, "schema": City.model_json_schema()}
    options = {"response_format": {"type": "json_schema", "json_schema": schema}, "temperature": 0.7, "seed": 7}
    options["max_tokens"] = 300
    first, again = (ask(client, n=3, **options) for _ in range(2))
    contents = [choice.message.content for choice in first.choices]
    assert [City.model_validate_json(content) for content in contents]
    assert contents == [choice.message.content for choice in again.choices]


def test_a_json_object_cut_by_its_limit_is_length(client) -> None:
    schema = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 50}
    answer = ask(client, max_tokens=10, extra_body={"structured_outputs": {"json": schema}}).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.content.startswith("[")


def test_a_required_tool_is_called_and_its_result_taken(client) -> None:
    first = ask(client, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content is None
    [call] = first.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments).keys() == {"city", "unit"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sunny, 21 degrees."}
    history = [*ASK, first.message.model_dump(exclude_none=True), result]
    last = ask(client, history, tools=[WEATHER], tool_choice="none").choices[0]
    assert last.finish_reason in ("stop", "length")
    assert last.message.content
    assert last.message.tool_calls is None


def test_a_streamed_call_adds_up_to_the_whole_one(client) -> None:
    choice = {"type": "function", "function": {"name": "get_weather"}}
    whole = ask(client, tools=[WEATHER], tool_choice=choice).choices[0].message.tool_calls
    chunks = list(ask(client, tools=[WEATHER], tool_choice=choice, stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert calls[0].id
    assert [call.function.name for call in calls if call.function.name] == ["get_weather"]
    assert all(call.index == 0 for call in calls)
    assert "".join(call.function.arguments for call in calls) == whole[0].function.arguments
    assert len(calls) > 3, "arguments come as they are written"
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)


def test_the_sdks_own_accumulation_of_a_stream_parses(client) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, response_format=City, max_tokens=120, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, City)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"regex": r"\d{3}-[a-f]+x"}}, "[0-9]{3}-[a-f]+x"),
        ({"structured_outputs": {"grammar": 'root ::= "yes" | "no"'}}, "yes|no"),
        ({"guided_choice": ["ja", "nein"]}, "ja|nein"),
    ],
)
def test_choices_patterns_and_grammars(client, asked, pattern) -> None:
    for options in ({"temperature": 0}, {"temperature": 1.5, "seed": 3, "frequency_penalty": 1.0, "logprobs": True}):
        choice = ask(client, extra_body=asked, **options, max_tokens=60).choices[0]
        if choice.finish_reason == "stop":
            assert re.fullmatch(pattern, choice.message.content)
        if choice.logprobs is not None:
            assert "".join(entry.token for entry in choice.logprobs.content) == choice.message.content


def test_what_cannot_be_compiled_is_the_clients_error_and_nobody_elses(client) -> None:
    with pytest.raises(openai.BadRequestError, match="unclosed") as raised:
        ask(client, extra_body={"structured_outputs": {"regex": "a("}})
    assert raised.value.body["code"] == "invalid_grammar"
    assert ask(client, max_tokens=2).choices[0].message.content
