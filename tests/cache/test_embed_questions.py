"""Vectors for others than the cache, over its socket: those of texts, and those of questions as look-ups use them."""

from __future__ import annotations

import numpy as np
import pytest

from cache.client import CacheClient, CacheUnavailable
from cache.embedding.embedder import Embedder
from tests.cache.conftest import MakeEntry, MakeKey

ASKED, FORM = "Could you tell me what the capital of Peru is?", "what is the capital of Peru?"


async def test_texts_are_embedded_as_they_are(client: CacheClient, embedder: Embedder) -> None:
    found = await client.embed(["two words", ASKED])
    np.testing.assert_allclose(found, embedder.embed(["two words", ASKED]), atol=1e-5)


async def test_a_question_is_embedded_once_for_the_lookup_and_for_others(
    client: CacheClient, embedder: Embedder, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    before = (await client.stats()).embedded_texts
    vector = (await client.embed([ASKED], as_questions=True))[0]
    np.testing.assert_allclose(vector, embedder.embed([FORM])[0], atol=1e-5)
    key = make_key(ASKED)
    assert (await client.lookup(key, "semantic", 0.95)).outcome == "miss"
    await client.store(key, make_entry(ASKED), "semantic")
    assert (await client.embed([ASKED], as_questions=True))[0] == vector
    assert (await client.stats()).embedded_texts == before + 1


async def test_a_question_that_cannot_be_embedded_says_why(client: CacheClient) -> None:
    for text, reason in (("word " * 400, "too_long"), ("法国的首都是哪里", "script_not_covered")):
        with pytest.raises(CacheUnavailable) as refused:
            await client.embed(["fine", text], as_questions=True)
        assert refused.value.reason == reason
    assert await client.embed([], as_questions=True) == []
