"""The embedder's HTTP route by itself, with the real model: whose name an answer has, and how it refuses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from cache.embedding.batcher import Batcher
from cache.embedding.embedder import Embedder
from cache.embedding.http import EmbeddingsApp


@dataclass
class Loaded:
    embedder: Embedder | None
    batcher: Batcher | None


@pytest_asyncio.fixture
async def client(embedder: Embedder) -> AsyncIterator[httpx.AsyncClient]:
    batcher = Batcher(embedder, max_batch_size=4, max_wait_ms=1)
    batcher.start()
    transport = httpx.ASGITransport(EmbeddingsApp(Loaded(embedder, batcher), "all-MiniLM-L6-v2"))
    async with httpx.AsyncClient(transport=transport, base_url="http://embedder") as opened:
        yield opened
    await batcher.close()


async def test_an_answer_has_the_name_that_was_asked_for(client: httpx.AsyncClient) -> None:
    response = await client.post("/v1/embeddings", json={"model": "our-vectors", "input": "hello"})
    assert response.status_code == 200, response.text
    assert response.json()["model"] == "our-vectors"
    refused = await client.post("/v1/embeddings", json={"model": "our-vectors", "input": "hello", "dimensions": 7})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, "dimensions")
    assert error["message"].startswith("'our-vectors' has 384 dimensions")


@pytest.mark.parametrize(
    ("changes", "code", "param"),
    [
        ({"task": "query"}, "unknown_parameter", "task"),
        ({"odd `name`\n": 1}, "unknown_parameter", "odd `name`\n"),
        ({"x" * 1000: 1}, "unknown_parameter", "x" * 100),
        ({"input": 7}, "invalid_request", "input"),
        ({"dimensions": 7}, "invalid_value", "dimensions"),
        ({"input": [1, 2]}, "token_ids_not_supported", "input"),
        ({"input": [[1, 2], [3]]}, "token_ids_not_supported", "input"),
        ({"input": ["a", 1]}, "token_ids_not_supported", "input"),
        ({"input": []}, "invalid_value", "input"),
        ({"encoding_format": "hex"}, "invalid_value", "encoding_format"),
        ({"input": ["a", "word " * 400]}, "context_length_exceeded", "input[1]"),
    ],
)
async def test_a_refusal_has_a_code_and_names_the_field(
    client: httpx.AsyncClient, changes: dict[str, Any], code: str, param: str
) -> None:
    response = await client.post("/v1/embeddings", json={"model": "m", "input": "hello", **changes})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, param), error
