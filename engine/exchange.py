"""An exchange of weights while the engine serves: what is where, from the order to its end.

    take back what waits → let what runs end → end the core → start one with the new weights
                                                              └ they do not load: start it with the old ones again

Requests that were taken back, and those that come meanwhile, are held and sent to the core that comes of it. The client
does all this; here is what it must remember.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence

from engine.config import EngineConfig
from engine.messages import Add, Ready
from engine.text.answer import EngineError


class ReloadFailed(EngineError):
    """The weights were not exchanged; those from before serve on."""


class Exchange:
    """`held`: what the next core will be sent. `done`: that core, or why it is one with the old weights."""

    def __init__(self, old: EngineConfig, new: EngineConfig) -> None:
        self.held: list[Add] = []
        self.done: asyncio.Future[Ready] = asyncio.get_running_loop().create_future()
        self._old, self._new = old, new
        self._recalled: asyncio.Future[Collection[int]] = asyncio.get_running_loop().create_future()
        self._left = False  # the core with the old weights has ended as it was told to
        self._failure: str | None = None  # why the new ones do not load

    @property
    def held_ids(self) -> frozenset[int]:
        return frozenset(request.request_id for add in self.held for request in add.requests)

    def parties(self, adds: Mapping[int, Add]) -> list[Add]:
        """Requests that came together and none of which has ended. `adds`: what was sent for each that is open."""
        whole = {id(add): add for add in adds.values()}
        return [add for add in whole.values() if all(request.request_id in adds for request in add.requests)]

    async def take_back(self, parties: Sequence[Add]) -> None:
        """Hold those of the parties that the core gives back."""
        found = set(await self._recalled)
        self.held[:0] = [add for add in parties if all(request.request_id in found for request in add.requests)]

    def on_recalled(self, request_ids: Collection[int]) -> None:
        if not self._recalled.done():
            self._recalled.set_result(request_ids)

    def on_ready(self, ready: Ready) -> None:
        """A core serves."""
        if self._failure is not None:
            self.done.set_exception(ReloadFailed(f"The new weights cannot be served: {self._failure}"))
        elif self._left:
            self.done.set_result(ready)

    def next_config(self, reason: str, *, as_told: bool) -> EngineConfig | None:
        """What to start at once when a core has ended; None: it was lost, which is not the exchange's affair."""
        if as_told and not self._left:
            self._left = True
            return self._new
        if self._left and self._failure is None:
            self._failure = reason
            return self._old
        return None

    def lose(self) -> frozenset[int]:
        """A core is gone, and with it what it had. Returns the requests that it has nothing to do with."""
        self.on_recalled(())
        return self.held_ids

    def end(self, error: EngineError) -> None:
        """There will be no further core."""
        if not self.done.done():
            self.done.set_exception(error)
