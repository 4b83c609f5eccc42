"""What lines came to, in the database before anybody says that they are done: written in groups, each line once.

`put` returns when the result is on disk. That is before the ledger row of its request says success, so a line whose
answer was paid for is not asked again when its process dies in between. A database that is away is waited for: the
answer is held, not lost. Of two results of one line (two processes can be at work on it for a moment, when a lease ran
out) the first one stays.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError

from gateway.files.store import reason
from gateway.ledger.database import Database, is_outage
from gateway.ledger.schema import batch_results, batches

logger = logging.getLogger("tierline.batches")

_GROUP: Final = 64
_RETRY_S: Final = 1.0
_PATIENCE_S: Final = 5.0
_PAGE: Final = 100
# Statuses in which a batch takes results: later its files are made of them.
_TAKING: Final = ("in_progress", "cancelling")


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one line came to. `ok`: it belongs into the output file, else into that of errors; `body` is the line."""

    batch_id: str
    line: int
    ok: bool
    body: bytes
    input_tokens: int = 0
    cached_input_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class Results:
    """The way into the table. `start` it, `stop` it; it belongs to one event loop."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._waiting: list[tuple[Result, asyncio.Future[None]]] = []
        self._arrived = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self._failing = self._storing = False

    def start(self) -> None:
        self._writer = asyncio.create_task(self._write(), name="batches-results")

    async def stop(self) -> None:
        if self._writer is not None:
            with suppress(TimeoutError):  # an answer whose line does not wait for it any more is kept all the same
                async with asyncio.timeout(_PATIENCE_S):
                    while self._waiting or self._storing:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            self._writer.cancel()
            with suppress(asyncio.CancelledError):
                await self._writer

    async def put(self, result: Result) -> None:
        """Keep a result, however long that takes. One of a batch that takes no more is dropped."""
        await self.put_all([result])

    async def put_all(self, results: Sequence[Result]) -> None:
        """As `put`, of many."""
        loop = asyncio.get_running_loop()
        waiting = [(result, loop.create_future()) for result in results]
        self._waiting += waiting
        self._arrived.set()
        for _, done in waiting:
            await done

    async def done(self, batch_id: str) -> set[int]:
        """The lines that have a result."""
        query = select(batch_results.c.line).where(batch_results.c.batch_id == batch_id)
        async with self._database.read() as connection:
            return set((await connection.execute(query)).scalars())

    async def bodies(self, batch_id: str) -> AsyncIterator[tuple[bool, bytes]]:
        """All results of a batch by line: whether it is one of the output file, and the line."""
        after = 0
        while True:
            behind = (batch_results.c.batch_id == batch_id) & (batch_results.c.line > after)
            query = select(batch_results.c.line, batch_results.c.ok, batch_results.c.body).where(behind)
            async with self._database.read() as connection:
                rows = (await connection.execute(query.order_by(batch_results.c.line).limit(_PAGE))).all()
            for row in rows:
                yield row.ok, row.body
            if len(rows) < _PAGE:
                return
            after = rows[-1].line

    async def _write(self) -> None:
        """Store what waits, all of it at once, for as long as the process lives."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                group, self._waiting = self._waiting[:_GROUP], self._waiting[_GROUP:]
                self._storing = True
                stored = await self._store([result for result, _ in group])
                self._storing = False
                if not stored:
                    self._waiting = [*group, *self._waiting]
                    await asyncio.sleep(_RETRY_S)
                    continue
                for _, done in group:
                    if not done.done():
                        done.set_result(None)

    async def _store(self, results: Sequence[Result]) -> bool:
        """Whether they are on disk; False: try again."""
        try:
            await self._insert(results)
        except (DBAPIError, OSError) as error:
            if not self._failing:
                expected = is_outage(error)
                text = "results of batches wait for the database: %s"
                logger.error(text, reason(error), exc_info=None if expected else error)
            self._failing = True
            return False
        if self._failing:
            logger.info("results of batches are kept again")
            self._failing = False
        return True

    async def _insert(self, results: Sequence[Result]) -> None:
        ids = sorted({result.batch_id for result in results})
        async with self._database.write() as connection:
            # Locked, in one order, so that a batch cannot end between this look and the insert.
            there = select(batches.c.id).where(batches.c.id.in_(ids), batches.c.status.in_(_TAKING))
            found = await connection.execute(there.order_by(batches.c.id).with_for_update())
            taking = set(found.scalars())
            rows: list[dict[str, Any]] = [
                msgspec.structs.asdict(result) for result in results if result.batch_id in taking
            ]
            if rows:
                await connection.execute(self._database.insert(batch_results).on_conflict_do_nothing(), rows)
