"""The official SDK's Responses API against everything real: gateway, bundled engine with SmolLM2, database."""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from tests.conftest import Stack
from tests.gateway.responses_types import checked_response, events, folded

MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def client(tierline_stack: Stack) -> OpenAI:
    return OpenAI(base_url=f"{tierline_stack.base_url}/v1", api_key=tierline_stack.key, max_retries=0, timeout=60)


def test_it_answers_whole_and_streamed(client: OpenAI, tierline_stack: Stack) -> None:
    options = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0, "max_output_tokens": 40}
    headers = {"authorization": f"Bearer {tierline_stack.key}", "x-tierline-cache": "no-cache, no-store"}
    url = f"{tierline_stack.base_url}/v1/responses"
    whole = httpx.post(url, json=options, headers=headers, timeout=60).json()
    checked_response(whole)
    assert "Paris" in whole["output"][0]["content"][0]["text"]
    told = events(httpx.post(url, json={**options, "stream": True}, headers=headers, timeout=60))
    assert folded(told) == told[-1]["response"]["output"]
    assert told[-1]["response"]["output"][0]["content"] == whole["output"][0]["content"]
    assert told[-1]["response"]["usage"]["output_tokens"] == whole["usage"]["output_tokens"] > 0
    assert told[-1]["tierline"]["cost_usd"] > 0


def test_a_conversation_that_outlives_the_gateway(client: OpenAI, tierline_stack: Stack) -> None:
    first = client.responses.create(
        model="auto", input="My favourite fruit is the mango.", temperature=0, max_output_tokens=30
    )
    restarts = tierline_stack.restarts_of("gateway")
    os.kill(tierline_stack.pid_of("gateway"), signal.SIGKILL)
    tierline_stack.wait_for_restart("gateway", restarts)
    with client.responses.stream(
        model="auto", previous_response_id=first.id, input="Which fruit did I say I like?", temperature=0,
        max_output_tokens=40,
    ) as stream:  # fmt: skip
        second = stream.get_final_response()
    assert "mango" in second.output_text.lower()
    assert client.responses.retrieve(second.id).output_text == second.output_text
    texts = [item.content[0].text for item in client.responses.input_items.list(second.id, order="asc")]  # type: ignore[union-attr]
    assert texts == ["My favourite fruit is the mango.", first.output_text, "Which fruit did I say I like?"]
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)


def test_its_length_is_bounded_and_its_probabilities_are_given(client: OpenAI) -> None:
    answer = client.responses.create(
        model=MODEL, input="Count from one to fifty.", temperature=0, max_output_tokens=8,
        include=["message.output_text.logprobs"], top_logprobs=2, extra_headers={"x-tierline-cache": "no-store"},
    )  # fmt: skip
    assert (answer.status, answer.incomplete_details and answer.incomplete_details.reason) == (
        "incomplete", "max_output_tokens",
    )  # fmt: skip
    content = json.loads(answer.to_json())["output"][0]["content"][0]
    assert "".join(token["token"] for token in content["logprobs"]).startswith(content["text"][:8])
    assert all(len(token["top_logprobs"]) == 2 for token in content["logprobs"])


def test_a_function_that_must_be_called_is_called(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"zone": {"enum": ["UTC"]}}, "required": ["zone"]}
    tool: Any = {"type": "function", "name": "now", "parameters": {**schema, "additionalProperties": False}}
    choice: Any = {"type": "function", "name": "now"}
    answer = client.responses.create(model=MODEL, input="x", tools=[tool], tool_choice=choice, max_output_tokens=90)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert (call.name, json.loads(call.arguments)) == ("now", {"zone": "UTC"})
