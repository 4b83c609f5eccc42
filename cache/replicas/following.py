"""What other processes kept and forgot, brought into this one's store: from the stream, and from snapshots.

Nothing is taken before every retraction that its writer knew has been followed here, so no answer comes back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import msgspec

from cache.entry import Entry
from cache.key import VERSION
from cache.replicas.link import Change, Hash, Joined, Link
from cache.replicas.notes import Notes
from cache.replicas.records import (
    Question,
    Record,
    Retraction,
    Sealing,
    Unreadable,
    unpack_record,
    unpack_retraction,
)
from cache.store.answers import Store
from cache.store.changes import Purge

_log = logging.getLogger(__name__)
FETCHED_AT_ONCE: Final = 32
PAUSE_S: Final = 0.002  # between pieces of long work, so that look-ups come first
# A hash of an answer with one question; each further question is one field more.
_FIELDS: Final = 7
_ROOM: Final = 0.95  # a snapshot fills no more of the store, lest it drive out what is used here

# Set while this process follows others: that is nothing to tell them.
following: ContextVar[bool] = ContextVar("following", default=False)


class Gap(Exception):
    """Changes are missing between the last one followed and the next in the stream."""


class Followed(msgspec.Struct):
    """Counts since the process started."""

    taken: int = 0
    retractions: int = 0
    rebuilds: int = 0
    unreadable: int = 0


class Follower:
    """`moved` is called after each retraction that was followed."""

    def __init__(
        self, store: Store, link: Link, notes: Notes, embedder: str, sealing: Sealing, moved: Callable[[], None]
    ) -> None:
        self._store = store
        self._link = link
        self._notes = notes
        self._embedder = embedder
        self._sealing = sealing
        self._moved = moved
        self._place: str | None = None
        self._n = 0
        self._snapshot_due = True
        self.counts = Followed()

    def lose(self) -> None:
        """The place in the stream is of no more use."""
        self._place = None

    async def catch_up(self, joined: Joined) -> None:
        """Learn what was forgotten meanwhile, and tell a Redis that may have lost it what everybody must forget."""
        notes = self._notes
        home = f"{joined.dataset} {joined.run_id}"
        same = notes.home is not None and notes.home.split()[0] == joined.dataset
        if home != notes.home:
            self._place = None
            for number, retraction in list(notes.followed):
                await self._link.call("recall", notes.name, number, retraction.packed())
        if (same or not notes.known) and joined.oldest_retraction > notes.known + 1 and self._store.size().answers:
            _log.warning("away for so long that Redis cannot tell what was forgotten: starting anew from what it has")
            with silently():
                await self._store.purge(Purge())
            self._place = None
        if self._place is None:
            self._place, self._n = joined.place, joined.n
            self._snapshot_due = True
        for number, packed in await self._link.retractions(notes.known if same else -1):
            await self._retract(number, packed)
        notes.reach(joined.epoch)
        notes.settle(home)

    async def follow(self) -> None:
        """Follow the stream until something goes wrong.

        Raises:
            Gap, RedisAway: see there.
        """
        assert self._place is not None
        while True:
            changes = await self._link.changes(self._place)
            ids: list[str] = []
            for change in changes:
                if change.n != self._n + 1:
                    raise Gap(f"after change {self._n} comes {change.n}")
                self._n = change.n
                if change.kind == "put":
                    if not self._has_own(change):
                        ids.append(change.id)
                    continue
                await self.fetch(ids)  # in their order: what comes before a retraction may be meant by it
                ids = []
                await self._retract(change.number, change.retraction)
                self._notes.reach(change.number)
                self._moved()
            await self.fetch(ids)
            if changes:
                self._place = changes[-1].place

    def _has_own(self, change: Change) -> bool:
        return change.by == self._notes.name and self._store.answer_of(change.id) is not None

    async def snapshot(self) -> None:
        """Take what Redis has and this process has not, beside the stream, where that is due."""
        if not self._snapshot_due:
            return
        self.counts.rebuilds += 1
        async for ids in self._link.all_ids():
            counts = await self._link.field_counts(ids)
            wanted = [
                id
                for id, fields in zip(ids, counts, strict=True)
                if fields > _FIELDS or (fields and self._store.answer_of(id) is None)
            ]
            for first in range(0, len(wanted), FETCHED_AT_ONCE):
                if self._store.fullness > _ROOM:
                    _log.info("the store is full: no more answers are taken from before this process joined")
                    self._snapshot_due = False
                    return
                if gone := await self.fetch(wanted[first : first + FETCHED_AT_ONCE], behind=True):
                    await self._link.call("drop", *gone)
                await asyncio.sleep(PAUSE_S)
        self._snapshot_due = False

    async def fetch(self, ids: Sequence[str], *, behind: bool = False) -> list[str]:
        """Take answers from Redis by id; those that run `behind` the stream do not replace a later one.

        Returns: the ids of those that are dead.
        """
        dead_ids = []
        ids = list(dict.fromkeys(ids))
        for first in range(0, len(ids), FETCHED_AT_ONCE):
            some = ids[first : first + FETCHED_AT_ONCE]
            for id, fields in zip(some, await self._link.answers(some), strict=True):
                if fields and not await self._take(id, fields, behind):
                    dead_ids.append(id)
                await asyncio.sleep(0)
        return dead_ids

    async def _take(self, id: str, fields: Hash, behind: bool) -> bool:
        """Keep an answer that another process has kept. False: it is dead."""
        try:
            record = unpack_record(id, fields, self._sealing)
        except Unreadable as error:
            self._unreadable(error)
            return True
        if record.version != VERSION:
            return True
        if record.epoch > self._notes.known:  # in a snapshot, which may run ahead of the stream
            for number, packed in await self._link.retractions(self._notes.known):
                await self._retract(number, packed)
            self._notes.reach(record.epoch)
        if self._notes.dead(record):
            return False
        if not self._notes.unknowable(record):
            with silently():
                self._keep(record, behind)
        return True

    def _keep(self, record: Record, behind: bool) -> None:
        entry, (first, *aliases) = record.entry, record.questions
        try:
            answer_id = self._store.answer_of(entry.id)
            if answer_id is None:
                here = self._store.get_exact(first.key()) if behind else None
                if here is not None and here.entry.created_at > entry.created_at:
                    return
                answer_id = self._put(first, entry)
                self.counts.taken += 1
            if answer_id is not None:
                for alias in aliases:
                    vector = alias.array(self._embedder)
                    later = vector is None and alias.vector is not None
                    self._store.add_alias(alias.key(), answer_id, vector, alias.author, vector_later=later)
        except ValueError as error:
            self._unreadable(error)

    def _put(self, question: Question, entry: Entry) -> int | None:
        vector = question.array(self._embedder)
        later = vector is None and question.vector is not None  # it is of another embedder
        return self._store.put(question.key(), entry, vector, question.author, vector_later=later).answer_id

    def _unreadable(self, error: Exception) -> None:
        if not self.counts.unreadable:
            _log.warning("answers of other processes are skipped: %s", error)
        self.counts.unreadable += 1

    async def _retract(self, number: int, packed: bytes) -> None:
        try:
            retraction = unpack_retraction(packed)
        except Unreadable as error:
            _log.error("%s: forgetting everything, to be safe", error)
            retraction = Retraction(id=f"unreadable-{number}", kind="purge", made_at=time.time())
        if self._notes.number_of(retraction) is not None:
            return
        if not self._notes.knows(retraction):
            await self.apply(retraction)
            self.counts.retractions += 1
        self._notes.numbered(number, retraction)

    async def apply(self, retraction: Retraction) -> None:
        """Forget here."""
        with silently():
            if retraction.kind == "purge":
                await self._store.purge(retraction.purge())
                return
            assert retraction.entry_id is not None
            answer_id = self._store.answer_of(retraction.entry_id)
            if answer_id is None:
                return
            if retraction.exact is None:
                self._store.forget(answer_id)
                return
            question = self._store.question_of(retraction.exact)
            if question is not None and question[1] == answer_id:
                self._store.forget_question(question[0])


@contextmanager
def silently() -> Iterator[None]:
    """Within it, changes of the store are told to nobody."""
    token = following.set(True)
    try:
        yield
    finally:
        following.reset(token)
