"""Every change to what the cache keeps, as a value: made on the event loop, written to the file by another thread."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field

import msgspec
import numpy as np
from numpy.typing import NDArray

from cache.entry import Entry
from cache.key import CacheKey

Vector = NDArray[np.float32]

# What a question takes beside its own bytes: keys, ids, rows of indexes.
QUESTION_OVERHEAD_BYTES = 500


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """Which answers to forget: those that meet every condition given, all when none is.

    Attributes:
        scope: whose answers, as in `CacheKey.scope`.
        older_than_s: age in seconds from which an answer goes.
        exact: `CacheKey.exact` of any question of the answer.
        entry: `Entry.id` of the answer.
    """

    scope: str | None = None
    model: str | None = None
    older_than_s: float | None = None
    tag: str | None = None
    policy: str | None = None
    exact: str | None = None
    entry: str | None = None

    @property
    def everything(self) -> bool:
        return self == Purge()


@dataclass(frozen=True, slots=True)
class Question:
    """A question as it is kept.

    Attributes:
        place: number of its partition and context; `place_digest` names them over restarts.
        exact: digest of the request, 16 bytes.
        folded: digest of the form that all writings of the words share; None where other words must not find it.
        key: as it was asked.
        author: who asked.
        vector: [dimension]; None where it is yet to be made, or other words must not find it.
        fuzzy: whether other words may find it, so that it has a vector or is to get one.
    """

    id: int
    answer_id: int
    place: int
    place_digest: bytes
    exact: bytes
    folded: bytes | None
    key: CacheKey
    author: str
    vector: Vector | None
    fuzzy: bool

    @property
    def size_bytes(self) -> int:
        vector = 0 if self.vector is None else self.vector.nbytes // 2  # 16 bits a number
        return len(self.key.text.encode()) + len(self.author) + vector + QUESTION_OVERHEAD_BYTES


@dataclass(frozen=True, slots=True)
class PutAnswer:
    """A new answer with the question it was given to."""

    question: Question
    entry: Entry

    @property
    def size_bytes(self) -> int:
        return self.entry.size_bytes() + self.question.size_bytes


@dataclass(frozen=True, slots=True)
class AddQuestion:
    """Another question for an answer; without effect when that is gone."""

    question: Question

    @property
    def size_bytes(self) -> int:
        return self.question.size_bytes


@dataclass(frozen=True, slots=True)
class SetVector:
    """The vector of a question that is kept, or None: there can be none, so the same words only find it."""

    question_id: int
    place: int
    vector: Vector | None


@dataclass(frozen=True, slots=True)
class ForgetAnswer:
    answer_id: int


@dataclass(frozen=True, slots=True)
class ForgetQuestion:
    question_id: int


@dataclass(frozen=True, slots=True)
class CountUses:
    """How often each answer was served since the last count."""

    uses: dict[int, int]


@dataclass(frozen=True, slots=True)
class PurgeAnswers:
    """A purge of what was put before it: answers with ids up to `up_to_id`.

    `answer_id`: the one answer that `purge.exact` and `purge.entry` mean, 0 when there is none; None when they are not
    given.
    """

    purge: Purge
    answer_id: int | None
    born_before: float | None
    up_to_id: int


@dataclass(frozen=True, slots=True)
class Expire:
    """Forget what is past its time at `now` (Unix seconds)."""

    now: float


SmallChange = PutAnswer | AddQuestion | SetVector | ForgetAnswer | ForgetQuestion | CountUses
Change = SmallChange | PurgeAnswers | Expire


@dataclass(slots=True)
class Submitted:
    """A change on its way to the file."""

    change: Change
    written: Future[int] | None = None  # gets how many answers it removed


@dataclass(slots=True)
class Batch:
    """What came of changes that were written together."""

    submitted: list[Submitted]
    gone: list[tuple[int, int]] = field(default_factory=list)  # (place, question id)
    emptied: bool = False  # everything is gone
    erased: list[PurgeAnswers] = field(default_factory=list)  # nothing that they mean is in the file any more
    evicted: int = 0
    expired: int = 0
    purged: int = 0
