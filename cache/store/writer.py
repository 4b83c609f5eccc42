"""Writes changes to the cache's file, in order, on a thread of its own, so that no request waits for a disk.

While the file cannot be written (disk full, folder gone) changes wait in memory and are tried again; the log says so
once, and once more when it works again. Where there is no file, a change is made at once by whoever submits it.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sqlite3
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

from cache.store.changes import AddQuestion, Batch, Change, Expire, PurgeAnswers, PutAnswer, Submitted
from cache.store.cipher import Sealer
from cache.store.disk import Disk, is_damage
from cache.store.tables import Tables, Totals

_log = logging.getLogger(__name__)
_BATCH = 256
_EVICT_AT_ONCE = 64
_EVICT_ROUNDS = 64  # of one batch: what is over goes with the next one
_VACUUM_PAGES = 512
_RETRY_FROM_S, _RETRY_TO_S = 0.25, 10.0
_CLOSE_S = 5.0
_BUSY_S = 5.0


class Writer:
    """The one that writes. `submit` from one thread; what was written is taken from `done` by that thread.

    Attributes:
        done: batches that are in the file by now, oldest first.
        error: why the file cannot be written at present, or None.
        totals: what the file holds.
        used_bytes: of the file, free pages left out.
        unfinished: purges of an earlier process whose answers are still in the file.
    """

    def __init__(self, disk: Disk, sealer: Sealer, *, max_entries: int, max_bytes: int) -> None:
        self.done: deque[Batch] = deque()
        self.error: str | None = None
        self.totals = Totals()
        self.used_bytes = 0
        self.next_id, self.next_place = disk.next_id, disk.next_place
        self._disk = disk
        self._sealer = sealer
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._waiting: deque[Submitted] = deque()
        self._changed = threading.Condition()
        self._closing = False
        self._damaged: Exception | None = None
        self._db = disk.connect(busy_timeout_s=_BUSY_S)
        self._page_bytes = int(self._db.execute("PRAGMA page_size").fetchone()[0])
        self._tables = Tables(self._db, sealer, disk.embedder)
        self.unfinished = self._tables.erasing
        self._measure()
        self._thread: threading.Thread | None = None
        if not disk.in_memory:
            self._thread = threading.Thread(target=self._run, name="cache-writer", daemon=True)
            self._thread.start()

    def submit(self, change: Change, written: Future[int] | None = None) -> Submitted:
        """Take a change. `written` gets how many answers it removed, once it is in the file."""
        submitted = Submitted(change, written)
        if self._thread is None:
            with self._disk.lock:
                self._write([submitted])
                while self._tables.erasing:
                    self._erase()
        else:
            with self._changed:
                self._waiting.append(submitted)
                self._changed.notify()
        return submitted

    def drop_oldest(self) -> Submitted | None:
        """Take back what was put first of all that waits; None when nothing does, or it is being written."""
        with self._changed:
            for position, submitted in enumerate(self._waiting):
                if isinstance(submitted.change, PutAnswer | AddQuestion):
                    del self._waiting[position]
                    return submitted
            return None

    def report_damage(self, error: Exception) -> None:
        """Somebody who read the file found it broken: replace it."""
        with self._changed:
            self._damaged = error
            self._changed.notify()

    def close(self) -> None:
        """Write what is left, as far as it can be written, and stop."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self) -> None:
        delay = _RETRY_FROM_S
        while True:
            with self._changed:
                idle = not self._tables.erasing
                while idle and not self._waiting and not self._closing and self._damaged is None:
                    self._changed.wait()
                damaged, self._damaged = self._damaged, None
                batch = [self._waiting.popleft() for _ in range(min(_BATCH, len(self._waiting)))]
                if self._closing and not batch:
                    break
            try:
                if damaged is not None:
                    raise sqlite3.DatabaseError(str(damaged)) from damaged
                if batch:
                    self._write_or_drop(batch)
                    batch = []
                if self._tables.erasing:
                    self._erase()
            except (sqlite3.Error, OSError) as error:
                with self._changed:
                    self._waiting.extendleft(reversed(batch))
                    if self._closing:
                        break
                if damaged is not None or (isinstance(error, sqlite3.Error) and is_damage(error)):
                    self._replace(error)
                else:
                    self._fail(error)
                with self._changed:
                    if self.error is not None:
                        self._changed.wait_for(lambda: self._closing, delay)
                delay = min(2 * delay, _RETRY_TO_S)
                continue
            delay = _RETRY_FROM_S
            if self.error is not None:
                self.error = None
                _log.warning("the cache file %s is written again", self._disk.path)
        with self._changed:
            left, self._waiting = self._waiting, deque()
        for submitted in left:
            if submitted.written is not None:
                submitted.written.set_exception(OSError("the cache ends, and its file cannot be written"))
        with contextlib.suppress(sqlite3.Error):
            self._db.close()

    def _fail(self, error: Exception) -> None:
        if self.error is None:
            _log.warning(
                "the cache file %s cannot be written (%s): new answers are kept in memory only, until it can",
                self._disk.path,
                error,
            )
        self.error = str(error)

    def _replace(self, error: Exception) -> None:
        """Begin a new file in place of a broken one."""
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        try:
            with self._disk.lock:
                self._disk.replace_damaged(error)
                self._db = self._disk.connect(busy_timeout_s=_BUSY_S)
                self._tables = Tables(self._db, self._sealer, self._disk.embedder)
        except (sqlite3.Error, OSError) as fault:
            self._fail(fault)
            self._damaged = error  # try again
            return
        self._measure()
        self.done.append(Batch([], emptied=True))

    def _write_or_drop(self, changes: list[Submitted]) -> None:
        """Write changes; one that can never be written must not hold up those behind it."""
        try:
            self._write(changes)
        except (
            sqlite3.IntegrityError,
            sqlite3.ProgrammingError,
            sqlite3.InterfaceError,
            ValueError,
            TypeError,
        ) as error:
            if len(changes) > 1:
                for submitted in changes:
                    self._write_or_drop([submitted])
                return
            _log.exception("a change to the cache cannot be written and is dropped")
            self.done.append(Batch(changes))
            if changes and changes[0].written is not None:
                changes[0].written.set_exception(error)

    def _write(self, changes: list[Submitted]) -> None:
        """Write changes in one transaction; what is past its time in several, each whole by itself."""
        batch = Batch(changes)
        removed = []
        with self._transaction():
            for submitted in changes:
                match submitted.change:
                    case PurgeAnswers() as purge:
                        removed.append(self._tables.purge(purge, batch))
                    case Expire() as expire:
                        removed.append(self._expire(expire, batch))
                    case change:
                        removed.append(self._tables.apply(change, batch))
            self._make_room(batch)
        self._done(batch)
        for submitted, count in zip(changes, removed, strict=True):
            if submitted.written is not None:
                submitted.written.set_result(count)

    def _expire(self, change: Expire, batch: Batch) -> int:
        count, more = self._tables.expire(change, batch)
        while more:
            self._commit_and_go_on()
            part, more = self._tables.expire(change, batch)
            count += part
        return count

    def _erase(self) -> None:
        """Take some of what was purged out of the file. It is in nobody's way: other changes go between the pieces."""
        batch = Batch([])
        with self._transaction():
            self._tables.erase(batch)
        self._done(batch)

    def _done(self, batch: Batch) -> None:
        """What was written can be seen. Who waits for `written` must find the batch already done."""
        if batch.erased or batch.emptied:
            with contextlib.suppress(sqlite3.Error):  # a reader is in the way: the next checkpoint does it
                self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        self._measure()
        self.done.append(batch)

    def _make_room(self, batch: Batch) -> None:
        for _ in range(_EVICT_ROUNDS):
            answers, used = self._tables.answers, self._used_bytes()
            over = answers - self._max_entries
            if used > self._max_bytes:
                over = max(over, math.ceil(answers * (used - self._max_bytes) / used))
            if over <= 0:
                return
            if self._tables.erasing:
                self._tables.erase(batch)
            elif not self._tables.evict(min(over, _EVICT_AT_ONCE), batch):
                return

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        try:
            self._db.execute("BEGIN IMMEDIATE")
            yield
            self._tables.note(self.next_id, self.next_place)
            self._db.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            with contextlib.suppress(sqlite3.Error):
                self._tables.reread()
            raise
        if self._file_bytes() > self._max_bytes:
            self._db.executescript(f"PRAGMA incremental_vacuum({_VACUUM_PAGES})")

    def _commit_and_go_on(self) -> None:
        self._tables.note(self.next_id, self.next_place)
        self._db.execute("COMMIT")
        self._db.execute("BEGIN IMMEDIATE")

    def _measure(self) -> None:
        self.totals = self._tables.totals
        self.used_bytes = self._used_bytes()

    def _used_bytes(self) -> int:
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        (free,) = self._db.execute("PRAGMA freelist_count").fetchone()
        return int(pages - free) * self._page_bytes

    def _file_bytes(self) -> int:
        (pages,) = self._db.execute("PRAGMA page_count").fetchone()
        return int(pages) * self._page_bytes
