"""Purges on their way out of the cache's file.

A purge of many answers is one row at first, so that it is made at once and outlasts a kill; what it means is taken out
in pieces between other changes. Until then whoever reads the file hides it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cache.store.changes import PurgeAnswers

# Answers in one piece of work on the file.
AT_ONCE = 500
_TAG_MARK = "\x1f"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PurgeAnswers)


@dataclass(slots=True)
class _Noted:
    """A purge with its number in the file, and up to which id nothing of it is left."""

    number: int
    change: PurgeAnswers
    after: int = 0


class Purges:
    """The purges that are noted in the file, oldest first. `left`: answers that they mean. Nothing here commits."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.left = 0
        self._db = connection
        self._noted: list[_Noted] = []
        for number, body in connection.execute("SELECT id, body FROM purges ORDER BY id").fetchall():
            change = _decoder.decode(body)
            self.left += self.meant(change)
            self._noted.append(_Noted(number, change))

    @property
    def changes(self) -> list[PurgeAnswers]:
        return [one.change for one in self._noted]

    def meant(self, change: PurgeAnswers) -> int:
        """How many answers a purge means that no noted one does."""
        condition, values = _condition(change)
        for one in self._noted:
            other, more = _condition(one.change)
            condition, values = f"{condition} AND NOT ({other})", values + more
        count: int = self._db.execute(f"SELECT count(*) FROM answers WHERE {condition}", values).fetchone()[0]
        return count

    def ids(self, change: PurgeAnswers, after: int = 0) -> list[int]:
        """Answers that a purge means, `AT_ONCE` at most, those behind an id."""
        condition, values = _condition(change)
        query = f"SELECT id FROM answers WHERE id > ? AND {condition} ORDER BY id LIMIT {AT_ONCE}"
        return [id for (id,) in self._db.execute(query, [after, *values]).fetchall()]

    def note(self, change: PurgeAnswers, means: int) -> None:
        """Keep a purge that means so many answers until they are taken out."""
        query = "INSERT INTO purges (body) VALUES (?) RETURNING id"
        (number,) = self._db.execute(query, (_encoder.encode(change),)).fetchone()
        self._noted.append(_Noted(number, change))
        self.left += means

    def next_ids(self) -> list[int]:
        """What is to be taken out next."""
        oldest = self._noted[0]
        return self.ids(oldest.change, oldest.after)

    def advance(self, ids: Sequence[int]) -> PurgeAnswers | None:
        """These were taken out; returns the purge that is done with it, if one is."""
        oldest = self._noted[0]
        if len(ids) == AT_ONCE:
            oldest.after = ids[-1]
            return None
        self._db.execute("DELETE FROM purges WHERE id = ?", (oldest.number,))
        return self._noted.pop(0).change

    def removing(self, ids: Sequence[int]) -> None:
        """These answers are about to go, for whatever reason."""
        if not self._noted:
            return
        known = [_condition(one.change) for one in self._noted]
        meant = " OR ".join(f"({condition})" for condition, _ in known)
        query = f"SELECT count(*) FROM answers WHERE id IN ({','.join('?' * len(ids))}) AND ({meant})"
        values = [*ids, *(value for _, values in known for value in values)]
        self.left -= self._db.execute(query, values).fetchone()[0]

    def clear(self) -> None:
        """No answer is in the file any more."""
        self._db.execute("DELETE FROM purges")
        self._noted.clear()
        self.left = 0


def marked(tags: Sequence[str]) -> str:
    """Tags as an answer's row has them, so that one can be found among them."""
    return "".join(f"{_TAG_MARK}{tag}{_TAG_MARK}" for tag in tags)


def unmarked(tags: str) -> tuple[str, ...]:
    """The tags of an answer's row."""
    return tuple(tag for tag in tags.split(_TAG_MARK) if tag)


def _condition(change: PurgeAnswers) -> tuple[str, list[object]]:
    purge = change.purge
    conditions: list[tuple[str, object]] = [("id <= ?", change.up_to_id)]
    conditions += [("scope = ?", purge.scope)] if purge.scope is not None else []
    conditions += [("model = ?", purge.model)] if purge.model is not None else []
    conditions += [("policy = ?", purge.policy)] if purge.policy is not None else []
    conditions += [("created_at <= ?", change.born_before)] if change.born_before is not None else []
    conditions += [("instr(tags, ?)", marked((purge.tag,)))] if purge.tag is not None else []
    conditions += [("id = ?", change.answer_id)] if change.answer_id is not None else []
    return " AND ".join(text for text, _ in conditions), [value for _, value in conditions]
