"""When a line of a batch may be asked: when nobody else waits for what it would take.

A line starts only while no request waits for admission or for the line's backend. On each backend the lines of this
process fill up what other requests leave of `batches.concurrency`, one at the least. Of a limit per minute and of
`parallel`, lines leave half: what a batch uses of it comes back before the next line, so a request that somebody waits
for finds room. Who is told to come back later does so; no line fails by a limit.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Final

from gateway.access.limits import Standing

if TYPE_CHECKING:
    from gateway.services import Services

_LOOK_AGAIN_S: Final = 0.05
# No longer than this without another look: limits are raised, keys revoked.
_LONGEST_S: Final = 5.0


class Rooms:
    """The room for lines in this process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._most = services.settings.batches.concurrency
        self._places = asyncio.Semaphore(max(1, self._most))
        self._on: Counter[str] = Counter()  # lines by backend
        self._not_before: dict[str, float] = {}  # by key, monotonic

    @property
    def running(self) -> int:
        """Lines that are being asked."""
        return self._on.total()

    async def enter(self, key_id: str, backend: str) -> None:
        """Wait for room; `leave` gives it back."""
        while True:
            wait_s = self._not_before.get(key_id, 0.0) - time.monotonic()
            if wait_s > 0:
                await asyncio.sleep(min(wait_s, _LONGEST_S))
                continue
            await self._places.acquire()
            if not self._busy(backend):
                self._on[backend] += 1
                return
            self._places.release()
            await asyncio.sleep(_LOOK_AGAIN_S * random.uniform(1, 2))

    def leave(self, backend: str) -> None:
        self._on[backend] -= 1
        self._places.release()

    def refused(self, key_id: str, retry_after_s: float) -> None:
        """A limit of the key has no room for so long."""
        self._wait(key_id, retry_after_s)

    def learn(self, key_id: str, standing: Standing) -> None:
        """Where the limits of a key stand with the line that was just admitted: the next one leaves half of them."""
        waits = [
            _until_half(standing.limit_requests, standing.remaining_requests),
            _until_half(standing.limit_tokens, standing.remaining_tokens),
        ]
        if standing.limit_parallel and (standing.remaining_parallel or 0) < standing.limit_parallel // 2:
            waits.append(2 * _LOOK_AGAIN_S)
        if (longest := max(waits)) > 0:
            self._wait(key_id, longest)
        elif self._not_before:
            self._not_before.pop(key_id, None)

    def _wait(self, key_id: str, seconds: float) -> None:
        self._not_before[key_id] = time.monotonic() + seconds

    def _busy(self, backend: str) -> bool:
        """Whether others wait, or run as much as there is room for."""
        queue = self._services.queue
        most = self._services.settings.limits.max_concurrency
        if queue.waiting or (most is not None and queue.running >= max(1, most - most // 4)):
            return True
        pool = self._services.pools[backend]
        if pool.queued:
            return True
        mine = self._on[backend]
        taken = max(mine, sum(replica.outstanding for replica in pool.replicas))  # some of mine are not there yet
        return taken >= len(pool.replicas) * pool.max_outstanding or (mine > 0 and taken >= self._most)


def _until_half(limit: int | None, remaining: int | None) -> float:
    """Seconds until a bucket that refills evenly over a minute is half full."""
    if not limit or remaining is None:
        return 0.0
    return (limit / 2 - remaining) * 60.0 / limit
