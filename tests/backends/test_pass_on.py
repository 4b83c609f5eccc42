"""Events that are passed on as they arrive, while whoever iterates waits: the same events in the same order."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from backends.attempt import Event, StreamCut
from tests.backends.test_finish_reasons import DONE, END, HEAD, framed, said

TEXTS = [f"piece {i} " for i in range(20)]


@pytest.fixture
def paced(bench, serve):
    """A stream that comes in these pieces of bytes, each when the one before has been read."""

    async def open_stream(
        *pieces: bytes,
        models: tuple[str, ...] = (),
        silent: bool = False,
        between_tokens_s: float = 1.0,
        **options: Any,
    ) -> Any:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(HEAD)
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0.002)
            if silent:
                await reader.read()
            writer.close()

        origin = await serve(handle)
        bench.pool("main", f"http://{origin}/v1", attempts=1, between_tokens_s=between_tokens_s)
        return await bench.open(*models, **options)

    return open_stream


class Taker:
    """Takes events that have no finish reason, as long as it is `willing`."""

    def __init__(self) -> None:
        self.taken: list[Event] = []
        self.order: list[Event] = []
        self.willing = True

    def __call__(self, event: Event) -> bool:
        if not self.willing or event.chunk is None or any(choice.finish_reason for choice in event.chunk.choices):
            return False
        self.taken.append(event)
        self.order.append(event)
        return True

    async def read(self, answer: Any) -> None:
        async for event in answer.events:
            self.order.append(event)

    def text(self) -> str:
        chunks = [event.chunk for event in self.order if event.chunk is not None]
        return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


def whole() -> list[bytes]:
    first, *rest = TEXTS
    events = [said(None, first=True, content=first), *(said(None, content=text) for text in rest)]
    return [*events, said("stop"), DONE]


@pytest.mark.parametrize("prefill", [False, True], ids=["plain", "rescuable"])
async def test_events_are_passed_on_without_the_iteration(paced, prefill):
    answer = await paced(*(framed(event) for event in whole()), END, about=[{"prefill": prefill}])
    taker = Taker()
    answer.pass_on(taker)
    await taker.read(answer)
    assert taker.text() == "".join(TEXTS)
    assert taker.order[-1].done
    assert len(taker.taken) > len(TEXTS) // 2  # the first ones come with the commitment
    await answer.aclose()
    assert answer.attempt.outcome == "success"


async def test_a_taker_that_cannot_and_can_again_changes_no_order(paced):
    answer = await paced(*(framed(event) for event in whole()), END)
    taker = Taker()
    answer.pass_on(taker)
    async for event in answer.events:
        taker.order.append(event)
        taker.willing = len(taker.order) % 3 == 0
    assert taker.text() == "".join(TEXTS)
    await answer.aclose()


async def test_several_events_and_halves_in_one_piece(paced):
    stream = framed(*whole()) + END
    cuts = [stream[start : start + 97] for start in range(0, len(stream), 97)]
    answer = await paced(*cuts)
    taker = Taker()
    answer.pass_on(taker)
    await taker.read(answer)
    assert taker.text() == "".join(TEXTS)
    assert answer.attempt.outcome == "success"
    await answer.aclose()


async def test_what_had_arrived_before_is_passed_on_as_well(paced):
    answer = await paced(b"".join(framed(event) for event in whole()) + END)
    await asyncio.sleep(0.05)  # all of it is here
    taker = Taker()
    answer.pass_on(taker)
    await taker.read(answer)
    assert taker.text() == "".join(TEXTS)
    assert len(taker.taken) == len(TEXTS) - 1  # all but what the commitment waited for
    await answer.aclose()
    assert answer.attempt.outcome == "success"


async def test_a_cut_is_told_after_what_was_passed_on(paced):
    answer = await paced(*(framed(event) for event in whole()[:10]))
    taker = Taker()
    answer.pass_on(taker)
    with pytest.raises(StreamCut):
        await taker.read(answer)
    assert taker.text() == "".join(TEXTS[:10])
    await answer.aclose()
    assert answer.attempt.outcome == "cut"


async def test_what_was_passed_on_is_continued_elsewhere(paced, bench, mock):
    """The text that a second server is asked to continue holds every piece that was passed on."""
    bench.pool("other", mock)
    pieces = (framed(event) for event in whole()[:10])
    answer = await paced(*pieces, models=("mock", "mock@other"), about=[{"prefill": True}])
    taker = Taker()
    answer.pass_on(taker)
    await taker.read(answer)
    await answer.aclose()
    asked = msgspec.json.decode(mock.records[-1].body)
    assert asked["messages"][-1] == {"role": "assistant", "content": "".join(TEXTS[:10]).rstrip()}


async def test_silence_after_an_event_that_was_passed_on_is_a_timeout(paced):
    answer = await paced(*(framed(event) for event in whole()[:10]), silent=True, between_tokens_s=0.4)
    taker = Taker()
    answer.pass_on(taker)
    started = time.monotonic()
    with pytest.raises(StreamCut, match="no further token"):
        await taker.read(answer)
    assert time.monotonic() - started >= 0.4
    assert taker.text() == "".join(TEXTS[:10])
    await answer.aclose()
    assert answer.attempt.outcome == "timeout"


async def test_a_fault_of_the_taker_comes_out_of_the_iteration(paced):
    answer = await paced(*(framed(event) for event in whole()), silent=True)

    def faulty(event: Event) -> bool:
        raise LookupError("a fault")

    answer.pass_on(faulty)
    with pytest.raises(LookupError, match="a fault"):
        async for _ in answer.events:
            pass
    await answer.aclose()
    assert answer.attempt.outcome == "cancelled"


async def test_a_server_that_goes_on_after_a_finish_reason_has_its_whole_time_again(bench, serve, monkeypatch):
    monkeypatch.setattr("backends.stream.AFTER_FINISH_S", 0.3)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + framed(said(content="a")))
        for text in "bc":
            await asyncio.sleep(0.05)
            writer.write(framed(said(content=text)))
        await asyncio.sleep(0.7)
        writer.write(framed(said(content="d"), DONE) + END)

    bench.pool("main", f"http://{await serve(handle)}/v1", attempts=1, between_tokens_s=5.0)
    answer = await bench.open()
    passed: list[Event] = []
    answer.pass_on(lambda event: passed.append(event) or True)
    passed += [event async for event in answer.events]
    await answer.aclose()
    assert [event.chunk.choices[0].delta.content for event in passed if event.chunk] == list("abcd")


async def test_none_ends_it(paced):
    answer = await paced(*(framed(event) for event in whole()), END)
    taker = Taker()
    answer.pass_on(taker)
    answer.pass_on(None)
    await taker.read(answer)
    assert not taker.taken
    assert taker.text() == "".join(TEXTS)
    await answer.aclose()
