"""Requests that the front door refuses: bad bodies, headers, paths and keys, each with an error that says which."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from bench.mock_upstream import MockUpstream
from gateway.app import ROUTES
from tests.gateway.front_door import FrontDoor, configuration, front_door

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = {"type": "text", "text": "hi"}


def nested(levels: int) -> dict[str, Any]:
    """An object that holds one, that holds one, …"""
    found: dict[str, Any] = {"type": "text", "text": "hi"}
    for _ in range(levels):
        found = {"type": "text", "text": "hi", "zz": found}
    return found


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_type", None),
        (b"\xff\xfe", 400, "invalid_json", None),
        (b"[" * 100_000, 400, "invalid_json", None),
        ({"messages": MESSAGES}, 400, "missing_required_parameter", "model"),
        ({"model": "mock"}, 400, "missing_required_parameter", "messages"),
        ({"model": "mock", "messages": []}, 400, "empty_array", "messages"),
        ({"model": "mock", "messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_type", "messages[0].role"),
        ({"model": "mock", "messages": [{"role": "user"}]}, 400, "invalid_type", "messages[0].content"),
        ({"model": "mock", "messages": MESSAGES, "max_tokens": "5"}, 400, "invalid_type", "max_tokens"),
        ({"model": "mock", "messages": MESSAGES, "temperature": 9}, 400, "invalid_value", "temperature"),
        ({"model": "mock", "messages": MESSAGES, "n": 0}, 400, "invalid_value", "n"),
        ({"model": "mock", "messages": MESSAGES, "stop": ["a"] * 5}, 400, "array_too_long", "stop"),
        ({"model": "mock", "messages": MESSAGES, "stream_options": {}}, 400, "invalid_value", "stream_options"),
        ({"model": "mock", "messages": MESSAGES, "store": True}, 400, "unsupported_parameter", "store"),
        (
            {"model": "mock", "messages": MESSAGES, "web_search_options": {}},
            400,
            "unsupported_parameter",
            "web_search_options",
        ),
        ({"model": "mock", "messages": MESSAGES, "logprobs": True}, 400, "unsupported_parameter", "logprobs"),
        ({"model": "mock", "messages": MESSAGES, "logit_bias": {"1": "x"}}, 400, "invalid_type", "logit_bias"),
        ({"model": "mock", "messages": MESSAGES, "logit_bias": {"²": 1}}, 400, "invalid_value", "logit_bias"),
        ({"model": "mock", "messages": MESSAGES, "logit_bias": {"9" * 5000: 1}}, 400, "invalid_value", "logit_bias"),
        ({"model": "mock", "messages": MESSAGES, "cache_salt": 7}, 400, "invalid_type", "cache_salt"),
        ({"model": "mock", "messages": MESSAGES, "cache_salt": ["a"]}, 400, "invalid_type", "cache_salt"),
        ({"model": "mock", "messages": MESSAGES, "cache_salt": ""}, 400, "invalid_value", "cache_salt"),
        ({"model": "mock", "messages": MESSAGES, "cache_salt": "x" * 129}, 400, "invalid_value", "cache_salt"),
        (
            {"model": "mock", "messages": [{"role": "user", "content": [{"type": "text"}]}]},
            400,
            "invalid_type",
            "messages[0].content[0].text",
        ),
        ({"model": "nope", "messages": MESSAGES}, 404, "model_not_found", "model"),
        ({"model": "mock", "messages": MESSAGES, "zz": nested(900)}, 400, "invalid_json", None),
        ({"model": "mock", "messages": MESSAGES, "chat_template_kwargs": nested(64)}, 400, "invalid_json", None),
        ({"model": "mock", "messages": [{"role": "user", "content": [nested(500)]}]}, 400, "invalid_json", None),
        ({"model": "mock", "messages": MESSAGES * 10_001}, 400, "array_too_long", "messages"),
        (
            {"model": "mock", "messages": [*MESSAGES, {"role": "user", "content": [TEXT] * 10_001}]},
            400,
            "array_too_long",
            "messages[1].content",
        ),
        ({"model": "mock", "messages": MESSAGES, "tools": [{}] * 1025}, 400, "array_too_long", "tools"),
        ({"model": "mock", "messages": MESSAGES, "zz": [0] * 100_000}, 400, "array_too_long", None),
        ({"model": "mock", "messages": MESSAGES} | {f"z{i}": 0 for i in range(255)}, 400, "array_too_long", None),
        (
            {"model": "mock", "messages": MESSAGES, "logit_bias": {str(i): 1 for i in range(4097)}},
            400,
            "array_too_long",
            "logit_bias",
        ),
    ],
)
async def test_bad_requests_get_a_clear_error(
    door: FrontDoor, upstream: MockUpstream, body: Any, status: int, code: str, param: str | None
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = await door.client.post("/v1/chat/completions", content=content, headers=door.headers())
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert error["request_id"] == response.headers["x-request-id"]
    assert upstream.requests == 0
    assert await door.rows() == []


async def test_as_deep_and_as_long_as_is_allowed_passes(door: FrontDoor) -> None:
    body = {"messages": MESSAGES * 1000, "zz": nested(62), "logit_bias": {str(i): 1 for i in range(4096)}}
    response = await door.chat(**body)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({}, "missing_api_key"),
        ({"authorization": "Basic abc"}, "invalid_authorization"),
        ({"authorization": "Bearer"}, "invalid_authorization"),
        ({"authorization": "Bearer sk-not-ours"}, "invalid_api_key"),
        ({"authorization": "Bearer tl-" + "a" * 43}, "invalid_api_key"),
    ],
)
async def test_without_a_key_nothing_happens(
    door: FrontDoor, upstream: MockUpstream, headers: dict[str, str], code: str
) -> None:
    response = await door.client.post("/v1/chat/completions", json={"model": "mock"}, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (401, code)
    assert upstream.requests == 0


async def test_every_route_is_authenticated_or_declared_open(door: FrontDoor) -> None:
    for (method, path), route in ROUTES.items():
        names = {"model": "mock", "response_id": "resp_0", "file_id": "f", "batch_id": "b", "message_batch_id": "b"}
        response = await door.client.request(method, path.format(**names))
        assert response.status_code == (401 if route.access == "key" else 200), (method, path)


async def test_unknown_paths_and_methods(door: FrontDoor) -> None:
    assert (await door.client.get("/v1/nothing")).status_code == 404
    response = await door.client.get("/v1/chat/completions")
    assert (response.status_code, response.headers["allow"]) == (405, "POST")


async def test_a_body_over_the_limit_is_refused_early(tmp_path: Path, upstream: MockUpstream) -> None:
    document = configuration({"up": upstream})
    document["server"]["max_body_bytes"] = 2048
    async with front_door(tmp_path, document) as door:
        big = [{"role": "user", "content": "x" * 4096}]
        assert (await door.chat(messages=big)).status_code == 413

        async def chunks() -> AsyncIterator[bytes]:
            for _ in range(10):
                yield b"x" * 1024

        response = await door.client.post("/v1/chat/completions", content=chunks(), headers=door.headers())
        assert response.status_code == 413


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("x-tierline-tier", "gigantic", "invalid_tier"),
        ("x-tierline-cache", "perhaps", "invalid_cache_directive"),
        ("x-tierline-tags", "no-value", "invalid_tags"),
        ("x-tierline-tags", "a=b, tierline-batch=batch_1", "invalid_tags"),
        ("x-tierline-tags", "Tierline-Judge =1", "invalid_tags"),
        ("x-tierline-tags", ",".join(f"a{i}=1" for i in range(17)), "invalid_tags"),
        ("x-tierline-deadline-ms", "soon", "invalid_request"),
        ("x-tierline-deadline-ms", "²", "invalid_request"),
        ("x-tierline-deadline-ms", "9" * 5000, "invalid_request"),
        ("x-tierline-deadline-ms", "0", "invalid_request"),
        ("idempotency-key", "a b", "invalid_idempotency_key"),
    ],
)
async def test_headers_that_cannot_be_honoured_are_refused(door: FrontDoor, name: str, value: str, code: str) -> None:
    headers = [(b"authorization", f"Bearer {door.token}".encode()), (name.encode(), value.encode("latin-1"))]
    body = {"model": "mock", "messages": MESSAGES}
    response = await door.client.post("/v1/chat/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)
