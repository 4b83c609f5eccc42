"""Give a client the answer of an earlier request: at once if it is complete, else from its first byte and then live.

Status, body and ids are the first request's; a header says that it is a replay.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Final, Protocol

from gateway.http import ASGIMessage, Header
from gateway.idempotency.recording import headers_of, status_of

if TYPE_CHECKING:
    from gateway.life import Life

REPLAYED: Final[Header] = (b"idempotent-replayed", b"true")
# How far the limits were used when the first request came says nothing about now.
_LIMITS: Final = b"x-ratelimit-"


class Source(Protocol):
    """An answer to follow: a `Recording` of this process, or a `RemoteAnswer` of another."""

    request_id: str
    fingerprint: str

    @property
    def running(self) -> bool: ...

    def joined(self) -> AbstractContextManager[None]:
        """While a client follows it: then the request that runs is not given up, though its own client leaves."""
        ...

    async def begun(self) -> ASGIMessage:
        """Wait until it begins. Raises Released, TooLarge, Unreachable."""
        ...

    def pieces(self) -> AsyncIterator[bytes]:
        """The body, from its first byte. Raises Broken, TooLarge, Unreachable."""
        ...


async def replay(life: Life, source: Source, patience_s: float | None) -> None:
    """Give the answer to the client of `life`. `patience_s`: how long it waits for all of it; a plain answer that is
    there is given however slowly it is read.

    Raises:
        TimeoutError: that was not long enough.
        Released, Broken, TooLarge, Unreachable: see there. What was given until then shows in `exchange.started`.
    """
    exchange = life.exchange
    async with asyncio.timeout(patience_s) as patience:
        start = await source.begun()
        pieces = source.pieces()
        if any(name == b"content-length" for name, _ in headers_of(start)):
            if source.running:
                # Another process may write it in parts: what breaks off must not have begun here.
                pieces = _given([piece async for piece in pieces])
            patience.reschedule(None)
        assert life.asked is not None
        life.writer = life.dialect.writer(life.asked, source.request_id)  # to say so, should it break off
        life.replay_of = source.request_id
        life.status = status_of(start)
        headers = [header for header in headers_of(start) if not header[0].startswith(_LIMITS)]
        await exchange.start(life.status, [*headers, REPLAYED], start.get("tierline.keep_alive", b""))
        async for piece in pieces:
            await exchange.write(piece)
    exchange.unwatch()  # the client has everything: its leaving ends nothing now
    await exchange.end()


async def _given(pieces: list[bytes]) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece
