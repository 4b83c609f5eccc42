"""Batches in the database: made, listed, leased to one process at a time, moved on from status to status.

A lease is an owner and a time. Whoever works on a batch renews it every second; when its process died, any other takes
the batch over. Every step that only the owner may take says so in its statement, so that one who lost the lease
without knowing changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

import msgspec
from sqlalchemy import ColumnElement, delete, func, insert, select, update
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.batches.record import ENDED, Batch, Counts, Status
from gateway.files.store import UNFINISHED
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import batch_results, batches, files

LEASE_MS: Final = 6_000
_TOKENS: Final = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_tokens")
# Results that one transaction deletes, so that the ledger's rows need not wait for it.
_DELETED_AT_ONCE: Final = 500


class TooManyBatches(Exception):
    """The project has as many unfinished batches as it may."""


class NoInput(Exception):
    """The input file is not there."""


class BatchStore:
    """The batches of all projects. What the database cannot do raises DBAPIError or OSError."""

    def __init__(self, database: Database) -> None:
        self._database = database

    async def add(self, batch: Batch, most_unfinished: int) -> None:
        """Raises TooManyBatches, NoInput: it may not be, and is not."""
        async with self._database.write() as connection:
            mine = batches.c.project_id == batch.project_id
            running = select(func.count()).where(mine, batches.c.status.in_(UNFINISHED))
            if int(await connection.scalar(running) or 0) >= most_unfinished:
                raise TooManyBatches
            # Looked at in the same transaction, so that nobody deletes it in between.
            there = select(files.c.id).where(files.c.id == batch.input_file_id, files.c.complete)
            if await connection.scalar(there.with_for_update()) is None:
                raise NoInput
            await connection.execute(insert(batches).values(**msgspec.structs.asdict(batch)))

    async def get(self, id: str, project_id: str | None = None) -> Batch | None:
        """The batch with its counts as they are now; None: not there, or another project's."""
        wanted = batches.c.id == id
        if project_id is not None:
            wanted &= batches.c.project_id == project_id
        found = await self._find(wanted, limit=1)
        return found[0] if found else None

    async def page(
        self,
        *,
        project_id: str | None = None,
        organisation_id: str | None = None,
        statuses: Collection[str] | None = None,
        endpoint: str | None = None,
        after: str | None = None,
        limit: int,
    ) -> list[Batch]:
        """Up to `limit` batches, the newest first, behind `after`."""
        wanted: list[ColumnElement[bool]] = []
        if project_id is not None:
            wanted.append(batches.c.project_id == project_id)
        if organisation_id is not None:
            wanted.append(batches.c.organisation_id == organisation_id)
        if statuses is not None:
            wanted.append(batches.c.status.in_(statuses))
        if endpoint is not None:
            wanted.append(batches.c.endpoint == endpoint)
        if after is not None:
            wanted.append(batches.c.id < after)
        return await self._find(*wanted, limit=limit)

    async def _find(self, *wanted: ColumnElement[bool], limit: int) -> list[Batch]:
        query = select(batches).where(*wanted).order_by(batches.c.id.desc()).limit(limit)
        async with self._database.read() as connection:
            rows = [_batch(row) for row in (await connection.execute(query)).all()]
            counts = await _counts(connection, [row.id for row in rows if not row.ended])
        return [row if row.ended else row.with_counts(counts.get(row.id, Counts())) for row in rows]

    async def cancel(self, id: str, project_id: str | None = None) -> Batch | None:
        """Ask for the end of a batch. Returns it as it is then; None: not there. One that has ended stays as it is."""
        wanted = (batches.c.id == id) & batches.c.status.in_(("validating", "in_progress"))
        if project_id is not None:
            wanted &= batches.c.project_id == project_id
        async with self._database.write() as connection:
            values = {"status": "cancelling", "cancelling_ms": now_ms()}
            await connection.execute(update(batches).where(wanted).values(**values))
        return await self.get(id, project_id)

    async def unfinished(self) -> list[Batch]:
        """All batches that have not ended, the oldest first; without counts."""
        query = select(batches).where(batches.c.status.in_(UNFINISHED)).order_by(batches.c.id)
        async with self._database.read() as connection:
            return [_batch(row) for row in (await connection.execute(query)).all()]

    async def take(self, id: str, owner: str) -> Batch | None:
        """Take the lease of a batch that nobody works on; None: somebody was faster."""
        now = now_ms()
        free = (batches.c.id == id) & batches.c.status.in_(UNFINISHED) & (batches.c.lease_until_ms < now)
        values = {"lease_owner": owner, "lease_until_ms": now + LEASE_MS}
        async with self._database.write() as connection:
            if not (await connection.execute(update(batches).where(free).values(**values))).rowcount:
                return None
            return _batch((await connection.execute(select(batches).where(batches.c.id == id))).one())

    async def renew(self, owner: str) -> dict[str, Status]:
        """Hold on to the leases of an owner. Returns the batches that are still its own, with their status."""
        mine = (batches.c.lease_owner == owner) & batches.c.status.in_(UNFINISHED)
        async with self._database.write() as connection:
            await connection.execute(update(batches).where(mine).values(lease_until_ms=now_ms() + LEASE_MS))
            found = await connection.execute(select(batches.c.id, batches.c.status).where(mine))
            return {row.id: row.status for row in found}

    async def give_up(self, owner: str, id: str | None = None) -> None:
        """Let others take what this owner has, or this one batch of it."""
        mine = batches.c.lease_owner == owner
        if id is not None:
            mine &= batches.c.id == id
        async with self._database.write() as connection:
            await connection.execute(update(batches).where(mine).values(lease_owner="", lease_until_ms=0))

    async def move(self, batch: Batch, owner: str, to: Status, **values: Any) -> bool:
        """The owner's step from the status that it knows to another; False: it is not that any more, or not its own."""
        own = (batches.c.id == batch.id) & (batches.c.lease_owner == owner) & (batches.c.status == batch.status)
        async with self._database.write() as connection:
            return (await connection.execute(update(batches).where(own).values(status=to, **values))).rowcount > 0

    async def end(
        self, batch: Batch, owner: str, to: Status, made: Collection[Mapping[str, Any]], **values: Any
    ) -> bool:
        """The last step: the files of its results are seen from the moment on in which it has ended.

        Args:
            made: rows of complete files.
        """
        own = (batches.c.id == batch.id) & (batches.c.lease_owner == owner) & batches.c.status.in_(UNFINISHED)
        async with self._database.write() as connection:
            counts = (await _counts(connection, [batch.id])).get(batch.id, Counts())
            values |= {**msgspec.structs.asdict(counts), "ended_ms": now_ms(), "lease_owner": "", "lease_until_ms": 0}
            if not (await connection.execute(update(batches).where(own).values(status=to, **values))).rowcount:
                return False
            for row in made:
                await connection.execute(update(files).where(files.c.id == row["id"]).values(**row))
        return True

    async def tidy(self, keep_ms: int) -> None:
        """Delete results of batches that have ended, and batches whose time is over."""
        over = select(batches.c.id).where(batches.c.status.in_(ENDED))
        while await self._delete_results(batch_results.c.batch_id.in_(over)):
            pass
        async with self._database.write() as connection:
            old = batches.c.status.in_(ENDED) & (batches.c.ended_ms < now_ms() - keep_ms)
            await connection.execute(delete(batches).where(old))

    async def _delete_results(self, wanted: ColumnElement[bool]) -> int:
        async with self._database.write() as connection:
            found = select(batch_results.c.batch_id, batch_results.c.line).where(wanted).limit(_DELETED_AT_ONCE)
            rows = (await connection.execute(found)).all()
            for id in {row.batch_id for row in rows}:
                lines = [row.line for row in rows if row.batch_id == id]
                these = (batch_results.c.batch_id == id) & batch_results.c.line.in_(lines)
                await connection.execute(delete(batch_results).where(these))
            return len(rows)


async def _counts(connection: AsyncConnection, ids: Collection[str]) -> dict[str, Counts]:
    """What the lines of running batches came to."""
    if not ids:
        return {}
    sums = [func.coalesce(func.sum(batch_results.c[name]), 0).label(name) for name in _TOKENS]
    columns = (batch_results.c.batch_id, batch_results.c.ok, func.count().label("lines"), *sums)
    grouped = select(*columns).where(batch_results.c.batch_id.in_(ids)).group_by(*columns[:2])
    found: dict[str, dict[str, int]] = {}
    for row in (await connection.execute(grouped)).mappings():
        mine = found.setdefault(row["batch_id"], dict.fromkeys(Counts.__struct_fields__, 0))
        mine["completed" if row["ok"] else "failed"] += int(row["lines"])
        for name in _TOKENS:
            mine[name] += int(row[name])
    return {id: Counts(**counts) for id, counts in found.items()}


def _batch(row: Any) -> Batch:
    return Batch(**row._asdict())
