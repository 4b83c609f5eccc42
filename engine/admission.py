"""Where requests stand before the scheduler has them, and what they wait for there.

    Add ─► grammar compiled? ─► pages that are kept elsewhere here? ─► scheduler
            (Anteroom)           (Tiers)

Requests that came together stay together. A refusal concerns all of them. Who was preempted is in the scheduler
already; when there is room for it again, its pages are looked for once more.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain

from engine.grammar.anteroom import Anteroom
from engine.grammar.compiling import Grammars
from engine.limits import NeverFits, QueueFull
from engine.messages import NewRequest, Output, Rejected
from engine.scheduling.scheduler import Scheduler
from engine.transfer.tiers import Tiers
from engine.types import FinishReason, TokenMasks

_RETRY_AFTER_SECONDS = (1.0, 60.0)  # least and most
_FINISHES_REMEMBERED = 64


class Admission:
    """The rooms before `scheduler`. `tiers`: where pages are kept beyond its cache, or None."""

    def __init__(self, scheduler: Scheduler, grammars: Grammars, tiers: Tiers | None) -> None:
        self.anteroom = Anteroom(grammars, scheduler.config.max_waiting)
        self._scheduler = scheduler
        self._tiers = tiers
        self._finish_times: deque[float] = deque(maxlen=_FINISHES_REMEMBERED)

    def __len__(self) -> int:
        """Requests that wait for a grammar."""
        return len(self.anteroom)

    def adapters(self) -> Iterator[int]:
        """The adapters of those that wait here, and of those that the scheduler has."""
        rooms = chain(self.anteroom.requests(), () if self._tiers is None else self._tiers.requests())
        yield from (request.adapter for request in self._scheduler.requests())
        yield from (request.adapter for request in rooms)

    def enter(self, requests: list[NewRequest]) -> Iterable[Rejected]:
        """Take requests in, or refuse them all."""
        if any(request.grammar is not None for request in requests):
            return self._refusal(requests, partial(self.anteroom.enter, requests))
        return self._go_on(requests, {})

    def leave(self, request_ids: Iterable[int], *, stopped: bool) -> None:
        """Forget requests, wherever they are. Unknown ones are none of ours."""
        ids = list(request_ids)
        self.anteroom.leave(ids)
        if self._tiers is not None:
            self._tiers.leave(ids)
        self._scheduler.abort(ids, stopped=stopped)

    def give_back(self, party: list[int]) -> bool:
        """Forget requests that came together, if nothing was computed for any of them."""
        waiting = {request.request_id for request in self.anteroom.requests()}
        if waiting.issuperset(party):
            self.anteroom.leave(party)
            return True
        return self._scheduler.give_back(party)

    def advance(self) -> Iterator[Rejected | list[Output]]:
        """Let on whose grammar or pages have come. Yields refusals, and the outputs of those whose grammar failed."""
        for compiled in self.anteroom.ready():
            failed = [
                Output(i, [], finish_reason=FinishReason.ERROR, error=text) for i, text in compiled.faults.items()
            ]
            if failed:
                yield failed
            going_on = [r for r in compiled.requests if r.request_id not in compiled.faults]
            if going_on:
                yield from self._go_on(going_on, compiled.grammars)
        if self._tiers is None:
            return
        for loaded in self._tiers.ready():
            yield from self._refusal(loaded.requests, partial(self._scheduler.add, loaded.requests, loaded.grammars))
        self._tiers.look_again(self._scheduler.returning())

    def finished(self, at: float, count: int) -> None:
        """So many requests ended at this time: what the next refusal's advice to come again is made of."""
        self._finish_times.extend(at for _ in range(count))

    def _go_on(self, requests: list[NewRequest], grammars: Mapping[int, TokenMasks]) -> Iterable[Rejected]:
        return self._refusal(requests, partial(self._fetch_or_add, requests, grammars))

    def _fetch_or_add(self, requests: list[NewRequest], grammars: Mapping[int, TokenMasks]) -> None:
        if self._tiers is not None:
            self._scheduler.check_fit(requests)
            if self._tiers.enter(requests, [self._scheduler.request_of(r) for r in requests], grammars):
                return
        self._scheduler.add(requests, grammars)

    def _refusal(self, requests: list[NewRequest], step: Callable[[], None]) -> list[Rejected]:
        try:
            step()
        except NeverFits as error:
            return [Rejected([r.request_id for r in requests], str(error))]
        except QueueFull as error:
            return [Rejected([r.request_id for r in requests], str(error), self._retry_after_seconds())]
        return []

    def _retry_after_seconds(self) -> float:
        """When a queue of this length will have moved on, by the rate at which requests finished lately."""
        least, most = _RETRY_AFTER_SECONDS
        if len(self._finish_times) < 2:
            return least
        elapsed = time.monotonic() - self._finish_times[0]
        return min(most, max(least, math.ceil(self._scheduler.num_waiting * elapsed / len(self._finish_times))))
