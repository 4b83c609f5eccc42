"""Which batches this process works on: it takes those that nobody has, renews its leases, and hears of their ends.

Once a second, and at once when a client of this process makes or cancels one. A process that dies leaves its leases to
run out, after six seconds; one that stops gives them back.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from sqlalchemy.exc import DBAPIError

from gateway.batches.record import Batch
from gateway.batches.results import Results
from gateway.batches.rooms import Rooms
from gateway.batches.running import Run, Tools
from gateway.batches.store import BatchStore
from gateway.files.content import StorageFull
from gateway.files.store import DAY_MS, UNFINISHED, FilesUnavailable, reason
from gateway.ledger.rows import new_id, now_ms

if TYPE_CHECKING:
    from gateway.services import Services

logger = logging.getLogger("tierline.batches")

LOOK_S: Final = 1.0
MOST_AT_ONCE: Final = 16
# How long running lines may finish when the process stops, if the drain allows that much.
FINISH_S: Final = 5.0
_TIDY_S: Final = 60.0
# Before a batch is taken up again that failed inside the gateway.
_REST_MS: Final = 5_000


class Batches:
    """The batches of a process. `start` it, `close` it; it belongs to one event loop."""

    def __init__(self, services: Services) -> None:
        self.store = BatchStore(services.database)
        self._services = services
        self._results = Results(services.database)
        self._rooms = Rooms(services)
        self._tools = Tools(services, self.store, services.files, self._results, self._rooms, new_id())
        self._runs: dict[str, tuple[Run, asyncio.Task[None]]] = {}
        self._resting: dict[str, int] = {}  # until when, in ms
        self._look = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._failing = False
        services.metrics.batch_lines_running.set_function(lambda: self._rooms.running)

    def start(self) -> None:
        if not self._services.settings.batches.concurrency:
            return
        self._results.start()
        self._tasks = [
            asyncio.create_task(self._work(), name="batches"),
            asyncio.create_task(self._tidy(), name="batches-tidy"),
        ]

    async def close(self) -> None:
        """Let running lines finish for a moment, keep their answers, and give the batches to others."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        runs = list(self._runs.values())
        for run, _ in runs:
            run.hold()
        if runs:
            patience_s = min(FINISH_S, self._services.settings.server.drain_seconds)
            await asyncio.wait([task for _, task in runs], timeout=patience_s)
        for run, _ in runs:
            run.stop("shutdown")
        await asyncio.gather(*(task for _, task in runs), return_exceptions=True)
        await self._results.stop()
        if runs:
            with suppress(DBAPIError, OSError):
                await self.store.give_up(self._tools.owner)

    def look(self) -> None:
        """Something has changed: look now."""
        self._look.set()

    async def _work(self) -> None:
        while True:
            try:
                await self._look_after()
                self._tell(None)
            except (DBAPIError, OSError) as error:
                self._tell(error)
            except Exception:
                logger.exception("batches could not be looked after")
            self._look.clear()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), LOOK_S)

    async def _look_after(self) -> None:
        now = now_ms()
        if self._runs:
            mine = await self.store.renew(self._tools.owner)
            for id, (run, _) in self._runs.items():
                if id not in mine:
                    run.stop("lost")
                elif mine[id] == "cancelling":
                    run.stop("cancelled")
                elif mine[id] != "finalizing" and run.batch.expires_ms <= now:
                    run.stop("expired")
                elif mine[id] != "finalizing" and self._services.keys.known(run.batch.key_id) is None:
                    run.stop("key")
        unfinished = await self.store.unfinished()
        self._show(unfinished)
        if self._services.draining:
            for run, _ in self._runs.values():
                run.hold()
            return
        for batch in self._in_turn(unfinished, now):
            if len(self._runs) >= MOST_AT_ONCE:
                break
            taken = await self.store.take(batch.id, self._tools.owner)
            if taken is not None:
                run = Run(self._tools, taken)
                self._runs[taken.id] = run, asyncio.create_task(self._run(run), name=f"batch {taken.id}")

    def _in_turn(self, unfinished: list[Batch], now: int) -> list[Batch]:
        """Those that nobody has: of the projects that have the fewest at work first, then the oldest."""
        at_work = Counter(batch.project_id for batch in unfinished if batch.lease_until_ms >= now)
        free = [
            batch
            for batch in unfinished
            if batch.lease_until_ms < now and batch.id not in self._runs and self._resting.get(batch.id, 0) <= now
        ]
        return sorted(free, key=lambda batch: (batch.status != "cancelling", at_work[batch.project_id], batch.id))

    async def _run(self, run: Run) -> None:
        id = run.batch.id
        try:
            await run.run()
            self._resting.pop(id, None)
        except (DBAPIError, OSError, FilesUnavailable, StorageFull) as error:
            logger.error("batch %s rests: %s", id, reason(error))
            self._resting[id] = now_ms() + _REST_MS
        except Exception:
            logger.exception("batch %s rests: it failed inside the gateway", id)
            self._resting[id] = now_ms() + _REST_MS
        finally:
            del self._runs[id]
            with suppress(DBAPIError, OSError):
                await self.store.give_up(self._tools.owner, id)
            self.look()

    async def _tidy(self) -> None:
        keep_ms = self._services.settings.batches.keep_days * DAY_MS
        while True:
            await asyncio.sleep(_TIDY_S)
            try:
                await self.store.tidy(keep_ms)
            except (DBAPIError, OSError) as error:
                logger.warning("batches whose time is over could not be deleted: %s", reason(error))

    def _show(self, unfinished: list[Batch]) -> None:
        metrics, now = self._services.metrics, now_ms()
        by_status = Counter(batch.status for batch in unfinished)
        for status in UNFINISHED:
            metrics.batches.labels(status).set(by_status[status])
        oldest = min((batch.created_ms for batch in unfinished), default=now)
        metrics.batch_oldest.set((now - oldest) / 1000)
        left = sum(max(0, run.batch.total - run.done) for run, _ in self._runs.values())
        metrics.batch_lines_left.set(left)

    def _tell(self, error: Exception | None) -> None:
        """Log the first failure of a row, and its end."""
        if error is not None and not self._failing:
            logger.error("batches are not looked after, the database is away: %s", reason(error))
        elif error is None and self._failing:
            logger.info("batches are looked after again")
        self._failing = error is not None
