"""Moves pages to and from stores in threads, so that the engine's loop never waits for memory, disk or network.

What waits to be written is bounded in bytes: beyond that, pages are not kept. A store that fails is left alone for a
while, longer each time. How long a page takes to come is measured, so that one that computes faster need not ask.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from engine.transfer.format import PageFormat, PageName, PageRefused
from engine.transfer.store import PageStore, StoreFailed

log = logging.getLogger("engine.transfer")

MOST_QUEUED_BYTES = 128 << 20
_PAUSE_S = (1.0, 60.0)  # least and most
_SLOW_S = 0.5  # a store that has not answered for so long is not well
_WEIGHT = 0.2  # of the newest in a moving average
_TRY_AGAIN_S = 30.0  # what did not pay may pay now
_READERS = 4
_SAVED_AT_ONCE = 16
_CLOSE_S = 2.0


@dataclass(slots=True)
class TierCounts:
    """Cumulative, in pages but for the last."""

    loaded: int = 0
    missing: int = 0  # asked for, once per load: nothing behind it is asked for
    refused: int = 0  # damaged, or not what was asked for
    saved: int = 0
    dropped: int = 0  # to be saved, but the store was too slow, or away
    failures: int = 0

    def as_dict(self) -> dict[str, int]:
        return {
            "loaded": self.loaded,
            "missing": self.missing,
            "refused": self.refused,
            "saved": self.saved,
            "dropped": self.dropped,
            "failures": self.failures,
        }


class Load:
    """Pages that are being fetched, in the order of their chain: a thread brings them, the engine's loop takes them."""

    def __init__(self, names: Sequence[PageName], started: float, most_untaken: int) -> None:
        """`most_untaken`: pages that are fetched ahead of the loop."""
        self.names = names
        self.started = started
        self.num_brought = 0
        self.done = False
        self.given_up = False
        self.asking: Tier | None = None  # which is being asked
        self._most_untaken = most_untaken
        self._untaken: list[memoryview] = []
        self._change = threading.Condition()

    def bring(self, contents: Sequence[memoryview]) -> None:
        """The next pages."""
        with self._change:
            self._untaken += contents
            self.num_brought += len(contents)

    def wait_for_room(self) -> None:
        """Wait until the loop has taken what was brought, or nobody wants more."""
        with self._change:
            while len(self._untaken) >= self._most_untaken and not self.given_up:
                self._change.wait()

    def take(self) -> list[memoryview]:
        """What was brought since this was called last."""
        with self._change:
            taken, self._untaken = self._untaken, []
            self._change.notify()
        return taken

    def give_up(self) -> None:
        """Nobody wants more."""
        with self._change:
            self.given_up = True
            self._change.notify()


class Tier:
    """A store, how well it does, and what waits to be saved there."""

    def __init__(
        self,
        store: PageStore,
        page_format: PageFormat,
        *,
        most_queued_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`most_queued_bytes`: what may wait to be saved, by default `MOST_QUEUED_BYTES`; the rest is dropped."""
        self.store = store
        self._most_queued_bytes = most_queued_bytes
        self.counts = TierCounts()
        self._format = page_format
        self._clock = clock
        self._lock = threading.Lock()  # of everything below, and of the counts
        self._queue: SimpleQueue[tuple[PageName, bytes] | None] = SimpleQueue()
        self.queued_bytes = 0  # waiting to be saved
        self._given = 0  # pages, ever
        self._dealt_with = 0  # of them: saved or dropped
        self._progress = threading.Condition(self._lock)  # of `_dealt_with`
        self._failures_in_a_row = 0
        self._paused_until = 0.0
        self._seconds_per_page: float | None = None
        self._next_trial = 0.0
        self._writer: threading.Thread | None = None  # from the first page on

    @property
    def is_up(self) -> bool:
        """Whether it may be asked: it has not failed lately."""
        return self._clock() >= self._paused_until

    def pays(self, seconds_to_compute: float | None) -> bool:
        """Whether a page comes sooner than it is computed, as far as either is known; now and then it is tried."""
        with self._lock:
            if seconds_to_compute is None or self._seconds_per_page is None:
                return True
            return self._seconds_per_page < seconds_to_compute or self._clock() >= self._next_trial

    # --- to the store ------------------------------------------------------------------------------------------------

    def room(self, names: Sequence[PageName]) -> list[int]:
        """Which of these pages should be given to `save` now: indices. The others count as dropped or are there."""
        wanted = [i for i, name in enumerate(names) if not self.store.holds(name.digest)]
        with self._lock:
            most = MOST_QUEUED_BYTES if self._most_queued_bytes is None else self._most_queued_bytes
            free = most - self.queued_bytes if self.is_up else 0
            taken = wanted[: max(0, free) // self._format.page_bytes]
            self.counts.dropped += len(wanted) - len(taken)
        return taken

    def save(self, name: PageName, content: bytes) -> None:
        """Keep a page, some time."""
        if self._writer is None:
            self._writer = threading.Thread(target=self._write, name=f"{self.store.name} writer", daemon=True)
            self._writer.start()
        with self._lock:
            self.queued_bytes += len(content)
            self._given += 1
        self._queue.put((name, content))

    def settle(self, keys: Sequence[bytes], seconds: float) -> None:
        """Wait, so long at most, until these are in the store, which knows what it holds, as far as they were given to
        `save` until now. In a thread."""
        with self._progress:
            given = self._given
            self._progress.wait_for(lambda: self._dealt_with >= given or all(map(self.store.holds, keys)), seconds)

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            items, last = [item], False
            while len(items) < _SAVED_AT_ONCE and not last:
                try:
                    more = self._queue.get_nowait()
                except Empty:
                    break
                last = more is None
                if more is not None:
                    items.append(more)
            self._save(items)
            if last:
                return

    def _save(self, items: Sequence[tuple[PageName, bytes]]) -> None:
        saved = 0
        try:
            if self.is_up:
                self.store.save([(name.digest, self._format.pack(name, content)) for name, content in items])
                saved = len(items)
                self._worked()
        except StoreFailed as error:
            self._failed(str(error))
        except Exception:
            log.exception("saving pages failed")
        with self._lock:
            self.queued_bytes -= sum(len(content) for _, content in items)
            self.counts.saved += saved
            self.counts.dropped += len(items) - saved
            self._dealt_with += len(items)
            self._progress.notify_all()

    # --- from the store ----------------------------------------------------------------------------------------------

    def fetch(self, load: Load, brought: Callable[[], None]) -> None:
        """Bring a load what is here of what it lacks, up to the first page that is not. In a thread.

        `brought` is called when there is something to take and more may come.
        """
        load.asking = self
        while load.num_brought < len(load.names) and not load.given_up:
            names = load.names[load.num_brought :][: self.store.batch]
            start = self._clock()
            try:
                values = self.store.load([name.digest for name in names])
            except StoreFailed as error:
                self._failed(str(error))
                return
            contents = self._unpack(names, values)
            self._worked(len(contents), self._clock() - start)
            load.bring(contents)
            if len(contents) < len(names):
                return
            brought()
            load.wait_for_room()

    def _unpack(self, names: Sequence[PageName], values: Sequence[bytes | None]) -> list[memoryview]:
        contents: list[memoryview] = []
        for name, value in zip(names, values, strict=True):
            if value is None:
                with self._lock:
                    self.counts.missing += 1
                break
            try:
                contents.append(self._format.unpack(name, value))
            except PageRefused as error:
                log.warning("a page from %s is not used: %s", self.store.name, error)
                with self._lock:
                    self.counts.refused += 1
                try:
                    self.store.discard(name.digest)
                except StoreFailed as failure:
                    self._failed(str(failure))
                break
        return contents

    def kept_waiting(self, seconds: float) -> None:
        """Nobody waits any longer for a page that has not come in this time."""
        self._learn(seconds)
        if seconds >= _SLOW_S:
            self._failed(f"no answer in {seconds:.1f} s")

    # --- how well it does --------------------------------------------------------------------------------------------

    def _learn(self, seconds_per_page: float) -> None:
        with self._lock:
            known = self._seconds_per_page
            self._seconds_per_page = seconds_per_page if known is None else known + _WEIGHT * (seconds_per_page - known)
            self._next_trial = self._clock() + _TRY_AGAIN_S

    def _worked(self, loaded: int = 0, seconds: float = 0.0) -> None:
        with self._lock:
            self._failures_in_a_row = 0
            self.counts.loaded += loaded
        if loaded:
            self._learn(seconds / loaded)

    def _failed(self, why: str) -> None:
        with self._lock:
            self.counts.failures += 1
            self._failures_in_a_row += 1
            least, most = _PAUSE_S
            pause = min(most, least * 2 ** (self._failures_in_a_row - 1))
            self._paused_until = self._clock() + pause
        log.warning("%s: %s; not asked again for %.0f s", self.store.name, why, pause)

    def close(self) -> None:
        """End the writer, after what it has."""
        if self._writer is not None:
            self._queue.put(None)
            self._writer.join(timeout=_CLOSE_S)
        if self._writer is None or not self._writer.is_alive():
            self.store.close()


class Courier:
    """Fills loads in threads; says when there is something to take. All methods are for the engine's loop."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[tuple[Load, Sequence[Tier]] | None] = SimpleQueue()
        self._running: set[Load] = set()
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)
        os.set_blocking(self._woken, False)
        # Daemons: a store that hangs does not keep the process from ending.
        self._threads = [threading.Thread(target=self._run, name=f"pages {i}", daemon=True) for i in range(_READERS)]
        for thread in self._threads:
            thread.start()

    @property
    def is_stuck(self) -> bool:
        """All threads wait for what nobody wants any more: a further load would not even begin."""
        return sum(load.given_up for load in self._running.copy()) >= _READERS

    def fileno(self) -> int:
        """Readable when a load has brought something, or is done."""
        return self._wake

    def ask(self, load: Load, tiers: Sequence[Tier]) -> None:
        """Fill a load from these tiers, one after the other."""
        self._asked.put((load, tiers))

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            load, tiers = asked
            self._running.add(load)
            try:
                for tier in tiers:
                    tier.fetch(load, self._notify)
            except Exception:  # a bug; whoever waits must not wait for ever
                log.exception("loading pages failed")
            self._running.discard(load)
            load.done = True
            self._notify()

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full, so it is readable anyway
            os.write(self._woken, b"\0")

    def drain(self) -> None:
        """Make `fileno` wait for what comes next."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1 << 16)

    def close(self) -> None:
        """End the threads that can be ended now."""
        for _ in self._threads:
            self._asked.put(None)
        for thread in self._threads:
            thread.join(timeout=_CLOSE_S)
