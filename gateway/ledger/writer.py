"""Moves what the journal holds into the database, in batches, in the background.

It reads the journal's files, not memory: a database that is down for a day costs disk, and a restart continues where
the last process stopped. Inserts skip rows that are there, so doing a batch twice is harmless. A row that the database
refuses for its content goes to `rejected.jsonl` with an error in the log; it never holds up the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import msgspec
from sqlalchemy.exc import DBAPIError

from gateway.ledger import frames
from gateway.ledger.database import Database, is_outage
from gateway.ledger.journal import Journal, JournalError, Position
from gateway.ledger.records import Close, Decided, Noted, concerns_database, decode
from gateway.ledger.rows import Decision, LedgerRow, Note

logger = logging.getLogger("tierline.ledger")

# Records per transaction: preparing them holds up the event loop for about a millisecond.
BATCH_RECORDS: Final = 256
_AT_ONCE: Final = 32  # frames that are looked at before others get their turn
INTERVAL_S: Final = 0.25
# While the database is down: how long until the next try, doubling from the interval.
MAX_BACKOFF_S: Final = 10.0


class LedgerWriter:
    """One journal's way into one database. `start`, and `stop` at the end; `flush` waits until all is stored."""

    def __init__(
        self,
        journal: Journal,
        database: Database,
        *,
        batch_records: int = BATCH_RECORDS,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.journal = journal
        self.last_error: str | None = None
        self.rejected = 0
        self._database = database
        self._batch_records = batch_records
        self._interval_s = interval_s
        self._stored = 0
        self._position = journal.checkpoint
        self._frames: Iterator[frames.Frame] = iter(())
        self._behind_since: float | None = None
        self._stopping = asyncio.Event()
        self._busy = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    @property
    def lag_rows(self) -> int:
        """Rows in the journal that the database does not have yet."""
        return self.journal.closes - self._stored

    @property
    def lag_s(self) -> float:
        """How long rows have been waiting, 0 when none is."""
        return time.monotonic() - self._behind_since if self._behind_since is not None and self.lag_rows else 0.0

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="ledger-writer")

    async def stop(self, timeout_s: float = 10.0) -> None:
        """Store what is left, as far as the database allows within the time; the rest stays in the journal."""
        self._stopping.set()
        try:
            async with asyncio.timeout(timeout_s):
                if self._task:
                    await self._task
                await self.flush()
        except (DBAPIError, OSError, TimeoutError) as error:
            logger.warning("%d ledger rows stay in the journal until the next start: %s", self.lag_rows, error)

    async def flush(self) -> None:
        """Store everything that was in the journal when this was called.

        Raises:
            DBAPIError, OSError: the database is out; nothing is lost, `start`ed writers keep trying.
        """
        end = self.journal.end
        while self._position < end and await self._step():
            pass

    async def _run(self) -> None:
        delay = self._interval_s
        while not self._stopping.is_set():
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
            try:
                await self.flush()
                delay = self._interval_s
            except Exception as error:
                # Whatever it is, this loop is the only way into the database: it must outlive the fault.
                if self.last_error is None:
                    expected = is_outage(error)
                    text = "rows stay in the journal, the database does not take them: %s"
                    logger.error(text, _reason(error), exc_info=None if expected else error)
                self.last_error = _reason(error)
                delay = min(MAX_BACKOFF_S, delay * 2)

    async def _step(self) -> bool:
        """Store one batch and move on; False when there was nothing to read."""
        async with self._busy:
            if self._behind_since is None:
                self._behind_since = time.monotonic()
            start = self._position
            try:
                rows, reasons, position = await self._read()
                if position == start:
                    self._behind_since = None
                    return False
                await self._store(rows, reasons)
            except BaseException:
                # Read it again, also where whoever asked for a flush has given up: what was taken is not stored.
                self._position, self._frames = start, iter(())
                raise
            self._position = position
            self._stored += len(rows)
            if self.last_error is not None:
                logger.info("the database is back; %d ledger rows are waiting", self.lag_rows)
                self.last_error = None
            if position >= self.journal.end:
                self._behind_since = None
            await self._clean(position)
            return True

    async def _read(self) -> tuple[list[LedgerRow], list[Decision | Note], Position]:
        """The next batch. Requests get their turn in between: a whole batch at once would be a millisecond of delay."""
        rows: list[LedgerRow] = []
        reasons: list[Decision | Note] = []
        position = self._position
        looked_at = 0
        while len(rows) + len(reasons) < self._batch_records:
            frame = next(self._frames, None)
            looked_at += 1
            if looked_at % _AT_ONCE == 0:
                await asyncio.sleep(0)
            if frame is None:
                following = self._refill(position)
                if following is None:
                    break
                position = following
                continue
            position = Position(position.segment, frame.end)
            if frame.payload is None or not concerns_database(frame.payload):
                continue  # damage was logged when the journal was opened
            record = decode(frame.payload)
            if isinstance(record, Close):
                rows.append(record.row)
            elif isinstance(record, Decided):
                reasons.append(record.decision)
            elif isinstance(record, Noted):
                reasons.append(record.note)
        return rows, reasons, position

    def _refill(self, position: Position) -> Position | None:
        """Load more frames, from this segment or the next; None when all has been read."""
        if position < self.journal.end:
            later = [segment for segment in self.journal.segments() if segment > position.segment]
            for place in (position, *(Position(segment, frames.HEADER_BYTES) for segment in later[:1])):
                buffer, salt = self.journal.load(place)
                base = max(place.offset, frames.HEADER_BYTES)
                first = next(frames.unpack(buffer, salt, base), None)
                if first is not None or place.segment != position.segment:
                    self._frames = frames.unpack(buffer, salt, base)
                    return Position(place.segment, base)
        return None

    async def _store(self, rows: list[LedgerRow], reasons: list[Decision | Note]) -> None:
        if not rows and not reasons:
            return
        try:
            await self._database.insert_rows(rows, reasons)
        except (DBAPIError, OverflowError) as error:  # the latter is SQLite's driver: a number of more than 64 bits
            if is_outage(error):
                raise
            if len(rows) + len(reasons) == 1:
                self._reject(rows[0] if rows else reasons[0], error)
                return
            # Something in the batch is unacceptable: halve until it stands alone.
            half_rows, half_reasons = (len(rows) + 1) // 2, len(reasons) // 2
            await self._store(rows[:half_rows], reasons[:half_reasons])
            await self._store(rows[half_rows:], reasons[half_reasons:])

    def _reject(self, item: LedgerRow | Decision | Note, error: DBAPIError | OverflowError) -> None:
        path = self.journal.directory / "rejected.jsonl"
        with path.open("ab") as file:
            file.write(msgspec.json.encode({"error": _reason(error), "record": item}) + b"\n")
        self.rejected += 1
        logger.error("the database refused the record of request %s, kept in %s", item.request_id, path)

    async def _clean(self, position: Position) -> None:
        """Save the checkpoint and delete segments that nothing needs any more."""
        try:
            self.journal.save_checkpoint(position)
            if self.journal.segments()[0] < position.segment:
                self.journal.carry(position.segment)
                await asyncio.to_thread(self.journal.sync)
                self.journal.drop(position.segment)
        except JournalError as error:
            # Rows are stored; only disk space is not given back yet. The next batch tries again.
            logger.warning("cannot tidy the journal: %s", error)


def _reason(error: BaseException) -> str:
    """The driver's message without the statement and its parameters."""
    return str(error.orig) if isinstance(error, DBAPIError) else str(error)
