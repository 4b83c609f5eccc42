"""What the store gives and tells: answers found and kept, its size, and changes for whoever listens."""

from __future__ import annotations

from typing import Protocol

import msgspec

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.changes import Purge, Vector


class Near(msgspec.Struct, frozen=True):
    """A question that lies near another one. Its answer has yet to be read: `Store.answer`."""

    question_id: int
    answer_id: int
    cosine: float
    question: str


class Found(msgspec.Struct, frozen=True):
    """A question that is known, with its answer. Ids are of this file and never given again."""

    question_id: int
    answer_id: int
    cosine: float
    question: str
    entry: Entry


class Kept(msgspec.Struct, frozen=True):
    """What became of an answer: its id, or why it was not kept: `expired`, `too_large`."""

    answer_id: int | None
    reason: str | None = None


class Size(msgspec.Struct, frozen=True):
    """What the store holds now.

    Attributes:
        bytes: in memory: indexes, what is not written yet, and without a file the answers, too.
        disk_bytes: used of the file; 0 without one.
        places, vectors: indexes in memory, and the vectors in them.
        loading: indexes that are being read or built.
        waiting_vectors: questions whose vector the present embedder is yet to make.
        evictions, expirations, purged: answers that went since the store was opened, to make room, by age, as told.
        erasing: purges whose answers are never given again, and lie in the file still.
        unwritten: changes that are not in the file yet.
        unreadable: values found damaged, or encrypted with a key that is not configured.
        error: why the file cannot be written at present.
    """

    answers: int
    questions: int
    bytes: int
    disk_bytes: int
    places: int
    vectors: int
    loading: int
    waiting_vectors: int
    evictions: int
    expirations: int
    purged: int
    erasing: int
    unwritten: int
    unreadable: int
    error: str | None


class Listener(Protocol):
    """Told of every change that others must know of; not of what is evicted or past its time. Must not wait.

    A question that gets its vector later is told again. `exact` is that of its `CacheKey`.
    """

    def stored(self, key: CacheKey, entry: Entry, vector: Vector | None, author: str) -> None: ...

    def aliased(self, key: CacheKey, entry_id: str, vector: Vector | None, author: str) -> None: ...

    def forgotten(self, entry_id: str) -> None: ...

    def question_forgotten(self, exact: str, entry_id: str) -> None: ...

    def purged(self, purge: Purge) -> None: ...
