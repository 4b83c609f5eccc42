"""Answers that come before the body is there: clients that are still sending get them whole, within bounds."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket

import pytest

from edge import connection as edge_connection
from tests.edge.conftest import Client, Edge

BODY = b"x" * 30_000_000
CLOSING = b"POST /ignore HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(BODY)
EXPECTING = b"POST %b HTTP/1.1\r\nhost: a\r\ncontent-length: 5\r\nexpect: 100-continue\r\n\r\n"


def post(port: int, headers: dict[str, str]) -> tuple[int, str | None, bytes]:
    """As blocking clients do: send all of it, look for the answer then."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("POST", "/ignore", BODY, headers)
        answer = connection.getresponse()
        return answer.status, answer.getheader("connection"), answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("headers", "says"),
    [
        pytest.param({"connection": "close"}, "close", id="the client wants the end"),
        pytest.param({}, None, id="the client keeps its connection"),
        pytest.param({"expect": "100-continue"}, "close", id="the client asks first, and does not wait"),
    ],
)
async def test_a_client_that_sends_all_of_its_body_first_gets_the_answer(
    door: Edge, headers: dict[str, str], says: str | None
) -> None:
    status, connection, body = await asyncio.to_thread(post, door.port, headers)
    assert (status, connection) == (200, says)
    assert b"/ignore" in body
    await door.until(lambda: not door.server.connections())


async def test_during_a_drain_too(door: Edge) -> None:
    client = await door.connect()
    door.server.drain()
    answer = await client.ask(CLOSING.replace(b"connection: close\r\n", b""))
    assert answer.headers["connection"] == "close"
    await client.send(BODY)
    assert await client.is_closed()


async def test_an_answer_with_garbage_behind_its_request(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n\0" + BODY[:3_000_000])
    connection = door.connection
    await door.until(lambda: connection._deaf)
    door.application.let_go.set()
    answer = await client.answer()
    assert (answer.said["path"], answer.headers["connection"]) == ("/hold", "close")
    await client.send(BODY[3_000_000:])
    assert await client.is_closed()


# -- bounds ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def lingering(door: Edge) -> Client:
    """A client with its answer, half of its body sent."""
    client = await door.connect()
    assert (await client.ask(CLOSING + BODY[:1000])).status == 200
    return client


async def gone(door: Edge) -> None:
    await door.until(lambda: not door.server.connections())


async def test_one_that_pauses_is_ended(door: Edge, lingering: Client) -> None:
    door.later(4)
    assert not door.connection.transport.is_closing()
    door.later(6)
    await gone(door)


async def test_one_that_goes_on_is_ended_too(door: Edge, lingering: Client) -> None:
    connection = door.connection
    since = asyncio.get_running_loop().time()
    connection._heard_at = since + 29  # as if it had just sent something
    door.server.sweep(since + 29)
    assert not connection.transport.is_closing()
    connection._heard_at = since + 31
    door.server.sweep(since + 31)
    await gone(door)


async def test_sending_on_counts_as_no_pause(door: Edge, lingering: Client) -> None:
    connection = door.connection
    connection._heard_at -= 100
    before = connection._heard_at
    await lingering.send(b"x")
    await door.until(lambda: connection._heard_at > before)
    door.later(4)
    assert not connection.transport.is_closing()


@pytest.mark.parametrize("head", [CLOSING, CLOSING.replace(b"connection: close\r\n", b"")])
async def test_no_more_than_so_many_bytes_are_read(door: Edge, head: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_connection, "MAX_UNWANTED_BYTES", 1_000_000)
    client = await door.connect()
    assert (await client.ask(head)).status == 200
    await client.send(BODY[:1_000_000])
    assert len(door.server.connections()) == 1
    with contextlib.suppress(ConnectionError):
        while door.server.connections():
            await client.send(BODY[:100_000])
    await gone(door)


# -- Expect: 100-continue ----------------------------------------------------------------------------------------------


async def test_who_asks_first_is_told_to_go_on(door: Edge) -> None:
    client = await door.connect()
    await client.send(EXPECTING % b"/echo")
    assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    answer = await client.ask(b"hello")
    assert answer.said["body"] == "hello"
    assert "connection" not in answer.headers


async def test_who_asks_first_and_is_not_wanted_sends_no_body(door: Edge) -> None:
    """What came next could be the body or another request: the connection ends."""
    client = await door.connect()
    answer = await client.ask(EXPECTING % b"/ignore")
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await client.is_closed()
    client.close()
    await gone(door)


async def test_who_sends_its_body_along_keeps_its_connection(door: Edge) -> None:
    client = await door.connect()
    answer = await client.ask(EXPECTING % b"/ignore" + b"hello")
    assert (answer.status, "connection" in answer.headers) == (200, False)
    assert (await client.ask(b"GET /echo HTTP/1.1\r\nhost: a\r\n\r\n")).status == 200


async def test_http_1_0_cannot_ask(door: Edge) -> None:
    client = await door.connect()
    answer = await client.ask((EXPECTING % b"/echo").replace(b"HTTP/1.1", b"HTTP/1.0") + b"hello")
    assert (answer.status, answer.said["body"]) == (200, "hello")


async def test_a_client_that_has_just_closed_is_no_failure(door: Edge) -> None:
    """Its end is not read yet, and what is written breaks the connection before its own end can be said."""
    with socket.create_connection(("127.0.0.1", door.port)) as client:
        client.sendall(b"POST /hold HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 9\r\n\r\n")
        await door.until(lambda: bool(door.application.asked))
    door.application.let_go.set()
    await door.until(lambda: not door.server.connections() and not door.server.server_state.tasks)
