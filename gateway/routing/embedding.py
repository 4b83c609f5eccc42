"""The vector by which the answer cache searches, asked for before a request is routed, so that the classifier sees it.

    text of the last user message ─► cache process ─► vector ─► classifier
                                         └─ keeps it ─► the look-up of the same text, later, embeds nothing

Nothing waits for it longer than `routing.embedding_timeout_ms`, and nothing fails by it: without a vector the words
decide.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from cache.client import CacheClient, CacheUnavailable
from gateway.counts import Counts
from gateway.settings import Settings
from tiers.features import Message
from tiers.vector import MODEL, SIZE, Vector, asked

# A process that was too slow is left alone for so long, or every request would wait for its time limit.
_REST_S: Final = 1.0


class SharedEmbedding:
    """Asks the cache process for vectors. One for a gateway process."""

    def __init__(self, settings: Settings, cache: CacheClient | None, counts: Counts) -> None:
        self._timeout_s = settings.routing.embedding_timeout_ms / 1000
        # Another model's vectors mean something else to the classifier.
        usable = self._timeout_s > 0 and settings.cache.embedder == MODEL
        self._cache = cache if usable else None
        self._counts = counts
        self._rests_until = 0.0

    async def of(self, messages: Sequence[Message]) -> tuple[Vector | None, str | None]:
        """The vector of what is asked, if it is there in time, and what became of it; None where there is no service.

        What became of it: `used`, `words` (the text is one that only its words are to judge), `slow`, `unavailable`,
        `warming`, `failed`, or why the embedder refuses the text: `too_long`, `script_not_covered`, `overloaded`.
        """
        if self._cache is None:
            return None, None
        vector, became = await self._ask(self._cache, messages)
        self._counts.labels(became).inc()
        return vector, became

    async def _ask(self, cache: CacheClient, messages: Sequence[Message]) -> tuple[Vector | None, str]:
        text = asked(messages)
        if text is None:
            return None, "words"
        if not cache.connected or cache.state != "ready":
            return None, (cache.state if cache.connected else None) or "unavailable"
        if time.monotonic() < self._rests_until:
            return None, "slow"
        try:
            async with asyncio.timeout(self._timeout_s):
                (numbers,) = await cache.embed([text], as_questions=True)
        except (TimeoutError, CacheUnavailable) as fault:
            if isinstance(fault, CacheUnavailable) and fault.reason != "timeout":
                return None, fault.reason
            self._rests_until = time.monotonic() + _REST_S
            return None, "slow"
        if len(numbers) != SIZE:
            return None, "failed"
        return np.array(numbers, np.float32), "used"
