"""Who waits for a busy backend, in which order, how long, and how waiting ends."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from backends.attempt import AttemptFailed
from backends.dispatch import NoBackend
from backends.pool import Pool, Replica
from backends.waiting import Displaced, FairQueue

URLS = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]


# The queue.


async def test_owners_take_turns():
    queue: FairQueue[str] = FairQueue(10)
    places = {name: queue.join(name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "b2")}
    names = {place: name for name, place in places.items()}
    assert queue.size == 6
    assert [names[queue.pop()] for _ in range(6)] == ["a1", "b1", "c1", "a2", "b2", "a3"]
    assert queue.pop() is None
    assert queue.size == 0


async def test_a_flood_makes_room_for_others_and_not_for_itself():
    queue: FairQueue[str] = FairQueue(3)
    flood = [queue.join("a") for _ in range(3)]
    assert queue.join("a") is None
    modest = queue.join("b")
    assert modest is not None
    with pytest.raises(Displaced):
        await flood[2]
    assert queue.join("b") is None  # one more would only turn the tables
    assert queue.size == 3
    assert [queue.pop() for _ in range(3)] == [flood[0], modest, flood[1]]


async def test_those_who_leave_are_passed_over():
    queue: FairQueue[str] = FairQueue(3)
    first, second, third = (queue.join("a") for _ in range(3))
    queue.leave("a", second)
    queue.leave("a", second)
    queue.leave("b", first)
    first.cancel()
    assert queue.pop() is third
    assert queue.size == 0
    assert FairQueue(0).join("a") is None


async def test_some_owners_can_be_passed_over():
    queue: FairQueue[str] = FairQueue(10)
    for name in ("a", "a", "b"):
        queue.join(name)
    assert (queue.waiting("a"), queue.waiting("b"), queue.waiting("c")) == (2, 1, 0)
    assert queue.take({"a"})[0] == "b"
    assert queue.take({"a", "b"}) is None
    assert queue.size == 2
    queue.pass_on("b")
    assert queue.take()[0] == "a"


async def test_a_turn_that_came_too_early_stays_the_owners():
    queue: FairQueue[str] = FairQueue(3)
    places = {name: queue.join(name[0]) for name in ("a1", "b1", "c1")}
    assert queue.take() == ("a", places["a1"])
    assert queue.take({"a"}) == ("b", places["b1"])
    queue.join("b")
    back = {"b": queue.put_back("b"), "a": queue.put_back("a")}  # in any order
    assert queue.size == 4
    assert queue.take() == ("a", back["a"])
    queue.pass_on("a")
    assert queue.take() == ("b", back["b"])
    queue.pass_on("b")
    assert queue.take() == ("c", places["c1"])
    queue.pass_on("c")
    assert queue.take()[0] == "b"
    queue.pass_on("b")
    assert (queue.size, queue.pop()) == (0, None)


# In a pool.


@pytest_asyncio.fixture
async def pool(client) -> AsyncIterator[Pool]:
    made = Pool("p", URLS, client=client, max_outstanding=1, max_queued=3)
    yield made
    await made.aclose()
    assert made.queued == 0
    assert [replica.outstanding for replica in made.replicas] == [0, 0]


def fill(pool: Pool) -> list[Replica]:
    taken = []
    while (replica := pool.acquire()) is not None:
        taken.append(replica)
    return taken


async def queue(pool: Pool, owner: str = "a", patience_s: float = 5) -> asyncio.Task[Replica]:
    """A task that waits in the pool's queue."""
    waiter = asyncio.create_task(pool.wait(owner, patience_s))
    await asyncio.sleep(0)
    return waiter


async def test_a_freed_replica_goes_to_the_first_who_waits(pool):
    first, second = fill(pool)
    waiter = await queue(pool)
    pool.release(second)
    assert await waiter is second
    pool.release(first)
    pool.release(second)


async def test_newcomers_do_not_overtake(pool):
    first, second = fill(pool)
    waiter = await queue(pool)
    pool.release(first)  # the waiter has not run yet
    assert pool.acquire() is None
    assert await waiter is first
    pool.release(first)
    pool.release(second)


async def test_patience_ends(pool):
    taken = fill(pool)
    with pytest.raises(AttemptFailed) as caught:
        await pool.wait("a", 0.05)
    assert (caught.value.kind, caught.value.retry_after) == ("overloaded", 1.0)
    for replica in taken:
        pool.release(replica)


async def test_a_full_queue_refuses_at_once(pool):
    taken = fill(pool)
    waiters = [await queue(pool) for _ in range(3)]
    with pytest.raises(AttemptFailed, match="3 requests wait"):
        await pool.wait("a", 5)
    other = await queue(pool, "b")
    with pytest.raises(AttemptFailed, match="most requests"):
        await waiters[2]
    for replica in taken:
        pool.release(replica)
    served = [await waiters[0], await other]
    for replica in served:
        pool.release(replica)
    pool.release(await waiters[1])


async def test_whoever_leaves_at_the_moment_of_being_served_passes_it_on(pool):
    first, second = fill(pool)
    leaving, staying = await queue(pool), await queue(pool)
    leaving.cancel()
    pool.release(first)
    assert await staying is first
    with pytest.raises(asyncio.CancelledError):
        await leaving
    gone, served = await queue(pool), await queue(pool)
    pool.release(second)  # handed to `gone`, which does not run any more
    gone.cancel()
    assert await served is second
    pool.release(first)
    pool.release(second)


async def test_the_end_of_a_rest_serves_those_who_wait(pool):
    began = time.monotonic()
    for replica in pool.replicas:
        pool.failed(replica, AttemptFailed("rate_limited", "slow down", retry_after=0.1))
    assert pool.acquire() is None
    replica = await pool.wait("a", 5)
    assert time.monotonic() - began >= 0.1
    pool.release(replica)


async def test_the_end_of_a_rest_serves_those_who_wait_for_busy_replicas(pool):
    began = time.monotonic()
    resting, busy = pool.replicas
    pool.failed(resting, AttemptFailed("rate_limited", "slow down", retry_after=0.1))
    assert pool.acquire() is busy
    assert pool.acquire() is None
    assert await pool.wait("a", 5) is resting
    assert time.monotonic() - began >= 0.1
    for replica in pool.replicas:
        pool.release(replica)


async def test_a_rest_that_outlasts_patience_is_not_waited_for(pool):
    for replica in pool.replicas:
        pool.failed(replica, AttemptFailed("rate_limited", "slow down", retry_after=30))
    with pytest.raises(AttemptFailed) as caught:
        await pool.wait("a", 5)
    assert caught.value.kind == "rate_limited"
    assert 29 < caught.value.retry_after <= 30


async def test_those_who_wait_for_a_dead_backend_learn_when_it_lives(pool):
    for replica in pool.replicas:
        pool.failed(replica, AttemptFailed("connect", "refused"))
    first, second = fill(pool)  # one at a time on each
    waiter = await queue(pool)
    pool.succeeded(first)
    pool.release(first)
    assert await waiter is first
    pool.release(first)
    pool.release(second)


# Through the dispatcher.


async def test_more_requests_than_places_wait_and_are_all_answered(bench, mock):
    pool = bench.pool("main", mock, max_outstanding=2)
    answers = [asyncio.create_task(bench.open("mock,delay_ms=20", stream=False)) for _ in range(12)]
    await mock.until(lambda: mock.requests == 2)
    assert pool.queued == 10
    for answer in await asyncio.gather(*answers):
        assert answer.attempt.outcome == "success"
    assert bench.outcomes() == ["success"] * 12


async def test_a_client_that_leaves_the_queue_costs_nothing(bench, mock, eventually):
    pool = bench.pool("main", mock, max_outstanding=1)
    first = await bench.open("mock,chunks=1000,interval_ms=5")
    waiting = asyncio.create_task(bench.open())
    await eventually(lambda: pool.queued)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.queued == 0
    assert len(bench.observer.started) == 1
    await first.aclose()
    assert mock.requests == 1


async def test_a_free_candidate_is_better_than_a_queue(bench, mock, second):
    bench.pool("main", mock, max_outstanding=1)
    bench.pool("other", second)
    first = await bench.open("mock,chunks=1000,interval_ms=5")
    answer = await bench.open("mock", "mock@other", stream=False)
    assert answer.attempt.replica == second.base_url
    await first.aclose()


async def test_if_all_are_busy_the_wait_is_for_the_first(bench, mock, second, eventually):
    main = bench.pool("main", mock, max_outstanding=1)
    bench.pool("other", second, max_outstanding=1)
    held = [await bench.open("mock,chunks=1000,interval_ms=5" + where) for where in ("", "@other")]
    waiting = asyncio.create_task(bench.open("mock", "mock@other", stream=False))
    await eventually(lambda: main.queued)
    await held[0].aclose()
    assert (await waiting).attempt.replica == mock.base_url
    await held[1].aclose()


async def test_waiting_in_vain_happens_once(bench, mock, second):
    bench.pool("main", mock, max_outstanding=1, queue_timeout_s=0.2)
    bench.pool("other", second, max_outstanding=1, queue_timeout_s=30)
    held = [await bench.open("mock,chunks=9999,interval_ms=5" + where) for where in ("", "@other")]
    with pytest.raises(NoBackend) as caught:
        await asyncio.wait_for(bench.open("mock", "mock@other"), 10)
    assert (caught.value.kind, caught.value.status, caught.value.retry_after) == ("overloaded", 503, 1.0)
    for answer in held:
        await answer.aclose()


async def test_the_deadline_of_a_request_ends_its_wait(bench, mock):
    bench.pool("main", mock, max_outstanding=1)
    held = await bench.open("mock,chunks=9999,interval_ms=5")
    with pytest.raises(NoBackend) as caught:
        await bench.open(deadline=time.monotonic() + 0.1)
    assert caught.value.kind in ("overloaded", "deadline")
    await held.aclose()


async def test_a_queue_survives_a_crowd_that_comes_and_goes(bench, mock):
    bench.pool("main", mock, max_outstanding=3, max_queued=50)

    async def one(number: int) -> str:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.02 * (number % 7) if number % 7 else 30):
                answer = await bench.open("mock,delay_ms=5", stream=False, owner=str(number % 5))
                return answer.attempt.outcome
        return "left"

    outcomes = await asyncio.gather(*(one(number) for number in range(50)))
    assert outcomes.count("success") >= 8  # those that do not leave
    assert bench.outstanding() == 0
