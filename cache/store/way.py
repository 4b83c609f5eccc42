"""The way of a change: laid over the file at once, handed to the writer, taken into memory when it was written."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from concurrent.futures import Future

from cache.store.changes import Batch, Change, CountUses, PutAnswer
from cache.store.disk import Disk
from cache.store.pending import Pending
from cache.store.places import Places, finished
from cache.store.view import View
from cache.store.writer import Writer

_USES_AT_ONCE = 200
_LOOK_AGAIN_S = 0.2


class Way:
    """Of all changes of a store, on its thread. Gives the numbers of answers, questions and places."""

    def __init__(
        self, disk: Disk, writer: Writer, pending: Pending, view: View, places: Places, *, max_bytes: int
    ) -> None:
        """`max_bytes` bounds what waits while the file cannot be written: the oldest questions are given up first."""
        self.evictions = 0
        self.expirations = 0
        self.purged = 0
        self._writer = writer
        self._pending = pending
        self._view = view
        self._places = places
        self._max_bytes = max_bytes
        self._next_id, self._next_place = disk.next_id, disk.next_place
        self._uses: Counter[int] = Counter()

    @property
    def latest_id(self) -> int:
        return self._next_id - 1

    def new_id(self) -> int:
        id = self._next_id
        self._next_id += 1
        return id

    def new_place(self) -> int:
        place = self._next_place
        self._next_place += 1
        return place

    def submit(self, change: Change, written: Future[int] | None = None) -> None:
        """Make a change."""
        self._writer.next_id, self._writer.next_place = self._next_id, self._next_place
        self._pending.add(self._writer.submit(change, written))
        self.settle()
        while self._pending.bytes > self._max_bytes:
            oldest = self._writer.drop_oldest()
            if oldest is None:
                return
            self._pending.remove(oldest)
            self.evictions += isinstance(oldest.change, PutAnswer)

    async def written(self, change: Change) -> int:
        """Make a change and wait until it is in the file; returns how many answers it removed.

        Raises:
            OSError: the file cannot be written now.
        """
        written: Future[int] = Future()
        written.set_running_or_notify_cancel()  # who waits may leave; the change is made all the same
        self.submit(change, written)
        while not written.done():
            if self._writer.error is not None:
                raise OSError(f"the cache file cannot be written now: {self._writer.error}")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(finished(written), _LOOK_AGAIN_S)
        self.settle()
        return written.result()

    def used(self, answer_id: int) -> None:
        """Count an answer as served; many of these make one change."""
        self._uses[answer_id] += 1
        if len(self._uses) >= _USES_AT_ONCE:
            self.count_uses()

    def count_uses(self) -> None:
        if self._uses:
            self.submit(CountUses(dict(self._uses)))
            self._uses.clear()

    def settle(self) -> None:
        """Take in what the threads did since the last call."""
        while self._writer.done:
            self._take(self._writer.done.popleft())
        self._places.settle()

    def _take(self, batch: Batch) -> None:
        for submitted in batch.submitted:
            self._pending.remove(submitted)
        self.evictions += batch.evicted
        self.expirations += batch.expired
        self.purged += batch.purged
        self._pending.erased(batch.erased)
        if batch.emptied:
            self._pending.emptied()
            self._places.clear()
            self._view.clear()
        for place, question_id in batch.gone:
            self._places.remove(place, question_id)
