"""Whose turn it is: the queue of those who wait to start, shared fairly between tenants, urgent ones first.

Each tenant has a counter of the service that it got, in tokens: those computed of its prompts count once, generated
ones twice, and what the prefix cache held not at all. The next to start comes from the tenant with the smallest counter
(virtual token counters, arXiv 2401.00588, algorithms 2 and 4). A tenant that comes back after a while begins no further
back than those who wait, so nobody saves service up.

A step of `priority`, smaller first, is worth `PRIORITY_STEP` of service. Between tenants it is as if the one with the
more urgent request had got so much less; within a tenant, as if the request had come so much of its service earlier. So
urgency is worth a bounded lead and never more: whoever waits ages by what the others get meanwhile, and has its turn.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from engine.scheduling.request import Request

PRIORITY_STEP = 4096
PROMPT_WEIGHT, GENERATED_WEIGHT = 1, 2
# Counters that are kept of tenants who have nothing here.
_MOST_ABSENT = 1024

_Score = tuple[int, int]


def place(request: Request) -> tuple[int, int]:
    """Its place among the requests of its tenant; smaller is earlier."""
    return request.entered + PRIORITY_STEP * request.priority, request.arrival


@dataclass(slots=True)
class _Queue:
    """What waits of one tenant, in order, and how urgent the most urgent of it is."""

    requests: list[Request] = field(default_factory=list)
    priority: int = 0

    def count(self) -> None:
        self.priority = min((request.priority for request in self.requests), default=0)


class Turns:
    """All that wait, and what each tenant got. A request enters when it comes and leaves when it starts or ends."""

    def __init__(self) -> None:
        self._queues: dict[str, _Queue] = {}
        self._served: dict[str, int] = {}
        self._here: Counter[str] = Counter()  # living requests, waiting or running
        self._num_waiting = 0
        self._last = ""  # the tenant that was the last to have nothing waiting any more

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """All that wait, tenant by tenant."""
        for queue in self._queues.values():
            yield from queue.requests

    def waiting_of(self, tenant: str) -> int:
        """How many requests of this tenant wait."""
        queue = self._queues.get(tenant)
        return 0 if queue is None else len(queue.requests)

    def served(self, tenant: str) -> int:
        """What this tenant got, and was lifted to."""
        return self._served.get(tenant, 0)

    # --- who waits -----------------------------------------------------------------------------------------------

    def come(self, request: Request) -> None:
        """A new request waits."""
        tenant = request.tenant
        self._here[tenant] += 1
        if tenant not in self._queues:
            level = min((self._served[other] for other in self._queues), default=self.served(self._last))
            self._served[tenant] = max(self._served.get(tenant, 0), level)
        request.entered = self._served[tenant]
        self.wait(request)

    def wait(self, request: Request) -> None:
        """One that has come before waits, perhaps again: it keeps its age."""
        queue = self._queues.setdefault(request.tenant, _Queue())
        insort(queue.requests, request, key=place)
        queue.count()
        self._num_waiting += 1

    def leave(self, request: Request) -> None:
        """It waits no more."""
        queue = self._queues[request.tenant]
        at = bisect_left(queue.requests, place(request), key=place)  # the first of its place: beams share one
        del queue.requests[queue.requests.index(request, at)]
        queue.count()
        self._num_waiting -= 1
        if not queue.requests:
            del self._queues[request.tenant]
            self._last = request.tenant

    # --- what they get -------------------------------------------------------------------------------------------

    def serve(self, request: Request, *, prompt: int = 0, generated: int = 0) -> None:
        """A tenant gets so many tokens."""
        self._served[request.tenant] += PROMPT_WEIGHT * prompt + GENERATED_WEIGHT * generated

    def fork(self, request: Request) -> None:
        """One more of a tenant that is here; it does not wait."""
        self._here[request.tenant] += 1

    def end(self, request: Request) -> None:
        """A request has gone. Of tenants without any, the counters that matter least are forgotten."""
        self._here[request.tenant] -= 1
        if self._here[request.tenant]:
            return
        del self._here[request.tenant]
        if len(self._served) - len(self._here) > _MOST_ABSENT:
            absent = (tenant for tenant in self._served if tenant not in self._here and tenant != self._last)
            del self._served[min(absent, key=self._served.__getitem__)]

    # --- whose turn ----------------------------------------------------------------------------------------------

    def first(self, passes: Callable[[Request], bool]) -> Request | None:
        """Whose turn it is now, those aside who let it pass."""
        heads: list[tuple[_Score, Request]] = []
        for tenant, queue in self._queues.items():
            head = next((request for request in queue.requests if not passes(request)), None)
            if head is not None:
                heads.append((self._score(tenant, queue.priority, head), head))
        return min(heads, key=lambda head: head[0])[1] if heads else None

    def order(self, others: Iterable[Request]) -> Iterator[Request]:
        """All that wait, and `others`, by turns. What a tenant gets meanwhile (`serve`) counts at its next turn."""
        lines: dict[str, list[Request]] = {tenant: list(queue.requests) for tenant, queue in self._queues.items()}
        for request in others:
            insort(lines.setdefault(request.tenant, []), request, key=place)
        if len(lines) == 1:
            yield from next(iter(lines.values()))
            return
        # Of each tenant's line backwards: how urgent the most urgent is of those from here to the end.
        urgent = {t: list(accumulate((r.priority for r in reversed(line)), min)) for t, line in lines.items()}
        turns = [(self._score(tenant, urgent[tenant].pop(), line[0]), tenant, 0) for tenant, line in lines.items()]
        heapq.heapify(turns)
        while turns:
            _, tenant, at = heapq.heappop(turns)
            line = lines[tenant]
            yield line[at]
            if (at := at + 1) < len(line):
                heapq.heappush(turns, (self._score(tenant, urgent[tenant].pop(), line[at]), tenant, at))

    def _score(self, tenant: str, priority: int, head: Request) -> _Score:
        """Smaller is earlier; of equals, who came first."""
        return self._served[tenant] + PRIORITY_STEP * priority, head.arrival
