"""From the journal to the database: in batches, exactly once, through outages and restarts."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import func, select
from sqlalchemy.exc import DBAPIError

from gateway.ledger.database import Database
from gateway.ledger.journal import Journal, Position
from gateway.ledger.records import Close, Decided, Noted, Open
from gateway.ledger.rows import Decision, LedgerRow, Note
from gateway.ledger.schema import decisions, ledger, notes
from gateway.ledger.writer import LedgerWriter


def row(attempt_id: str, cost: int = 1) -> LedgerRow:
    return LedgerRow(attempt_id=attempt_id, request_id=f"r-{attempt_id}", attempt=1, ts_ms=1, cost_nanousd=cost)


async def stored(database: Database) -> list[str]:
    async with database.read() as connection:
        return sorted(await connection.scalars(select(ledger.c.attempt_id)))


async def until(condition: object, timeout_s: float = 10.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (what is waited for has no event)
            await asyncio.sleep(0.01)


async def test_rows_and_decisions_arrive(database: Database, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database, interval_s=0.02)
    writer.start()
    for n in range(300):
        journal.append(Open(row(f"{n:03}")))
        journal.append(Decided(Decision(request_id=f"r-{n:03}", ts_ms=1)))
        journal.append(Noted(Note(id=f"n-{n:03}", request_id=f"r-{n:03}", ts_ms=1, kind="told", data={"n": n})))
        journal.append(Close(row(f"{n:03}")))
    assert writer.lag_rows == 300
    await until(lambda: writer.lag_rows == 0)
    assert await stored(database) == [f"{n:03}" for n in range(300)]
    async with database.read() as connection:
        assert await connection.scalar(select(func.count()).select_from(decisions)) == 300
        assert await connection.scalar(select(func.count()).select_from(notes)) == 300
    assert writer.lag_s == 0.0
    await writer.stop()
    journal.close()


async def test_stop_stores_what_is_left(database: Database, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database, interval_s=60)
    writer.start()
    journal.append(Close(row("a")))
    await writer.stop()
    assert await stored(database) == ["a"]
    journal.close()


@pytest.mark.parametrize("turns", [1, 2, 3, 6, 20])
async def test_a_flush_that_is_given_up_leaves_out_no_row(database: Database, tmp_path: Path, turns: int) -> None:
    """Whoever waits for a flush may leave while rows are read or stored."""
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database)
    for n in range(100):
        journal.append(Close(row(f"{n:03}")))
    left = asyncio.create_task(writer.flush())
    for _ in range(turns):
        await asyncio.sleep(0)
    assert left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    await writer.flush()
    assert await stored(database) == [f"{n:03}" for n in range(100)]
    assert writer.lag_rows == 0
    journal.close()


async def test_a_restart_goes_on_where_the_last_process_stopped(database: Database, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database)
    journal.append(Close(row("a")))
    await writer.flush()
    journal.append(Close(row("b")))
    journal.append(Open(row("c")))
    journal.close()
    again = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(again, database)
    assert writer.lag_rows == 2
    await writer.flush()
    assert writer.lag_rows == 0
    assert await stored(database) == ["a", "b", "c"]
    again.close()


async def test_a_lost_checkpoint_changes_nothing(database: Database, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal")
    for n in range(5):
        journal.append(Close(row(str(n))))
    await LedgerWriter(journal, database).flush()
    journal.close()
    (tmp_path / "journal" / "checkpoint").unlink()
    again = Journal.open(tmp_path / "journal")
    await LedgerWriter(again, database).flush()
    assert await stored(database) == [str(n) for n in range(5)]
    again.close()


async def test_stored_segments_are_deleted_and_running_attempts_kept(database: Database, tmp_path: Path) -> None:
    journal = Journal.open(tmp_path / "journal", segment_bytes=16_384)
    writer = LedgerWriter(journal, database, batch_records=16)
    journal.append(Open(row("running")))
    for n in range(600):
        journal.append(Close(row(f"{n:03}")))
    assert len(journal.segments()) > 3
    await writer.flush()
    assert journal.segments() == [journal.end.segment]
    journal.close()
    again = Journal.open(tmp_path / "journal")
    assert [r.attempt_id for r in again.interrupted] == ["running"]
    await LedgerWriter(again, database).flush()
    assert len(await stored(database)) == 601
    again.close()


async def test_a_locked_database_delays_and_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.ledger.database._BUSY_TIMEOUT_MS", 20)
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database, interval_s=0.02)
    blocker = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    blocker.execute("BEGIN IMMEDIATE")
    writer.start()
    journal.append(Close(row("a")))
    await until(lambda: writer.last_error is not None)
    assert "locked" in str(writer.last_error)
    assert writer.lag_rows == 1
    assert writer.lag_s > 0
    with pytest.raises(DBAPIError):
        await writer.flush()
    journal.append(Close(row("b")))
    blocker.execute("ROLLBACK")
    blocker.close()
    await until(lambda: writer.lag_rows == 0)
    assert writer.last_error is None
    assert await stored(database) == ["a", "b"]
    await writer.stop()
    journal.close()
    await database.close()


@pytest.mark.postgres
async def test_a_server_that_goes_away_and_comes_back(postgres_url: str, tmp_path: Path) -> None:
    """The server ends our connections and refuses new ones for a while, as in a restart."""
    import asyncpg
    from sqlalchemy.engine import make_url

    database = await Database.open(postgres_url)
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database, interval_s=0.02)
    journal.append(Close(row("a")))
    await writer.flush()
    url = make_url(postgres_url)
    admin = await asyncpg.connect(user="tierline", database="postgres", host=str(url.query["host"]))
    await admin.execute(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS false")
    await admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{url.database}'")
    journal.append(Close(row("b")))
    writer.start()
    await until(lambda: writer.last_error is not None)
    await admin.execute(f"ALTER DATABASE {url.database} ALLOW_CONNECTIONS true")
    await until(lambda: writer.lag_rows == 0)
    await admin.close()
    assert await stored(database) == ["a", "b"]
    await writer.stop()
    journal.close()
    await database.close()


async def test_a_row_the_database_refuses_does_not_hold_up_the_others(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database)
    async with database.write() as connection:
        # A rule that only one row breaks.
        if database.dialect == "sqlite":
            await connection.exec_driver_sql(
                "CREATE TRIGGER no_666 BEFORE INSERT ON ledger WHEN NEW.cost_nanousd = 666 "
                "BEGIN SELECT RAISE(ABORT, 'no such cost'); END"
            )
        else:
            await connection.exec_driver_sql("ALTER TABLE ledger ADD CHECK (cost_nanousd <> 666)")
    for n in range(20):
        journal.append(Close(row(f"{n:02}", cost=666 if n == 13 else n)))
        journal.append(Decided(Decision(request_id=f"r-{n:02}", ts_ms=1)))
    await writer.flush()
    assert await stored(database) == [f"{n:02}" for n in range(20) if n != 13]
    assert writer.rejected == 1
    assert writer.lag_rows == 0
    assert "r-13" in caplog.text
    kept = msgspec.json.decode((tmp_path / "journal" / "rejected.jsonl").read_bytes())
    assert kept["record"]["attempt_id"] == "13"
    journal.close()


@pytest.mark.parametrize("cost", [2**63, 2**64 - 1])
async def test_a_number_that_no_database_holds_does_not_hold_up_the_others(
    database: Database, tmp_path: Path, cost: int
) -> None:
    journal = Journal.open(tmp_path / "journal")
    writer = LedgerWriter(journal, database)
    for n in range(5):
        journal.append(Close(row(f"{n}", cost=cost if n == 3 else n)))
    await writer.flush()
    assert await stored(database) == ["0", "1", "2", "4"]
    assert (writer.rejected, writer.lag_rows) == (1, 0)
    journal.close()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 99), max_size=80))
async def test_any_order_of_work_restarts_and_flushes(
    tmp_path_factory: pytest.TempPathFactory, choices: list[int]
) -> None:
    place = tmp_path_factory.mktemp("ledger")
    database = await Database.open(f"sqlite:///{place}/x.db")
    journal = Journal.open(place / "journal", segment_bytes=8192)
    writer = LedgerWriter(journal, database, batch_records=3)
    running: list[str] = []
    expected: set[str] = set()
    for n, choice in enumerate(choices):
        if choice < 40 or (choice < 80 and not running):
            running.append(str(n))
            expected.add(str(n))
            journal.append(Open(row(str(n))))
        elif choice < 80:
            journal.append(Close(row(running.pop(choice % len(running)))))
        elif choice < 92:
            await writer.flush()
        else:
            # The process dies without a word: what it had not written to disk is gone, files stay as they are.
            journal._stop.set()
            journal._release()
            journal = Journal.open(place / "journal", segment_bytes=8192)
            writer = LedgerWriter(journal, database, batch_records=3)
            running.clear()
    journal.close()
    journal = Journal.open(place / "journal", segment_bytes=8192)
    writer = LedgerWriter(journal, database)
    await writer.flush()
    assert await stored(database) == sorted(expected)
    assert writer.lag_rows == 0
    assert journal.segments() == [journal.end.segment]
    journal.close()
    await database.close()


_GATEWAY = """
    import asyncio, os, sys
    from pathlib import Path
    from gateway.ledger.database import Database
    from gateway.ledger.journal import Journal
    from gateway.ledger.records import Close, Open
    from gateway.ledger.rows import LedgerRow, new_id
    from gateway.ledger.writer import LedgerWriter

    async def main(place):
        database = await Database.open(f"sqlite:///{place}/x.db")
        journal = Journal.open(Path(place) / "journal", segment_bytes=131072)
        writer = LedgerWriter(journal, database, interval_s=0.01)
        writer.start()
        while True:
            for _ in range(20):
                row = LedgerRow(attempt_id=new_id(), request_id="r", attempt=1, ts_ms=1, outcome="success")
                journal.append(Open(row))
                journal.append(Close(row))
                os.write(1, (row.attempt_id + "\\n").encode())
            await asyncio.sleep(0)

    asyncio.run(main(sys.argv[1]))
"""


def _run_and_kill(place: Path) -> list[str]:
    """Attempts that a process reported as written before it was killed."""
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(_GATEWAY), str(place)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(0.3)
    process.send_signal(signal.SIGKILL)
    rest, _ = process.communicate()
    return (first + rest).decode().split("\n")[:-1]


async def test_kill_9_while_writing_to_the_database(tmp_path: Path) -> None:
    reported = [attempt for _ in range(3) for attempt in await asyncio.to_thread(_run_and_kill, tmp_path)]
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    journal = Journal.open(tmp_path / "journal")
    await LedgerWriter(journal, database).flush()
    found = Counter(await stored(database))
    assert len(reported) > 300
    assert all(found[attempt] == 1 for attempt in reported)
    assert len(found) - len(reported) <= 3
    journal.close()
    await database.close()


async def test_a_backlog_is_read_with_bounded_memory(tmp_path: Path) -> None:
    """A day without a database, in small: many segments, read one at a time."""
    database = await Database.open(f"sqlite:///{tmp_path}/x.db")
    journal = Journal.open(tmp_path / "journal", segment_bytes=65_536)
    for n in range(3000):
        journal.append(Close(row(f"{n:04}")))
    loaded: list[int] = []
    real_load = journal.load

    def load(position: Position) -> tuple[bytes, int]:
        buffer, salt = real_load(position)
        loaded.append(len(buffer))
        return buffer, salt

    journal.load = load  # type: ignore[method-assign]
    await LedgerWriter(journal, database).flush()
    assert len(await stored(database)) == 3000
    assert max(loaded) <= 65_536
    assert os.listdir(tmp_path / "journal").count("rejected.jsonl") == 0
    journal.close()
    await database.close()
