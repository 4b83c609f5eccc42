"""Single flight: one upstream call, clear hand-over, bounded waiting."""

from __future__ import annotations

import asyncio

import pytest

from cache.flight import MOST_LEADERS, Broken, Following, SingleFlight, Ticket

Flights = SingleFlight[object]


async def settle() -> None:
    """Let every task that can run do so."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_of_a_hundred_one_goes_upstream_and_all_get_its_answer_object() -> None:
    flights: Flights = SingleFlight()
    answer, calls = object(), 0
    landed = asyncio.Event()

    async def request() -> object:
        nonlocal calls
        async with flights.join("k") as ticket:
            if not ticket.leader:
                return await ticket.result(10)
            calls += 1
            await landed.wait()
            ticket.complete(answer)
            return answer

    tasks = [asyncio.create_task(request()) for _ in range(100)]
    await settle()
    landed.set()
    assert all(found is answer for found in await asyncio.gather(*tasks))
    assert calls == 1
    assert flights.shared == 99
    assert len(flights) == 0


async def test_other_keys_fly_alone() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("a") as one, flights.join("b") as other:
        assert one.leader
        assert other.leader


async def test_a_failing_leader_hands_over_to_the_next_waiter_and_so_on() -> None:
    flights: Flights = SingleFlight()
    order: list[str] = []
    go = asyncio.Event()

    async def request(name: str) -> object:
        async with flights.join("k") as ticket:
            if not ticket.leader and (found := await ticket.result(10)) is not None:
                return found
            assert ticket.leader
            order.append(name)
            await go.wait()
            if name in "ab":
                raise ConnectionError(name)
            ticket.complete(name)
            return name

    tasks = [asyncio.create_task(request(name)) for name in "abcde"]
    await settle()
    assert order == ["a"]
    go.set()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert order == ["a", "b", "c"]
    assert [str(result) for result in results] == ["a", "b", "c", "c", "c"]
    assert isinstance(results[0], ConnectionError)
    assert isinstance(results[1], ConnectionError)
    assert len(flights) == 0


async def test_a_cancelled_leader_does_not_take_the_waiters_with_it() -> None:
    flights: Flights = SingleFlight()

    async def request(name: str) -> object:
        async with flights.join("k") as ticket:
            if not ticket.leader and (found := await ticket.result(10)) is not None:
                return found
            if name == "leader":
                await asyncio.Event().wait()
            ticket.complete(name)
            return name

    leader = asyncio.create_task(request("leader"))
    await settle()
    waiters = [asyncio.create_task(request(f"w{i}")) for i in range(3)]
    await settle()
    leader.cancel()
    assert await asyncio.gather(*waiters) == ["w0", "w0", "w0"]
    assert len(flights) == 0


async def test_a_cancelled_waiter_is_skipped() -> None:
    flights: Flights = SingleFlight()

    async def wait(ticket_out: list[Ticket[object]]) -> object:
        async with flights.join("k") as ticket:
            ticket_out.append(ticket)
            return await ticket.result(10)

    tickets: list[Ticket[object]] = []
    async with flights.join("k"):
        first, second = asyncio.create_task(wait(tickets)), asyncio.create_task(wait(tickets))
        await settle()
        first.cancel()
        await settle()
    assert await second is None
    assert [ticket.leader for ticket in tickets] == [False, True]


async def test_a_successor_cancelled_before_it_notices_hands_on() -> None:
    flights: Flights = SingleFlight()

    async def wait() -> tuple[object, bool]:
        async with flights.join("k") as ticket:
            return await ticket.result(10), ticket.leader

    async with flights.join("k"):
        first, second = asyncio.create_task(wait()), asyncio.create_task(wait())
        await settle()
    first.cancel()  # it is the leader already, but has not run since
    assert await second == (None, True)
    assert len(flights) == 0


async def test_an_answer_that_cannot_be_shared_releases_everybody_at_once() -> None:
    flights: Flights = SingleFlight()

    async def wait() -> tuple[object, bool]:
        async with flights.join("k") as ticket:
            return await ticket.result(10), ticket.leader

    async with flights.join("k") as ticket:
        waiters = [asyncio.create_task(wait()) for _ in range(3)]
        await settle()
        ticket.complete(None)
        assert await asyncio.gather(*waiters) == [(None, False)] * 3


async def test_waiting_is_bounded() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as leader:
        async with flights.join("k") as waiter:
            assert await waiter.result(0.01) is None
            assert not waiter.leader
        leader.complete("x")
    assert len(flights) == 0


async def test_who_joins_after_the_landing_starts_a_flight_of_its_own() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as first:
        first.complete("x")
        async with flights.join("k") as second:
            assert second.leader
            async with flights.join("k") as third:
                assert not third.leader
                second.complete("y")
                assert await third.result(1) == "y"
    assert len(flights) == 0


async def test_misuse_is_refused() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as leader, flights.join("k") as waiter:
        with pytest.raises(RuntimeError, match="nobody to wait for"):
            await leader.result(1)
        with pytest.raises(RuntimeError, match="only the leader"):
            waiter.complete("x")
        leader.complete("x")
        with pytest.raises(RuntimeError, match="completed already"):
            leader.complete("y")


async def followed(ticket: Ticket[object], seen: list[bytes]) -> object:
    found = await ticket.follow(10)
    if not isinstance(found, Following):
        return found
    async for part in found.parts():
        seen.append(part)  # noqa: PERF401 - seen while it grows
    return found.answer


async def test_a_stream_is_followed_from_its_first_event_while_it_grows() -> None:
    flights: Flights = SingleFlight()
    early: list[bytes] = []
    late: list[bytes] = []
    async with (
        flights.join("k") as leader,
        flights.join("k") as one,
        flights.join("k") as two,
        flights.join("k") as three,
    ):
        first = asyncio.create_task(followed(one, early))
        await settle()
        parts = [b"1"]
        run = leader.begin(parts)
        await settle()
        assert early == [b"1"]
        second = asyncio.create_task(followed(two, late))
        whole = asyncio.create_task(three.result(10))
        parts.append(b"2")
        run.grew()
        await settle()
        assert early == late == [b"1", b"2"]
        parts.append(b"3")
        leader.complete("end")
        assert await asyncio.gather(first, second, whole) == ["end", "end", "end"]
        assert early == late == parts


async def test_an_answer_that_cannot_be_shared_ends_the_streams_that_are_followed_and_no_others() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as leader, flights.join("k") as one, flights.join("k") as two:
        leader.begin([b"1"])
        seen: list[bytes] = []
        following, waiting = asyncio.create_task(followed(one, seen)), asyncio.create_task(two.result(10))
        await settle()
        leader.complete("end", shared=False)
        assert await asyncio.gather(following, waiting) == ["end", None]


async def test_a_leader_that_fails_breaks_the_streams_and_hands_over_to_who_waits() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as one, flights.join("k") as two:
        async with flights.join("k") as late:
            pass
        seen: list[bytes] = []
        one.begin([b"1"])
        following = asyncio.create_task(followed(two, seen))
        await settle()
        one.leave()
        with pytest.raises(Broken):
            await following
        assert not late.leader
        assert len(flights) == 0


async def test_after_some_failures_the_others_are_let_go() -> None:
    flights: Flights = SingleFlight()
    led = 0

    async def request() -> None:
        nonlocal led
        async with flights.join("k") as ticket:
            if not ticket.leader:
                assert await ticket.result(10) is None
            if ticket.leader:
                led += 1
                await asyncio.sleep(0)

    await asyncio.gather(*(request() for _ in range(50)))
    assert led == MOST_LEADERS
    assert len(flights) == 0


async def test_the_leader_learns_who_waits() -> None:
    flights: Flights = SingleFlight()
    told: list[str] = []
    async with flights.join("k") as leader:
        leader.watch(lambda: told.append("joined"), lambda: told.append("deserted"))
        assert not leader.awaited
        async with flights.join("k") as one:
            leader.begin([])
            following = asyncio.create_task(followed(one, []))
            detach = leader.attach()
            await settle()
            assert leader.awaited
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        assert told == ["joined", "joined"]
        detach()
        detach()
        assert told == ["joined", "joined", "deserted"]
        leader.complete("x")


async def test_an_error_that_is_everybodys_reaches_everybody() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as leader, flights.join("k") as one, flights.join("k") as two:
        leader.fail(lambda: ValueError("refused"))
        for ticket in (one, two):
            with pytest.raises(ValueError, match="refused"):
                await ticket.result(10)


async def test_a_delegate_leads_in_the_place_of_a_request_that_is_then_first_in_line() -> None:
    flights: Flights = SingleFlight()
    async with flights.join("k") as one, flights.join("k") as two:
        delegate = one.delegate()
        assert (one.leader, two.leader, delegate.leader) == (False, False, True)
        waiting = [asyncio.create_task(ticket.result(10)) for ticket in (one, two)]
        await settle()
        delegate.leave()
        await settle()
        assert (one.leader, two.leader) == (True, False)
        one.complete("x")
        assert await asyncio.gather(*waiting) == [None, "x"]
