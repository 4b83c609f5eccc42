"""Listens to what replicas tell of their pages (`GET /v1/kv_events`, see `engine/server/pages.py`).

It promises that the index holds a replica's pages as of the last event that came, or none of them: whenever the feed
breaks, is silent for too long or leaves something out, the replica counts as one that tells nothing until a new feed
has begun. A replica that has no such page is asked again now and then.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

import msgspec

from backends.http import HttpClient, HttpFailure
from backends.placement.index import PrefixIndex
from backends.replica import Replica
from backends.sse import EventTooLarge, SseParser

logger = logging.getLogger("tierline.backends")

CONNECT_S = 2.0
SILENCE_S = 60.0  # the engine says a word every fifteen seconds
BACK_OFF_S = 1.0
BACK_OFF_MAX_S = 30.0
NO_FEED_S = 300.0  # until one that has no feed is asked again

Hex = tuple[str, str]


class _Snapshot(msgspec.Struct):
    space: str
    sequence: int
    pages: list[Hex]
    more: bool = False


class _Change(msgspec.Struct):
    after: int
    sequence: int
    removed: list[str]
    stored: list[Hex]


_snapshot = msgspec.json.Decoder(_Snapshot)
_change = msgspec.json.Decoder(_Change)


class FeedBroken(Exception):
    """What came is no feed, or not all of it."""


class Feeds:
    """One listener per replica of a backend. `start` once there is an event loop."""

    def __init__(self, replicas: Sequence[Replica], index: PrefixIndex, client: HttpClient) -> None:
        self._replicas = replicas
        self._index = index
        self._client = client
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def listening(self) -> int:
        """Replicas that tell what they hold now."""
        return sum(self._index.tells(replica) for replica in self._replicas)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._listen(replica), name="pages") for replica in self._replicas]

    async def aclose(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _listen(self, replica: Replica) -> None:
        pause_s, said = BACK_OFF_S, ""
        while True:
            began = time.monotonic()
            try:
                await self._read(replica)
                why = "the feed ended"
            except (HttpFailure, FeedBroken, EventTooLarge) as error:
                why = str(error)
            except Exception:
                logger.exception("the pages of %s cannot be followed", replica.base_url)
                why = ""
            finally:
                for _ in self._index.end(replica):
                    await asyncio.sleep(0)
            if time.monotonic() - began > BACK_OFF_MAX_S:
                pause_s, said = BACK_OFF_S, ""
            if why and why != said:  # once per reason, not once per try
                logger.warning("%s does not tell its pages: %s", replica.base_url, why)
                said = why
            await asyncio.sleep(NO_FEED_S if why.startswith("status 4") else pause_s)
            pause_s = min(2 * pause_s, BACK_OFF_MAX_S)

    async def _read(self, replica: Replica) -> None:
        """Follow one feed to its end.

        Raises:
            HttpFailure, FeedBroken, EventTooLarge: why there is none any more.
        """
        origin = replica.endpoint.origin
        exchange = await self._client.send(
            origin,
            replica.endpoint.get(f"{origin.path}/kv_events"),
            connect_s=CONNECT_S,
            deadline=float("inf"),
            first_token_deadline=time.monotonic() + SILENCE_S,
        )
        try:
            if exchange.status != 200:
                raise FeedBroken(f"status {exchange.status}")
            if not exchange.headers.get("content-type", "").startswith("text/event-stream"):
                raise FeedBroken("status 404: what it sends is no stream of events")
            parser, follower = SseParser(), _Follower(replica, self._index)
            exchange.quiet_kind = "between_tokens_timeout"
            while True:
                exchange.quiet_deadline = time.monotonic() + SILENCE_S
                piece = await exchange.read()
                if not piece:
                    return
                for _, data, name in parser.feed(piece):
                    follower.take(name, data)
                    await asyncio.sleep(0)  # thousands of pages make no request wait for all of them
        finally:
            exchange.close()


class _Follower:
    """What has been told so far by one feed."""

    def __init__(self, replica: Replica, index: PrefixIndex) -> None:
        self._replica = replica
        self._index = index
        self._sequence: int | None = None
        self._more = False

    def take(self, name: bytes, data: bytes) -> None:
        """Put an event into the index.

        Raises:
            FeedBroken: it is none, or there was one before it that did not come.
        """
        try:
            if name == b"snapshot":
                self._begin(_snapshot.decode(data))
            elif name == b"change":
                self._change(_change.decode(data))
        except (msgspec.ValidationError, msgspec.DecodeError, ValueError) as error:
            raise FeedBroken(f"an event is not what it should be: {error}") from error

    def _begin(self, event: _Snapshot) -> None:
        if self._sequence is None:
            self._index.begin(self._replica, event.space)
        elif not self._more:
            raise FeedBroken("all is told anew: it was started again, or we were too slow")
        self._more, self._sequence = event.more, event.sequence
        self._index.change(self._replica, [], _pages(event.pages))

    def _change(self, event: _Change) -> None:
        if self._sequence is None or self._more or event.after != self._sequence:
            raise FeedBroken(f"an event follows {event.after}, but the last one was {self._sequence}")
        self._sequence = event.sequence
        self._index.change(self._replica, [bytes.fromhex(page) for page in event.removed], _pages(event.stored))


def _pages(pages: Sequence[Hex]) -> list[tuple[bytes, bytes]]:
    return [(bytes.fromhex(page), bytes.fromhex(parent)) for page, parent in pages]
