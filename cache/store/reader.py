"""Reads single answers and questions from the cache's file, and opens what lies sealed there.

A value that does not open is as good as absent. A file that turns out to be broken is reported to the writer, which
replaces it; until then, and while it cannot be read, there is nothing in it.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from cache.entry import Entry
from cache.store import tables
from cache.store.cipher import Sealer, Unreadable
from cache.store.disk import Disk, is_damage
from cache.store.purges import unmarked
from cache.store.writer import Writer

_log = logging.getLogger(__name__)
_QUESTION = (
    "SELECT q.id, q.answer, q.place, q.author, q.body, a.scope, a.question, b.body"
    " FROM questions q JOIN answers a ON a.id = q.answer JOIN bodies b ON b.id = q.answer"
)


_ASKED = (
    "SELECT q.id, q.answer, q.body, a.scope, a.model, a.policy, a.tags, a.created_at, a.expires_at"
    " FROM questions q JOIN answers a ON a.id = q.answer"
)


class Asked(msgspec.Struct, frozen=True, array_like=True):
    """A question, and of its answer what says whether it may be given, but not the answer itself."""

    question_id: int
    answer_id: int
    text: str
    scope: str
    model: str
    policy: str
    tags: tuple[str, ...]
    created_at: float
    expires_at: float

    def expired(self, now: float, *, ttl_s: float | None = None) -> bool:
        """As `Entry.expired`."""
        return now >= self.expires_at or (ttl_s is not None and now - self.created_at >= ttl_s)


class Known(msgspec.Struct, frozen=True):
    """A question with its answer, wherever it was found. `own`: it is the question that the answer was given to."""

    question_id: int
    answer_id: int
    place: int
    author: str
    text: str
    exact: str
    scope: str
    own: bool
    entry: Entry


class Reader:
    """Point reads, for one thread."""

    def __init__(self, disk: Disk, sealer: Sealer, writer: Writer) -> None:
        self.unreadable = 0
        self._disk = disk
        self._sealer = sealer
        self._writer = writer
        self._generation = disk.generation
        self._db = disk.connect()
        self._failing = False

    def close(self) -> None:
        if not self._disk.in_memory:
            self._db.close()

    def by_exact(self, exact: bytes) -> Known | None:
        return self._known(self._rows(f"{_QUESTION} WHERE q.exact = ?", (exact,)))

    def by_folded(self, folded: bytes) -> Known | None:
        """The latest question of that folded form."""
        return self._known(self._rows(f"{_QUESTION} WHERE q.folded = ? ORDER BY q.id DESC LIMIT 1", (folded,)))

    def by_ids(self, question_ids: Sequence[int]) -> dict[int, Known]:
        marks = ",".join("?" * len(question_ids))
        rows = self._rows(f"{_QUESTION} WHERE q.id IN ({marks})", question_ids)
        opened = (self._opened(row) for row in rows)
        return {known.question_id: known for known in opened if known is not None}

    def asked(self, question_ids: Sequence[int]) -> dict[int, Asked]:
        """The same without answers, which may be long."""
        marks = ",".join("?" * len(question_ids))
        found = {}
        for id, answer_id, body, scope, model, policy, tags, *times in self._rows(
            f"{_ASKED} WHERE q.id IN ({marks})", question_ids
        ):
            pair = self._pair(body, tables.question_binding(id))
            if pair is None:
                continue
            try:  # the row's own columns are not sealed: damage may have made anything of them
                row = (id, answer_id, pair[0], scope, model, policy, unmarked(str(tags)), *times)
                found[id] = msgspec.convert(row, Asked)
            except msgspec.ValidationError as error:
                self._complain(error)
        return found

    def own_question(self, answer_id: int) -> Known | None:
        """An answer with the question that it was given to."""
        return self._known(self._rows(f"{_QUESTION} WHERE q.id = a.question AND a.id = ?", (answer_id,)))

    def authors(self, answer_id: int) -> dict[int, str]:
        """Who asked the other questions of an answer, by question."""
        rows = self._rows(
            "SELECT q.id, q.author FROM questions q JOIN answers a ON a.id = q.answer"
            " WHERE q.answer = ? AND q.id <> a.question",
            (answer_id,),
        )
        return dict(rows)

    def by_request(self, entry_id: str) -> int | None:
        """The latest answer of that `Entry.id`."""
        rows = self._rows("SELECT max(id) FROM answers WHERE request = ?", (tables.request_digest(entry_id),))
        return rows[0][0] if rows else None

    def place(self, digest: bytes) -> int | None:
        rows = self._rows("SELECT id FROM places WHERE digest = ?", (digest,))
        return rows[0][0] if rows else None

    def place_key(self, place: int) -> tuple[str, str] | None:
        """Partition and context of a place."""
        rows = self._rows("SELECT body FROM places WHERE id = ?", (place,))
        return self._pair(rows[0][0], tables.place_binding(place)) if rows else None

    def without_vector(self, count: int) -> list[tuple[int, int, str | None]]:
        """Questions whose vector is yet to be made, as (place, question id, text); None: it cannot be read."""
        rows = self._rows(
            "SELECT v.place, v.question, q.body FROM vectors v LEFT JOIN questions q ON q.id = v.question"
            " WHERE v.embedder < ?1 LIMIT ?2",
            (self._disk.embedder, count),
        )
        if len(rows) < count:
            rows += self._rows(
                "SELECT v.place, v.question, q.body FROM vectors v LEFT JOIN questions q ON q.id = v.question"
                " WHERE v.embedder > ?1 LIMIT ?2",
                (self._disk.embedder, count - len(rows)),
            )
        found = []
        for place, id, body in rows:
            pair = None if body is None else self._pair(body, tables.question_binding(id))
            found.append((place, id, None if pair is None else pair[0]))
        return found

    def _known(self, rows: list[Any]) -> Known | None:
        return self._opened(rows[0]) if rows else None

    def _opened(self, row: Any) -> Known | None:
        id, answer_id, place, author, question, scope, own, body = row
        pair = self._pair(question, tables.question_binding(id))
        value = self._value(body, tables.answer_binding(answer_id))
        if pair is None or value is None:
            return None
        try:
            entry = tables.decoded(value)
        except msgspec.DecodeError as error:
            self._complain(error)
            return None
        return Known(id, answer_id, place, author, *pair, scope, own == id, entry)

    def _pair(self, sealed: bytes, bound_to: bytes) -> tuple[str, str] | None:
        value = self._value(sealed, bound_to)
        try:
            return None if value is None else tables.decoded_pair(value)
        except msgspec.DecodeError as error:
            self._complain(error)
            return None

    def _value(self, sealed: bytes, bound_to: bytes) -> bytes | None:
        try:
            return self._sealer.unseal(sealed, bound_to)
        except Unreadable as error:
            self._complain(error)
            return None

    def _complain(self, error: Exception) -> None:
        self.unreadable += 1
        if self.unreadable == 1:
            _log.warning("%s; it is not served, nor are others like it, of which `tierline cache stats` tells", error)

    def _rows(self, query: str, values: Sequence[object]) -> list[Any]:
        try:
            with self._lock():
                self._reopen()
                rows = self._db.execute(query, values).fetchall()
        except sqlite3.Error as error:
            if is_damage(error):
                self._writer.report_damage(error)
            elif not self._failing:
                _log.warning(
                    "the cache file %s cannot be read (%s): nothing is found in it until it can", self._disk.path, error
                )
            self._failing = True
            return []
        self._failing = False
        return rows

    def _reopen(self) -> None:
        if self._generation == self._disk.generation:
            return
        generation = self._disk.generation
        with contextlib.suppress(sqlite3.Error):
            self._db.close()
        self._db = self._disk.connect()
        self._generation = generation

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Connections to a file see each other's commits; the one in memory is shared."""
        if self._disk.in_memory:
            with self._disk.lock:
                yield
        else:
            yield
