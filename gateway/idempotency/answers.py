"""The answers that a process remembers by idempotency key, within bounds of time, number and bytes.

    find ─► none ─► open ─► room … room ─► close ─► kept for `ttl_s`, or dropped

Running and kept answers share the bytes. Where they run short the oldest kept ones go first, then the answer that
grows is not kept: `room` says so. One event loop; nothing is awaited.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from gateway.idempotency.recording import PART_BYTES, PIECE_BYTES, Recording

# What an answer takes beside its body: the recording, its head, its places in the tables.
ENTRY_BYTES: Final = 2048
# One answer takes at most this part of all bytes, so that a single one does not push out all others.
ANSWER_SHARE: Final = 8


class Answers:
    """`bytes` is what all of them take, `evicted` how many went before their time."""

    def __init__(
        self, ttl_s: float, max_entries: int, max_bytes: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ttl_s = ttl_s
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._clock = clock
        self._running: dict[str, Recording] = {}
        self._kept: OrderedDict[str, tuple[float, Recording]] = OrderedDict()  # by age, with the end of each one's time
        self.bytes = 0
        self.evicted = 0

    def __len__(self) -> int:
        """How many are kept; those that run are as many as the requests that run."""
        return len(self._kept)

    def find(self, id: str) -> Recording | None:
        """The answer of that key, running or kept."""
        self._expire()
        kept = self._kept.get(id)
        return self._running.get(id) if kept is None else kept[1]

    def open(self, id: str, recording: Recording) -> None:
        """A request with that key begins to run; there is none yet."""
        self._expire()
        self._running[id] = recording
        recording.bytes = ENTRY_BYTES
        self.bytes += ENTRY_BYTES
        self._make_room()

    def room(self, recording: Recording, size: int) -> bool:
        """Count so many bytes more of a running answer. False: they do not fit, and it can only be given, not kept."""
        more = size + PART_BYTES * (1 + size // PIECE_BYTES)
        if recording.bytes + more > self._max_bytes // ANSWER_SHARE:
            return False
        recording.bytes += more
        self.bytes += more
        if self._make_room():
            return True
        recording.bytes -= more
        self.bytes -= more
        return False

    def forget_content(self, recording: Recording) -> None:
        """A running answer's content is not kept."""
        self.bytes -= recording.bytes - ENTRY_BYTES
        recording.bytes = ENTRY_BYTES

    def close(self, id: str, recording: Recording) -> None:
        """It has ended: keep it or drop it, as its state says."""
        del self._running[id]
        if recording.state not in ("whole", "too_large"):
            self.bytes -= recording.bytes
            return
        self._kept[id] = (self._clock() + self._ttl_s, recording)
        if len(self._kept) > self._max_entries:
            self._evict()
        self._make_room()

    def _make_room(self) -> bool:
        while self.bytes > self._max_bytes and self._kept:
            self._evict()
        return self.bytes <= self._max_bytes

    def _evict(self) -> None:
        _, (_, recording) = self._kept.popitem(last=False)
        self.bytes -= recording.bytes
        self.evicted += 1

    def _expire(self) -> None:
        now = self._clock()
        while self._kept:
            id, (until, recording) = next(iter(self._kept.items()))
            if until > now:
                return
            del self._kept[id]
            self.bytes -= recording.bytes
