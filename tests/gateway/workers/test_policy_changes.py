"""Policies that change while two real gateway processes are busy: edits, dates, and canaries that end themselves."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from datetime import UTC, datetime, timedelta

import aiohttp
import pytest
import pytest_asyncio

from bench.mock_upstream import MockUpstream
from bench.redis_server import RedisServer
from gateway.access.keys import CreatedKey
from tests.gateway.front_door import PRICE
from tests.gateway.several import Several, kill, several, until

pytestmark = [pytest.mark.redis, pytest.mark.asyncio(loop_scope="module")]
WORKERS = 2
POLICY = """\
version: 1
name: default
owner: tests
default: small
cache: {mode: "off"}
"""
CANARY = """\
version: 1
name: next
owner: tests
default: large
cache: {mode: "off"}
rollout: {instead_of: default, by: request, percent: 30, guard: {error_rate: +2%, min_requests: 10}}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateways(
    redis: RedisServer, upstream: MockUpstream, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Several]:
    bad = {"tier": "large", "backend": "down", "upstream_model": "status,status=500", "price": PRICE}
    down = {"base_urls": [upstream.base_url], "attempts": 1}
    settings = {"models": {"bad": bad}, "backends": {"down": down}, "limits": {"max_queued": 1000}}
    root = tmp_path_factory.mktemp("several")
    async with several(root, redis.url, upstream, workers=WORKERS, policy=POLICY, settings=settings) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def key(gateways: Several) -> CreatedKey:
    return await gateways.key("busy")


@contextlib.asynccontextmanager
async def clients(gateways: Several) -> AsyncIterator[list[aiohttp.ClientSession]]:
    """One to each worker, over its own socket."""
    async with contextlib.AsyncExitStack() as stack:
        found = []
        for worker in range(1, WORKERS + 1):
            connector = aiohttp.UnixConnector(str(gateways.root / f"var/run/gateway-{worker}.sock"))
            found.append(await stack.enter_async_context(aiohttp.ClientSession(connector=connector)))
        yield found


async def ask(client: aiohttp.ClientSession, key: CreatedKey, stream: bool = False) -> tuple[int, str]:
    """The status of an answer, and the policy and version it was given under; a stream must be whole."""
    body = {"model": "auto", "messages": [{"role": "user", "content": "Hello"}], "stream": stream}
    headers = {"authorization": f"Bearer {key.token}"}
    async with client.post("http://worker/v1/chat/completions", json=body, headers=headers) as response:
        text = await response.text()
        whole = text.endswith("data: [DONE]\n\n") if stream else response.status != 200 or "usage" in json.loads(text)
        assert whole, text
        return response.status, response.headers.get("x-tierline-policy", "")


async def versions(gateways: Several, key: CreatedKey) -> list[str]:
    async with clients(gateways) as found:
        return [(await ask(client, key))[1] for client in found]


async def rolled_back(gateways: Several) -> int:
    return sum(map(bool, await gateways.metric("tierline_rollout_rolled_back")))


def edits(gateways: Several) -> list[Callable[[], object]]:
    """What people do to a folder of policies, well and badly; each leaves it as it may be for good."""
    folder = gateways.root / "policies"
    default, other = folder / "default.yaml", folder / "other.yaml"
    team = POLICY.replace("name: default", "name: other") + "applies_to: {teams: [other]}\n"
    trial = CANARY.replace("large", "small")
    return [
        lambda: default.write_text(POLICY + "description: again\n"),
        lambda: default.write_text(POLICY.replace("default: small", "defualt: small")),
        lambda: other.write_text(team),
        lambda: default.write_text(""),
        lambda: default.write_text(POLICY + "routes: [{when: prompt_tokens > 3, tier: small}]\n"),
        lambda: other.write_text(trial),
        lambda: other.write_text(trial.replace("percent: 30", "steps: [10%, 90%], every: 1m")),
        lambda: default.unlink(),
        lambda: default.write_text(POLICY + "limits: {requests_per_minute: 10000000}\n"),
        lambda: other.write_text("{"),
        lambda: other.write_bytes(b"\xff\x00"),
        lambda: other.unlink(),
        lambda: default.write_text(POLICY + "valid_from: soon\n"),
    ]


async def test_edits_under_load_fail_no_request(gateways: Several, key: CreatedKey) -> None:
    """An edit every 100 ms, half of them broken, while both processes answer all the time."""
    answers: Counter[tuple[int, str]] = Counter()
    made = 0
    done = asyncio.Event()

    async def keep_asking(client: aiohttp.ClientSession, number: int) -> None:
        for turn in range(150):
            answers[await ask(client, key, stream=(turn + number) % 4 == 0)] += 1

    async def keep_editing() -> None:
        nonlocal made
        for edit in itertools.cycle(edits(gateways)):
            edit()
            made += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(done.wait(), 0.1)
            if done.is_set() and made >= 30:
                return

    editing = asyncio.create_task(keep_editing())
    async with clients(gateways) as found:
        await asyncio.gather(*(keep_asking(client, number) for client in found for number in range(6)))
        done.set()
        await editing
        assert {status for status, _ in answers} == {200}
        assert sum(answers.values()) == 150 * 6 * WORKERS
        used = {policy for _, policy in answers}
        assert len(used) >= 3, f"{made} edits, and only {used} decided"
        last = POLICY + "description: the last word\n"
        (gateways.root / "policies/other.yaml").unlink(missing_ok=True)
        (gateways.root / "policies/default.yaml").write_text(last)

    async def settled() -> bool:
        now = set(await versions(gateways, key))
        return len(now) == 1 and not now & used

    await until(settled, "both processes to follow the last edit")


async def test_a_version_takes_over_on_its_date(gateways: Several, key: CreatedKey) -> None:
    begins = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=3)
    later = POLICY + f"description: later\nvalid_from: {begins.isoformat()}\n"
    before = await versions(gateways, key)
    (gateways.root / "policies/later.yaml").write_text(later)
    seen = []
    while set(now := await versions(gateways, key)) & set(before):
        if set(now) == set(before):
            seen.append(time.time())
        assert time.time() < begins.timestamp() + 60, "it never took over"
        await asyncio.sleep(0.05)
    assert time.time() >= begins.timestamp()
    assert len(seen) > 3, "it held at once"
    (gateways.root / "policies/later.yaml").unlink()
    await until(lambda: _same(gateways, key, before), "the former version to be back")


async def _same(gateways: Several, key: CreatedKey, wanted: list[str]) -> bool:
    return await versions(gateways, key) == wanted


async def test_a_canary_on_a_failing_backend_is_taken_back(gateways: Several, key: CreatedKey) -> None:
    failed = served = 0
    stop = asyncio.Event()

    async def keep_asking(client: aiohttp.ClientSession) -> None:
        nonlocal failed, served
        while not stop.is_set():
            status, policy = await ask(client, key)
            served += 1
            if status != 200:
                failed += 1
                assert policy.startswith("next@")
            await asyncio.sleep(0.02)

    async with clients(gateways) as found:
        asking = [asyncio.create_task(keep_asking(client)) for client in found for _ in range(2)]
        (gateways.root / "policies/next.yaml").write_text(CANARY)

        async def both() -> bool:
            return await rolled_back(gateways) == WORKERS

        await until(both, "both processes to take the canary back")
        stop.set()
        await asyncio.gather(*asking)
        # At most 200 a second ask, three in ten of them the canary, for the few seconds until the databases says so.
        assert 10 <= failed <= 600, (failed, served)
        assert {(await ask(client, key))[0] for client in found for _ in range(40)} == {200}

    assert any("is rolled back to default" in gateways.log(worker) for worker in (1, 2))
    shown = await _rollout(gateways)
    assert "rolled back on" in shown
    assert "100.00 % new, 0.00 % old, 2.00 % allowed: breached" in shown

    kill(gateways.pid(1))
    await until(lambda: _up(gateways, key), "worker 1 to be back")
    async with clients(gateways) as found:
        assert {(await ask(client, key))[0] for client in found for _ in range(40)} == {200}

    await _rollout(gateways, "--resume")

    async def fails_again() -> bool:
        async with clients(gateways) as found:
            return any([(await ask(client, key))[0] != 200 for client in found])

    await until(fails_again, "the canary to serve again")
    (gateways.root / "policies/next.yaml").unlink()


async def _up(gateways: Several, key: CreatedKey) -> bool:
    with contextlib.suppress(OSError, aiohttp.ClientError):
        return len(await versions(gateways, key)) == WORKERS
    return False


async def _rollout(gateways: Several, *options: str) -> str:
    config = str(gateways.root / "tierline.yaml")
    command = (sys.executable, "-m", "gateway.cli", "policy", "rollout", "next", *options, "--config", config)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    text = (await process.stdout.read()).decode()
    assert await process.wait() == 0
    return text
