"""The journal: what a request did is on record before anyone acts on it, without waiting for a database.

`append` copies a whole record into memory that is mapped to a file, so that a `kill -9` right after it loses nothing
(the kernel has the bytes); a thread calls fsync at most a second later, which bounds what a power cut can lose. An
attempt's end always finds room: it is set aside, in preallocated disk space, before the attempt starts. When that is
impossible `append` raises `JournalFull` for new attempts, and the gateway refuses requests rather than lose rows.

    Open ──► Progress* ──► Close        Decided, Noted   one Journal per directory and process, one thread appends
    └─ set aside: room for its Close

Opening a journal finds attempts that were open when the last process died and closes them as `interrupted`.
Segments go when the writer has stored everything in them; attempts still open are carried to the newest one.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import threading
from pathlib import Path
from typing import Final, Self

import msgspec

from gateway.ledger import checkpoint, frames
from gateway.ledger.checkpoint import JournalBusy, JournalError, JournalFailed, JournalFull, Position
from gateway.ledger.damaged import keep_aside
from gateway.ledger.records import Close, Open, Progress, Record, decode, encode
from gateway.ledger.rows import LedgerRow
from gateway.ledger.segment import Segment

__all__ = ["Journal", "JournalBusy", "JournalError", "JournalFailed", "JournalFull", "Position"]

logger = logging.getLogger("tierline.ledger")

SEGMENT_BYTES: Final = 16 * 1024 * 1024
FSYNC_INTERVAL_S: Final = 1.0
# A Close is its Open plus what became known: counts, a finish reason and a bounded error message.
_GROWTH_BYTES: Final = 5 * 1024
_MOST_WAITING = 1000  # reasons for decisions, while the disk takes nothing
_READ_WRITE: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SEGMENT_NAME: Final = re.compile(r"^(\d{12})\.journal$")


class _OpenAttempt(msgspec.Struct):
    segment: int
    payload: bytes
    reserved_bytes: int
    progress: bytes | None = None


class Journal:
    """An open journal. Make it with `open`; append from one thread only."""

    def __init__(self, directory: Path, segment_bytes: int) -> None:
        self.directory = directory
        self.error: str | None = None
        self.interrupted: list[LedgerRow] = []
        self.closes = 0  # Close records that lie beyond the checkpoint when opened, and those appended since
        self.progress_skipped = 0
        self.checkpoint = Position(0, 0)
        self._segment_bytes = segment_bytes
        self._open: dict[str, _OpenAttempt] = {}
        self._reserved = 0
        self._waiting: list[bytes] = []  # payloads that go with the next write; their room is set aside
        self._file: Segment | None = None
        self._segment = 0
        self._salt = 0
        self._offset = 0
        self._capacity = 0
        self._dirty = self._new_segment = self._sync_failed = False
        self._retired: list[tuple[int, int]] = []  # descriptors of finished segments, with their lengths
        self._fd_lock = threading.Lock()
        self._stop = threading.Event()
        self._syncer: threading.Thread | None = None
        self._lock_fd = self._directory_fd = self._checkpoint_fd = -1

    @classmethod
    def open(
        cls, directory: Path, *, segment_bytes: int = SEGMENT_BYTES, fsync_interval_s: float = FSYNC_INTERVAL_S
    ) -> Self:
        """Take the directory, recover what the last process left, start a new segment.

        Raises:
            JournalBusy: another process has it. JournalFull, JournalFailed: no segment can be made.
        """
        journal = cls(directory, segment_bytes)
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            journal._directory_fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
            journal._lock_fd = os.open(directory / "lock", _READ_WRITE, 0o600)
            journal._checkpoint_fd = os.open(directory / "checkpoint", _READ_WRITE, 0o600)
        except OSError as error:
            journal._release()
            raise JournalFailed(f"cannot use the journal in {directory}: {error}") from error
        try:
            try:
                fcntl.flock(journal._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise JournalBusy(f"the journal in {directory} belongs to another running process") from None
            journal._recover()
        except BaseException:
            journal._release()
            raise
        journal._syncer = threading.Thread(
            target=journal._sync_loop, args=(fsync_interval_s,), name="journal-fsync", daemon=True
        )
        journal._syncer.start()
        return journal

    def append(self, record: Record) -> None:
        """Write one record; it survives the death of this process when this returns.

        But for a `Decided` or a `Noted`: what explains a request waits for the next record, so that both are one
        write, or for `flush`.

        Raises:
            JournalFull: no room (a Close whose Open was accepted always has room). JournalFailed: the disk failed.
        """
        payload = encode(record)
        size = frames.FRAME_OVERHEAD_BYTES + len(payload)
        if isinstance(record, Open):
            if self._sync_failed:
                raise JournalFailed(self.error or "the journal's disk failed to sync")
            reserve = size + _GROWTH_BYTES
            self._make_room(size + reserve)
            self._write(payload)
            self._open[record.row.attempt_id] = _OpenAttempt(self._segment, payload, reserve)
            self._reserved += reserve
            self.error = None
        elif isinstance(record, Close):
            attempt = self._open.get(record.row.attempt_id)
            own = attempt.reserved_bytes if attempt else 0
            if size > self._capacity - self._offset - self._reserved + own:
                self._make_room(size)
            self._write(payload)
            self.closes += 1
            if attempt:
                del self._open[record.row.attempt_id]
                self._reserved -= own
        elif isinstance(record, Progress):
            attempt = self._open.get(record.attempt_id)
            if attempt is None:
                raise ValueError(f"progress of attempt {record.attempt_id}, which is not open")
            attempt.progress = payload
            try:
                self._make_room(size)
            except JournalFull:
                # Only the estimate of a row that may never be needed gets coarser; the stream goes on.
                self.progress_skipped += 1
                return
            self._write(payload)
        else:
            if self.error is not None and len(self._waiting) > _MOST_WAITING:
                raise JournalFailed(self.error)
            self._make_room(size)
            self._waiting.append(payload)
            self._reserved += size

    def flush(self) -> None:
        """Write what waits for the next record."""
        if self._waiting:
            self._write(b"")

    def sync(self) -> None:
        """Wait until everything appended so far is on disk. Until that works again no new attempt is accepted.

        Raises:
            JournalFailed: the disk said no.
        """
        with self._fd_lock:
            retired, self._retired = self._retired, []
            descriptor = os.dup(self._file.descriptor) if self._file is not None and self._dirty else -1
            self._dirty = False
            new_segment, self._new_segment = self._new_segment, False
        try:
            for old, length in retired:
                os.ftruncate(old, length)  # gives back what was preallocated and not needed
                os.fdatasync(old)
            if descriptor != -1:
                os.fdatasync(descriptor)
            if new_segment:
                # A file is safe only when its directory's entry is.
                os.fsync(self._directory_fd)
        except OSError as error:
            self._sync_failed = self._dirty = True
            self.error = f"the journal's disk failed to sync: {error}"
            raise JournalFailed(self.error) from error
        finally:
            for used in (*(old for old, _ in retired), descriptor):
                if used != -1:
                    os.close(used)
        if self._sync_failed:
            self._sync_failed, self.error = False, None

    def close(self) -> None:
        """Sync and let go of the directory. Attempts that are still open will be `interrupted` when it opens again."""
        self._stop.set()
        if self._syncer:
            self._syncer.join()
        try:
            self.flush()
            if self._file is not None:
                os.ftruncate(self._file.descriptor, self._offset)
            self.sync()
        finally:
            self._release()

    @property
    def open_attempts(self) -> int:
        return len(self._open)

    @property
    def end(self) -> Position:
        """Where the next record will go."""
        return Position(self._segment, self._offset)

    def segments(self) -> list[int]:
        """Numbers of the segments on disk, oldest first."""
        found = (_SEGMENT_NAME.match(name) for name in os.listdir(self.directory))
        return sorted(int(match.group(1)) for match in found if match)

    def load(self, position: Position) -> tuple[bytes, int]:
        """The bytes of a segment from a position to its end as of now, and the segment's salt.

        A segment whose creation was cut short is empty.
        """
        descriptor = os.open(self._path(position.segment), os.O_RDONLY | os.O_CLOEXEC)
        try:
            salt = frames.read_salt(os.pread(descriptor, frames.HEADER_BYTES, 0))
            end = self._offset if position.segment == self._segment else os.fstat(descriptor).st_size
            start = max(position.offset, frames.HEADER_BYTES)
            buffer = b"" if salt is None else os.pread(descriptor, max(0, end - start), start)
        finally:
            os.close(descriptor)
        return buffer, salt or 0

    def carry(self, before: int) -> None:
        """Repeat, in the newest segment, attempts that are still open in segments older than `before`.

        Raises:
            JournalFull, JournalFailed: not possible now; the old segments must stay.
        """
        for attempt in [attempt for attempt in self._open.values() if attempt.segment < before]:
            records = [attempt.payload] + ([attempt.progress] if attempt.progress else [])
            self._make_room(sum(frames.FRAME_OVERHEAD_BYTES + len(payload) for payload in records))
            for payload in records:
                self._write(payload)
            attempt.segment = self._segment

    def drop(self, before: int) -> None:
        """Delete segments older than `before`. Call after `carry` and `sync`."""
        for segment in self.segments():
            if segment < min(before, self._segment):
                self._path(segment).unlink()

    def save_checkpoint(self, position: Position) -> None:
        """Remember that everything before `position` is stored elsewhere. Losing this only repeats work.

        Raises:
            JournalFailed: it could not be saved.
        """
        checkpoint.save(self._checkpoint_fd, position)
        self.checkpoint = position

    def _release(self) -> None:
        finished = [descriptor for descriptor, _ in self._retired]
        if self._file is not None:
            finished.append(self._file.retire())
        for descriptor in (*finished, self._directory_fd, self._checkpoint_fd, self._lock_fd):
            if descriptor != -1:
                os.close(descriptor)

    def _path(self, segment: int) -> Path:
        return self.directory / f"{segment:012d}.journal"

    def _make_room(self, size: int) -> None:
        """Make sure that `size` bytes fit beside all room set aside, in a new segment if need be."""
        if self._capacity - self._offset - self._reserved < size:
            self._rotate(size)

    def _rotate(self, size: int) -> None:
        number = self._segment + 1
        path = self._path(number)
        # What is set aside for thousands of open attempts may fill a segment: half as much again is room for records,
        # or each of them would need a segment of its own.
        needed = frames.HEADER_BYTES + self._reserved + size
        capacity = max(self._segment_bytes, needed + needed // 2)
        salt = frames.new_salt()
        try:
            made = Segment(path, capacity, frames.segment_header(salt))
        except OSError as error:
            if error.errno in _FULL:
                self.error = f"no disk space for the journal in {self.directory}: free some, requests wait until then"
                raise JournalFull(self.error) from error
            self.error = f"cannot write the journal in {self.directory}: {error}"
            raise JournalFailed(self.error) from error
        if not made.mapped and self._file is None:
            logger.info("the file system of %s maps no files: records are written one by one", self.directory)
        with self._fd_lock:
            if self._file is not None:
                self._retired.append((self._file.retire(), self._offset))
            self._file = made
            self._new_segment = True
        self._segment, self._salt = number, salt
        self._offset, self._capacity = frames.HEADER_BYTES, capacity
        if not self._sync_failed:
            self.error = None

    def _write(self, payload: bytes) -> None:
        """Write what waits, and behind it this, if it is anything."""
        frame = frames.pack(payload, self._salt) if payload else b""
        waiting = 0
        if self._waiting:
            before = b"".join([frames.pack(payload, self._salt) for payload in self._waiting])
            waiting, frame = len(before), before + frame
        assert self._file is not None
        try:
            self._file.write(frame, self._offset)
        except OSError as error:
            self.error = f"cannot write the journal in {self.directory}: {error}"
            raise JournalFailed(self.error) from error
        if waiting:
            self._waiting.clear()
            self._reserved -= waiting
        self._offset += len(frame)
        self._dirty = True

    def _recover(self) -> None:
        existing = self.segments()
        self._segment = existing[-1] if existing else 0
        self.checkpoint = checkpoint.load(self._checkpoint_fd, existing)
        left_open: dict[str, LedgerRow] = {}
        for segment in existing:
            # `load` takes the newest segment's end from `_offset`, which describes a segment of this process.
            self._offset = self._path(segment).stat().st_size
            buffer, salt = self.load(Position(segment, 0))
            for frame in frames.unpack(buffer, salt, frames.HEADER_BYTES):
                if frame.payload is None:
                    where = f"{keep_aside(self._path(segment))}, bytes {frame.start} to {frame.end}"
                    logger.warning("the journal is damaged (a write was cut short, or the disk lies): %s", where)
                    continue
                try:
                    record = decode(frame.payload)
                except msgspec.DecodeError as error:
                    where = f"{self._path(segment)}, byte {frame.start}"
                    raise JournalFailed(
                        f"a newer version wrote the journal ({where}): {error}; start that one"
                    ) from error
                if isinstance(record, Open):
                    left_open[record.row.attempt_id] = record.row
                elif isinstance(record, Progress) and record.attempt_id in left_open:
                    row = left_open[record.attempt_id]
                    row.output_tokens, row.cost_nanousd = record.output_tokens, record.cost_nanousd
                elif isinstance(record, Close):
                    left_open.pop(record.row.attempt_id, None)
                    self.closes += (segment, frame.start) >= self.checkpoint
        self._offset = 0
        rows = list(left_open.values())
        for row in rows:
            row.outcome, row.usage_source = "interrupted", "estimated"
            row.set_error("the gateway stopped before this attempt ended")
        closing = [encode(Close(row)) for row in rows]
        self._rotate(sum(frames.FRAME_OVERHEAD_BYTES + len(payload) for payload in closing))
        for payload in closing:
            self._write(payload)
        self.closes += len(rows)
        self.interrupted = rows
        # Saved even when unchanged: a stale one must not come to point into the segment that was just made.
        self.save_checkpoint(self.checkpoint if existing else Position(self._segment, frames.HEADER_BYTES))

    def _sync_loop(self, interval_s: float) -> None:
        while not self._stop.wait(interval_s):
            try:
                self.sync()
            except JournalFailed as error:
                logger.error("%s; new requests are refused until it works again", error)
