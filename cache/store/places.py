"""The indexes of partitions and contexts in memory: read from the file on first use, the least recently used dropped
beyond a bound, renewed beside the traffic when their form no longer fits.

A place is one partition and context by number. Reading and building run on threads; what is added to a place or leaves
it meanwhile is noted and made good when its index is there. Everything else runs on one thread.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cache.store import tables
from cache.store.cipher import Sealer, Unreadable
from cache.store.disk import Disk
from cache.store.index import BYTES_PER_ID, Vector, VectorIndex

_log = logging.getLogger(__name__)
_THREADS = 2  # one may be making cells for seconds
_ROWS_AT_ONCE = 1000
_PLACE_BYTES = 2000  # objects and dictionaries of an index

_Waiting = Iterable[tuple[int, Vector]]


@dataclass(slots=True)
class _Load:
    """A place that is being read. `since` holds what changed meanwhile, in order: a vector, or None where it left."""

    index: Future[VectorIndex]
    since: list[tuple[int, Vector | None]] = field(default_factory=list)


class Loading(Exception):
    """An index is being read from the file, and that takes longer than the caller would wait."""


async def finished(future: Future[Any], within_s: float | None = None) -> None:
    """Wait until a future of another thread has ended, well or not, or the time is over. Whoever waits may leave."""
    waiting = asyncio.wrap_future(future)
    # Nobody may be there any more to look at a failure.
    waiting.add_done_callback(lambda ended: None if ended.cancelled() else ended.exception())
    await asyncio.wait([waiting], timeout=within_s)


class Places:
    """Indexes by place. `waiting` gives the vectors of a place that may not be in the file yet."""

    def __init__(self, disk: Disk, sealer: Sealer, waiting: Callable[[int], _Waiting], *, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.loads = 0
        self.drops = 0
        self._disk = disk
        self._sealer = sealer
        self._waiting = waiting
        self._loaded: OrderedDict[int, VectorIndex] = OrderedDict()  # least recently used first
        self._sizes: dict[int, int] = {}
        self._loading: dict[int, _Load] = {}
        self._finished: deque[tuple[int, _Load, int]] = deque()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="cache-index")

    def __len__(self) -> int:
        return len(self._loaded)

    @property
    def loading(self) -> int:
        return len(self._loading)

    @property
    def vectors(self) -> int:
        return sum(len(index) for index in self._loaded.values())

    def begin(self, place: int, dimension: int) -> None:
        """A place that nothing was ever put into: there is nothing to read."""
        if place not in self._loaded and place not in self._loading:
            self._keep(place, VectorIndex(dimension))

    def prepare(self, place: int) -> None:
        """Start reading a place, unless it is there."""
        if place not in self._loaded and place not in self._loading:
            self._start(place)

    async def index(self, place: int, *, within_s: float | None = None) -> VectorIndex:
        """The index of a place, read first where it is not in memory.

        Raises:
            Loading: it is still being read after `within_s`; the reading goes on.
            sqlite3.Error: it cannot be read now.
        """
        self.settle()
        index = self._loaded.get(place)
        if index is None:
            self.prepare(place)
            load = self._loading[place]
            await finished(load.index, within_s)
            if not load.index.done():
                raise Loading
            self.settle()
            index = self._loaded.get(place)
            if index is None:  # empty, or void by now
                return load.index.result()
        self._loaded.move_to_end(place)
        return index

    def add(self, place: int, id: int, vector: Vector) -> None:
        self._note(place, id, vector)
        index = self._loaded.get(place)
        if index is not None and id not in index:
            index.add(id, vector)
            self._look_after(place, index)

    def remove(self, place: int, id: int) -> None:
        self._note(place, id, None)
        index = self._loaded.get(place)
        if index is None:
            return
        index.remove(id)
        if len(index):
            self._look_after(place, index)
        else:
            self._drop(place)

    def clear(self) -> None:
        """Everything that was read is void."""
        for place in list(self._loaded):
            self._drop(place)
        self._loading.clear()

    def settle(self) -> None:
        """Take in what the threads have finished."""
        while self._finished:
            place, load, generation = self._finished.popleft()
            if self._loading.get(place) is not load:
                continue  # void by now
            del self._loading[place]
            if load.index.exception() is not None or generation != self._disk.generation:
                continue  # whoever waits for it is told; the next one tries again
            index = load.index.result()
            for id, vector in load.since:
                if vector is None:
                    index.remove(id)
                elif id not in index:
                    index = index if index.dimension else VectorIndex(len(vector))  # there was none in the file
                    index.add(id, vector)
            if len(index):
                self._keep(place, index)
            elif place in self._loaded:
                self._drop(place)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _start(self, place: int, *, cells: bool = False) -> None:
        generation = self._disk.generation
        self.loads += 1
        future = self._threads.submit(self._read, place, cells)
        load = _Load(future, [(id, vector) for id, vector in self._waiting(place)])
        self._loading[place] = load
        future.add_done_callback(lambda _: self._finished.append((place, load, generation)))

    def _note(self, place: int, id: int, vector: Vector | None) -> None:
        load = self._loading.get(place)
        if load is not None:
            load.since.append((id, vector))

    def _look_after(self, place: int, index: VectorIndex) -> None:
        self._measure(place, index)
        if index.stale and place in self._loaded and place not in self._loading:
            self._start(place, cells=True)

    def _keep(self, place: int, index: VectorIndex) -> None:
        self._loaded[place] = index
        self._loaded.move_to_end(place)
        # Somebody waited for it, so it came without cells.
        self._look_after(place, index)

    def _measure(self, place: int, index: VectorIndex) -> None:
        size = index.size_bytes + _PLACE_BYTES
        self.bytes += size - self._sizes.get(place, 0)
        self._sizes[place] = size
        while self.bytes > self.max_bytes and len(self._loaded) > 1:
            self.drops += 1
            self._drop(next(other for other in self._loaded if other != place))

    def _drop(self, place: int) -> None:
        del self._loaded[place]
        self.bytes -= self._sizes.pop(place)

    def _read(self, place: int, cells: bool) -> VectorIndex:
        """Read and build, on a thread: of the vectors of the present embedder the newest, as many as may be held."""
        ids: list[int] = []
        values: list[bytes] = []
        connection = self._disk.connect()
        try:
            before, left = 1 << 62, self.max_bytes
            while left > 0:
                with self._disk.lock:
                    rows = connection.execute(
                        "SELECT question, body FROM vectors WHERE place = ? AND question < ? AND embedder = ?"
                        " ORDER BY question DESC LIMIT ?",
                        (place, before, self._disk.embedder, _ROWS_AT_ONCE),
                    ).fetchall()
                if not rows:
                    break
                before = rows[-1][0]
                for id, value in self._unsealed(rows):
                    ids.append(id)
                    values.append(value)
                    left -= len(value) + BYTES_PER_ID
        finally:
            if not self._disk.in_memory:
                connection.close()
        # Oldest first, so that rows are in the order of ids.
        vectors = tables.unpacked(b"".join(reversed(values)))
        matrix = vectors.reshape(len(ids), -1) if ids else np.empty((0, 0), np.float32)
        return VectorIndex.build(ids[::-1], matrix, cells=cells)

    def _unsealed(self, rows: list[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
        for id, body in rows:
            try:
                yield id, self._sealer.unseal(body, tables.vector_binding(id))
            except Unreadable as error:
                _log.debug("a vector is left out: %s", error)
