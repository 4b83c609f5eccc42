"""What nobody may find again: keys, prompts and answers in logs, traces, metrics, the database, or in error bodies."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gateway.settings import TelemetrySettings
from gateway.tracing import Tracing
from tests.gateway.sdk_doors import BOTH, FAULTS, Doors, doors

PROMPT = "aquamarine-prompt-5309"
SYSTEM = "vermilion-system-7411"
TOOL = "cobalt-tool-2218"
CLAUDE_KEY = "sk-ant-secret-8e1f"
WRONG_KEY = "tl-" + "W" * 43
ANSWER = "the Danube and the Loire"
MODELS = [*BOTH, *(f"{server}-{fault}" for server in BOTH for fault in FAULTS if fault not in ("slow", "hanging"))]


def requests(model: str) -> list[tuple[str, dict[str, Any]]]:
    """One request to each route that takes a prompt, and some that are wrong."""
    messages = [{"role": "user", "content": PROMPT}]
    chat = {
        "model": model,
        "messages": [{"role": "system", "content": SYSTEM}, *messages],
        "tools": [{"type": "function", "function": {"name": TOOL, "parameters": {"type": "object"}}}],
    }
    message = {"model": model, "max_tokens": 50, "system": SYSTEM, "messages": messages}
    found = [
        ("/v1/chat/completions", chat),
        ("/v1/chat/completions", chat | {"tools": [], "temperature": 9}),
        ("/v1/chat/completions", chat | {"response_format": {"type": SYSTEM}}),
        ("/v1/chat/completions", chat | {"messages": [{"role": "user", "content": [{"text": PROMPT}]}]}),
        ("/v1/messages", message),
        ("/v1/messages", message | {"max_tokens": PROMPT.encode().hex()}),
        ("/v1/messages/count_tokens", {k: v for k, v in message.items() if k != "max_tokens"}),
        ("/v1/responses", {"model": model, "input": PROMPT, "instructions": SYSTEM, "store": False}),
        ("/v1/completions", {"model": model, "prompt": PROMPT}),
        ("/v1/embeddings", {"model": "vectors", "input": [PROMPT]}),
        ("/v1/rerank", {"model": model, "query": PROMPT, "documents": [SYSTEM]}),
    ]
    return [*found, *((path, body | {"stream": True}) for path, body in found[:5])]


async def ask_everything(gateway: Doors) -> list[httpx.Response]:
    door = gateway.door
    asked = [request for model in MODELS for request in requests(model)]
    # At once: several of the models let each client wait.
    answers = await asyncio.gather(*(door.client.post(path, json=body, headers=door.headers()) for path, body in asked))
    for headers in ({"authorization": f"Bearer {WRONG_KEY}"}, {"x-api-key": WRONG_KEY}, {"authorization": WRONG_KEY}):
        for path, body in requests("agent")[:5]:
            answers.append(await door.client.post(path, json=body, headers=headers))
    broken = b'{"messages": "' + PROMPT.encode()
    answers.append(await door.client.post("/v1/chat/completions", content=broken, headers=door.headers()))
    gateway.claude.override = "status,status=401"
    answers.append(await door.chat("claude", messages=[{"role": "user", "content": PROMPT}]))
    return answers


async def test_secrets_stay_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CLAUDE_KEY", CLAUDE_KEY)
    caplog.set_level(logging.DEBUG)
    exporter = InMemorySpanExporter()
    tracing = Tracing(TelemetrySettings(), span_processor=SimpleSpanProcessor(exporter))
    async with doors(tmp_path, tracing=tracing) as gateway:
        door = gateway.door
        answers = await ask_everything(gateway)
        metrics = (await door.client.get("/metrics")).text
        ready = (await door.client.get("/health/ready")).text
        rows = await door.rows()
        token = door.token
    secrets = (PROMPT, SYSTEM, TOOL, CLAUDE_KEY, WRONG_KEY, ANSWER, token)
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 422, 429, 502}
    logged = "\n".join(f"{record.getMessage()} {vars(record)}" for record in caplog.records)
    assert "request finished" in logged
    spans = "\n".join(span.to_json() for span in exporter.get_finished_spans())
    assert spans
    assert rows
    stored = {path: path.read_bytes() for path in (tmp_path / "var").rglob("*") if path.is_file()}
    assert any(data.startswith(b"SQLite") for data in stored.values())
    errors = "\n".join(answer.text for answer in answers if answer.status_code >= 400)
    for secret in secrets:
        assert secret not in logged, secret
        assert secret not in spans, secret
        assert secret not in metrics + ready, secret
        assert secret not in str(rows), secret
        assert [path for path, data in stored.items() if secret.encode() in data] == [], secret
        assert secret not in errors or secret == SYSTEM, secret
    # What a client may be told of its own request: the word that it wrote where another belongs.
    assert all(CLAUDE_KEY not in answer.text + str(answer.headers) for answer in answers)
