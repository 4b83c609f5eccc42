"""What one cache process learns about its promises, told to all: one log of lessons in Redis, which each applies.

    judged here ──► Redis, which numbers it ──► every process, this one too, applies it in the order of the numbers

So all have the same labels, the same chances and bar, the same counts and certificates, and a breach ends serving
everywhere. Bars are found by one process at a time, and are told like lessons. A process that joins takes over how the
promises stood after some lesson, and applies what came behind it.

While Redis is away each process learns for itself. When it is back, what all knew counts again; what was learned alone
is told then, to teach, and counts in no bound: it was drawn by another bar than that of the others.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from cache.promise.events import NO_REGIME, Event, Lesson, Refit
from cache.promise.keeper import Keeper, Unusable, name_of
from cache.promise.rule import Rule
from cache.replicas.link import RETRY_S, DatasetLost, Link, RedisAway, RedisFull, Told, until_one_fails

_log = logging.getLogger(__name__)
MOST_UNSENT: Final = 4000
_FIT_MS: Final = 2000
# The log keeps twenty times as many.
_KEEP_EVERY: Final = 1000

_HEARD_S: Final = 1.0
_ASK_AGAIN_S: Final = 0.02

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Event)


Rate = Callable[[str, str, bool], int | None]


class _Gap(Exception):
    """Lessons are missing."""


class _Rating(msgspec.Struct, frozen=True, array_like=True):
    """A user's word on an answer; `id` is of the rating."""

    id: str
    request_id: str
    team_id: str
    good: bool


_ratings = msgspec.msgpack.Decoder(_Rating)


class _Item(msgspec.Struct, frozen=True):
    """What is to be sent: an event, a promise that is new here (`found`), or one as it stands after lesson `n`.

    `count` numbers the events of this process, so that Redis takes each once, however often it is sent. `applied`: this
    process has learned it already, alone.
    """

    kind: Literal["event", "found", "keep"]
    rule: Rule
    event: Event | None = None
    count: int = 0
    applied: bool = False
    n: int = 0
    dump: bytes = b""


class Lessons:
    """Keeps the promises of `keeper` in step with those of other processes. One event loop. A promise's name is of its
    rule and the meaning of its numbers.

    Attributes:
        connected: whether lessons go to all and come from all.
    """

    def __init__(self, keeper: Keeper, link: Link, *, meaning: str, rate: Rate = lambda *_: None) -> None:
        """
        Args:
            meaning: what the numbers of a lesson depend on, such as embedder and verifier; others are left out.
            rate: takes a user's word on an answer of this process: request, team, whether it was good. It returns how
                many answers that evicted, None where the request is not on record here.
        """
        self._rate = rate
        self.connected = False
        self._keeper = keeper
        self._link = link
        self._meaning = meaning
        self._suffix = "-" + hashlib.blake2b(meaning.encode(), digest_size=8).hexdigest()
        self._id = uuid.uuid4().hex
        self._count = 0
        self._items: deque[_Item] = deque()
        self._wake = asyncio.Event()
        self._shared = False  # from when a session begins to take over what others know
        self._dataset: str | None = None
        self._n = 0
        self._reached: dict[str, int] = {}  # by promise: the lesson after which it stands
        self._announced: set[str] = set()  # promises of which a `found` of this process is on its way
        self._refits: set[tuple[str, int]] = set()  # of this process
        self._complained = False

    def tell(self, event: Event) -> bool:
        """Tell everybody; True: it comes back, and is applied then. False: the caller has to apply it."""
        name = self._name_of(event.rule)
        if not self._shared:
            if isinstance(event, Lesson):
                self._push(msgspec.structs.replace(event, regime=NO_REGIME), applied=True)
            return False
        if name not in self._reached and name not in self._announced:
            self._announced.add(name)
            self._items.append(_Item("found", event.rule))
        if isinstance(event, Refit):
            self._refits.add((name, event.seen))
        self._push(event)
        return True

    async def may_fit(self, rule: Rule) -> bool:
        """Whether this process is the one to find a bar anew now. Alone it is."""
        if not self._shared:
            return True
        if not self.connected:
            return False
        try:
            word, *_ = await self._link.call("fit", self._name_of(rule), self._id, _FIT_MS)
        except (RedisAway, RedisFull, DatasetLost):
            return False
        return bool(word == "yes")

    async def ask_others(self, request_id: str, team_id: str, good: bool) -> int | None:
        """Bring a user's word to the process that gave the answer; returns how many answers that evicted.

        None: none of them has the request on record, or says so within a second.
        """
        if not self.connected:
            return None
        rating = _Rating(uuid.uuid4().hex, request_id, team_id, good)
        deadline = time.monotonic() + _HEARD_S
        try:
            await self._link.call("rate", self._id, self._meaning, _encoder.encode(rating))
            while time.monotonic() < deadline:
                word, *evicted = await self._link.call("rating", rating.id)
                if word == "ok":
                    return int(evicted[0])
                await asyncio.sleep(_ASK_AGAIN_S)
        except (RedisAway, RedisFull, DatasetLost):
            pass
        return None

    async def run(self) -> None:
        """Keep in step until cancelled. A Redis that is away is looked for twice a second."""
        while True:
            try:
                await self._session()
            except _Gap:
                _log.warning("lessons about promises are missing: taking over how they stand")
            except DatasetLost:
                _log.warning("Redis holds other data than it did: telling it how promises stand")
            except (RedisAway, RedisFull) as error:
                if not self._complained:
                    _log.error("Redis is away (%s): promises learn from this process alone", error)
                self._complained = True
                await asyncio.sleep(RETRY_S)

    async def _session(self) -> None:
        try:
            await self._link.open()
            await self._join()
            self.connected, self._complained = True, False
            _log.info("sharing with other cache processes what promises learn")
            await until_one_fails(self._follow(), self._send())
        finally:
            self.connected = False
            if self._shared:
                self._shared = False
                self._learn_alone()
            await self._link.close()

    # -- joining -----------------------------------------------------------------------------------------------------

    async def _join(self) -> None:
        """Take over what all know. In another Redis than the last time, who knows more is right."""
        joined = await self._link.join(uuid.uuid4().hex, 0)
        self._shared = True
        known = self._keeper.labels()
        own = {self._name_of(rule): labels for rule, labels in known.items()} if joined.dataset != self._dataset else {}
        self._dataset = joined.dataset
        self._reached.clear()
        self._announced.clear()
        _, latest, first, *names = await self._link.call("promises")
        unreadable: set[str] = set()
        for name in (one.decode() for one in names):
            if name.endswith(self._suffix) and not await self._take_over(name, unless_below=own.get(name, 0)):
                unreadable.add(name)
        for rule in known:
            name = self._name_of(rule)
            if name not in self._reached:
                self._announced.add(name)
                if await self._found(rule, replace=name in unreadable):
                    # Everybody goes on from what is known here, what was learned alone among it.
                    self._items = deque(item for item in self._items if item.rule != rule or not item.applied)
        self._n = max(min(self._reached.values(), default=latest), first - 1)

    async def _take_over(self, name: str, *, unless_below: int = 0) -> bool:
        """Go on from how a promise stands at the others, unless it has fewer labels. False: it cannot be read."""
        word, *rest = await self._link.call("promise", name)
        if word != "ok":
            return True
        n, labels, dump = rest
        if labels < unless_below:
            return True
        try:
            self._keeper.take_over(dump)
        except Unusable as error:
            _log.warning("how a promise stands at others cannot be read: %s", error)
            return False
        self._reached[name] = n
        return True

    async def _found(self, rule: Rule, *, replace: bool = False) -> bool:
        """Let everybody go on from how a promise stands here; False: not from here, others know as much."""
        name, labels, dump = self._name_of(rule), self._keeper.labels()[rule], self._keeper.saved(rule)
        word, *_ = await self._link.call("found", self._id, self._meaning, name, labels, dump, int(replace))
        return bool(word == "ok")

    def _name_of(self, rule: Rule) -> str:
        return name_of(rule) + self._suffix

    # -- following ---------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while True:
            for told in await self._link.lessons(self._n):
                if told.n != self._n + 1:
                    raise _Gap
                self._n = told.n
                if told.kind == "rating":
                    await self._follow_rating(told)
                    continue
                if told.meaning != self._meaning:
                    continue
                if told.kind == "found":
                    await self._follow_found(told)
                else:
                    self._follow_event(told)

    async def _follow_found(self, told: Told) -> None:
        name = told.value.decode()
        if told.n <= self._reached.get(name, 0):
            return
        if told.by == self._id:
            self._reached[name] = told.n
        else:
            await self._take_over(name)
        self._announced.discard(name)

    async def _follow_rating(self, told: Told) -> None:
        rating = _ratings.decode(told.value)
        evicted = None if told.by == self._id else self._rate(rating.request_id, rating.team_id, rating.good)
        if evicted is not None:
            await self._link.call("rated", rating.id, evicted)

    def _follow_event(self, told: Told) -> None:
        event = _decoder.decode(told.value)
        name = self._name_of(event.rule)
        if name not in self._reached or told.n <= self._reached[name]:
            return
        self._keeper.apply(event)
        self._reached[name] = told.n
        if isinstance(event, Refit) and (name, event.seen) in self._refits:
            self._refits.discard((name, event.seen))
            self._keep(event.rule, told.n)
        elif told.by == self._id and told.n % _KEEP_EVERY == 0:
            for rule in self._keeper.labels():
                if self._name_of(rule) in self._reached:
                    self._keep(rule, told.n)

    def _keep(self, rule: Rule, n: int) -> None:
        """Let those who join take this over, rather than read on from where the log began."""
        self._items.append(_Item("keep", rule, n=n, dump=self._keeper.saved(rule)))
        self._wake.set()

    # -- telling -----------------------------------------------------------------------------------------------------

    def _push(self, event: Event, *, applied: bool = False) -> None:
        self._count += 1
        self._items.append(_Item("event", event.rule, event, self._count, applied))
        if len(self._items) > MOST_UNSENT:
            self._items.popleft()
        self._wake.set()

    async def _send(self) -> None:
        self._wake.set()
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._items:
                item = self._items[0]
                match item.kind:
                    case "event":
                        name, labels = self._name_of(item.rule), int(isinstance(item.event, Lesson))
                        value = _encoder.encode(item.event)
                        await self._link.call("teach", self._id, item.count, self._meaning, name, labels, value)
                    case "found":
                        await self._found(item.rule)
                    case "keep":
                        await self._link.call("keep", self._name_of(item.rule), item.n, item.dump)
                if self._items and self._items[0] is item:
                    self._items.popleft()

    def _learn_alone(self) -> None:
        """The connection is lost: what nobody has been told yet is learned here at least."""
        self._refits.clear()
        unsent, self._items = self._items, deque()
        for item in unsent:
            if isinstance(item.event, Lesson):
                if not item.applied:
                    self._keeper.apply(item.event)
                self._items.append(msgspec.structs.replace(item, applied=True))
