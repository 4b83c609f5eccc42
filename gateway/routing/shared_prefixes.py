"""Gateways tell each other which beginnings of prompts they send where, through Redis: as digests, never as text.

    request goes to a replica ─► the part of its chain that is news ─┐
    others that go meanwhile ────────────────────────────────────────┴─► one message ─► the others' indexes

Only about replicas that do not tell their pages, and no more than so many bytes a second: beyond that the longest
beginning alone is told, then nothing. Nobody waits for it. While Redis is away each gateway goes by what it sends
itself, and what would have been told is lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Final

import msgspec

from backends.placement.chain import DIGEST_BYTES, Chain
from backends.placement.index import PrefixIndex
from backends.pool import Pool
from backends.replica import Replica
from gateway.access.counters_redis import PREFIX
from gateway.access.redis_channel import Channel, RedisDown
from gateway.access.redis_shared import open_channel, redis_password
from gateway.counts import Counts
from gateway.flights.subscriber import Subscriber
from gateway.ledger.rows import new_id
from gateway.settings import Settings

logger = logging.getLogger("tierline.placement")

SCRIPT: Final = "if ARGV[1] == 'ping' then return 0 end return redis.call('PUBLISH', KEYS[1] .. ':sent', ARGV[2])"
MOST_BYTES_PER_S: Final = 65_536  # of one process
MOST_WAITING: Final = 1000  # news that wait for the next message
FLUSH_S: Final = 0.05
_RETRY_S: Final = 1.0
_LINK_BYTES: Final = DIGEST_BYTES + 6  # with its number of tokens, as it is written
_NEWS_BYTES: Final = 24  # what comes with them


class _News(msgspec.Struct, frozen=True, array_like=True):
    """Something was sent: `replica` as `_name` calls it, the part of the chain, and the tokens before it."""

    replica: bytes
    before: int
    part: tuple[tuple[bytes, int], ...]


class _Message(msgspec.Struct, frozen=True, array_like=True):
    sender: str
    news: list[_News]


_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(_Message).decode


class SharedPrefixes:
    """The part of one gateway process. `counts`: of news, by what became of them: `told`, `shortened`, `dropped`."""

    def __init__(
        self,
        channel: Channel,
        subscriber: Callable[[Callable[[bytes], None]], Subscriber],
        pools: Mapping[str, Pool],
        counts: Counts,
        *,
        most_bytes_per_s: int = MOST_BYTES_PER_S,
    ) -> None:
        self._counts = counts
        self._channel = channel
        self._subscriber = subscriber(self._heard)
        self._me = new_id()
        self._known: dict[bytes, tuple[PrefixIndex, Replica]] = {}
        self._waiting: list[_News] = []
        self._most = self._allowance = float(most_bytes_per_s)
        self._at = time.monotonic()
        self._task: asyncio.Task[None] | None = None
        for name, pool in pools.items():
            if pool.placer is not None and (index := pool.placer.index) is not None:
                index.tell = partial(self._tell, name)
                self._known |= {_name(name, replica): (index, replica) for replica in pool.replicas}

    async def start(self) -> None:
        """Connect, and keep connected. A Redis that is away is no reason not to start."""
        with suppress(RedisDown):
            await self._channel.connect()
        self._subscriber.start()
        self._task = asyncio.create_task(self._run(), name="shared-prefixes")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await self._subscriber.stop()
        await self._channel.aclose()

    async def listening(self) -> None:
        """Wait until what others tell is heard."""
        await self._subscriber.listening.wait()

    def _tell(self, backend: str, replica: Replica, part: Chain, before: int) -> None:
        """A request goes to a replica. Within the bounds, it is told with the next message."""
        now = time.monotonic()
        self._allowance = min(self._most, self._allowance + (now - self._at) * self._most)
        self._at = now
        outcome = "told"
        if _NEWS_BYTES + _LINK_BYTES * len(part) > self._allowance:
            part, before, outcome = part[-1:], part[-2][1] if len(part) > 1 else before, "shortened"
        size = _NEWS_BYTES + _LINK_BYTES * len(part)
        if size > self._allowance or len(self._waiting) >= MOST_WAITING or not self._channel.connected:
            self._counts.labels("dropped").inc()
            return
        self._allowance -= size
        self._counts.labels(outcome).inc()
        self._waiting.append(_News(_name(backend, replica), before, part))

    def _heard(self, data: bytes) -> None:
        try:
            message = _decode(data)
        except msgspec.MsgspecError as error:  # another version's
            logger.warning("what another gateway sends where cannot be read: %s", error)
            return
        if message.sender == self._me:
            return
        now = time.monotonic()
        for news in message.news:
            known = self._known.get(news.replica)
            if known is not None:
                index, replica = known
                index.heard(replica, news.part, news.before, now)

    async def _run(self) -> None:
        """Send what waits, and look once a second for a Redis that is away."""
        away, looked = not self._channel.connected, time.monotonic()
        while True:
            await asyncio.sleep(FLUSH_S)
            due = time.monotonic() - looked >= _RETRY_S
            if not (due or self._waiting):
                continue
            if due:
                looked = time.monotonic()
            waiting, self._waiting = self._waiting, []
            try:
                if not self._channel.connected:
                    if not due:
                        continue
                    await self._channel.connect()
                if waiting:
                    await self._channel.call("tell", _encode(_Message(self._me, waiting)))
                else:
                    await self._channel.call("ping", b"")
                if away:
                    logger.info("gateways tell each other again what they send where")
                away = False
            except RedisDown as error:
                if not away:
                    logger.error("Redis is away (%s): each gateway goes by what it sends itself", error)
                away = True


def _name(backend: str, replica: Replica) -> bytes:
    """What all gateways call a replica, in a few bytes."""
    return hashlib.blake2b(f"{backend}\n{replica.base_url}".encode(), digest_size=8).digest()


async def open_shared_prefixes(settings: Settings, pools: Mapping[str, Pool], counts: Counts) -> SharedPrefixes:
    """Connected to Redis, or soon to be. Raises ValueError when the URL makes no sense. End it with `stop`."""
    storage = settings.storage
    assert storage.redis_url is not None
    url, password = storage.redis_url, redis_password()
    channel = open_channel(storage, SCRIPT)
    shared = SharedPrefixes(channel, lambda heard: Subscriber(url, f"{PREFIX}:sent", heard, password), pools, counts)
    await shared.start()
    return shared
