"""A load generator for gateways: keep-alive connections as fast as Python can, latencies and event delays as figures.

It runs in a process of its own, pinned beside the mock upstream, so that a gateway has its core to itself. Plain
requests give a latency each; streams give the delay of each event since the mock sent it (the mock writes the time
into the content) and of the first of each stream. `bench/gateway.py` starts it and reads the JSON that it prints.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from typing import cast
from urllib.parse import urlsplit

import httptools
import uvloop

_STAMP = re.compile(rb"t=(\d+) ")


class Worker(asyncio.Protocol):
    """One connection: sends the request, reads the answer, sends it again, until the time is over."""

    def __init__(self, load: Load) -> None:
        self.load = load
        self.parser = httptools.HttpResponseParser(self)
        self.sent_ns = 0
        self.first = True
        self.body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.ask()

    def ask(self) -> None:
        self.sent_ns = time.monotonic_ns()
        if self.sent_ns >= self.load.until_ns:
            self.transport.close()
            return
        self.first, self.body = True, b""
        self.transport.write(self.load.request)

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        now = time.monotonic_ns()
        self.body = body
        for stamp in _STAMP.findall(body):
            delay = now - int(stamp)
            self.load.delays_ns.append(delay)
            if self.first:
                self.first = False
                self.load.first_delays_ns.append(delay)

    def on_message_complete(self) -> None:
        status = self.parser.get_status_code()
        load = self.load
        if status == 200 and (not load.stream or b"[DONE]" in self.body):
            load.latencies_ns.append(time.monotonic_ns() - self.sent_ns)
        else:
            load.errors += 1
            load.last_error = f"status {status}: {self.body[:300]!r}"
        self.ask()

    def connection_lost(self, exc: Exception | None) -> None:
        if time.monotonic_ns() < self.load.until_ns:
            self.load.errors += 1
            self.load.last_error = f"connection lost: {exc}"
        self.load.left -= 1
        if not self.load.left:
            self.load.finished.set()


class Load:
    """One run: `connections` at once for `seconds`."""

    def __init__(self, url: str, headers: list[str], body: bytes, connections: int, seconds: float) -> None:
        parts = urlsplit(url)
        head = (
            f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: {parts.netloc}\r\ncontent-type: application/json\r\n"
        )
        head += "".join(f"{header}\r\n" for header in headers) + f"content-length: {len(body)}\r\n\r\n"
        self.request = head.encode() + body
        self.stream = bool(json.loads(body).get("stream"))
        self.host, self.port = parts.hostname or "127.0.0.1", parts.port or 80
        self.left = self.connections = connections
        self.seconds = seconds
        self.until_ns = 0
        self.latencies_ns: list[int] = []
        self.delays_ns: list[int] = []
        self.first_delays_ns: list[int] = []
        self.errors = 0
        self.last_error = ""

    async def run(self) -> dict[str, object]:
        self.finished = asyncio.Event()
        loop = asyncio.get_running_loop()
        began = time.monotonic_ns()
        self.until_ns = began + int(self.seconds * 1e9)
        for _ in range(self.connections):
            await loop.create_connection(lambda: Worker(self), self.host, self.port)
        await self.finished.wait()
        wall_s = (time.monotonic_ns() - began) / 1e9
        return {
            "requests": len(self.latencies_ns),
            "events": len(self.delays_ns),
            "wall_s": wall_s,
            "errors": self.errors,
            "last_error": self.last_error,
            "latency_us": percentiles_us(self.latencies_ns),
            "delay_us": percentiles_us(self.delays_ns),
            "first_delay_us": percentiles_us(self.first_delays_ns),
        }


def percentiles_us(values_ns: list[int]) -> dict[str, float]:
    """p50 and p99 in microseconds, by nearest rank; 0 for no values."""
    ordered = sorted(values_ns) or [0]
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] / 1000 for q in (50, 99)}


def main() -> None:
    arguments = argparse.ArgumentParser(description="Send the same chat request again and again; print figures as JSON")
    arguments.add_argument("url", help="base URL, such as http://127.0.0.1:8080/v1")
    arguments.add_argument("--body", required=True, help="the JSON body")
    arguments.add_argument("--header", action="append", default=[], help="NAME: VALUE; may be repeated")
    arguments.add_argument("--connections", type=int, default=1)
    arguments.add_argument("--seconds", type=float, default=3.0)
    given = arguments.parse_args()
    load = Load(given.url, given.header, given.body.encode(), given.connections, given.seconds)
    print(json.dumps(uvloop.run(load.run())))


if __name__ == "__main__":
    main()
