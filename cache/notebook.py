"""What the cache remembers beside its answers: how its promises stand, and which request got which answer.

One SQLite file beside that of the answers, readable by its owner only; it holds names and numbers, no text. Losing it
loses what was learned, never an answer: promises begin anew, from the verifier that is shipped. Writes are gathered and
made by `flush`, so a killed process loses what came since.
"""

from __future__ import annotations

import itertools
import logging
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import msgspec

from cache.small_file import open_small_file

_log = logging.getLogger(__name__)
_SCHEMA_VERSION = 1
_MOST_REQUESTS = 200_000
_MOST_PROMISES = 64
_MOST_UNWRITTEN = 50_000
# Rows in one go: look-ups wait for so many at most, which is two or three milliseconds.
_ROWS_AT_ONCE = 500
_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (number INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, given BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS promises (
    number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, meaning TEXT NOT NULL, dump BLOB NOT NULL
);
"""


class Given(msgspec.Struct, frozen=True, array_like=True):
    """Which answer a request of a team got, or gave to the cache.

    `entry_id` names the answer. `decision` is the ticket of the promise under which a hit was given, 0 for none;
    `rated`: somebody has said what they think of it.
    """

    team_id: str
    entry_id: str
    decision: int = 0
    rated: bool = False


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Given).decode


class Notebook:
    """The file. Runs on one thread."""

    def __init__(self, folder: Path | None, meaning: str) -> None:
        """Open or create `folder/learned.db`, or memory where there is no folder.

        Args:
            meaning: what numbers learned here depend on (embedder, verifier); those of another meaning are dropped.

        Raises:
            OSError: the folder cannot be made or written.
        """
        self._path = None if folder is None else folder / "learned.db"
        self._meaning = meaning
        self._unwritten: dict[str, Given] = {}
        self._failing = False
        self._database = open_small_file(self._path, self._set_up, "every promise begins anew")

    def _set_up(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA synchronous = OFF")
        if database.execute("PRAGMA user_version").fetchone()[0] not in (0, _SCHEMA_VERSION):
            database.executescript("DROP TABLE IF EXISTS requests; DROP TABLE IF EXISTS promises;")
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")
        if database.execute("DELETE FROM promises WHERE meaning <> ?", (self._meaning,)).rowcount:
            _log.warning("the embedder or the verifier is another one: every promise begins anew")

    def note(self, request_id: str, given: Given) -> None:
        """Remember which answer a request got, in place of what was known of it."""
        if len(self._unwritten) < _MOST_UNWRITTEN or request_id in self._unwritten:
            self._unwritten[request_id] = given

    def find(self, request_id: str) -> Given | None:
        """Which answer a request got; None when that is not on record, or no more."""
        given = self._unwritten.get(request_id)
        if given is not None:
            return given
        row = self._database.execute("SELECT given FROM requests WHERE id = ?", (request_id,)).fetchone()
        return None if row is None else _decode(row[0])

    def promises(self) -> list[bytes]:
        """Each promise as it was last kept by `flush`, the one that changed last at the end."""
        return [bytes(row[0]) for row in self._database.execute("SELECT dump FROM promises ORDER BY number")]

    @property
    def unwritten(self) -> int:
        """Requests that are not in the file yet."""
        return len(self._unwritten)

    def flush(self, promises: Mapping[str, bytes]) -> bool:
        """Write some of what came since the last time (see `unwritten`), and the promises that changed, by name.

        Never raises. Returns: False while the disk is full or broken. Which request got which answer stays in memory
        then, within bounds; the promises are the caller's to give again.
        """
        taken = dict(itertools.islice(self._unwritten.items(), _ROWS_AT_ONCE))
        rows = [(id, _encode(given)) for id, given in taken.items()]
        if not rows and not promises:
            return True
        try:
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR REPLACE INTO requests (id, given) VALUES (?, ?)", rows)
            self._database.execute(
                f"DELETE FROM requests WHERE number <= (SELECT max(number) FROM requests) - {_MOST_REQUESTS}"
            )
            self._database.executemany(
                "INSERT OR REPLACE INTO promises (name, meaning, dump) VALUES (?, ?, ?)",
                [(name, self._meaning, dump) for name, dump in promises.items()],
            )
            self._database.execute(
                f"DELETE FROM promises WHERE number NOT IN (SELECT number FROM promises ORDER BY number DESC LIMIT"
                f" {_MOST_PROMISES})"
            )
            self._database.execute("COMMIT")
        except sqlite3.Error as error:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            if not self._failing:
                _log.warning("what the cache learns cannot be written to %s: %s", self._path, error)
            self._failing = True
            return False
        if self._failing:
            _log.warning("what the cache learns is written to %s again", self._path)
        self._failing = False
        for id in taken:
            del self._unwritten[id]
        return True

    def close(self) -> None:
        self._database.close()
