"""The HTTP client on real sockets: deadlines, cancellation, back-pressure, stale connections, servers that lie."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import msgspec
import pytest

from backends.connection import HIGH_WATER_BYTES, Origin
from backends.http import Exchange, HttpClient, HttpFailure

CERTIFICATE = Path(__file__).with_name("localhost.pem")  # self-signed, for 127.0.0.1, with its key


def post(origin: Origin, model: str = "mock", stream: bool = False) -> bytes:
    body = msgspec.json.encode({"model": model, "messages": [], "stream": stream})
    return (
        f"POST {origin.path}/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        + body
    )


async def send(client: HttpClient, origin: Origin, request: bytes = b"", **options: float) -> Exchange:
    options.setdefault("connect_s", 1.0)
    deadline = time.monotonic() + options.pop("total_s", 5.0)
    return await client.send(
        origin, request or b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", deadline=deadline, connect_s=options["connect_s"]
    )


# Connections are kept, and replaced when the server has closed them.


async def test_connections_are_reused(client, mock):
    origin = Origin(mock.base_url)
    for _ in range(5):
        exchange = await send(client, origin, post(origin))
        assert (await exchange.read_all(10_000)).startswith(b"{")
    assert mock.accepted == 1
    assert not client.active


async def test_a_finished_stream_gives_its_connection_back(client, mock, eventually):
    origin = Origin(mock.base_url)
    for _ in range(3):
        exchange = await send(client, origin, post(origin, "mock,chunks=3", stream=True))
        body = b""
        while b"[DONE]" not in body:
            body += await exchange.read()
        exchange.finish()
        await eventually(lambda: origin.idle)
    assert mock.accepted == 1


async def test_a_stream_that_does_not_end_after_done_is_given_up(client, mock, monkeypatch):
    monkeypatch.setattr("backends.connection.LINGER_S", 0.1)
    origin = Origin(mock.base_url)
    exchange = await send(client, origin, post(origin, "mock,linger=1", stream=True))
    while b"[DONE]" not in await exchange.read():
        pass
    exchange.finish()
    await mock.until(lambda: mock.records[-1].outcome == "client-gone")
    assert not client.active
    assert not origin.idle


async def test_a_connection_that_the_server_closed_while_idle_is_replaced(client, mock):
    origin = Origin(mock.base_url)
    for _ in range(3):
        await (await send(client, origin, post(origin, "drop"))).read_all(10_000)
        await mock.until(lambda: not mock.connections)
    assert mock.accepted == 3


async def test_a_request_that_meets_the_closing_of_its_connection_is_sent_again(client, serve):
    """The race that keep-alive always has: the close is on its way while the request is."""
    requests = 0

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        await reader.readuntil(b"\r\n\r\n")
        requests += 1
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.readuntil(b"\r\n\r\n")  # the second request of a connection is read and not answered
        requests += 1

    origin = await serve(handle)
    assert await (await send(client, origin)).read_all(10) == b"ok"
    assert await (await send(client, origin)).read_all(10) == b"ok"
    assert requests == 3


async def test_a_fresh_connection_that_closes_is_an_error(client, serve):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")

    with pytest.raises(HttpFailure) as caught:
        await send(client, await serve(handle))
    assert caught.value.kind == "disconnected"


async def test_connections_idle_for_too_long_are_not_used(client, mock):
    origin = Origin(mock.base_url, keep_alive_s=0.0)
    for _ in range(2):
        await (await send(client, origin, post(origin))).read_all(10_000)
    assert mock.accepted == 2


async def test_an_early_answer_does_not_poison_the_connection(client, serve):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 Too Large\r\ncontent-length: 0\r\n\r\n")
        await reader.read()

    origin = await serve(handle)
    body = b"x" * 20_000_000
    exchange = await send(client, origin, b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    assert exchange.status == 413
    assert not origin.idle


# Deadlines.


async def test_no_answer_in_time(client, mock):
    origin = Origin(mock.base_url)
    began = time.monotonic()
    with pytest.raises(HttpFailure) as caught:
        await send(client, origin, post(origin, "hang"), total_s=0.2)
    assert caught.value.kind == "total_timeout"
    assert 0.2 <= time.monotonic() - began < 0.5
    await mock.until(lambda: mock.records[-1].outcome == "client-gone", timeout_s=1)


async def test_connecting_takes_too_long(client, deaf_url):
    with pytest.raises(HttpFailure) as caught:
        await send(client, Origin(deaf_url), connect_s=0.2)
    assert caught.value.kind == "connect_timeout"
    with pytest.raises(HttpFailure) as caught:
        await send(client, Origin(deaf_url), connect_s=5, total_s=0.2)
    assert caught.value.kind == "total_timeout"


async def test_silence_is_not_counted_while_the_reader_is_busy(client, mock):
    origin = Origin(mock.base_url)
    exchange = await send(client, origin, post(origin, "mock,chunks=2,interval_ms=300", stream=True))
    exchange.quiet_deadline = time.monotonic() + 0.05
    await asyncio.sleep(0.2)  # a slow reader: the deadline passes, but nobody waits for the server
    exchange.quiet_deadline = time.monotonic() + 5
    assert b"[DONE]" in await exchange.read_all(100_000)


# Cancellation.


@pytest.mark.parametrize("model", ["hang", "mock,delay_ms=5000", "stall"])
async def test_cancelling_breaks_the_connection_at_once(client, mock, eventually, model):
    origin = Origin(mock.base_url)

    async def ask() -> None:
        await (await send(client, origin, post(origin, model))).read_all(10_000)

    task = asyncio.create_task(ask())
    await mock.until(lambda: mock.requests == 1)
    if model == "stall":
        await eventually(lambda: next(iter(client.active)).status)
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if model == "stall":  # its head had come, so the exchange was the caller's to close
        assert len(client.active) == 1
        next(iter(client.active)).close()
    await mock.until(lambda: mock.records[-1].outcome == "client-gone", timeout_s=1)
    assert time.monotonic() - began < 0.2
    assert not client.active


async def test_close_takes_one_turn_of_the_loop(client, mock):
    origin = Origin(mock.base_url)
    exchange = await send(client, origin, post(origin, "stall,after=1", stream=True))
    await exchange.read()
    began = time.monotonic()
    exchange.close()
    exchange.close()
    with pytest.raises(HttpFailure):
        await exchange.read()
    await mock.until(lambda: mock.records[-1].outcome == "client-gone", timeout_s=1)
    assert time.monotonic() - began < 0.2


async def test_closing_the_client_ends_what_runs(mock):
    client = HttpClient()
    origin = Origin(mock.base_url)
    await (await send(client, origin, post(origin))).read_all(10_000)
    task = asyncio.create_task(send(client, origin, post(origin, "hang")))
    await mock.until(lambda: mock.requests == 2)
    await client.aclose()
    with pytest.raises(HttpFailure, match="closing"):
        await task
    await mock.until(lambda: not mock.connections, timeout_s=1)


# Back-pressure.


async def test_a_slow_reader_stops_the_sender(client, mock):
    origin = Origin(mock.base_url)
    exchange = await send(client, origin, post(origin, "mock,chunks=3000,pad=10000", stream=True))
    record, sent = mock.records[-1], -1
    while sent != record.events:  # until the sender stands still
        sent = record.events
        await asyncio.sleep(0.1)
    assert sent < 2000, "the sender was not stopped"
    assert exchange._size < 3 * HIGH_WATER_BYTES
    body = bytearray()
    while b"[DONE]" not in body[-100:]:
        body += await exchange.read()
    assert body.count(b"data: ") == 3000 + 3
    exchange.close()


# Servers that lie, hide or ramble.


async def test_body_that_ends_with_the_connection(client, serve):
    origin = await serve(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\n\r\nhello")
    assert await (await send(client, origin)).read_all(100) == b"hello"
    assert not origin.idle


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n",
    ],
)
async def test_body_that_ends_too_soon(client, serve, answer):
    exchange = await send(client, await serve(answer))
    assert await exchange.read() == b"hello"
    with pytest.raises(HttpFailure) as caught:
        await exchange.read()
    assert caught.value.kind == "disconnected"


async def test_interim_answers_are_skipped(client, serve):
    origin = await serve(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
    exchange = await send(client, origin)
    assert (exchange.status, await exchange.read_all(100)) == (200, b"ok")
    assert "link" not in exchange.headers


async def test_empty_body(client, serve):
    exchange = await send(client, await serve(b"HTTP/1.1 204 No Content\r\n\r\n"))
    assert await exchange.read_all(100) == b""


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x-large: " + b"x" * 70_000 + b"\r\n\r\n",
    ],
    ids=["not HTTP", "bad length", "upgrade", "large head"],
)
async def test_what_is_not_http_is_an_error(client, serve, answer):
    with pytest.raises(HttpFailure) as caught:
        await send(client, await serve(answer), total_s=1)
    assert caught.value.kind == "protocol"
    assert not client.active


async def test_a_head_without_an_end_is_an_error(client, serve):
    stopped = asyncio.Event()

    async def endless(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nx-large: ")
        try:
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
        except ConnectionError:
            stopped.set()

    with pytest.raises(HttpFailure) as caught:
        await send(client, await serve(endless), total_s=10)
    assert caught.value.kind == "protocol"
    async with asyncio.timeout(10):
        await stopped.wait()


async def test_trailers_are_no_headers_of_the_next_answer(client, serve):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nretry-after: 9\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")

    origin = await serve(handle)
    assert await (await send(client, origin)).read_all(10) == b"x"
    assert (await send(client, origin)).headers == {"content-length": "0"}


async def test_broken_chunk_is_an_error_after_what_came(client, serve):
    origin = await serve(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\nzz\r\n")
    exchange = await send(client, origin)
    assert await exchange.read() == b"ok"
    with pytest.raises(HttpFailure) as caught:
        await exchange.read()
    assert caught.value.kind == "protocol"


async def test_bytes_that_nobody_asked_for_close_an_idle_connection(client, serve, eventually):
    origin = await serve(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nokHTTP/1.1 408 Timeout\r\n\r\n")
    assert await (await send(client, origin)).read_all(100) == b"ok"
    await eventually(lambda: not origin.idle)


async def test_large_body_is_bounded(client, serve):
    origin = await serve(b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 3_000_000)
    with pytest.raises(HttpFailure) as caught:
        await (await send(client, origin)).read_all(1_000_000)
    assert caught.value.kind == "too_large"


# Addresses.


@pytest.mark.parametrize("url", ["localhost:80", "ftp://x", "http://", "http://u:p@host/", "http://host/?a=1"])
def test_what_is_not_a_base_url(url):
    with pytest.raises(ValueError):
        Origin(url)


async def test_unknown_host(client):
    with pytest.raises(HttpFailure) as caught:
        await send(client, Origin("http://no-such-host.invalid"))
    assert caught.value.kind == "connect"


async def test_proxy_variables_are_ignored(client, mock, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    origin = Origin(mock.base_url)
    assert (await send(client, origin, post(origin))).status == 200


async def test_tls() -> None:
    """A server whose certificate nobody has signed: refused by default, accepted once it is trusted."""
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(CERTIFICATE)

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=server_context)
    url = f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    trusting = HttpClient(tls=ssl.create_default_context(cafile=str(CERTIFICATE)))
    suspicious = HttpClient()
    assert await (await send(trusting, Origin(url))).read_all(10) == b"ok"
    with pytest.raises(HttpFailure) as caught:
        await send(suspicious, Origin(url))
    assert caught.value.kind == "connect"
    assert "certificate" in str(caught.value).lower()
    await trusting.aclose()
    server.close()


@pytest.mark.parametrize("more", [b"ev", b"evil!", b"evil!HTTP/1.1 2", b""])
async def test_an_answer_that_nobody_asked_for_never_answers_the_next_request(client, serve, more):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n"

    async def handle(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head + b"right" + head + more)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"XXX")

    origin = await serve(handle)
    for _ in range(2):
        exchange = await send(client, origin)
        assert await exchange.read_all(100) == b"right"
        assert not origin.idle
