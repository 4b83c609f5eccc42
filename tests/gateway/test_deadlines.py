"""What a client's deadline does once its answer has begun; test_backend_faults and test_caching: before."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, configuration, front_door


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_that_the_deadline_ends_says_so(tmp_path: Path, path: str) -> None:
    upstream = MockUpstream()
    await upstream.start()
    models = {"slow": {"tier": "small", "backend": "up", "upstream_model": "stall,after=3", "price": PRICE}}
    document = configuration({"up": upstream}, models)
    document["backends"]["up"]["timeouts"] = {"between_tokens_s": 60}  # only the client has no patience
    async with front_door(tmp_path, document) as door:
        body = {"model": "slow", "stream": True, "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
        headers = {**door.headers(), "x-tierline-deadline-ms": "1500"}
        response = await door.client.post(path, json=body, headers=headers)
        (row,) = await door.rows()
        page = (await door.client.get("/metrics")).text
    await upstream.stop()
    assert response.status_code == 200
    error = json.loads(response.text.rstrip("\n").rpartition("data: ")[2])["error"]
    assert "deadline passed in the middle of the answer" in error["message"]
    if path == "/v1/chat/completions":
        assert error["code"] == "backend_deadline"
        assert "[DONE]" not in response.text
    else:
        assert error["type"] == "timeout_error"
    assert row["outcome"] == "timeout"
    assert row["output_tokens"] > 0 < row["cost_nanousd"]  # what was delivered is billed
    assert 'tierline_requests_total{outcome="timeout"' in page
