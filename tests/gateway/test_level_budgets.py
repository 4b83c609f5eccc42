"""Limits and budgets above the key, through a whole gateway; over several workers see `workers/test_levels.py`."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from bench.mock_upstream import MockUpstream
from gateway.access.ceilings import LimitChange
from gateway.access.levels import change_level
from gateway.access.principal import Principal
from tests.gateway.exact_upstream import HELD_INPUT, MESSAGES, OUTPUT, ExactWire, key, key_id, stop_the_clock
from tests.gateway.front_door import PRICE, FrontDoor, configuration, eventually, front_door
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
