"""What the tests of idempotency keys at one gateway have in common: settings, requests with a key, what was counted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, eventually

CHAT = "/v1/chat/completions"


def document(upstream: MockUpstream, **idempotency: Any) -> dict[str, Any]:
    """A `tierline.yaml` with a model of each kind and patient time-outs; `idempotency` is that section."""
    models = {
        "mock": {"tier": "small", "backend": "up", "capabilities": ["tools"], "price": PRICE},
        "vectors": {"kind": "embedding", "backend": "up", "price": PRICE},
        "ranks": {"kind": "rerank", "backend": "up", "price": PRICE},
    }
    made = configuration({"up": upstream}, models)
    made["backends"]["up"]["timeouts"] = {"connect_s": 5, "first_token_s": 30, "between_tokens_s": 30, "total_s": 60}
    return {**made, "idempotency": idempotency}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": "Hello there"}], **fields}


async def post(door: FrontDoor, key: str, path: str = CHAT, token: str | None = None, **fields: Any) -> httpx.Response:
    """POST with an idempotency key; a stream is read to its end."""
    headers = {**door.headers(token), "idempotency-key": key}
    return await door.client.post(path, json=fields, headers=headers)


@asynccontextmanager
async def streaming(door: FrontDoor, key: str, **fields: Any) -> AsyncIterator[httpx.Response]:
    headers = {**door.headers(), "idempotency-key": key}
    async with door.client.stream("POST", CHAT, json=body(stream=True, **fields), headers=headers) as response:
        yield response


def results(door: FrontDoor) -> dict[str, float]:
    """What the metric counts, by result."""
    counts = door.services.metrics.idempotent
    return {labels[0]: count.value for labels, count in counts._children.items()}


async def until_written(door: FrontDoor, count: int) -> list[dict[str, Any]]:
    """All ledger rows once no request runs; there must be so many."""
    await eventually(lambda: door.services.metrics.in_flight.value == 0)
    rows = await door.rows()
    assert len(rows) == count
    return rows


def followed(door: FrontDoor) -> bool:
    """Whether a client has joined a running request."""
    return any(recording.followed for recording in door.services.idempotency.answers._running.values())
