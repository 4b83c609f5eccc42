"""Whose file is what: rows in the database, beside the bytes of `content.py`.

A file's row is there before its first byte and says `complete` after its last, so a crash in between leaves a row that
nobody is shown and that `purge` takes away with what was written. What the database does not do in time, or cannot do,
raises `FilesUnavailable`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

import msgspec
from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.exc import DBAPIError

from gateway.files.content import ABANDONED_S, CHUNK_BYTES, StorageFull, content_of, is_full
from gateway.ledger.database import Database
from gateway.ledger.rows import new_id, now_ms
from gateway.ledger.schema import batches, files

logger = logging.getLogger("tierline.files")

DAY_MS: Final = 86_400_000
PATIENCE_S: Final = 10.0
PURGE_INTERVAL_S: Final = 600.0
FIRST_PURGE_S: Final = 60.0  # a process that starts has better things to do
Purpose = Literal["batch", "batch_output"]
PURPOSES: Final[tuple[Purpose, ...]] = ("batch", "batch_output")
# Statuses of batches that still need their files.
UNFINISHED: Final = ("validating", "in_progress", "finalizing", "cancelling")
_PURGED_AT_ONCE: Final = 100
_READERS: Final = 4
_T = TypeVar("_T")


class FilesUnavailable(Exception):
    """The database or the disk did not do it, or not in time."""


class TooMuch(Exception):
    """The files of the project would take more than they may; `most_bytes` is how much that is."""

    def __init__(self, most_bytes: int) -> None:
        super().__init__(most_bytes)
        self.most_bytes = most_bytes


class FileInUse(Exception):
    """A batch that has not ended needs the file; `batch_id` names it."""

    def __init__(self, batch_id: str) -> None:
        super().__init__(batch_id)
        self.batch_id = batch_id


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file, as its row has it."""

    id: str
    project_id: str
    purpose: str
    filename: str
    bytes: int
    created_ms: int
    expires_ms: int
    complete: bool = True

    def shown(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created_ms // 1000,
            "expires_at": self.expires_ms // 1000,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


class FileStore:
    """The files of all projects. `start` it, `stop` it; it belongs to one event loop."""

    def __init__(self, database: Database, *, keep_days: int, max_project_bytes: int) -> None:
        self.content = content_of(database)
        self._database = database
        self._keep_ms = keep_days * DAY_MS
        self._max_project_bytes = max_project_bytes
        self._readers = asyncio.Semaphore(_READERS)
        self._purger: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._purger = asyncio.create_task(self._purge_often(), name="files-purge")

    async def stop(self) -> None:
        if self._purger is not None:
            self._purger.cancel()
            with suppress(asyncio.CancelledError):
                await self._purger

    async def write(self, project_id: str, purpose: Purpose, *, bounded: bool) -> Writing:
        """Begin a file. `bounded`: it must fit what the project may have.

        Raises:
            FilesUnavailable, StorageFull.
        """
        row = File(
            id=f"file-{new_id().replace('-', '')}",
            project_id=project_id,
            purpose=purpose,
            filename="",
            bytes=0,
            created_ms=(now := now_ms()),
            expires_ms=now + self._keep_ms,
            complete=False,
        )

        async def begin() -> int:
            async with self._database.write() as connection:
                taken = int(await connection.scalar(_taken(project_id)) or 0)
                await connection.execute(insert(files).values(**msgspec.structs.asdict(row)))
            return taken

        taken = await self.in_time(begin)
        return Writing(self, row, self._max_project_bytes - taken if bounded else None)

    async def complete(self, file: File, *, bounded: bool) -> None:
        """Let a written file be seen. Raises TooMuch, FilesUnavailable."""

        async def end() -> None:
            async with self._database.write() as connection:
                taken = int(await connection.scalar(_taken(file.project_id)) or 0)
                if bounded and taken + file.bytes > self._max_project_bytes:
                    raise TooMuch(self._max_project_bytes)
                values = msgspec.structs.asdict(file)
                await connection.execute(update(files).where(files.c.id == file.id).values(**values))

        await self.in_time(end)

    async def get(self, project_id: str, id: str) -> File | None:
        """The file, if it is there and the project's. Raises FilesUnavailable."""
        found = await self._find((files.c.id == id) & (files.c.project_id == project_id), files.c.id, 1)
        return found[0] if found else None

    async def page(
        self, project_id: str, *, purposes: Collection[str], after: str | None, limit: int, newest_first: bool
    ) -> list[File]:
        """Up to `limit` files behind `after`. Raises FilesUnavailable."""
        mine = (files.c.project_id == project_id) & files.c.purpose.in_(purposes)
        if after is not None:
            mine &= files.c.id < after if newest_first else files.c.id > after
        return await self._find(mine, files.c.id.desc() if newest_first else files.c.id, limit)

    async def remove(self, project_id: str, id: str) -> bool:
        """Delete a file; False if it is not there or another's.

        Raises:
            FileInUse: a batch needs it.
            FilesUnavailable: see there.
        """
        own = (files.c.id == id) & (files.c.project_id == project_id) & files.c.complete

        async def hide() -> bool:
            async with self._database.write() as connection:
                used = select(batches.c.id).where(batches.c.input_file_id == id, batches.c.status.in_(UNFINISHED))
                batch = await connection.scalar(used.limit(1).where(batches.c.project_id == project_id))
                if batch is not None:
                    raise FileInUse(batch)
                # From now on nobody sees it; if its bytes cannot be deleted now, `purge` does that.
                gone = {"complete": False, "expires_ms": now_ms()}
                return (await connection.execute(update(files).where(own).values(**gone))).rowcount > 0

        if not await self.in_time(hide):
            return False
        with suppress(FilesUnavailable, StorageFull):
            await self.forget([id])
        return True

    async def forget(self, ids: Sequence[str]) -> None:
        """Delete bytes, then rows. Raises FilesUnavailable."""

        async def work() -> None:
            await self.content.remove(ids)
            async with self._database.write() as connection:
                await connection.execute(delete(files).where(files.c.id.in_(ids)))

        await self.in_time(work)

    async def purge(self) -> int:
        """Delete files whose time is over, and what uploads left that broke off. Returns how many are gone."""
        now, gone = now_ms(), 0
        needed = select(batches.c.input_file_id).where(batches.c.status.in_(UNFINISHED))
        abandoned = ~files.c.complete & (files.c.created_ms < now - int(2 * ABANDONED_S * 1000))
        over = (files.c.expires_ms <= now) & files.c.id.not_in(needed)
        while True:
            async with self._database.read() as connection:
                found = await connection.execute(select(files.c.id).where(over | abandoned).limit(_PURGED_AT_ONCE))
                ids = list(found.scalars())
            if not ids:
                return gone + await self.content.sweep()
            await self.forget(ids)
            gone += len(ids)

    async def in_time(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Raises FilesUnavailable where the database does not do it in time, StorageFull where it has no space."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work()
        except TimeoutError:
            raise FilesUnavailable("the database does not answer") from None
        except (DBAPIError, OSError) as error:
            if is_full(error):
                raise StorageFull(reason(error)) from None
            raise FilesUnavailable(reason(error)) from error

    async def _find(self, wanted: ColumnElement[bool], order: Any, limit: int) -> list[File]:
        query = select(files).where(wanted, files.c.complete, files.c.expires_ms > now_ms())

        async def find() -> list[File]:
            async with self._readers, self._database.read() as connection:
                rows = (await connection.execute(query.order_by(order).limit(limit))).all()
            return [File(**row._asdict()) for row in rows]

        return await self.in_time(find)

    async def _purge_often(self) -> None:
        pause_s = FIRST_PURGE_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = PURGE_INTERVAL_S
            try:
                if gone := await self.purge():
                    logger.info("%d files are gone: their time was over, or they were never whole", gone)
            except Exception as error:  # likewise: without it they would stay for ever
                expected = isinstance(error, DBAPIError | OSError | FilesUnavailable | StorageFull)
                text = "files whose time is over could not be deleted: %s"
                logger.warning(text, reason(error), exc_info=None if expected else error)


class Writing:
    """A file that is being written: `add` to it, then `finish`; or `abandon` it."""

    def __init__(self, store: FileStore, row: File, left_bytes: int | None) -> None:
        self._store = store
        self._row = row
        self._left_bytes = left_bytes
        self._sink: Any = None
        self._held = bytearray()
        self.size = 0

    async def add(self, data: bytes) -> None:
        """Raises TooMuch, StorageFull, FilesUnavailable."""
        if self._left_bytes is not None and self.size + len(data) > self._left_bytes:
            raise TooMuch(self._store._max_project_bytes)
        self.size += len(data)
        self._held += data
        if len(self._held) >= CHUNK_BYTES:
            await self._store.in_time(self._flush)

    async def _flush(self) -> None:
        if self._sink is None:
            self._sink = await self._store.content.create(self._row.id)
        data = bytes(self._held)
        self._held.clear()
        await self._sink.write(data)

    async def close(self) -> File:
        """All is written and on disk; its row does not say so yet. Raises StorageFull, FilesUnavailable."""
        await self._store.in_time(self._close)
        return msgspec.structs.replace(self._row, bytes=self.size, complete=True)

    async def _close(self) -> None:
        await self._flush()
        await self._sink.close()

    async def finish(self, filename: str, keep_s: int | None) -> File:
        """Let it be seen under this name, for `keep_s` or as long as is usual.

        Raises:
            TooMuch, StorageFull, FilesUnavailable: it is not there; `abandon` it.
        """
        file = named(await self.close(), filename, keep_s)
        await self._store.complete(file, bounded=self._left_bytes is not None)
        return file

    async def abandon(self) -> None:
        """Nothing is left of it; what cannot be deleted now, is later."""
        with suppress(FilesUnavailable, StorageFull, OSError, DBAPIError):
            if self._sink is not None:
                await self._sink.discard()
            await self._store.forget([self._row.id])


def named(file: File, filename: str, keep_s: int | None) -> File:
    """The file with its name, and its own time if it has one."""
    expires_ms = file.expires_ms if keep_s is None else file.created_ms + keep_s * 1000
    return msgspec.structs.replace(file, filename=filename, expires_ms=expires_ms)


async def lines_of(pieces: AsyncIterator[bytes], most_bytes: int) -> AsyncIterator[bytes | None]:
    """The lines of a file, without their ends. None stands for one of more than `most_bytes`."""
    held, skipping = bytearray(), False
    async for piece in pieces:
        *whole, rest = piece.split(b"\n")
        for part in whole:
            line = bytes(held) + part if held else part
            held.clear()
            yield None if skipping or len(line) > most_bytes else line
            skipping = False
        held += rest
        if len(held) > most_bytes:
            held.clear()
            skipping = True
    if held or skipping:
        yield None if skipping else bytes(held)


def _taken(project_id: str) -> Any:
    mine = (files.c.project_id == project_id) & files.c.complete
    return select(func.coalesce(func.sum(files.c.bytes), 0)).where(mine)


def reason(error: BaseException) -> str:
    """The driver's message without the statement and its parameters, which hold what customers wrote."""
    return str(error.orig) if isinstance(error, DBAPIError) else str(error) or type(error).__name__


__all__ = ["File", "FileInUse", "FileStore", "FilesUnavailable", "StorageFull", "TooMuch", "lines_of"]
