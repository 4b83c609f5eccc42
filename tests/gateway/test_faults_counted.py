"""Requests that are refused for a fault of their own: the requests per minute bound them as they bound good ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from tests.gateway.exact_upstream import stop_the_clock
from tests.gateway.front_door import POLICY, FrontDoor, configuration, front_door

CHAT = "/v1/chat/completions"
GOOD: dict[str, Any] = {"model": "mock", "messages": [{"role": "user", "content": "hi"}]}


async def post(
    door: FrontDoor, token: str, body: Any, path: str = CHAT, headers: dict[str, str] | None = None
) -> httpx.Response:
    content = {"content": body} if isinstance(body, bytes) else {"json": body}
    return await door.client.post(path, headers={**door.headers(token), **(headers or {})}, **content)


@pytest.mark.parametrize(
    ("path", "body", "headers", "status"),
    [
        pytest.param(CHAT, b"{", {}, 400, id="no JSON"),
        pytest.param(CHAT, {**GOOD, "temperature": 9}, {}, 400, id="out of range"),
        pytest.param(CHAT, GOOD, {"x-tierline-cache": "maybe"}, 400, id="header"),
        pytest.param(CHAT, {**GOOD, "model": "none"}, {}, 404, id="no such model"),
        pytest.param(
            CHAT, {**GOOD, "max_tokens": 10**6, "response_format": {"type": "json_object"}}, {}, 400, id="need"
        ),
        pytest.param(CHAT, b"x" * 2000, {}, 413, id="too large"),
        pytest.param("/v1/completions", {"model": "mock"}, {}, 400, id="completions"),
        pytest.param("/v1/embeddings", {"model": "mock", "input": "a"}, {}, 400, id="embeddings"),
        pytest.param("/v1/messages", GOOD, {}, 400, id="messages"),
        pytest.param("/v1/messages/count_tokens", {**GOOD, "messages": []}, {}, 400, id="count_tokens"),
    ],
)
async def test_what_is_at_fault_counts(
    tmp_path: Path, upstream: MockUpstream, path: str, body: Any, headers: dict[str, str], status: int
) -> None:
    document = configuration({"up": upstream})
    document["server"]["max_body_bytes"] = 1500
    async with front_door(tmp_path, document) as door:
        stop_the_clock(door)
        token = await door.key(requests_per_minute=2, tokens_per_minute=10_000, parallel=5)
        for remaining in ("1", "0"):
            response = await post(door, token, body, path, headers)
            assert response.status_code == status, response.text
            assert response.headers["x-ratelimit-remaining-requests"] == remaining
        for sent in (body, GOOD if path == CHAT else body):
            response = await post(door, token, sent, path, headers)
            assert response.status_code == 429, response.text
            assert int(response.headers["retry-after"]) >= 1
        assert "rate_limit" in response.text
        assert (door.services.limiter.open_holds, upstream.requests) == (0, 0)
        assert (await post(door, await door.key(requests_per_minute=2), GOOD)).status_code == 200, "others are free"


async def test_a_fault_that_the_backend_finds_counts_once(door: FrontDoor, upstream: MockUpstream) -> None:
    stop_the_clock(door)
    token = await door.key(requests_per_minute=5)
    upstream.override = "status,status=400"
    response = await post(door, token, GOOD)
    assert (response.status_code, response.headers["x-ratelimit-remaining-requests"]) == (400, "4")


async def test_without_such_a_limit_nothing_counts(door: FrontDoor) -> None:
    token = await door.key(tokens_per_minute=10_000, parallel=1)
    for _ in range(5):
        response = await post(door, token, {**GOOD, "temperature": 9})
        assert response.status_code == 400
        assert not [name for name in response.headers if name.startswith("x-ratelimit-")]


async def test_a_policys_limit_counts_once_the_policy_is_known(tmp_path: Path, upstream: MockUpstream) -> None:
    policy = POLICY + "limits: {requests_per_minute: 1}\n"
    async with front_door(tmp_path, configuration({"up": upstream}), policy=policy) as door:
        stop_the_clock(door)
        unable = {**GOOD, "response_format": {"type": "json_object"}}
        assert [(await post(door, door.token, unable)).status_code for _ in range(2)] == [400, 429]


async def test_a_bad_key_counts_for_nobody(door: FrontDoor) -> None:
    stop_the_clock(door)
    token = await door.key(requests_per_minute=1)
    assert (await post(door, f"{token}x", GOOD)).status_code == 401
    assert (await post(door, token, GOOD)).status_code == 200
