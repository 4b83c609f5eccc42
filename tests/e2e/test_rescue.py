"""The bundled engine continues an answer that broke off: the text is that of an answer which did not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from backends.attempt import Attempt
from backends.dispatch import Call, Candidate, Dispatcher
from backends.http import HttpClient
from backends.pool import Pool
from tests.conftest import Stack

PAYLOAD = {
    # An answer without close calls: where the cut falls decides how its text is cut into tokens, and those would show.
    "messages": [{"role": "user", "content": "Count from 1 to 20. Write only the numbers, separated by commas."}],
    "temperature": 0,
    "max_tokens": 48,
}


class Quiet:
    """An observer that only counts."""

    def __init__(self) -> None:
        self.outcomes: list[Attempt] = []

    def attempt_started(self, attempt: Attempt) -> None:
        self.outcomes.append(attempt)

    def attempt_ended(self, attempt: Attempt) -> None:
        raise AssertionError(f"an attempt ended before its answer began: {attempt}")

    def attempt_cut(self, attempt: Attempt) -> None:
        assert attempt.outcome == "cut"


@contextlib.asynccontextmanager
async def scissors(port: int, events: int) -> AsyncIterator[str]:
    """The base URL of a proxy in front of an engine that cuts every stream after so many events."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_engine = await asyncio.open_connection("127.0.0.1", port)

        async def forward() -> None:
            while piece := await reader.read(65536):
                to_engine[1].write(piece)

        forwarding = asyncio.create_task(forward())
        seen = 0
        while seen < events and (line := await to_engine[0].readline()):
            writer.write(line)
            seen += line == b"\n"  # the blank line that ends an event; those of the chunked body end with CR LF
        await writer.drain()
        forwarding.cancel()
        to_engine[1].close()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    server.close()


async def tell(engine_url: str, cut_after: int | None) -> tuple[str, str | None]:
    """Text and finish reason of a stream, cut and continued or not."""
    text, finish = "", None
    async with contextlib.AsyncExitStack() as stack:
        client = HttpClient()
        stack.push_async_callback(client.aclose)
        urls = {"engine": f"{engine_url}/v1"}
        if cut_after is not None:
            urls["cut"] = await stack.enter_async_context(scissors(int(engine_url.rpartition(":")[2]), cut_after))
        pools = {name: Pool(name, [url], client=client) for name, url in urls.items()}
        for pool in pools.values():
            stack.push_async_callback(pool.aclose)
        candidates = [
            Candidate("smollm2-135m", "small", name, "smollm2-135m", prefill=name == "engine") for name in sorted(pools)
        ]
        observer = Quiet()
        answer = await Dispatcher(pools).open(Call(PAYLOAD, "chat", True, "r"), candidates, observer)
        async for event in answer.events:
            for choice in event.chunk.choices if event.chunk else ():
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
        await answer.aclose()
        assert [attempt.outcome for attempt in observer.outcomes] == ["cut", "success"][-len(pools) :]
    return text, finish


@pytest.mark.parametrize("cut_after", [2, 5, 14, 27])
def test_an_answer_that_breaks_off_goes_on_as_if_it_had_not(tierline_stack: Stack, cut_after: int) -> None:
    whole, _ = asyncio.run(tell(tierline_stack.engine_url, None))
    text, finish = asyncio.run(tell(tierline_stack.engine_url, cut_after))
    assert finish == "length"
    # Of the limit is taken what was delivered, as counted by events: under load the engine puts two tokens into one.
    same = min(len(text), len(whole))
    assert same > 40
    assert text[:same] == whole[:same]
