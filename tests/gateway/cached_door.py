"""Gateways with a cache, before one cache process of the session: each has a team of its own, so they share nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from bench.mock_upstream import MockUpstream
from tests.gateway.front_door import PRICE, FrontDoor, configuration, front_door

EXACT = """\
version: 1
name: default
owner: tests
routes: [{tier: small}]
cache: {mode: exact}
"""
SEMANTIC = EXACT.replace("exact", "semantic")


@asynccontextmanager
async def cached_door(
    root: Path,
    upstream: MockUpstream,
    cache_socket: Path,
    *,
    policy: str = EXACT,
    models: Mapping[str, Any] | None = None,
    cache: Mapping[str, Any] | None = None,
) -> AsyncIterator[FrontDoor]:
    """A gateway that uses the cache process on the socket. `models` are by name, on `upstream` and priced."""
    named = {
        name: {"backend": "up", "price": PRICE, **values}
        for name, values in (models or {"mock": {"tier": "small"}}).items()
    }
    document = configuration({"up": upstream}, named)
    document["cache"] = {"lookup_timeout_ms": 30_000.0, **(cache or {})}
    document["routing"] = {"embedding_timeout_ms": 30_000.0}
    (root / "var" / "run").mkdir(parents=True)
    (root / "var" / "run" / "cache.sock").symlink_to(cache_socket)
    async with front_door(root, document, policy=policy) as door:
        client = door.services.cache
        assert client is not None
        assert await client.wait_ready(60)
        yield door
