"""The vector of a request for commands that explain what a gateway would do: of the cache process that runs here."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gateway.cli.common import config_path, settings_or_exit

if TYPE_CHECKING:
    from gateway.settings import Settings
    from tiers.features import Message
    from tiers.vector import Vector

_CONNECT_S: Final = 2.0


def vector_of(messages: Sequence[Message], config: Path | None) -> Vector | None:
    """What a gateway with this configuration would have its classifier look at; None: the words alone."""
    if not config_path(config).exists():
        return None
    settings = settings_or_exit(config)
    if not settings.cache.enabled or not settings.run_path("cache.sock").exists():
        return None
    return asyncio.run(_asked(settings, messages))


async def _asked(settings: Settings, messages: Sequence[Message]) -> Vector | None:
    from prometheus_client import CollectorRegistry

    from cache.client import CacheClient
    from gateway.counts import Counts
    from gateway.routing.embedding import SharedEmbedding

    nowhere = Counts("asked_total", "Not shown.", ["outcome"], CollectorRegistry())
    async with CacheClient(settings.run_path("cache.sock"), timeout_ms=settings.cache.lookup_timeout_ms) as client:
        await client.wait_connected(_CONNECT_S)
        vector, _ = await SharedEmbedding(settings, client, nowhere).of(messages)
        return vector
