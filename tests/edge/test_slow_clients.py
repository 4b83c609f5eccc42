"""Clients that take their time: silent ones, half requests, stalled and dripping bodies, readers that stop.

The server's times are its defaults, and the tests move its clock: nothing here waits for a time-out.
"""

from __future__ import annotations

import asyncio
import socket

from edge.limits import READ_TIMEOUT, Limits
from tests.edge.conftest import CHUNK, Client, Edge, edge

GET = b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: 1000000\r\n\r\n"


async def timed_out(client: Client) -> None:
    answer = await client.answer()
    assert (answer.status, answer.said["error"]["code"]) == (408, "request_timeout")
    assert answer.said["error"]["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["connection"] == "close"
    assert await client.is_closed()


# -- heads -------------------------------------------------------------------------------------------------------------


async def test_who_sends_nothing_is_closed_without_an_answer(door: Edge) -> None:
    client = await door.connect()
    door.later(29)
    assert not door.connection.transport.is_closing()
    door.later(31)
    assert await client.is_closed()


async def test_empty_lines_are_nothing(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"\r\n" * 1000)
    door.later(31)
    assert await client.is_closed()


async def test_half_a_head_is_told_so(door: Edge) -> None:
    client = await door.connect()
    await client.send(GET[:20])
    await door.until(door.connection.is_busy)
    door.later(31)
    await timed_out(client)


async def test_dripping_does_not_prolong_a_head(door: Edge) -> None:
    client = await door.connect()
    opened = asyncio.get_running_loop().time()
    for byte in GET[:20]:
        await client.send(bytes([byte]))
        await asyncio.sleep(0.002)
    await door.until(door.connection.is_busy)
    door.server.sweep(opened + 30.5)
    await timed_out(client)


async def test_a_kept_connection_may_be_idle_and_then_has_time_for_a_head(door: Edge) -> None:
    client = await door.connect()
    assert (await client.ask(GET)).status == 200
    door.later(74)
    await client.send(GET[:20])
    await door.until(door.connection.is_busy)
    door.later(29)
    assert (await client.ask(GET[20:])).status == 200
    door.later(76)
    assert await client.is_closed()


async def test_half_a_head_behind_a_running_request_ends_after_its_answer(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n" + GET[:20])
    await door.application.until(lambda: len(door.application.asked) == 1)
    door.later(31)
    door.application.let_go.set()
    answer = await client.answer()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await client.is_closed()


async def test_a_running_request_has_no_deadline_here(door: Edge) -> None:
    client = await door.connect()
    await client.send(GET.replace(b"echo", b"hold"))
    await door.application.until(lambda: len(door.application.asked) == 1)
    door.later(100_000)
    door.application.let_go.set()
    assert (await client.answer()).status == 200


# -- bodies ------------------------------------------------------------------------------------------------------------


async def test_an_application_may_answer_for_a_stalled_body_or_leave_it_to_the_server(door: Edge) -> None:
    client = await door.connect()
    await client.send(POST + b"half")
    await door.application.until(lambda: len(door.application.asked) == 1)
    await door.until(lambda: door.connection.is_busy())
    door.later(29)
    assert READ_TIMEOUT not in door.application.asked[0]
    door.later(31)
    assert READ_TIMEOUT in door.application.asked[0], "its turn"
    door.later(32)
    await timed_out(client)
    await door.application.until(lambda: door.application.disconnects == 1)


async def test_a_body_that_drips_is_ended_though_it_never_stalls(door: Edge) -> None:
    client = await door.connect()
    begun = asyncio.get_running_loop().time()
    await client.send(POST)
    for _ in range(10):
        await client.send(b"x")
        await asyncio.sleep(0.002)
    connection = door.connection
    await door.until(lambda: connection._content_bytes == 10)
    connection._body_read_at = begun + 31  # as if the last byte had just come
    door.server.sweep(begun + 31.5)
    door.server.sweep(begun + 31.6)
    await timed_out(client)


async def test_a_slow_but_honest_upload_earns_its_time(door: Edge) -> None:
    client = await door.connect()
    begun = asyncio.get_running_loop().time()
    await client.send(POST + b"x" * 999_999)  # at 8 KiB/s: two minutes
    connection = door.connection
    await door.until(lambda: connection._content_bytes == 999_999)
    connection._body_read_at = begun + 140
    door.server.sweep(begun + 145)
    door.server.sweep(begun + 146)
    assert len((await client.ask(b"x")).said["body"]) == 1_000_000


async def test_no_body_may_come_for_ever(door: Edge) -> None:
    client = await door.connect()
    begun = asyncio.get_running_loop().time()
    await client.send(POST.replace(b"1000000", b"10000000") + b"x" * 9_999_999)  # at 8 KiB/s: twenty minutes
    connection = door.connection
    await door.until(lambda: connection._content_bytes == 9_999_999)
    for passed, ended in ((320, False), (340, True)):
        connection._body_read_at = begun + passed
        door.server.sweep(begun + passed)
        assert (READ_TIMEOUT in door.application.asked[0]) is ended
    door.server.sweep(begun + 341)
    await timed_out(client)


async def test_a_body_that_nobody_wants_is_not_waited_for(door: Edge) -> None:
    client = await door.connect()
    assert (await client.ask(POST.replace(b"echo", b"ignore"))).status == 200
    for _ in range(5):
        await client.send(b"x" * 1000)
    door.later(29)
    assert not door.connection.transport.is_closing()
    door.later(31)
    assert await client.is_closed()


async def test_the_next_request_follows_a_body_that_nobody_wanted(door: Edge) -> None:
    client = await door.connect()
    assert (await client.ask(POST.replace(b"echo", b"ignore"))).status == 200
    assert (await client.ask(b"x" * 1_000_000 + GET)).said["path"] == "/echo"


# -- readers -----------------------------------------------------------------------------------------------------------


async def stalled(door: Edge, path: bytes = b"/stream") -> Client:
    """A client that asks for an endless stream and does not read it."""
    client = await door.connect(receive_buffer=4096)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await client.send(GET.replace(b"/echo", path))
    await door.until(lambda: door.connection.flow.write_paused)
    return client


async def test_a_client_that_does_not_read_stops_the_writer_and_is_ended(door: Edge) -> None:
    client = await stalled(door)
    written = door.application.written
    buffered = door.connection.transport.get_write_buffer_size()
    for _ in range(100):
        await asyncio.sleep(0)
    assert door.application.written == written, "the application waits"
    assert buffered < 65_536 + 2 * len(CHUNK)
    door.later(0)
    door.later(59)
    assert door.application.disconnects == 0
    door.later(61)
    await door.application.until(lambda: door.application.disconnects == 1)
    await door.until(lambda: not door.server.connections())
    client.close()


async def test_reading_a_little_earns_a_little_time(door: Edge) -> None:
    client = await stalled(door)
    connection = door.connection
    door.later(0)
    assert connection._unread is not None
    since, unread = connection._unread
    connection._unread = (since, unread + 10 * 8192)  # as if the client had taken so much since then
    door.server.sweep(since + 69)
    assert door.application.disconnects == 0
    door.server.sweep(since + 71)
    await door.application.until(lambda: door.application.disconnects == 1)
    client.close()


async def test_one_that_reads_again_starts_anew(door: Edge) -> None:
    client = await stalled(door)
    door.later(0)
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    written = door.application.written
    reading = asyncio.create_task(client.reader.readexactly(3_000_000))
    await door.until(lambda: door.application.written > written + 10)
    await reading
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    await door.until(lambda: door.connection.flow.write_paused)
    door.later(59)
    assert door.application.disconnects == 0


async def test_the_end_of_an_answer_that_nobody_reads_does_not_stay(door: Edge) -> None:
    client = await door.connect(receive_buffer=4096)
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    body = b"x" * 20_000_000
    await client.send(b"POST /echo HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body))
    await client.send(body)
    await door.until(lambda: door.connection.transport.is_closing())
    assert door.connection.transport.get_write_buffer_size() > 1_000_000
    door.later(0)
    door.later(59)
    assert len(door.server.connections()) == 1
    door.later(61)
    await door.until(lambda: not door.server.connections())


# -- the rest ----------------------------------------------------------------------------------------------------------


async def test_the_server_sweeps_by_itself() -> None:
    async with edge(Limits(read_timeout_s=0.1)) as door:
        client = await door.connect()
        await client.send(GET[:20])
        await timed_out(client)


async def test_small_writes_are_sent_at_once(door: Edge) -> None:
    await door.connect()
    option = door.connection.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert option != 0
