"""A request that asks for more than the models here can do: which field is at fault, what it needs, and who has it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

CAPABLE = {"vision": "eyes", "json_schema": "json", "reasoning": "thinker", "tools": "tools"}


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    """`plain` can nothing but text and is alone in its tier; each of the others has one capability."""
    models: dict[str, Any] = {
        "plain": {"tier": "small", "backend": "up", "price": PRICE, "max_output_tokens": 50, "context_length": 128}
    }
    for capability, name in CAPABLE.items():
        models[name] = {"tier": "xlarge", "backend": "up", "price": PRICE, "capabilities": [capability]}
    async with front_door(tmp_path, configuration({"up": upstream}, models)) as running:
        yield running


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
SPEECH = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
TEXT = {"type": "text", "text": "What is this?"}


def turns(*parts: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi"},
        {"role": "user", "content": list(parts)},
    ]


@pytest.mark.parametrize(
    ("body", "param", "capability"),
    [
        ({"reasoning_effort": "high"}, "reasoning_effort", "reasoning"),
        ({"messages": turns(TEXT, IMAGE)}, "messages[2].content[1]", "vision"),
        ({"messages": turns(IMAGE, IMAGE)}, "messages[2].content[0]", "vision"),
        ({"messages": turns(TEXT, SPEECH)}, "messages[2].content[1]", "audio"),
        ({"modalities": ["text", "audio"]}, "modalities", "audio"),
        ({"audio": {"voice": "alloy", "format": "wav"}, "modalities": ["text", "audio"]}, "audio", "audio"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_object"}}, "response_format", "json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "tools"),
        ({"logprobs": True}, "logprobs", "logprobs"),
    ],
)
async def test_the_field_the_capability_and_who_has_it(
    door: FrontDoor, body: dict[str, Any], param: str, capability: str
) -> None:
    response = await door.chat("plain", **body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)
    assert f"'{param}' needs the capability '{capability}', which 'plain' does not have." in error["message"]
    able = CAPABLE.get(capability)
    assert (f"Models that can: {able}." if able else "leave it out") in error["message"]

    by_itself = await door.chat("auto", **body)
    if able:
        assert by_itself.headers["x-tierline-model"] == able
    else:
        assert by_itself.json()["error"]["message"] == error["message"]


async def test_a_model_that_the_key_may_not_use_is_not_recommended(door: FrontDoor) -> None:
    token = await door.key(allowed_models=["plain"])
    message = (await door.chat("plain", token=token, messages=turns(IMAGE))).json()["error"]["message"]
    assert "eyes" not in message
    assert "No model that this key may use can" in message


async def test_two_capabilities_that_no_model_has_together(door: FrontDoor) -> None:
    error = (await door.chat("eyes", messages=turns(IMAGE), logprobs=True)).json()["error"]
    assert error["param"] == "logprobs", "the image is fine"
    assert "No model that this key may use can" in error["message"]


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        ({"max_tokens": 51}, "max_tokens_too_large", "max_tokens"),
        ({"max_completion_tokens": 51}, "max_tokens_too_large", "max_completion_tokens"),
        ({"messages": [{"role": "user", "content": "a long story " * 200}]}, "context_length_exceeded", "messages"),
    ],
)
async def test_what_is_too_large(door: FrontDoor, body: dict[str, Any], code: str, param: str) -> None:
    response = await door.chat("plain", **body)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param)


async def test_a_key_that_may_use_none_of_the_tier_is_not_allowed(door: FrontDoor) -> None:
    token = await door.key(allowed_models=["eyes", "json"])
    response = await door.chat("plain", token=token)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (403, "model_not_allowed", "model")
    assert (await door.chat("auto", token=token)).headers["x-tierline-model"] == "eyes"
    pinned = await door.chat("auto", token=token, headers={"x-tierline-tier": "small"})
    assert (pinned.status_code, pinned.json()["error"]["code"]) == (403, "model_not_allowed")


async def test_a_gateway_without_models_says_so(tmp_path: Path) -> None:
    async with front_door(tmp_path, {"server": {"port": 0}, "cache": {"enabled": False}}) as door:
        response = await door.chat("auto")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "no_model")
