"""The order of the micro-batcher: look-ups before everything else, and everything in the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import numpy as np
import pytest
import pytest_asyncio

import cache.embedding.batcher
from cache.embedding.batcher import Batcher
from cache.embedding.embedder import Embedder, Vectors


class Held(Embedder):
    """The real model, which embeds a batch when it is told to."""

    def __init__(self, embedder: Embedder) -> None:
        self.__dict__.update(embedder.__dict__)
        self.batches: list[list[str]] = []
        self._turns = threading.Semaphore(0)

    def embed(self, texts: list[str]) -> Vectors:
        self.batches.append(list(texts))
        assert self._turns.acquire(timeout=20)
        return super().embed(texts)

    def go_on(self, batches: int = 1) -> None:
        self._turns.release(batches)

    async def has_begun(self, batches: int) -> None:
        async with asyncio.timeout(20):
            while len(self.batches) < batches:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


@pytest_asyncio.fixture
async def held(embedder: Embedder) -> AsyncIterator[Held]:
    model = Held(embedder)
    yield model
    model.go_on(10_000)


@pytest_asyncio.fixture
async def batcher(held: Held) -> AsyncIterator[Batcher]:
    batcher = Batcher(held, max_batch_size=4, max_wait_ms=0)
    batcher.start()
    yield batcher
    held.go_on(10_000)
    await batcher.close()


async def test_a_lookup_goes_before_all_who_stand_behind(batcher: Batcher, held: Held, embedder: Embedder) -> None:
    behind = [asyncio.create_task(batcher.embed(f"document {i}", behind=True)) for i in range(100)]
    await held.has_begun(1)
    lookup = asyncio.create_task(batcher.embed("a question"))
    await asyncio.sleep(0)
    held.go_on(2)
    vector = await lookup
    assert held.batches[:2] == [[f"document {i}" for i in range(4)], ["a question"]]
    np.testing.assert_allclose(vector, embedder.embed(["a question"])[0], atol=1e-5)
    held.go_on(100)
    assert len(await asyncio.gather(*behind)) == 100


async def test_a_lookup_never_waits_for_many_long_texts(batcher: Batcher, held: Held) -> None:
    texts = [f"{i} " + "many words " * 60 for i in range(8)]
    behind = [asyncio.create_task(batcher.embed(text, behind=True)) for text in [*texts, "short", "shorter"]]
    held.go_on(100)
    await asyncio.gather(*behind)
    assert [len(batch) for batch in held.batches[:8]] == [1] * 7 + [3]


async def test_long_questions_do_not_wait_for_each_other(batcher: Batcher, held: Held) -> None:
    """A batch of them takes as long as one by one, and would answer the first no sooner than the last."""
    first = asyncio.create_task(batcher.embed("first"))
    await held.has_begun(1)
    long = [f"{i} " + "many words " * 50 for i in range(3)]
    short = [f"question {i}" for i in range(5)]
    waiting = [asyncio.create_task(batcher.embed(text)) for text in [*long, *short]]
    await asyncio.sleep(0)
    held.go_on(100)
    await asyncio.gather(first, *waiting)
    assert held.batches == [["first"], [long[0]], [long[1]], [long[2], *short[:3]], short[3:]]


async def test_those_behind_get_their_turn_though_lookups_never_end(batcher: Batcher, held: Held) -> None:
    behind = asyncio.create_task(batcher.embed("a document", behind=True))
    await held.has_begun(1)
    later = asyncio.create_task(batcher.embed("another document", behind=True))
    lookups = []
    for number in range(1, 40):
        lookups.append(asyncio.create_task(batcher.embed(f"question {number}")))
        await asyncio.sleep(0)
        held.go_on()
        await held.has_begun(number + 1)
        if later.done():
            break
    assert behind.done()
    assert later.done(), "it never had its turn"
    assert held.batches.index(["another document"]) > 1, "and it did stand behind"
    held.go_on(100)
    await asyncio.gather(*lookups)


async def test_a_text_that_a_lookup_needs_too_moves_to_the_front(batcher: Batcher, held: Held) -> None:
    first = asyncio.create_task(batcher.embed("a document", behind=True))
    await held.has_begun(1)
    texts = [f"document {i}" for i in range(20)]
    behind = [asyncio.create_task(batcher.embed(text, behind=True)) for text in texts]
    await asyncio.sleep(0)
    lookup = asyncio.create_task(batcher.embed("document 19"))
    while_embedded = asyncio.create_task(batcher.embed("a document"))
    await asyncio.sleep(0)
    held.go_on(2)
    await lookup
    assert held.batches[1] == ["document 19"]
    held.go_on(100)
    vectors = await asyncio.gather(first, while_embedded, *behind)
    assert len(vectors) == 22
    assert sum(map(len, held.batches)) == 21, "each text once"


async def test_what_stood_behind_does_not_drive_out_what_lookups_need(
    batcher: Batcher, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.embedding.batcher, "_REMEMBERED_TEXTS", 8)
    held.go_on(10_000)
    await batcher.embed("a question")
    await asyncio.gather(*(batcher.embed(f"{i}", behind=True) for i in range(20)))
    await batcher.embed("a question")
    assert batcher.texts == 21
