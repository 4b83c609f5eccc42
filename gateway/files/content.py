"""The bytes of files: in a folder beside a SQLite database, in the database itself where that is PostgreSQL.

All processes of a gateway on SQLite run on the machine that has it, so a folder there is every one's. Replicas on
several machines have nothing in common but PostgreSQL. Either way a file is written once, piece by piece, and then only
read; nobody but its writer touches it before its row says that it is complete.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sqlite3
import time
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Final, Protocol

from sqlalchemy import delete, insert, select
from sqlalchemy.exc import DBAPIError

from gateway.ledger.database import Database
from gateway.ledger.schema import file_chunks, files

CHUNK_BYTES: Final = 256 * 1024
# What nobody has written to for so long is what a process left that died.
ABANDONED_S: Final = 3600.0
_FULL_STATES: Final = ("53100", "53400")  # PostgreSQL: disk full, configured limit exceeded


class StorageFull(Exception):
    """There is no space for it."""


def is_full(error: BaseException) -> bool:
    """Whether an error of the system or of a database says that there is no space left."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    driver = error.orig if isinstance(error, DBAPIError) else None
    return (
        getattr(driver, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
        or getattr(driver, "sqlstate", None) in _FULL_STATES
    )


class Sink(Protocol):
    """A file that is being written. End it with `close`, or with `discard`."""

    async def write(self, data: bytes) -> None:
        """Add to it. Raises StorageFull, OSError, SQLAlchemyError."""
        ...

    async def close(self) -> None:
        """It is whole, and on disk. Raises as `write`."""
        ...

    async def discard(self) -> None:
        """Nothing is left of it."""
        ...


class Content(Protocol):
    """Where the bytes of files are."""

    async def create(self, file_id: str) -> Sink:
        """A new file. Raises StorageFull, OSError."""
        ...

    def read(self, file_id: str) -> AsyncIterator[bytes]:
        """A file in pieces. Raises FileNotFoundError: its bytes are not there."""
        ...

    async def remove(self, ids: Collection[str]) -> None:
        """Delete the bytes of files; those that are not there are no fault."""
        ...

    async def sweep(self) -> int:
        """Delete what belongs to no file. Returns how many there were."""
        ...


def content_of(database: Database) -> Content:
    """Where files belong that this database knows."""
    if database.dialect == "sqlite":
        assert database.engine.url.database is not None
        return Folder(database, Path(database.engine.url.database).parent / "files")
    return Chunks(database)


class Folder:
    """Files in a folder, readable by their owner only."""

    def __init__(self, database: Database, path: Path) -> None:
        self._database = database
        self._path = path

    async def create(self, file_id: str) -> Sink:
        return await asyncio.to_thread(_Written, self._path, file_id)

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        file = await asyncio.to_thread((self._path / file_id).open, "rb")
        try:
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                yield data
        finally:
            file.close()

    async def remove(self, ids: Collection[str]) -> None:
        def unlink() -> None:
            for id in ids:
                (self._path / id).unlink(missing_ok=True)

        await asyncio.to_thread(unlink)

    async def sweep(self) -> int:
        old = await asyncio.to_thread(self._old)
        if not old:
            return 0
        async with self._database.read() as connection:
            known = set((await connection.execute(select(files.c.id))).scalars())
        lost = [name for name in old if name not in known]
        await self.remove(lost)
        return len(lost)

    def _old(self) -> list[str]:
        """Names of what has not been written to for a while."""
        if not self._path.is_dir():
            return []
        before = time.time() - ABANDONED_S
        return [entry.name for entry in os.scandir(self._path) if entry.stat().st_mtime < before]


class _Written:
    """A file of a folder."""

    def __init__(self, folder: Path, file_id: str) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path = folder / file_id
        self._file: int = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    async def write(self, data: bytes) -> None:
        await asyncio.to_thread(self._write, data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._file, view) :]
        except OSError as error:
            if is_full(error):
                raise StorageFull(str(error)) from None
            raise

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)
        self._file = -1
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)  # its name, too
        finally:
            os.close(folder)

    async def discard(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._path.unlink(missing_ok=True)


class Chunks:
    """Files in a table, a row per chunk."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def create(self, file_id: str) -> Sink:
        return _Chunked(self._database, file_id)

    async def read(self, file_id: str) -> AsyncIterator[bytes]:
        number = 0
        while True:
            wanted = (file_chunks.c.file_id == file_id) & (file_chunks.c.number == number)
            async with self._database.read() as connection:
                data = await connection.scalar(select(file_chunks.c.data).where(wanted))
            if data is None:
                return
            yield data
            number += 1

    async def remove(self, ids: Collection[str]) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(file_chunks).where(file_chunks.c.file_id.in_(ids)))

    async def sweep(self) -> int:
        """A chunk is written after its file's row, and goes before it: so none is left alone."""
        return 0


class _Chunked:
    def __init__(self, database: Database, file_id: str) -> None:
        self._database = database
        self._file_id = file_id
        self._number = 0
        self._held = bytearray()

    async def write(self, data: bytes) -> None:
        self._held += data
        while len(self._held) >= CHUNK_BYTES:
            await self._put(bytes(self._held[:CHUNK_BYTES]))
            del self._held[:CHUNK_BYTES]

    async def close(self) -> None:
        if self._held:
            await self._put(bytes(self._held))
            self._held.clear()

    async def discard(self) -> None:
        async with self._database.write() as connection:
            await connection.execute(delete(file_chunks).where(file_chunks.c.file_id == self._file_id))

    async def _put(self, data: bytes) -> None:
        values = {"file_id": self._file_id, "number": self._number, "data": data}
        try:
            async with self._database.write() as connection:
                await connection.execute(insert(file_chunks).values(**values))
        except DBAPIError as error:
            if is_full(error):
                raise StorageFull("the database's disk is full") from None
            raise
        self._number += 1
