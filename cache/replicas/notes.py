"""What a cache process must not forget about its replicas, though it is killed: retractions, published or not.

A small SQLite file beside the answers, or memory where these are only there too. Retractions are few, so each is
written at once.
"""

from __future__ import annotations

import bisect
import logging
import sqlite3
import uuid
from pathlib import Path

from cache.replicas.records import Record, Retraction, Unreadable, unpack_retraction
from cache.small_file import open_small_file

_log = logging.getLogger(__name__)
_SCHEMA_VERSION = 1
# As many as Redis keeps: who was away for more starts anew.
MOST_KEPT = 10_000
# More that wait for Redis are replaced by a single one, which forgets everything.
MOST_WAITING = 10_000
_SCHEMA = """
CREATE TABLE IF NOT EXISTS retractions (id TEXT PRIMARY KEY, number INTEGER, packed BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Notes:
    """`known` is the number up to which every retraction has been followed; `name` is this process's, for good; `home`
    is the data set and the run of the Redis that it last was in step with.

    Runs on one thread.
    """

    def __init__(self, folder: Path | None) -> None:
        """Open or create `folder/replicas.db`.

        Raises:
            OSError: the file cannot be made, or another program has it.
        """
        self._path = None if folder is None else folder / "replicas.db"
        self._database = open_small_file(
            self._path, self._set_up, "what was to be forgotten and not published yet is lost"
        )
        self.name = self._fact("name") or self._keep_fact("name", uuid.uuid4().hex)
        self.known = int(self._fact("known") or 0)
        self.home = self._fact("home")
        self._numbers: dict[str, int] = {}
        self._followed: list[tuple[int, Retraction]] = []  # by number
        self._waiting: dict[str, Retraction] = {}
        self._answers: dict[str, int] = {}  # forgotten one by one: number by entry id
        self._purges: list[tuple[int, Retraction]] = []  # by number
        for number, packed in self._database.execute("SELECT number, packed FROM retractions ORDER BY number, rowid"):
            try:
                retraction = unpack_retraction(packed)
            except Unreadable as error:
                _log.warning("%s: %s", self._path, error)
                continue
            if number is None:
                self._waiting[retraction.id] = retraction
            else:
                self._note(number, retraction)

    def _set_up(self, database: sqlite3.Connection) -> None:
        database.execute("PRAGMA synchronous = NORMAL")
        if database.execute("PRAGMA user_version").fetchone()[0] not in (0, _SCHEMA_VERSION):
            database.executescript("DROP TABLE IF EXISTS retractions; DROP TABLE IF EXISTS facts")
        database.executescript(_SCHEMA)
        database.execute(f"PRAGMA user_version = {_SCHEMA_VERSION}")

    @property
    def waiting(self) -> list[Retraction]:
        """Retractions of this process that Redis has not, oldest first."""
        return list(self._waiting.values())

    @property
    def followed(self) -> list[tuple[int, Retraction]]:
        """Retractions that have a number, ascending; not to be changed."""
        return self._followed

    def knows(self, retraction: Retraction) -> bool:
        """Whether it was followed here, with its number or not yet."""
        return retraction.id in self._numbers or retraction.id in self._waiting

    def number_of(self, retraction: Retraction) -> int | None:
        return self._numbers.get(retraction.id)

    def add(self, retraction: Retraction) -> None:
        """This process forgets something that the others must forget too."""
        if len(self._waiting) >= MOST_WAITING:
            _log.warning("more was forgotten than can wait for Redis: everybody is going to forget everything")
            self._waiting.clear()
            self._database.execute("DELETE FROM retractions WHERE number IS NULL")
            retraction = Retraction(id=retraction.id, kind="purge", made_at=retraction.made_at)
        self._waiting[retraction.id] = retraction
        self._write(retraction, None)

    def numbered(self, number: int, retraction: Retraction) -> None:
        """A retraction has been followed here and has its number."""
        self._waiting.pop(retraction.id, None)
        if retraction.id in self._numbers:
            return
        self._note(number, retraction)
        self._write(retraction, number)
        while len(self._followed) > MOST_KEPT:
            self._drop_oldest()

    def reach(self, number: int) -> None:
        """Every retraction up to this one has been followed."""
        if number > self.known:
            self.known = number
            self._keep_fact("known", str(number))

    def settle(self, home: str) -> None:
        if home != self.home:
            self.home = self._keep_fact("home", home)

    def close(self) -> None:
        self._database.close()

    def dead(self, record: Record) -> bool:
        """Whether a retraction with a higher number than the answer's epoch means it."""
        if self._answers.get(record.entry.id, 0) > record.epoch:
            return True
        for number, retraction in reversed(self._purges):
            if number <= record.epoch:
                return False
            if retraction.means(record):
                return True
        return False

    def unknowable(self, record: Record) -> bool:
        """Whether it is so old that a retraction which means it may have been dropped here."""
        return len(self._followed) >= MOST_KEPT and record.epoch < self._followed[0][0] - 1

    def _note(self, number: int, retraction: Retraction) -> None:
        self._numbers[retraction.id] = number
        bisect.insort(self._followed, (number, retraction), key=_number)
        if retraction.kind == "purge":
            bisect.insort(self._purges, (number, retraction), key=_number)
        elif retraction.kind == "answer" and retraction.entry_id is not None:
            self._answers[retraction.entry_id] = max(number, self._answers.get(retraction.entry_id, 0))

    def _drop_oldest(self) -> None:
        number, old = self._followed.pop(0)
        del self._numbers[old.id]
        if old.kind == "purge":
            self._purges.pop(0)
        elif old.entry_id is not None and self._answers.get(old.entry_id) == number:
            del self._answers[old.entry_id]
        self._database.execute("DELETE FROM retractions WHERE id = ?", (old.id,))

    def _write(self, retraction: Retraction, number: int | None) -> None:
        row = (retraction.id, number, retraction.packed())
        self._database.execute("INSERT OR REPLACE INTO retractions VALUES (?, ?, ?)", row)

    def _fact(self, name: str) -> str | None:
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return None if row is None else str(row[0])

    def _keep_fact(self, name: str, value: str) -> str:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, value))
        return value


def _number(pair: tuple[int, Retraction]) -> int:
    return pair[0]
