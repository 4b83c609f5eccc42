"""The answers in memory: by exact key, and within one partition and context by folded form and by vector.

An answer has one or more questions: the one it was given to, and aliases, to which a fresh answer was found to be the
same. Bounded in answers and bytes: the least recently used answer goes first, with its questions. Time limits are
absolute. Runs on one thread; a `Disk` beside it, if given, follows every change.
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Protocol

import msgspec

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.disk import Disk, Row
from cache.store.index import Vector, VectorIndex
from cache.words.writing import folded_form

MAX_ALIASES = 32
MAX_ALIASES_OF_AUTHOR = 8
_VECTOR_OVERHEAD_BYTES = 200
_QUESTION_OVERHEAD_BYTES = 256
_Place = tuple[str, str]
_Folded = tuple[str, str, str]


class Found(msgspec.Struct, frozen=True):
    """A question that is known, with its answer. Ids are of this process and never given to another question."""

    question_id: int
    answer_id: int
    cosine: float
    question: str
    entry: Entry


class Kept(msgspec.Struct, frozen=True):
    """What became of an answer: its id, or why it was not kept: `expired`, `too_large`."""

    answer_id: int | None
    reason: str | None = None


class Purge(msgspec.Struct, frozen=True, kw_only=True):
    """Which answers to forget: those that meet every condition given, all when none is."""

    scope: str | None = None
    model: str | None = None
    older_than_s: float | None = None
    tag: str | None = None
    policy: str | None = None
    exact: str | None = None  # of any of its questions


class Listener(Protocol):
    """Told of every change that others must know of; not of what is evicted or past its time. Must not wait."""

    def stored(self, key: CacheKey, entry: Entry, vector: Vector | None, author: str) -> None: ...

    def aliased(self, key: CacheKey, entry_id: str, vector: Vector | None, author: str) -> None: ...

    def forgotten(self, entry_id: str) -> None: ...

    def question_forgotten(self, exact: str, entry_id: str) -> None: ...

    def purged(self, purge: Purge) -> None: ...


class Store:
    """Where answers live and die. A size is what an answer, its questions, their keys and vectors take.

    Invariants: every id of an index is a question of that partition and context; every question has its answer and
    every answer a question; `bytes` is the sum of the sizes; neither bound is exceeded when a method returns.
    """

    def __init__(
        self,
        *,
        max_entries: int,
        max_bytes: int,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        listener: Listener | None = None,
    ) -> None:
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evictions = 0
        self.expirations = 0
        self.purged = 0
        self.listener = listener
        self._disk = disk
        self._clock = clock
        self._next_id = 0
        self._answers: OrderedDict[int, Entry] = OrderedDict()  # least recently used first
        self._questions_of: dict[int, list[int]] = {}  # the one it was given to first
        self._questions: dict[int, Row] = {}  # vectors live in the indexes
        self._answer_of: dict[int, int] = {}
        self._sizes: dict[int, int] = {}  # of questions; the first carries its answer's
        self._by_exact: dict[str, int] = {}
        self._by_entry: dict[str, int] = {}
        # Only of questions that other words may find, which are those with a vector; of several, the latest.
        self._by_folded: dict[_Folded, int] = {}
        self._indexes: dict[_Place, VectorIndex] = {}
        self._expiry: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._answers)

    @property
    def questions(self) -> int:
        return len(self._questions)

    @property
    def indexes(self) -> int:
        return len(self._indexes)

    @property
    def vectors(self) -> int:
        return sum(len(index) for index in self._indexes.values())

    def get_exact(self, key: CacheKey, *, ttl_s: float | None = None) -> Found | None:
        """The answer to the very same request, if it is not too old."""
        id = self._by_exact.get(key.exact)
        return None if id is None else self._found(id, 1.0, ttl_s)

    def get_folded(self, key: CacheKey, *, ttl_s: float | None = None) -> Found | None:
        """The latest answer to the same words written otherwise. Whether they mean the same is open."""
        folded = _folded(key.partition, key.context, key.text)
        id = self._by_folded.get(folded) if folded else None
        return None if id is None else self._found(id, 1.0, ttl_s)

    async def nearest(self, key: CacheKey, vector: Vector, k: int, *, ttl_s: float | None = None) -> list[Found]:
        """Up to `k` questions of the key's partition and context, nearest first; several may share an answer."""
        index = self._indexes.get((key.partition, key.context))
        if index is None:
            return []
        found = (self._found(id, cosine, ttl_s) for id, cosine in index.search(vector, k))
        return [one for one in found if one is not None]

    def answer_of(self, entry_id: str) -> int | None:
        """The id of the answer whose `Entry.id` this is, while it is kept."""
        return self._by_entry.get(entry_id)

    def used(self, answer_id: int) -> None:
        """Count an answer as served."""
        if answer_id in self._answers:
            self._answers.move_to_end(answer_id)

    def put(self, key: CacheKey, entry: Entry, vector: Vector | None, author: str = "") -> Kept:
        """Keep an answer, in place of any earlier one to the same request.

        Args:
            vector: of the question, [dimension]; None: the same words only will find it.
            author: who asked, which limits on aliases are for.
        """
        kept = self._insert(Row(key.exact, key.scope, key.partition, key.context, key.text, author, entry, vector))
        if self.listener is not None and kept.reason is None:
            self.listener.stored(key, entry, vector, author)
        return kept

    def add_alias(self, key: CacheKey, answer_id: int, vector: Vector | None, author: str) -> str | None:
        """Let another question of the answer's partition and context find the answer, as long as that lives.

        Returns: None, or why not: `unknown_answer` (gone, or of another partition or context), `too_many_questions`
        (of this answer, or of this author's to it), `too_large`. An answer that was kept for this very question goes.
        """
        reason = self._alias(key, answer_id, vector, author)
        if self.listener is not None and reason is None:
            self.listener.aliased(key, self._answers[answer_id].id, vector, author)
        return reason

    def add_vector(self, key: CacheKey, vector: Vector) -> bool:
        """Let a question that was stored without a vector be found by other words too; False when it is gone."""
        id = self._by_exact.get(key.exact)
        if id is None:
            return False
        row = msgspec.structs.replace(self._questions[id], vector=vector)
        answer_id = self._answer_of[id]
        at = self._questions_of[answer_id].index(id)
        self._drop_question(id)
        self._add_question(row, answer_id, first=at == 0)
        self._questions_of[answer_id].insert(at, self._questions_of[answer_id].pop())
        if self._disk is not None:
            self._disk.put(row, self._answers[answer_id])
        self._evict()
        return True

    def restore(self, row: Row) -> str | None:
        """Take a question that is on disk already; what was stored meanwhile is newer and wins."""
        if row.exact in self._by_exact:
            return None
        known = self._by_entry.get(row.entry.id)
        if known is None:
            return self._insert(row, restored=True).reason
        self._add_question(row, known, first=False)
        self._evict()
        return None

    def forget(self, answer_id: int) -> bool:
        """Forget an answer with all its questions; False when there is none."""
        entry = self._answers.get(answer_id)
        if entry is None:
            return False
        self._remove([answer_id])
        if self.listener is not None:
            self.listener.forgotten(entry.id)
        return True

    def forget_question(self, question_id: int) -> bool:
        """Forget a question, and its answer with the last one; False when there is none."""
        row = self._questions.get(question_id)
        if row is None:
            return False
        answer_id = self._answer_of[question_id]
        if len(self._questions_of[answer_id]) == 1:
            return self.forget(answer_id)
        self._drop_question(question_id)
        if self._disk is not None:
            self._disk.delete([row.exact])
        if self.listener is not None:
            self.listener.question_forgotten(row.exact, self._answers[answer_id].id)
        return True

    async def purge(self, purge: Purge) -> int:
        """Forget answers; returns how many."""
        born_before = None if purge.older_than_s is None else self._clock() - purge.older_than_s
        doomed = [
            id
            for id, entry in self._answers.items()
            if (purge.scope is None or self._questions[self._questions_of[id][0]].scope == purge.scope)
            and (purge.model is None or entry.model == purge.model)
            and (purge.policy is None or entry.policy == purge.policy)
            and (purge.tag is None or purge.tag in entry.tags)
            and (purge.exact is None or any(self._questions[q].exact == purge.exact for q in self._questions_of[id]))
            and (born_before is None or entry.created_at <= born_before)
        ]
        self._remove(doomed)
        self.purged += len(doomed)
        if self.listener is not None:
            self.listener.purged(purge)
        return len(doomed)

    def expire(self) -> int:
        """Forget what is past its time; returns how many answers."""
        now = self._clock()
        doomed = []
        while self._expiry and self._expiry[0][0] <= now:
            _, id = heapq.heappop(self._expiry)
            if id in self._answers:
                doomed.append(id)
        self._remove(doomed)
        self.expirations += len(doomed)
        return len(doomed)

    def _found(self, question_id: int, cosine: float, ttl_s: float | None) -> Found | None:
        answer_id = self._answer_of[question_id]
        entry = self._answers[answer_id]
        if entry.expired(self._clock(), ttl_s=ttl_s):
            return None
        return Found(question_id, answer_id, cosine, self._questions[question_id].question, entry)

    def _insert(self, row: Row, *, restored: bool = False) -> Kept:
        if row.entry.expired(self._clock()):
            return Kept(None, "expired")
        if _size_bytes(row, first=True) * 8 > self.max_bytes:
            return Kept(None, "too_large")
        self.expire()
        self._make_way(row.exact)
        id = self._new_id()
        self._answers[id] = row.entry
        self._questions_of[id] = []
        self._by_entry[row.entry.id] = id
        self._add_question(row, id, first=True)
        heapq.heappush(self._expiry, (row.entry.expires_at, id))
        if self._disk is not None and not restored:
            self._disk.put(row, row.entry)
        self._evict()
        return Kept(id)

    def _alias(self, key: CacheKey, answer_id: int, vector: Vector | None, author: str) -> str | None:
        entry = self._answers.get(answer_id)
        if entry is None or entry.expired(self._clock()):
            return "unknown_answer"
        first, *aliases = (self._questions[id] for id in self._questions_of[answer_id])
        if (first.partition, first.context) != (key.partition, key.context):
            return "unknown_answer"
        row = Row(key.exact, key.scope, key.partition, key.context, key.text, author, entry, vector)
        if any(known.exact == key.exact for known in (first, *aliases)):
            return None
        authors = Counter(alias.author for alias in aliases)
        if len(aliases) >= MAX_ALIASES or authors[author] >= MAX_ALIASES_OF_AUTHOR:
            return "too_many_questions"
        if _size_bytes(row, first=False) * 8 > self.max_bytes:
            return "too_large"
        self._make_way(key.exact)
        self._add_question(row, answer_id, first=False)
        if self._disk is not None:
            self._disk.put(row, entry)
        self._evict()
        return None

    def _make_way(self, exact: str) -> None:
        """What was known of this very request is of no more use: the answer, or the alias alone."""
        id = self._by_exact.get(exact)
        if id is None:
            return
        answer_id = self._answer_of[id]
        if self._questions_of[answer_id][0] == id:
            self._remove([answer_id])
            return
        self._drop_question(id)
        if self._disk is not None:
            self._disk.delete([exact])

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id

    def _add_question(self, row: Row, answer_id: int, *, first: bool) -> None:
        id = self._new_id()
        if row.vector is not None:
            place = (row.partition, row.context)
            index = self._indexes.get(place)
            if index is None:
                index = VectorIndex(len(row.vector))
            index.add(id, row.vector)
            self._indexes[place] = index
            folded = _folded(row.partition, row.context, row.question)
            if folded is not None:
                self._by_folded[folded] = id
        self._questions[id] = msgspec.structs.replace(row, vector=None)
        self._questions_of[answer_id].append(id)
        self._answer_of[id] = answer_id
        self._by_exact[row.exact] = id
        self._sizes[id] = _size_bytes(row, first=first)
        self.bytes += self._sizes[id]

    def _drop_question(self, id: int) -> Row:
        row = self._questions.pop(id)
        self._questions_of[self._answer_of.pop(id)].remove(id)
        del self._by_exact[row.exact]
        self.bytes -= self._sizes.pop(id)
        place = (row.partition, row.context)
        index = self._indexes.get(place)
        if index is not None and index.remove(id) and not len(index):
            del self._indexes[place]
        folded = _folded(row.partition, row.context, row.question)
        if folded is not None and self._by_folded.get(folded) == id:
            del self._by_folded[folded]
        return row

    def _evict(self) -> None:
        evicted = 0
        while len(self._answers) > self.max_entries or self.bytes > self.max_bytes:
            self._remove([next(iter(self._answers))])
            evicted += 1
        self.evictions += evicted

    def _remove(self, answer_ids: list[int]) -> None:
        exact_keys: list[str] = []
        for answer_id in answer_ids:
            exact_keys += [self._drop_question(id).exact for id in list(self._questions_of[answer_id])]
            del self._questions_of[answer_id]
            entry = self._answers.pop(answer_id)
            if self._by_entry.get(entry.id) == answer_id:
                del self._by_entry[entry.id]
        if exact_keys and self._disk is not None:
            self._disk.delete(exact_keys)


def _folded(partition: str, context: str, text: str) -> _Folded | None:
    form = folded_form(text)
    return None if form is None else (partition, context, form)


def _size_bytes(row: Row, *, first: bool) -> int:
    vector = 0 if row.vector is None else row.vector.nbytes + _VECTOR_OVERHEAD_BYTES
    keys = len(row.exact) + len(row.scope) + len(row.partition) + len(row.context)
    own = row.entry.size_bytes() if first else len(row.question.encode()) + _QUESTION_OVERHEAD_BYTES
    return own + vector + keys
