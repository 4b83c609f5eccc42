"""Several gateway processes on one Redis, started once per module; `WORKERS` of the module says how many."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from tests.gateway.several import Several, several


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def upstream() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream()
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def redis(redis_binary: str) -> AsyncIterator[RedisServer]:
    server = RedisServer(redis_binary).start()
    yield server
    server.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(
    request: pytest.FixtureRequest,
    redis: RedisServer,
    upstream: MockUpstream,
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Several]:
    workers: int = request.module.WORKERS
    async with several(tmp_path_factory.mktemp("several"), redis.url, upstream, workers=workers) as running:
        yield running
