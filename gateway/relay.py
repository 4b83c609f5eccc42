"""Pass an answer on to the client: event by event, counting as it goes; unchanged, or put into the client's dialect.

The events that end a stream (the last finish reason, usage, `[DONE]`) are held back until the ledger row is in the
journal and the hold is settled: who has a complete answer has a row, and finds its limits as they are. A stream that
breaks, or whose budget is spent on the way, ends with an error event and without `[DONE]`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from backends.attempt import Event, StreamCut
from backends.dispatch import Dispatched
from backends.openai import chat_body, chat_event
from backends.protocol import PROMPT_TOKENS_HEADER, whole_number
from gateway.abandoned import client_left
from gateway.accounting import Accounting
from gateway.dialects.dialect import Writer
from gateway.dialects.errors import Unavailable
from gateway.escalating.holding import Held
from gateway.guarding.answer import guard_answer
from gateway.guarding.stream import GuardedStream, guarded_stream
from gateway.http import JSON_LINE, SSE_HEADERS, Exchange
from gateway.life import Life

if TYPE_CHECKING:
    from gateway.services import Services

Keep = Callable[[bytes], None]


async def relay(
    services: Services, life: Life, accounting: Accounting, answer: Dispatched, writer: Writer, *, keep: Keep | None
) -> bool:
    """Deliver the whole answer. If the client leaves a stream, the rest of it is dealt with as the policy says.

    Args:
        keep: gets the answer in the common form, as it comes: the body, or the data of every event.

    Returns:
        Whether it is the answer of one model.

    Raises:
        GatewayError: the stream broke, or a budget was spent, after content had been delivered.
    """
    exchange = life.exchange
    try:
        if life.stream:
            guarded = guarded_stream(services, life, accounting)
            return await _relay_stream(exchange, life, accounting, answer, writer, keep, guarded)
        assert answer.whole is not None
        life.meter.see_whole(answer.whole.completion)
        whole = await guard_answer(services, life, accounting, answer.whole)
        body = await writer.whole(whole)
        await accounting.settle("success")
        life.status = answer.status
        await exchange.answer(answer.status, JSON_LINE + life.header_lines() + life.cost_line(), body)
        if keep is not None:
            keep(chat_body(whole))
        return True
    except asyncio.CancelledError:
        if isinstance(answer, Held) and answer.complete:
            answer.left(life)
        elif life.stream and exchange.gone:
            await client_left(services, life, accounting, answer)
        raise
    finally:
        await answer.aclose()


async def _relay_stream(
    exchange: Exchange,
    life: Life,
    accounting: Accounting,
    answer: Dispatched,
    writer: Writer,
    keep: Keep | None,
    guarded: GuardedStream | None,
) -> bool:
    meter, choices = life.meter, life.choices
    told = whole_number(answer.headers.get(PROMPT_TOKENS_HEADER, ""), 9)
    if told is not None:  # a stream that ends before its usage comes is billed by it
        life.input_estimate = told
    ending: list[bytes] = []
    life.status = 200
    if not exchange.started:  # the response to one that was held back for long has begun
        await exchange.start(200, [*SSE_HEADERS, *life.headers()], life.dialect.keep_alive)

    def passed_on(event: Event) -> bool:
        """Most events are a piece of text for a client that reads: those are passed on as they arrive."""
        assert direct is not None
        chunk = event.chunk
        if chunk is None or not direct.writable() or accounting.progress_due():
            return False
        if not event.plain and any(choice.finish_reason for choice in chunk.choices):
            return False
        meter.see(chunk, event.usage)
        if keep is not None:
            keep(chat_event(event).data)
        for raw in writer.event(event):
            direct.write_now(raw)
        return True

    direct = exchange.direct() if guarded is None else None
    if direct is not None:
        answer.pass_on(passed_on)
    try:
        async for event in answer.events:
            if (chunk := event.chunk) is not None:
                meter.see(chunk, event.usage)
            for given in (event,) if guarded is None else await guarded.events(event):
                if given.chunk is not None and keep is not None:
                    keep(chat_event(given).data)
                written = writer.event(given)
                if meter.complete(choices):
                    answer.pass_on(None)  # whatever comes now belongs behind what is held back
                    ending += written
                    continue
                for raw in written:
                    await exchange.write(raw)
            if guarded is not None and guarded.over:
                break  # what else comes, nobody gets
            if accounting.progress_due():
                await accounting.progress()
    except StreamCut as cut:
        life.attempt = answer.attempt  # where it was to be continued in vain: the one that the client has the text of
        raise cut_short(accounting, cut) from cut
    finally:
        answer.pass_on(None)
        if guarded is not None:
            guarded.close()
    await accounting.settle("blocked" if guarded is not None and guarded.over else "success")
    ending += await writer.end(life.summary())
    for raw in ending[:-1]:
        await exchange.write(raw)
    await exchange.end(ending[-1])
    return not answer.rescued


def cut_short(accounting: Accounting, cut: StreamCut) -> Unavailable:
    """Write the row of a stream that broke off; what to tell the client."""
    late = cut.kind == "deadline"
    accounting.answered("timeout" if late or "timeout" in cut.kind else "cut", f"{cut.kind}: {cut}")
    if late:
        return Unavailable(
            "The request's deadline passed in the middle of the answer. What was sent so far is incomplete.",
            status=504,
            code="backend_deadline",
        )
    return Unavailable(
        "The answer broke off: the backend stopped in the middle of it. What was sent so far is incomplete.",
        status=502,
        code="stream_cut",
    )
