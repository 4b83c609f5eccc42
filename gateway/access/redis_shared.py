"""What every room that shares through Redis does alike: open its channel by the settings, and keep it open."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from gateway.access.counters_redis import PREFIX
from gateway.access.redis_channel import Channel, RedisDown

if TYPE_CHECKING:
    from gateway.settings import StorageSettings

RETRY_S: Final = 1.0


def redis_password() -> str | None:
    """What counts where the URL has none."""
    return os.environ.get("TIERLINE_REDIS_PASSWORD")


def open_channel(storage: StorageSettings, script: str) -> Channel:
    """A channel, not yet connected, to the Redis of the settings. Raises ValueError when the URL makes no sense."""
    assert storage.redis_url is not None
    return Channel(storage.redis_url, script, PREFIX, storage.redis_timeout_ms / 1000, redis_password())


async def keep_connected(
    channel: Channel,
    ask: Callable[[], Awaitable[object]],
    logger: logging.Logger,
    *,
    back: str,
    away: str,
    every_s: float = RETRY_S,
) -> None:
    """Ask Redis something every `every_s` until cancelled, so that no request finds out that it has gone or come back.

    Args:
        ask: what is due anyway, or a call that does nothing. Raises RedisDown.
        back, away: what is logged, once each; `away` says what follows from it.
    """
    missing = not channel.connected
    while True:
        try:
            if not channel.connected:
                await channel.connect()
            await ask()
            if missing:
                logger.info(back)
            missing = False
        except RedisDown as error:
            if not missing:
                logger.error("Redis is away (%s): %s", error, away)
            missing = True
        await asyncio.sleep(RETRY_S if missing else every_s)
