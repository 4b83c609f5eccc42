"""The gateway's edge with raw sockets: what slow clients get and what the books say of them, and how it stops.

Connections by themselves (sizes, malformed requests, all time limits) are in tests/edge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.mock_upstream import MockUpstream
from tests.conftest import unused_port
from tests.gateway.front_door import POLICY, FrontDoor, configuration, eventually, front_door

MESSAGES = [{"role": "user", "content": "hi"}]


def request(door: FrontDoor, body: bytes, *, length: int | None = None, headers: str = "") -> bytes:
    """A chat completion as bytes; `length` claims another length of the body than it has."""
    lines = [
        "POST /v1/chat/completions HTTP/1.1",
        "host: gateway",
        f"authorization: Bearer {door.token}",
        f"content-length: {len(body) if length is None else length}",
    ]
    return ("\r\n".join(lines) + "\r\n" + headers + "\r\n").encode() + body


async def connect(door: FrontDoor, *, receive_buffer: int | None = None) -> tuple[asyncio.StreamReader, Any]:
    connected = socket.socket()
    if receive_buffer:
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connected.connect(("127.0.0.1", int(door.url.rsplit(":", 1)[1])))
    connected.setblocking(False)
    return await asyncio.open_connection(sock=connected, limit=4096 if receive_buffer else 1 << 20)


def later(door: FrontDoor, seconds: float) -> None:
    """What the sweep over the connections does when so much time has passed."""
    door.server.sweep(asyncio.get_running_loop().time() + seconds)


def answer(raw: bytes) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON body of the only answer on a connection that was closed after it."""
    head, body = raw.split(b"\r\n\r\n", 1)
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert len(body) == int(headers["content-length"])
    return int(status.split()[1]), headers, json.loads(body)


async def in_flight(door: FrontDoor) -> float:
    metrics = (await door.client.get("/metrics")).text
    return next(float(line.split()[1]) for line in metrics.splitlines() if line.startswith("tierline_requests_in_fl"))


# -- slow senders ------------------------------------------------------------------------------------------------------


async def test_a_body_that_stalls_gets_a_request_timeout_and_holds_nothing(
    door: FrontDoor, upstream: MockUpstream
) -> None:
    reader, writer = await connect(door)
    writer.write(request(door, b'{"model": "mock", ', length=1000))
    await eventually(lambda: door.services.metrics.in_flight.value == 1)
    assert await in_flight(door) == 1
    later(door, 31)
    status, headers, body = answer(await reader.read())
    assert (status, body["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
    assert body["error"]["request_id"] == headers["x-request-id"]
    assert (upstream.requests, door.services.limiter.open_holds, await door.rows()) == (0, 0, [])
    await eventually(lambda: door.services.metrics.in_flight.value == 0)
    assert 'status="408"' in (await door.client.get("/metrics")).text
    writer.close()


@pytest.mark.parametrize("headers", ["", "connection: close\r\n", "expect: 100-continue\r\n"])
async def test_a_bad_key_is_told_so_though_the_body_is_large(door: FrontDoor, headers: str) -> None:
    """The client sends all of it before it looks for an answer; closing on it would lose the answer."""
    body = b"x" * 30_000_000
    head = request(door, b"", length=len(body), headers=headers).replace(b"Bearer ", b"Bearer no-")
    reader, writer = await connect(door)
    writer.write(head + body)
    await writer.drain()
    writer.write_eof()
    status, _, said = answer(await reader.read())
    assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    writer.close()


async def test_the_clients_deadline_bounds_the_reading(door: FrontDoor) -> None:
    reader, writer = await connect(door)
    writer.write(request(door, b'{"model": "mock", ', length=1000, headers="x-tierline-deadline-ms: 50\r\n"))
    status, headers, body = answer(await reader.read())
    assert (status, body["error"]["code"], headers["connection"]) == (408, "request_timeout", "close")
    assert "x-tierline-deadline-ms" in body["error"]["message"]
    writer.close()


async def test_without_a_key_no_body_is_waited_for(door: FrontDoor) -> None:
    reader, writer = await connect(door)
    writer.write(request(door, b"", length=1000).replace(b"Bearer tl-", b"Bearer xx-"))
    assert (await reader.readline()).split()[1] == b"401"
    later(door, 31)
    assert b"missing" not in await reader.read()  # ended by the server
    writer.close()


async def test_a_refusal_at_the_edge_looks_like_any_other(door: FrontDoor) -> None:
    reader, writer = await connect(door)
    writer.write(request(door, b"", headers="x: " + "y" * 100_000 + "\r\n"))
    status, headers, body = answer(await reader.read())
    assert (status, body["error"]["code"]) == (431, "request_head_too_large")
    assert body["error"]["request_id"] == headers["x-request-id"]
    assert set(body["error"]) == {"message", "type", "param", "code", "request_id"}
    writer.close()


async def test_the_description_of_the_api_repeats_no_name_that_a_client_gives(door: FrontDoor) -> None:
    response = await door.client.get("/openapi.json", headers={"host": "evil.example", "x-forwarded-proto": "https"})
    assert response.json()["servers"] == [{"url": "/"}]
    assert "evil.example" not in response.text


# -- slow readers ------------------------------------------------------------------------------------------------------


async def test_a_reader_that_stops_holds_the_backend_back_and_is_ended(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=200000,pad=20000"  # 4 GB, if somebody took it
    _, writer = await connect(door, receive_buffer=4096)
    writer.transport.pause_reading()
    body = json.dumps({"model": "mock", "messages": MESSAGES, "stream": True}).encode()
    writer.write(request(door, body))
    await eventually(lambda: any(one.flow.write_paused for one in door.server.connections()))
    await eventually(lambda: any(not one.writable.is_set() for one in upstream.connections))
    [connection] = [one for one in door.server.connections() if one.is_busy()]
    assert connection.transport.get_write_buffer_size() < 200_000
    assert upstream.records[-1].events < 2000, "the rest is in the kernel's buffers"
    assert await in_flight(door) == 1
    later(door, 0)
    later(door, 59)
    assert upstream.records[-1].outcome == "running"
    later(door, 61)
    await upstream.until(lambda: upstream.records[-1].outcome == "client-gone")
    await eventually(lambda: door.services.limiter.open_holds == 0)
    [row] = await door.rows()
    assert row["outcome"] == "cancelled"
    assert row["output_tokens"] > 0
    assert await in_flight(door) == 0
    writer.close()


async def test_each_event_of_a_stream_is_one_write(door: FrontDoor, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=20,piece=7"  # the backend's pieces are not the client's
    reader, writer = await connect(door)
    body = {"model": "mock", "messages": MESSAGES, "stream": True, "stream_options": {"include_usage": True}}
    writer.write(request(door, json.dumps(body).encode(), headers="connection: close\r\n"))
    rest = (await reader.read()).split(b"\r\n\r\n", 1)[1]
    chunks = []
    while rest:
        size, rest = rest.split(b"\r\n", 1)
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert chunks.pop() == b"", "the last chunk"
    assert chunks[-1] == b"data: [DONE]\n\n"
    assert len(chunks) == 1 + 20 + 1 + 1 + 1  # role, contents, finish reason, usage, [DONE]
    for chunk in chunks:
        assert chunk.startswith(b"data: ")
        assert chunk.count(b"\n\n") == 1
        assert chunk.endswith(b"\n\n")
    writer.close()


async def test_a_reader_that_stops_cannot_keep_the_books_open(tmp_path: Path, upstream: MockUpstream) -> None:
    upstream.override = "answer,chunks=200000,pad=20000"
    document = configuration({"up": upstream})
    document["server"]["drain_seconds"] = 0.1
    async with front_door(tmp_path, document) as door:
        _, writer = await connect(door, receive_buffer=4096)
        writer.transport.pause_reading()
        body = json.dumps({"model": "mock", "messages": MESSAGES, "stream": True}).encode()
        writer.write(request(door, body))
        await eventually(lambda: any(one.flow.write_paused for one in door.server.connections()))
    writer.close()
    async with front_door(tmp_path, document) as door:
        [row] = await door.rows()
        assert (row["outcome"], row["output_tokens"] > 0) == ("cancelled", True)


# -- stopping ----------------------------------------------------------------------------------------------------------


async def test_a_stream_that_outlives_the_drain_ends_with_an_error_event(
    tmp_path: Path, upstream: MockUpstream, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    document = configuration({"up": upstream})
    document["server"]["drain_seconds"] = 0.1
    upstream.override = "stall,after=3"
    async with front_door(tmp_path, document) as door:
        reader, writer = await connect(door)
        body = json.dumps({"model": "mock", "messages": MESSAGES, "stream": True}).encode()
        writer.write(request(door, body))
        await upstream.until(lambda: bool(upstream.records) and upstream.records[-1].events > 2)
        door.server.should_exit = True
        received = await reader.read()
        assert b"shutting_down" in received
        assert b"[DONE]" not in received
        assert received.endswith(b"0\r\n\r\n")
        writer.close()
    finished = [record for record in caplog.records if record.message == "request finished"]
    assert [record.fields["error"] for record in finished] == ["shutting_down"]  # type: ignore[attr-defined]


@asynccontextmanager
async def gateway_process(
    root: Path, upstream: MockUpstream, *, policy: str = POLICY, **server: float
) -> AsyncIterator[tuple[Any, str]]:
    """`python -m gateway`, ready, and its address. What it logs must hold no traceback."""
    port = unused_port()
    document = configuration({"up": upstream})
    document["server"] = {"port": port, **server}
    (root / "policies").mkdir(exist_ok=True)
    (root / "policies" / "default.yaml").write_text(policy)
    (root / "tierline.yaml").write_text(yaml.safe_dump(document))
    command = [sys.executable, "-m", "gateway", "--config", str(root / "tierline.yaml")]
    with (root / "log").open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), httpx.AsyncClient(base_url=url) as client:
            while True:
                assert process.returncode is None, (root / "log").read_text()
                with contextlib.suppress(httpx.TransportError):
                    if (await client.get("/health/ready")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
        yield process, url
        await asyncio.wait_for(process.wait(), 60)
        assert "Traceback" not in (root / "log").read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_a_signal_makes_it_not_ready_first_and_a_second_one_ends_it(
    tmp_path: Path, upstream: MockUpstream
) -> None:
    times = {"shutdown_delay_seconds": 3600, "drain_seconds": 3600}
    async with (
        gateway_process(tmp_path, upstream, **times) as (process, url),
        httpx.AsyncClient(base_url=url) as client,
    ):
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            while (response := await client.get("/health/ready")).status_code == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert response.status_code == 503
        assert (response.json()["reasons"], response.headers["connection"]) == (["draining"], "close")
        assert (await client.get("/health/live")).status_code == 200
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 1


async def test_an_interrupt_stops_it_cleanly(tmp_path: Path, upstream: MockUpstream) -> None:
    async with gateway_process(tmp_path, upstream) as (process, _):
        process.send_signal(signal.SIGINT)
    assert process.returncode == 0
