"""Signs of life on idle streams: when they are sent, and when never. Nothing here waits: the tests move the clock."""

from __future__ import annotations

import asyncio

from edge.limits import Limits
from tests.edge.conftest import CHUNK, Client, Edge, edge

IDLE = b"GET /idle HTTP/1.1\r\nhost: a\r\n\r\n"
FIRST, LAST, ALIVE = b"9\r\ndata: 1\n\n\r\n", b"9\r\ndata: 2\n\n\r\n0\r\n\r\n", b"9\r\n: alive\n\n\r\n"


async def begun(door: Edge, request: bytes = IDLE) -> Client:
    client = await door.connect()
    await client.send(request)
    await client.reader.readuntil(FIRST)
    return client


async def test_a_silent_stream_gets_one_sign_of_life_per_interval(door: Edge) -> None:
    client = await begun(door)
    for second in range(45):
        door.later(second)
    door.application.let_go.set()
    rest = await client.reader.readuntil(LAST)
    assert rest == 3 * ALIVE + LAST  # within 15, 30 and 45 s of the first piece


async def test_no_silence_is_longer_than_what_was_set() -> None:
    async with edge(Limits(stream_keep_alive_s=15, drain_s=5)) as door:
        client = await begun(door)
        door.later(0.99)  # the first sweep after the piece comes up to a second later
        door.later(13.9)
        door.later(14.9)
        door.application.let_go.set()
        assert await client.reader.readuntil(LAST) == ALIVE + LAST


async def test_a_stream_that_says_something_needs_none(door: Edge) -> None:
    client = await begun(door)
    cycle = door.connection.cycle
    for second in range(60):
        door.later(second)
        if second % 5 == 0:
            await cycle.send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
    door.application.let_go.set()
    assert await client.reader.readuntil(LAST) == 12 * FIRST + LAST


async def test_without_an_interval_there_are_none() -> None:
    async with edge(Limits(stream_keep_alive_s=0, drain_s=5)) as door:
        client = await begun(door)
        for second in range(0, 600, 10):
            door.later(second)
        door.application.let_go.set()
        assert await client.reader.readuntil(LAST) == LAST


async def test_nothing_is_sent_before_an_answer_begins(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n")
    await door.until(door.connection.is_busy)
    for second in range(60):
        door.later(second)
    door.application.let_go.set()
    assert (await client.answer()).status == 200


async def test_an_answer_that_names_no_sign_of_life_gets_none(door: Edge) -> None:
    client = await door.connect(receive_buffer=4096)
    await client.send(b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n")
    await door.until(lambda: door.connection.flow.write_paused)
    waiting = door.connection.transport.get_write_buffer_size()
    for second in range(50):
        door.later(second)
    assert door.connection.transport.get_write_buffer_size() == waiting


async def test_a_client_that_does_not_read_is_sent_nothing_more(door: Edge) -> None:
    client = await begun(door, IDLE)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    cycle = door.connection.cycle
    while not door.connection.flow.write_paused:
        await cycle.send({"type": "http.response.body", "body": CHUNK, "more_body": True})
    waiting = door.connection.transport.get_write_buffer_size()
    for second in range(50):
        door.later(second)
    assert door.connection.transport.get_write_buffer_size() == waiting


async def test_the_one_of_two_pipelined_streams_that_is_answered_is_kept_alive(door: Edge) -> None:
    client = await begun(door, IDLE + IDLE)
    for second in range(15):
        door.later(second)
    door.application.let_go.set()
    received = await client.reader.readuntil(LAST)
    assert received == ALIVE + LAST
    assert (await client.reader.readuntil(LAST)).endswith(FIRST + LAST)


async def test_a_stream_that_has_ended_is_silent(door: Edge) -> None:
    client = await begun(door)
    door.application.let_go.set()
    await client.reader.readuntil(LAST)
    for second in range(70):
        door.later(second)
    door.later(100)  # an idle connection, as after any answer
    assert await client.is_closed()


async def test_the_server_does_it_by_itself() -> None:
    async with edge(Limits(stream_keep_alive_s=0.1, drain_s=5)) as door:
        clients = await asyncio.gather(*(begun(door) for _ in range(3)))
        for client in clients:
            await client.reader.readuntil(ALIVE)
            await client.reader.readuntil(ALIVE)
