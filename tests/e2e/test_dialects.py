"""The official SDKs on the routes beside chat, against everything real: text completions, and Anthropic's messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.conftest import Stack

MODEL = "smollm2-135m"
FRESH = {"x-tierline-cache": "no-cache, no-store"}
COLD = {"temperature": 0}  # the SDK has no argument for it
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
COUNT: list[Any] = [{"role": "user", "content": "Count from one to ten in digits, separated by commas."}]


@pytest.fixture(scope="module")
def sdk(tierline_stack: Stack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{tierline_stack.base_url}/v1",
        api_key=tierline_stack.key,
        max_retries=0,
        timeout=120,
        default_headers=FRESH,
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude_sdk(tierline_stack: Stack) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=tierline_stack.base_url,
        api_key=tierline_stack.key,
        max_retries=0,
        timeout=120,
        default_headers=FRESH,
    ) as client:
        yield client


# Chat, as streams of more than one answer.


def test_a_stream_of_several_answers_says_what_they_say_whole(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {
        "model": MODEL, "messages": FRANCE, "n": 2, "seed": 7, "temperature": 0.8, "max_tokens": 12,
        "logprobs": True, "top_logprobs": 1,
    }  # fmt: skip
    whole = sdk.chat.completions.create(**options)
    texts, tokens, ends = ["", ""], [0, 0], ["", ""]
    for chunk in sdk.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            tokens[choice.index] += len(choice.logprobs.content or []) if choice.logprobs else 0
            ends[choice.index] = choice.finish_reason or ends[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [choice.finish_reason for choice in whole.choices]
    assert tokens == [len(choice.logprobs.content) for choice in whole.choices]
    assert texts[0] != texts[1]


# Text completions.


def test_a_text_is_continued_whole_and_streamed(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is", "temperature": 0, "max_tokens": 8}
    whole = sdk.completions.create(**options)
    (choice,) = whole.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 8)
    stream = sdk.completions.create(**options, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == choice.text
    assert chunks[-1].choices[0].finish_reason == "length"
    assert last.usage == whole.usage
    assert len(chunks) > 3


def test_texts_have_as_many_continuations_as_are_asked_for(sdk: openai.OpenAI) -> None:
    answer = sdk.completions.create(
        model=MODEL, prompt=["One, two,", "Red, green,"], n=2, temperature=1, seed=3, max_tokens=4, logprobs=2
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for choice in answer.choices:
        assert choice.logprobs is not None
        assert "".join(choice.logprobs.tokens or []) == choice.text
        assert all(value <= 0 for value in choice.logprobs.token_logprobs or [])


def test_a_continuation_ends_before_its_stop(sdk: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": MODEL, "prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 30}
    free = sdk.completions.create(**options).choices[0].text
    assert " 8" in free
    (choice,) = sdk.completions.create(**options, stop=" 8").choices
    assert choice.text == free[: free.index(" 8")]
    assert choice.finish_reason == "stop"


# Messages.


def test_a_message_whole_and_streamed(claude_sdk: anthropic.Anthropic) -> None:
    options: dict[str, Any] = {"model": MODEL, "messages": FRANCE, "system": "Be brief.", "max_tokens": 40}
    options["extra_body"] = COLD
    whole = claude_sdk.messages.create(**options)
    (block,) = whole.content
    assert block.type == "text"
    assert "Paris" in block.text
    assert whole.stop_reason == "end_turn"
    pieces: list[str] = []
    with claude_sdk.messages.stream(**options) as stream:
        pieces.extend(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(pieces) == block.text
    assert len(pieces) > 3
    assert final.stop_reason == "end_turn"

    def read(usage: anthropic.types.Usage) -> int:
        return usage.input_tokens + (usage.cache_read_input_tokens or 0)

    assert read(final.usage) == read(whole.usage) > 10
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert (
        read(whole.usage)
        == claude_sdk.messages.count_tokens(model=MODEL, messages=FRANCE, system="Be brief.").input_tokens
    )


@pytest.mark.parametrize("streamed", [False, True])
def test_a_message_says_why_it_ended(claude_sdk: anthropic.Anthropic, streamed: bool) -> None:
    def ask(**more: Any) -> anthropic.types.Message:
        options: dict[str, Any] = {"model": MODEL, "messages": COUNT, "extra_body": COLD, "max_tokens": 60, **more}
        if not streamed:
            return claude_sdk.messages.create(**options)
        with claude_sdk.messages.stream(**options) as stream:
            return stream.get_final_message()

    short = ask(max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = ask(stop_sequences=["never said", "3"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "3")
    assert "3" not in "".join(block.text for block in stopped.content if block.type == "text")


def test_an_answer_that_the_client_began_goes_on(claude_sdk: anthropic.Anthropic) -> None:
    begun = [*FRANCE, {"role": "assistant", "content": "The capital of France is"}]
    answer = claude_sdk.messages.create(model=MODEL, messages=begun, max_tokens=8, extra_body=COLD)
    (block,) = answer.content
    assert block.type == "text"
    assert block.text.lstrip().startswith("Paris")


def test_a_tool_that_must_be_called_is_called(claude_sdk: anthropic.Anthropic) -> None:
    schema = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    tools: list[Any] = [{"name": "now", "input_schema": {**schema, "additionalProperties": False}}]
    choice: Any = {"type": "tool", "name": "now"}
    answer = claude_sdk.messages.create(model=MODEL, messages=FRANCE, max_tokens=90, tools=tools, tool_choice=choice)
    assert answer.stop_reason == "tool_use"
    (call,) = [part for part in answer.content if part.type == "tool_use"]
    assert (call.name, call.input) == ("now", {"zone": "UTC"})
