"""The core's adapters: loaded in a thread, put in place between two steps, dropped when nobody uses them any more.

    LoadAdapter ──→ room for it? ──→ a thread reads it ──→ tried out, in place
                       └ waits for those that leave
    UnloadAdapter ──→ leaving ── its last request ends ──→ gone

So reading holds up no step, and no request loses its adapter while it runs. What was read is tried out on a few tokens
before anybody gets it: values may be finite, and what the model makes of them not.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Generic, Protocol, TypeVar

from engine.config import AdapterEntry
from engine.loader.errors import ModelFileError
from engine.messages import AdapterFailed, AdapterGone, AdapterLoaded

log = logging.getLogger("engine.adapters")


class LoadedAdapter(Protocol):
    """What the core must know of an adapter. `digest`: of its content; equal ones may share cached pages."""

    @property
    def digest(self) -> bytes: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...


A = TypeVar("A", bound=LoadedAdapter)
_DAMAGED = "The adapter is damaged or was trained in vain: copy it again or use another"


def no_adapters() -> AdapterStore[LoadedAdapter]:
    """The store of an engine that takes none."""

    def never(entry: AdapterEntry) -> LoadedAdapter:
        raise AssertionError(f"{entry} was let in")

    return AdapterStore({}, never, lambda _: None, 0)


class AdapterStore(Generic[A]):
    """At most `most` adapters that serve or will, and with `spare` one more in memory: the one that makes room."""

    def __init__(
        self,
        loaded: dict[int, A],
        load: Callable[[AdapterEntry], A],
        probe: Callable[[int], str | None],
        most: int,
        *,
        spare: bool = False,
    ) -> None:
        """`loaded`: by id, read by the runner and the scheduler. `load` is called in the thread; what it raises ends
        as a message. `probe`: called between two steps with the id of one that is in `loaded`; why it cannot serve."""
        self.loaded = loaded
        self._load = load
        self._probe = probe
        self._most = most
        self._room = most + spare
        self._waiting: deque[AdapterEntry] = deque()  # for others to leave
        self._pending: dict[int, AdapterEntry] = {}  # in the thread
        self._leaving: set[int] = set()
        self._done: SimpleQueue[tuple[AdapterEntry, A | str]] = SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="adapters")
        self._wake, self._woken = os.pipe()
        os.set_blocking(self._wake, False)

    def fileno(self) -> int:
        """Readable when `news` may have something."""
        return self._wake

    def ask(self, entry: AdapterEntry) -> None:
        """Have an adapter loaded, as soon as there is room for it; `news` tells how that ended."""
        coming = [*self._pending.values(), *self._waiting, entry]
        replaced = {one.replaces for one in coming}
        staying = self.loaded.keys() - self._leaving - replaced
        if len(staying | {one.adapter_id for one in coming}) > self._most:
            self._finish(entry, f"{self._most} adapters are loaded, as many as '--max-loras' allows. Unload one first")
            return
        self._waiting.append(entry)
        self._start()

    def load_now(self, entry: AdapterEntry) -> None:
        """Load an adapter in this thread, before there are steps; `news` tells of it.

        Raises ModelFileError as `load`, or where it cannot serve; but not for one that was there before: then `news`
        tells why it is missing.
        """
        result = self._loaded_or_why(entry) if entry.digest else self._load(entry)
        if not entry.digest and not isinstance(result, str) and (fault := self._try_out(entry, result)) is not None:
            raise ModelFileError(entry.path, fault, _DAMAGED)
        self._finish(entry, result)

    def _start(self) -> None:
        """Read those that wait, as far as there is room."""
        while self._waiting and len(self.loaded) + len(self._pending) < self._room:
            entry = self._waiting.popleft()
            self._pending[entry.adapter_id] = entry
            self._thread.submit(self._read, entry)

    def _read(self, entry: AdapterEntry) -> None:
        self._finish(entry, self._loaded_or_why(entry))

    def leave(self, adapter_id: int) -> None:
        """Drop an adapter as soon as nobody uses it, also one that is still being loaded."""
        self._leaving.add(adapter_id)

    def news(self, in_use: Callable[[], Iterable[int]]) -> list[AdapterLoaded | AdapterFailed | AdapterGone]:
        """Put in place what has been loaded, and drop what may go. `in_use`: the adapters of living requests."""
        told: list[AdapterLoaded | AdapterFailed | AdapterGone] = []
        for entry, result in self._take():
            self._pending.pop(entry.adapter_id, None)
            told.append(self._put_in_place(entry, result))
        if self._leaving - self._pending.keys():
            going = self._leaving - self._pending.keys() - set(in_use())
            self._leaving -= going
            told += [AdapterGone(i) for i in sorted(going) if self.loaded.pop(i, None) is not None]
        self._start()
        return told

    def _loaded_or_why(self, entry: AdapterEntry) -> A | str:
        try:
            adapter = self._load(entry)
        except ModelFileError as error:
            return str(error)
        except Exception as error:
            log.exception("adapter %s cannot be loaded", entry.path)
            return f"{entry.path}: {type(error).__name__}: {error}"
        if entry.digest and adapter.digest.hex() != entry.digest:
            return f"{entry.path}: its content is not what was loaded under this name any more. Load it anew"
        return adapter

    def _put_in_place(self, entry: AdapterEntry, result: A | str) -> AdapterLoaded | AdapterFailed:
        if isinstance(result, str):
            return AdapterFailed(entry.adapter_id, result)
        if entry.adapter_id not in self.loaded and (fault := self._try_out(entry, result)) is not None:
            return AdapterFailed(entry.adapter_id, f"{entry.path}: {fault}. {_DAMAGED}")
        return AdapterLoaded(entry.adapter_id, result.digest.hex(), result.rank, result.num_bytes)

    def _try_out(self, entry: AdapterEntry, adapter: A) -> str | None:
        """Put an adapter in place; why it is not there, or None."""
        self.loaded[entry.adapter_id] = adapter
        fault = self._probe(entry.adapter_id)
        if fault is not None:
            del self.loaded[entry.adapter_id]
        return fault

    def _finish(self, entry: AdapterEntry, result: A | str) -> None:
        self._done.put((entry, result))
        os.write(self._woken, b"\0")

    def _take(self) -> Iterable[tuple[AdapterEntry, A | str]]:
        try:
            os.read(self._wake, 1 << 16)
        except BlockingIOError:
            return
        while True:
            try:
                yield self._done.get_nowait()
            except Empty:
                return
