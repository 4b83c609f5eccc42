"""The answers in memory: by exact key, and within one partition and context by folded form and by vector.

Bounded in entries and bytes: the least recently used answer goes first, so an idle tenant's go before a busy one's.
Time limits are absolute. Runs on one thread; a `Disk` beside it, if given, follows every change.
"""

from __future__ import annotations

import heapq
import time
from collections import OrderedDict
from collections.abc import Callable

import msgspec

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.disk import Disk, Row
from cache.store.index import Vector, VectorIndex
from cache.words.writing import folded_form

_VECTOR_OVERHEAD_BYTES = 200
_Place = tuple[str, str]
_Folded = tuple[str, str, str]


class Store:
    """Where entries live and die. A size is what an answer, its question, its keys and its vector take.

    Invariants: every id of an index is an entry of that partition and context; `bytes` is the sum of the sizes of the
    entries; neither bound is exceeded when a method returns.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evictions = 0
        self.expirations = 0
        self.purged = 0
        self._disk = disk
        self._clock = clock
        self._next_id = 0
        self._rows: OrderedDict[int, Row] = OrderedDict()  # least recently used first; vectors live in the indexes
        self._sizes: dict[int, int] = {}
        self._by_exact: dict[str, int] = {}
        # Only of entries that other words may find, which are those with a vector; of several, the latest.
        self._by_folded: dict[_Folded, int] = {}
        self._indexes: dict[_Place, VectorIndex] = {}
        self._expiry: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def indexes(self) -> int:
        return len(self._indexes)

    @property
    def vectors(self) -> int:
        return sum(len(index) for index in self._indexes.values())

    def get_exact(self, key: CacheKey, *, ttl_s: float | None = None) -> Entry | None:
        """The answer to the very same request, if it is not too old."""
        id = self._by_exact.get(key.exact)
        return None if id is None else self._fresh(id, ttl_s)

    def get_folded(self, key: CacheKey, *, ttl_s: float | None = None) -> tuple[int, Entry] | None:
        """The latest answer to the same words written otherwise, as (id, entry). Whether they mean the same is open."""
        folded = _folded(key.partition, key.context, key.text)
        id = self._by_folded.get(folded) if folded else None
        if id is None or self._rows[id].entry.expired(self._clock(), ttl_s=ttl_s):
            return None
        return id, self._rows[id].entry

    def nearest(
        self, key: CacheKey, vector: Vector, k: int, *, ttl_s: float | None = None
    ) -> list[tuple[int, float, Entry]]:
        """Up to `k` entries of the key's partition and context as (id, cosine, entry), nearest first."""
        index = self._indexes.get((key.partition, key.context))
        if index is None:
            return []
        found = []
        for id, cosine in index.search(vector, k):
            row = self._rows[id]
            if not row.entry.expired(self._clock(), ttl_s=ttl_s):
                found.append((id, cosine, row.entry))
        return found

    def touch(self, id: int) -> None:
        """Count an entry as used."""
        self._rows.move_to_end(id)

    def put(self, key: CacheKey, entry: Entry, vector: Vector | None) -> str | None:
        """Keep an answer, in place of any earlier one to the same request.

        Returns: None, or why it was not kept: `expired`, `too_large` (more than an eighth of the whole cache).
        """
        return self._insert(Row(key.exact, key.scope, key.partition, key.context, entry, vector), self._disk)

    def add_vector(self, key: CacheKey, vector: Vector) -> bool:
        """Let an answer that was stored without a vector be found by other words too; False when it is gone."""
        id = self._by_exact.get(key.exact)
        if id is None:
            return False
        row = msgspec.structs.replace(self._rows[id], vector=vector)
        return self._insert(row, self._disk) is None

    def restore(self, row: Row) -> str | None:
        """Take an entry that is on disk already; answers stored meanwhile are newer and win."""
        return None if row.exact in self._by_exact else self._insert(row, None)

    def purge(self, *, scope: str | None = None, model: str | None = None, older_than_s: float | None = None) -> int:
        """Forget the entries that meet every condition given, all when none is; returns how many."""
        born_before = None if older_than_s is None else self._clock() - older_than_s
        doomed = [
            id
            for id, row in self._rows.items()
            if (scope is None or row.scope == scope)
            and (model is None or row.entry.model == model)
            and (born_before is None or row.entry.created_at <= born_before)
        ]
        self._remove(doomed)
        self.purged += len(doomed)
        return len(doomed)

    def expire(self) -> int:
        """Forget what is past its time; returns how many."""
        now = self._clock()
        doomed = []
        while self._expiry and self._expiry[0][0] <= now:
            _, id = heapq.heappop(self._expiry)
            if id in self._rows:
                doomed.append(id)
        self._remove(doomed)
        self.expirations += len(doomed)
        return len(doomed)

    def _fresh(self, id: int, ttl_s: float | None) -> Entry | None:
        entry = self._rows[id].entry
        if entry.expired(self._clock(), ttl_s=ttl_s):
            return None
        self.touch(id)
        return entry

    def _insert(self, row: Row, disk: Disk | None) -> str | None:
        if row.entry.expired(self._clock()):
            return "expired"
        size = _size_bytes(row)
        if size * 8 > self.max_bytes:
            return "too_large"
        self.expire()
        earlier = self._by_exact.get(row.exact)
        if earlier is not None:
            self._remove([earlier])
        id = self._next_id
        self._next_id += 1
        if row.vector is not None:
            place = (row.partition, row.context)
            index = self._indexes.get(place)
            if index is None:
                index = VectorIndex(len(row.vector))
            index.add(id, row.vector)
            self._indexes[place] = index
            folded = _folded(row.partition, row.context, row.entry.question)
            if folded is not None:
                self._by_folded[folded] = id
        self._rows[id] = msgspec.structs.replace(row, vector=None)
        self._sizes[id] = size
        self._by_exact[row.exact] = id
        self.bytes += size
        heapq.heappush(self._expiry, (row.entry.expires_at, id))
        if disk is not None:
            disk.put(row)
        self._evict()
        return None

    def _evict(self) -> None:
        doomed = []
        entries, size = len(self._rows), self.bytes
        for id in self._rows:
            if entries <= self.max_entries and size <= self.max_bytes:
                break
            doomed.append(id)
            entries -= 1
            size -= self._sizes[id]
        self._remove(doomed)
        self.evictions += len(doomed)

    def _remove(self, ids: list[int]) -> None:
        rows = []
        for id in ids:
            row = self._rows.pop(id)
            rows.append(row)
            del self._by_exact[row.exact]
            self.bytes -= self._sizes.pop(id)
            place = (row.partition, row.context)
            index = self._indexes.get(place)
            if index is not None and index.remove(id) and not len(index):
                del self._indexes[place]
            folded = _folded(row.partition, row.context, row.entry.question)
            if folded is not None and self._by_folded.get(folded) == id:
                del self._by_folded[folded]
        if rows and self._disk is not None:
            self._disk.delete(row.exact for row in rows)


def _folded(partition: str, context: str, text: str) -> _Folded | None:
    form = folded_form(text)
    return None if form is None else (partition, context, form)


def _size_bytes(row: Row) -> int:
    vector = 0 if row.vector is None else row.vector.nbytes + _VECTOR_OVERHEAD_BYTES
    keys = len(row.exact) + len(row.scope) + len(row.partition) + len(row.context)
    return row.entry.size_bytes() + vector + keys
