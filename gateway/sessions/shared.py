"""Where conversations are, in Redis, so that the next turn finds its pin at whichever process it comes to.

One round trip to find a pin, none that a request waits for to keep one. While Redis is away `find` says that it knows
nothing, at once, and what is kept meanwhile is not told later: the next turn tells it.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from gateway.access.redis_channel import Channel, RedisDown
from gateway.access.redis_shared import keep_connected
from gateway.sessions.pins import Placed

logger = logging.getLogger("tierline.sessions")

SCRIPT: Final = (Path(__file__).parent / "shared.lua").read_text()
MOST_SHARED: Final = 1_000_000

_pack = msgspec.msgpack.Encoder().encode
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Placed).decode


class SharedPins:
    """One connection's worth of `shared.lua`. `most`: pins of all processes."""

    def __init__(self, channel: Channel, *, most: int = MOST_SHARED) -> None:
        self._channel = channel
        self._most = most
        self._tasks: set[asyncio.Task[Any]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and keep connected. A Redis that is away is no reason not to start."""
        with suppress(RedisDown):
            await self._channel.connect()
        keeping = keep_connected(
            self._channel,
            lambda: self._channel.call("ping", _pack({})),
            logger,
            back="conversations are kept in Redis again",
            away="each process knows only the conversations it has served",
        )
        self._keeper = asyncio.create_task(keeping, name="sessions-redis")

    async def stop(self) -> None:
        """Tell what was kept a moment ago, then disconnect."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1)
        tasks = [*self._tasks, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._channel.aclose()

    async def find(self, id: str) -> Placed | None:
        """The pin; None: there is none, or Redis does not say."""
        try:
            reply = await self._channel.call("find", _pack({"id": id}))
        except RedisDown:
            return None
        if not reply:
            return None
        try:
            return _decode(reply)
        except msgspec.MsgspecError as error:  # another version's: as good as none
            logger.warning("a conversation's pin in Redis cannot be read: %s", error)
            return None

    def keep(self, id: str, placed: Placed, seconds: float) -> None:
        """Tell Redis, beside the request; dropped while it is away."""
        if not self._channel.connected:
            return
        told = {"id": id, "pin": _encode(placed).decode(), "seconds": seconds, "most": self._most}
        task = asyncio.create_task(self._tell(_pack(told)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _tell(self, told: bytes) -> None:
        with suppress(RedisDown):  # the keeper says so, once
            await self._channel.call("keep", told)
