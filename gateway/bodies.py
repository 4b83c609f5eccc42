"""Memory for request bodies: how much of it this process and each key may hold at once.

A body of up to `FREE_BYTES` takes nothing: a connection holds as much unread. A larger one takes room for all of it
before it is read, for as long as the request lives: what was read from it, and what is written to a backend, is as
large. Who finds no room waits a little, and nothing is read from its connection meanwhile.

A key may hold as much as it leaves free: one alone half of the room, several at once less each, and a body of one that
holds nothing finds room as long as there is any.
"""

from __future__ import annotations

import asyncio
import ctypes
import time
from typing import Final

from gateway.dialects.errors import RateLimited, RequestTimeout, Unavailable

FREE_BYTES: Final = 64 * 1024
PATIENCE_S: Final = 5.0
_RETRY: Final = {"retry-after": str(round(PATIENCE_S))}
# Options of mallopt, from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


class Bodies:
    """The room of one process: `most_bytes`, of which `held_bytes` are taken."""

    def __init__(self, most_bytes: int, *, patience_s: float = PATIENCE_S) -> None:
        self._most_bytes = most_bytes
        self._patience_s = patience_s
        self._by_key: dict[str, int] = {}
        self._waiting: dict[asyncio.Future[None], tuple[str, int]] = {}
        self.held_bytes = 0

    def room(self, key_id: str, deadline: float | None = None) -> Room:
        """Room for the body of one request of a key; nothing is taken yet. `deadline` in monotonic seconds."""
        return Room(self, key_id, deadline)

    async def take(self, key_id: str, needed_bytes: int, deadline: float | None) -> None:
        """Take room, after waiting for it if there is none.

        Raises:
            RateLimited: the key holds too much of it.
            Unavailable: all keys together do.
            RequestTimeout: the deadline passed.
        """
        if self._fits(key_id, needed_bytes):
            self._take(key_id, needed_bytes)
            return
        patience_s = self._patience_s
        if deadline is not None:
            patience_s = min(patience_s, deadline - time.monotonic())
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = (key_id, needed_bytes)
        try:
            async with asyncio.timeout(patience_s):
                await turn
        except TimeoutError:
            self._undo(turn, key_id, needed_bytes)
            if patience_s < self._patience_s:
                text = "The deadline of 'x-tierline-deadline-ms' passed before there was room for the body."
                raise RequestTimeout(text) from None
            raise self._refusal(key_id, needed_bytes) from None
        except BaseException:
            self._undo(turn, key_id, needed_bytes)
            raise
        finally:
            self._waiting.pop(turn, None)

    def give_back(self, key_id: str, held_bytes: int) -> None:
        """Give room back, to those who wait for it."""
        self.held_bytes -= held_bytes
        left = self._by_key[key_id] - held_bytes
        if left:
            self._by_key[key_id] = left
        else:
            del self._by_key[key_id]
        for turn, (waiting_key, needed_bytes) in list(self._waiting.items()):
            if not turn.done() and self._fits(waiting_key, needed_bytes):
                self._take(waiting_key, needed_bytes)
                turn.set_result(None)

    def _fits(self, key_id: str, needed_bytes: int) -> bool:
        free = self._most_bytes - self.held_bytes - needed_bytes
        mine = self._by_key.get(key_id, 0)
        return free >= 0 and (not mine or mine + needed_bytes <= free)

    def _take(self, key_id: str, needed_bytes: int) -> None:
        self.held_bytes += needed_bytes
        self._by_key[key_id] = self._by_key.get(key_id, 0) + needed_bytes

    def _undo(self, turn: asyncio.Future[None], key_id: str, needed_bytes: int) -> None:
        """Nobody takes the turn, which may have come at the last moment."""
        if turn.done() and not turn.cancelled():
            self.give_back(key_id, needed_bytes)

    def _refusal(self, key_id: str, needed_bytes: int) -> RateLimited | Unavailable:
        mine = self._by_key.get(key_id, 0)
        if mine and self.held_bytes + needed_bytes <= self._most_bytes:
            text = f"Bodies of running requests of your key take {mine} bytes, too much for one of {needed_bytes} more."
            return RateLimited(f"{text} Try again when some have ended.", headers=_RETRY)
        text = f"Bodies of running requests take {self.held_bytes} of {self._most_bytes} bytes; this one needs "
        return Unavailable(f"{text}{needed_bytes}. Try again.", code="gateway_overloaded", headers=_RETRY)


class Room:
    """What one request has taken. Ends with `close`, once or more often."""

    __slots__ = ("_bodies", "_deadline", "_key_id", "held_bytes")

    def __init__(self, bodies: Bodies, key_id: str, deadline: float | None) -> None:
        self._bodies = bodies
        self._key_id = key_id
        self._deadline = deadline
        self.held_bytes = 0

    async def add(self, more_bytes: int) -> None:
        """Take room for so many bytes more.

        Raises:
            RateLimited, Unavailable, RequestTimeout: as `Bodies.take`.
        """
        await self._bodies.take(self._key_id, more_bytes, self._deadline)
        self.held_bytes += more_bytes

    def close(self) -> None:
        """Give all of it back."""
        held, self.held_bytes = self.held_bytes, 0
        if held:
            self._bodies.give_back(self._key_id, held)


def give_memory_back() -> None:
    """Have the memory of large bodies go back to the system as soon as they are freed.

    glibc learns from the first large block that is freed to keep such blocks for later, and then keeps all that were
    ever there at once. With thresholds that are set it learns nothing. It would give each thread an arena of its own as
    well: for threads that take turns, one is enough. Other C libraries do neither.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1024 * 1024)
        mallopt(_M_TRIM_THRESHOLD, 16 * 1024 * 1024)
        mallopt(_M_ARENA_MAX, 1)
