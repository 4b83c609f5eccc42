"""Where conversations are: in this process, and where `storage.redis_url` is set in Redis for all of them.

Bounded: the pins longest without a turn go first, and each has an end. Nothing waits for a Redis that is away: then
this process's own pins count, and the newer of two is the one that counts when it is back. Which is newer does not
depend on clocks alone, which hosts have set differently and set back: a pin is newer than the one that its turn found.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from tiers.session import Pin

if TYPE_CHECKING:
    from gateway.sessions.shared import SharedPins

MOST_PINS: Final = 50_000


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A pin, when it was set and until when it holds, in seconds since 1970; `at` is a little later than by the clock
    where that of the pin before was."""

    pin: Pin
    at: float
    until: float


class Pins:
    """Pins by id. `most`: of this process. `clock`: seconds since 1970."""

    def __init__(
        self, shared: SharedPins | None = None, *, most: int = MOST_PINS, clock: Callable[[], float] = time.time
    ) -> None:
        self._placed: OrderedDict[str, Placed] = OrderedDict()
        self._shared = shared
        self._most = most
        self._clock = clock

    def __len__(self) -> int:
        return len(self._placed)

    async def close(self) -> None:
        if self._shared is not None:
            await self._shared.stop()

    async def find(self, id: str) -> Pin | None:
        """Where a conversation is; None: nobody knows it, or its time is over."""
        found = self._placed.get(id)
        if self._shared is not None:
            elsewhere = await self._shared.find(id)
            if elsewhere is not None and (found is None or elsewhere.at > found.at):
                found = elsewhere
                self._place(id, found)
        if found is None:
            return None
        if found.until <= self._clock():
            self._placed.pop(id, None)
            return None
        return found.pin

    def keep(self, id: str, pin: Pin, seconds: float) -> None:
        """Set a conversation's pin, for so long. Returns at once; Redis is told beside the request."""
        now = at = self._clock()
        before = self._placed.get(id)
        if before is not None and before.at >= now:
            at = math.nextafter(before.at, math.inf)
        placed = Placed(pin, at, now + seconds)
        self._place(id, placed)
        while self._placed and self._over(now):
            self._placed.popitem(last=False)
        if self._shared is not None:
            self._shared.keep(id, placed, seconds)

    def _place(self, id: str, placed: Placed) -> None:
        """Know it here, as the latest."""
        self._placed[id] = placed
        self._placed.move_to_end(id)
        while len(self._placed) > self._most:
            self._placed.popitem(last=False)

    def _over(self, now: float) -> bool:
        """Whether the one longest without a turn has had its time."""
        return next(iter(self._placed.values())).until <= now
