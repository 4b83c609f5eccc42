"""Promises of several processes on a real Redis: one set of labels, one bar, one proof, and one end of serving."""

from __future__ import annotations

import asyncio
import math
import random
import uuid
from collections.abc import AsyncIterator
from contextlib import suppress

import numpy as np
import pytest

from bench.redis_server import RedisServer
from cache.promise.keeper import Keeper
from cache.promise.rule import PromiseMode, Rule, Standing
from cache.replicas.lessons import Lessons
from cache.replicas.link import Link
from cache.verifier.features import FEATURES
from cache.verifier.model import Verifier
from cache.verifier.neighbours import Candidate
from tests.cache.replicas.conftest import until

pytestmark = pytest.mark.redis
ZEROS = (0.0,) * (len(FEATURES) - 1)
# A verifier that believes the first feature: log-odds.
SIMPLE = Verifier("t", FEATURES, (0.0, *ZEROS), (1.0,) * len(FEATURES), (1.0, *ZEROS), 0.0)
NOW = 1_700_000_000.0


def rule(mode: PromiseMode = "certify", **fields: float) -> Rule:
    values = {"max_false_hit_rate": 0.02, "audit_rate": 0.2, "min_audited": 100, **fields}
    return Rule(policy="support", mode=mode, **values)  # type: ignore[arg-type]


class Member:
    """What a process knows of its promises, and its way to the others."""

    def __init__(self, url: str, prefix: str, seed: int, meaning: str) -> None:
        self.lot = random.Random(seed)
        self.keeper = Keeper(SIMPLE, clock=lambda: NOW, chance=self.lot.random)
        self.lessons = Lessons(self.keeper, Link(url, prefix=prefix), meaning=meaning)
        self.task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.task = asyncio.create_task(self.lessons.run())
        await until(lambda: self.lessons.connected, "a member to connect")

    async def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def ask(self, asked: Rule, *, right: bool | None = None, times: int = 1) -> None:
        """Requests whose candidates are nearly always right, unless it is said how they are."""
        for _ in range(times):
            chance = self.lot.choice((0.5, 0.9, 0.995, 0.9995))
            logit = math.log(chance / (1.0 - chance))
            candidate = Candidate(self.lot.randrange(20), "q", 0.9, (logit, *ZEROS))
            verdict = self.keeper.decide(asked, candidate)
            if verdict.action == "serve" or verdict.ticket is None:
                continue
            truth = self.lot.random() < chance if right is None else right or chance < 0.99
            lesson = self.keeper.judged(verdict.ticket, truth)
            if lesson is not None and not self.lessons.tell(lesson):
                self.keeper.apply(lesson)
            await asyncio.sleep(0)

    async def refit(self) -> None:
        for work in list(self.keeper.due()):
            if await self.lessons.may_fit(work.rule):
                made = self.keeper.refit(work.run())
                if not self.lessons.tell(made):
                    self.keeper.apply(made)

    @property
    def standing(self) -> Standing:
        found = self.keeper.standing("support")
        assert found is not None
        return found

    def known(self, asked: Rule) -> tuple[object, ...]:
        """All that must be the same everywhere."""
        promise = self.keeper._promises[asked]
        x, rows = promise.memory.arrays()
        regime, fitted = promise.regime, promise.fitted
        counts = (regime.number, regime.serving, regime.audits, regime.errors, regime.level, regime.quiet_at)
        learned = (promise.bar, promise.certificate, promise.trusted_from, promise.fitted_at, promise.totals.labels)
        return (x.tobytes(), rows.tobytes(), fitted.coefficients.tobytes(), fitted.shifts, *counts, *learned)


class Group:
    def __init__(self, url: str) -> None:
        self.url = url
        self.prefix = f"{{{uuid.uuid4().hex}}}:cache"
        self.members: list[Member] = []

    async def member(self, *, meaning: str = "m", url: str | None = None, start: bool = True) -> Member:
        made = Member(url or self.url, self.prefix, len(self.members), meaning)
        self.members.append(made)
        if start:
            await made.start()
        return made

    async def agree(self, asked: Rule, *members: Member) -> None:
        """Wait until everybody has applied everything."""
        first, *rest = members

        def same() -> bool:
            if any(member.lessons._items for member in members):
                return False
            return all(
                asked in member.keeper._promises and member.known(asked) == first.known(asked) for member in rest
            )

        await until(same, "all to know the same")

    async def work(self, asked: Rule, rounds: int, *members: Member) -> None:
        """Traffic at all of them, with bars that are found meanwhile."""
        for _ in range(rounds):
            await asyncio.gather(*(member.ask(asked, times=40) for member in members))
            await self.agree(asked, *members)
            await asyncio.gather(*(member.refit() for member in members))
            await self.agree(asked, *members)


@pytest.fixture
async def group(redis_server: RedisServer) -> AsyncIterator[Group]:
    made = Group(redis_server.url)
    yield made
    for member in made.members:
        await member.stop()


@pytest.fixture
async def lonely_group(own_redis: RedisServer) -> AsyncIterator[Group]:
    made = Group(own_redis.url)
    yield made
    with suppress(ProcessLookupError):
        own_redis.resume()
    for member in made.members:
        await member.stop()


async def certified(group: Group, asked: Rule, *members: Member) -> None:
    for _ in range(60):
        await group.work(asked, 1, *members)
        if members[0].standing.state == "certified":
            return
    raise AssertionError(members[0].standing)


async def test_audits_of_all_prove_a_promise_for_all_and_a_breach_at_one_ends_serving_at_all(group: Group) -> None:
    one, two = await group.member(), await group.member()
    asked = rule()
    await certified(group, asked, one, two)
    proof = one.standing.certificate
    assert proof is not None
    assert two.standing.certificate == proof
    assert proof.audits >= 100
    drawn = [member.keeper._promises[asked].totals.shadow_hits for member in (one, two)]
    assert min(drawn) < proof.audits <= sum(drawn)  # neither has so many by itself
    late = await group.member()  # takes over the proof, and serves by it
    await group.agree(asked, one, two, late)
    assert late.standing.certificate == proof
    while two.standing.state == "certified":  # what two gives has become wrong
        await two.ask(asked, right=False)
        await group.agree(asked, two, one, late)
    for member in (one, two, late):
        assert (member.standing.state, member.standing.breaches) == ("learning", 1)
        assert member.keeper.decide(asked, Candidate(1, "q", 0.9, (9.0, *ZEROS))).action != "serve"


async def test_one_finds_the_bar_and_others_with_other_numbers_stay_apart(group: Group) -> None:
    one, two, other = await group.member(), await group.member(), await group.member(meaning="another embedder")
    asked = rule("shadow")
    await group.work(asked, 1, one, two)
    fits = [await member.lessons.may_fit(asked) for member in (one, two)]
    assert fits == [False, False]  # one of them did, a moment ago
    assert one.keeper._promises[asked].fitted_at > 0
    assert other.keeper.labels() == {}
    await other.ask(asked, times=3)
    await until(lambda: other.keeper.labels()[asked] == 3, "its own lessons")
    await group.agree(asked, one, two)
    assert one.keeper.labels()[asked] == 80


async def test_each_learns_alone_while_redis_is_away_and_tells_it_afterwards(
    lonely_group: Group, own_redis: RedisServer
) -> None:
    group, asked = lonely_group, rule("shadow")
    one, two = await group.member(), await group.member()
    await group.work(asked, 3, one, two)
    before, audits = one.keeper.labels()[asked], one.standing.audits
    own_redis.pause()
    await until(lambda: not one.lessons.connected and not two.lessons.connected, "Redis to be missed")
    await one.ask(asked, times=30)
    assert one.keeper.labels()[asked] == before + 30  # at once, by itself
    assert await one.lessons.may_fit(asked)
    own_redis.resume()
    await until(lambda: one.lessons.connected and two.lessons.connected, "Redis to be found")
    await group.agree(asked, one, two)
    assert two.keeper.labels()[asked] == before + 30
    assert two.standing.audits == audits  # what was learned alone teaches, and proves nothing
    await group.work(asked, 1, one, two)
    assert one.standing.audits > audits


async def test_a_redis_that_lost_everything_is_told_by_who_knows_most(
    lonely_group: Group, own_redis: RedisServer
) -> None:
    group, asked = lonely_group, rule("shadow")
    one, two = await group.member(), await group.member()
    await group.work(asked, 4, one, two)
    before = one.keeper.labels()[asked]
    bar = one.standing.bar
    own_redis.kill()
    own_redis.start()
    new = await group.member()
    await until(lambda: one.lessons.connected and two.lessons.connected, "Redis to be found")
    await new.ask(asked, times=2)
    await group.agree(asked, one, two, new)
    assert new.standing.bar == bar
    assert before <= new.keeper.labels()[asked] <= before + 2
    await group.work(asked, 1, one, two, new)
    assert two.keeper.labels()[asked] >= before + 120


async def test_what_was_sent_twice_counts_once_and_a_gap_is_made_good(group: Group) -> None:
    one, two = await group.member(), await group.member()
    asked = rule("shadow")
    await group.work(asked, 1, one, two)
    labels = one.keeper.labels()[asked]
    one.lessons._count -= 5  # as if it did not know that these five had arrived
    await one.ask(asked, times=10)
    await until(lambda: two.keeper.labels()[asked] == labels + 5, "five of ten")
    two.lessons._n -= 1  # as if one had been trimmed before it was read
    two.lessons._n += 3
    await one.ask(asked, times=5)
    await group.agree(asked, one, two)
    assert np.isclose(two.keeper.labels()[asked], labels + 10)
