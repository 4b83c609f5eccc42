"""Journals of workers that were taken away: their rows are stored by the first worker, unless one still runs."""

from __future__ import annotations

from pathlib import Path

from gateway import workers
from gateway.ledger.database import Database
from gateway.ledger.journal import Journal
from gateway.ledger.records import Close, Open
from gateway.ledger.rows import LedgerRow, new_id
from gateway.ledger.schema import ledger
from gateway.ledger.takeover import take_over
from gateway.settings import Settings


def settings(folder: Path, count: int) -> Settings:
    document = {"server": {"workers": count}, "storage": {"data_dir": folder, "redis_url": "redis://x"}}
    return Settings.model_validate(document)


def test_which_journals_are_left(tmp_path: Path) -> None:
    four, two = settings(tmp_path, 4), settings(tmp_path, 2)
    for worker in range(1, 5):
        workers.journal_path(four, worker).mkdir(parents=True)
    assert len({workers.journal_path(four, worker) for worker in range(1, 5)}) == 4
    assert workers.left_journals(four, 1) == []
    assert workers.left_journals(two, 1) == [workers.journal_path(four, 3), workers.journal_path(four, 4)]
    assert workers.left_journals(two, 2) == []  # one worker takes them, or two would want the same


async def test_rows_of_left_journals_are_stored(database: Database, tmp_path: Path) -> None:
    ended, running = tmp_path / "worker-3", tmp_path / "worker-4"
    rows = [LedgerRow(attempt_id=new_id(), request_id=f"req-{n}", attempt=1, ts_ms=1, cost_nanousd=n) for n in range(3)]
    journal = Journal.open(ended)
    for row in rows:
        journal.append(Open(row))
    for row in rows[:2]:
        row.outcome = "success"
        journal.append(Close(row))
    journal.close()
    still_there = Journal.open(running)
    try:
        assert await take_over([ended, running], database) == [ended]
        assert await take_over([ended, running], database) == [ended]  # and once more, at the next start
    finally:
        still_there.close()
    async with database.read() as connection:
        found = {row.request_id: row.outcome for row in await connection.execute(ledger.select())}
    assert found == {"req-0": "success", "req-1": "success", "req-2": "interrupted"}
