"""A stream whose client leaves in the middle of it: what becomes of the rest, as the policy's `on_abort` says.

    cancel   the backend is cancelled at once; charged is what had been passed on
    count    likewise; charged is all that had arrived, what a slow client had yet to take included
    drain    the rest is read, for the usage that a server reports at the end, within bounds

It runs in the request's own task, so there is still one way out: the hold lives on and grows, progress is on record for
a crash, a shutdown waits for it as for any request, and `finish` settles what it came to.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING

from backends.attempt import StreamCut
from backends.dispatch import Dispatched
from backends.stream import EventStream
from gateway.accounting import Accounting
from gateway.dialects.errors import OutOfBudget
from gateway.life import Life
from gateway.logs import log
from gateway.metering import Meter

if TYPE_CHECKING:
    from gateway.services import Services


async def client_left(services: Services, life: Life, accounting: Accounting, answer: Dispatched) -> None:
    """Take account of the rest of a stream, as far as the policy wants it. Closing it is the caller's."""
    assert life.decision is not None
    assert answer.stream is not None
    wanted, meter = life.decision.on_abort, life.meter
    if wanted.mode == "cancel" or meter.complete(life.choices) or answer.attempt.outcome != "running":
        return
    life.abandoned = True
    if wanted.mode == "count":
        # Without a moment to wait, all that has arrived is read, and nothing more.
        await _read(answer.stream, meter, None, seconds=0, most=sys.maxsize)
        return
    before = meter.counted_output()
    ended = await _read(answer.stream, meter, accounting, seconds=wanted.max_time, most=before + wanted.max_tokens)
    services.metrics.drained.labels(ended).inc()
    more = meter.counted_output() - before
    log(logging.INFO, "read on for its usage", request_id=life.request_id, ended=ended, output_tokens_more=more)


async def _read(stream: EventStream, meter: Meter, accounting: Accounting | None, *, seconds: float, most: int) -> str:
    """Count events for so long and until so many tokens, in the books as well if they are given.

    Returns:
        What ended it.
    """
    try:
        async with asyncio.timeout(seconds):
            async for event in stream:  # of this attempt: nobody wants a broken one continued elsewhere
                if event.chunk is None:
                    continue
                meter.see(event.chunk)
                if meter.counted_output() >= most:
                    return "tokens"
                if accounting is not None and accounting.progress_due():
                    await accounting.progress()
    except TimeoutError:
        return "time"
    except StreamCut:
        return "cut"
    except OutOfBudget:
        return "budget"
    return "finished"
