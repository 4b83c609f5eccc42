"""Requests that are refused for a fault of their own: the requests per minute bound them as they bound good ones."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from gateway.access.closed import Closed
from gateway.access.limits import LimitExceeded, Scope
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


async def test_what_comes_too_soon_is_refused_unread(door: FrontDoor) -> None:
    """The answer is there before the body, and says by when the next one may come."""
    token = await door.key(requests_per_minute=2)
    for status in (404, 404, 429):
        assert (await post(door, token, {**GOOD, "model": "none"})).status_code == status
    port = int(door.url.rsplit(":", 1)[1])
    for path in (CHAT, "/v1/messages/count_tokens"):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(
            f"POST {path} HTTP/1.1\r\nhost: a\r\nauthorization: Bearer {token}\r\ncontent-length: 9\r\n\r\n".encode()
        )
        async with asyncio.timeout(20):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        assert " 429 " in answer
        headers = dict(line.split(": ", 1) for line in answer.split("\r\n")[1:] if line)
        assert 1 <= int(headers["retry-after"]) <= 30
        assert headers["x-tierline-limit"] == "key requests_per_minute"
        assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("2", "0")
        writer.close()
    assert (await post(door, await door.key(requests_per_minute=2), GOOD)).status_code == 200


async def test_a_repeated_request_gets_its_answer_though_the_limit_is_reached(door: FrontDoor) -> None:
    token, named = await door.key(requests_per_minute=1), {"idempotency-key": "one"}
    assert (await post(door, token, GOOD, headers=named)).status_code == 200
    assert (await post(door, token, GOOD)).status_code == 429
    assert (await post(door, token, GOOD, headers=named)).status_code == 200
    reused = [await post(door, token, {**GOOD, "n": 1}, headers=named) for _ in range(2)]
    assert [one.status_code for one in reused] == [429, 429], "a conflict counts, too"


async def test_a_conflict_of_an_idempotency_key_counts(door: FrontDoor) -> None:
    stop_the_clock(door)
    token, named = await door.key(requests_per_minute=3), {"idempotency-key": "one"}
    answers = [await post(door, token, {**GOOD, "n": n}, headers=named) for n in (1, 2, 3, 4)]
    assert [one.status_code for one in answers] == [200, 422, 422, 429]


async def test_a_prompt_that_is_too_long_counts(door: FrontDoor) -> None:
    stop_the_clock(door)
    token = await door.key(requests_per_minute=2)
    long = {**GOOD, "messages": [{"role": "user", "content": "word " * 20_000}]}
    assert [(await post(door, token, long)).status_code for _ in range(3)] == [400, 400, 429]


async def test_a_limit_that_is_raised_is_not_remembered() -> None:
    now = [100.0]
    closed = Closed(clock=lambda: now[0])
    slow = Scope("key:a", 2, label="Your key")
    closed.check([slow])
    closed.learn([slow], LimitExceeded("key:a", "requests_per_minute", 20.0, ""))
    closed.learn([slow], LimitExceeded("key:a", "parallel", 900.0, ""))
    now[0] += 5
    with pytest.raises(LimitExceeded) as refused:
        closed.check([Scope("team:b", 2), slow])
    assert refused.value.retry_after_s == 15
    assert str(refused.value) == "Your key allows 2 requests per minute; there is room for the next one in 15.0 s."
    assert refused.value.standing.reset_requests_s == 45
    closed.check([Scope("key:a", 3)])
    closed.check([Scope("key:b", 2)])
    now[0] += 15
    closed.check([slow])
