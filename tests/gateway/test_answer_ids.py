"""The id of an answer: its backend's, or one made from the request's where the gateway wrote it. Both are on record."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.ledger.reports import explain
from gateway.ledger.rows import MAX_ANSWER_ID_CHARACTERS, MAX_FINISH_REASON_CHARACTERS, LedgerRow
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

MESSAGES = [{"role": "user", "content": "Name three rivers."}]


@pytest_asyncio.fixture
async def door(
    tmp_path: Path, upstream: MockUpstream, claude: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FrontDoor]:
    """`mock` is on a server of the OpenAI dialect, `claude` on one of the Anthropic dialect."""
    monkeypatch.setenv("CLAUDE_KEY", "sk-ant-secret")
    model = {"tier": "small", "max_output_tokens": 3000, "price": PRICE}
    models = {"mock": {**model, "backend": "up"}, "claude": {**model, "backend": "claude"}}
    document = configuration({"up": upstream, "claude": claude}, models)
    document["backends"]["claude"] |= {"dialect": "anthropic", "api_key_env": "CLAUDE_KEY"}
    async with front_door(tmp_path, document) as running:
        yield running


def ids(text: str, stream: bool) -> set[str]:
    """Every id that an answer, or an event of it, has."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    said = [json.loads(part) for part in (lines if stream else [text])]
    return {part.get("message", part)["id"] for part in said if "id" in part.get("message", part)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "model", "backends"),
    [
        ("/v1/chat/completions", "mock", "chatcmpl-mock0001"),
        ("/v1/chat/completions", "claude", "msg_mock0001"),
        ("/v1/messages", "claude", "msg_mock0001"),
        ("/v1/messages", "mock", None),
    ],
)
async def test_one_rule_for_every_answer(
    door: FrontDoor, path: str, model: str, backends: str | None, stream: bool
) -> None:
    body = {"model": model, "messages": MESSAGES, "max_tokens": 50, "stream": stream}
    response = await door.client.post(path, json=body, headers=door.headers())
    assert response.status_code == 200, response.text
    request_id = response.headers["x-request-id"]
    made = f"msg_{request_id.removeprefix('req-').replace('-', '')}"
    assert ids(response.text, stream) == {backends or made}
    (row,) = await door.rows()
    assert (row["request_id"], row["answer_id"]) == (request_id, backends or "chatcmpl-mock0001")
    found = await explain(door.services.database, backends or made)
    assert found is not None
    assert found.request_id == request_id


def test_whatever_a_backend_calls_its_answer_a_row_can_hold_it() -> None:
    row = LedgerRow(attempt_id="a", request_id="r", attempt=1, ts_ms=1)
    row.set_answer_id("a\0b\ud800" + "x" * 5000)
    assert row.answer_id == "ab?" + "x" * (MAX_ANSWER_ID_CHARACTERS - 4)
    row.set_answer_id(None)
    assert row.answer_id == ""
    row.set_finish_reasons(["stop", "\0len\0gth", "stop"])
    assert row.finish_reason == "length,stop"
    row.set_finish_reasons(["x" * 5000])
    assert row.finish_reason == "x" * MAX_FINISH_REASON_CHARACTERS
