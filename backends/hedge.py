"""Hedged requests: when an answer has not begun after the time that nearly all take, ask once more and keep the first.

It promises that at most `max_share` of requests are hedged; that the loser is cancelled, and its end on record, before
the winner is returned; and that nothing is hedged before there are figures to tell what is slow. For streams only: how
long a plain answer is silent says how long it is, not that its server is stuck. Dean and Barroso, "The Tail at Scale",
2013.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from backends.attempt import AttemptFailed
from backends.share import Share

WINDOW = 256  # first-content times that are remembered
ENOUGH = 30  # of them before anything is hedged
FRESH = 16  # new ones after which the delay is computed again
LOST = "another attempt answered first"  # why the loser was cancelled

T = TypeVar("T")


class Hedging:
    """When to hedge on one backend.

    Args:
        quantile: of its recent first-content times, after which the second request goes out.
        max_share: most hedges per request; what they may cost.
        min_delay_s: never hedge sooner than this.
    """

    def __init__(self, quantile: float = 0.95, max_share: float = 0.05, min_delay_s: float = 0.05) -> None:
        self.quantile = quantile
        self.min_delay_s = min_delay_s
        self.share = Share(max_share, reserve=max(1.0, 20 * max_share), full=False)
        self._times: deque[float] = deque(maxlen=WINDOW)
        self._fresh = 0
        self._delay_s: float | None = None

    def observe(self, first_content_s: float) -> None:
        self._times.append(first_content_s)
        self._fresh += 1

    def delay_s(self) -> float | None:
        """How long to wait before a second request; None while too little is known."""
        if len(self._times) < ENOUGH:
            return None
        if self._delay_s is None or self._fresh >= FRESH:
            self._fresh = 0
            rank = math.ceil(self.quantile * len(self._times)) - 1
            self._delay_s = max(self.min_delay_s, sorted(self._times)[max(0, rank)])
        return self._delay_s


async def race(
    first: Coroutine[Any, Any, T],
    delay_s: float,
    second: Callable[[], Coroutine[Any, Any, T]],
    discard: Callable[[T], Awaitable[None]],
) -> T:
    """The result of `first`, or of `second`, which is made after `delay_s`, if that comes before it.

    One that fails leaves the field to the other; any other exception than AttemptFailed ends both, and so does being
    cancelled. A loser that has a result after all is given to `discard`.

    Raises:
        AttemptFailed: all failed; that of the last one.
    """
    tasks = [asyncio.create_task(first)]
    winner: asyncio.Task[T] | None = None
    try:
        await asyncio.wait(tasks, timeout=delay_s)
        if not tasks[0].done():
            tasks.append(asyncio.create_task(second()))
        winner = await _first_good(tasks)
        await _stop([task for task in tasks if task is not winner], discard, LOST)
    except BaseException:
        await _stop(tasks, discard, None)
        raise
    return winner.result()


async def _first_good(tasks: list[asyncio.Task[T]]) -> asyncio.Task[T]:
    running = set(tasks)
    failure: AttemptFailed | None = None
    while running:
        done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        for task in sorted(done, key=tasks.index):
            try:
                task.result()
            except AttemptFailed as failed:
                failure = failed
            else:
                return task
    assert failure is not None
    raise failure


async def _stop(tasks: list[asyncio.Task[T]], discard: Callable[[T], Awaitable[None]], why: str | None) -> None:
    """End tasks and wait until they have ended."""
    for task in tasks:
        task.cancel(why)
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled() and task.exception() is None:
            await discard(task.result())
