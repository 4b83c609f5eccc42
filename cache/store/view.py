"""What is known at this moment: the file, with what is not written yet laid over it."""

from __future__ import annotations

from collections import OrderedDict

from cache.key import CacheKey
from cache.store.changes import Purge, Question
from cache.store.disk import Disk
from cache.store.pending import Pending
from cache.store.reader import Asked, Known, Reader
from cache.words.writing import folded_form

_KNOWN_PLACES = 50_000


class View:
    """Questions by digest and by id. One that was forgotten is not there, whether or not the file knows."""

    def __init__(self, disk: Disk, reader: Reader, pending: Pending) -> None:
        self._disk = disk
        self._reader = reader
        self._pending = pending
        self._places: OrderedDict[bytes, int] = OrderedDict()

    def exact(self, exact: str) -> bytes:
        """The digest of a `CacheKey.exact` in this file."""
        return self._disk.digest("exact", exact)

    def folded(self, key: CacheKey) -> bytes | None:
        """The digest of what all writings of the key's words share; None where there is no such form."""
        form = folded_form(key.text)
        return None if form is None else self._disk.digest("folded", key.partition, key.context, form)

    def place_digest(self, key: CacheKey) -> bytes:
        return self._disk.digest("place", key.partition, key.context)

    def by_exact(self, exact: bytes) -> Known | None:
        waiting = self._pending.by_exact(exact)
        return self._unhidden(self._reader.by_exact(exact) if waiting is None else self._known(waiting))

    def by_folded(self, folded: bytes) -> Known | None:
        waiting = self._pending.by_folded(folded)
        return self._unhidden(self._reader.by_folded(folded) if waiting is None else self._known(waiting))

    def by_ids(self, question_ids: list[int]) -> dict[int, Known]:
        waiting = [question for id in question_ids if (question := self._pending.question(id)) is not None]
        known = {question.id: found for question in waiting if (found := self._known(question)) is not None}
        rest = [id for id in question_ids if id not in known]
        known |= self._reader.by_ids(rest) if rest else {}
        return {id: one for id, one in known.items() if self._unhidden(one) is not None}

    def asked(self, question_ids: list[int]) -> dict[int, Asked]:
        """The same without their answers."""
        waiting = [question for id in question_ids if (question := self._pending.question(id)) is not None]
        known = {question.id: _asked(found) for question in waiting if (found := self._known(question)) is not None}
        rest = [id for id in question_ids if id not in known]
        known |= self._reader.asked(rest) if rest else {}
        return {id: one for id, one in known.items() if not self._pending.hides(id, one.answer_id, one.scope, one)}

    def own_question(self, answer_id: int) -> Known | None:
        """An answer, with the question that it was given to."""
        put = self._pending.answer(answer_id)
        return self._unhidden(self._reader.own_question(answer_id) if put is None else self._known(put.question))

    def answer_of(self, entry_id: str) -> int | None:
        id = self._pending.by_request(entry_id)
        id = self._reader.by_request(entry_id) if id is None else id
        return None if id is None or self.own_question(id) is None else id

    def named(self, purge: Purge) -> int | None:
        """The one answer that a purge is about, 0 when there is none, None when it is about more."""
        named = set()
        if purge.exact is not None:
            known = self.by_exact(self.exact(purge.exact))
            named.add(0 if known is None else known.answer_id)
        if purge.entry is not None:
            named.add(self.answer_of(purge.entry) or 0)
        if not named:
            return None
        return named.pop() if len(named) == 1 else 0

    def authors(self, answer_id: int) -> list[str]:
        """Who asked the aliases of an answer, each as often as they did."""
        found = self._reader.authors(answer_id)
        put = self._pending.answer(answer_id)
        own = None if put is None else put.question.id
        for question in self._pending.questions_of(answer_id):
            if question.id != own:
                found[question.id] = question.author
        return list(found.values())

    def place(self, key: CacheKey) -> int | None:
        """The number of the key's partition and context, if anything was put there."""
        digest = self.place_digest(key)
        place = self._places.get(digest)
        if place is not None:
            self._places.move_to_end(digest)
            return place
        place = self._pending.place(digest)
        place = self._reader.place(digest) if place is None else place
        if place is not None:
            self.remember_place(digest, place)
        return place

    def remember_place(self, digest: bytes, place: int) -> None:
        self._places[digest] = place
        if len(self._places) > _KNOWN_PLACES:
            self._places.popitem(last=False)

    def forget_place(self, key: CacheKey) -> None:
        """It may be empty: look again whether it exists."""
        self._places.pop(self.place_digest(key), None)

    def clear(self) -> None:
        """The file is another one, or empty."""
        self._places.clear()

    def _known(self, question: Question) -> Known | None:
        """A question that waits to be written, with its answer, which may be in the file."""
        put = self._pending.answer(question.answer_id)
        if put is not None:
            scope, entry, own = put.question.key.scope, put.entry, put.question.id == question.id
        else:
            first = self._reader.own_question(question.answer_id)
            if first is None:
                return None
            scope, entry, own = first.scope, first.entry, first.question_id == question.id
        key = question.key
        return Known(
            question.id, question.answer_id, question.place, question.author, key.text, key.exact, scope, own, entry
        )

    def _unhidden(self, known: Known | None) -> Known | None:
        if known is None or self._pending.hides(known.question_id, known.answer_id, known.scope, known.entry):
            return None
        return known


def _asked(known: Known) -> Asked:
    entry = known.entry
    return Asked(
        known.question_id,
        known.answer_id,
        known.text,
        known.scope,
        entry.model,
        entry.policy,
        entry.tags,
        entry.created_at,
        entry.expires_at,
    )
