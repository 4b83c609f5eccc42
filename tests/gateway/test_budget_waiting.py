"""`when_exhausted: queue` through a whole gateway: two keys, money that comes back, a policy that is reloaded."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access import budget_queue
from gateway.access.keys import revoke_key
from tests.gateway.front_door import FrontDoor, configuration, eventually, front_door

# The model costs $2 per million tokens of output: 4000 hold $0.008 of the $0.01, of which an answer uses little.
POLICY = """\
version: 1
name: default
owner: tests
routes: [{name: all, tier: small}]
cache: {mode: "off"}
budget: {monthly_usd: 0.01, when_exhausted: queue, queue_at_most: 1h}
"""
LARGE = {"max_tokens": 4000}


@pytest.fixture(params=["memory", "redis"])
async def door(
    request: pytest.FixtureRequest, tmp_path: Path, upstream: MockUpstream, redis_binary: str
) -> AsyncIterator[FrontDoor]:
    document = configuration({"up": upstream})
    document["limits"] = {"queue_timeout_s": 15}
    server = RedisServer(redis_binary).start() if request.param == "redis" else None
    if server is not None:
        document["storage"] = {"redis_url": server.url, "redis_timeout_ms": 5000}
    async with front_door(tmp_path, document, policy=POLICY) as running:
        yield running
    if server is not None:
        server.close()


def ask(door: FrontDoor, token: str | None = None, **body: object) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(door.chat(token=token, **{**LARGE, **body}))


async def waiting(door: FrontDoor, number: int) -> None:
    await eventually(lambda: door.services.budget_queue.waiting == number)


async def spend(door: FrontDoor, upstream: MockUpstream) -> None:
    """Use up all that the policy has but what a small request needs."""
    door.write_policy(POLICY.replace("0.01", "0.00001"))
    await eventually(lambda: door.services.policies.current.policies[0].budget_nanousd == 10_000)


async def test_two_keys_wait_for_what_a_running_request_gives_back(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "hang"
    first = ask(door)
    await upstream.until(lambda: upstream.requests == 1)
    upstream.override = None
    others = [ask(door, token) for token in (await door.key(), await door.key())]
    await waiting(door, 2)
    metrics = (await door.client.get("/metrics")).text
    assert "tierline_budget_queue_waiting 2.0" in metrics
    first.cancel()  # its client leaves: the money comes back
    answers = await asyncio.gather(*others)
    assert [answer.status_code for answer in answers] == [200, 200]
    await waiting(door, 0)
    await asyncio.gather(first, return_exceptions=True)


async def test_a_reload_that_raises_the_budget_lets_them_go(door: FrontDoor, upstream: MockUpstream) -> None:
    await spend(door, upstream)
    others = [ask(door, token) for token in (await door.key(), await door.key())]
    await waiting(door, 2)
    door.write_policy(POLICY.replace("0.01", "5"))
    assert [answer.status_code for answer in await asyncio.gather(*others)] == [200, 200]


async def test_the_impatient_are_refused_and_the_patient_wait(
    door: FrontDoor, upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(door.services.settings.limits.__dict__, "queue_timeout_s", 0.2)
    await spend(door, upstream)
    flexible = ask(door, service_tier="flex")
    refused = await ask(door)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "budget_exhausted")
    assert "No money came in 0.2 s." in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) > 60
    assert refused.headers["x-should-retry"] == "false"
    late = await door.chat(service_tier="flex", headers={"x-tierline-deadline-ms": "100"}, **LARGE)
    assert (late.status_code, late.json()["error"]["code"]) == (504, "backend_deadline")
    door.write_policy(POLICY.replace("0.01", "5"))
    assert (await flexible).status_code == 200
    assert b"service_tier" not in upstream.records[-1].body, "this server does not know it"


async def test_whoever_leaves_or_loses_its_key_waits_no_more(
    door: FrontDoor, upstream: MockUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget_queue, "SELDOM_S", 0.1)
    await spend(door, upstream)
    leaving = ask(door)
    await waiting(door, 1)
    leaving.cancel()
    await waiting(door, 0)
    token = await door.key()
    revoked = ask(door, token)
    await waiting(door, 1)
    await revoke_key(door.services.database, door.services.keys.authenticate(token).key_id)
    answer = await revoked
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "revoked_api_key")
    await waiting(door, 0)


async def test_a_policy_that_turns_to_reject_refuses_those_who_wait(door: FrontDoor, upstream: MockUpstream) -> None:
    await spend(door, upstream)
    task = ask(door)
    await waiting(door, 1)
    door.write_policy(POLICY.replace("0.01", "0.00001").replace("queue, queue_at_most: 1h", "reject"))
    answer = await task
    assert answer.status_code == 429
    assert "The policy lets nobody wait any more." in answer.json()["error"]["message"]
