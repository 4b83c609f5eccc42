"""The unmodified OpenAI SDK against everything real: gateway, engine with SmolLM2, cache with MiniLM."""

from __future__ import annotations

import openai
import pytest
from openai import OpenAI

from tests.conftest import Stack


@pytest.fixture(scope="module")
def client(tierline_stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{tierline_stack.base_url}/v1", api_key=tierline_stack.key, max_retries=0, timeout=60)


def ask(client: OpenAI, text: str, **options: object) -> str:
    options.setdefault("temperature", 0)
    options.setdefault("max_tokens", 32)
    answer = client.chat.completions.create(
        model="auto",
        messages=[{"role": "user", "content": text}],
        **options,  # type: ignore[call-overload]
    )
    return answer.choices[0].message.content or ""


@pytest.mark.parametrize("model", ["auto", "smollm2-135m"])
def test_it_knows_the_capital_of_france(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model, messages=[{"role": "user", "content": "What is the capital of France?"}]
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_says_the_same_as_a_whole_answer(client: OpenAI, tierline_stack: Stack) -> None:
    options = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Name three colours."}],
        "temperature": 0,
        "max_tokens": 40,
        "extra_headers": {"x-tierline-cache": "no-cache, no-store"},
    }
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].tierline["cost_usd"] > 0
    assert len(chunks) > 5


def test_a_conversation_of_several_turns(client: OpenAI) -> None:
    messages = [{"role": "user", "content": "My favourite fruit is the mango."}]
    first = client.chat.completions.create(model="auto", messages=messages, temperature=0, max_tokens=30)  # type: ignore[call-overload]
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "Which fruit did I say I like?"})
    second = client.chat.completions.create(model="auto", messages=messages, temperature=0, max_tokens=40)  # type: ignore[call-overload]
    assert "mango" in second.choices[0].message.content.lower()
    # The first turn's pages are still in the engine.
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_n_gives_several_answers(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="auto",
        messages=[{"role": "user", "content": "Invent a name for a cat."}],
        n=2,
        temperature=1.2,
        max_tokens=12,
        seed=5,
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert all(choice.message.content for choice in answer.choices)


def test_stop_ends_the_answer(client: OpenAI) -> None:
    text = ask(client, "Count from one to ten in digits, separated by commas.", stop=["3"], max_tokens=60)
    assert "3" not in text


def test_a_seed_makes_sampling_repeatable(client: OpenAI) -> None:
    options = {"temperature": 1.0, "max_tokens": 24, "extra_headers": {"x-tierline-cache": "no-cache, no-store"}}
    prompt = "Tell me a very short story about the sea."
    first = ask(client, prompt, seed=11, **options)
    assert ask(client, prompt, seed=11, **options) == first
    assert ask(client, prompt, seed=12, **options) != first


def test_logprobs(client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model="auto",
        messages=[{"role": "user", "content": "What is the capital of Italy?"}],
        logprobs=True,
        top_logprobs=3,
        max_tokens=5,
        temperature=0,
    )
    content = answer.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    assert len(content.content) == 5
    for token in content.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob, abs=1e-3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"model": "gpt-nothing"}, openai.NotFoundError),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError),
        ({"response_format": {"type": "json_schema"}}, openai.BadRequestError),
        ({"temperature": 3}, openai.BadRequestError),
    ],
)
def test_what_cannot_be_done_is_refused(client: OpenAI, options: dict[str, object], error: type[Exception]) -> None:
    request = {"model": "auto", "messages": [{"role": "user", "content": "hi"}], **options}
    with pytest.raises(error) as caught:
        client.chat.completions.create(**request)  # type: ignore[call-overload]
    assert caught.value.body["message"]  # type: ignore[attr-defined]


def test_models(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["auto", "smollm2-135m", "all-minilm-l6-v2"]


def test_a_wrong_key(tierline_stack: Stack) -> None:
    client = OpenAI(base_url=f"{tierline_stack.base_url}/v1", api_key="tl-" + "x" * 43, max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()
