"""What this process kept and Redis does not have yet: bounded, the oldest goes first and stays here only.

An answer that is lost here costs speed, never truth; what must not be lost, retractions, is in `notes.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

import msgspec

from cache.entry import Entry
from cache.replicas.records import Question

MOST: Final = 20_000
MOST_BYTES: Final = 64 * 1024 * 1024


class Put(msgspec.Struct, frozen=True):
    """An answer (`entry`) with its question, or without one another question for an answer that is known."""

    entry_id: str
    entry: Entry | None
    question: Question

    def size_bytes(self) -> int:
        size = len(self.question.text.encode()) + len(self.question.vector or b"") + 512
        return size + (self.entry.size_bytes() if self.entry is not None else 0)


class Pending:
    """Puts in the order in which they were made, one per answer and question. `dropped` counts those that went."""

    def __init__(self, most: int = MOST, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._puts: OrderedDict[tuple[str, str], Put] = OrderedDict()
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return len(self._puts)

    def add(self, put: Put) -> None:
        self.remove(put)
        self._puts[put.entry_id, put.question.exact] = put
        self._bytes += put.size_bytes()
        while len(self._puts) > self._most or self._bytes > self._most_bytes:
            _, dropped = self._puts.popitem(last=False)
            self._bytes -= dropped.size_bytes()
            self.dropped += 1

    def first(self, count: int) -> list[Put]:
        """The oldest ones; they stay until `remove`."""
        return [put for put, _ in zip(self._puts.values(), range(count), strict=False)]

    def remove(self, put: Put) -> None:
        """It is in Redis, or of no more use."""
        found = self._puts.pop((put.entry_id, put.question.exact), None)
        if found is not None:
            self._bytes -= found.size_bytes()

    def forget(self, entry_id: str, exact: str) -> None:
        found = self._puts.get((entry_id, exact))
        if found is not None:
            self.remove(found)

    def remove_if_same(self, put: Put) -> None:
        """As `remove`, unless the place has been taken by a newer one meanwhile."""
        if self._puts.get((put.entry_id, put.question.exact)) is put:
            self.remove(put)
