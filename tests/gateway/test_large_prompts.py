"""Prompts of megabytes: what is far too long is refused unread, and what may fit is read beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import gateway.access.input_bound
import tiers.features
from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

HAN = "漢"
LONGEST = 8192


def chat(text: str) -> dict[str, Any]:
    return {"model": "mock", "messages": [{"role": "user", "content": text}]}


def parts(text: str) -> dict[str, Any]:
    half = {"type": "text", "text": text[: len(text) // 2]}
    return {"model": "mock", "max_tokens": 5, "messages": [{"role": "user", "content": [half, half]}]}


BODIES = [
    pytest.param("/v1/chat/completions", chat, "messages", id="chat"),
    pytest.param("/v1/chat/completions", parts, "messages", id="parts"),
    pytest.param("/v1/completions", lambda text: {"model": "mock", "prompt": text}, "prompt", id="completions"),
    pytest.param("/v1/messages", parts, None, id="messages"),
    pytest.param("/v1/messages/count_tokens", chat, None, id="count_tokens"),
    pytest.param("/v1/responses", lambda text: {"model": "mock", "input": text}, "input", id="responses"),
    pytest.param("/v1/embeddings", lambda text: {"model": "vectors", "input": ["a", text]}, "input", id="embeddings"),
    pytest.param(
        "/v1/rerank", lambda text: {"model": "order", "query": "a", "documents": [text]}, "documents", id="rerank"
    ),
]


@dataclass
class Reading:
    """How many characters or bytes were looked at, in the event loop's thread and beside it."""

    in_loop: int = 0
    beside: int = 0
    gate: threading.Event = field(default_factory=threading.Event)

    def saw(self, text: str | bytes) -> None:
        if threading.current_thread() is threading.main_thread():
            self.in_loop += len(text)
        else:
            self.beside += len(text)
            assert self.gate.wait(20)


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> Reading:
    seen = Reading()
    seen.gate.set()
    weight, bound = tiers.features._weight, gateway.access.input_bound.text_bound

    def weigh(text: str) -> float:
        seen.saw(text)
        return weight(text)

    def bind(text: bytes) -> int:
        seen.saw(text)
        return bound(text)

    monkeypatch.setattr(tiers.features, "_weight", weigh)
    monkeypatch.setattr(gateway.access.input_bound, "text_bound", bind)
    return seen


def models(context_length: int) -> dict[str, Any]:
    common = {"backend": "up", "price": PRICE, "context_length": context_length}
    kinds = {"vectors": {"kind": "embedding"}, "order": {"kind": "rerank"}, "mock": {"tier": "small"}}
    return {name: {**common, **kind} for name, kind in kinds.items()}


@pytest_asyncio.fixture
async def door(tmp_path: Path, upstream: MockUpstream) -> AsyncIterator[FrontDoor]:
    async with front_door(tmp_path, configuration({"up": upstream}, models(LONGEST))) as running:
        yield running


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_what_is_far_too_long_is_refused_unread(
    door: FrontDoor, reading: Reading, upstream: MockUpstream, path: str, body: Any, param: str | None
) -> None:
    response = await door.client.post(path, json=body(HAN * 1_200_000), headers=door.headers())
    error = response.json()["error"]
    assert response.status_code == 400, error
    assert "at least 17142 tokens; the longest context here is 8192" in error["message"]
    if param is not None:
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert (reading.in_loop, reading.beside, upstream.requests) == (0, 0, 0)


@pytest.mark.parametrize(("path", "body", "param"), BODIES)
async def test_what_is_large_is_read_beside_the_loop(
    tmp_path: Path, upstream: MockUpstream, reading: Reading, path: str, body: Any, param: str | None
) -> None:
    async with front_door(tmp_path, configuration({"up": upstream}, models(100_000_000))) as door:
        response = await door.client.post(path, json=body(HAN * 200_000), headers=door.headers())
        assert "context" not in response.text
        assert reading.beside >= 200_000
        assert reading.in_loop < 1000


async def test_others_are_served_while_a_large_prompt_is_read(
    tmp_path: Path, upstream: MockUpstream, reading: Reading
) -> None:
    async with front_door(tmp_path, configuration({"up": upstream}, models(100_000_000))) as door:
        reading.gate.clear()
        large = asyncio.create_task(
            door.client.post("/v1/chat/completions", json=chat(HAN * 200_000), headers=door.headers())
        )
        async with asyncio.timeout(20):
            while not reading.beside:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert (await door.client.get("/health/live")).status_code == 200
        assert (await door.chat()).status_code == 200
        assert not large.done()
        reading.gate.set()
        assert (await large).status_code == 200


async def test_many_texts_are_not_one_long_one(door: FrontDoor) -> None:
    texts = ["a sentence of some words " * 50] * 1200  # each fits the context, together they are far beyond
    response = await door.client.post(
        "/v1/embeddings", json={"model": "vectors", "input": texts}, headers=door.headers()
    )
    assert response.status_code == 200, response.text


def test_a_long_text_has_the_estimate_of_its_parts() -> None:
    text = "Some words, 12 numbers and 漢字 \n" * 30_000
    of_parts = sum(tiers.features._weight(text[i : i + 1000]) for i in range(0, len(text), 1000))
    assert tiers.features.estimate_tokens(text) == pytest.approx(of_parts, rel=0.001)
    assert tiers.features.estimate_tokens(" " * 5_000_000) >= 5_000_000 // tiers.features.MOST_CHARS_PER_TOKEN


@pytest.mark.parametrize("size", [0, 1, 5, 1 << 20, 3 * (1 << 20) + 7])
def test_the_bound_of_a_long_text_is_no_sum_of_rounded_parts(size: int) -> None:
    text = (b"word 12 " * (size // 8 + 1))[:size]
    letters, digits, spaces = sum(map(text.count, b"word")), sum(map(text.count, b"12")), text.count(b" ")
    expected = size - 0.55 * letters - 0.75 * max(0, spaces - digits)
    assert gateway.access.input_bound.text_bound(text) == pytest.approx(expected, abs=1)
