"""The benchmark of many streams: it counts what arrives however it is cut, and measures a gateway from end to end."""

from __future__ import annotations

import asyncio
import json
import resource
import sys

import pytest

from bench.mock_upstream import MockUpstream
from bench.mock_wire import OpenAIWire, Record
from bench.streams import Stream, affordable


class Transport(asyncio.Transport):
    closed = False

    def write(self, data: object) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("size", [1, 7, 64, 10_000])
async def test_events_are_counted_however_they_are_cut(size: int) -> None:
    wire, record = OpenAIWire(), Record("/", "mock", True, {}, b"", 0.0)
    sent = wire.start(record) + b"".join(wire.text(record, b"") for _ in range(20)) + wire.finish(record)
    stream = Stream(b"")
    stream.connection_made(Transport())
    for start in range(0, len(sent), size):
        stream.data_received(sent[start : start + size])
    assert (stream.contents, len(stream.delays_ns), stream.complete) == (20, 20, True)


async def test_one_that_breaks_off_is_not_complete() -> None:
    stream = Stream(b"")
    stream.connection_made(Transport())
    stream.data_received(OpenAIWire().text(Record("/", "mock", True, {}, b"", 0.0), b""))
    stream.connection_lost(None)
    assert stream.ended.is_set()
    assert (stream.contents, stream.complete) == (1, False)


async def test_the_mock_holds_the_last_content_back_until_it_is_told() -> None:
    mock = MockUpstream()
    await mock.start()
    loop = asyncio.get_running_loop()
    body = b'{"model": "mock,chunks=3,held=1", "stream": true}'
    request = b"POST /v1/chat/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    _, stream = await loop.create_connection(lambda: Stream(request), "127.0.0.1", mock.port)
    await stream.begun.wait()
    _, writer = await asyncio.open_connection("127.0.0.1", mock.port)
    while stream.contents < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    assert not stream.complete
    writer.write(b"GET /__mock/release HTTP/1.1\r\n\r\n")
    await stream.ended.wait()
    assert (stream.contents, stream.complete) == (3, True)
    writer.close()
    await mock.stop()


def test_no_more_streams_than_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, limits: tuple[int, int]) -> None:
        if limits[1] > 1000:
            raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda which: (500, 1000))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert affordable(200, 100) == 200
    assert affordable(10_000, 100) == (1000 - 300) // 2 - 100


@pytest.mark.slow
def test_a_gateway_is_measured(tmp_path, monkeypatch):
    from bench import report, streams

    monkeypatch.setattr(streams, "report", lambda name, rows: report.report(name, rows, tmp_path))
    monkeypatch.setattr(sys, "argv", ["streams", "--idle", "200", "--busy", "20", "--rounds", "2", "--rest", "1"])
    streams.main()
    rows = {(row["metric"], row["setting"]): row for row in json.loads((tmp_path / "streams.json").read_text())}
    assert rows["lost_events", "idle=200 busy=20"]["max"] == 0
    assert rows["unfinished_streams", "10 streams, prompts of 5 MB"]["max"] == 0
    assert rows["memory_per_stream", "idle=200"]["max"] > 0
