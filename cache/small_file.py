"""A small SQLite file beside the answers: opened, or made anew where it is damaged; readable by its owner only."""

from __future__ import annotations

import logging
import os
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_log = logging.getLogger(__name__)


def open_small_file(path: Path | None, set_up: Callable[[sqlite3.Connection], None], loss: str) -> sqlite3.Connection:
    """Open or create a file, or memory where there is no path; a damaged one is moved aside.

    Args:
        set_up: makes the schema; what it raises means that the file cannot be used.
        loss: what a damaged file costs, for the log.

    Raises:
        OSError: the file or its folder cannot be made or written, or another program has it.
    """
    if path is None:
        return _opened(None, set_up)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _opened(path, set_up)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise OSError(f"{path} is in use by another program: {error}") from error
        aside = path.with_name(f"{path.stem}.damaged-{time.time_ns()}{path.suffix}")
        _log.warning("%s is damaged (%s): moved to %s; %s", path, error, aside, loss)
        path.rename(aside)
        return _opened(path, set_up)


def _opened(path: Path | None, set_up: Callable[[sqlite3.Connection], None]) -> sqlite3.Connection:
    if path is not None:
        with suppress(FileExistsError):
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    database = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        set_up(database)
    except sqlite3.DatabaseError:
        database.close()
        raise
    return database
