"""What gateway processes tell each other about a flight, when one of them hangs, dies, or a message is lost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, suppress

import pytest

from bench.redis_server import RedisServer
from cache.client import Lookup
from cache.flight import Broken, Following, SingleFlight
from gateway.access.redis_channel import Channel
from gateway.flights import shared
from gateway.flights.messages import Elsewhere, Landing, Pieces, unpack
from gateway.flights.shared import SCRIPT, Lease, SharedFlights
from gateway.flights.subscriber import Subscriber
from tests.gateway.front_door import eventually

pytestmark = pytest.mark.redis
LEASE_S = 0.6
LANDING = Landing(Lookup("exact", 1.0), "m", "small", 1, 2, 3)

Make = Callable[[], Awaitable[SharedFlights]]


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("_SILENCE_S", 1.0), ("_ASK_AGAIN_S", 0.1), ("_RENEW_S", 0.1), ("_LINGER_S", 0.5)):
        monkeypatch.setattr(shared, name, seconds)


@pytest.fixture
async def process(redis_server: RedisServer) -> AsyncIterator[Make]:
    """Makes gateway processes' ends that know each other."""
    prefix = f"{{{uuid.uuid4().hex}}}"
    async with AsyncExitStack() as stack:

        async def make() -> SharedFlights:
            url = redis_server.url
            made = SharedFlights(
                Channel(url, SCRIPT, prefix, 10.0),
                lambda name, heard: Subscriber(url, f"{prefix}:process:{name}", heard),
                lease_s=LEASE_S,
            )
            await made.start()
            stack.push_async_callback(made.stop)
            await asyncio.wait_for(made._subscriber.listening.wait(), 10)
            return made

        yield make


class Leader:
    """A request that flies at one process."""

    def __init__(self, at: SharedFlights) -> None:
        self.at = at
        self.flights: SingleFlight[Landing] = SingleFlight()
        self.joining = self.flights.join("k")
        self.parts: list[bytes] = []

    async def take_off(self) -> None:
        self.ticket = await self.joining.__aenter__()
        lease = await self.at.take("k", self.ticket)
        assert isinstance(lease, Lease)
        self.lease = lease
        self.run = self.ticket.begin(self.parts)

    def say(self, *parts: bytes) -> None:
        self.parts += parts
        self.run.grew()

    def land(self, *, shared: bool = True) -> None:
        self.ticket.complete(LANDING, shared=shared)
        self.at.land(self.lease)


async def follow(at: SharedFlights, seen: list[bytes], *, stream: bool = True) -> Landing | str | None:
    """What a request at another process gets: the landing, `leads` if it has to fly itself, `broken`, None if alone."""
    flights: SingleFlight[Landing] = SingleFlight()
    async with flights.join("k") as ticket:
        found = await at.take("k", ticket)
        assert isinstance(found, Elsewhere)
        at.follow("k", found, ticket.delegate())
        got = await (ticket.follow(20) if stream else ticket.result(20))
        if isinstance(got, Following):
            try:
                async for part in got.parts():
                    seen += [part]
            except Broken:
                return "broken"
            return got.answer
        return "leads" if ticket.leader else got


async def test_events_and_landing_come_in_order_and_late_joiners_get_all(process: Make) -> None:
    one, two, three = await process(), await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    leader.say(b"1", b"2")
    seen: list[list[bytes]] = [[], [], []]
    first = asyncio.create_task(follow(two, seen[0]))
    await eventually(lambda: seen[0] == [b"1", b"2"])
    assert leader.ticket.awaited
    leader.say(*(b"%d" % number for number in range(3, 500)))
    second = asyncio.create_task(follow(three, seen[1]))
    plain = asyncio.create_task(follow(three, [], stream=False))
    await eventually(lambda: len(seen[1]) == 499)
    leader.land()
    assert await asyncio.gather(first, second, plain) == [LANDING, LANDING, LANDING]
    assert seen[0] == seen[1] == leader.parts
    # Who asks just after the landing is still sent to the one that flew; a little later anybody may fly.
    assert await follow(two, seen[2]) == LANDING
    assert seen[2] in ([], leader.parts)
    await asyncio.sleep(0.8)
    flights: SingleFlight[Landing] = SingleFlight()
    async with flights.join("k") as ticket:
        assert isinstance(await two.take("k", ticket), Lease)


async def test_lost_messages_are_asked_for_again(process: Make) -> None:
    one, two = await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    heard, lost = two._subscriber._heard, []

    def lossy(data: bytes) -> None:
        message = unpack(data)
        if isinstance(message, Pieces) and message.parts and len(lost) < 2:
            lost.append(message)
        else:
            heard(data)

    two._subscriber._heard = lossy
    seen: list[bytes] = []
    following = asyncio.create_task(follow(two, seen))
    for number in range(10):
        leader.say(b"%d" % number)
        await asyncio.sleep(0.03)
    leader.land()
    assert await following == LANDING
    assert seen == leader.parts
    assert len(lost) == 2


async def test_a_process_that_hangs_is_replaced_when_its_lease_ends(process: Make) -> None:
    one, two = await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    waiting = asyncio.create_task(follow(two, []))
    await eventually(lambda: bool(leader.lease.sendings))
    hang(one)
    started = time.monotonic()
    leader.run.begun = False
    assert await waiting in ("leads", "broken")
    assert time.monotonic() - started < 2.5


async def test_a_process_that_keeps_its_lease_and_says_nothing_is_not_waited_for_for_ever(process: Make) -> None:
    one, two = await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    one._subscriber._heard = lambda data: None
    started = time.monotonic()
    assert await follow(two, [], stream=False) is None
    assert 0.5 < time.monotonic() - started < 3


async def test_a_process_that_is_gone_is_replaced_at_once(process: Make) -> None:
    one, two = await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    await one._subscriber.stop()
    started = time.monotonic()
    assert await follow(two, []) == "leads"
    assert time.monotonic() - started < 0.5
    flights: SingleFlight[Landing] = SingleFlight()
    async with flights.join("k") as ticket:
        assert isinstance(await two.take("k", ticket), Lease)


async def test_who_follows_gets_no_answer_that_may_not_be_shared_but_its_stream(process: Make) -> None:
    one, two = await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    leader.say(b"1")
    seen: list[bytes] = []
    following = asyncio.create_task(follow(two, seen))
    await eventually(lambda: seen == [b"1"])
    plain = asyncio.create_task(follow(two, [], stream=False))
    await asyncio.sleep(0.1)
    leader.land(shared=False)
    assert await asyncio.gather(following, plain) == [LANDING, None]


async def test_the_one_that_flies_learns_when_nobody_follows_any_more(process: Make) -> None:
    one, two = await process(), await process()
    leader = Leader(one)
    await leader.take_off()
    deserted = asyncio.Event()
    leader.ticket.watch(lambda: None, deserted.set)
    following = asyncio.create_task(follow(two, []))
    await eventually(lambda: leader.ticket.awaited)
    following.cancel()
    with suppress(asyncio.CancelledError):
        await following
    await asyncio.wait_for(deserted.wait(), 2)
    assert not leader.ticket.awaited


async def test_garbage_from_the_channel_is_only_logged(process: Make) -> None:
    one = await process()
    one._subscriber._take([b"message", b"channel", b"\xc1 nonsense"])
    one._subscriber._take([b"message", b"channel", b""])


def hang(one: SharedFlights) -> None:
    """As a stopped process: it renews nothing, and hears and says nothing."""
    assert one._keeper is not None
    one._keeper.cancel()
    one._subscriber._heard = lambda data: None
    for task in list(one._tasks):
        task.cancel()
