"""Finish reasons that are none: servers that write one on every chunk end no answer early, and none that broke off."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from backends.dispatch import StreamCut

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
END = b"0\r\n\r\n"


def said(finish: str | None = "stop", index: int = 0, **delta: Any) -> bytes:
    """One event; by default it has a finish reason."""
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    delta = {"role": "assistant", **delta} if delta.pop("first", False) else delta
    choice = {"index": index, "delta": delta, "finish_reason": finish}
    return b"data: " + msgspec.json.encode({**chunk, "choices": [choice]}) + b"\n\n"


def framed(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


def reasons(events: list[Any]) -> list[tuple[str | None, str | None]]:
    """Text and finish reason of each event as a client gets it; what is metered says the same."""
    found = []
    for event in events:
        if event.done:
            continue
        (choice,) = msgspec.json.decode(event.raw.removeprefix(b"data: "))["choices"]
        assert event.chunk.choices[0].finish_reason == choice["finish_reason"]
        found.append((choice["delta"].get("content"), choice["finish_reason"]))
    return found


@pytest.fixture
def answered(bench, serve):
    """Open a stream that consists of these bytes, on a pool that remembers the servers before."""

    async def open_stream(body: bytes, **options: Any) -> Any:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD + body)
            if not body.endswith(END) and options.get("silent"):
                await reader.read()
            writer.close()

        origin = await serve(handle)
        known = bench.pools.get("main")
        pool = bench.pool("main", f"http://{origin}/v1", attempts=1, between_tokens_s=0.5)
        if known is not None:
            pool.repeats_reasons = known.repeats_reasons
        return await bench.open(payload=options.get("payload", {}))

    return open_stream


async def read(answer: Any) -> tuple[list[Any], StreamCut | None]:
    events = []
    try:
        async for event in answer.events:
            events.append(event)  # noqa: PERF401
    except StreamCut as cut:
        return events, cut
    return events, None


@pytest.mark.parametrize("last", [said(content=" c"), said(content=" c") + said(), said(None, content=" c") + said()])
@pytest.mark.parametrize("ending", [framed(DONE) + END, framed(DONE), END])
async def test_the_last_reason_is_the_end(bench, answered, last: bytes, ending: bytes) -> None:
    body = framed(said(first=True, content=""), said(content="a"), said(content=" b"), last)
    events, cut = await read(await answered(body + ending))
    assert cut is None
    seen = reasons(events)
    assert "".join(text or "" for text, _ in seen) == "a b c"
    assert [reason for _, reason in seen] == [None] * (len(seen) - 1) + ["stop"]
    assert bench.outcomes() == ["success"]


async def test_events_go_on_as_they_come(bench, serve) -> None:
    """Only one event is held back, and a server that waits for its client is not waited for."""
    more = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + framed(said(content="a"), said(content="b")))
        await more.wait()
        writer.write(framed(said(content="c"), DONE) + END)

    bench.pool("main", f"http://{await serve(handle)}/v1")
    answer = await bench.open()
    events = [await anext(answer.events)]
    more.set()
    events += (await read(answer))[0]
    assert reasons(events) == [("a", None), ("b", None), ("c", "stop")]


async def test_an_answer_that_breaks_off_is_broken(bench, answered) -> None:
    for silent in (True, False):
        answer = await answered(framed(said(content="a"), said(content="b")), silent=silent)
        events, cut = await read(answer)
        assert cut is not None
        assert reasons(events) == [("a", None), ("b", None)]
    assert bench.outcomes() == ["timeout", "cut"]


async def test_what_such_a_server_is_known_for_counts_from_the_first_event(bench, answered) -> None:
    body = framed(said(content="a"))
    assert (await read(await answered(body)))[1] is None  # a whole answer, as far as anybody can tell
    await read(await answered(framed(said(content="a"), said(content="b")) + END))
    events, cut = await read(await answered(body))
    assert cut is not None
    assert reasons(events) == [("a", None)]
    events, cut = await read(await answered(body + END))
    assert (reasons(events), cut) == ([("a", "stop")], None)
    assert bench.outcomes() == ["success", "success", "cut", "success"]


async def test_calls_and_thoughts_go_on_too(bench, answered) -> None:
    call = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    body = framed(said(reasoning_content="hm"), said(tool_calls=[call]), DONE) + END
    events, cut = await read(await answered(body))
    assert cut is None
    assert reasons(events) == [(None, None), (None, "tool_calls")]


async def test_one_choice_of_several_may_end_before_the_others(bench, answered) -> None:
    parts = [
        said(None, first=True, content="a"),
        said(None, 1, first=True, content="b"),
        said(),
        said(None, 1, content="c"),
    ]
    body = framed(*parts, said("length", 1), DONE) + END
    events, cut = await read(await answered(body, payload={"n": 2}))
    assert cut is None
    assert [event.raw for event in events[:-1]] == [*parts, said("length", 1)]


async def test_usage_after_the_end_is_no_text(bench, answered) -> None:
    usage = (
        b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":null}],"usage":{"prompt_tokens":1}}\n\n'
    )
    end = said(content="a", first=True)
    events, cut = await read(await answered(framed(end, usage, DONE) + END))
    assert cut is None
    assert events[0].raw == end
    assert not bench.pools["main"].repeats_reasons
