"""Limits and budgets above the key, through whole gateways: one in this process, and several workers on one Redis."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.ceilings import LimitChange
from gateway.access.keys import CreatedKey
from gateway.access.levels import change_level
from gateway.access.principal import Principal
from tests.gateway.exact_upstream import HELD_INPUT, MESSAGES, OUTPUT, ExactWire, key, key_id, stop_the_clock
from tests.gateway.front_door import PRICE, FrontDoor, configuration, eventually, front_door
from tests.gateway.redis_house import House
from tests.gateway.several import Several, kill, several, until
from tests.gateway.test_budgets import ask


@pytest_asyncio.fixture
async def exact() -> AsyncIterator[MockUpstream]:
    mock = MockUpstream(ExactWire())
    await mock.start()
    yield mock
    await mock.stop()


@pytest_asyncio.fixture
async def door(tmp_path: Path, exact: MockUpstream) -> AsyncIterator[FrontDoor]:
    document = configuration({"up": exact})
    document["backends"]["up"] |= {"max_outstanding": 2000, "timeouts": {"connect_s": 60, "total_s": 300}}
    async with front_door(tmp_path, document) as running:
        yield running


async def limit(door: FrontDoor, owner: str, **limits: int | None) -> None:
    """As an administrator does; the running gateway looks for changes by itself, here at once."""
    await change_level(door.services.database, owner, LimitChange(**limits))
    await door.services.keys.refresh()


async def balances(door: FrontDoor, who: Principal) -> list[tuple[int, int]]:
    """What is settled and held of the key and all above it."""
    scopes = (
        f"key:{who.key_id}",
        f"project:{who.project_id}",
        f"team:{who.team_id}",
        f"organisation:{who.organisation_id}",
    )
    return [await door.services.limiter.balance(scope) for scope in scopes]  # type: ignore[union-attr]


async def test_a_refusal_says_whose_limit_it_is(door: FrontDoor) -> None:
    stop_the_clock(door)
    tokens = [await key(door, name=name, team="support", requests_per_minute=5) for name in ("one", "two")]
    await limit(door, "team:support", requests_per_minute=2)
    assert [(await door.chat(token=token)).status_code for token in tokens] == [200, 200]
    refused = await door.chat(token=tokens[0])
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "rate_limit_exceeded")
    assert error["message"].startswith(
        "The team 'support' allows 2 requests per minute; there is room for the next one in"
    )
    assert refused.headers["x-tierline-limit"] == "team requests_per_minute"
    assert refused.headers["retry-after"] == "30"
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    await limit(door, "team:support", requests_per_minute=None)
    passed = await door.chat(token=tokens[0])
    assert (passed.status_code, passed.headers["x-ratelimit-limit-requests"]) == (200, "5")
    assert passed.headers["x-ratelimit-remaining-requests"] == "3", "the refused one was not counted"


async def test_a_spent_budget_of_the_organisation(door: FrontDoor) -> None:
    token = await key(door)
    assert (await door.chat(token=token, messages=MESSAGES, max_tokens=10)).status_code == 200
    spent = (await door.rows())[0]["cost_nanousd"]
    await limit(door, "organisation:default", budget_nanousd=spent)
    refused = await door.chat(token=token, messages=MESSAGES)
    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (429, "budget_exhausted")
    assert error["message"].startswith("The organisation 'default' has a monthly budget of $")
    assert "wait for the next month (UTC), which begins in" in error["message"]
    assert refused.headers["x-tierline-limit"] == "organisation budget"
    await limit(door, "organisation:default", budget_nanousd=10**12)
    assert (await door.chat(token=token, messages=MESSAGES)).status_code == 200


async def test_a_gateway_that_starts_again_knows_what_a_team_spent(tmp_path: Path, exact: MockUpstream) -> None:
    async with front_door(tmp_path, configuration({"up": exact})) as door:
        token = await key(door, team="support")
        assert (await door.chat(token=token, messages=MESSAGES, max_tokens=10)).status_code == 200
        spent = (await door.rows())[0]["cost_nanousd"]
        await change_level(door.services.database, "team:support", LimitChange(budget_nanousd=spent))
    async with front_door(tmp_path, configuration({"up": exact})) as door:
        refused = await door.chat(token=token, messages=MESSAGES)
        assert (refused.status_code, refused.headers["x-tierline-limit"]) == (429, "team budget")
        who = door.services.keys.authenticate(token)
        assert await balances(door, who) == [(spent, 0)] * 4


async def test_a_rule_sees_how_much_of_the_teams_budget_is_used(tmp_path: Path, exact: MockUpstream) -> None:
    models = {
        name: {"tier": tier, "backend": "up", "price": PRICE} for name, tier in (("tiny", "small"), ("big", "large"))
    }
    policy = (
        "version: 1\nname: default\nowner: tests\nroutes:\n  - {when: 'budget.used > 0.5', tier: small}\n"
        "  - {tier: large}\ncache: {mode: 'off'}\n"
    )
    async with front_door(tmp_path, configuration({"up": exact}, models), policy=policy) as door:
        token = await key(door, team="support")

        async def tier() -> str:
            return (await door.chat("auto", token=token, max_tokens=100)).headers["x-tierline-tier"]

        assert [await tier() for _ in range(4)] == ["large"] * 4
        spent = sum(row["cost_nanousd"] for row in await door.rows())
        await limit(door, "team:support", budget_nanousd=spent * 100)
        assert await tier() == "large"
        await limit(door, "team:support", budget_nanousd=spent * 2)
        assert await tier() == "small"


async def test_a_thousand_at_once_pass_a_teams_budget_by_no_more_than_stated(
    door: FrontDoor, exact: MockUpstream
) -> None:
    """docs/finance.md: by one event for each stream that was running when the budget was spent; whoever's they were."""
    order, budget = random.Random(3), 20_000_000
    tokens = [await key(door, name=f"k{n}", team="support", project=f"p{n % 3}") for n in range(7)]
    others = await key(door, team="research")
    await limit(door, "team:support", budget_nanousd=budget)
    for token in tokens:
        for _ in range(5):  # it is known for short answers, so little is held: about a hundred run at once
            door.services.estimator.observe(key_id(door, token), "mock", 40)
    bodies: list[dict[str, Any]] = [
        order.choice([{"max_tokens": order.randrange(1, 200)}, {"stream": True}, {"stream": True, "max_tokens": 150}])
        for _ in range(1000)
    ]
    exact.override = "answer,chunks=140,interval_ms=1,delay_ms=20"
    answers = await asyncio.gather(*(ask(door, order.choice(tokens), **body) for body in bodies))
    await eventually(lambda: door.services.limiter.open_holds == 0)
    assert {status for status, _ in answers} == {200, 429}
    assert all("The team 'support' has a monthly budget" in text for status, text in answers if status == 429)
    rows = await door.rows()
    ends = Counter(row["outcome"] for row in rows)
    assert sum(status == 200 for status, _ in answers) == len(rows)
    assert ends["success"] >= 20
    assert ends["over_budget"] >= 5
    spent = sum(row["cost_nanousd"] for row in rows)
    assert budget - 100 * (HELD_INPUT * 1000 + 64 * OUTPUT) < spent <= budget + ends["over_budget"] * OUTPUT
    who = [door.services.keys.authenticate(token) for token in tokens]
    team = await balances(door, who[0])
    assert team[2:] == [(spent, 0)] * 2
    assert sum([(await balances(door, one))[0][0] for one in who]) == spent
    assert {row["project_id"] for row in rows} == {one.project_id for one in who}
    exact.override = None
    assert (await door.chat(token=others, messages=MESSAGES)).status_code == 200, "another team's is another budget"


# -- several workers ---------------------------------------------------------------------------------------------------

WORKERS = 2


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
    redis: RedisServer, upstream: MockUpstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Several]:
    async with several(tmp_path_factory.mktemp("levels"), redis.url, upstream, workers=WORKERS) as running:
        yield running


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


@pytest.mark.redis
@pytest.mark.asyncio(loop_scope="module")
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


@pytest.mark.redis
@pytest.mark.asyncio(loop_scope="module")
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
