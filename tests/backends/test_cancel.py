"""Leaving early: every way out of a call reaches the backend at once and is booked once."""

from __future__ import annotations

import asyncio
import time

import pytest

from backends.dispatch import Attempt, Call, Candidate, StreamCut


@pytest.mark.parametrize(
    ("model", "stream"),
    [
        ("hang", True),
        ("hang", False),
        ("mock,delay_ms=5000", False),
        ("stall", False),  # half of the body has come
        ("stall", True),  # the role has come, no content
        ("mock,pings=1000,interval_ms=5", True),
    ],
)
async def test_cancelling_while_waiting_closes_the_upstream(bench, mock, model, stream):
    bench.pool("main", mock, first_token_s=10)
    task = asyncio.create_task(bench.open(model, stream=stream))
    await mock.until(lambda: mock.requests == 1)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await mock.until(lambda: mock.records[-1].outcome == "client-gone", timeout_s=1)
    assert time.monotonic() - began < 0.2
    assert bench.outcomes() == ["cancelled"]
    assert bench.observer.ended == bench.observer.started
    assert bench.pools["main"].snapshot()[0].failures_total == 0  # not the replica's fault
    assert not bench.client.active


async def test_cancelling_between_attempts(bench, mock, eventually):
    bench.pool("main", mock, attempts=2)
    task = asyncio.create_task(bench.open("status,status=429,retry_after=5"))
    await mock.until(lambda: mock.requests == 1 and mock.records[-1].outcome == "answered")
    await eventually(lambda: bench.observer.ended)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.outcomes() == ["error"]


async def test_cancelling_while_connecting(bench, deaf_url):
    bench.pool("main", deaf_url, connect_s=30)
    task = asyncio.create_task(bench.open())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert bench.outcomes() == ["cancelled"]


async def test_aclose_in_mid_stream_closes_the_upstream(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("mock,chunks=1000,interval_ms=5")
    seen = 0
    async for _ in answer.events:
        seen += 1
        if seen == 5:
            break
    began = time.monotonic()
    await answer.aclose()
    await answer.aclose()
    await mock.until(lambda: mock.records[-1].outcome == "client-gone", timeout_s=1)
    assert time.monotonic() - began < 0.2
    assert answer.attempt.outcome == "cancelled"
    assert bench.observer.ended == []
    assert [event async for event in answer.events] == []


async def test_cancelling_the_reader_of_a_stream(bench, mock):
    bench.pool("main", mock, between_tokens_s=10)
    answer = await bench.open("stall,after=2")

    async def read() -> None:
        try:
            async for _ in answer.events:
                pass
        finally:
            await answer.aclose()

    task = asyncio.create_task(read())
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await mock.until(lambda: mock.records[-1].outcome == "client-gone", timeout_s=1)
    assert answer.attempt.outcome == "cancelled"


async def test_leaving_after_the_end_changes_nothing(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("mock,chunks=2")
    assert [event.done async for event in answer.events][-1]
    await answer.aclose()
    assert answer.attempt.outcome == "success"
    await bench.open(stream=False)
    assert mock.accepted == 1  # the connection survived


async def test_leaving_between_done_and_the_end_of_the_body_keeps_the_connection(bench, serve, eventually):
    left, connections = asyncio.Event(), 0

    async def handle(reader, writer):
        nonlocal connections
        connections += 1
        for _ in range(2):
            await reader.readuntil(b'"include_usage":true}}')
            event = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\ndata: [DONE]\n\n'
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n" % (len(event), event))
            await left.wait()
            writer.write(b"0\r\n\r\n")

    origin = await serve(handle)
    bench.pool("main", f"http://{origin}/v1")
    for _ in range(2):
        answer = await bench.open()
        assert [event.done async for event in answer.events] == [False, True]
        await answer.aclose()
        left.set()
        await eventually(lambda: not bench.client.active)
        left.clear()
    assert bench.outcomes() == ["success", "success"]
    assert connections == 1


async def test_leaving_after_a_cut_keeps_its_outcome(bench, mock):
    bench.pool("main", mock)
    answer = await bench.open("cut,after=1")
    with pytest.raises(StreamCut):
        async for _ in answer.events:
            pass
    await answer.aclose()
    assert answer.attempt.outcome == "cut"


async def test_an_observer_that_objects_stops_the_call(bench, mock):
    class Objecting:
        def attempt_started(self, attempt: Attempt) -> None:
            raise RuntimeError("the journal is full")

        def attempt_ended(self, attempt: Attempt) -> None:
            raise AssertionError("it was never started")

        def attempt_cut(self, attempt: Attempt) -> None:
            raise AssertionError("it was never started")

    bench.pool("main", mock)
    with pytest.raises(RuntimeError, match="journal"):
        await bench.dispatcher.open(
            Call({"messages": []}, "chat", False, "r"), [Candidate("m", "small", "main", "m")], Objecting()
        )
    assert mock.requests == 0


async def test_many_streams_some_of_them_left(bench, mock, second):
    bench.pool("main", mock, second)

    async def one(number: int) -> str:
        answer = await bench.open("mock,chunks=30,interval_ms=2")
        try:
            async for event in answer.events:
                if number % 4 == 0 and event.chunk and event.chunk.choices[0].delta.content:
                    break
        finally:
            await answer.aclose()
        return answer.attempt.outcome

    outcomes = await asyncio.gather(*(one(number) for number in range(64)))
    assert outcomes.count("cancelled") == 16
    assert outcomes.count("success") == 48
    records = [*mock.records, *second.records]
    await mock.until(lambda: all(record.outcome != "running" for record in records), timeout_s=2)
    assert sum(record.outcome == "client-gone" for record in records) == 16
    assert not bench.client.active
