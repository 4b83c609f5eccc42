"""Answers in the database: written in batches, read along their conversation, gone after their time.

A conversation is a tree: every answer knows the one before it, and adds its own new input and output, so a turn costs
what it adds and not what came before. It is kept or dropped as a whole: `keep_days` after its last turn, or earlier
when all of them exceed `max_bytes`; then those that have rested longest go first.

`put` returns when the answer is on disk. All that come while the database is at work share its next transaction. What
the database does not do in time, or cannot do, raises `StoreUnavailable`; nothing waits longer than `PATIENCE_S`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import CTE, Select, delete, func, insert, literal, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection

from backends.protocol import Json
from gateway.ledger.database import Database
from gateway.ledger.rows import now_ms
from gateway.ledger.schema import responses
from gateway.settings import ResponsesSettings

logger = logging.getLogger("tierline.responses")

PATIENCE_S: Final = 5.0
PURGE_INTERVAL_S: Final = 600.0
FIRST_PURGE_S: Final = 60.0  # a process that starts has better things to do
# Reads at once: the others wait, so that the ledger never lacks a connection.
_READERS: Final = 4
_BATCH: Final = 64
# Conversations that one transaction deletes.
_PURGED_AT_ONCE: Final = 100
_DAY_MS: Final = 86_400_000
_T = TypeVar("_T")

_LATEST: Final = func.max(responses.c.created_ms)
_TOTAL: Final = select(func.coalesce(func.sum(responses.c.body_bytes), 0))
_CONVERSATIONS: Final = select(responses.c.conversation_id, func.sum(responses.c.body_bytes)).group_by(
    responses.c.conversation_id
)


class StoreUnavailable(Exception):
    """The database did not do it, or not in time."""


class ConversationGone(Exception):
    """An earlier answer of a conversation is not there any more; `id` names it."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class Body(msgspec.Struct):
    """What a row holds: the answer as the client got it, and the items of input that were new with it."""

    response: Json
    input: list[Json]


class Kept(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `total_bytes` and `total_items` are those of its conversation up to and with it."""

    id: str
    conversation_id: str
    previous_id: str | None
    project_id: str
    created_ms: int
    body_bytes: int
    total_bytes: int
    total_items: int
    body: bytes

    def read(self) -> Body:
        return _decoder.decode(self.body)


_decoder = msgspec.json.Decoder(Body)


class ResponseStore:
    """The answers of all projects. `start` it, `stop` it; it belongs to one event loop."""

    def __init__(self, database: Database, settings: ResponsesSettings) -> None:
        self.enabled = settings.keep_days > 0
        self._database = database
        self._keep_ms = settings.keep_days * _DAY_MS
        self._max_bytes = settings.max_bytes
        self._waiting: list[tuple[Kept, asyncio.Future[None]]] = []
        self._arrived = asyncio.Event()
        self._purge_due = asyncio.Event()
        self._readers = asyncio.Semaphore(_READERS)
        self._since_purge = 0  # bytes put
        self._failing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._tasks = [
            asyncio.create_task(self._write(), name="responses-write"),
            asyncio.create_task(self._purge_often(), name="responses-purge"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def put(self, kept: Kept) -> None:
        """Keep an answer. Raises StoreUnavailable."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((kept, done))
        self._arrived.set()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await done
        except TimeoutError:
            raise StoreUnavailable("the database does not answer") from None
        self._since_purge += kept.body_bytes
        if self._since_purge > self._max_bytes // 16:
            self._purge_due.set()

    async def get(self, project_id: str, id: str) -> Kept | None:
        """The answer, if it is there and the project's. Raises StoreUnavailable."""

        async def find(connection: AsyncConnection) -> Kept | None:
            row = (await connection.execute(_one(project_id, id))).one_or_none()
            return None if row is None else Kept(**row._asdict())

        return await self._read(find)

    async def conversation(self, last: Kept) -> list[Body]:
        """The answers that led to `last`, the first one first, and `last` itself.

        Raises:
            ConversationGone: one of them was deleted.
            StoreUnavailable: the database did not say.
        """

        async def find(connection: AsyncConnection) -> list[Body]:
            chain = _chain(last)
            query = select(responses.c.body, chain.c.previous_id).join_from(
                chain, responses, responses.c.id == chain.c.id
            )
            rows = (await connection.execute(query.order_by(chain.c.depth.desc()))).all()
            missing = rows[0].previous_id if rows else last.id
            if missing is not None:
                raise ConversationGone(missing)
            return [_decoder.decode(row.body) for row in rows]

        return await self._read(find)

    async def remove(self, project_id: str, id: str) -> bool:
        """Delete an answer; False if it is not there or another's. Raises StoreUnavailable."""
        own = (responses.c.id == id) & (responses.c.project_id == project_id)

        async def remove() -> bool:
            async with self._database.write() as connection:
                return (await connection.execute(delete(responses).where(own))).rowcount > 0

        return await self._in_time(remove)

    async def purge(self) -> int:
        """Delete conversations whose time is over, and the oldest of those that are too much.

        Returns:
            How many answers are gone.
        """
        gone = 0
        while found := await self._delete_expired():
            gone += found
        while await self._excess() and (found := await self._make_room()):
            gone += found
        return gone

    async def _delete_expired(self) -> int:
        expired = _CONVERSATIONS.having(now_ms() - self._keep_ms >= _LATEST).limit(_PURGED_AT_ONCE)
        async with self._database.write() as connection:
            ids = list((await connection.execute(expired)).scalars())
            return await _delete(connection, ids)

    async def _excess(self) -> int:
        """Bytes over `max_bytes`."""
        async with self._database.read() as connection:
            return max(0, int(await connection.scalar(_TOTAL) or 0) - self._max_bytes)

    async def _make_room(self) -> int:
        """Choose and delete in one transaction, so that two processes at it do not delete twice as much."""
        ids: list[str] = []
        async with self._database.write() as connection:
            excess = int(await connection.scalar(_TOTAL) or 0) - self._max_bytes
            oldest = _CONVERSATIONS.order_by(_LATEST, responses.c.conversation_id).limit(_PURGED_AT_ONCE)
            for id, size in (await connection.execute(oldest)).all():
                if excess > 0:
                    ids.append(id)
                    excess -= int(size)
            return await _delete(connection, ids)

    async def _purge_often(self) -> None:
        pause_s = FIRST_PURGE_S
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._purge_due.wait(), pause_s)
            pause_s = PURGE_INTERVAL_S
            try:
                if gone := await self.purge():
                    logger.info("%d kept answers are gone: their time was over, or there were too many", gone)
            except Exception as error:  # likewise: without it they would stay for ever
                expected = isinstance(error, SQLAlchemyError | OSError)
                text = "kept answers whose time is over could not be deleted: %s"
                logger.warning(text, _reason(error), exc_info=None if expected else error)
            self._since_purge = 0
            self._purge_due.clear()

    async def _write(self) -> None:
        """Store what waits, all of it at once, for as long as the process lives."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while batch := self._take():
                failure: StoreUnavailable | None = None
                try:
                    await self._in_time(partial(self._insert, [kept for kept, _ in batch]))
                except StoreUnavailable as error:
                    failure = error
                except Exception:  # this loop is the only way in: it must outlive whatever it is
                    logger.exception("answers could not be kept")
                    failure = StoreUnavailable("a fault of the gateway")
                self._tell(failure)
                for _, done in batch:
                    if not done.done():
                        done.set_exception(failure) if failure else done.set_result(None)

    def _take(self) -> list[tuple[Kept, asyncio.Future[None]]]:
        batch, self._waiting = self._waiting[:_BATCH], self._waiting[_BATCH:]
        return [(kept, done) for kept, done in batch if not done.done()]  # nobody waits for the others any more

    async def _insert(self, rows: Sequence[Kept]) -> None:
        async with self._database.write() as connection:
            await connection.execute(insert(responses), [msgspec.structs.asdict(kept) for kept in rows])

    async def _read(self, find: Callable[[AsyncConnection], Awaitable[_T]]) -> _T:
        async def work() -> _T:
            async with self._readers, self._database.read() as connection:
                return await find(connection)

        return await self._in_time(work)

    @staticmethod
    async def _in_time(work: Callable[[], Awaitable[_T]]) -> _T:
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await work()
        except TimeoutError:
            raise StoreUnavailable("the database does not answer") from None
        except (SQLAlchemyError, OSError) as error:
            raise StoreUnavailable(_reason(error)) from error

    def _tell(self, failure: StoreUnavailable | None) -> None:
        """Log the first failure of a row, and its end."""
        if failure is not None and not self._failing:
            logger.error("answers are not kept, the database does not take them: %s", failure)
        elif failure is None and self._failing:
            logger.info("answers are kept again")
        self._failing = failure is not None


def _one(project_id: str, id: str) -> Select[Any]:
    return select(responses).where(responses.c.id == id, responses.c.project_id == project_id)


def _chain(last: Kept) -> CTE:
    """Ids from `last` to the first answer of its conversation, numbered by `depth`."""
    first = select(responses.c.id, responses.c.previous_id, literal(0).label("depth")).where(responses.c.id == last.id)
    chain = first.cte("chain", recursive=True)
    older = responses.alias("older")
    step = select(older.c.id, older.c.previous_id, chain.c.depth + 1)
    own = (older.c.id == chain.c.previous_id) & (older.c.project_id == last.project_id)
    return chain.union_all(step.join_from(chain, older, own))


async def _delete(connection: AsyncConnection, conversations: Sequence[str]) -> int:
    found = await connection.execute(delete(responses).where(responses.c.conversation_id.in_(conversations)))
    return found.rowcount


def _reason(error: BaseException) -> str:
    """The driver's message without the statement and its parameters, which hold what customers wrote."""
    return str(error.orig) if isinstance(error, DBAPIError) else type(error).__name__
