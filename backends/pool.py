"""The replicas of one backend: who gets the next request, who waits, who is out of rotation and when it may come back.

It promises a replica chosen by load and latency (`balance.py`), never more than `max_outstanding` requests on one; a
bounded, fair queue for those who find all of them busy (`waiting.py`); that a Retry-After is kept to; and that a
backend whose replicas are all out is still tried, one request at a time, rather than given up. Health is passive (a
breaker per replica, `breaker.py`) and active: an open breaker's replica is probed in the background.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Collection, Mapping, Sequence

from backends.attempt import AttemptFailed
from backends.balance import choose
from backends.dialect import Dialect
from backends.endpoint import Endpoint
from backends.hedge import Hedging
from backends.http import HttpClient
from backends.openai import OPENAI
from backends.placement.asked import Placement
from backends.placement.feed import Feeds
from backends.placement.index import PrefixIndex
from backends.placement.place import Place, Preferences
from backends.placement.placer import FLOOR_TOKENS, Placer
from backends.prefilling import Prefilling
from backends.probe import alive
from backends.replica import Replica, ReplicaState
from backends.share import Share
from backends.waiting import Displaced, FairQueue

RETRY_RESERVE = 10.0  # retries that a quiet backend may have at once
RETRIES_PER_S = 1.0
PROBE_EVERY_S = 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of one attempt, in seconds.

    A plain answer has `connect_s` and `total_s` only, because servers send nothing of it before it is whole.
    """

    connect_s: float = 2.0
    first_token_s: float = 60.0
    between_tokens_s: float = 30.0
    total_s: float = 600.0


class Pool:
    """A backend: its replicas, its deadlines, how often to try and how many may wait.

    Args:
        name: for messages and metrics.
        base_urls: one per replica, such as `http://10.0.0.1:8000/v1`; at least one.
        api_key: sent as the dialect says; nothing is sent without one.
        headers: more headers for every request; they win over those of the dialect.
        dialect: how such a server is spoken to.
        max_outstanding: requests at once per replica.
        max_queued: requests that may wait for a replica; 0 refuses at once.
        queue_timeout_s: how long one of them may wait.
        attempts: tries per candidate and request.
        retry_share: retries are at most this share of requests; 0 forbids them.
        hedging: when to send a second request beside a slow one; None: never.
        client: the HTTP client, shared by all pools.
        places: what is said of each replica, in the order of `base_urls`; none: all are alike.
        preferences: which replicas come first for which requests.
        prefixes: who holds what; None: it does not count.
        listens: its replicas tell what they hold.
        prefilling: further replicas, which compute long prompts for these; None: there are none.

    Raises:
        ValueError: no base URL, one that is not a URL, or a header that must not be set.
    """

    def __init__(
        self,
        name: str,
        base_urls: Sequence[str],
        *,
        client: HttpClient,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeouts: Timeouts | None = None,
        max_outstanding: int = 256,
        max_queued: int = 256,
        queue_timeout_s: float = 10.0,
        attempts: int = 2,
        retry_share: float = 0.2,
        hedging: Hedging | None = None,
        dialect: Dialect = OPENAI,
        places: Sequence[Place] = (),
        preferences: Preferences | None = None,
        prefixes: PrefixIndex | None = None,
        listens: bool = False,
        prefilling: Prefilling | None = None,
    ) -> None:
        if not base_urls:
            raise ValueError(f"the backend {name!r} has no base URL")
        if max_outstanding < 1 or attempts < 1:
            raise ValueError(f"the backend {name!r}: max_outstanding and attempts must be at least 1")
        self.name = name
        self.client = client
        self.timeouts = timeouts or Timeouts()
        self.max_outstanding = max_outstanding
        self.queue_timeout_s = queue_timeout_s
        self.attempts = attempts
        self.retries = Share(retry_share, reserve=RETRY_RESERVE, per_second=RETRIES_PER_S)
        self.hedging = hedging
        self.dialect = dialect
        self.continued = 0  # answers that another had begun
        self.gives_reasons = False  # its servers have been seen to say why an answer ends
        self.repeats_reasons = False  # or to say it with every piece
        every = {**dialect.headers(api_key), **{name.lower(): value for name, value in (headers or {}).items()}}
        endpoints = [Endpoint(url.rstrip("/"), every) for url in base_urls]
        self.replicas = [
            Replica(endpoint, places[number]) if places else Replica(endpoint)
            for number, endpoint in enumerate(endpoints)
        ]
        self.prefilling = prefilling
        # Where there is one replica only, there is nothing to choose, and no request says what it is to be chosen by.
        several = len(self.replicas) > 1 or prefilling is not None
        self.placer = Placer(self.replicas, max_outstanding, preferences, prefixes) if several else None
        self.feeds = Feeds(self.replicas, prefixes, client) if several and prefixes is not None and listens else None
        self._queue: FairQueue[Replica] = FairQueue(max_queued)
        self._asked: dict[asyncio.Future[Replica], Placement] = {}  # of those who wait, where it makes a difference
        self._wake: asyncio.TimerHandle | None = None  # at the end of a rest, while somebody waits for it
        self._probes: dict[Replica, asyncio.Task[None]] = {}

    @property
    def queued(self) -> int:
        """Requests that wait for a replica."""
        return self._queue.size

    def rank(self) -> int:
        """How good a place this is for a request now: 0 goes at once, 1 would wait, 2 has no replica in rotation."""
        if not self._queue.size:
            for replica in self.replicas:
                if replica.breaker.well and replica.outstanding < self.max_outstanding and not replica.closed:
                    return 0
        now = time.monotonic()
        if not self._queue.size and self._ready(now):
            return 0
        return 1 if any(r.breaker.state(now) == "healthy" and not r.closed for r in self.replicas) else 2

    def fresh(self, tried: Collection[Replica]) -> bool:
        """Whether a request could go at once to a replica that is not among `tried`."""
        return not self._queue.size and any(replica not in tried for replica in self._ready(time.monotonic()))

    def rest_s(self) -> float | None:
        """Seconds until the first Retry-After is over, if it keeps all replicas that are not out of rotation anyway."""
        now = time.monotonic()
        if any(r.breaker.state(now) in ("healthy", "trial") and not r.closed for r in self.replicas):
            return None
        return self._first_rest_s(now)

    def acquire(self, tried: Collection[Replica] = (), placement: Placement | None = None) -> Replica | None:
        """Take a replica, one not yet `tried` if possible; None if all are busy or others are waiting already.

        Whoever takes one gives it back by `release`, with the same `placement`.
        """
        if self._queue.size:
            return None
        replica = self.replicas[0]
        if (
            self.placer is None
            and replica.breaker.well
            and replica.outstanding < self.max_outstanding
            and not replica.closed
        ):
            replica.outstanding += 1
            replica.requests_total += 1
            return replica
        return self._take(tried, placement)

    async def wait(self, owner: str, patience_s: float, placement: Placement | None = None) -> Replica:
        """Queue for a replica that is free; to be given back by `release`.

        Raises:
            AttemptFailed: "overloaded", the queue is full or `patience_s` was not enough; "rate_limited" or "resting",
                every replica in rotation has asked for a pause that is longer than that.
        """
        rest_s = self.rest_s()
        if rest_s is not None and rest_s > patience_s:
            limited = any(replica.breaker.rate_limited for replica in self.replicas)
            message = f"'{self.name}' asked to be left alone"
            if all(replica.closed for replica in self.replicas):
                message = f"every replica of '{self.name}' is outside its hours"
            raise AttemptFailed("rate_limited" if limited else "resting", message, retry_after=rest_s)
        busy = f"every replica of '{self.name}' is busy"
        place = self._queue.join(owner) if patience_s > 0 else None
        if place is None:
            more = f" and {self.queued} requests wait" if self.queued else ""
            raise AttemptFailed("overloaded", busy + more, retry_after=1.0)
        if placement is not None:
            self._asked[place] = placement
        self._serve()
        try:
            async with asyncio.timeout(patience_s):
                return await place
        except TimeoutError:
            self._left(owner, place)
            message = f"{busy}; none came free in {patience_s:.3g} s"
            raise AttemptFailed("overloaded", message, retry_after=1.0) from None
        except Displaced:
            message = f"{busy}, and the queue went to others than '{owner}', who has most requests in it"
            raise AttemptFailed("overloaded", message, retry_after=1.0) from None
        except BaseException:
            self._left(owner, place)
            raise
        finally:
            self._asked.pop(place, None)

    def release(self, replica: Replica, placement: Placement | None = None) -> None:
        """The request on this replica is over. Say how it ended by `succeeded` or `failed` first, if that is known."""
        replica.outstanding -= 1
        if placement is not None:
            placement.end(replica)
        if self._queue.size:
            self._serve()

    def observe(self, replica: Replica, first_content_s: float, placement: Placement | None = None) -> None:
        """A stream's first content came after so long."""
        now = time.monotonic()
        replica.latency.observe(first_content_s, now)
        if placement is not None and self.placer is not None:
            self.placer.began(replica, placement, first_content_s, now)
        if self.hedging is not None:
            self.hedging.observe(first_content_s)

    def succeeded(self, replica: Replica) -> None:
        """It answered as it should, or refused for a good reason: nothing is wrong with it."""
        replica.breaker.succeeded()

    def failed(self, replica: Replica, failure: AttemptFailed, elapsed_s: float = 0.0) -> None:
        """Count a failure; open the breaker if there have been enough in a row, or honour its Retry-After.

        `elapsed_s` is how long the attempt ran. It counts twice as a latency, so that a replica which fails fast does
        not look like the best one.
        """
        now = time.monotonic()
        replica.last_error = str(failure)
        if failure.kind == "deadline":
            return  # the caller's time was short; says nothing about the replica
        replica.failures_total += 1
        if failure.kind != "rate_limited":
            slow_s = 2 * max(elapsed_s, replica.latency.value(now))
            replica.latency.observe(min(slow_s, self.timeouts.first_token_s), now)
            if self.placer is not None:
                replica.pace.observe(2 * max(elapsed_s / FLOOR_TOKENS, replica.pace.value(now)), now)
        if replica.breaker.failed(failure, now):
            replica.latency.forget()
            replica.pace.forget()
            if self.placer is not None and not failure.reached:
                self.placer.forget(replica)
            if replica not in self._probes:
                self._probes[replica] = asyncio.get_running_loop().create_task(self._watch(replica))

    async def check(self) -> int:
        """Ask every replica now whether it is up; returns how many are."""
        return sum(await asyncio.gather(*(self._alive(replica) for replica in self.replicas)))

    def snapshot(self) -> list[ReplicaState]:
        """The state of every replica."""
        now = time.monotonic()
        return [replica.seen(now) for replica in self.replicas]

    def everybody(self) -> list[ReplicaState]:
        """The state of every replica, and of those that compute prompts for them."""
        return self.snapshot() + ([] if self.prefilling is None else self.prefilling.pool.snapshot())

    def back_in_s(self) -> float | None:
        """Seconds until a replica that is out of rotation comes back, if all of them are."""
        states = self.snapshot()
        return None if any(s.state == "healthy" for s in states) else min(s.back_in_s for s in states)

    async def aclose(self) -> None:
        """Stop probing and close idle connections; running requests go on."""
        if self._wake is not None:
            self._wake.cancel()
        if self.feeds is not None:
            await self.feeds.aclose()
        if self.prefilling is not None:
            await self.prefilling.pool.aclose()
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for replica in self.replicas:
            self.client.release(replica.endpoint.origin)

    def _ready(self, now: float) -> list[Replica]:
        """Replicas that may take a request: healthy with room, or half-open with nothing on them."""
        ready = []
        for replica in self.replicas:
            state = "cooling" if replica.closed else replica.breaker.state(now)
            most = self.max_outstanding if state == "healthy" else 1 if state == "trial" else 0
            if replica.outstanding < most:
                ready.append(replica)
        return ready

    def _take(self, tried: Collection[Replica], placement: Placement | None = None) -> Replica | None:
        now = time.monotonic()
        ready = self._ready(now)
        if tried and len(ready) > 1:
            ready = [replica for replica in ready if replica not in tried] or ready
        placer = self.placer if placement is not None else None
        if not ready:
            replica = self._last_resort(now)
        elif placer is not None and placement is not None:
            replica = placer.choose(ready, placement, now)
        else:
            replica = choose(ready, now)
        if replica is not None:
            if placer is not None and placement is not None:
                placer.begin(replica, placement, now)
            replica.outstanding += 1
            replica.requests_total += 1
        return replica

    def _last_resort(self, now: float) -> Replica | None:
        """Nothing is ready. If nothing is in rotation either, a cooling replica may prove itself before its time."""
        states = [(replica.breaker.state(now), replica) for replica in self.replicas if not replica.closed]
        if any(state != "cooling" for state, _ in states):
            return None  # it will be free, or rested, soon
        idle = [replica for _, replica in states if not replica.outstanding]
        return min(idle, key=lambda replica: replica.breaker.cooled_until) if idle else None

    def _first_rest_s(self, now: float) -> float | None:
        """Seconds until the first replica that rests is back; None if none rests."""
        rests = [r.breaker.limited_until - now for r in self.replicas if r.breaker.state(now) == "limited"]
        rests += [replica.opens_in_s() for replica in self.replicas if replica.closed]
        return min(rests, default=None)

    def _serve(self) -> None:
        """Hand free replicas to those who wait; look again when the next rest is over, for which there is no event."""
        while self._serve_one():
            pass
        if self._queue.size and self._wake is None:
            rest_s = self._first_rest_s(time.monotonic())
            if rest_s is not None:
                self._wake = asyncio.get_running_loop().call_later(rest_s + 0.001, self._rested)

    def _serve_one(self) -> bool:
        for owner, place in self._queue.heads():
            replica = self._take((), self._asked.get(place))
            if replica is not None:
                self._queue.grant(owner)
                place.set_result(replica)
                return True
            if self.placer is None or not self.placer.order.limited:
                return False  # nothing is free for this one, nor for anybody
        return False

    def _rested(self) -> None:
        self._wake = None
        self._serve()

    def _left(self, owner: str, place: asyncio.Future[Replica]) -> None:
        """Somebody stopped waiting; a replica that was handed over at the same moment goes on to the next."""
        self._queue.leave(owner, place)
        if place.done() and not place.cancelled() and place.exception() is None:
            self.release(place.result(), self._asked.get(place))

    async def _watch(self, replica: Replica) -> None:
        """Probe a cooling replica: bring it back early if it is up and was not, keep it out while it is down."""
        breaker = replica.breaker
        try:
            while (now := time.monotonic()) < breaker.cooled_until:
                await asyncio.sleep(min(PROBE_EVERY_S, breaker.cooled_until - now))
                up = await self._alive(replica)
                breaker.probed(up, time.monotonic() + 2 * PROBE_EVERY_S)
                self._serve()
        finally:
            del self._probes[replica]

    async def _alive(self, replica: Replica) -> bool:
        error = await alive(self.client, replica.endpoint)
        replica.last_error = error or replica.last_error
        return error is None
