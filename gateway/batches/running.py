"""One batch at work in this process: its lines are checked, asked, and made into files.

    validating ──a line is wrong──► failed
      └─► in_progress ─► every line asked, several at once ─► finalizing ─► completed
            └─ cancelled, out of time, or its key is gone: what was done is kept ─► cancelled, expired, failed

Whatever stops it (a kill, another process that took over), the next one goes on with the lines that have no result.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Coroutine
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import msgspec

from gateway.batches.checking import Line as Asking
from gateway.batches.checking import check, read_line
from gateway.batches.ending import end
from gateway.batches.line import Line
from gateway.batches.record import Batch, Fault, Status
from gateway.batches.results import Results
from gateway.batches.rooms import Rooms
from gateway.batches.store import BatchStore
from gateway.dialects.errors import GatewayError
from gateway.files.store import FileStore, lines_of
from gateway.ledger.rows import now_ms

if TYPE_CHECKING:
    from gateway.services import Services

logger = logging.getLogger("tierline.batches")

# Why a batch does not go on here. After the first two somebody else does.
Why = Literal["shutdown", "lost", "cancelled", "expired", "key"]
# A line that a server failed on is asked so often; one that no server was there for, as long as the batch has time.
MOST_TRIES: Final = 5
_LONGEST_WAIT_S: Final = 60.0
# Nobody was there to answer it, or there was no room: that passes, and says nothing about the line.
_NOT_ASKED: Final = frozenset(
    ("backend_unavailable", "backend_overloaded", "backend_rate_limited", "gateway_overloaded", "ledger_unavailable",
     "rate_limit_exceeded", "responses_unavailable", "shutting_down")
)  # fmt: skip
_FINAL: Final = frozenset(("budget_exhausted", "no_model", "not_in_cache"))
_ENDS: Final[dict[Why, Status]] = {"cancelled": "cancelled", "expired": "expired", "key": "failed"}
_T = TypeVar("_T")


class Tools(msgspec.Struct, frozen=True):
    """What every batch of this process works with."""

    services: Services
    store: BatchStore
    files: FileStore
    results: Results
    rooms: Rooms
    owner: str


class Run:
    """A batch whose lease this process has. `run` it once; `stop` it at any time."""

    def __init__(self, tools: Tools, batch: Batch) -> None:
        self.batch = batch
        self.done = 0  # lines that have a result
        self._tools = tools
        self._why: Why | None = None
        self._step: asyncio.Task[Any] | None = None
        self._asked: set[Line] = set()

    def stopped(self) -> bool:
        """Whether it does not go on here."""
        return self._why is not None

    def stop(self, why: Why) -> None:
        """End what is under way; the first reason stands, but for a lease that is lost."""
        self._why = why if self._why is None or why == "lost" else self._why
        if self._step is not None and not self._step.cancelling():
            for line in self._asked:
                line.stop()
            self._step.cancel()

    def hold(self) -> None:
        """Begin no further line: the process is about to stop."""
        self._why = self._why or "shutdown"

    async def run(self) -> None:
        """Take the batch as far as it goes."""
        if self.batch.status in ("validating", "in_progress"):
            if self.batch.expires_ms <= now_ms():
                self._why = "expired"
            elif self._tools.services.keys.known(self.batch.key_id) is None:
                self._why = "key"
        if self.batch.status == "validating" and not await self._checked():
            return
        if self.batch.status == "in_progress":
            await self._do(self._ask_all())
        if self._why in ("shutdown", "lost"):
            return
        if self._why is None and self.batch.status == "in_progress" and not await self._finalizing():
            return
        to: Status = "completed" if self._why is None else _ENDS[self._why]
        if self.batch.status == "cancelling":
            to = "cancelled"
        faults = []
        if to == "failed":
            text = "The API key of this batch was revoked or has expired; what was not asked by then is not."
            faults = [Fault("key_not_in_force", text)]
        await end(self._tools.files, self._tools.store, self._tools.results, self.batch, self._tools.owner, to, faults)
        logger.info("batch %s is %s", self.batch.id, to)

    async def _checked(self) -> bool:
        """Whether its lines can be asked, or it is to end without."""
        tools, batch = self._tools, self.batch
        most = tools.services.settings.batches.max_requests
        checked = await self._do(check(self._lines(), batch.endpoint, most))
        if checked is None:  # it was stopped
            return self._why not in ("shutdown", "lost")
        now = now_ms()
        if checked.faults:
            errors = msgspec.json.encode(checked.faults).decode()
            values = {"errors": errors, "ended_ms": now, "lease_owner": "", "lease_until_ms": 0}
            await tools.store.move(batch, tools.owner, "failed", **values)
            logger.info("batch %s has failed: %d faults in its lines", batch.id, len(checked.faults))
            return False
        moved = await self._move("in_progress", in_progress_ms=now, total=checked.total)
        if not moved:  # somebody asked for its end meanwhile
            found = await tools.store.get(batch.id)
            if found is None or found.status != "cancelling":
                return False
            self.batch = found
        return True

    async def _finalizing(self) -> bool:
        """All lines have a result. False: the batch is another's by now."""
        if await self._move("finalizing", finalizing_ms=now_ms()):
            return True
        found = await self._tools.store.get(self.batch.id)  # its end was asked for at the last moment
        if found is None or found.status != "cancelling" or found.lease_owner != self._tools.owner:
            return False
        self.batch = found
        return True

    async def _move(self, to: Status, **values: Any) -> bool:
        if not await self._tools.store.move(self.batch, self._tools.owner, to, **values):
            return False
        self.batch = msgspec.structs.replace(self.batch, status=to, **values)
        return True

    async def _do(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """A step that `stop` ends; None if it did."""
        if self.stopped():
            work.close()
            return None
        step = self._step = asyncio.create_task(work)
        try:
            result: _T = await step
            return result
        except asyncio.CancelledError:
            if not self.stopped() or not step.done():  # it is this task that is cancelled
                step.cancel()
                raise
            return None
        finally:
            self._step = None

    def _lines(self) -> AsyncIterator[bytes | None]:
        most = self._tools.services.settings.server.max_body_bytes
        return lines_of(self._tools.files.content.read(self.batch.input_file_id), most)

    async def _ask_all(self) -> None:
        done = await self._tools.results.done(self.batch.id)
        self.done = len(done)
        left = self._left(done)
        turn = asyncio.Lock()
        many = self._tools.services.settings.batches.concurrency
        await asyncio.gather(*(self._work(left, turn) for _ in range(many)))

    async def _left(self, done: set[int]) -> AsyncIterator[Asking]:
        """The lines that have no result."""
        number = 0
        async for data in self._lines():
            number += 1
            if number not in done:
                asking = read_line(number, data, self.batch.endpoint)
                if asking is not None:
                    yield asking

    async def _work(self, left: AsyncIterator[Asking], turn: asyncio.Lock) -> None:
        """Ask one line after the other. What fails inside the gateway ends the batch here, for a while."""
        try:
            while not self.stopped():
                async with turn:
                    asking = await anext(left, None)
                if asking is None:
                    return
                await self._ask(asking)
        except Exception:
            self._why = self._why or "lost"
            raise

    async def _ask(self, asking: Asking) -> None:
        """Ask a line until it has a result, or the batch stops."""
        tools, tries, waits = self._tools, 0, 0
        counts = tools.services.metrics.batch_lines
        while not self.stopped():
            principal = tools.services.keys.known(self.batch.key_id)
            if principal is None:
                self.stop("key")
                return
            line = Line(tools.services, tools.rooms, self.batch, asking)
            self._asked.add(line)
            try:
                outcome = await line.ask(principal, tools.results.put)
            finally:
                self._asked.discard(line)
            if outcome is None:  # it was stopped
                return
            if outcome.error is None:
                self._count("completed")
                return
            waits += 1
            tries += outcome.error.code not in _NOT_ASKED
            if not _passes(outcome.error, tries):
                assert outcome.result is not None
                await tools.results.put(outcome.result)
                self._count("failed")
                return
            counts.labels("asked_again").inc()
            await asyncio.sleep(_wait_s(outcome.error, waits))

    def _count(self, outcome: str) -> None:
        self.done += 1
        self._tools.services.metrics.batch_lines.labels(outcome).inc()


def _passes(error: GatewayError, tries: int) -> bool:
    """Whether a line that ended so is asked again."""
    if error.code in _NOT_ASKED:
        return True
    return error.status >= 500 and error.code not in _FINAL and tries < MOST_TRIES


def _wait_s(error: GatewayError, waits: int) -> float:
    """Longer every time, and never shorter than the server says."""
    said = error.headers.get("retry-after", "")
    least = float(said) if said.isdigit() else 0.0
    return min(_LONGEST_WAIT_S, max(least, 0.5 * 2.0 ** min(waits, 8) * random.uniform(0.5, 1.0)))
