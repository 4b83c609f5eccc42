"""The front door end to end, in front of a mock upstream: answers, limits, and what is kept of them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from bench.mock_upstream import MockUpstream
from gateway.app import ROUTES
from tests.gateway.front_door import PRICE, FrontDoor, configuration, events, front_door

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
