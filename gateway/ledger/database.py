"""The database behind keys and ledger: SQLite in the data directory, or PostgreSQL by URL. Same tables, same code.

`open` brings the schema up to date before anything else happens, one process at a time. Rows go in with multi-row
statements that skip what is already there, so that a replay after a crash changes nothing.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

import msgspec
from sqlalchemy import Connection, Insert, Table, event, text
from sqlalchemy.dialects import sqlite
from sqlalchemy.engine import make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from gateway.ledger.rows import Decision, LedgerRow, Note
from gateway.ledger.schema import HEAD, decisions, ledger, notes

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

logger = logging.getLogger("tierline.ledger")

# Key of the advisory lock that serialises migrations on PostgreSQL.
_MIGRATION_LOCK: Final = 0x7469_6572
_BUSY_TIMEOUT_MS: Final = 5000
# Rows per statement, largest first: any batch takes few statements, and few distinct ones, which drivers keep prepared.
_CHUNKS: Final = (32, 16, 8, 4, 2, 1)
_Item = TypeVar("_Item")
_FIELDS: Final = LedgerRow.__struct_fields__
# Text that clients and servers choose; the rest is ours.
_FOREIGN: Final = tuple(_FIELDS.index(name) for name in ("requested_model", "finish_reason", "error"))
_TAGS: Final = _FIELDS.index("tags")


class DatabaseError(Exception):
    """The database cannot be used; the message says why and what to do."""


class OutdatedSchema(DatabaseError):
    """The schema is older than this program; opening the database for writing brings it up to date."""


class Database:
    """Connections to one database. Make it with `open`; it belongs to one event loop."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine
        # One state of the database for all statements of a read; SQLite's transactions see no other.
        self._reading = (
            engine.execution_options(isolation_level="REPEATABLE READ") if self.dialect == "postgresql" else engine
        )
        self._writing = engine.execution_options(sqlite_begin="BEGIN IMMEDIATE")
        self._insert_sql: dict[tuple[str, int], str] = {}

    @classmethod
    async def open(cls, url: str, *, migrate: bool = True) -> Self:
        """Connect and bring the schema up to date.

        Raises:
            DatabaseError: the URL is unusable, the server unreachable, or the schema newer than this program.
        """
        try:
            parsed = make_url(url)
        except ArgumentError as error:
            raise DatabaseError(
                "storage.database_url is not a database URL, like postgresql://user@host/name"
            ) from error
        drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+asyncpg", "postgres": "postgresql+asyncpg"}
        backend = parsed.drivername.partition("+")[0]
        if backend not in drivers:
            raise DatabaseError(f"storage.database_url: '{backend}' is not supported; use sqlite or postgresql")
        parsed = parsed.set(drivername=drivers[backend])
        try:
            if backend == "sqlite":
                engine = create_async_engine(parsed, connect_args={"timeout": _BUSY_TIMEOUT_MS / 1000})
                event.listen(engine.sync_engine, "connect", _configure_sqlite)
                event.listen(engine.sync_engine, "begin", _begin_sqlite)
                if parsed.database and parsed.database != ":memory:":
                    await asyncio.to_thread(_prepare_file, Path(parsed.database))
            else:
                engine = create_async_engine(parsed, pool_pre_ping=True)
        except ModuleNotFoundError as error:
            raise DatabaseError(
                f"{backend} needs the package {error.name}: pip install 'tierline[postgres]'"
            ) from error
        except (OSError, sqlite3.Error) as error:
            raise DatabaseError(f"cannot use the database {parsed.render_as_string()}: {error}") from error
        database = cls(engine)
        try:
            await (database.migrate() if migrate else database.check())
        except (DBAPIError, OSError) as error:
            await database.close()
            reason = error.orig if isinstance(error, DBAPIError) else error
            raise DatabaseError(f"cannot use the database {parsed.render_as_string()}: {reason}") from error
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def dialect(self) -> str:
        return self.engine.dialect.name

    def read(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A connection whose statements all see the same state of the database."""
        return self._reading.connect()

    def write(self) -> AbstractAsyncContextManager[AsyncConnection]:
        """A transaction that commits at the end. On SQLite it waits for other writers now, not in the middle."""
        return self._writing.begin()

    async def close(self) -> None:
        await self.engine.dispose()

    async def check(self) -> None:
        """Whether the schema is the one this program was written for.

        Raises:
            DatabaseError: it is not; the message says which side is older.
        """
        async with self.read() as connection:
            _expect_head(await connection.run_sync(_revision))

    async def migrate(self) -> None:
        """Bring the schema to `schema.HEAD`; processes that start together wait for the first."""
        async with self.read() as connection:
            if await connection.run_sync(_revision) == HEAD:
                return
        async with self._migration_lock(), self.write() as connection:
            if self.dialect == "postgresql":
                await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
            await connection.run_sync(_upgrade)
            _expect_head(await connection.run_sync(_revision))

    @asynccontextmanager
    async def _migration_lock(self) -> AsyncIterator[None]:
        """A lock file beside a SQLite database; PostgreSQL has a lock of its own, taken in the transaction."""
        path = self.engine.url.database
        if self.dialect != "sqlite" or not path or path == ":memory:":
            yield
            return
        descriptor = _lock_file(path)
        try:
            await asyncio.to_thread(fcntl.flock, descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    async def insert_rows(self, rows: Sequence[LedgerRow], reasons: Sequence[Decision | Note] = ()) -> int:
        """Insert attempts, decisions and notes that are not there yet, in one transaction.

        Returns:
            How many ledger rows were new.
        """
        async with self.write() as connection:
            new = await self._insert(connection, ledger, rows, _ledger_values)
            made = [reason for reason in reasons if isinstance(reason, Decision)]
            await self._insert(connection, decisions, made, _decision_values)
            noted = [reason for reason in reasons if isinstance(reason, Note)]
            await self._insert(connection, notes, noted, _note_values)
        return new

    def insert_if_absent(self, table: Table, **values: Any) -> Insert:
        """A statement that does nothing when the row, by any unique constraint, is there."""
        return self.insert(table).values(**values).on_conflict_do_nothing()

    def insert(self, table: Table) -> postgresql.Insert | sqlite.Insert:
        """A statement that can say what becomes of a row that is there."""
        if self.dialect != "postgresql":
            return sqlite.insert(table)
        from sqlalchemy.dialects import postgresql  # two megabytes, of which a gateway on SQLite needs nothing

        return postgresql.insert(table)

    async def _insert(
        self,
        connection: AsyncConnection,
        table: Table,
        items: Sequence[_Item],
        values: Callable[[_Item], Sequence[Any]],
    ) -> int:
        # One statement per chunk, not one per row: with SQLite each statement is a trip through the interpreter lock,
        # which a busy event loop would make cost milliseconds. Nor one for all: requests wait while it is put together.
        new = start = 0
        for size in _CHUNKS:
            while len(items) - start >= size:
                flat = tuple([value for item in items[start : start + size] for value in values(item)])
                result = await connection.exec_driver_sql(self._insert_statement(table, size), flat)
                new += result.rowcount
                start += size
        return new

    def _insert_statement(self, table: Table, rows: int) -> str:
        statement = self._insert_sql.get((table.name, rows))
        if statement is None:
            columns = list(table.columns)
            primary = ", ".join(column.name for column in table.primary_key)
            if self.dialect == "postgresql":
                types = [column.type.compile(self.engine.dialect) for column in columns]
                numbered = [f"${i + 1}::{types[i % len(types)]}" for i in range(rows * len(columns))]
            else:
                numbered = ["?"] * (rows * len(columns))
            width = len(columns)
            groups = ", ".join(f"({', '.join(numbered[i * width : (i + 1) * width])})" for i in range(rows))
            names = ", ".join(column.name for column in columns)
            statement = f"INSERT INTO {table.name} ({names}) VALUES {groups} ON CONFLICT ({primary}) DO NOTHING"
            self._insert_sql[(table.name, rows)] = statement
        return statement


def is_outage(error: BaseException) -> bool:
    """Whether a failure is the database's (absent, locked, full, shutting down), so that trying again can help."""
    if isinstance(error, DBAPIError):
        return error.connection_invalidated or isinstance(error, OperationalError) or _is_outage_state(error)
    return isinstance(error, OSError | TimeoutError)


def _is_outage_state(error: DBAPIError) -> bool:
    # PostgreSQL classes: 08 connection, 53 resources (disk full), 57 operator intervention, 58 system error,
    # 40 rollback (deadlock), 55 object not available (lock).
    state = getattr(error.orig, "sqlstate", None) or ""
    return state[:2] in ("08", "53", "57", "58", "40", "55") or "Interface" in type(error).__name__


def _prepare_file(path: Path) -> None:
    """Make the file, if it is not there, such that only its owner can read it, and put it into WAL mode.

    The file remembers the mode, and SQLite gives its other files the same permissions. Two connections that change the
    mode of one file at once would not wait for each other: each has read the file by then, so SQLite, seeing a deadlock
    in the making, tells the second at once that the database is locked. Hence one at a time, by the migrations' lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Never open a database that is there: closing it would drop the locks of every connection that this process has to
    # it, and another process, taking itself for the last one, would delete the log that holds what was committed.
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    descriptor = _lock_file(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        with closing(sqlite3.connect(path, timeout=_BUSY_TIMEOUT_MS / 1000)) as connection:
            connection.execute("PRAGMA journal_mode=WAL")
    finally:
        os.close(descriptor)


def _lock_file(path: Path | str) -> int:
    """A descriptor of the file beside a SQLite database whose lock means: nobody else changes its form."""
    return os.open(f"{path}.migrate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get("sqlite_begin", "BEGIN"))


def _configure_sqlite(connection: Any, _record: Any) -> None:
    # The driver would begin transactions on its own, but not before DDL: a migration could be cut in half.
    connection.isolation_level = None
    cursor = connection.cursor()
    # The journal forgets what the database has: so a commit must reach the disk, also in WAL mode.
    for pragma in ("synchronous=FULL", f"busy_timeout={_BUSY_TIMEOUT_MS}", "foreign_keys=ON"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _revision(connection: Connection) -> str | None:
    if not connection.dialect.has_table(connection, "alembic_version"):
        return None
    found = connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return None if found is None else str(found)


def _expect_head(revision: str | None) -> None:
    if revision == HEAD:
        return
    if revision is None or revision < HEAD:
        raise OutdatedSchema(
            f"the database schema is at {revision or 'nothing'}, this program needs {HEAD}; start it once"
        )
    raise DatabaseError(f"the database schema is at {revision}, newer than this program ({HEAD}): upgrade the program")


def _upgrade(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config

    revision = _revision(connection)
    if revision is not None and revision > HEAD:
        _expect_head(revision)
    logging.getLogger("alembic").setLevel(logging.WARNING)
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent / "migrations").replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
    logger.info("database schema upgraded from %s to %s", revision or "nothing", HEAD)


def _plain(value: str) -> str:
    """PostgreSQL cannot store a NUL in text."""
    return value.replace("\x00", "") if "\x00" in value else value


def _ledger_values(row: LedgerRow) -> tuple[Any, ...]:
    """In the order of `schema.ledger`, which is the order of `LedgerRow`."""
    values = list(msgspec.structs.astuple(row))
    for i in _FOREIGN:
        values[i] = _plain(values[i])
    values[_TAGS] = msgspec.json.encode(row.tags).decode() if row.tags else "{}"
    return tuple(values)


def _decision_values(decision: Decision) -> tuple[Any, ...]:
    return (decision.request_id, decision.ts_ms, msgspec.json.encode(decision).decode())


def _note_values(note: Note) -> tuple[Any, ...]:
    return (note.id, note.request_id, note.ts_ms, note.kind, msgspec.json.encode(note.data).decode())
