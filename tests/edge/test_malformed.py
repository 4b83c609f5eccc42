"""Heads that are too large, and what is not HTTP/1.1: a clean error, the end of the connection, nothing in the log."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from edge.limits import MAX_HEAD_BYTES, MAX_HEADERS
from tests.edge.conftest import Client, Edge

GET = b"GET /echo HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /echo HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST + b"transfer-encoding: chunked\r\n\r\n"


async def refused(client: Client, status: int, code: str) -> None:
    """The answer is an error object with a request id, and the last thing on the connection."""
    answer = await client.answer()
    error = answer.said["error"]
    assert (answer.status, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert error["message"]
    assert error["request_id"] == answer.headers["x-request-id"]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["connection"] == "close"
    assert await client.is_closed()


# -- too large ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(GET + b"x: " + b"a" * 100_000 + b"\r\n\r\n", id="one header of 100 kB"),
        pytest.param(GET + b"".join(b"x%d: y\r\n" % n for n in range(5000)) + b"\r\n", id="5,000 headers"),
        pytest.param(GET + b"x: y\r\n" * MAX_HEADERS + b"\r\n", id="one header too many"),
        pytest.param(b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: a\r\n\r\n", id="a long URL"),
        pytest.param(b"GET /" + b"a" * 70_000, id="a long URL without an end"),
        pytest.param(GET + b"x: " + b"a" * 70_000, id="a long header without an end"),
        pytest.param(
            POST + b"content-length: 5\r\n" + b"x: %s\r\n" % (b"a" * 1000) * 70 + b"\r\nhello", id="with a body"
        ),
    ],
)
async def test_a_large_head_is_refused(door: Edge, head: bytes) -> None:
    client = await door.connect()
    await client.send(head)
    await refused(client, 431, "request_head_too_large")
    assert door.application.asked == []


@pytest.mark.parametrize(
    ("beginning", "piece"),
    [
        pytest.param(GET + b"x: ", b"a" * 8192, id="header value"),
        pytest.param(GET, b"a" * 8192, id="header name"),
        pytest.param(GET, b"x: y\r\n" * 100, id="headers"),
        pytest.param(b"GET /", b"a" * 8192, id="request line"),
        pytest.param(CHUNKED + b"1;", b"a" * 8192, id="chunk extension"),
        pytest.param(CHUNKED, b"1;" + b"a" * 8192 + b"\r\nx\r\n", id="chunk extensions"),
        pytest.param(CHUNKED + b"1\r\nx\r\n0\r\nx: ", b"a" * 8192, id="trailer"),
        pytest.param(CHUNKED + b"1\r\nx\r\n0\r\n", b"x: y\r\n" * 100, id="trailers"),
    ],
)
async def test_what_never_ends_is_ended(door: Edge, beginning: bytes, piece: bytes) -> None:
    client = await door.connect()
    await client.send(beginning)
    refusal = asyncio.create_task(refused(client, 431, "request_head_too_large"))
    sent = 0
    with contextlib.suppress(ConnectionError):
        while not refusal.done():
            await client.send(piece)
            sent += len(piece)
    await refusal
    # Mostly what the kernel holds between us and the server.
    assert sent < 16 * 1024 * 1024


async def test_a_large_head_without_an_end_is_refused_behind_a_request(door: Edge) -> None:
    client = await door.connect()
    await client.send(GET + b"\r\n" + GET + b"x: " + b"a" * 70_000)
    assert (await client.answer()).status == 200
    rest = await client.reader.read()  # it says so only if the request before was answered already
    assert rest == b"" or rest.startswith(b"HTTP/1.1 431 ")


async def test_just_below_the_limits_is_served(door: Edge) -> None:
    client = await door.connect()
    many = b"".join(b"x%d: y\r\n" % n for n in range(MAX_HEADERS - 1))
    assert (await client.ask(GET + many + b"\r\n")).status == 200
    large = b"x: %s\r\n" % (b"a" * (MAX_HEAD_BYTES - 100))
    assert (await client.ask(GET + large + b"\r\n")).status == 200


async def test_a_large_body_or_many_small_requests_in_one_read_are_no_large_head(door: Edge) -> None:
    client = await door.connect()
    length = 3_000_000
    body = b"a" * length
    head = POST + b"content-length: %d\r\n\r\n" % length
    answer = await client.ask(head + body)
    assert len(answer.said["body"]) == length
    # The end of a body, requests one after the other, and half a head, all in one piece.
    await client.send(head + body[:-90_000])
    await client.send(body[-90_000:] + (GET + b"\r\n") * 3000 + GET)
    assert len((await client.answer()).said["body"]) == length
    for _ in range(3000):
        assert (await client.answer()).status == 200
    assert (await client.ask(b"\r\n")).status == 200


async def test_a_body_in_tiny_chunks_is_served(door: Edge) -> None:
    client = await door.connect()
    answer = await client.ask(CHUNKED + b"1\r\nx\r\n" * 200_000 + b"0\r\n\r\n")
    assert len(answer.said["body"]) == 200_000


# -- not HTTP/1.1 ------------------------------------------------------------------------------------------------------

TLS_HELLO = bytes.fromhex("16030100c5010000c10303") + bytes(range(186))


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"hello\r\n\r\n", id="no request line"),
        pytest.param(b"GET\r\n\r\n", id="method only"),
        pytest.param(b"GET /\r\n\r\n", id="HTTP/0.9"),
        pytest.param(b"GET / HTTP/0.9\r\nhost: a\r\n\r\n", id="HTTP/0.9, said"),
        pytest.param(b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", id="HTTP/2.0"),
        pytest.param(b"GET / HTTP/9.9\r\nhost: a\r\n\r\n", id="HTTP/9.9"),
        pytest.param(b"GET / HTTP/1.1\nhost: a\n\n", id="bare line feeds"),
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="no host"),
        pytest.param(b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", id="two hosts"),
        pytest.param(b"GET / HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", id="two hosts in HTTP/1.0"),
        pytest.param(b"GET /\x00 HTTP/1.1\r\nhost: a\r\n\r\n", id="NUL in the URL"),
        pytest.param("GET /ä HTTP/1.1\r\nhost: a\r\n\r\n".encode(), id="URL not ASCII"),
        pytest.param(b"GET http://a HTTP/1.1\r\nhost: a\r\n\r\n", id="URL without a path"),
        pytest.param(GET + b"x: a\x00b\r\n\r\n", id="NUL in a header"),
        pytest.param(GET + b"x: a\r\n b\r\n\r\n", id="folded header"),
        pytest.param(GET + b"x : a\r\n\r\n", id="space before the colon"),
        pytest.param(GET + b": a\r\n\r\n", id="header without a name"),
        pytest.param(GET + b"x: a\rb\r\n\r\n", id="bare carriage return"),
        pytest.param(POST + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n", id="two lengths"),
        pytest.param(POST + b"transfer-encoding: chunked\r\ncontent-length: 5\r\n\r\n0\r\n\r\n", id="lengths, two"),
        pytest.param(POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\nhello", id="two content lengths"),
        pytest.param(POST + b"content-length: +5\r\n\r\nhello", id="signed length"),
        pytest.param(POST + b"content-length: 99999999999999999999999\r\n\r\n", id="length overflow"),
        pytest.param(POST + b"transfer-encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", id="chunked twice"),
        pytest.param(POST + b"transfer-encoding: chunked, gzip\r\n\r\n0\r\n\r\n", id="chunked not last"),
        pytest.param(CHUNKED.replace(b"1.1", b"1.0") + b"0\r\n\r\n", id="chunked in HTTP/1.0"),
        pytest.param(CHUNKED + b"zz\r\n", id="chunk size"),
        pytest.param(CHUNKED + b"-1\r\n", id="negative chunk size"),
        pytest.param(CHUNKED + b"fffffffffffffffff\r\n", id="chunk size overflow"),
        pytest.param(CHUNKED + b"3\r\nhello\r\n", id="chunk longer than its size"),
        pytest.param(b"CONNECT a:443 HTTP/1.1\r\nhost: a\r\n\r\n", id="CONNECT"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2 preface"),
        pytest.param(TLS_HELLO, id="TLS"),
        pytest.param(bytes(range(256)), id="noise"),
    ],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_what_is_not_http_is_refused(door: Edge, sent: bytes, at_once: bool) -> None:
    client = await door.connect()
    try:
        for piece in [sent] if at_once else [sent[n : n + 1] for n in range(len(sent))]:
            await client.send(piece)
            await asyncio.sleep(0)
    except ConnectionError:
        pass  # it has seen enough
    await refused(client, 400, "malformed_request")
    assert door.application.written == 0
    await door.application.until(lambda: door.application.disconnects == len(door.application.asked))


@pytest.mark.parametrize(
    "coding",
    [b"gzip", b"gzip, chunked", b"gzip\r\ntransfer-encoding: chunked", b"identity", b"xchunked"],
)
@pytest.mark.parametrize("at_once", [True, False])
async def test_a_coding_that_nobody_undoes_is_not_read_as_plain(door: Edge, coding: bytes, at_once: bool) -> None:
    sent = POST + b"Transfer-Encoding: %b\r\n\r\n5\r\nhello\r\n0\r\n\r\n" % coding
    client = await door.connect()
    for piece in [sent] if at_once else [sent[:50], sent[50:]]:
        await client.send(piece)
        await asyncio.sleep(0)
    await refused(client, 501, "unknown_transfer_encoding")
    assert door.application.asked == []


async def test_a_coding_is_known_in_any_case(door: Edge) -> None:
    client = await door.connect()
    head = POST + b"transfer-encoding: Chunked \r\n\r\n"
    assert (await client.ask(head + b"2\r\nhi\r\n0\r\n\r\n")).said["body"] == "hi"


async def test_garbage_behind_a_request_never_gets_into_its_answer(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n" + GET + b"\r\n" + b"\x00garbage\r\n\r\n" + GET + b"\r\n")
    await door.application.until(lambda: len(door.application.asked) == 1)
    door.application.let_go.set()
    answers = [await client.answer() for _ in range(2)]
    assert [answer.said["path"] for answer in answers] == ["/hold", "/echo"]
    assert answers[1].headers["connection"] == "close"
    assert await client.is_closed()
    assert len(door.application.asked) == 2


async def test_a_broken_body_behind_a_request_ends_after_its_answer(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"GET /hold HTTP/1.1\r\nhost: a\r\n\r\n" + CHUNKED + b"zz\r\n")
    await door.application.until(lambda: len(door.application.asked) == 1)
    door.application.let_go.set()
    answer = await client.answer()
    assert (answer.said["path"], answer.headers["connection"]) == ("/hold", "close")
    assert await client.is_closed()
    assert len(door.application.asked) == 1


async def test_a_client_that_left_is_noticed_behind_further_requests(door: Edge) -> None:
    client = await door.connect()
    await client.send(b"GET /stream HTTP/1.1\r\nhost: a\r\n\r\n" + GET + b"\r\n")
    await door.until(lambda: door.application.written > 0)
    client.writer.transport.abort()
    await door.application.until(lambda: door.application.disconnects == 1)


async def test_trailers_are_no_headers(door: Edge) -> None:
    client = await door.connect()
    answer = await client.ask(CHUNKED + b"2\r\nhi\r\n0\r\nauthorization: Bearer x\r\nhost: b\r\n\r\n")
    assert answer.said == {"path": "/echo", "body": "hi", "headers": ["host", "transfer-encoding"]}


@pytest.mark.parametrize("offer", ["h2c", "websocket"])
async def test_an_offer_of_another_protocol_is_declined(door: Edge, offer: str) -> None:
    client = await door.connect()
    head = POST + f"connection: upgrade\r\nupgrade: {offer}\r\ncontent-length: 5\r\n\r\n".encode()
    assert (await client.ask(head + b"hello" + GET + b"\r\n")).said["body"] == "hello"
    assert (await client.answer()).said["path"] == "/echo"
    await client.send(head[:40])
    await client.send(head[40:])
    said = (await client.ask(b"again")).said
    assert (said["body"], said["headers"]) == ("again", ["host", "connection", "content-length"])


async def test_an_error_reaches_a_client_that_is_still_sending(door: Edge) -> None:
    """Closing at once would reset the connection, and the error would be lost with it."""
    client = await door.connect()
    await client.send(GET + b"x: " + b"a" * 100_000)
    for _ in range(50):
        await client.send(b"a" * 10_000)
        await asyncio.sleep(0)
    answer = await client.answer()
    assert answer.status == 431
    assert len(door.server.connections()) == 1
    door.later(6)
    await door.until(lambda: not door.server.connections())
