"""The database: migrations under a lock, idempotent inserts, clear refusals. On SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import fcntl
import functools
import os
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, func, select, text
from sqlalchemy.exc import DBAPIError

import gateway.ledger
from gateway.ledger.database import Database, DatabaseError, is_outage
from gateway.ledger.rows import Decision, LedgerRow, new_id
from gateway.ledger.schema import HEAD, decisions, ledger, metadata


def row(number: int = 0, **fields: object) -> LedgerRow:
    known = {"attempt_id": new_id(), "request_id": new_id(), "attempt": 1, "ts_ms": 1_700_000_000_000 + number}
    return msgspec.convert({**known, **fields}, LedgerRow)


async def test_migrations_make_exactly_the_schema(database: Database) -> None:
    def differences(connection: Connection) -> list[object]:
        return list(compare_metadata(MigrationContext.configure(connection), metadata))

    async with database.read() as connection:
        assert await connection.run_sync(differences) == []
    config = Config()
    config.set_main_option("script_location", str(Path(gateway.ledger.__path__[0]) / "migrations"))
    assert ScriptDirectory.from_config(config).get_heads() == [HEAD]


def test_outcomes_of_before_the_teams_were_kept_are_those_of_one(tmp_path: Path) -> None:
    """Forth and back no count is lost."""
    at = "day, source, policy, kind, tier, model"

    def rows(of: str) -> list[tuple[object, ...]]:
        with sqlite3.connect(tmp_path / "t.db") as file:
            return file.execute(f"SELECT {of} FROM outcomes ORDER BY {of}").fetchall()

    config = Config()
    config.set_main_option("script_location", str(Path(gateway.ledger.__path__[0]) / "migrations"))

    def go(way: Callable[[Config, str], None], where: str) -> None:
        with create_engine(f"sqlite:///{tmp_path / 't.db'}").begin() as connection:
            config.attributes["connection"] = connection
            way(config, where)

    go(command.upgrade, "0013")
    with sqlite3.connect(tmp_path / "t.db") as file:
        file.execute(f"INSERT INTO outcomes ({at}, wins, losses) VALUES (1, 'audit', 'p', 'k', 'small', 'm', 2.5, 1)")
    go(command.upgrade, "0014")
    with sqlite3.connect(tmp_path / "t.db") as file:
        more = "(1, 'audit', 'p', 't', 'k', 'small', 'm', 1, 1)"
        file.execute(f"INSERT INTO outcomes (day, source, policy, team, kind, tier, model, wins, losses) VALUES {more}")
    assert rows("team, wins, losses") == [("", 2.5, 1), ("t", 1, 1)]
    go(command.downgrade, "0013")
    assert rows(f"{at}, wins, losses") == [(1, "audit", "p", "k", "small", "m", 3.5, 2)]


def test_a_row_has_the_columns_of_its_table_in_order() -> None:
    assert list(LedgerRow.__struct_fields__) == [column.name for column in ledger.columns]


async def test_a_row_comes_back_as_it_went_in(database: Database) -> None:
    went = row(
        tags={"team": "ü"}, cost_nanousd=2**62, ttft_ms=1.25, stream=True, outcome="success", cache="semantic",
        error="a\x00b", key_id="k", input_tokens=3, cached_input_tokens=2,
    )  # fmt: skip
    assert await database.insert_rows([went], [Decision(request_id="r", ts_ms=5, features={"n": 1.5})]) == 1
    async with database.read() as connection:
        came = {str(name): value for name, value in (await connection.execute(select(ledger))).one()._asdict().items()}
        why = await connection.scalar(select(decisions.c.json))
    came["tags"] = msgspec.json.decode(came["tags"])
    went.error = "ab"
    assert msgspec.convert(came, LedgerRow) == went
    assert msgspec.json.decode(str(why), type=Decision) == Decision(request_id="r", ts_ms=5, features={"n": 1.5})


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 65, 200])
async def test_inserting_twice_is_inserting_once(database: Database, count: int) -> None:
    rows = [row(n) for n in range(count)]
    assert await database.insert_rows(rows[: count // 2]) == count // 2
    assert await database.insert_rows(rows) == count - count // 2
    assert await database.insert_rows(rows) == 0
    async with database.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(ledger)) == count


async def test_databases_opened_at_once_migrate_once(database_url: str) -> None:
    opened = await asyncio.gather(*(Database.open(database_url) for _ in range(4)))
    for one in opened:
        await one.insert_rows([row()])
    async with opened[0].read() as connection:
        assert await connection.scalar(text("SELECT count(*) FROM alembic_version")) == 1
        assert await connection.scalar(select(func.count()).select_from(ledger)) == 4
    for one in opened:
        await one.close()


async def test_opening_waits_for_whoever_sets_up_the_file(tmp_path: Path) -> None:
    """Another process in the middle of the change to WAL: SQLite itself would not wait for it but refuse at once."""
    path = tmp_path / "d.db"
    other = sqlite3.connect(path, isolation_level=None)
    with open(f"{path}.migrate", "w", encoding="utf-8") as lock:  # noqa: ASYNC230
        fcntl.flock(lock, fcntl.LOCK_EX)
        other.execute("BEGIN IMMEDIATE")
        opening = asyncio.create_task(Database.open(f"sqlite:///{path}"))
        done, _ = await asyncio.wait({opening}, timeout=0.3)
        assert not done, opening.exception()
        other.execute("COMMIT")
    database = await opening
    async with database.read() as connection:
        assert await connection.scalar(text("PRAGMA journal_mode")) == "wal"
    await database.close()
    # A copy restored from a backup has the schema, but the mode of the tool that wrote it.
    assert other.execute("PRAGMA journal_mode=DELETE").fetchone() == ("delete",)
    other.close()
    database = await Database.open(f"sqlite:///{path}", migrate=False)
    async with database.read() as connection:
        assert await connection.scalar(text("PRAGMA journal_mode")) == "wal"
    await database.close()


async def test_opened_twice_it_keeps_what_is_committed_after_a_command_has_looked(tmp_path: Path) -> None:
    """POSIX drops a process's locks on a file when it closes any descriptor of it: the log of commits would be deleted
    by the next process that opens and closes the database, and every later commit be lost with this process."""
    url = f"sqlite:///{tmp_path}/d.db"
    first = await Database.open(url)
    await first.insert_rows([row(1)])
    second = await Database.open(url, migrate=False)
    await second.insert_rows([row(2)])
    await second.close()
    counting = "SELECT count(*) FROM ledger"
    looking = f"import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('{counting}').fetchone())"
    command = [sys.executable, "-c", looking, str(tmp_path / "d.db")]
    look = functools.partial(asyncio.to_thread, subprocess.check_output, command, text=True)
    assert await look() == "(2,)\n"
    await first.insert_rows([row(3)])
    assert await look() == "(3,)\n"
    await first.close()


def test_processes_that_start_at_once_migrate_once(tmp_path: Path) -> None:
    program = (
        "import asyncio, sys; from gateway.ledger.database import Database\n"
        "async def main():\n    database = await Database.open(sys.argv[1]); await database.close()\n"
        "asyncio.run(main())"
    )
    command = [sys.executable, "-c", program, f"sqlite:///{tmp_path}/d.db"]
    started = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    assert [(process.communicate(timeout=60)[1], process.returncode) for process in started] == [("", 0)] * 2


async def test_a_newer_schema_is_refused(database: Database, migrated_url: str) -> None:
    async with database.write() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for migrate in (True, False):
        with pytest.raises(DatabaseError, match="newer than this program"):
            await Database.open(migrated_url, migrate=migrate)


async def test_check_only_does_not_migrate(database_url: str) -> None:
    with pytest.raises(DatabaseError, match="at nothing"):
        await Database.open(database_url, migrate=False)


async def test_a_failed_migration_leaves_nothing(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from alembic import op

    def fail(*_: object) -> None:
        raise RuntimeError("cut short")

    with monkeypatch.context() as broken:
        broken.setattr(op, "create_index", fail)
        with pytest.raises(RuntimeError, match="cut short"):
            await Database.open(database_url)
    database = await Database.open(database_url)
    assert await database.insert_rows([row()]) == 1
    await database.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("nonsense", "not a database URL"),
        ("mysql://host/name", "not supported"),
        ("sqlite:////proc/nothing/x.db", "cannot use the database"),
        ("postgresql://user:hunter2@127.0.0.1:1/none", "cannot use the database"),
    ],
)
async def test_unusable_databases_are_refused_in_words(url: str, message: str) -> None:
    with pytest.raises(DatabaseError, match=message) as caught:
        await Database.open(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.postgres
async def test_a_server_that_refuses_us_is_said_in_words(postgres_server: tuple[str, Path]) -> None:
    template, data = postgres_server
    with pytest.raises(DatabaseError, match='database "nowhere" does not exist'):
        await Database.open(template.format(name="nowhere"))
    with pytest.raises(DatabaseError, match='role "nobody" does not exist'):
        await Database.open(f"postgresql://nobody:hunter2@/postgres?host={data.parent}")


async def test_a_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(DatabaseError, match="not a database"):
        await Database.open(f"sqlite:///{tmp_path}/x.db")


async def test_the_database_is_private(tmp_path: Path) -> None:
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    await database.insert_rows([row()])
    modes = {entry.name: stat.S_IMODE(entry.stat().st_mode) for entry in os.scandir(tmp_path)}
    assert set(modes.values()) == {0o600}, modes
    await database.close()


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    yield connection
    connection.close()


async def test_a_locked_database_is_an_outage_and_bad_data_is_not(
    tmp_path: Path, locked: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.ledger.database._BUSY_TIMEOUT_MS", 50)
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    locked.execute("BEGIN IMMEDIATE")
    with pytest.raises(DBAPIError) as outage:
        await database.insert_rows([row()])
    assert is_outage(outage.value)
    locked.execute("ROLLBACK")
    bad = row()
    bad.model = None  # type: ignore[assignment]
    with pytest.raises(DBAPIError) as fault:
        await database.insert_rows([bad])
    assert not is_outage(fault.value)
    assert await database.insert_rows([row()]) == 1
    await database.close()
