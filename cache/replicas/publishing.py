"""What this process kept and forgot, told to the others through Redis: retractions first, then answers.

It listens to the store, without ever making it wait; what cannot be told now waits, within bounds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec

from cache.entry import Entry
from cache.key import VERSION, CacheKey
from cache.replicas.following import FETCHED_AT_ONCE, PAUSE_S, following
from cache.replicas.link import Link, RedisAway, RedisFull
from cache.replicas.notes import Notes
from cache.replicas.pending import Pending, Put
from cache.replicas.records import (
    Question,
    Retraction,
    Sealing,
    Unreadable,
    pack_entry,
    pack_question,
    unpack_record,
)
from cache.store.answers import Store
from cache.store.changes import Purge
from cache.store.index import Vector

_log = logging.getLogger(__name__)
BEAT_S: Final = 1.0
# A process that was heard of so recently is expected to confirm a purge.
ALIVE_S: Final = 5.0
_STANDSTILL_S: Final = 5.0
_PUTS_AT_ONCE: Final = 64
_NEVER: Final = (float("-inf"), -1)


class Published(msgspec.Struct):
    """Counts since the process started; `replicas`, `answers` and `bytes` as Redis has them now."""

    published: int = 0
    refused: int = 0  # answers that Redis had no room for
    replicas: int = 0
    answers: int = 0
    bytes: int = 0


class Publisher:
    """The store's listener, and the tasks that empty what it gathers."""

    def __init__(
        self,
        store: Store,
        link: Link,
        notes: Notes,
        pending: Pending,
        *,
        embedder: str,
        label: str,
        most_bytes: int,
        sealing: Sealing,
        moves: Callable[[float], Coroutine[Any, Any, None]],
    ) -> None:
        """`moves` waits until a retraction was followed, until a time at most."""
        self._store = store
        self._link = link
        self._notes = notes
        self._pending = pending
        self._embedder = embedder
        self._label = label
        self._most_bytes = most_bytes
        self._sealing = sealing
        self._moves = moves
        self._wake = asyncio.Event()
        self._sweep = asyncio.Event()
        self._unready: set[str] = set()
        self._sent: set[str] = set()
        self._beaten = _NEVER  # when, and what was said to be known
        self.counts = Published()

    def begin(self) -> None:
        """A connection begins: what was sent on an earlier one may have been lost."""
        self._sent.clear()
        self._beaten = _NEVER

    def wake(self) -> None:
        self._wake.set()

    # -- the store's listener ----------------------------------------------------------------------------------------

    def stored(self, key: CacheKey, entry: Entry, vector: Vector | None, author: str) -> None:
        if not following.get():
            self._pending.add(Put(entry.id, entry, Question.of(key, vector, self._embedder, author)))
            self.wake()

    def aliased(self, key: CacheKey, entry_id: str, vector: Vector | None, author: str) -> None:
        if not following.get():
            self._pending.add(Put(entry_id, None, Question.of(key, vector, self._embedder, author)))
            self.wake()

    def forgotten(self, entry_id: str) -> None:
        if not following.get():
            self._notes.add(Retraction.of_answer(entry_id))
            self.wake()

    def question_forgotten(self, exact: str, entry_id: str) -> None:
        if not following.get():
            self._pending.forget(entry_id, exact)
            self._notes.add(Retraction.of_answer(entry_id, exact))
            self.wake()

    def purged(self, purge: Purge) -> None:
        if not following.get():
            self._notes.add(Retraction.of_purge(purge))
            self.wake()

    def hold(self, retraction: Retraction) -> None:
        """A retraction that this process is still following: put on record, but not told before `release`."""
        self._unready.add(retraction.id)
        self._notes.add(retraction)

    def release(self, retraction: Retraction) -> None:
        self._unready.discard(retraction.id)
        self.wake()

    # -- telling -----------------------------------------------------------------------------------------------------

    async def publish(self) -> None:
        """Tell what there is to tell, until something goes wrong.

        Raises:
            RedisAway: see there.
        """
        while True:
            self._wake.clear()
            try:
                number = await self.send_retractions()
                await self._until_known(number)
                await self._beat()
                await self.send_puts()
            except RedisFull as error:
                raise RedisAway(str(error)) from error
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, self._beaten[0] + BEAT_S - time.monotonic())):
                    await self._wake.wait()

    async def send_retractions(self) -> int:
        """Returns the number of the latest one, or 0."""
        number = 0
        waiting = self._notes.waiting
        self._sent &= {one.id for one in waiting}
        for one in waiting:
            if one.id in self._unready or one.id in self._sent:
                continue
            given = (one.packed(), one.kind, one.entry_id or "", one.exact or "")
            _, number = await self._link.call("retract", self._notes.name, *given)
            self._sent.add(one.id)
            if one.kind == "purge":
                self._sweep.set()
        return number

    async def _until_known(self, number: int) -> None:
        """The stream brings this process's retractions too, after what others forgot before: what is kept from here on
        carries that number."""
        deadline = time.monotonic() + _STANDSTILL_S
        while self._notes.known < number:
            if time.monotonic() > deadline:
                raise RedisAway("the stream of changes stands still")
            await self._moves(deadline)

    async def send_puts(self) -> None:
        """Some at a time: retractions and signs of life go first."""
        for put in self._pending.first(_PUTS_AT_ONCE):
            # Forgotten, replaced or evicted meanwhile: then nobody else needs it.
            if self._store.answer_of(put.entry_id) is not None:
                await self._send_put(put)
            self._pending.remove_if_same(put)
        if len(self._pending):
            self.wake()

    async def _send_put(self, put: Put) -> None:
        name, exact = self._notes.name, put.question.exact
        question = pack_question(put.entry_id, put.question, self._sealing)
        try:
            if put.entry is None:
                word, *_ = await self._link.call("alias", name, put.entry_id, exact, self._most_bytes, question)
            else:
                entry = put.entry
                times = (int(entry.expires_at * 1000), repr(entry.created_at))
                about = (*times, self._notes.known, VERSION, self._most_bytes)
                answer = pack_entry(entry, self._sealing)
                word, *_ = await self._link.call("put", name, entry.id, exact, *about, answer, question)
        except RedisFull as error:
            if not self.counts.refused:
                _log.error("Redis has no room for answers (%s): they stay in this process", error)
            word = "full"
        if word == "ok":
            self.counts.published += 1
        elif word in ("full", "too_large"):
            self.counts.refused += 1

    async def _beat(self) -> None:
        """Say that this process lives and what it has followed: every second, and at once when that changed."""
        known, (at, said) = self._notes.known, self._beaten
        if said == known and time.monotonic() < at + BEAT_S:
            return
        counts = self.counts
        _, _, counts.answers, counts.bytes = await self._link.call("beat", self._notes.name, known, self._label)
        found = await self._link.call("replicas")
        counts.replicas = sum(int(age_ms) <= ALIVE_S * 1000 for age_ms in found[3::4])
        self._beaten = (time.monotonic(), known)

    # -- making room -------------------------------------------------------------------------------------------------

    async def sweep(self) -> None:
        """Remove from Redis what purges of this process mean. Until then it is dead, but takes room."""
        while True:
            await self._sweep.wait()
            self._sweep.clear()
            async for ids in self._link.all_ids():
                for first in range(0, len(ids), FETCHED_AT_ONCE):
                    await self._sweep_some(ids[first : first + FETCHED_AT_ONCE])
                    await asyncio.sleep(PAUSE_S)

    async def _sweep_some(self, ids: Sequence[str]) -> None:
        gone = []
        for id, fields in zip(ids, await self._link.answers(ids), strict=True):
            with suppress(Unreadable):
                if fields and self._notes.dead(unpack_record(id, fields, self._sealing)):
                    gone.append(id)
        if gone:
            await self._link.call("drop", *gone)
