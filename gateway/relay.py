"""Pass an answer on to the client: event by event, counting as it goes; unchanged, or put into the client's dialect.

The events that end a stream (the last finish reason, usage, `[DONE]`) are held back until the ledger row is in the
journal and the hold is settled: who has a complete answer has a row, and finds its limits as they are. A stream that
breaks, or whose budget is spent on the way, ends with an error event and without `[DONE]`.
"""

from __future__ import annotations

from backends.attempt import Event, StreamCut
from backends.dispatch import Dispatched
from backends.openai import chat_body, chat_event
from gateway.accounting import Accounting
from gateway.dialects import openai_chat
from gateway.dialects.errors import Unavailable
from gateway.http import JSON_TYPE, SSE_HEADERS, Exchange
from gateway.life import Life


async def relay(
    exchange: Exchange, life: Life, accounting: Accounting, answer: Dispatched, *, keep: bool
) -> list[bytes]:
    """Deliver the whole answer.

    Returns:
        With `keep`, the answer as it came, for the cache: the body, or the data of every event.

    Raises:
        GatewayError: the stream broke, or a budget was spent, after content had been delivered.
    """
    try:
        if life.stream:
            return await _relay_stream(exchange, life, accounting, answer, keep)
        assert answer.whole is not None
        body = chat_body(answer.whole)
        life.meter.see_whole(answer.whole.completion)
        await accounting.settle("success")
        life.status = answer.status
        await exchange.respond(answer.status, [JSON_TYPE, *life.headers(), life.cost_header()], body)
        return [body]
    finally:
        await answer.aclose()


async def _relay_stream(
    exchange: Exchange, life: Life, accounting: Accounting, answer: Dispatched, keep: bool
) -> list[bytes]:
    assert life.request is not None
    meter, choices = life.meter, life.choices
    kept: list[bytes] = []
    ending: list[bytes] = []
    usage: Event | None = None
    life.status = 200
    await exchange.start(200, [*SSE_HEADERS, *life.headers()])
    try:
        async for arrived in answer.events:
            event = chat_event(arrived)
            chunk = event.chunk
            if chunk is None:
                continue  # nothing for a chat client, or [DONE]: our own is written below
            meter.see(chunk)
            if keep:
                kept.append(event.data)
            if chunk.usage is not None and not chunk.choices:
                usage = event
            elif meter.complete(choices):
                ending.append(event.raw)
            else:
                await exchange.write(event.raw)
                if accounting.progress_due():
                    await accounting.progress()
    except StreamCut as cut:
        life.attempt = answer.attempt  # where it was to be continued in vain: the one that the client has the text of
        accounting.answered("timeout" if "timeout" in cut.kind else "cut", f"{cut.kind}: {cut}")
        raise Unavailable(
            "The answer broke off: the backend stopped in the middle of it. What was sent so far is incomplete.",
            status=502,
            code="stream_cut",
        ) from cut
    await accounting.settle("success")
    for raw in ending:
        await exchange.write(raw)
    if usage is not None and openai_chat.wants_usage(life.request):
        await exchange.write(openai_chat.with_tierline(usage.data, life.summary()))
    await exchange.end(openai_chat.DONE)
    return [] if answer.rescued else kept  # an answer of two models is not the answer of one
