"""The HTTP side's adapters, by name: which are served, and how they come and go while requests run.

A name stands for one adapter at a time; the core knows numbers only, and never the same number twice. So when a name
gets another adapter, requests that run keep theirs and new ones take the new one, without either waiting.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from engine.adapters.metrics import AdapterMetrics
from engine.config import AdapterEntry
from engine.messages import AdapterFailed, AdapterGone, AdapterLoaded, LoadAdapter, UnloadAdapter
from engine.text.answer import AdapterMissing, EngineError

log = logging.getLogger("engine.adapters")

Send = Callable[[LoadAdapter | UnloadAdapter], None]


class AdapterRefused(EngineError):
    """An adapter cannot be loaded, or its name is taken; the message says what to do."""


@dataclass(slots=True)
class ServedAdapter:
    """`rank` and `num_bytes` are known, and `entry` has a digest, once it is loaded."""

    name: str
    entry: AdapterEntry
    created: int  # seconds since 1970
    rank: int = 0
    num_bytes: int = 0

    def loaded(self, message: AdapterLoaded) -> None:
        self.rank, self.num_bytes = message.rank, message.num_bytes
        self.entry = msgspec.structs.replace(self.entry, digest=message.digest)


class AdapterRegistry:
    """All names. It outlives the core: a new one is told to load what the last one had."""

    def __init__(self, folders: Mapping[str, str], send: Send, metrics: AdapterMetrics) -> None:
        """`folders`: by name, for the core to load when it starts. `send`: to the core, for as long as there is one."""
        self._send = send
        self._metrics = metrics
        self._ids = itertools.count(1)
        self._served = {name: self._new(name, path, bounded=False) for name, path in folders.items()}
        self._loading: dict[int, tuple[ServedAdapter, asyncio.Future[AdapterLoaded]]] = {}
        self._going: dict[int, asyncio.Future[None]] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._served

    def __iter__(self) -> Iterator[ServedAdapter]:
        return iter(self._served.values())

    def id_of(self, name: str | None) -> int:
        """The core's number of an adapter; 0 of none.

        Raises:
            AdapterMissing: it is not served any more.
        """
        if name is None:
            return 0
        if name not in self._served:
            raise AdapterMissing(f"The adapter '{name}' is not served any more.")
        return self._served[name].entry.adapter_id

    def entries(self) -> tuple[AdapterEntry, ...]:
        """What a new core is to load."""
        return tuple(adapter.entry for adapter in self)

    async def load(self, name: str, path: str, *, replace: bool) -> ServedAdapter:
        """Load the adapter in `path` and serve it as `name`, in place of the one that is there if `replace`.

        Raises:
            AdapterRefused: it cannot be loaded, or the name is taken.
            EngineDown: the core was lost meanwhile.
        """
        if any(adapter.name == name for adapter, _ in self._loading.values()):
            raise AdapterRefused(f"An adapter '{name}' is being loaded already.")
        if name in self._served and not replace:
            raise AdapterRefused(f"An adapter '{name}' is served already: unload it first, or set 'load_inplace'.")
        adapter = self._new(name, path, bounded=True, replaces=self.id_of(name) if name in self._served else 0)
        future: asyncio.Future[AdapterLoaded] = asyncio.get_running_loop().create_future()
        self._loading[adapter.entry.adapter_id] = adapter, future
        self._send(LoadAdapter(adapter.entry))
        try:
            await future
        finally:
            self._loading.pop(adapter.entry.adapter_id, None)
        return adapter

    async def unload(self, name: str) -> None:
        """Serve `name` no more. Returns when the last request that runs with it has ended and its memory is free.

        Raises:
            AdapterMissing: there is no such adapter.
        """
        adapter = self._served.pop(name, None)
        if adapter is None:
            raise AdapterMissing(f"There is no adapter '{name}'.")
        self._metrics.forget(name)
        self._count()
        gone = self._going[adapter.entry.adapter_id] = asyncio.get_running_loop().create_future()
        self._send(UnloadAdapter(adapter.entry.adapter_id))
        await gone

    # --- news from the core --------------------------------------------------------------------------------------

    def receive(self, message: AdapterLoaded | AdapterFailed | AdapterGone) -> None:
        """Take over what the core tells of an adapter."""
        match message:
            case AdapterLoaded():
                self._on_loaded(message)
            case AdapterFailed(adapter_id, text):
                self._on_failed(adapter_id, text)
            case AdapterGone(adapter_id):
                if (gone := self._going.pop(adapter_id, None)) is not None and not gone.done():
                    gone.set_result(None)

    def lose(self, error: EngineError) -> None:
        """The core is gone, and all that it had not finished with it."""
        for _, future in self._loading.values():
            if not future.done():
                future.set_exception(error)
        self._loading.clear()
        for adapter_id in list(self._going):
            self.receive(AdapterGone(adapter_id))

    def _new(self, name: str, path: str, *, bounded: bool, replaces: int = 0) -> ServedAdapter:
        entry = AdapterEntry(adapter_id=next(self._ids), path=path, bounded=bounded, replaces=replaces)
        return ServedAdapter(name, entry, int(time.time()))

    def _count(self) -> None:
        """Of those that a core has loaded."""
        self._metrics.serving.set(sum(adapter.rank > 0 for adapter in self))

    def _on_loaded(self, message: AdapterLoaded) -> None:
        self._metrics.loads["loaded"].inc()
        for adapter in self:
            if adapter.entry.adapter_id == message.adapter_id:  # the core has started
                adapter.loaded(message)
                self._count()
                return
        asked = self._loading.pop(message.adapter_id, None)
        if asked is None or asked[1].done():  # whoever asked has given up
            self._send(UnloadAdapter(message.adapter_id))
            return
        adapter, future = asked
        adapter.loaded(message)
        if (replaced := self._served.get(adapter.name)) is not None:
            self._send(UnloadAdapter(replaced.entry.adapter_id))
        self._served[adapter.name] = adapter
        self._count()
        future.set_result(message)

    def _on_failed(self, adapter_id: int, text: str) -> None:
        self._metrics.loads["failed"].inc()
        asked = self._loading.pop(adapter_id, None)
        if asked is not None and not asked[1].done():
            asked[1].set_exception(AdapterRefused(text))
        for adapter in [adapter for adapter in self if adapter.entry.adapter_id == adapter_id]:
            log.error(
                "the adapter '%s' is not served any more: the core could not load it again: %s", adapter.name, text
            )
            del self._served[adapter.name]
            self._metrics.forget(adapter.name)
        self._count()
