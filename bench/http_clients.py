"""What the HTTP client library costs: CPU time per request and per streamed event, for each client that we could use.

One process per client sends the same bytes to the mock upstream, 1, 16 and 64 requests at a time; the figure is that
process's own CPU time (user and system), so that a busy machine disturbs it little. Nothing parses the answers: this is
the price of moving bytes. `tierline` is `backends/http.py`; `tierline dispatch` is the same through the whole of
`backends/`, which does parse: JSON out, every event decoded. `docs/decisions/001-http-client.md` records the choice.

    python -m bench.http_clients [--runs 3] [--requests 2000]
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from bench.report import Row, report

CLIENTS = ("tierline", "tierline dispatch", "aiohttp", "httpx2", "httpx")
CONNECTIONS = (1, 16, 64)
PLAIN = "mock"
STREAM = "mock,chunks=32,interval_ms=5"
MESSAGES = [
    {"role": "system", "content": "You answer briefly."},
    {"role": "user", "content": "Name three rivers of Europe and the countries they flow through."},
]

# Sends one body and returns how many events (blank lines) the answer held; the second function closes the client.
Send = Callable[[bytes], Awaitable[int]]
Close = Callable[[], Awaitable[None]]


def _tierline(base_url: str) -> tuple[Send, Close]:
    from backends.http import HttpClient, Origin

    client, origin = HttpClient(), Origin(base_url)
    head = (
        f"POST {origin.path}/chat/completions HTTP/1.1\r\nhost: {origin.authority}\r\n"
        "content-type: application/json\r\nauthorization: Bearer upstream\r\naccept: */*\r\ncontent-length: "
    ).encode()

    async def send(body: bytes) -> int:
        request = head + b"%d\r\n\r\n" % len(body) + body
        exchange = await client.send(origin, request, connect_s=5, deadline=time.monotonic() + 60)
        events = 0
        while piece := await exchange.read():
            events += piece.count(b"\n\n")
        return events

    return send, client.aclose


def _dispatch(base_url: str) -> tuple[Send, Close]:
    from backends.dispatch import Attempt, Call, Candidate, Dispatcher
    from backends.http import HttpClient
    from backends.pool import Pool

    class Silent:
        def attempt_started(self, attempt: Attempt) -> None:
            pass

        def attempt_ended(self, attempt: Attempt) -> None:
            pass

        def attempt_cut(self, attempt: Attempt) -> None:
            pass

    client, observer = HttpClient(), Silent()
    dispatcher = Dispatcher({"mock": Pool("mock", [base_url], client=client, api_key="upstream")})

    async def send(body: bytes) -> int:
        payload = json.loads(body)
        call = Call(payload, "chat", payload["stream"], "request-1")
        candidate = Candidate("mock", "small", "mock", payload["model"])
        answer = await dispatcher.open(call, [candidate], observer)
        events = 0
        if call.stream:
            async for _ in answer.events:
                events += 1
        await answer.aclose()
        return events

    return send, client.aclose


def _aiohttp(base_url: str) -> tuple[Send, Close]:
    import aiohttp

    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_read=60),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
    )
    headers = {"content-type": "application/json", "authorization": "Bearer upstream"}

    async def send(body: bytes) -> int:
        events = 0
        async with session.post(base_url + "/chat/completions", data=body, headers=headers) as answer:
            async for piece in answer.content.iter_any():
                events += piece.count(b"\n\n")
        return events

    return send, session.close


def _httpx(base_url: str, name: str) -> tuple[Send, Close]:
    library: Any = importlib.import_module(name)  # httpx and httpx2 share one interface but no type
    client = library.AsyncClient(
        limits=library.Limits(max_connections=None, max_keepalive_connections=None), timeout=60, trust_env=False
    )
    headers = {"content-type": "application/json", "authorization": "Bearer upstream"}

    async def send(body: bytes) -> int:
        events = 0
        async with client.stream("POST", base_url + "/chat/completions", content=body, headers=headers) as answer:
            async for piece in answer.aiter_raw():
                events += piece.count(b"\n\n")
        return events

    return send, client.aclose


def _client(name: str, base_url: str) -> tuple[Send, Close]:
    if name.startswith("tierline"):
        return _tierline(base_url) if name == "tierline" else _dispatch(base_url)
    return _aiohttp(base_url) if name == "aiohttp" else _httpx(base_url, name)


async def _load(send: Send, model: str, connections: int, requests: int) -> tuple[float, float, int]:
    """CPU seconds, wall seconds and events of `requests` requests, `connections` at a time."""
    body = json.dumps({"model": model, "messages": MESSAGES, "max_tokens": 128, "stream": model != PLAIN}).encode()
    left, events = requests, 0

    async def one() -> None:
        nonlocal left, events
        while left > 0:
            left -= 1
            found = await send(body)
            events += found

    cpu, wall = time.process_time(), time.monotonic()
    await asyncio.gather(*(one() for _ in range(connections)))
    return time.process_time() - cpu, time.monotonic() - wall, events


async def _measure(name: str, base_url: str, runs: int, requests: int) -> list[list[Any]]:
    send, close = _client(name, base_url)
    results = []
    for connections in CONNECTIONS:
        streams = max(connections, min(requests, 64 * connections) // 32)
        await _load(send, PLAIN, connections, 4 * connections)
        for _ in range(runs):
            cpu, wall, _ = await _load(send, PLAIN, connections, requests)
            results.append(["cpu_per_request", f"connections={connections}", "us", cpu / requests * 1e6])
            results.append(["requests_per_second", f"connections={connections}", "1/s", requests / wall])
            cpu, wall, events = await _load(send, STREAM, connections, streams)
            results.append(["cpu_per_event", f"streams={connections}", "us", cpu / events * 1e6])
    await close()
    return results


def main() -> None:
    arguments = argparse.ArgumentParser(description="CPU time per request of HTTP client libraries")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--requests", type=int, default=2000, help="plain requests per run")
    arguments.add_argument("--client", nargs=2, metavar=("NAME", "URL"), help="measure one client in this process")
    given = arguments.parse_args()
    if given.client:
        name, url = given.client
        print(json.dumps(uvloop.run(_measure(name, url, given.runs, given.requests))))
        return
    mock = subprocess.Popen([sys.executable, "-m", "bench.mock_upstream"], stdout=subprocess.PIPE, text=True)
    try:
        assert mock.stdout is not None
        url = mock.stdout.readline().strip()
        rows = []
        for name in CLIENTS:
            if not name.startswith("tierline") and importlib.util.find_spec(name) is None:
                print(f"{name} is not installed, so it is left out", file=sys.stderr)
                continue
            command = [sys.executable, "-m", "bench.http_clients", "--client", name, url]
            command += ["--runs", str(given.runs), "--requests", str(given.requests)]
            values: dict[tuple[str, str, str], list[float]] = {}
            for metric, setting, unit, value in json.loads(subprocess.check_output(command)):
                values.setdefault((metric, setting, unit), []).append(value)
            rows += [Row.of(metric, name, setting, unit, found) for (metric, setting, unit), found in values.items()]
        report("http_clients", rows)
    finally:
        mock.terminate()
        mock.wait()


if __name__ == "__main__":
    main()
