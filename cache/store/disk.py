"""Answers with their questions on disk, so that a restarted cache process is warm: one SQLite file, its owner's only.

Losing it loses only speed: writes are not synced to the platter (a killed process loses nothing, a power cut may), and
a damaged file is moved aside. Entries of another embedder or another form of key, and expired ones, are dropped when
it is opened.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.entry import Entry
from cache.key import VERSION

_log = logging.getLogger(__name__)
_SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    exact TEXT PRIMARY KEY,
    scope TEXT NOT NULL,
    partition TEXT NOT NULL,
    context TEXT NOT NULL,
    question TEXT NOT NULL,
    author TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    expires_at REAL NOT NULL,
    entry BLOB NOT NULL,
    vector BLOB
)
"""
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)


class Row(msgspec.Struct, frozen=True):
    """A question with where it belongs and its answer; `vector` is None for those of the exact cache only."""

    exact: str
    scope: str
    partition: str
    context: str
    question: str
    author: str
    entry: Entry
    vector: NDArray[np.float32] | None


class Disk:
    """The file. Opened and read by one thread, then written by one; every write is its own transaction."""

    def __init__(self, folder: Path, fingerprint: str) -> None:
        """Open or create `folder/answers.db`.

        Raises:
            OSError: the folder cannot be made or written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "answers.db"
        self._fingerprint = f"{VERSION} {fingerprint}"
        try:
            self._database = self._open()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise OSError(f"{self._path} is in use by another program: {error}") from error
            aside = self._path.with_name(f"answers.damaged-{time.time_ns()}.db")
            _log.warning("the cache file %s is damaged (%s): moved to %s, starting empty", self._path, error, aside)
            self._path.rename(aside)
            self._database = self._open()

    def _open(self) -> sqlite3.Connection:
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        os.close(descriptor)
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = OFF")
            found = database.execute("PRAGMA user_version").fetchone()[0]
            if found not in (0, _SCHEMA_VERSION):
                database.execute("DROP TABLE IF EXISTS entries")
            database.execute(_SCHEMA)
            database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
            database.execute(
                "DELETE FROM entries WHERE fingerprint <> ? OR expires_at <= ?", (self._fingerprint, time.time())
            )
        except sqlite3.DatabaseError:
            database.close()
            raise
        return database

    def rows(self) -> Iterator[Row]:
        """Every question kept, an answer's own before its aliases; what cannot be read is skipped with a warning."""
        query = "SELECT exact, scope, partition, context, question, author, entry, vector FROM entries ORDER BY rowid"
        for exact, scope, partition, context, question, author, entry, vector in self._database.execute(query):
            try:
                decoded = _decoder.decode(entry)
            except msgspec.DecodeError as error:
                _log.warning("a cache entry on disk cannot be read and is skipped: %s", error)
                continue
            yield Row(exact, scope, partition, context, question, author, decoded, _vector(vector))

    def put(self, row: Row, entry: Entry) -> None:
        """Write a question over any earlier one of the same exact key."""
        self._database.execute(
            "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
            " ON CONFLICT (exact) DO UPDATE SET vector = excluded.vector, entry = excluded.entry",
            (
                row.exact,
                row.scope,
                row.partition,
                row.context,
                row.question,
                row.author,
                self._fingerprint,
                entry.expires_at,
                _encoder.encode(entry),
                None if row.vector is None else row.vector.astype(np.float32).tobytes(),
            ),
        )

    def delete(self, exact_keys: Iterable[str]) -> None:
        """Forget entries by exact key, in one transaction."""
        self._database.execute("BEGIN")
        self._database.executemany("DELETE FROM entries WHERE exact = ?", ((key,) for key in exact_keys))
        self._database.execute("COMMIT")

    def close(self) -> None:
        self._database.close()


def _vector(data: bytes | None) -> NDArray[np.float32] | None:
    return None if data is None else np.frombuffer(data, dtype=np.float32)
