"""Several gateway processes on one port and one Redis: limits, budgets, ledger, keys and metrics are those of one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.keys import revoke_key
from gateway.worker_metrics import merged
from tests.gateway.conftest import empty_database
from tests.gateway.redis_house import House
from tests.gateway.several import Several, kill, several, until

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
WORKERS = 4


async def balance(redis: RedisServer, key_id: str) -> tuple[int, int]:
    """What Redis has as settled and held."""
    async with House(redis.url, "{tierline}") as house:
        limiter = house.redis()
        await limiter.channel.connect()
        return await limiter.balance(f"key:{key_id}")


async def test_parallel_requests_are_counted_over_all_workers(gateways: Several, upstream: MockUpstream) -> None:
    """Exactly n of 10 n at once; and those that were refused pass when the others have ended."""
    key = await gateways.key("parallel", parallel=6)
    upstream.override = "answer,held=1"
    first = [asyncio.create_task(gateways.chat(key, stream=True)) for _ in range(60)]
    await until(lambda: sum(task.done() for task in first) == 54, "all but six to be refused")
    assert {task.result().status_code for task in first if task.done()} == {429}
    upstream.override = None
    upstream.release.set()
    answers = await asyncio.gather(*first)
    upstream.release.clear()
    assert Counter(answer.status_code for answer in answers) == {200: 6, 429: 54}
    assert Counter(answer.status_code for answer in await asyncio.gather(*(gateways.chat(key) for _ in range(3)))) == {
        200: 3
    }
    assert min(await gateways.metric("tierline_requests_total")) > 0  # the kernel gave each worker some


async def test_requests_per_minute_are_counted_over_all_workers(gateways: Several) -> None:
    key = await gateways.key("rate", requests_per_minute=12)
    began = time.monotonic()
    answers = await asyncio.gather(*(gateways.chat(key) for _ in range(120)))
    seconds = time.monotonic() - began
    admitted = sum(answer.status_code == 200 for answer in answers)
    assert {answer.status_code for answer in answers} == {200, 429}
    assert 12 <= admitted <= 12 * (1 + seconds / 60)
    remaining = sorted(int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers)
    assert remaining[0] == 0
    assert remaining[-1] <= 11


async def test_a_thousand_requests_on_an_almost_spent_budget(gateways: Several, redis: RedisServer) -> None:
    """No more is spent than the budget and what the last running requests used beyond their holds, which is nothing
    here: a plain answer with a known limit of output costs no more than its hold. And every row arrives."""
    budget = 200_000
    key = await gateways.key("budget", budget_nanousd=budget)
    before = len(await gateways.settled_rows(0))
    gate = asyncio.Semaphore(200)  # connections at once: the machine has only so many descriptors

    async def ask() -> httpx.Response:
        async with gate:
            return await gateways.chat(key, max_tokens=20)

    answers = await asyncio.gather(*(ask() for _ in range(1000)))
    admitted = sum(answer.status_code == 200 for answer in answers)
    assert {answer.status_code for answer in answers} == {200, 429}
    rows = [row for row in await gateways.settled_rows(before + admitted) if row["key_id"] == key.info.key_id]
    spent = sum(row["cost_nanousd"] for row in rows)
    assert len(rows) == admitted
    assert 0 < spent <= budget
    assert await balance(redis, key.info.key_id) == (spent, 0)


async def test_a_key_is_known_and_refused_by_every_worker(gateways: Several) -> None:
    key = await gateways.key("short")
    async with gateways.database() as database:
        await revoke_key(database, key.info.key_id)

    async def refused(worker: int) -> bool:
        return (await gateways.ask(worker, "/v1/models", key)).status_code == 401

    for worker in range(1, WORKERS + 1):
        await until(lambda worker=worker: refused(worker), f"worker {worker} to refuse a revoked key")


async def test_metrics_are_those_of_all_workers_whoever_is_asked(gateways: Several) -> None:
    pages = [(await gateways.ask(worker, "/metrics")).text for worker in range(1, WORKERS + 1)]
    for page in pages:
        families = [line.split()[2] for line in page.splitlines() if line.startswith("# TYPE ")]
        assert len(families) == len(set(families))
        for worker in range(1, WORKERS + 1):
            assert f'tierline_worker_up{{worker="{worker}"}} 1\n' in page
            assert f'tierline_holds_open{{worker="{worker}"}} ' in page
    alone = (await gateways.ask(1, "/metrics?worker=this")).text
    assert "worker=" not in alone


async def test_a_worker_that_is_not_configured_is_refused(gateways: Several) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gateway", "--config", str(gateways.root / "tierline.yaml"), "--worker", "9"),
        stderr=asyncio.subprocess.PIPE,
    )
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"there are 4 (server.workers)" in said


async def test_a_killed_worker_gives_back_its_holds_and_its_rows(
    gateways: Several, redis: RedisServer, upstream: MockUpstream
) -> None:
    key = await gateways.key("killed", budget_nanousd=10**9, parallel=3)
    upstream.override = "answer,chunks=100000,interval_ms=20"
    running = [asyncio.create_task(gateways.chat(key, stream=True)) for _ in range(3)]

    async def holds() -> bool:
        return sum(await gateways.metric("tierline_holds_open")) == 3

    await until(holds, "three streams to run")
    upstream.override = None
    assert (await gateways.chat(key)).status_code == 429
    held = await gateways.metric("tierline_holds_open")
    victim = held.index(max(held)) + 1
    pid, restarts = gateways.pid(victim), gateways.state()[f"gateway-{victim}"]["restarts"]
    kill(pid)
    await until(lambda: gateways.state()[f"gateway-{victim}"]["restarts"] > restarts, "the worker to be started again")
    await until(lambda: gateways.state()[f"gateway-{victim}"]["status"] == "ready", "the worker to be ready")
    # Its streams are gone: there is room again for as many, and the ledger has what they came to.
    lost = round(max(held))
    answers = [await gateways.chat(key) for _ in range(lost)]
    assert [answer.status_code for answer in answers] == [200] * lost
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)

    async def books_agree() -> bool:
        rows = [row for row in await gateways.rows() if row["key_id"] == key.info.key_id]
        spent = sum(row["cost_nanousd"] for row in rows)
        return len(rows) == 3 + lost and await balance(redis, key.info.key_id) == (spent, 0)

    await until(books_agree, "Redis and the ledger to agree")
    rows = [row for row in await gateways.rows() if row["key_id"] == key.info.key_id]
    assert Counter(row["outcome"] for row in rows)["interrupted"] == lost


async def test_redis_is_killed_under_load(
    redis_binary: str, upstream: MockUpstream, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No request waits for it or fails for it; readiness and metrics tell; then Redis knows all that was spent."""
    server = RedisServer(redis_binary).start()
    async with several(tmp_path_factory.mktemp("outage"), server.url, upstream, workers=2) as gateways:
        key = await gateways.key("outage", budget_nanousd=10**9, requests_per_minute=1_000_000)
        answers: list[httpx.Response] = []
        loading = True

        async def load() -> None:
            while loading:
                answers.append(await gateways.chat(key))

        clients = [asyncio.create_task(load()) for _ in range(8)]

        async def answered_by_both(more: int) -> None:
            count = len(answers) + more
            await until(
                lambda: len(answers) >= count or any(task.done() for task in clients), "requests to be answered"
            )

        async def degraded(expected: float) -> bool:
            return await gateways.metric("tierline_limiter_degraded") == [expected] * 2

        await answered_by_both(40)
        server.kill()
        await until(lambda: degraded(1.0), "both workers to notice")
        await answered_by_both(40)
        for worker in (1, 2):
            page = await gateways.ask(worker, "/health/ready")
            assert (page.status_code, page.json()["status"]) == (200, "degraded")
            assert "Redis is away" in page.json()["reasons"][0]
        server.start()
        await until(lambda: degraded(0.0), "both workers to use Redis again")
        await answered_by_both(40)
        loading = False
        await asyncio.gather(*clients)
        assert {answer.status_code for answer in answers} == {200}
        assert (await gateways.ask(1, "/health/ready")).json()["status"] == "ready"
        spent = sum(row["cost_nanousd"] for row in await gateways.settled_rows(len(answers)))

        async def books_agree() -> bool:
            return await balance(server, key.info.key_id) == (spent, 0)

        await until(books_agree, "Redis and the ledger to agree")
        for worker in (1, 2):
            log = gateways.log(worker)
            assert log.count("keeps to its share of the limits") == log.count("processes share the limits") == 1
    server.close()


@pytest.mark.postgres
async def test_the_rows_of_all_workers_arrive_in_postgresql(
    redis_binary: str,
    upstream: MockUpstream,
    postgres_server: tuple[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    server = RedisServer(redis_binary).start()
    root = tmp_path_factory.mktemp("postgres")
    async with (
        empty_database(postgres_server) as url,
        several(root, server.url, upstream, workers=WORKERS, database_url=url) as gateways,
    ):
        key = await gateways.key("many", budget_nanousd=10**9)
        answers = await asyncio.gather(*(gateways.chat(key) for _ in range(200)))
        assert {answer.status_code for answer in answers} == {200}
        rows = await gateways.settled_rows(200)
        assert len(rows) == len({row["request_id"] for row in rows}) == 200
        assert {row["request_id"] for row in rows} == {answer.headers["x-request-id"] for answer in answers}
        assert await balance(server, key.info.key_id) == (sum(row["cost_nanousd"] for row in rows), 0)
        assert min(await gateways.metric("tierline_requests_total")) > 0
    server.close()


async def test_pages_of_workers_become_one() -> None:
    first = '# HELP a Help.\n# TYPE a counter\na_total 1.0\n# HELP h H.\n# TYPE h histogram\nh_bucket{le="0.1"} 2.0\n'
    second = '# HELP a Help.\n# TYPE a counter\na_total{x="{ }"} 3.0\n'
    assert merged({2: second, 1: first}) == (
        "# HELP a Help.\n# TYPE a counter\n"
        'a_total{worker="1"} 1.0\na_total{worker="2",x="{ }"} 3.0\n'
        "# HELP h H.\n# TYPE h histogram\n"
        'h_bucket{worker="1",le="0.1"} 2.0\n'
    )
