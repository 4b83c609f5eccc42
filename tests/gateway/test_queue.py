"""The queue before admission: who waits, in which order, how it ends, and that nothing is taken before."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from gateway.access import queue as queue_module
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.limits import Admission, Grant, LimitExceeded, Scope
from gateway.access.queue import AdmissionQueue

_ids = itertools.count()


class Desk:
    """A queue before a limiter in memory, and requests that come to it. `waits` are the times it was told of."""

    def __init__(self, most_running: int | None = None, most_waiting: int = 100, patience_s: float = 20.0) -> None:
        self.now = 1000.0
        self.waits: list[float] = []
        self.limiter = MemoryLimiter()
        self.queue = AdmissionQueue(
            self.limiter,
            most_running=most_running,
            most_waiting=most_waiting,
            patience_s=patience_s,
            waited=self.waits.append,
            clock=lambda: self.now,
        )

    def ask(self, owner: str, scope: Scope | None = None, *others: Scope, **options: float) -> asyncio.Task[Grant]:
        """A request of this key on its way to admission; its task is named by its hold."""
        hold_id = f"{owner}-{next(_ids)}"
        admission = Admission(hold_id, (scope or Scope(owner), *others), tokens=10, cost_nanousd=100, ttl_s=900)
        return asyncio.create_task(self.queue.admit(admission, owner, **options), name=hold_id)  # type: ignore[arg-type]

    async def asked(self, *tasks: asyncio.Task[Grant]) -> None:
        """Let all requests come as far as they come."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def settle(self, task: asyncio.Task[Grant]) -> None:
        await self.queue.settle((await task).hold_id, 10, 100)
        await self.asked()

    def idle(self) -> bool:
        """Nothing is left of any request."""
        queue = self.queue
        return not (
            queue.waiting or queue.running or queue._turns or queue._blocked or queue._paces or self.limiter.open_holds
        )


async def refusal(task: asyncio.Task[Grant]) -> LimitExceeded:
    with pytest.raises(LimitExceeded) as caught:
        await task
    return caught.value


def admitted(tasks: Sequence[asyncio.Task[Grant]]) -> list[int]:
    return [number for number, task in enumerate(tasks) if task.done() and task.exception() is None]


# -- order -------------------------------------------------------------------------------------------------------------


async def test_more_than_may_run_wait_and_take_nothing() -> None:
    desk = Desk(most_running=2)
    key = Scope("a", requests_per_minute=100, tokens_per_minute=1000, budget_nanousd=10_000)
    tasks = [desk.ask("a", key) for _ in range(5)]
    await desk.asked()
    assert admitted(tasks) == [0, 1]
    assert (desk.queue.running, desk.queue.waiting, desk.limiter.open_holds) == (2, 3, 2)
    assert await desk.limiter.balance("a") == (0, 200)
    assert (await tasks[1]).standing.remaining_requests == 98
    await desk.settle(tasks[0])
    assert admitted(tasks) == [0, 1, 2]
    await desk.settle(tasks[2])
    await desk.settle(tasks[1])
    assert admitted(tasks) == [0, 1, 2, 3, 4]
    for task in tasks[3:]:
        await desk.settle(task)
    assert desk.idle()
    assert len(desk.waits) == 3


async def test_a_key_at_its_own_limit_waits_in_order_and_keeps_nobody_else() -> None:
    desk = Desk(most_running=3)
    one = Scope("a", parallel=1)
    mine = [desk.ask("a", one) for _ in range(4)]
    await desk.asked()
    others = [desk.ask("b"), desk.ask("c"), desk.ask("d")]
    await desk.asked()
    assert (admitted(mine), admitted(others)) == ([0], [0, 1])  # three run; d waits for a place, a for itself
    await desk.settle(others[0])
    assert (admitted(mine), admitted(others)) == ([0], [0, 1, 2])
    for number in range(4):
        assert admitted(mine) == list(range(number + 1))
        await desk.settle(mine[number])
    for task in others[1:]:
        await desk.settle(task)
    assert desk.idle()


async def test_keys_take_turns() -> None:
    desk = Desk(most_running=1)
    noisy = [desk.ask("a") for _ in range(50)]
    await desk.asked()
    modest = [desk.ask("b"), desk.ask("c")]
    await desk.asked()
    await desk.settle(noisy[0])
    await desk.settle(noisy[1])
    await desk.settle(modest[0])
    assert (admitted(noisy), admitted(modest)) == ([0, 1], [0, 1])
    for task in (*noisy, *modest):
        task.cancel()


async def test_keys_of_a_team_that_is_at_its_limit_take_turns() -> None:
    desk = Desk()
    team = Scope("team", parallel=1)
    first = desk.ask("a", Scope("a"), team)
    await desk.asked()
    tasks = {name: desk.ask(name[0], Scope(name[0]), team) for name in ("a1", "a2", "a3", "b1", "c1")}
    await desk.asked()
    order, running = [], first
    while desk.queue.waiting:
        await desk.settle(running)
        [name] = [name for name, task in tasks.items() if task.done() and name not in order]
        order.append(name)
        running = tasks[name]
    assert order == ["a1", "b1", "c1", "a2", "a3"]
    await desk.settle(running)
    assert desk.idle()


async def test_a_newcomer_does_not_overtake_its_own_key() -> None:
    desk = Desk()
    one = Scope("a", parallel=1)
    first, second = desk.ask("a", one), desk.ask("a", one)
    await desk.asked()
    await desk.queue.settle((await first).hold_id, 10, 100)  # the second one's turn, of which it does not know yet
    third = desk.ask("a", one)
    await desk.asked()
    assert (second.done(), third.done()) == (True, False)
    third.cancel()


# -- ends --------------------------------------------------------------------------------------------------------------


async def test_a_full_queue_refuses_and_displaces() -> None:
    desk = Desk(most_running=1, most_waiting=2)
    tasks = [desk.ask("a") for _ in range(3)]
    await desk.asked()
    error = await refusal(desk.ask("a"))
    assert (error.limit, error.scope) == ("concurrency", "gateway")
    assert error.message == "The gateway runs 1 requests, as many as it may at a time. 2 requests wait already."
    other = desk.ask("b")
    error = await refusal(tasks[2])
    assert error.message.endswith("The queue went to keys with fewer requests in it.")
    await desk.settle(tasks[0])
    await desk.settle(tasks[1])
    await desk.settle(other)
    assert desk.idle()


async def test_patience_ends() -> None:
    desk = Desk(patience_s=0.05)
    one = Scope("a", parallel=1, label="Your key 'a'")
    running = desk.ask("a", one)
    error = await refusal(desk.ask("a", one))
    assert (error.limit, error.scope) == ("parallel", "a")
    assert error.message.startswith("Your key 'a' allows 1 request at a time; running now: 1.")
    assert error.message.endswith(" No turn came in 0.05 s.")
    assert error.standing.remaining_parallel == 0
    await desk.settle(running)
    assert desk.idle()


async def test_retry_after_is_the_time_until_ones_turn_at_the_present_pace() -> None:
    desk = Desk(most_running=1, most_waiting=3)
    tasks = [desk.ask("a") for _ in range(6)]  # one runs, three wait, two are refused: nothing has ended yet
    await desk.asked()
    assert [task.exception().retry_after_s for task in tasks[4:]] == [1.0, 1.0]  # type: ignore[union-attr]
    for number in range(2):  # one ends every four seconds
        desk.now += 4
        await desk.settle(tasks[number])
        tasks.append(desk.ask("a"))
        await desk.asked()
    error = await refusal(desk.ask("a"))
    assert error.retry_after_s == pytest.approx(4 * 4)  # three before it
    assert error.headers()["retry-after"] == "16"
    desk.now += 1000
    assert (await refusal(desk.ask("a"))).retry_after_s == 60
    for task in tasks:
        task.cancel()


async def test_the_deadline_of_a_request_ends_its_wait() -> None:
    desk = Desk(most_running=1)
    running = desk.ask("a")
    await desk.asked()
    late = desk.ask("b", deadline=desk.now + 0.05)
    with pytest.raises(TimeoutError):
        await late
    await desk.settle(running)
    assert desk.idle()


async def test_whoever_leaves_has_taken_nothing() -> None:
    desk = Desk(most_running=1)
    running, leaving, waiting = desk.ask("a"), desk.ask("a"), desk.ask("b")
    await desk.asked()
    leaving.cancel()
    await desk.asked()
    assert (desk.queue.waiting, desk.limiter.open_holds) == (1, 1)
    await desk.settle(running)
    assert waiting.done()
    await desk.settle(waiting)
    assert desk.idle()


async def test_whoever_leaves_at_the_moment_of_its_turn_passes_it_on() -> None:
    desk = Desk(most_running=1)
    running, leaving, waiting = desk.ask("a"), desk.ask("a"), desk.ask("b")
    await desk.asked()
    await desk.queue.settle((await running).hold_id, 10, 100)
    leaving.cancel()
    await desk.asked()
    assert leaving.cancelled()
    await desk.settle(waiting)
    assert desk.idle()


async def test_without_places_it_refuses_at_once() -> None:
    desk = Desk(most_running=1, most_waiting=0)
    running = desk.ask("a", Scope("a", parallel=1))
    await desk.asked()
    assert (await refusal(desk.ask("b"))).limit == "concurrency"
    await desk.settle(running)
    running = desk.ask("a", Scope("a", parallel=1))
    await desk.asked()
    roomy = Desk(most_waiting=0)
    first = roomy.ask("a", Scope("a", parallel=1))
    await roomy.asked()
    assert (await refusal(roomy.ask("a", Scope("a", parallel=1)))).limit == "parallel"
    await desk.settle(running)
    await roomy.settle(first)
    assert desk.idle()
    assert roomy.idle()


async def test_what_does_not_wait_is_refused_at_once_and_served_if_there_is_room() -> None:
    desk = Desk(most_running=2)
    one = Scope("a", parallel=1)
    running, waiting = desk.ask("a", one), desk.ask("a", one)
    await desk.asked()
    assert (await refusal(desk.ask("a", one, waits=False))).limit == "parallel"
    unlimited = desk.ask("a", waits=False)
    await desk.asked()
    assert unlimited.done()
    assert (await refusal(desk.ask("b", waits=False))).limit == "concurrency"
    for task in (unlimited, running, waiting):
        await desk.settle(task)
    assert desk.idle()


async def test_rates_and_budgets_refuse_at_once_also_after_a_wait() -> None:
    desk = Desk(most_running=1)
    rate = Scope("a", requests_per_minute=1)
    running = desk.ask("a", rate)
    await desk.asked()
    second, other = desk.ask("a", rate), desk.ask("b")
    await desk.asked()
    assert desk.queue.waiting == 2
    await desk.settle(running)
    assert (await refusal(second)).limit == "requests_per_minute"
    assert other.done(), "its turn went on"
    await desk.settle(other)
    assert desk.idle()


async def test_room_that_another_process_makes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "LOOK_AGAIN_S", 0.01)
    desk = Desk()
    one = Scope("a", parallel=1)
    elsewhere = Admission("elsewhere", (one,), tokens=1, cost_nanousd=1, ttl_s=900)
    await desk.limiter.admit(elsewhere)  # as another gateway does, through what they share
    waiting = desk.ask("a", one)
    await desk.asked()
    assert not waiting.done()
    await desk.limiter.settle("elsewhere", 1, 1)
    await waiting
    await desk.settle(waiting)
    assert desk.idle()


@pytest.mark.parametrize("seed", range(20))
async def test_a_crowd_that_comes_and_goes_leaves_nothing_behind(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in whatever order, a limiter that takes its time included: all bounds hold, nobody is lost."""
    monkeypatch.setattr(queue_module, "LOOK_AGAIN_S", 0.005)
    chance = random.Random(seed)
    desk = Desk(most_running=3, most_waiting=6)
    admit = desk.limiter.admit
    most = 0

    async def slow(admission: Admission) -> Grant:
        for _ in range(chance.randrange(3)):
            await asyncio.sleep(0)
        return await admit(admission)

    monkeypatch.setattr(desk.limiter, "admit", slow)
    scopes: dict[str, Callable[[], Scope]] = {
        "a": lambda: Scope("a", parallel=1),
        "b": lambda: Scope("b", parallel=2),
        "c": lambda: Scope("c"),
    }
    tasks: list[asyncio.Task[Grant]] = []
    running: list[asyncio.Task[Grant]] = []
    for _ in range(300):
        owner = chance.choice("aabbc")
        match chance.randrange(4):
            case 0 | 1:
                tasks.append(desk.ask(owner, scopes[owner]()))
            case 2 if tasks:
                chance.choice(tasks).cancel()
            case 3 if running:
                done = running.pop(chance.randrange(len(running)))
                await desk.queue.settle(done.result().hold_id, 10, 100)
        await asyncio.sleep(0)
        for task in [task for task in tasks if task.done()]:
            tasks.remove(task)
            if not task.cancelled() and task.exception() is None:
                running.append(task)
        most = max(most, desk.limiter.open_holds)
        assert desk.queue.waiting <= 6 + 3
    assert 0 < most <= 3
    async with asyncio.timeout(20):
        while tasks or running:
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                if not task.cancelled() and task.exception() is None:
                    running.append(task)
            while running:
                await desk.queue.settle(running.pop().result().hold_id, 10, 100)
            await asyncio.sleep(0.001)
    assert desk.idle()
