"""The front door end to end, in front of a mock upstream: answers, errors, faults, limits, rows."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.app import ROUTES
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door


@pytest_asyncio.fixture
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, configuration({"up": upstream})) as running:
        yield running


def events(text: str) -> list[Any]:
    """The data of each event, decoded; `[DONE]` as it is."""
    data = [block.removeprefix("data: ") for block in text.split("\n\n") if block.startswith("data: ")]
    return [item if item == "[DONE]" else json.loads(item) for item in data]


async def eventually(true: Callable[[], bool], timeout_s: float = 3.0) -> None:
    """Wait for something that no event announces."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


# -- answers -----------------------------------------------------------------------------------------------------------


async def test_a_plain_answer_passes_unchanged(door: FrontDoor) -> None:
    response = await door.chat("auto", x_unknown={"kept": 0.7})
    assert response.status_code == 200
    assert response.json()["x_unknown"] == {"kept": 0.7}
    headers = response.headers
    assert headers["x-tierline-model"] == "mock"
    assert headers["x-tierline-tier"] == "small"
    assert headers["x-tierline-backend"] == "up"
    assert headers["x-tierline-cache"] == "bypass"
    assert headers["x-tierline-policy"].startswith("default@")
    assert headers["x-tierline-cost-usd"] == "0.000080000"  # 12 x $1 + 34 x $2 per million


async def test_unknown_fields_reach_the_backend(door: FrontDoor, upstream: MockUpstream) -> None:
    await door.chat(top_k=7, temperature=0.7, some_extension={"a": [1, 2.5]})
    sent = json.loads(upstream.records[-1].body)
    assert (sent["top_k"], sent["temperature"], sent["some_extension"]) == (7, 0.7, {"a": [1, 2.5]})
    assert "authorization" not in upstream.records[-1].headers


async def test_an_output_limit_is_filled_in_and_enforced(tmp_path: Path, upstream: MockUpstream) -> None:
    models = {"mock": {"tier": "small", "backend": "up", "max_output_tokens": 50, "price": PRICE}}
    async with front_door(tmp_path, configuration({"up": upstream}, models)) as door:
        await door.chat()
        assert json.loads(upstream.records[-1].body)["max_tokens"] == 50
        await door.chat(max_completion_tokens=7)
        assert "max_tokens" not in json.loads(upstream.records[-1].body)
        response = await door.chat(max_tokens=51)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "max_tokens_too_large")
        assert "50" in response.json()["error"]["message"]


async def test_a_stream_is_relayed_and_priced(door: FrontDoor) -> None:
    response = await door.chat("auto", stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    seen = events(response.text)
    assert seen[-1] == "[DONE]"
    assert seen[-2]["usage"]["completion_tokens"] == 34
    assert seen[-2]["tierline"] == {"cost_usd": 0.00008, "cache": "bypass", "model": "mock", "tier": "small"}
    assert seen[-3]["choices"][0]["finish_reason"] == "stop"


async def test_the_usage_chunk_is_only_for_those_who_ask(door: FrontDoor, upstream: MockUpstream) -> None:
    seen = events((await door.chat(stream=True)).text)
    assert all(item == "[DONE]" or item["choices"] for item in seen)
    assert json.loads(upstream.records[-1].body)["stream_options"]["include_usage"] is True
    rows = await door.rows()
    assert (rows[-1]["input_tokens"], rows[-1]["output_tokens"], rows[-1]["usage_source"]) == (12, 34, "reported")


async def test_models_are_listed(door: FrontDoor) -> None:
    listed = (await door.client.get("/v1/models", headers=door.headers())).json()
    assert [model["id"] for model in listed["data"]] == ["auto", "mock"]
    assert (await door.client.get("/v1/models/mock", headers=door.headers())).json()["tierline"]["tier"] == "small"
    assert (await door.client.get("/v1/models/none", headers=door.headers())).status_code == 404


async def test_health_metrics_and_openapi_are_open(door: FrontDoor) -> None:
    await door.chat()
    assert (await door.client.get("/health/live")).json() == {"status": "live"}
    ready = (await door.client.get("/health/ready")).json()
    assert ready["status"] == "ready"
    assert ready["backends"] == {"up": ["healthy"]}
    metrics = (await door.client.get("/metrics")).text
    assert 'tierline_requests_total{outcome="success",route="chat.completions",status="200"} 1.0' in metrics
    for name in ("llm_ttft_seconds", "llm_tpot_seconds", "llm_tokens_per_second", "llm_requests_per_second"):
        assert f"# TYPE {name}" in metrics
    document = (await door.client.get("/openapi.json")).json()
    assert {path for _, path in ROUTES} == set(document["paths"])


# -- bad requests ------------------------------------------------------------------------------------------------------

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
        response = await door.client.request(method, path.format(model="mock", response_id="resp_0"))
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
        ("x-tierline-deadline-ms", "soon", "invalid_request"),
        ("x-tierline-deadline-ms", "²", "invalid_request"),
        ("x-tierline-deadline-ms", "9" * 5000, "invalid_request"),
        ("x-tierline-deadline-ms", "0", "invalid_request"),
        ("idempotency-key", "abc", "unsupported_header"),
    ],
)
async def test_headers_that_cannot_be_honoured_are_refused(door: FrontDoor, name: str, value: str, code: str) -> None:
    headers = [(b"authorization", f"Bearer {door.token}".encode()), (name.encode(), value.encode("latin-1"))]
    body = {"model": "mock", "messages": MESSAGES}
    response = await door.client.post("/v1/chat/completions", json=body, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (400, code)


# -- faults ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["cut,after=3", "end,after=3", "garbage,after=3", "error,after=3", "stall,after=3"])
async def test_a_stream_that_breaks_ends_with_an_error_event(
    door: FrontDoor, upstream: MockUpstream, fault: str
) -> None:
    upstream.override = fault
    response = await door.chat(stream=True)
    seen = events(response.text)
    assert seen[-1]["error"]["code"] == "stream_cut"
    assert "[DONE]" not in seen
    row = (await door.rows())[-1]
    assert row["outcome"] in ("cut", "timeout")
    assert row["output_tokens"] >= 3
    assert row["usage_source"] == "counted"
    assert row["cost_nanousd"] > 0


@pytest.mark.parametrize("fault", ["cut", "end", "garbage", "error", "close", "status,status=500", "status,status=429"])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_failure_before_content_is_retried(
    door: FrontDoor, upstream: MockUpstream, fault: str, stream: bool
) -> None:
    upstream.override = f"{fault},times=1"
    response = await door.chat(stream=stream)
    assert response.status_code == 200
    rows = await door.rows()
    assert [row["outcome"] for row in rows] == ["error", "success"]
    assert [row["attempt"] for row in rows] == [1, 2]
    assert rows[0]["request_id"] == rows[1]["request_id"]
    assert rows[0]["cost_nanousd"] == 0


async def test_when_nothing_answers_the_client_is_told(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=500"
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "backend_upstream_error")
    assert [row["outcome"] for row in await door.rows()] == ["error", "error"]


async def test_a_backends_refusal_is_passed_on_and_not_retried(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=422"
    response = await door.chat()
    assert response.status_code == 422
    assert response.json()["error"]["type"] == "mock_error"
    assert upstream.requests == 1
    assert [row["outcome"] for row in await door.rows()] == ["refused"]


async def test_a_backend_that_rejects_our_credentials_is_our_fault(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "status,status=401"
    response = await door.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (502, "backend_credentials")


async def test_the_deadline_of_the_client_counts(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "hang"
    response = await door.chat(headers={"x-tierline-deadline-ms": "150"})
    assert (response.status_code, response.json()["error"]["code"]) == (504, "backend_deadline")


async def test_fallback_to_another_tier_is_said(tmp_path: Path, upstream: MockUpstream) -> None:
    models = {
        "tiny": {"tier": "small", "backend": "down", "price": PRICE},
        "middle": {"tier": "medium", "backend": "up", "price": PRICE},
    }
    document = configuration({"up": upstream}, models)
    document["backends"]["down"] = {"base_urls": ["http://127.0.0.1:9/v1"]}
    async with front_door(tmp_path, document) as door:
        response = await door.chat("auto")
        assert response.status_code == 200
        assert response.headers["x-tierline-tier"] == "medium"
        assert response.headers["x-tierline-requested-tier"] == "small"
        assert response.headers["x-tierline-fallback"] == "backend_failed"


async def test_a_tier_without_a_model_is_said(door: FrontDoor) -> None:
    response = await door.chat("auto", headers={"x-tierline-tier": "large"})
    assert response.status_code == 200
    assert response.headers["x-tierline-tier"] == "small"
    assert response.headers["x-tierline-requested-tier"] == "large"
    assert response.headers["x-tierline-fallback"] == "tier_not_served"


# -- the client leaves -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_cancels_the_backend(door: FrontDoor, upstream: MockUpstream, stream: bool) -> None:
    upstream.override = "answer,chunks=1000,interval_ms=20" if stream else "hang"
    async with httpx.AsyncClient(base_url=door.url) as client:
        body = {"model": "mock", "messages": MESSAGES, "stream": stream}
        call = asyncio.create_task(client.post("/v1/chat/completions", json=body, headers=door.headers()))
        await eventually(lambda: upstream.requests == 1 and (not stream or upstream.records[-1].events > 2))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone", timeout_s=1)
    await eventually(lambda: door.services.limiter.open_holds == 0)
    rows = await door.rows()
    assert rows[0]["outcome"] == "cancelled"
    assert rows[0]["input_tokens"] > 0
    assert (rows[0]["output_tokens"] > 0) == stream


# -- limits and budgets ------------------------------------------------------------------------------------------------


async def test_requests_per_minute(door: FrontDoor) -> None:
    token = await door.key(requests_per_minute=3)
    answers = await asyncio.gather(*(door.chat(token=token) for _ in range(10)))
    assert sorted(answer.status_code for answer in answers) == [200] * 3 + [429] * 7
    refused = next(answer for answer in answers if answer.status_code == 429)
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert {answer.headers["x-ratelimit-remaining-requests"] for answer in answers} == {"0"}


async def test_parallel_requests(door: FrontDoor, upstream: MockUpstream) -> None:
    token = await door.key(parallel=2)
    upstream.override = "answer,delay_ms=200"
    answers = await asyncio.gather(*(door.chat(token=token) for _ in range(5)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429, 429, 429]
    assert (await door.chat(token=token)).status_code == 200


async def test_a_budget_is_a_budget(door: FrontDoor) -> None:
    # An answer costs 80,000 nano-dollars; this budget covers some and no more.
    token = await door.key(budget_nanousd=500_000)
    answers = [await door.chat(token=token, max_tokens=40) for _ in range(12)]
    statuses = [answer.status_code for answer in answers]
    assert statuses[0] == 200
    assert statuses[-1] == 429
    assert answers[-1].json()["error"]["type"] == "insufficient_quota"
    assert sum(row["cost_nanousd"] for row in await door.rows()) <= 500_000


async def test_a_revoked_key_stops_working(door: FrontDoor) -> None:
    from gateway.access.keys import list_keys, revoke_key

    token = await door.key(name="short-lived")
    assert (await door.chat(token=token)).status_code == 200
    info = next(key for key in await list_keys(door.services.database) if key.name == "short-lived")
    await revoke_key(door.services.database, info.key_id)
    await door.services.keys.refresh()
    response = await door.chat(token=token)
    assert (response.status_code, response.json()["error"]["code"]) == (401, "revoked_api_key")


async def test_a_key_may_be_bound_to_models(door: FrontDoor) -> None:
    token = await door.key(allowed_models=["other"])
    assert (await door.chat("mock", token=token)).status_code == 403
    listed = (await door.client.get("/v1/models", headers=door.headers(token))).json()
    assert "mock" not in [model["id"] for model in listed["data"]]


# -- what is kept and what is not --------------------------------------------------------------------------------------


async def test_logs_hold_no_secret_and_no_prompt(door: FrontDoor, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    secret_prompt = "the launch code is 5309-aquamarine"
    await door.chat(messages=[{"role": "user", "content": secret_prompt}])
    await door.chat(messages=[{"role": "user", "content": secret_prompt}], temperature=99)
    await door.chat(token="tl-" + "Z" * 43)
    text = "\n".join(f"{record.getMessage()} {getattr(record, 'fields', '')}" for record in caplog.records)
    assert "request finished" in text
    assert "aquamarine" not in text
    assert door.token not in text
    assert "Z" * 43 not in text
    await door.rows()
    stored = b"".join(path.read_bytes() for path in (door.root / "var").rglob("*") if path.is_file())
    assert b"aquamarine" not in stored
    assert door.token.encode() not in stored


async def test_tags_are_recorded(door: FrontDoor) -> None:
    await door.chat(headers={"x-tierline-tags": "feature=search, env=prod"})
    assert json.loads((await door.rows())[-1]["tags"]) == {"feature": "search", "env": "prod"}
