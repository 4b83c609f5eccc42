"""Two hosts, each with a gateway and a cache process of its own, on one Redis: a burst of one question is one call, and
who dies in the middle is replaced."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.keys import CreatedKey, KeyLimits, create_key
from gateway.access.secret import load_secret
from tests.gateway.several import Several, kill, several, until

pytestmark = pytest.mark.redis

POLICY = """\
version: 1
name: default
owner: tests
routes: [{tier: small}]
cache: {mode: exact}
"""
CACHE = {"cache": {"enabled": True, "lookup_timeout_ms": 30_000.0}}


@pytest.fixture
async def hosts(
    tmp_path: Path, upstream: MockUpstream, redis_server: RedisServer
) -> AsyncIterator[tuple[Several, Several]]:
    one, two = tmp_path / "one", tmp_path / "two"
    url = f"sqlite:///{one}/var/tierline.db"
    options = {"workers": 1, "policy": POLICY, "settings": CACHE}
    async with several(one, redis_server.url, upstream, **options) as first:
        (two / "var").mkdir(parents=True)
        shutil.copy(one / "var/secret", two / "var/secret")
        async with several(two, redis_server.url, upstream, database_url=url, **options) as second:
            yield first, second


async def made_key(hosts: tuple[Several, Several]) -> CreatedKey:
    """A key that both hosts know."""
    async with hosts[0].database() as database:
        made = await create_key(database, load_secret(hosts[0].root / "var/secret"), name="k", limits=KeyLimits())

    async def known() -> bool:
        headers = {"authorization": f"Bearer {made.token}"}
        found = [await host.client.get("/v1/models", headers=headers) for host in hosts]
        return all(answer.status_code == 200 for answer in found)

    await until(known, "both hosts to know the key")
    return made


async def test_a_burst_at_two_hosts_is_one_call_and_its_answer_is_then_on_both(
    hosts: tuple[Several, Several], upstream: MockUpstream
) -> None:
    key = await made_key(hosts)
    upstream.override = "answer,delay_ms=1500,first_ms=1500,chunks=8,interval_ms=20"
    before = upstream.requests
    burst = [host.chat(key, stream=bool(number % 2)) for number in range(50) for host in hosts]
    answers = await asyncio.gather(*burst)
    assert {answer.status_code for answer in answers} == {200}
    assert upstream.requests == before + 1
    said = [answer.headers["x-tierline-cache"] for answer in answers]
    assert (said.count("miss"), said.count("exact")) == (1, 99)
    for host in hosts:
        again = await host.chat(key)
        assert again.headers["x-tierline-cache"] == "exact"
        assert "x-tierline-cache-reason" not in again.headers
    assert upstream.requests == before + 1

    # The one that flies is killed: the other one, who waits, is told nothing of it.
    one, two = hosts
    upstream.override = "answer,delay_ms=4000"
    question = {"messages": [{"role": "user", "content": "Another question"}]}
    first = asyncio.create_task(one.chat(key, **question))
    await upstream.until(lambda: upstream.requests == before + 2)
    second = asyncio.create_task(two.chat(key, **question))
    await asyncio.sleep(0.5)
    assert upstream.requests == before + 2
    upstream.override = None
    kill(int(one.state()["gateway"]["pid"]))
    async with asyncio.timeout(10):
        assert (await second).status_code == 200
    assert upstream.requests == before + 3
    with pytest.raises(httpx.HTTPError):
        await first
