"""The questions nearest to one, from the index of its place and the file; without their answers, which may be long."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable

from cache.key import CacheKey
from cache.store.changes import Vector
from cache.store.disk import is_damage
from cache.store.found import Near
from cache.store.places import Places
from cache.store.view import View
from cache.store.way import Way
from cache.store.writer import Writer

_log = logging.getLogger(__name__)
_SAME_COSINE = 1 - 1e-4  # numbers of 16 bits make a text beside itself a little less than 1
_SEARCHES = 3


class Search:
    """Searches in the places of a store, on its thread."""

    def __init__(self, view: View, places: Places, way: Way, writer: Writer, clock: Callable[[], float]) -> None:
        self._view = view
        self._places = places
        self._way = way
        self._writer = writer
        self._clock = clock

    async def nearest(
        self, key: CacheKey, vector: Vector, k: int, *, ttl_s: float | None, within_s: float | None
    ) -> list[Near]:
        """See `Store.nearest`."""
        self._way.settle()
        place = self._view.place(key)
        if place is None:
            return []
        try:
            index = await self._places.index(place, within_s=within_s)
        except sqlite3.Error as error:
            if is_damage(error):
                self._writer.report_damage(error)
            else:
                _log.warning("a part of the cache file cannot be read: %s", error)
            return []
        self._way.settle()
        if not len(index):
            self._view.forget_place(key)
            return []
        for _ in range(_SEARCHES):
            nearest = index.search(vector, k)
            known = self._view.asked([id for id, _ in nearest])
            lost = [id for id, _ in nearest if id not in known]
            for id in lost:  # forgotten, and the index was not told yet
                index.remove(id)
                self._places.remove(place, id)
            if not lost:
                break
        now = self._clock()
        return [
            Near(id, asked.answer_id, 1.0 if cosine >= _SAME_COSINE else cosine, asked.text)
            for id, cosine in nearest
            # The scope is in the digests already. Should they ever fail, no tenant sees another's question.
            if (asked := known.get(id)) is not None and asked.scope == key.scope and not asked.expired(now, ttl_s=ttl_s)
        ]
