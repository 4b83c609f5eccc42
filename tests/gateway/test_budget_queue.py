"""Waiting for money: who waits, in which order, how it ends, with both limiters; and that nothing is taken before."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator

import msgspec
import pytest

from bench.redis_server import RedisServer
from gateway.access import budget_queue as module
from gateway.access.budget_queue import BudgetQueue, Wait
from gateway.access.limits import Admission, BudgetExhausted, Grant, LimitExceeded, Scope
from gateway.access.queue import AdmissionQueue
from tests.gateway.limiters import DECEMBER_1, AnyLimiter, Clock

_ids = itertools.count()


class Desk:
    """A queue for money before one for room before a limiter; one budget that all keys share, of `budget`."""

    def __init__(self, limiter: AnyLimiter, clock: Clock, most_waiting: int = 100) -> None:
        self.limiter = limiter
        self.clock = clock
        self.room = AdmissionQueue(
            limiter, most_running=None, most_waiting=100, patience_s=20, waited=lambda seconds: None
        )
        self.queue = BudgetQueue(self.room, most_waiting=most_waiting)
        self.shared = Scope("policy:p", budget_nanousd=1000, label="The policy 'p'")
        self.may_wait = True
        self.tries = 0

    def ask(
        self, owner: str, cost: int, *others: Scope, patience_s: float = 20.0, deadline: float | None = None
    ) -> asyncio.Task[Grant]:
        first = Admission(f"{owner}-{next(_ids)}", (*others, self.shared), tokens=1, cost_nanousd=cost, ttl_s=1e9)

        def renew() -> tuple[Admission, bool]:
            self.tries += 1
            return msgspec.structs.replace(first, scopes=(*others, self.shared)), self.may_wait

        waiting = self.queue.admit(first, owner, deadline, Wait(renew, patience_s))
        return asyncio.create_task(waiting, name=first.hold_id)

    async def asked(self) -> None:
        """Let all requests come as far as they come; a Redis takes its time."""
        for _ in range(6):
            await self.limiter.balance("policy:p")  # with Redis, behind everything that was asked of it before
            for _ in range(10):
                await asyncio.sleep(0)

    async def settle(self, task: asyncio.Task[Grant], cost: int) -> None:
        await self.room.settle((await task).hold_id, 1, cost)
        await self.asked()

    def idle(self) -> bool:
        return not (self.queue.waiting or self.queue._lines or self.room.running or self.room.waiting)


@pytest.fixture(params=["memory", "redis"])
async def desk(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[Desk]:
    clock = Clock(redis_server.url if request.param == "redis" else None)
    yield Desk(await clock.limiter(), clock)
    await clock.close()


def admitted(tasks: list[asyncio.Task[Grant]]) -> list[int]:
    return [number for number, task in enumerate(tasks) if task.done() and task.exception() is None]


async def refusal(task: asyncio.Task[Grant]) -> BudgetExhausted:
    with pytest.raises(BudgetExhausted) as caught:
        await task
    return caught.value


async def test_what_running_ones_give_back_goes_to_those_who_wait(desk: Desk) -> None:
    tasks = [desk.ask("a", 600) for _ in range(3)]
    await desk.asked()
    assert admitted(tasks) == [0]
    assert desk.queue.waiting == 2
    assert await desk.limiter.balance("policy:p") == (0, 600), "who waits has taken nothing"
    await desk.settle(tasks[0], 100)
    assert admitted(tasks) == [0, 1]
    await desk.settle(tasks[1], 100)
    assert admitted(tasks) == [0, 1, 2]
    await desk.settle(tasks[2], 100)
    assert desk.idle()


async def test_keys_take_turns_and_newcomers_wait_behind(desk: Desk) -> None:
    running = desk.ask("z", 900)
    await desk.asked()
    tasks = {name: desk.ask(name[0], 900) for name in ("a1", "a2", "a3", "b1")}
    await desk.asked()
    small = desk.ask("c", 50)  # there would be money for it, but others were first
    await desk.asked()
    assert not small.done()
    order: list[str] = []
    while desk.queue.waiting:
        await desk.settle(running, 0)
        await desk.asked()
        done = [name for name, task in tasks.items() if task.done() and name not in order]
        order += done
        running = tasks[done[0]]
    assert order == ["a1", "b1", "a2", "a3"]
    assert small.done()
    await desk.settle(running, 0)
    await desk.settle(small, 0)
    assert desk.idle()


async def test_one_that_needs_more_than_is_left_keeps_nobody_waiting(desk: Desk) -> None:
    spent = desk.ask("a", 500)
    await desk.asked()
    await desk.settle(spent, 500)
    large = desk.ask("a", 700)
    await desk.asked()
    assert desk.queue.waiting == 1
    for owner in ("a", "b"):
        small = desk.ask(owner, 100)
        await desk.asked()
        assert small.done()
        await desk.settle(small, 10)
    large.cancel()
    await desk.asked()
    assert desk.idle()


async def test_a_raised_budget_and_a_new_month_are_noticed(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    monkeypatch.setattr(module, "SELDOM_S", 0.04)
    spent = desk.ask("a", 1000)
    await desk.asked()
    await desk.settle(spent, 1000)
    first = desk.ask("b", 900)
    await desk.asked()
    assert not first.done()
    desk.shared = Scope("policy:p", budget_nanousd=2000, label="The policy 'p'")  # as a reload does
    async with asyncio.timeout(10):
        await first
    second = desk.ask("b", 900)
    await desk.asked()
    assert not second.done()
    desk.clock.wall = float(DECEMBER_1 + 1)
    async with asyncio.timeout(10):
        await second
    await desk.settle(first, 1)
    await desk.settle(second, 1)
    assert desk.idle()


async def test_waiting_in_vain_is_no_busy_loop(desk: Desk) -> None:
    spent = desk.ask("a", 1000)
    await desk.asked()
    await desk.settle(spent, 1000)
    waiting = [desk.ask(f"k{number}", 10, patience_s=0.3) for number in range(20)]
    for task in waiting:
        refused = await refusal(task)
        assert refused.message.endswith(" No money came in 0.3 s.")
        assert refused.retry_after_s > 3600
    assert desk.tries <= 20, "each was asked for once more, at its end"
    assert desk.idle()


async def test_a_policy_that_lets_nobody_wait_any_more(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.02)
    spent = desk.ask("a", 1000)
    await desk.asked()
    await desk.settle(spent, 1000)
    waiting = desk.ask("b", 100)
    await desk.asked()
    desk.may_wait = False
    assert (await refusal(waiting)).message.endswith("The policy lets nobody wait any more.")
    assert desk.idle()


async def test_deadline_and_full_line(desk: Desk) -> None:
    loop = asyncio.get_running_loop()
    running = desk.ask("a", 1000)
    await desk.asked()
    late = desk.ask("b", 100, deadline=loop.time() + 0.05)
    with pytest.raises(TimeoutError):
        await late
    desk.queue._most_waiting = 2
    tasks = [desk.ask("b", 100) for _ in range(3)]
    await desk.asked()
    assert (await refusal(tasks[2])).message.endswith("Too many requests wait for money already.")
    other = desk.ask("c", 100)
    assert (await refusal(tasks[1])).message.endswith("The line went to keys with fewer in it.")
    await desk.settle(running, 0)
    for task in (tasks[0], other):
        await desk.settle(task, 0)
    assert desk.idle()


async def test_another_budget_stands_in_the_way_then(desk: Desk) -> None:
    team = Scope("team:t", budget_nanousd=500, label="The team 't'")
    one, two = desk.ask("a", 900), desk.ask("b", 400, team)
    await desk.asked()
    other = asyncio.create_task(desk.room.admit(Admission("other", (team,), 1, 300, 1e9), "z"))
    await desk.asked()
    await desk.settle(one, 0)
    assert not two.done()
    await desk.settle(other, 0)
    assert two.done()
    await desk.settle(two, 0)
    assert desk.idle()


async def test_a_rate_refuses_after_the_wait_and_the_turn_goes_on(desk: Desk) -> None:
    rate = Scope("key:r", requests_per_minute=1)
    used, running = desk.ask("r", 1, rate), desk.ask("a", 900)
    await desk.asked()
    limited, after = desk.ask("r", 500, rate), desk.ask("b", 500)
    await desk.asked()
    await desk.settle(running, 0)
    with pytest.raises(LimitExceeded):
        await limited
    await desk.asked()
    assert after.done()
    for task in (used, after):
        await desk.settle(task, 0)
    assert desk.idle()


@pytest.mark.parametrize("seed", range(10))
async def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in whatever order: the budget holds, nobody is lost, and nothing is left."""
    monkeypatch.setattr(module, "LOOK_S", 0.005)
    chance = random.Random(seed)
    clock = Clock()
    desk = Desk(await clock.limiter(), clock, most_waiting=8)
    desk.shared = Scope("policy:p", budget_nanousd=100_000)
    tasks: list[asyncio.Task[Grant]] = []
    running: list[asyncio.Task[Grant]] = []

    def sort_out() -> None:
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                running.append(task)

    for _ in range(300):
        match chance.randrange(4):
            case 0 | 1:
                scopes = [Scope("key:a", parallel=1)] if chance.random() < 0.3 else []
                tasks.append(desk.ask(chance.choice("abc"), chance.choice((1_000, 40_000, 90_000)), *scopes))
            case 2 if tasks:
                chance.choice(tasks).cancel()
            case 3 if running:
                done = running.pop(chance.randrange(len(running)))
                await desk.room.settle(done.result().hold_id, 1, chance.randrange(1_000))
        for _ in range(chance.randrange(4)):
            await asyncio.sleep(0)
        sort_out()
        settled, held = await desk.limiter.balance("policy:p")
        assert settled + held <= 100_000
    async with asyncio.timeout(20):
        while tasks or running:
            sort_out()
            while running:
                await desk.room.settle(running.pop().result().hold_id, 1, 0)
            if len(tasks) and chance.random() < 0.02:
                tasks[0].cancel()
            await asyncio.sleep(0.001)
    assert desk.idle()
