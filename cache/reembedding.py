"""Vectors for questions that have none of the present embedder: kept while it was loading, or embedded by another one.

Made beside the traffic: look-ups go first at the embedder, and what is made is in the store at once. Until then such a
question is found by the same words only.
"""

from __future__ import annotations

import asyncio
import logging

from cache.embedding.batcher import Batcher, Overloaded
from cache.embedding.embedder import Refused
from cache.store.answers import Store
from cache.words.asking import asked_form

_log = logging.getLogger(__name__)
_AT_ONCE = 32
_IDLE_S = 1.0
_TROUBLE_S = 10.0  # the file cannot be written, or the embedder fails


async def make_vectors(store: Store, batcher: Batcher) -> None:
    """Make what is waiting, for as long as the process lives."""
    while True:
        waiting = store.without_vector(_AT_ONCE) if store.size().waiting_vectors else []
        if not waiting:
            await asyncio.sleep(_IDLE_S)
            continue
        try:
            await asyncio.gather(*(_make(store, batcher, *question) for question in waiting))
            await store.flush()  # what waits is read from the file
        except Overloaded:
            await asyncio.sleep(_IDLE_S)
        except Exception as error:  # whatever the embedder raises must not end this for good
            _log.warning("vectors of cached questions cannot be made now: %s", error)
            await asyncio.sleep(_TROUBLE_S)


async def _make(store: Store, batcher: Batcher, place: int, question_id: int, text: str | None) -> None:
    vector = None
    if text is not None:
        try:
            vector = await batcher.embed(asked_form(text), behind=True)
        except Refused:
            vector = None  # by this embedder; the same words still find the answer
    store.set_vector(place, question_id, vector)
