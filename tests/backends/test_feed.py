"""Listening to what replicas tell of their pages: what is believed, and that it ends when the feed is not whole."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from backends.endpoint import Endpoint
from backends.placement import feed as feed_module
from backends.placement.chain import chained
from backends.placement.feed import Feeds
from backends.placement.index import PrefixIndex
from backends.replica import Replica
from tests.gateway.front_door import eventually

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n"
CHAIN = chained([b"x" * 4000], b"", bytes(32), 1000)


def name(number: int) -> str:
    return f"{number:032x}"


def pages(numbers):
    return [(name(number), name(number - 1) if number else "") for number in numbers]


def snapshot(numbers, sequence=0, more=False, space="s"):
    data = {"space": space, "page_tokens": 16, "sequence": sequence, "pages": pages(numbers), "more": more}
    return b"event: snapshot\ndata: " + json.dumps(data).encode() + b"\n\n"


def change(after, sequence, stored=(), removed=()):
    data = {"after": after, "sequence": sequence, "removed": [name(n) for n in removed], "stored": pages(stored)}
    return b"event: change\ndata: " + json.dumps(data).encode() + b"\n\n"


class Engine:
    """A server that sends what it is told, and counts who comes."""

    def __init__(self) -> None:
        self.connections = 0
        self.to_send: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def handle(self, reader, writer) -> None:
        self.connections += 1
        await reader.readuntil(b"\r\n\r\n")
        while (piece := await self.to_send.get()) is not None:
            writer.write(piece)
            await writer.drain()


@contextlib.asynccontextmanager
async def listening(serve, client, monkeypatch):
    monkeypatch.setattr(feed_module, "BACK_OFF_S", 0.01)
    engine = Engine()
    origin = await serve(engine.handle)
    replica = Replica(Endpoint(f"http://127.0.0.1:{origin.port}/v1"))
    index = PrefixIndex(600.0, 1_000_000)
    feeds = Feeds([replica], index, client)
    feeds.start()
    try:
        yield engine, index, replica, feeds
    finally:
        engine.to_send.put_nowait(None)
        await feeds.aclose()


async def test_snapshots_in_parts_and_changes_are_followed(serve, client, monkeypatch):
    async with listening(serve, client, monkeypatch) as (engine, index, replica, feeds):
        for piece in (HEAD, snapshot(range(5), more=True), b": idle\n\n", snapshot(range(5, 10))):
            engine.to_send.put_nowait(piece)
        await eventually(lambda: index.pages == 10)
        assert feeds.listening == 1
        engine.to_send.put_nowait(change(0, 3, stored=range(10, 60), removed=[9]))
        await eventually(lambda: index.pages == 59)
        index.answered(CHAIN, replica, bytes.fromhex(name(59)))
        assert index.hits(CHAIN, 0.0) == {}, "a page before it is missing: nothing is known of how long it is"
        engine.to_send.put_nowait(change(3, 4, stored=[9]))
        await eventually(lambda: index.pages == 60)
        index.answered(CHAIN, replica, bytes.fromhex(name(59)))
        assert index.hits(CHAIN, 0.0)[replica] > 900
        engine.to_send.put_nowait(snapshot([], sequence=9, space="another"))
        await eventually(lambda: index.pages == 0)
        engine.to_send.put_nowait(None)
        engine.to_send.put_nowait(HEAD + snapshot(range(3), sequence=9, space="another"))
        await eventually(lambda: index.pages == 3)
        assert feeds.listening == 1


@pytest.mark.parametrize(
    "broken",
    [
        change(5, 6, stored=[1]),  # something is missing before it
        b"event: change\ndata: {}\n\n",
        b"event: snapshot\ndata: no json\n\n",
        change(0, 1).replace(b"[]", b'["no page"]', 1),
        None,  # the connection ends
    ],
)  # fmt: skip
async def test_a_feed_that_is_not_whole_is_begun_anew_with_nothing(serve, client, monkeypatch, broken):
    async with listening(serve, client, monkeypatch) as (engine, index, replica, _):
        engine.to_send.put_nowait(HEAD + snapshot(range(10)))
        await eventually(lambda: index.pages == 10)
        engine.to_send.put_nowait(broken)
        await eventually(lambda: index.pages == 0)
        if broken is not None:  # its handler still waits for more to send
            engine.to_send.put_nowait(None)
        await eventually(lambda: engine.connections == 2)
        engine.to_send.put_nowait(HEAD + snapshot(range(3)))
        await eventually(lambda: index.pages == 3)
        assert index.tells(replica)


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 2\r\n\r\nhi",
    ],
)
async def test_a_server_that_has_no_feed_is_left_alone(serve, client, answer, caplog):
    origin = await serve(answer)
    replica = Replica(Endpoint(f"http://127.0.0.1:{origin.port}/v1"))
    feeds = Feeds([replica], PrefixIndex(600.0, 1000), client)
    feeds.start()
    await eventually(lambda: "does not tell its pages: status 404" in caplog.text)
    assert feeds.listening == 0
    await feeds.aclose()


async def test_one_that_is_silent_for_too_long_counts_as_gone(serve, client, monkeypatch):
    monkeypatch.setattr(feed_module, "SILENCE_S", 0.2)
    async with listening(serve, client, monkeypatch) as (engine, index, _, _):
        engine.to_send.put_nowait(HEAD + snapshot(range(10)))
        await eventually(lambda: index.pages == 10)
        await eventually(lambda: index.pages == 0)
