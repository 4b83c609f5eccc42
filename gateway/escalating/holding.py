"""A stream that is held back until its answer has been checked, and then goes to the client as if it came only now.

Events are kept as they came, so that what the client gets is, byte by byte, what it would have got, only later. It
promises a bound: what outgrows it goes on unchecked. Whoever waits long gets signs of life meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from backends.attempt import Event, StreamCut
from backends.dispatch import Dispatched
from backends.protocol import PROMPT_TOKENS_HEADER, whole_number
from backends.stream import Take
from gateway.accounting import Accounting
from gateway.escalating.answers import event_without_logprobs
from gateway.http import SSE_HEADERS
from gateway.life import Life
from gateway.metering import Meter

MOST_BYTES: Final = 4 << 20
PATIENCE_S: Final = 10.0  # without a byte; proxies and clients give up after half a minute and more
# What is not known before the answer has been checked.
_OF_ANSWER: Final = frozenset(
    {
        b"x-tierline-tier",
        b"x-tierline-model",
        b"x-tierline-backend",
        b"x-tierline-requested-tier",
        b"x-tierline-fallback",
    }
)


class Held(Dispatched):
    """The events of a stream: those that were kept, and where they were too many, the rest as it comes.

    `complete`: all of them were kept. `meter` has counted them; the client's is counted anew as it gets them. `strips`:
    the rest has log-probabilities that the client did not ask for.
    """

    def __init__(self, answer: Dispatched, meter: Meter) -> None:
        super().__init__(answer.attempt, answer.status, answer.headers, stream=answer.stream)
        self.rescued = answer.rescued
        self.complete = False
        self.strips = False
        self.meter = meter
        self.kept: list[Event] = []
        self._answer = answer
        self._given = 0

    @property
    def events(self) -> AsyncIterator[Event]:
        return self

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        if self._given < len(self.kept):
            event = self.kept[self._given]
            self._given += 1
            return event
        if self.complete:
            raise StopAsyncIteration
        try:
            event = await anext(self._answer.events)
            return event_without_logprobs(event) if self.strips else event
        finally:
            self.attempt, self.rescued = self._answer.attempt, self._answer.rescued

    def pass_on(self, take: Take | None) -> None:
        """Nothing overtakes what was kept."""

    def left(self, life: Life) -> None:
        """The client left while it was given: the whole answer is charged, since a server has written it."""
        life.meter, life.abandoned = self.meter, True

    async def aclose(self) -> None:
        await self._answer.aclose()


async def hold(life: Life, accounting: Accounting, answer: Dispatched) -> Held:
    """Keep a stream's events until it ends, or there are too many; counted, and held money for, as they come.

    Raises:
        StreamCut: it broke. GatewayError: a budget was spent.
    """
    meter = life.meter = Meter()
    told = whole_number(answer.headers.get(PROMPT_TOKENS_HEADER, ""), 9)
    if told is not None:  # a stream that ends before its usage comes is billed by it
        life.input_estimate = told
    held, size = Held(answer, meter), 0
    try:
        async for event in answer.events:
            held.kept.append(event)
            size += len(event.raw)
            if (chunk := event.chunk) is not None:
                meter.see(chunk, event.usage)
            if accounting.progress_due():
                await accounting.progress()
            if size > MOST_BYTES:
                return held
    except StreamCut:
        life.attempt = answer.attempt
        raise
    held.complete = True
    held.attempt, held.rescued = answer.attempt, answer.rescued
    return held


@asynccontextmanager
async def signs_of_life(life: Life) -> AsyncIterator[None]:
    """Begin the response to a stream that is held back for long, so that the server keeps its connection alive."""
    if not life.stream:
        yield
        return
    waiting = asyncio.create_task(_begin(life))
    try:
        yield
    finally:
        if not life.exchange.started:
            waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)


async def _begin(life: Life) -> None:
    await asyncio.sleep(PATIENCE_S)
    life.status = 200
    known = [header for header in life.headers() if header[0] not in _OF_ANSWER]
    await life.exchange.start(200, [*SSE_HEADERS, *known], life.dialect.keep_alive)
