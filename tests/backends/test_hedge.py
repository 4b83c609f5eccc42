"""Hedged requests: when the second one goes out, which of the two counts, and what becomes of the other."""

from __future__ import annotations

import asyncio

import pytest

from backends.attempt import AttemptFailed
from backends.dispatch import NoBackend, UpstreamRefused
from backends.hedge import ENOUGH, LOST, Hedging, race
from backends.pool import Pool


def hedging(delay_s: float = 0.05, max_share: float = 1.0) -> Hedging:
    """One that knows enough, and has seen enough requests to hedge one."""
    made = Hedging(min_delay_s=delay_s, max_share=max_share)
    for _ in range(ENOUGH):
        made.observe(0.001)
    made.share.earn()
    return made


# When.


def test_the_delay_is_a_quantile_of_recent_times():
    made = Hedging(quantile=0.9, min_delay_s=0.0)
    for number in range(100):
        made.observe(number / 100)
    assert made.delay_s() == 0.89
    assert Hedging(quantile=0.5, min_delay_s=0.3).min_delay_s == 0.3


def test_nothing_is_hedged_before_there_are_figures():
    made = Hedging(min_delay_s=0.2)
    for _ in range(ENOUGH - 1):
        made.observe(0.001)
        assert made.delay_s() is None
    made.observe(0.001)
    assert made.delay_s() == 0.2


def test_old_times_are_forgotten():
    made = Hedging(min_delay_s=0.0)
    for seconds in (5.0, 0.1):
        for _ in range(300):
            made.observe(seconds)
        assert made.delay_s() == seconds


# The race.


class Runner:
    """Something that ends when it is told to."""

    def __init__(self) -> None:
        self.started = self.cancelled = False
        self.end: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.why: str | None = None

    async def run(self) -> str:
        self.started = True
        try:
            return await self.end
        except asyncio.CancelledError as cancelled:
            self.cancelled = True
            self.why = cancelled.args[0] if cancelled.args else None
            raise


@pytest.fixture
async def runners() -> tuple[Runner, Runner]:
    return Runner(), Runner()


discarded: list[str] = []


async def discard(result: str) -> None:
    discarded.append(result)


@pytest.fixture(autouse=True)
def nothing_discarded() -> None:
    discarded.clear()


async def begin(first: Runner, second: Runner, *, both: bool = True) -> asyncio.Task[str]:
    running = asyncio.create_task(race(first.run(), 0.0 if both else 60.0, second.run, discard))
    async with asyncio.timeout(5):
        while not (second.started if both else first.started):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return running


async def test_one_in_time_stays_alone(runners):
    first, second = runners
    running = await begin(first, second, both=False)
    first.end.set_result("a")
    assert await running == "a"
    assert not second.started


@pytest.mark.parametrize("winner", [0, 1])
async def test_the_first_answer_counts_and_the_other_is_cancelled(runners, winner):
    running = await begin(*runners)
    runners[winner].end.set_result("a")
    assert await running == "a"
    assert runners[1 - winner].cancelled
    assert runners[1 - winner].why == LOST
    assert not discarded


async def test_of_two_at_once_one_is_discarded(runners):
    first, second = runners
    running = await begin(first, second)
    second.end.set_result("b")
    first.end.set_result("a")
    assert await running == "a"
    assert discarded == ["b"]


@pytest.mark.parametrize("failing", [0, 1])
async def test_one_that_fails_leaves_the_field_to_the_other(runners, failing):
    running = await begin(*runners)
    runners[failing].end.set_exception(AttemptFailed("connect", "no"))
    await asyncio.sleep(0)
    runners[1 - failing].end.set_result("a")
    assert await running == "a"


async def test_if_both_fail_so_does_the_race(runners):
    running = await begin(*runners)
    for runner in runners:
        runner.end.set_exception(AttemptFailed("connect", "no"))
    with pytest.raises(AttemptFailed):
        await running


async def test_any_other_exception_ends_both(runners):
    first, second = runners
    running = await begin(first, second)
    first.end.set_exception(ValueError("refused"))
    with pytest.raises(ValueError, match="refused"):
        await running
    assert second.cancelled


async def test_cancelling_ends_both(runners):
    running = await begin(*runners)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [runner.cancelled for runner in runners] == [True, True]
    assert [runner.why for runner in runners] == [None, None]


async def test_cancelling_while_the_loser_ends_loses_no_answer(runners):
    first, _ = runners
    released = asyncio.Event()

    async def stubborn() -> str:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await released.wait()
            raise
        return "never"

    running = asyncio.create_task(race(first.run(), 0.0, stubborn, discard))
    await asyncio.sleep(0.02)
    first.end.set_result("a")
    await asyncio.sleep(0.02)
    running.cancel()
    released.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert discarded == ["a"]


# Through the dispatcher.


def twins(bench, mock, second, **options) -> Pool:
    """Two replicas of which the first one asked gets the fault."""
    second.asked = mock.asked
    options.setdefault("hedging", hedging())
    return bench.pool("main", mock, second, **options)


async def test_a_slow_replica_is_overtaken(bench, mock, second):
    twins(bench, mock, second)
    answer = await bench.open("hang,times=1")
    slow = mock if answer.attempt.replica == second.base_url else second
    await slow.until(lambda: slow.records[-1].outcome == "client-gone", timeout_s=1)
    assert mock.requests == second.requests == 1
    assert [event.done async for event in answer.events][-1]
    assert sorted(bench.outcomes()) == ["cancelled", "success"]
    [lost] = bench.observer.ended
    assert (lost.outcome, lost.error) == ("cancelled", LOST)
    assert bench.pools["main"].snapshot()[0].failures_total == 0
    await answer.aclose()


async def test_one_address_for_many_servers_is_asked_twice(bench, mock):
    bench.pool("main", mock, hedging=hedging())
    answer = await bench.open("hang,times=1")
    assert answer.attempt.number == 2
    assert mock.requests == 2
    await answer.aclose()


async def test_a_fast_answer_is_not_hedged(bench, mock, second):
    twins(bench, mock, second, hedging=hedging(delay_s=5.0))
    await (await bench.open()).aclose()
    assert mock.requests + second.requests == 1


async def test_hedges_keep_to_their_share(bench, mock, second):
    pool = twins(bench, mock, second, hedging=hedging(max_share=0.1), first_token_s=0.3)
    with pytest.raises(NoBackend):
        await bench.open("hang")  # each replica once, one after the other
    assert pool.hedging.share.spent == 0
    assert pool.hedging.share.refused >= 1
    assert bench.outcomes() == ["timeout", "timeout"]


async def test_a_plain_answer_is_not_hedged(bench, mock, second):
    twins(bench, mock, second)
    await bench.open("mock,delay_ms=200", stream=False)
    assert mock.requests + second.requests == 1


async def test_without_a_second_replica_in_rotation_there_is_no_hedge(bench, mock, refused_url):
    pool = bench.pool("main", mock, refused_url, hedging=hedging(), first_token_s=0.3, attempts=1)
    pool.failed(pool.replicas[1], AttemptFailed("connect", "refused"))
    with pytest.raises(NoBackend):
        await bench.open("hang")
    assert bench.outcomes() == ["timeout"]


async def test_if_both_fail_the_next_candidate_answers(bench, mock, second, serve, unused_tcp_port_factory):
    twins(bench, mock, second, attempts=1, first_token_s=0.3)
    third = type(mock)()
    await third.start()
    bench.pool("other", third)
    answer = await bench.open("hang", "mock@other")
    assert answer.attempt.replica == third.base_url
    assert bench.outcomes()[:2] == ["timeout", "timeout"]
    await answer.aclose()
    await third.stop()


async def test_a_refusal_ends_both(bench, mock, second):
    twins(bench, mock, second)
    mock.override, second.override = "status,status=400", "hang"
    with pytest.raises(UpstreamRefused):
        await bench.open()
    assert set(bench.outcomes()) <= {"refused", "cancelled"}  # whichever was asked first


async def test_a_client_that_leaves_cancels_both(bench, mock, second):
    twins(bench, mock, second)
    task = asyncio.create_task(bench.open("hang"))
    for server in (mock, second):
        await server.until(lambda server=server: server.requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for server in (mock, second):
        await server.until(lambda server=server: server.records[-1].outcome == "client-gone", timeout_s=1)
    assert bench.outcomes() == ["cancelled", "cancelled"]
    assert sorted(a.number for a in bench.observer.ended) == [1, 2]
    assert [a.error for a in bench.observer.ended] == [None, None]


async def test_a_client_that_is_gone_before_the_first_step_leaves_nothing_behind(bench, mock, second):
    twins(bench, mock, second)
    task = asyncio.create_task(bench.open("hang"))
    await asyncio.sleep(0)  # the replica is taken, the attempt has not begun
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.outstanding() == 0
