"""The tables of the cache's file, and every change to them.

    answers    one row an answer: whose, by which model, how old, how much it is worth. Narrow, for purging and evicting
    bodies     the answer itself, sealed
    questions  one row a question, by exact and folded digest; its text sealed
    vectors    one row a question that other words may find, sorted by place, so that a place is read in one go
    places     numbers of partition and context, by digest
    purges     those whose answers are yet to be erased; until then whoever reads must hide them
    facts      one row: running totals, the next ids

Nothing here commits: who calls decides what belongs together.

What an answer is worth: L + (1 + hits) * saved cost / bytes, and the answer of least worth goes first, whose worth then
becomes L. So an answer that nobody asks for again sinks below newer ones (GreedyDual-Size-Frequency; Cherkasova,
"Improving WWW proxies performance with greedy-dual-size-frequency caching policy", HP Labs 1998).
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from cache.entry import Entry
from cache.store.changes import (
    AddQuestion,
    Batch,
    CountUses,
    Expire,
    ForgetAnswer,
    ForgetQuestion,
    PurgeAnswers,
    PutAnswer,
    Question,
    SetVector,
    SmallChange,
    Vector,
)
from cache.store.cipher import Sealer
from cache.store.purges import AT_ONCE, Purges, marked

SCHEMA_VERSION = 4
SCHEMA = """
CREATE TABLE answers (
    id INTEGER PRIMARY KEY, question INTEGER NOT NULL, request BLOB NOT NULL, scope TEXT NOT NULL, model TEXT NOT NULL,
    policy TEXT NOT NULL, tags TEXT NOT NULL, created_at REAL NOT NULL, expires_at REAL NOT NULL,
    bytes INTEGER NOT NULL, saves REAL NOT NULL, hits INTEGER NOT NULL, worth REAL NOT NULL
);
CREATE INDEX answers_worth ON answers (worth);
CREATE INDEX answers_expiry ON answers (expires_at);
CREATE INDEX answers_scope ON answers (scope);
CREATE INDEX answers_request ON answers (request);
CREATE TABLE bodies (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE questions (
    id INTEGER PRIMARY KEY, answer INTEGER NOT NULL, place INTEGER NOT NULL, exact BLOB NOT NULL, folded BLOB,
    author TEXT NOT NULL, body BLOB NOT NULL
);
CREATE UNIQUE INDEX questions_exact ON questions (exact);
CREATE INDEX questions_answer ON questions (answer);
CREATE INDEX questions_place ON questions (place);
CREATE INDEX questions_folded ON questions (folded) WHERE folded IS NOT NULL;
CREATE TABLE vectors (
    place INTEGER NOT NULL, question INTEGER NOT NULL, embedder INTEGER NOT NULL, body BLOB,
    PRIMARY KEY (place, question)
) WITHOUT ROWID;
CREATE INDEX vectors_embedder ON vectors (embedder);
CREATE TABLE places (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body BLOB NOT NULL);
CREATE TABLE purges (id INTEGER PRIMARY KEY, body BLOB NOT NULL);
CREATE TABLE embedders (id INTEGER PRIMARY KEY, fingerprint TEXT NOT NULL UNIQUE);
CREATE TABLE facts (
    one INTEGER PRIMARY KEY CHECK (one = 1), key_version TEXT NOT NULL, secret BLOB NOT NULL,
    embedder INTEGER NOT NULL, answers INTEGER NOT NULL, questions INTEGER NOT NULL, vectors INTEGER NOT NULL,
    waiting INTEGER NOT NULL, next_id INTEGER NOT NULL, next_place INTEGER NOT NULL, level REAL NOT NULL
);
"""
# A vector that is yet to be made. Real embedders count from 1.
NO_EMBEDDER = 0
# What an answer saves at least, whatever its model cost: the time to make it again.
_LEAST_SAVING_NANOUSD = 10_000

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Entry)
_pair_decoder = msgspec.msgpack.Decoder(tuple[str, str])


class Totals(msgspec.Struct, frozen=True):
    """What the file holds; `answers` without those that were purged and are yet to be erased.

    `vectors` are those of the present embedder, `waiting` those yet to be made.
    """

    answers: int = 0
    questions: int = 0
    vectors: int = 0
    waiting: int = 0


class Tables:
    """Changes through one connection. `embedder` is the number of the present embedder in this file."""

    def __init__(self, connection: sqlite3.Connection, sealer: Sealer, embedder: int) -> None:
        self._db = connection
        self._sealer = sealer
        self._embedder = embedder
        row = connection.execute("SELECT answers, questions, vectors, waiting, level FROM facts").fetchone()
        self._answers, self._questions, self._vectors, self._waiting, self._level = row
        self._purges = Purges(connection)

    @property
    def totals(self) -> Totals:
        return Totals(self._answers - self._purges.left, self._questions, self._vectors, self._waiting)

    @property
    def answers(self) -> int:
        """Answers in the file, those that are yet to be erased among them."""
        count: int = self._answers
        return count

    @property
    def erasing(self) -> list[PurgeAnswers]:
        """Purges whose answers are still in the file."""
        return self._purges.changes

    def reread(self) -> None:
        """Take the totals from the file again, after a transaction that came to nothing."""
        self.__init__(self._db, self._sealer, self._embedder)  # type: ignore[misc]

    def note(self, next_id: int, next_place: int) -> None:
        """Write the totals, and from which numbers on ids are free."""
        self._db.execute(
            "UPDATE facts SET answers = ?, questions = ?, vectors = ?, waiting = ?, level = ?,"
            " next_id = max(next_id, ?), next_place = max(next_place, ?)",
            (self._answers, self._questions, self._vectors, self._waiting, self._level, next_id, next_place),
        )

    def apply(self, change: SmallChange, batch: Batch) -> int:
        """Make a change; returns how many answers it removed. Questions whose end it was are added to `batch.gone`."""
        match change:
            case PutAnswer():
                self._put(change, batch)
                return 0
            case AddQuestion(question):
                if self._exists(question.answer_id):
                    self._put_question(question, batch)
                else:
                    batch.gone.append((question.place, question.id))
                return 0
            case SetVector():
                self._set_vector(change)
                return 0
            case ForgetAnswer(answer_id):
                return self.remove([answer_id], batch)
            case ForgetQuestion(question_id):
                return self._forget_question(question_id, batch)
            case CountUses(uses):
                self._db.executemany(
                    "UPDATE answers SET hits = hits + ?2, worth = ?3 + (1 + hits + ?2) * saves / bytes WHERE id = ?1",
                    [(id, count, self._level) for id, count in uses.items()],
                )
                return 0

    def purge(self, change: PurgeAnswers, batch: Batch) -> int:
        """Make a purge; returns how many answers it means. Many are noted only: `erase` takes them out."""
        if change.purge.everything:
            removed = self.totals.answers
            self._empty()
            batch.emptied = True
        else:
            removed = self._purges.meant(change)
            if removed <= AT_ONCE:
                self.remove(self._purges.ids(change), batch)
                batch.erased.append(change)
            else:
                self._purges.note(change, removed)
        batch.purged += removed
        return removed

    def erase(self, batch: Batch) -> None:
        """Take a bounded part of the oldest purge out of the file."""
        ids = self._purges.next_ids()
        self.remove(ids, batch)
        finished = self._purges.advance(ids)
        if finished is not None:
            batch.erased.append(finished)

    def expire(self, change: Expire, batch: Batch) -> tuple[int, bool]:
        """Forget a bounded part of what is past its time; returns how many answers, and whether there are more."""
        rows = self._db.execute(
            "SELECT id FROM answers WHERE expires_at <= ? LIMIT ?", (change.now, AT_ONCE)
        ).fetchall()
        ids = [id for (id,) in rows]
        removed = self.remove(ids, batch)
        batch.expired += removed
        return removed, len(ids) == AT_ONCE

    def evict(self, count: int, batch: Batch) -> int:
        """Forget the answers that are worth least; returns how many there were."""
        rows = self._db.execute("SELECT id, worth FROM answers ORDER BY worth, id LIMIT ?", (count,)).fetchall()
        if rows:
            self._level = rows[-1][1]
        removed = self.remove([id for id, _ in rows], batch)
        batch.evicted += removed
        return removed

    def remove(self, answer_ids: Sequence[int], batch: Batch) -> int:
        """Forget answers with all their questions; returns how many there were."""
        removed = 0
        for start in range(0, len(answer_ids), AT_ONCE):
            ids = list(answer_ids[start : start + AT_ONCE])
            marks = _marks(ids)
            self._purges.removing(ids)
            questions = self._db.execute(f"SELECT place, id FROM questions WHERE answer IN ({marks})", ids).fetchall()
            self._remove_questions(questions, batch)
            self._db.execute(f"DELETE FROM bodies WHERE id IN ({marks})", ids)
            removed += self._db.execute(f"DELETE FROM answers WHERE id IN ({marks})", ids).rowcount
        self._answers -= removed
        return removed

    def _exists(self, answer_id: int) -> bool:
        return self._db.execute("SELECT 1 FROM answers WHERE id = ?", (answer_id,)).fetchone() is not None

    def _put(self, change: PutAnswer, batch: Batch) -> None:
        entry, question = change.entry, change.question
        id = question.answer_id
        if self._exists(id):
            return  # it was written when something after it failed, and comes again
        body = self._sealer.seal(_encoder.encode(entry), answer_binding(id))
        size = len(body) + question.size_bytes
        saves = float(max(entry.cost_nanousd, _LEAST_SAVING_NANOUSD))
        self._put_question(question, batch)
        self._db.execute("INSERT INTO bodies VALUES (?, ?)", (id, body))
        self._db.execute(
            "INSERT INTO answers VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0, ?)",
            (
                id, question.id, request_digest(entry.id), question.key.scope, entry.model, entry.policy,
                marked(entry.tags), entry.created_at, entry.expires_at, size, saves, self._level + saves / size,
            ),
        )  # fmt: skip
        self._answers += 1

    def _put_question(self, question: Question, batch: Batch) -> None:
        """Write a question in place of any that holds its exact digest."""
        held = self._db.execute("SELECT id FROM questions WHERE exact = ?", (question.exact,)).fetchone()
        if held is not None and held[0] == question.id:
            return
        if held is not None:
            self._forget_question(held[0], batch)
        self._put_place(question)
        key = question.key
        self._db.execute(
            "INSERT INTO questions VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                question.id, question.answer_id, question.place, question.exact, question.folded, question.author,
                self._sealer.seal(_encoder.encode((key.text, key.exact)), question_binding(question.id)),
            ),
        )  # fmt: skip
        self._questions += 1
        if question.fuzzy:
            self._write_vector(question.place, question.id, question.vector)

    def _put_place(self, question: Question) -> None:
        place, key = question.place, question.key
        if self._db.execute("SELECT 1 FROM places WHERE id = ?", (place,)).fetchone() is None:
            body = self._sealer.seal(_encoder.encode((key.partition, key.context)), place_binding(place))
            self._db.execute("INSERT INTO places VALUES (?, ?, ?)", (place, question.place_digest, body))

    def _write_vector(self, place: int, question_id: int, vector: Vector | None) -> None:
        body = None if vector is None else self._sealer.seal(packed(vector), vector_binding(question_id))
        embedder = NO_EMBEDDER if vector is None else self._embedder
        self._db.execute("INSERT OR REPLACE INTO vectors VALUES (?, ?, ?, ?)", (place, question_id, embedder, body))
        if vector is None:
            self._waiting += 1
        else:
            self._vectors += 1

    def _set_vector(self, change: SetVector) -> None:
        self._drop_vectors([(change.place, change.question_id)])
        known = self._db.execute("SELECT 1 FROM questions WHERE id = ?", (change.question_id,)).fetchone()
        if known is not None and change.vector is not None:
            self._write_vector(change.place, change.question_id, change.vector)

    def _drop_vectors(self, questions: Iterable[tuple[int, int]]) -> None:
        for place, id in questions:
            row = self._db.execute(
                "DELETE FROM vectors WHERE place = ? AND question = ? RETURNING embedder", (place, id)
            ).fetchone()
            if row is not None and row[0] == self._embedder:
                self._vectors -= 1
            elif row is not None:
                self._waiting -= 1

    def _forget_question(self, question_id: int, batch: Batch) -> int:
        """Forget a question; with it its answer, if it is the one that was given to it, or no other is left."""
        row = self._db.execute(
            "SELECT q.place, q.answer, a.question = q.id FROM questions q LEFT JOIN answers a ON a.id = q.answer"
            " WHERE q.id = ?",
            (question_id,),
        ).fetchone()
        if row is None:
            return 0
        place, answer_id, own = row
        if own or own is None:
            return self.remove([answer_id], batch)
        self._remove_questions([(place, question_id)], batch)
        return 0

    def _remove_questions(self, questions: list[tuple[int, int]], batch: Batch) -> None:
        self._drop_vectors(questions)
        ids = [id for _, id in questions]
        self._questions -= self._db.execute(f"DELETE FROM questions WHERE id IN ({_marks(ids)})", ids).rowcount
        for place in {place for place, _ in questions}:
            self._db.execute(
                "DELETE FROM places WHERE id = ?1 AND NOT EXISTS (SELECT 1 FROM questions WHERE place = ?1)", (place,)
            )
        batch.gone += questions

    def _empty(self) -> None:
        """Forget every answer, without looking at each."""
        for table in ("answers", "bodies", "questions", "vectors", "places"):
            self._db.execute(f"DELETE FROM {table}")
        self._answers = self._questions = self._vectors = self._waiting = 0
        self._purges.clear()


def _marks(values: Sequence[object]) -> str:
    return ",".join("?" * len(values))


def packed(vector: Vector) -> bytes:
    """A vector with 16 bits a number: inner products of unit vectors change by less than 1e-4."""
    return vector.astype(np.float16).tobytes()


def unpacked(data: bytes) -> Vector:
    return np.frombuffer(data, dtype=np.float16).astype(np.float32)


def decoded(value: bytes) -> Entry:
    """An entry from its bytes.

    Raises:
        msgspec.DecodeError: they are none.
    """
    return _decoder.decode(value)


def decoded_pair(value: bytes) -> tuple[str, str]:
    """Text and exact digest of a question, or partition and context of a place.

    Raises:
        msgspec.DecodeError: they are none.
    """
    return _pair_decoder.decode(value)


def request_digest(entry_id: str) -> bytes:
    return hashlib.blake2b(entry_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def answer_binding(id: int) -> bytes:
    return b"answer %d" % id


def question_binding(id: int) -> bytes:
    return b"question %d" % id


def place_binding(id: int) -> bytes:
    return b"place %d" % id


def vector_binding(question_id: int) -> bytes:
    return b"vector %d" % question_id
