"""Flights over gateway processes: a lease in Redis says who flies, and messages bring the others what comes.

    take ─► Lease: this process asks a backend, and gives its events to every process that asks for them
        └─► Elsewhere: another does; its events are followed here as if they came from a backend
        └─► None: Redis is away, and this process flies for itself

A lease is renewed while its flight lasts; when the process dies, it ends after `LEASE_S` and the next who asks flies.
Nothing of an answer is written to Redis, and nothing is sent unless somebody follows.
"""

from __future__ import annotations

import asyncio
import logging
import struct
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from cache.flight import Ticket
from gateway.access.counters_redis import PREFIX
from gateway.access.redis_channel import Channel, RedisDown
from gateway.access.redis_shared import keep_connected, open_channel, redis_password
from gateway.dialects.errors import BadRequest
from gateway.flights.messages import (
    AnyMessage,
    Elsewhere,
    End,
    Follow,
    Landing,
    Message,
    Pieces,
    Refusal,
    Unfollow,
    pack,
    unpack,
)
from gateway.flights.subscriber import Subscriber
from gateway.settings import Settings

logger = logging.getLogger("tierline.flights")
SCRIPT: Final = (Path(__file__).parent / "shared.lua").read_text()
LEASE_S: Final = 5.0
_RENEW_S: Final = 1.5
# Who asks so soon after a landing gets the answer from the one that flew: the caches may not have it everywhere yet.
_LINGER_S: Final = 2.0
_ASK_AGAIN_S: Final = 1.0
# A follower that was not heard of for so long is gone; so is a leader.
_SILENCE_S: Final = 3.0
_STOP_S: Final = 1.0
# Events are sent together: this much at once, because many calls share the connection and none may take long.
_PIECES_BYTES: Final = 64 * 1024
_LANDING_BYTES: Final = 1024 * 1024

_encode = msgspec.msgpack.Encoder().encode
Flown = Ticket[Landing]
Heard = Callable[[bytes], None]


class _Sending:
    """One process that follows a flight of this one: how far it has been sent."""

    def __init__(self) -> None:
        self.position = 0
        self.heard_at = time.monotonic()
        self.task: asyncio.Task[None] | None = None


class Lease:
    """The right to fly for everybody, for as long as it is renewed."""

    def __init__(self, id: str, process: str, ticket: Flown) -> None:
        self.id = id
        self.token = uuid.uuid4().hex
        self.value = f"{process} {self.token}"
        self.ticket = ticket
        self.run = ticket.run
        self.sendings: dict[str, _Sending] = {}


class SharedFlights:
    """One gateway process among others."""

    def __init__(self, channel: Channel, subscriber: Callable[[str, Heard], Subscriber], *, lease_s: float = LEASE_S):
        """`subscriber` makes one for a name of a process."""
        self._channel = channel
        self._lease_s = lease_s
        self.process = uuid.uuid4().hex
        self._subscriber = subscriber(self.process, self.heard)
        self._listens = self._subscriber.listening.is_set
        self._leases: dict[str, Lease] = {}  # by token; those that have just landed too
        # Of flights elsewhere, by token: more than one while a flight here takes the place of an earlier one.
        self._inboxes: defaultdict[str, list[asyncio.Queue[Message]]] = defaultdict(list)
        self._tasks: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Connect, and keep connected. A Redis that is away is no reason not to start."""
        with suppress(RedisDown):
            await self._channel.connect()
        self._subscriber.start()
        keeping = keep_connected(
            self._channel,
            self._renew,
            logger,
            back="equal questions at several gateway processes go to a backend once",
            away="each process asks for its own clients",
            every_s=min(_RENEW_S, self._lease_s / 3),
        )
        self._keeper = asyncio.create_task(keeping, name="flights-redis")

    async def stop(self) -> None:
        tasks = [*self._tasks, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._tasks:  # what these had to say at their end
            await asyncio.wait(self._tasks, timeout=_STOP_S)
        await self._subscriber.stop()
        await self._channel.aclose()

    def heard(self, data: bytes) -> None:
        """A message from another process."""
        message = unpack(data)
        if isinstance(message, (Follow, Unfollow)):
            self._followed(message)
        else:
            for inbox in self._inboxes.get(message.token, ()):
                inbox.put_nowait(message)

    # -- flying for everybody ----------------------------------------------------------------------------------------

    async def take(self, id: str, ticket: Flown) -> Lease | Elsewhere | None:
        """Who flies for this question now: this process, for the holder of `ticket`, or another."""
        if not self._listens():
            return None  # nobody could follow it here
        lease = Lease(id, self.process, ticket)
        taking = asyncio.ensure_future(
            self._call("take", {"id": id, "value": lease.value, "lease_ms": int(self._lease_s * 1000)})
        )
        try:
            held = await asyncio.shield(taking)
        except RedisDown:
            return None
        except asyncio.CancelledError:
            self._in_background(self._give_back(taking, lease))  # it may have been taken, for nobody
            raise
        if held:
            process, _, token = held.decode().partition(" ")
            return Elsewhere(process, token)
        self._leases[lease.token] = lease
        return lease

    async def _give_back(self, taking: asyncio.Future[bytes], lease: Lease) -> None:
        with suppress(RedisDown):
            if not await taking:
                await self._give_up(lease.id, lease.value)

    def land(self, lease: Lease) -> None:
        """The flight has ended, as its ticket says."""
        self._in_background(self._land(lease, _LINGER_S if lease.ticket.shared else 0.0))

    async def _land(self, lease: Lease, linger_s: float) -> None:
        await self._give_up(lease.id, lease.value, linger_s)
        await asyncio.sleep(_LINGER_S)  # who was sent here meanwhile still gets an answer
        self._leases.pop(lease.token, None)

    async def _give_up(self, id: str, value: str, linger_s: float = 0.0) -> None:
        with suppress(RedisDown):
            await self._call("land", {"id": id, "value": value, "linger_ms": int(linger_s * 1000)})

    def _followed(self, message: Follow | Unfollow) -> None:
        lease = self._leases.get(message.token)
        if isinstance(message, Unfollow):
            if lease is not None and (sending := lease.sendings.pop(message.sender, None)) is not None:
                sending.heard_at = float("-inf")
            return
        if lease is None:
            self._in_background(self._say(message.sender, End(message.token, 0)))
            return
        sending = lease.sendings.setdefault(message.sender, _Sending())
        sending.heard_at = time.monotonic()
        if message.again or sending.task is None:
            sending.position = message.position
        if sending.task is None or sending.task.done():
            sending.task = self._in_background(self._send(lease, message.sender, sending))

    async def _send(self, lease: Lease, process: str, sending: _Sending) -> None:
        """Send another process what it has not, until the flight has ended or nobody there follows any more."""
        ticket = lease.ticket
        run, told_begun = lease.run, False
        detach = ticket.attach()
        said_at = float("-inf")
        try:
            while time.monotonic() - sending.heard_at < _SILENCE_S:
                parts = _some(run.parts, sending.position)
                now = time.monotonic()
                if parts or (run.begun and not told_begun) or (run.running and now - said_at > _ASK_AGAIN_S):
                    start, told_begun, said_at = sending.position, run.begun, now
                    sending.position += len(parts)
                    if not await self._say(process, Pieces(lease.token, start, parts, run.begun)):
                        return  # it asks again if it is there
                elif run.running:
                    await run.changed(_ASK_AGAIN_S)
                else:
                    await self._say(process, _end(lease.token, ticket, len(run.parts), run.answer))
                    return
        finally:
            detach()
            if sending.task is asyncio.current_task():
                sending.task = None

    # -- following another process -----------------------------------------------------------------------------------

    def follow(self, id: str, elsewhere: Elsewhere, ticket: Flown) -> None:
        """Let a flight of another process be followed here: `ticket` leads in its place."""
        task = self._in_background(self._follow(id, elsewhere, ticket))

        def deserted() -> None:
            task.cancel()

        ticket.watch(lambda: None, deserted)
        task.add_done_callback(lambda _: ticket.leave())
        if not ticket.awaited:
            task.cancel()

    async def _follow(self, id: str, elsewhere: Elsewhere, ticket: Flown) -> None:
        inbox: asyncio.Queue[Message] = asyncio.Queue()
        inboxes = self._inboxes[elsewhere.token]
        inboxes.append(inbox)
        parts: list[bytes] = []
        heard_at = time.monotonic()
        again = True  # from the first event on, whatever this process was sent before
        try:
            while True:
                asked_at = time.monotonic()
                if await self._say(elsewhere.process, Follow(elsewhere.token, self.process, len(parts), again)) == 0:
                    # Nobody listens there any more: whoever is next here need not wait for the end of the lease.
                    await self._give_up(id, f"{elsewhere.process} {elsewhere.token}")
                    return
                again = False
                while not again and (left_s := asked_at + _ASK_AGAIN_S - time.monotonic()) > 0:
                    try:
                        async with asyncio.timeout(left_s):
                            message = await inbox.get()
                    except TimeoutError:
                        break
                    heard_at = time.monotonic()
                    again = not self._take_in(message, parts, ticket)
                    if ticket.landed or (isinstance(message, End) and not again):
                        return
                silent_s = time.monotonic() - heard_at
                if silent_s > self._lease_s + _SILENCE_S:
                    ticket.complete(None)  # it holds its lease and says nothing: everybody for themselves
                    return
                if silent_s > _SILENCE_S and await self._holder(id) != f"{elsewhere.process} {elsewhere.token}":
                    return
        finally:
            inboxes.remove(inbox)
            if not inboxes:
                self._inboxes.pop(elsewhere.token, None)
                self._in_background(self._say_nothing_more(elsewhere))

    def _take_in(self, message: Message, parts: list[bytes], ticket: Flown) -> bool:
        """Pass on what came. False: something before it is missing."""
        run = ticket.run
        if isinstance(message, Pieces):
            if message.position > len(parts):
                return False
            if message.begun and not run.begun:
                ticket.begin(parts)
            parts += message.parts[len(parts) - message.position :]
            run.grew()
        elif isinstance(message, End):
            if message.count > len(parts):
                return False
            if message.refusal is not None:
                refusal = message.refusal
                ticket.fail(lambda: _error(refusal))
            elif message.landing is not None:
                ticket.complete(message.landing, shared=message.shared)
        return True

    async def _holder(self, id: str) -> str | None:
        """Who has the lease, as it stands in Redis; the one that is dead has left it. None: Redis is away."""
        try:
            return (await self._call("look", {"id": id})).decode()
        except RedisDown:
            return None

    async def _say_nothing_more(self, elsewhere: Elsewhere) -> None:
        await self._say(elsewhere.process, Unfollow(elsewhere.token, self.process))

    # -- Redis -------------------------------------------------------------------------------------------------------

    async def _say(self, process: str, message: AnyMessage) -> int | None:
        """How many got it, one or none; None: Redis is away."""
        try:
            return int(await self._call("tell", {"process": process}, pack(message)))
        except RedisDown:
            return None

    async def _call(self, operation: str, arguments: dict[str, Any], data: bytes = b"") -> bytes:
        said = _encode(arguments)
        return await self._channel.call(operation, struct.pack(">I", len(said)) + said + data)

    def _in_background(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a flight could not be shared: %s: %s", type(error).__name__, error)

    async def _renew(self) -> None:
        pairs = [part for lease in self._leases.values() if _flies(lease) for part in (lease.id, lease.value)]
        await self._call("renew", {"leases": pairs, "lease_ms": int(self._lease_s * 1000)})


def _flies(lease: Lease) -> bool:
    return lease.run.running


def _some(parts: list[bytes], position: int) -> list[bytes]:
    """Parts from a position on, not too many."""
    size, end = 0, position
    while end < len(parts) and size < _PIECES_BYTES:
        size += len(parts[end])
        end += 1
    return parts[position:end]


def _end(token: str, ticket: Flown, count: int, landing: Landing | None) -> End:
    error = ticket.error
    if isinstance(error, BadRequest):
        refusal = Refusal(error.message, error.status, error.type, error.code, error.param)
        return End(token, count, refusal=refusal)
    shared = ticket.shared
    entry = landing.found.entry if landing is not None and landing.found is not None else None
    if landing is not None and entry is not None and len(entry.answer) > _LANDING_BYTES:
        # Who follows the stream has it; the others ask for themselves.
        landing, shared = msgspec.structs.replace(landing, found=None), False
    return End(token, count, landing, shared)


def _error(refusal: Refusal) -> BadRequest:
    return BadRequest(refusal.message, status=refusal.status, type=refusal.type, code=refusal.code, param=refusal.param)


async def open_flights(settings: Settings) -> SharedFlights:
    """Connected to Redis, or soon to be. Raises ValueError when the URL makes no sense. End it with `stop`."""
    storage = settings.storage
    assert storage.redis_url is not None
    url, password = storage.redis_url, redis_password()
    channel = open_channel(storage, SCRIPT)
    flights = SharedFlights(channel, lambda name, heard: Subscriber(url, f"{PREFIX}:process:{name}", heard, password))
    await flights.start()
    return flights
