"""The store: answers by exact request, and within one partition and context by folded form and by vector.

An answer has one or more questions: the one it was given to, and aliases, to which a fresh answer was found to be the
same. They live and die with it. Everything is in the cache's file (`disk`), written by a thread (`writer`); what is not
written yet is laid over it (`view`); in memory are the indexes of partitions in use (`places`). Time limits are
absolute. Beyond a bound the answers that are worth least go first (`tables`). Methods run on one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.changes import (
    AddQuestion,
    CountUses,
    Expire,
    ForgetAnswer,
    ForgetQuestion,
    Purge,
    PurgeAnswers,
    PutAnswer,
    Question,
    SetVector,
    Vector,
)
from cache.store.cipher import sealer
from cache.store.disk import Disk
from cache.store.found import Found, Kept, Listener, Near, Size
from cache.store.nearest import Search
from cache.store.pending import Pending
from cache.store.places import Places
from cache.store.reader import Known, Reader
from cache.store.view import View
from cache.store.way import Way
from cache.store.writer import Writer

MAX_ALIASES = 128
MAX_ALIASES_OF_AUTHOR = 32
_log = logging.getLogger(__name__)
_SHARE_OF_ONE_ANSWER = 8


class Store:
    """Where answers live and die."""

    def __init__(
        self,
        folder: Path | None,
        fingerprint: str,
        *,
        max_entries: int,
        max_bytes: int,
        max_disk_bytes: int = 1 << 62,
        keys: Sequence[bytes] = (),
        clock: Callable[[], float] = time.time,
        listener: Listener | None = None,
    ) -> None:
        """Open the file in `folder`; None: keep everything in memory.

        Args:
            fingerprint: of the embedder whose vectors are given here. Those of another are never compared with them.
            max_bytes: of memory; without a file half of it is for the answers.
            max_disk_bytes: of the file, without its journal (16 MiB).
            keys: encrypt what is kept with the first of these, 32 bytes each; none: keep it as it is.

        Raises:
            OSError: the folder cannot be written, or another process uses the file.
        """
        self.max_entries = max_entries
        self.max_bytes = max_bytes
        self.max_disk_bytes = max_disk_bytes if folder is not None else 0
        self.listener = listener
        self._clock = clock
        seals = sealer(keys)
        self._disk = Disk(folder, fingerprint, seals)
        self._most_file_bytes = max_disk_bytes if folder is not None else max_bytes // 2
        self._writer = Writer(self._disk, seals, max_entries=max_entries, max_bytes=self._most_file_bytes)
        self._reader = Reader(self._disk, seals, self._writer)
        self._pending = Pending(self._writer.unfinished)
        self._view = View(self._disk, self._reader, self._pending)
        self._places = Places(self._disk, seals, self._pending.vectors_in, max_bytes=max_bytes // 2)
        self._most_answer_bytes = min(max_bytes, self._most_file_bytes) // _SHARE_OF_ONE_ANSWER
        self._way = Way(self._disk, self._writer, self._pending, self._view, self._places, max_bytes=max_bytes // 2)
        self._search = Search(self._view, self._places, self._way, self._writer, clock)

    def size(self) -> Size:
        self._way.settle()
        totals, used, in_memory = self._writer.totals, self._writer.used_bytes, self._disk.in_memory
        return Size(
            answers=len(self),
            questions=totals.questions + self._pending.questions,
            bytes=self._places.bytes + self._pending.bytes + (used if in_memory else 0),
            disk_bytes=0 if in_memory else used,
            places=len(self._places),
            vectors=self._places.vectors,
            loading=self._places.loading,
            waiting_vectors=totals.waiting,
            evictions=self._way.evictions,
            expirations=self._way.expirations,
            purged=self._way.purged,
            erasing=self._pending.purges,
            unwritten=len(self._pending),
            unreadable=self._reader.unreadable,
            error=self._writer.error,
        )

    def __len__(self) -> int:
        """How many answers there are."""
        self._way.settle()
        return self._writer.totals.answers + self._pending.answers

    @property
    def fullness(self) -> float:
        """Of the bound that is nearest, in entries or bytes, how much is taken: 1 where eviction begins."""
        return max(
            (self._writer.totals.answers + self._pending.answers) / self.max_entries,
            self._writer.used_bytes / self._most_file_bytes,
        )

    def get_exact(self, key: CacheKey, *, ttl_s: float | None = None) -> Found | None:
        """The answer to the very same request, if it is not too old."""
        self._way.settle()
        return self._found(self._view.by_exact(self._view.exact(key.exact)), key, 1.0, ttl_s)

    def get_folded(self, key: CacheKey, *, ttl_s: float | None = None) -> Found | None:
        """The latest answer to the same words written otherwise. Whether they mean the same is open."""
        self._way.settle()
        folded = self._view.folded(key)
        if folded is None:
            return None
        return self._found(self._view.by_folded(folded), key, 1.0, ttl_s)

    def prepare(self, key: CacheKey) -> None:
        """Start reading the key's partition and context, if it is not in memory: `nearest` will need it."""
        place = self._view.place(key)
        if place is not None:
            self._places.prepare(place)

    async def nearest(
        self, key: CacheKey, vector: Vector, k: int, *, ttl_s: float | None = None, within_s: float | None = None
    ) -> list[Near]:
        """Up to `k` questions of the key's partition and context, nearest first; several may share an answer.

        Args:
            vector: unit vector of the question, [dimension].
            within_s: how long to wait where they have yet to be read from the file; None: as long as it takes.

        Raises:
            Loading: that takes longer. The reading goes on.
        """
        return await self._search.nearest(key, vector, k, ttl_s=ttl_s, within_s=within_s)

    def answer(self, near: Near, key: CacheKey, *, ttl_s: float | None = None) -> Found | None:
        """The answer to a question that `nearest` has found under that key, unless it was forgotten meanwhile."""
        self._way.settle()
        return self._found(self._view.by_ids([near.question_id]).get(near.question_id), key, near.cosine, ttl_s)

    def answer_of(self, entry_id: str) -> int | None:
        """The id of the answer whose `Entry.id` this is, while it is kept."""
        self._way.settle()
        return self._view.answer_of(entry_id)

    def question_of(self, exact: str) -> tuple[int, int] | None:
        """Question and answer by the question's `CacheKey.exact`, while they are kept."""
        self._way.settle()
        known = self._view.by_exact(self._view.exact(exact))
        return None if known is None else (known.question_id, known.answer_id)

    def used(self, answer_id: int) -> None:
        """Count an answer as served: it is worth more."""
        self._way.used(answer_id)

    def put(
        self, key: CacheKey, entry: Entry, vector: Vector | None, author: str = "", *, vector_later: bool = False
    ) -> Kept:
        """Keep an answer, in place of any earlier one to the same request.

        Args:
            vector: of the question, [dimension]; None: the same words only will find it.
            author: who asked, which limits on aliases are for.
            vector_later: it is to get a vector that cannot be made now (see `without_vector`).

        Raises:
            ValueError: the vector holds NaN or infinity.
        """
        self._way.settle()
        if entry.expired(self._clock()):
            return Kept(None, "expired")
        id = self._way.new_id()
        question = self._question(key, id, author, vector, fuzzy=vector is not None or vector_later)
        change = PutAnswer(question, entry)
        if change.size_bytes > self._most_answer_bytes:
            return Kept(None, "too_large")
        self._make_way(question.exact)
        self._way.submit(change)
        self._index(question)
        if self.listener is not None:
            self.listener.stored(key, entry, vector, author)
        return Kept(id)

    def add_alias(
        self, key: CacheKey, answer_id: int, vector: Vector | None, author: str, *, vector_later: bool = False
    ) -> str | None:
        """Let another question of the answer's partition and context find the answer, as long as that lives.

        An answer that was kept for this very question goes.

        Returns: None, or why not: `unknown_answer` (gone, or of another partition or context), `too_many_questions`
        (of this answer, or of this author's to it), `too_large`.

        Raises:
            ValueError: the vector holds NaN or infinity.
        """
        self._way.settle()
        own = self._view.own_question(answer_id)
        if own is None or own.entry.expired(self._clock()) or own.place != self._view.place(key):
            return "unknown_answer"
        exact = self._view.exact(key.exact)
        same = self._view.by_exact(exact)
        if same is not None and same.answer_id == answer_id:
            return None
        authors = self._view.authors(answer_id)
        if len(authors) >= MAX_ALIASES or authors.count(author) >= MAX_ALIASES_OF_AUTHOR:
            return "too_many_questions"
        question = self._question(key, answer_id, author, vector, fuzzy=vector is not None or vector_later)
        if question.size_bytes > self._most_answer_bytes:
            return "too_large"
        self._make_way(exact)
        self._way.submit(AddQuestion(question))
        self._index(question)
        if self.listener is not None:
            self.listener.aliased(key, own.entry.id, vector, author)
        return None

    def forget(self, answer_id: int) -> bool:
        """Forget an answer with all its questions; False when there is none."""
        self._way.settle()
        own = self._view.own_question(answer_id)
        if own is None:
            return False
        self._way.submit(ForgetAnswer(answer_id))
        if self.listener is not None:
            self.listener.forgotten(own.entry.id)
        return True

    def forget_question(self, question_id: int) -> bool:
        """Forget a question; with the one that the answer was given to, the answer. False when there is none."""
        self._way.settle()
        known = self._view.by_ids([question_id]).get(question_id)
        if known is None:
            return False
        if known.own:
            return self.forget(known.answer_id)
        self._way.submit(ForgetQuestion(question_id))
        self._places.remove(known.place, question_id)
        if self.listener is not None:
            self.listener.question_forgotten(known.exact, known.entry.id)
        return True

    async def purge(self, purge: Purge) -> int:
        """Forget answers; returns how many, once the file says so. They are not found from the first moment on.

        More than some hundred are taken out of the file afterwards, in pieces, if need be by a later process.

        Raises:
            OSError: the file cannot be written now: they are gone while this process lives, and from the file once it
                can be written again.
        """
        self._way.settle()
        born_before = None if purge.older_than_s is None else self._clock() - purge.older_than_s
        change = PurgeAnswers(purge, self._view.named(purge), born_before, self._way.latest_id)
        if self.listener is not None:
            self.listener.purged(purge)
        return await self._way.written(change)

    async def expire(self) -> int:
        """Take what is past its time out of the file; returns how many answers. They are not found anyway.

        Raises:
            OSError: the file cannot be written now.
        """
        self._way.settle()
        self._way.count_uses()
        return await self._way.written(Expire(self._clock()))

    def without_vector(self, count: int) -> list[tuple[int, int, str | None]]:
        """Some questions in the file whose vector is yet to be made, for `set_vector`: (place, question id, text)."""
        self._way.settle()
        return self._reader.without_vector(count)

    def set_vector(self, place: int, question_id: int, vector: Vector | None) -> None:
        """Give a question its vector; None: it can have none, and the same words only find it."""
        self._way.settle()
        self._way.submit(SetVector(question_id, place, vector))
        if vector is None:
            return
        self._places.add(place, question_id, vector)
        known = self._view.by_ids([question_id]).get(question_id)
        names = self._reader.place_key(place)
        if self.listener is not None and known is not None and names is not None:
            key = CacheKey(known.scope, *names, known.text, known.exact)
            if known.own:
                self.listener.stored(key, known.entry, vector, known.author)
            else:
                self.listener.aliased(key, known.entry.id, vector, known.author)

    async def flush(self) -> None:
        """Wait until everything up to now is in the file.

        Raises:
            OSError: the file cannot be written now.
        """
        self._way.count_uses()
        await self._way.written(CountUses({}))

    def close(self) -> None:
        """Write what is left, as far as it can be written."""
        self._way.count_uses()
        self._writer.close()
        self._places.close()
        self._reader.close()
        self._disk.close()

    def _question(self, key: CacheKey, answer_id: int, author: str, vector: Vector | None, *, fuzzy: bool) -> Question:
        if vector is not None and not np.isfinite(vector).all():
            raise ValueError("a vector holds NaN or infinity")
        digest = self._view.place_digest(key)
        place = self._view.place(key)
        if place is None:
            place = self._way.new_place()
            self._view.remember_place(digest, place)
            if vector is not None:
                self._places.begin(place, len(vector))
        return Question(
            id=self._way.new_id(),
            answer_id=answer_id,
            place=place,
            place_digest=digest,
            exact=self._view.exact(key.exact),
            folded=self._view.folded(key) if fuzzy else None,
            key=key,
            author=author,
            vector=vector,
            fuzzy=fuzzy,
        )

    def _index(self, question: Question) -> None:
        if question.vector is not None:
            self._places.add(question.place, question.id, question.vector)

    def _make_way(self, exact: bytes) -> None:
        """What was known of this very request is of no more use: the answer, or the alias alone."""
        known = self._view.by_exact(exact)
        if known is None:
            return
        if known.own:
            self._way.submit(ForgetAnswer(known.answer_id))
        else:
            self._way.submit(ForgetQuestion(known.question_id))
        self._places.remove(known.place, known.question_id)

    def _found(self, known: Known | None, key: CacheKey, cosine: float, ttl_s: float | None) -> Found | None:
        # The scope is in the digests already. Should they ever fail, no tenant sees another's answer.
        if known is None or known.scope != key.scope or known.entry.expired(self._clock(), ttl_s=ttl_s):
            return None
        return Found(known.question_id, known.answer_id, cosine, known.text, known.entry)
