"""Stores what is left in journals that no process will open again, such as those of workers that were taken away."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from gateway.ledger.database import Database
from gateway.ledger.journal import Journal, JournalBusy
from gateway.ledger.writer import LedgerWriter


async def take_over(journals: Iterable[Path], database: Database) -> list[Path]:
    """Bring the rows of these journals into the database; attempts that were open become `interrupted`.

    Returns:
        The journals, but for those whose process still runs.

    Raises:
        JournalError, DBAPIError, OSError: what cannot be read or stored stays where it is.
    """
    taken: list[Path] = []
    for path in journals:
        try:
            journal = Journal.open(path)
        except JournalBusy:
            continue
        try:
            await LedgerWriter(journal, database).flush()
        finally:
            journal.close()
        taken.append(path)
    return taken
