"""What travels between cache processes: answers with their questions, and retractions, which say what to forget.

A retraction has a number, counted by Redis. An answer carries the number that its writer had reached (its epoch): it is
dead where a retraction with a higher number means it. So a purge holds for answers that Redis still has, for processes
that were away, and for an answer that was given before the purge and arrives after it.
"""

from __future__ import annotations

import time
import uuid
from typing import Literal, Protocol

import msgspec
import numpy as np

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.changes import Purge
from cache.store.index import Vector


class Sealing(Protocol):
    """How values are kept outside this process, bound to what they belong to; see `cache.store.cipher`."""

    def seal(self, value: bytes, bound_to: bytes) -> bytes: ...

    def unseal(self, sealed: bytes, bound_to: bytes) -> bytes:
        """Raises ValueError: sealed by a key that is not among ours, for something else, or damaged."""
        ...


class Question(msgspec.Struct, frozen=True, array_like=True):
    """One question of an answer. `at` is Unix time in seconds.

    `vector` is float32, [dimension], as bytes, and means something to the embedder with this fingerprint only.
    """

    exact: str
    scope: str
    partition: str
    context: str
    text: str
    author: str
    vector: bytes | None
    embedder: str
    at: float

    @classmethod
    def of(cls, key: CacheKey, vector: Vector | None, embedder: str, author: str) -> Question:
        packed = None if vector is None else vector.astype(np.float32).tobytes()
        return cls(key.exact, key.scope, key.partition, key.context, key.text, author, packed, embedder, time.time())

    def key(self) -> CacheKey:
        return CacheKey(
            scope=self.scope, partition=self.partition, context=self.context, text=self.text, exact=self.exact
        )

    def array(self, embedder: str) -> Vector | None:
        """The vector, [dimension], if it is of this embedder."""
        if self.vector is None or self.embedder != embedder:
            return None
        return np.frombuffer(self.vector, dtype=np.float32)


class Record(msgspec.Struct, frozen=True):
    """An answer as Redis has it, its first question first."""

    entry: Entry
    questions: list[Question]
    epoch: int
    version: str  # of the keys: digests of another one never match


class Retraction(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What to forget: an answer (`entry_id`), one of its questions (`exact` too), or, as a purge, what meets every
    condition given.

    `made_at` and `born_before` are Unix times in seconds.
    """

    id: str
    kind: Literal["answer", "question", "purge"]
    made_at: float
    entry_id: str | None = None
    exact: str | None = None
    scope: str | None = None
    model: str | None = None
    tag: str | None = None
    policy: str | None = None
    born_before: float | None = None

    @classmethod
    def of_answer(cls, entry_id: str, exact: str | None = None) -> Retraction:
        kind: Literal["answer", "question"] = "answer" if exact is None else "question"
        return cls(id=uuid.uuid4().hex, kind=kind, made_at=time.time(), entry_id=entry_id, exact=exact)

    @classmethod
    def of_purge(cls, purge: Purge) -> Retraction:
        now = time.time()
        return cls(
            id=uuid.uuid4().hex,
            kind="purge",
            made_at=now,
            scope=purge.scope,
            model=purge.model,
            tag=purge.tag,
            policy=purge.policy,
            exact=purge.exact,
            entry_id=purge.entry,
            born_before=None if purge.older_than_s is None else now - purge.older_than_s,
        )

    def purge(self) -> Purge:
        """The same for the store, whose ages are counted from now."""
        age_s = None if self.born_before is None else time.time() - self.born_before
        return Purge(
            scope=self.scope,
            model=self.model,
            tag=self.tag,
            policy=self.policy,
            exact=self.exact,
            entry=self.entry_id,
            older_than_s=age_s,
        )

    def means(self, record: Record) -> bool:
        """Whether the whole answer is to be forgotten."""
        entry, questions = record.entry, record.questions
        if self.kind != "purge":
            return self.kind == "answer" and entry.id == self.entry_id
        return (
            (self.scope is None or questions[0].scope == self.scope)
            and (self.model is None or entry.model == self.model)
            and (self.policy is None or entry.policy == self.policy)
            and (self.tag is None or self.tag in entry.tags)
            and (self.entry_id is None or entry.id == self.entry_id)
            and (self.exact is None or any(question.exact == self.exact for question in questions))
            and (self.born_before is None or entry.created_at <= self.born_before)
        )

    def packed(self) -> bytes:
        return _encoder.encode(self)


_encoder = msgspec.msgpack.Encoder()
_entries = msgspec.msgpack.Decoder(Entry)
_questions = msgspec.msgpack.Decoder(Question)
_retractions = msgspec.msgpack.Decoder(Retraction)


class Unreadable(Exception):
    """What Redis has is not what this process can read: by its key of encryption, or by its form."""


def pack_entry(entry: Entry, sealing: Sealing) -> bytes:
    return sealing.seal(_encoder.encode(entry), b"answer " + entry.id.encode())


def pack_question(entry_id: str, question: Question, sealing: Sealing) -> bytes:
    return sealing.seal(_encoder.encode(question), f"question {question.exact} {entry_id}".encode())


def unpack_retraction(packed: bytes) -> Retraction:
    try:
        return _retractions.decode(packed)
    except msgspec.MsgspecError as error:
        raise Unreadable(f"a retraction cannot be read: {error}") from error


def unpack_record(id: str, fields: dict[bytes, bytes], sealing: Sealing) -> Record:
    """The answer of that id from the fields of its hash.

    Raises:
        Unreadable: sealed by a key that is not ours, or not in this form.
    """
    try:
        first = fields[b"first"].decode()
        entry = _entries.decode(sealing.unseal(fields[b"answer"], b"answer " + id.encode()))
        questions = [
            _questions.decode(sealing.unseal(value, f"question {name[2:].decode()} {id}".encode()))
            for name, value in fields.items()
            if name.startswith(b"q:")
        ]
        epoch, version = int(fields[b"epoch"]), fields[b"version"].decode()
    except (KeyError, ValueError, msgspec.MsgspecError) as error:
        raise Unreadable(f"an answer in Redis cannot be read: {type(error).__name__}: {error}") from error
    questions.sort(key=lambda question: (question.exact != first, question.at))
    if entry.id != id or not questions or questions[0].exact != first:
        raise Unreadable("an answer in Redis is not what its name says")
    return Record(entry, questions, epoch, version)
