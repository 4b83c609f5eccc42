"""The cache's file: one SQLite database, readable by its owner only; or the same in memory where there is no folder.

Losing it loses only speed. A killed process leaves it whole, and so does a power cut (WAL, synced at checkpoints); what
was written last may be missing then. A file that is damaged is moved aside. One that this program cannot use (another
schema, another form of key, other encryption) is emptied. Each is told in one line of the log.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import sqlite3
import threading
import time
from pathlib import Path

from cache.key import VERSION
from cache.store.cipher import Sealer, Unreadable
from cache.store.tables import SCHEMA, SCHEMA_VERSION

_log = logging.getLogger(__name__)
_SECRET_BYTES = 32
_SECRET_BINDING = b"secret"
_PAGE_BYTES = 8192  # so that a vector of 384 to 900 dimensions lies in its row
_WAL_BYTES = 16 * 1024 * 1024
_PAGE_CACHE_KIB = 8000
_OPEN_S = 5.0
_NAME = "answers.db"
_NUMBERS_UNWRITTEN = 1_000_000


class Disk:
    """The file and its connections. Where there is no folder all share one connection, under `lock`.

    Attributes:
        secret: random bytes of this file that key its digests, so that questions cannot be guessed from them.
        embedder: number of the present embedder in this file.
        next_id, next_place: numbers from here on were never given.
        generation: goes up when the file was replaced, and open connections are of no more use.
    """

    def __init__(self, folder: Path | None, fingerprint: str, sealer: Sealer) -> None:
        """Open or create `folder/answers.db`.

        Raises:
            OSError: the folder cannot be made or written, or another process uses the file.
        """
        self.path = None if folder is None else folder / _NAME
        self.lock = threading.RLock()
        self.generation = 0
        self.embedder = 0
        self.next_id = self.next_place = 1
        self.secret = b""
        self._fingerprint = fingerprint
        self._sealer = sealer
        self._memory: sqlite3.Connection | None = None
        self._owner: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._owner = _own(folder / "answers.lock")
        self._open()

    @property
    def in_memory(self) -> bool:
        return self.path is None

    def connect(self, *, busy_timeout_s: float = 0.0) -> sqlite3.Connection:
        """A connection for one thread; the only one where everything is in memory.

        Readers wait for nobody here. Who writes says how long to wait for another program that has the file locked.
        """
        if self._memory is not None:
            return self._memory
        # isolation_level None: transactions begin and end where the code says so.
        connection = sqlite3.connect(
            self.path or ":memory:",
            isolation_level=None,
            check_same_thread=False,
            timeout=busy_timeout_s,
            cached_statements=256,
        )
        try:
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.execute("PRAGMA secure_delete = ON")  # what is forgotten is overwritten
            connection.execute(f"PRAGMA journal_size_limit = {_WAL_BYTES}")
            connection.execute(f"PRAGMA cache_size = -{_PAGE_CACHE_KIB}")
        except sqlite3.Error:
            connection.close()
            raise
        if self.in_memory:
            self._memory = connection
        return connection

    def replace_damaged(self, error: Exception) -> None:
        """Move the file aside and begin a new one; what is open of the old one is of no more use.

        Raises:
            OSError: that cannot be done.
        """
        if self.path is None:
            raise OSError(f"the cache's memory is damaged: {error}")
        aside = self.path.with_name(f"answers.damaged-{time.time_ns()}.db")
        _log.warning("the cache file %s is damaged (%s): moved to %s, starting empty", self.path, error, aside)
        self.path.rename(aside)
        self._begin_anew()

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        if self._owner is not None:
            os.close(self._owner)  # and with it the lock
            self._owner = None

    def _open(self) -> None:
        self._make_private()
        try:
            unusable = self._read_facts()
        except sqlite3.DatabaseError as error:
            if is_damage(error):
                self.replace_damaged(error)
                return
            raise OSError(f"the cache file {self.path} cannot be used: {error}") from error
        if unusable is not None:
            _log.warning("the cache file %s %s: starting empty", self.path, unusable)
            self._begin_anew()

    def _begin_anew(self) -> None:
        if self.path is None:
            raise RuntimeError("a new database in memory fits by construction")
        for suffix in ("", "-wal", "-shm"):
            Path(f"{self.path}{suffix}").unlink(missing_ok=True)
        self._make_private()
        try:
            unusable = self._read_facts()
        except sqlite3.Error as error:
            raise OSError(f"the cache file {self.path} cannot be made: {error}") from error
        if unusable is not None:
            raise OSError(f"the cache file {self.path} {unusable}, though it is new")
        self.generation += 1

    def _make_private(self) -> None:
        """Make the file with the right mode, if there is none.

        NOTE: one that is there must not be opened here: closing a descriptor of a file drops every lock that SQLite
        holds on it in this process.
        """
        if self.path is not None:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))

    def _read_facts(self) -> str | None:
        """Make the tables where there are none and read what this object tells; or why the file cannot be used."""
        connection = self.connect(busy_timeout_s=_OPEN_S)
        try:
            version = connection.execute("PRAGMA user_version").fetchone()[0]
            if version == 0 and not connection.execute("SELECT 1 FROM sqlite_schema LIMIT 1").fetchone():
                self._create(connection)
            elif version != SCHEMA_VERSION:
                return f"has schema {version}, and this program writes {SCHEMA_VERSION}"
            row = connection.execute("SELECT key_version, secret, embedder, next_id, next_place FROM facts").fetchone()
            if row is None or row[0] != VERSION:
                return "holds answers under another form of key"
            _, sealed, last_embedder, next_id, next_place = row
            try:
                self.secret = self._sealer.unseal(sealed, _SECRET_BINDING)
            except Unreadable:
                return (
                    "was not encrypted with any of the keys that are configured"
                    if self._sealer.encrypts
                    else "is encrypted or damaged, and no key is configured"
                )
            # A process that was killed may have given more numbers than it wrote down.
            self.next_id = max(self.next_id, next_id + _NUMBERS_UNWRITTEN)
            self.next_place = max(self.next_place, next_place + _NUMBERS_UNWRITTEN)
            self._seal_secret_with_first_key(connection)
            self._set_embedder(connection, last_embedder)
            return None
        finally:
            if not self.in_memory:
                connection.close()

    def _create(self, connection: sqlite3.Connection) -> None:
        secret = self._sealer.seal(os.urandom(_SECRET_BYTES), _SECRET_BINDING)
        connection.execute(f"PRAGMA page_size = {_PAGE_BYTES}")
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute("PRAGMA journal_mode = WAL")
        connection.executescript(f"BEGIN; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT")
        connection.execute("INSERT INTO facts VALUES (1, ?, ?, 0, 0, 0, 0, 0, 1, 1, 0)", (VERSION, secret))

    def _seal_secret_with_first_key(self, connection: sqlite3.Connection) -> None:
        sealed = self._sealer.seal(self.secret, _SECRET_BINDING)
        connection.execute("UPDATE facts SET secret = ?", (sealed,))

    def _set_embedder(self, connection: sqlite3.Connection, last: int) -> None:
        connection.execute("INSERT OR IGNORE INTO embedders (fingerprint) VALUES (?)", (self._fingerprint,))
        self.embedder = connection.execute(
            "SELECT id FROM embedders WHERE fingerprint = ?", (self._fingerprint,)
        ).fetchone()[0]
        if self.embedder == last:
            return
        counts = dict(connection.execute("SELECT embedder, count(*) FROM vectors GROUP BY embedder").fetchall())
        current = counts.pop(self.embedder, 0)
        waiting = sum(counts.values())
        connection.execute("UPDATE facts SET embedder = ?, vectors = ?, waiting = ?", (self.embedder, current, waiting))
        if waiting:
            _log.info(
                "%d cached questions have vectors of another embedder: they get new ones beside the traffic", waiting
            )

    def digest(self, *parts: str) -> bytes:
        """Sixteen bytes that name the parts in this file."""
        state = hashlib.blake2b(key=self.secret, digest_size=16)
        for part in parts:
            encoded = part.encode("utf-8", "surrogatepass")
            state.update(len(encoded).to_bytes(8, "big") + encoded)
        return state.digest()


def _own(path: Path) -> int:
    """Hold a lock for as long as the process lives: two of them would not see each other's changes."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise OSError(f"the cache files in {path.parent} are in use by another process") from error
    return descriptor


def is_damage(error: sqlite3.Error) -> bool:
    """Whether an error says that the file itself is broken, rather than that it cannot be reached or written now."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    return code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
