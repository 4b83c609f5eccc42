"""Limits and budgets above the key, over several workers on one Redis."""

from __future__ import annotations

import asyncio

import pytest

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.ceilings import LimitChange
from gateway.access.keys import CreatedKey
from gateway.access.levels import change_level
from tests.gateway.redis_house import House
from tests.gateway.several import Several, kill, until

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
WORKERS = 2


async def change(gateways: Several, owner: str, **limits: int | None) -> None:
    async with gateways.database() as database:
        await change_level(database, owner, LimitChange(**limits))


async def in_force(gateways: Several, made: CreatedKey, header: str, value: str | None) -> None:
    """Wait until no worker answers by the former limits."""
    for worker in range(1, WORKERS + 1):

        async def new(worker: int = worker) -> bool:
            return (await gateways.post(worker, made, max_tokens=1)).headers.get(header) == value

        await until(new, f"worker {worker} to know of a change")


async def settled_and_held(redis: RedisServer, scope: str) -> tuple[int, int]:
    """As Redis has it."""
    async with House(redis.url, "{tierline}") as house:
        limiter = house.redis()
        await limiter.channel.connect()
        return await limiter.balance(scope)


async def test_a_change_reaches_every_worker_and_counts_what_was_spent(gateways: Several, redis: RedisServer) -> None:
    one, two = await gateways.key("one"), await gateways.key("two")
    answers = await asyncio.gather(*(gateways.chat(made, max_tokens=5) for made in (one, two) for _ in range(20)))
    assert {answer.status_code for answer in answers} == {200}
    spent = sum(row["cost_nanousd"] for row in await gateways.settled_rows(40))
    await change(gateways, "team:default", budget_nanousd=2 * spent, requests_per_minute=100_000)
    await in_force(gateways, one, "x-ratelimit-limit-requests", "100000")
    answers = await asyncio.gather(*(gateways.chat(made, max_tokens=5) for made in (one, two) for _ in range(100)))
    assert {answer.status_code for answer in answers} == {200, 429}
    refused = {answer.headers["x-tierline-limit"] for answer in answers if answer.status_code == 429}
    assert refused == {"team budget"}

    async def books_agree() -> bool:
        rows = await gateways.rows()
        total = sum(row["cost_nanousd"] for row in rows)
        assert spent < total <= 2 * spent
        return all(
            [
                await settled_and_held(redis, f"{level}:{rows[0][f'{level}_id']}") == (total, 0)
                for level in ("team", "organisation")
            ]
        )

    await until(books_agree, "Redis and the ledger to agree")
    await change(gateways, "team:default", budget_nanousd=None, requests_per_minute=None)
    await in_force(gateways, one, "x-ratelimit-limit-requests", None)


async def test_a_killed_worker_gives_back_at_each_level(
    gateways: Several, redis: RedisServer, upstream: MockUpstream
) -> None:
    made = await gateways.key("killed")
    await change(gateways, "project:default", parallel=3, budget_nanousd=10**12)
    await in_force(gateways, made, "x-ratelimit-limit-parallel", "3")
    upstream.override = "answer,chunks=100000,interval_ms=20"
    running = [asyncio.create_task(gateways.chat(made, stream=True)) for _ in range(3)]

    async def holds() -> bool:
        return sum(await gateways.metric("tierline_holds_open")) == 3

    await until(holds, "three streams to run")
    upstream.override = None
    refused = await gateways.chat(made)
    assert (refused.status_code, refused.headers["x-tierline-limit"]) == (429, "project parallel")
    held = await gateways.metric("tierline_holds_open")
    victim = held.index(max(held)) + 1
    restarts = gateways.state()[f"gateway-{victim}"]["restarts"]
    kill(gateways.pid(victim))
    await until(lambda: gateways.state()[f"gateway-{victim}"]["restarts"] > restarts, "the worker to be started again")
    await until(lambda: gateways.state()[f"gateway-{victim}"]["status"] == "ready", "the worker to be ready")
    assert (await gateways.chat(made)).status_code == 200, "what died holds no place"
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    async def books_agree() -> bool:
        rows = await gateways.rows()
        total, last = sum(row["cost_nanousd"] for row in rows), rows[-1]
        levels = [f"{level}:{last[f'{level}_id']}" for level in ("project", "team", "organisation")]
        return [await settled_and_held(redis, level) for level in levels] == [(total, 0)] * 3

    await until(books_agree, "Redis and the ledger to agree at each level")
