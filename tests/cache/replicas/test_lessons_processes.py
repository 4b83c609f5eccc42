"""Two real cache processes and a real Redis: a promise is proved by what both compare, holds for both, and outlasts
kills of one of them and of Redis."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from bench.redis_server import RedisServer
from cache.client import Feedback
from cache.promise.rule import Rule, Standing
from cache.wire import Asker
from tests.cache.replicas.conftest import entry, key
from tests.cache.replicas.test_processes import PATIENCE_S, Node

pytestmark = [pytest.mark.redis, pytest.mark.slow]
# fmt: off
COUNTRIES = [
    "France", "Spain", "Italy", "Portugal", "Germany", "Austria", "Poland", "Norway", "Sweden", "Finland",
    "Denmark", "Iceland", "Ireland", "Greece", "Turkey", "Egypt", "Kenya", "Ghana", "Nigeria", "Morocco",
    "Chile", "Peru", "Bolivia", "Brazil", "Argentina", "Uruguay", "Canada", "Mexico", "Cuba", "Jamaica",
    "Japan", "India", "Nepal", "Thailand", "Vietnam", "Mongolia", "Iran", "Iraq", "Jordan", "Lebanon",
]
# fmt: on
FORMS = (
    "Which city is the capital of {}?",
    "What city is the capital of {}?",
    "Which town is the capital of {}?",
    "What is the official capital of {}?",
)
RULE = Rule(policy="p", max_false_hit_rate=0.2, audit_rate=1.0, min_audited=30, mode="certify")


def answer(country: str) -> str:
    return json.dumps({"choices": [{"message": {"content": f"The capital of {country}"}}]})


class Teller(Node):
    tickets = 0  # fresh answers that are compared

    async def tell(self, text: str, country: str) -> str:
        """Ask a question, and bring its fresh answer; returns what the promise did."""
        asked = key(text)
        found = await self.client.lookup(asked, "semantic", 0.9, rule=RULE, judge="exact")
        if found.entry is None:
            kept = entry(text, answer(country))
            self.tickets += found.ticket != 0
            await self.client.hand_in(asked, kept, "semantic", ticket=found.ticket)
        return found.outcome

    async def standing(self) -> Standing | None:
        return next(iter((await self.client.stats()).promises), None)


async def until(nodes: list[Teller], what: Callable[[Standing], bool]) -> list[Standing]:
    """Wait until how the promise stands is so at all of them."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [await node.standing() for node in nodes]
        standings = [one for one in found if one is not None]
        if len(standings) == len(nodes) and all(map(what, standings)):
            return standings
        assert time.monotonic() < deadline, [(one.state, one.labels, one.audits, one.errors) for one in standings]
        await asyncio.sleep(0.05)


@pytest.fixture
async def nodes(tmp_path: Path, own_redis: RedisServer) -> AsyncIterator[list[Teller]]:
    async with AsyncExitStack() as stack:
        made = [Teller(tmp_path / name, own_redis.url) for name in ("one", "two")]
        for node in made:
            await stack.enter_async_context(node.client)
        await asyncio.gather(*(node.start() for node in made))
        for node in made:
            assert await node.client.wait_ready(PATIENCE_S)
        await asyncio.gather(*(node.connected() for node in made))
        yield made
        for node in made:
            if node.process.popen is not None and node.process.popen.poll() is None:
                node.process.end()


async def test_a_promise_is_proved_by_both_for_both_and_outlasts_kills(
    nodes: list[Teller], own_redis: RedisServer
) -> None:
    one, two = nodes
    for country in COUNTRIES:
        await one.tell(f"What is the capital of {country}?", country)
    await two.until(f"What is the capital of {COUNTRIES[-1]}?", answer(COUNTRIES[-1]), 10)

    # Each compares half: what one learned, both know.
    turns = itertools.cycle(nodes)
    for country in COUNTRIES:
        await next(turns).tell(FORMS[0].format(country), country)
    told = one.tickets + two.tickets
    assert min(one.tickets, two.tickets) >= len(COUNTRIES) / 2
    first = await until(nodes, lambda standing: standing.labels == told and standing.bar is not None)
    assert first[0].bar == first[1].bar
    for form, country in itertools.product(FORMS[1:3], COUNTRIES):
        await next(turns).tell(form.format(country), country)
    told = one.tickets + two.tickets
    standings = await until(nodes, lambda standing: standing.state == "certified" and standing.labels == told)
    assert standings[0].certificate == standings[1].certificate
    assert standings[0].certificate is not None
    assert standings[0].certificate.audits >= 30
    assert max(standing.shadow_hits for standing in standings) < sum(standing.shadow_hits for standing in standings)

    # One is killed; the other learns on; when it is back it knows that, too.
    one.process.end(signal.SIGKILL)
    for country in COUNTRIES[:20]:
        await two.tell(FORMS[3].format(country), country)
    told = one.tickets + two.tickets
    await until([two], lambda standing: standing.labels == told)
    await one.start()
    assert await one.client.wait_ready(PATIENCE_S)
    await until(nodes, lambda standing: standing.labels == told and standing.state == "certified")

    # Redis is killed and comes back with nothing: each goes on, and afterwards they learn together again.
    own_redis.kill()
    assert await two.tell(FORMS[3].format(COUNTRIES[30]), COUNTRIES[30]) in ("audit", "miss")
    await until([two], lambda standing: standing.labels == told + 1)
    own_redis.start()
    await until(nodes, lambda standing: standing.labels == told + 1 and standing.state == "certified")
    await one.tell(FORMS[3].format(COUNTRIES[31]), COUNTRIES[31])
    await until(nodes, lambda standing: standing.labels == told + 2)


async def test_feedback_reaches_the_process_that_gave_the_answer(nodes: list[Teller]) -> None:
    one, two = nodes
    asked = key("Is the museum open?")
    await one.client.hand_in(asked, entry(asked.text, answer("X")), "exact", asker=Asker("r1", "k", "t"))
    await two.until(asked.text, answer("X"), 10)
    assert not (await two.client.feedback("r1", "another team", good=False)).known
    assert not (await two.client.feedback("nobody", "t", good=False)).known
    assert await two.client.feedback("r1", "t", good=False) == Feedback(True, 1)
    assert await one.answer(asked.text) is None
    await two.until(asked.text, None, 10)
    assert await two.client.feedback("r1", "t", good=False) == Feedback(True, 0)  # it was rated before
