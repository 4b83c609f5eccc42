"""The replicas of one backend: who gets the next request, who is out of rotation and when it may come back.

It promises the healthy replica with the fewest outstanding requests (ties at random), never more than
`max_outstanding` on one, and that a backend whose replicas are all out is still tried rather than failed at once.
Health is passive (failures cool a replica down, each time longer) and active: a replica that cannot be reached is
probed in the background and returns when it answers. After a cool-down one request goes first.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from backends.attempt import AttemptFailed
from backends.dialect import Dialect
from backends.endpoint import Endpoint
from backends.http import HttpClient, HttpFailure
from backends.openai import OPENAI

FAILURES_TO_COOL = 3  # in a row; a refused connection counts as that many
COOL_FIRST_S = 1.0
COOL_MAX_S = 30.0
LIMITED_MAX_S = 60.0  # longest time a replica is avoided because of one Retry-After
PROBE_EVERY_S = 1.0
PROBE_TIMEOUT_S = 2.0

State = Literal["healthy", "trial", "cooling", "limited"]


@dataclasses.dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines of one attempt, in seconds.

    A plain answer has `connect_s` and `total_s` only, because servers send nothing of it before it is whole.
    """

    connect_s: float = 2.0
    first_token_s: float = 60.0
    between_tokens_s: float = 30.0
    total_s: float = 600.0


@dataclasses.dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica as health pages and metrics show it. `back_in_s` is 0 unless it is cooling or limited."""

    base_url: str
    state: State
    outstanding: int
    failures: int  # in a row
    requests_total: int
    failures_total: int
    back_in_s: float
    last_error: str | None


class Replica:
    """One address of a backend. Changed by its pool only."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.base_url = endpoint.base_url
        self.outstanding = 0
        self.failures = 0
        self.requests_total = 0
        self.failures_total = 0
        self.cool_downs = 0  # since the last success
        self.cooled_until = 0.0  # monotonic seconds
        self.limited_until = 0.0
        self.trial = False  # back from a cool-down, not yet proven
        self.reached = True  # its last failure was an answer, not silence
        self.last_error: str | None = None

    def state(self, now: float) -> State:
        if now < self.cooled_until:
            return "cooling"
        if now < self.limited_until:
            return "limited"
        return "trial" if self.trial else "healthy"

    def available(self, now: float) -> bool:
        state = self.state(now)
        return state == "healthy" or (state == "trial" and self.outstanding == 0)


class Pool:
    """A backend: its replicas, its deadlines and how often to try.

    Args:
        name: for messages and metrics.
        base_urls: one per replica, such as `http://10.0.0.1:8000/v1`; at least one.
        api_key: sent as the dialect says; nothing is sent without one.
        headers: more headers for every request; they win over those of the dialect.
        dialect: how such a server is spoken to.
        max_outstanding: requests at once per replica.
        attempts: tries per candidate and request.
        client: the HTTP client, shared by all pools.

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
        attempts: int = 2,
        dialect: Dialect = OPENAI,
    ) -> None:
        if not base_urls:
            raise ValueError(f"the backend {name!r} has no base URL")
        if max_outstanding < 1 or attempts < 1:
            raise ValueError(f"the backend {name!r}: max_outstanding and attempts must be at least 1")
        self.name = name
        self.client = client
        self.timeouts = timeouts or Timeouts()
        self.max_outstanding = max_outstanding
        self.attempts = attempts
        self.dialect = dialect
        every = {**dialect.headers(api_key), **{name.lower(): value for name, value in (headers or {}).items()}}
        self.replicas = [Replica(Endpoint(url.rstrip("/"), every)) for url in base_urls]
        self._probes: dict[Replica, asyncio.Task[None]] = {}

    def available(self) -> bool:
        """Whether some replica is neither out of rotation nor full."""
        now = time.monotonic()
        return any(r.available(now) and r.outstanding < self.max_outstanding for r in self.replicas)

    def best(self, tried: Collection[Replica] = ()) -> Replica | None:
        """The replica that a request should go to, one not yet `tried` if possible; None if all are full.

        If none is in rotation it is the one whose cool-down or Retry-After ends first.
        """
        now = time.monotonic()
        best: list[Replica] = []
        best_rank: tuple[int, float, int] | None = None
        for replica in self.replicas:
            if replica.outstanding >= self.max_outstanding:
                continue
            if replica.available(now):
                rank = (1 if replica in tried else 0, 0.0, replica.outstanding)
            else:
                rank = (2, max(replica.cooled_until, replica.limited_until, now), replica.outstanding)
            if best_rank is None or rank < best_rank:
                best, best_rank = [replica], rank
            elif rank == best_rank:
                best.append(replica)
        if len(best) > 1:
            return random.choice(best)
        return best[0] if best else None

    def acquire(self, tried: Collection[Replica] = ()) -> Replica | None:
        """Take the best replica; None if all are full. Whoever takes it gives it back by `release`."""
        replica = self.best(tried)
        if replica is not None:
            replica.outstanding += 1
            replica.requests_total += 1
        return replica

    def release(self, replica: Replica) -> None:
        """The request on this replica is over, however it ended."""
        replica.outstanding -= 1

    def succeeded(self, replica: Replica) -> None:
        """It answered as it should, or refused for a good reason: nothing is wrong with it."""
        replica.failures = replica.cool_downs = 0
        replica.cooled_until = 0.0
        replica.trial = False
        replica.reached = True

    def failed(self, replica: Replica, failure: AttemptFailed) -> None:
        """Count a failure; cool the replica down if there have been enough in a row, or honour its Retry-After."""
        now = time.monotonic()
        replica.last_error = str(failure)
        if failure.kind == "deadline":
            return  # the caller's time was short; says nothing about the replica
        replica.failures_total += 1
        if failure.kind == "rate_limited" or failure.retry_after is not None:
            pause = min(failure.retry_after or COOL_FIRST_S, LIMITED_MAX_S)
            replica.limited_until = max(replica.limited_until, now + pause)
        if failure.kind == "rate_limited":
            return  # a healthy server that protects itself
        if now < replica.cooled_until:
            return  # one of those that were on their way when it went down: already counted
        replica.failures += FAILURES_TO_COOL if failure.kind == "connect" else 1
        replica.reached = failure.reached
        if replica.failures >= FAILURES_TO_COOL:
            pause = min(COOL_FIRST_S * 2**replica.cool_downs, COOL_MAX_S) * random.uniform(0.8, 1.2)
            replica.cooled_until = max(replica.cooled_until, now + pause)
            replica.cool_downs += 1
            replica.trial = True
            if replica not in self._probes:
                self._probes[replica] = asyncio.get_running_loop().create_task(self._watch(replica))

    async def check(self) -> int:
        """Ask every replica now whether it is up; returns how many are."""
        return sum(await asyncio.gather(*(self._alive(replica) for replica in self.replicas)))

    def snapshot(self) -> list[ReplicaState]:
        """The state of every replica."""
        now = time.monotonic()
        return [
            ReplicaState(
                base_url=replica.base_url,
                state=replica.state(now),
                outstanding=replica.outstanding,
                failures=replica.failures,
                requests_total=replica.requests_total,
                failures_total=replica.failures_total,
                back_in_s=max(0.0, max(replica.cooled_until, replica.limited_until) - now),
                last_error=replica.last_error,
            )
            for replica in self.replicas
        ]

    async def aclose(self) -> None:
        """Stop probing and close idle connections; running requests go on."""
        probes = list(self._probes.values())
        for probe in probes:
            probe.cancel()
        await asyncio.gather(*probes, return_exceptions=True)
        for replica in self.replicas:
            self.client.release(replica.endpoint.origin)

    async def _watch(self, replica: Replica) -> None:
        """Probe a cooling replica: bring it back early if it is up and was not, keep it out while it is down.

        A replica that answers probes but failed requests stays out for its whole cool-down: what was wrong with it
        does not show in a probe.
        """
        try:
            while (now := time.monotonic()) < replica.cooled_until:
                await asyncio.sleep(min(PROBE_EVERY_S, replica.cooled_until - now))
                if not await self._alive(replica):
                    replica.cooled_until = max(replica.cooled_until, time.monotonic() + 2 * PROBE_EVERY_S)
                elif not replica.reached:
                    replica.cooled_until = 0.0
        finally:
            del self._probes[replica]

    async def _alive(self, replica: Replica) -> bool:
        """GET /health; where there is no such page, GET /models, where any answer that is not 5xx will do."""
        endpoint = replica.endpoint
        root = endpoint.origin.path.removesuffix("/v1")
        try:
            status = await self._get(endpoint, f"{root}/health")
            if status in (401, 403, 404, 405):
                status = await self._get(endpoint, f"{endpoint.origin.path}/models")
                return status < 500
            return status < 300
        except HttpFailure as failure:
            replica.last_error = str(failure)
            return False

    async def _get(self, endpoint: Endpoint, path: str) -> int:
        deadline = time.monotonic() + PROBE_TIMEOUT_S
        exchange = await self.client.send(
            endpoint.origin, endpoint.get(path), connect_s=PROBE_TIMEOUT_S, deadline=deadline
        )
        try:
            await exchange.read_all(1 << 20)
        finally:
            exchange.close()
        return exchange.status
