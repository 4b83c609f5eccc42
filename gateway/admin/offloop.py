"""A database connection with a thread of its own, so that an admin's report never holds up an answer.

The queries of the admin API, and the work of reading their rows, run on an event loop beside the gateway's. A few at a
time: who comes while as many wait is told to come back.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, TypeVar

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from gateway.dialects.errors import Unavailable
from gateway.ledger.database import Database, DatabaseError, is_outage

_Result = TypeVar("_Result")

AT_ONCE: Final = 4
WAIT_S: Final = 5.0
LONGEST_S: Final = 60.0


class DatabaseThread:
    """Runs work on a database of its own. The database is opened with the first call, and again if that failed."""

    def __init__(self, url: str, *, longest_s: float = LONGEST_S) -> None:
        self._url = url
        self._longest_s = longest_s
        self._room = asyncio.Semaphore(AT_ONCE)
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self._database: Database | None = None
        self._opening = asyncio.Lock()

    async def run(self, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
        """The result of `work` with the database, awaited without holding up this loop.

        Raises:
            Unavailable: the database is out, or has not answered in `longest_s`; or too many wait.
        """
        try:
            async with asyncio.timeout(WAIT_S):
                await self._room.acquire()
        except TimeoutError:
            text = "Too many admin requests wait for the database; try again."
            raise Unavailable(text, code="admin_busy", headers={"retry-after": "5"}) from None
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._loop.run_forever, name="admin-database", daemon=True)
                self._thread.start()
            async with asyncio.timeout(self._longest_s):
                return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._work(work), self._loop))
        except (DBAPIError, DatabaseError, PoolTimeout, OSError, TimeoutError) as error:
            if isinstance(error, DBAPIError) and not is_outage(error):
                raise
            text = "The database does not answer; try again."
            raise Unavailable(text, code="database_unavailable", headers={"retry-after": "5"}) from error
        finally:
            self._room.release()

    async def close(self) -> None:
        """Close the database and end the thread."""
        if self._thread is None:
            self._loop.close()
            return
        with suppress(Exception):
            await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._close(), self._loop))
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    async def _work(self, work: Callable[[Database], Awaitable[_Result]]) -> _Result:
        async with self._opening:
            if self._database is None:
                self._database = await Database.open(self._url, migrate=False)
        return await work(self._database)

    async def _close(self) -> None:
        if self._database is not None:
            await self._database.close()
