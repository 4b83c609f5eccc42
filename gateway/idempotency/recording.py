"""One answer, written once by the request that runs and followed by any number of clients, each at its own pace.

    the request that runs ── begin, add, end ──► Recording ── pieces ──► its own client
                                                                    ├──► clients that joined
                                                                    └──► other processes (`shared.py`)

A follower costs a position in the recording, never a copy of it: one that reads slowly holds up nobody and makes no
memory grow.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Final, Literal

from gateway.http import ASGIMessage, Header

State = Literal[
    "running",
    "lost",  # runs on for its own client only: the answer has become too large to keep
    "whole",  # complete, and worth keeping
    "too_large",  # likewise, but without its content
    "failed",  # ended with an error: those who follow get it, those who come later try anew
    "refused",  # ended before any backend was asked: there was nothing to join
    "gone",  # ended without an end
]

PIECE_BYTES: Final = 64 * 1024
# What a part costs beside its bytes: its object and its place in the list.
PART_BYTES: Final = 48
# A process that has asked for the answer so recently still follows it.
_WATCHED_S: Final = 5.0


class Released(Exception):
    """There is nothing to follow any more, and nothing was given yet: ask again who runs."""


class Broken(Exception):
    """The answer ended in the middle, for everybody who follows it."""


class TooLarge(Exception):
    """The answer is too large to be kept, so that only its own client gets all of it."""


class Unreachable(Exception):
    """Another process gives the answer, and it cannot be read now."""


class Recording:
    """An answer. `bytes` is what it takes in memory; whoever keeps recordings counts it, see `answers.py`."""

    __slots__ = (
        "_followers",
        "_parts",
        "_waiters",
        "bytes",
        "fingerprint",
        "refused",
        "request_id",
        "start",
        "state",
        "watched_at",
    )

    def __init__(self, request_id: str, fingerprint: str) -> None:
        self.request_id = request_id
        self.fingerprint = fingerprint
        self.start: ASGIMessage | None = None
        self.refused = False
        self.state: State = "running"
        self.bytes = 0
        self.watched_at = float("-inf")  # when another process asked last, in monotonic seconds
        self._parts: list[bytes] = []
        self._followers = 0
        self._waiters: list[asyncio.Future[None]] = []

    # -- for the request that runs -----------------------------------------------------------------------------------

    def begin(self, start: ASGIMessage, *, refused: bool) -> None:
        """Status and headers, as the ASGI message. `refused`: of a request that no backend was asked about."""
        self.start = start
        self.refused = refused
        self._wake()

    def add(self, data: bytes) -> None:
        if len(data) <= PIECE_BYTES:
            self._parts.append(data)
        else:
            self._parts += (data[first : first + PIECE_BYTES] for first in range(0, len(data), PIECE_BYTES))
        self._wake()

    def end(self, state: State) -> None:
        """From now on it is in this state. Without its content, if that is lost."""
        self.state = state
        self._wake()

    def clear(self) -> None:
        self._parts = []

    def _wake(self) -> None:
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    # -- for those who follow ----------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        return self.state in ("running", "lost")

    @property
    def followed(self) -> bool:
        """Whether anybody but its own client waits for it, here or in another process."""
        return self._followers > 0 or time.monotonic() - self.watched_at < _WATCHED_S

    @contextmanager
    def joined(self) -> Iterator[None]:
        """While a client that joined follows."""
        self._followers += 1
        try:
            yield
        finally:
            self._followers -= 1

    async def changed(self, timeout_s: float | None = None) -> None:
        """Wait until something was added, or the time is over."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await asyncio.wait((waiter,), timeout=timeout_s)

    def take(self, position: int) -> tuple[bytes, int]:
        """The next bytes from a position on, about `PIECE_BYTES` at most, and the position behind them."""
        first, size = position, 0
        while position < len(self._parts) and size < PIECE_BYTES:
            size += len(self._parts[position])
            position += 1
        taken = self._parts[first:position]
        return taken[0] if len(taken) == 1 else b"".join(taken), position

    async def begun(self) -> ASGIMessage:
        """Status and headers, once they are known: the message that starts an answer.

        Raises:
            Released, TooLarge: see there.
        """
        while self.start is None and self.state == "running":
            await self.changed()
        if self.start is None or self.refused or self.state == "gone":
            raise Released
        if self.state in ("lost", "too_large"):
            raise TooLarge
        return self.start

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body from its first byte: what is there at once, the rest as it comes.

        Raises:
            Broken, TooLarge: see there.
        """
        position = 0
        while True:
            data, position = self.take(position)
            if data:
                yield data
            elif self.state == "running":
                await self.changed()
            elif self.state == "gone":
                raise Broken
            elif self.state in ("lost", "too_large"):
                raise TooLarge
            else:
                return


def status_of(start: ASGIMessage) -> int:
    status: int = start["status"]
    return status


def headers_of(start: ASGIMessage) -> list[Header]:
    headers: list[Header] = start["headers"]
    return headers
