"""Clients of HTTP/1.0: no chunks, and the end of the connection behind every answer."""

from __future__ import annotations

from tests.edge.conftest import CHUNK, Edge


def request(path: str, head: str = "") -> bytes:
    return f"GET {path} HTTP/1.0\r\n{head}\r\n".encode()


async def test_a_plain_answer_has_its_length(door: Edge) -> None:
    client = await door.connect()
    answer = await client.ask(request("/echo", "connection: keep-alive\r\n"))
    assert (answer.status, answer.said["path"], answer.headers["connection"]) == (200, "/echo", "close")
    assert await client.is_closed()


async def test_a_stream_ends_with_the_connection(door: Edge) -> None:
    client = await door.connect()
    await client.send(request("/idle"))
    head = await client.reader.readuntil(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"content-length" not in head
    assert b"connection: close" in head
    assert await client.reader.readuntil(b"\n\n") == b"data: 1\n\n"
    door.later(0)
    door.later(15)
    assert await client.reader.readuntil(b"\n\n") == b": alive\n\n"
    door.application.let_go.set()
    assert await client.reader.read() == b"data: 2\n\n"


async def test_a_stream_is_held_back_for_a_slow_reader(door: Edge) -> None:
    client = await door.connect(receive_buffer=4096)
    await client.send(request("/stream"))
    await client.reader.readuntil(b"\r\n\r\n")
    assert await client.reader.readexactly(len(CHUNK)) == CHUNK
    client.close()
    await door.application.until(lambda: door.application.disconnects == 1)


async def test_an_error_has_its_length(door: Edge) -> None:
    client = await door.connect()
    answer = await client.ask(request("/echo", "host: a\r\nhost: b\r\n"))
    assert (answer.status, answer.said["error"]["code"]) == (400, "malformed_request")
    assert await client.is_closed()
