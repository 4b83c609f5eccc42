"""Give a client the stream that another request of the same question gets, as it comes.

It is a hit that costs nothing, under this request's own id. What ends it is held back until the row is in the journal,
as for any answer; if the other request's answer breaks off, so does this one.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec

from backends.attempt import Event
from backends.openai import decode_chunk
from cache.flight import Broken, Following
from gateway.accounting import Accounting
from gateway.dialects.dialect import Writer
from gateway.dialects.errors import Unavailable
from gateway.flights.messages import Landing
from gateway.http import SSE_HEADERS
from gateway.ledger.usage import Usage
from gateway.life import Life

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


async def give_as_it_comes(life: Life, accounting: Accounting, stream: Following[Landing], writer: Writer) -> None:
    """Answer with the events of `stream`.

    Raises:
        Unavailable: it broke off, or this request's deadline passed.
    """
    exchange, meter = life.exchange, life.meter
    about = {"id": f"chatcmpl-{life.request_id.removeprefix('req-')}", "created": int(time.time())}
    life.status = 200
    ending: list[bytes] = []
    try:
        async with asyncio.timeout(None if life.deadline is None else life.deadline - time.monotonic()):
            await exchange.start(200, [*SSE_HEADERS, *life.headers()], life.dialect.keep_alive)
            async for part in stream.parts():
                data = _encode(_decode(part) | about)
                chunk = decode_chunk(data)
                meter.see(chunk)
                written = writer.event(Event(b"data: " + data + b"\n\n", data, chunk))
                if meter.complete(life.choices):
                    ending += written
                    continue
                for raw in written:
                    await exchange.write(raw)
    except Broken:
        raise Unavailable(
            "The answer broke off: the request whose stream this one shares has failed. What was sent so far is "
            "incomplete.",
            status=502,
            code="stream_cut",
        ) from None
    except TimeoutError:
        raise Unavailable(
            "The request's deadline passed in the middle of the answer. What was sent so far is incomplete.",
            status=504,
            code="backend_deadline",
        ) from None
    landing = stream.answer
    usage = Usage(input_tokens=landing.input_tokens, output_tokens=landing.output_tokens, source="reported")
    accounting.answered_from_cache(landing.model, landing.tier, usage, landing.cost_nanousd, landing.finish_reason)
    await accounting.settle("cache_hit")
    *first, last = [*ending, *await writer.end(life.summary())]
    for raw in first:
        await exchange.write(raw)
    await exchange.end(last)
