"""One cache process among others that share their answers through Redis.

    store ── what was kept or forgotten here ──► publishing ──► Redis ── stream ──► following ──► every other store
    start, or a gap in the stream ──► what was forgotten meanwhile, then a snapshot beside the stream

It promises that no look-up ever waits for Redis; that what one process keeps or forgets, all do as soon as they hear of
it; that a process which was away learns what was forgotten before it takes anything; and that while Redis is away this
process serves what it has, and tells afterwards what it kept and forgot.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from contextlib import suppress
from typing import Any, Final

from cache.replicas.following import Follower, Gap, silently
from cache.replicas.link import RETRY_S, DatasetLost, Link, RedisAway, RedisFull, until_one_fails
from cache.replicas.notes import Notes
from cache.replicas.pending import Pending
from cache.replicas.publishing import ALIVE_S, Publisher
from cache.replicas.records import Retraction, Sealing
from cache.replicas.standing import Purged, ReplicaStats
from cache.store.answers import Store
from cache.store.changes import Purge

_log = logging.getLogger(__name__)
CONFIRM_S: Final = 5.0
_ASK_AGAIN_S: Final = 0.02
_FAREWELL_S: Final = 1.0


class Replica:
    """Keeps a store in step with Redis. `listener` is what the store has to tell its changes to. One event loop."""

    def __init__(
        self,
        store: Store,
        link: Link,
        notes: Notes,
        *,
        embedder: str,
        label: str,
        most_bytes: int,
        sealing: Sealing,
        pending: Pending | None = None,
    ) -> None:
        """
        Args:
            embedder: its fingerprint; answers with vectors of another one are found here by the same words only.
            label: what people call this process, such as host and socket.
            most_bytes: what all answers together may take in Redis.
        """
        self._store = store
        self._link = link
        self._notes = notes
        self._pending = Pending() if pending is None else pending
        self._moved = asyncio.Event()
        self._follower = Follower(store, link, notes, embedder, sealing, self._followed)
        self.listener = Publisher(
            store,
            link,
            notes,
            self._pending,
            embedder=embedder,
            label=label,
            most_bytes=most_bytes,
            sealing=sealing,
            moves=self._moves,
        )
        self._complained = False
        self.connected = False

    def stats(self) -> ReplicaStats:
        followed, published = self._follower.counts, self.listener.counts
        return ReplicaStats(
            connected=self.connected,
            replicas=published.replicas if self.connected else 1,
            answers=published.answers,
            bytes=published.bytes,
            waiting=len(self._pending) + len(self._notes.waiting),
            published=published.published,
            taken=followed.taken,
            retractions=followed.retractions,
            rebuilds=followed.rebuilds,
            dropped=self._pending.dropped,
            refused=published.refused,
            unreadable=followed.unreadable,
        )

    # -- purging -----------------------------------------------------------------------------------------------------

    async def purge(self, *purges: Purge) -> Purged:
        """Forget here and everywhere; wait until every live process has confirmed it, within limits."""
        if not purges:
            return Purged(0)
        retractions = [Retraction.of_purge(purge) for purge in purges]
        for retraction in retractions:  # on record first: should the process be killed now, it is followed later
            self.listener.hold(retraction)
        try:
            with silently():
                removed = sum([await self._store.purge(purge) for purge in purges])
        finally:
            for retraction in retractions:
                self.listener.release(retraction)
        deadline = time.monotonic() + CONFIRM_S
        while self.connected and time.monotonic() < deadline:
            numbers = [self._notes.number_of(retraction) for retraction in retractions]
            if all(numbers):
                return await self._confirmed(removed, max(number or 0 for number in numbers), deadline)
            await self._moves(deadline)
        return Purged(removed, 1, ["every other process: Redis is away, they follow when it is back"])

    async def _confirmed(self, removed: int, number: int, deadline: float) -> Purged:
        while True:
            try:
                confirmed, expected, silent = self._split(await self._link.call("replicas"), number)
            except (RedisAway, RedisFull, DatasetLost):
                return Purged(removed, 1, ["every other process: Redis went away before they could confirm"])
            if not expected or time.monotonic() >= deadline:
                return Purged(removed, confirmed, [*expected, *silent])
            await asyncio.sleep(_ASK_AGAIN_S)

    def _split(self, found: list[Any], number: int) -> tuple[int, list[str], list[str]]:
        """How many have reached a number; who lives and has not; and who has not been heard of for a while."""
        confirmed = 1
        expected: list[str] = []
        silent: list[str] = []
        for name, epoch, age_ms, label in zip(*(iter(found[1:]),) * 4, strict=True):
            age_s, who = int(age_ms) / 1000, label.decode()
            if name.decode() == self._notes.name:
                continue
            if int(epoch) >= number:
                confirmed += 1
            elif age_s <= ALIVE_S:
                expected.append(f"{who}: has not confirmed")
            else:
                silent.append(f"{who}: not heard of for {age_s:.0f} s, follows when it is back")
        return confirmed, expected, silent

    # -- the task ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keep in step until cancelled. A Redis that is away is looked for twice a second."""
        for retraction in self._notes.waiting:  # the process may have been killed before it had followed its own
            await self._follower.apply(retraction)
        while True:
            try:
                await self._session()
            except DatasetLost:
                _log.warning("Redis holds other data than it did; telling it what was forgotten")
            except Gap as gap:
                _log.warning("%s: reading the answers anew", gap)
                self._follower.lose()
            except (RedisAway, RedisFull) as error:
                if not self._complained:
                    _log.error("Redis is away (%s): this process serves and keeps what it has by itself", error)
                self._complained = True
                await asyncio.sleep(RETRY_S)

    async def _session(self) -> None:
        """From one connection to its end."""
        try:
            await self._link.open()
            await self._follower.catch_up(await self._link.join(uuid.uuid4().hex, self._notes.known))
            self.listener.begin()
            self.connected, self._complained = True, False
            _log.info("sharing answers with other cache processes through Redis")
            follower, publisher = self._follower, self.listener
            await until_one_fails(follower.follow(), publisher.publish(), follower.snapshot(), publisher.sweep())
        except asyncio.CancelledError:
            await self._farewell()
            raise
        finally:
            self.connected = False
            self._followed()
            await self._link.close()

    async def _farewell(self) -> None:
        with suppress(RedisAway, RedisFull, DatasetLost, TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await self.listener.send_retractions()
                while len(self._pending):
                    await self.listener.send_puts()
                await self._link.call("leave", self._notes.name)

    def _followed(self) -> None:
        self._moved.set()
        self.listener.wake()

    async def _moves(self, deadline: float) -> None:
        """Wait until a retraction was followed or the connection was lost."""
        self._moved.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await self._moved.wait()
