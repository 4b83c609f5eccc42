"""A look-up in a partition that is not in memory waits for its reading for so long, and then is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cache.answering import Answering
from cache.embedding.batcher import Batcher
from cache.embedding.embedder import Embedder
from cache.entry import Entry
from cache.key import CacheKey
from cache.learning import Learning
from cache.notebook import Notebook
from cache.promise.keeper import Keeper
from cache.promise.rule import Rule
from cache.stats import Recorder
from cache.store.answers import Store
from cache.store.places import Loading
from cache.wire import Asker, LookupRequest

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]
QUESTION, OTHERWISE = "What is the capital of France?", "Which city is the capital of France?"


@contextmanager
def unreadable_for_now(store: Store) -> Iterator[None]:
    """Reading a partition takes as long as this lasts: its thread waits for this one."""
    with store._disk.lock:
        yield


def opened(folder: Path) -> Store:
    return Store(folder, "f", max_entries=1000, max_bytes=1 << 26)


@pytest.fixture
def filled(tmp_path: Path, embedder: Embedder, make_key: MakeKey, make_entry: MakeEntry) -> Iterator[Store]:
    """A store that was opened again, so that nothing is in memory."""
    store = opened(tmp_path)
    store.put(make_key(QUESTION), make_entry(QUESTION), embedder.embed([QUESTION])[0])
    store.close()
    store = opened(tmp_path)
    yield store
    store.close()


async def test_the_store_waits_so_long_and_reads_on(filled: Store, embedder: Embedder, make_key: MakeKey) -> None:
    key, vector = make_key(QUESTION), embedder.embed([QUESTION])[0]
    with unreadable_for_now(filled):
        for within_s in (0.0, 0.01):
            with pytest.raises(Loading):
                await filled.nearest(key, vector, 8, within_s=within_s)
        waiting = asyncio.create_task(filled.nearest(key, vector, 8))
        assert filled.size().loading == 1  # one reading, however many ask
    assert [found.question for found in await waiting] == [QUESTION]
    assert [found.question for found in await filled.nearest(key, vector, 8, within_s=0.0)] == [QUESTION]


@pytest.mark.parametrize("rule", [None, Rule(policy="p", max_false_hit_rate=0.01)], ids=["threshold", "promise"])
async def test_a_look_up_that_would_wait_is_a_miss_which_says_so(
    filled: Store, embedder: Embedder, make_key: MakeKey, rule: Rule | None
) -> None:
    recorder, notebook = Recorder(), Notebook(None, "m")
    answering = Answering(filled, Learning(Keeper(), notebook, recorder), recorder, load_wait_s=0.01)
    answering.batcher = batcher = Batcher(embedder, max_batch_size=8, max_wait_ms=0)
    batcher.start()
    request = LookupRequest(1, make_key(OTHERWISE), "semantic", 0.9, rule=rule, asker=Asker("k", "t", "r"))
    with unreadable_for_now(filled):
        reply = await answering.look_up(request)
        assert (reply.outcome, reply.reason, reply.ticket) == ("miss", "loading", 0)
        exact = await answering.look_up(LookupRequest(2, make_key(QUESTION), "semantic", 0.9))
        assert exact.outcome == "exact"  # the same words need nothing read
    await filled.nearest(make_key(QUESTION), embedder.embed([QUESTION])[0], 8)
    reply = await answering.look_up(request)
    assert (reply.outcome, reply.reason) == (("semantic", None) if rule is None else ("miss", "learning"))
    await batcher.close()
    await answering.close()
    notebook.close()
