"""What other gateway processes tell this one, over a connection to Redis that only listens.

It connects again by itself. What is said meanwhile is lost: whoever waits for a message asks again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.access.redis_channel import CONNECT_TIMEOUT_S, look_at

logger = logging.getLogger("tierline.flights")
_RETRY_S: Final = 0.5
# A connection on which nothing was said for so long is tried by a question, which its server must answer.
_SILENCE_S: Final = 10.0


class Subscriber:
    """Hands every message on `channel` to `heard`, which must not wait."""

    def __init__(self, url: str, channel: str, heard: Callable[[bytes], None], password: str | None = None) -> None:
        self._pool = ConnectionPool.from_url(
            url,
            password=password,
            retry=Retry(NoBackoff(), 0),
            socket_timeout=None,
            socket_connect_timeout=CONNECT_TIMEOUT_S,
            protocol=2,
            driver_info=None,
        )
        self._channel = channel
        self._heard = heard
        self._task: asyncio.Task[None] | None = None
        self.listening = asyncio.Event()

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="flights-subscriber")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            connection = self._pool.make_connection()
            work = asyncio.create_task(self._listen(connection))
            try:
                # Not cancelled and waited for: the client's code has been seen to go on after a cancellation.
                await asyncio.wait({work})
            finally:
                self.listening.clear()
                work.cancel()
                work.add_done_callback(look_at)
                closing = asyncio.create_task(_disconnect(connection))
                await asyncio.wait({closing}, timeout=CONNECT_TIMEOUT_S)
            await asyncio.sleep(_RETRY_S)

    async def _listen(self, connection: AbstractConnection) -> None:
        with suppress(RedisError, OSError, TimeoutError):
            await connection.connect()
            await connection.send_command("SUBSCRIBE", self._channel, check_health=False)
            asked = False
            while True:
                reading = asyncio.ensure_future(connection.read_response(disable_decoding=True))
                reading.add_done_callback(look_at)
                done, _ = await asyncio.wait({reading}, timeout=_SILENCE_S)
                while not done:
                    if asked:
                        reading.cancel()
                        raise TimeoutError
                    asked = True
                    await connection.send_command("PING", check_health=False)
                    done, _ = await asyncio.wait({reading}, timeout=_SILENCE_S)
                asked = False
                self._take(reading.result())

    def _take(self, reply: Any) -> None:
        if not isinstance(reply, list) or len(reply) < 3:
            return  # the answer to a PING
        if reply[0] == b"subscribe":
            self.listening.set()
        elif reply[0] == b"message":
            try:
                self._heard(reply[2])
            except Exception:
                logger.exception("a message of another gateway process could not be used")


async def _disconnect(connection: AbstractConnection) -> None:
    with suppress(RedisError, OSError, TimeoutError):
        await connection.disconnect(nowait=True)
