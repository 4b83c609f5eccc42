"""Thousands of streams on one gateway worker: memory and CPU of idle ones, lost events, slow readers, large prompts.

A mock upstream holds the last content of every idle stream back until it is told to go on, so all of them are open at
once. Beside them busy streams run. Every content that the mock sends must arrive, and every stream must end with
`[DONE]`: what does not is counted as lost. Then the same again, to see whether memory grows. The gateway has a core to
itself where there are two; it is the real one, with keys, limits, ledger and metrics, and the cache off.

    python -m bench.streams [--idle 10000] [--busy 1000] [--rounds 3]
    python -m bench.streams --soak 30        # the same for thirty minutes, at least
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import resource
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import psutil
import uvloop
import yaml

from bench.gateway import MESSAGES, PRICE, Target, free_port, gateway, process
from bench.load import percentiles_us
from bench.report import Row, report

IDLE_CHUNKS, BUSY_CHUNKS = 2, 50
MODELS = {
    "idle": f"mock,chunks={IDLE_CHUNKS},held=1",
    "busy": f"mock,chunks={BUSY_CHUNKS},interval_ms=100",
    "fast": "mock,chunks=200000,pad=20000",  # 4 GB, if somebody took it
    "plain": "mock",
}
FILES_BESIDE = 300  # open files of a process that are no streams
PROMPT_BYTES = 5_000_000
WRITE_TIMEOUT_S = 5.0
OPENING_AT_ONCE = 100
_STAMP = re.compile(rb"t=(\d+) ")


class Stream(asyncio.Protocol):
    """One streamed request: counts the contents that arrive; `begun` and `ended` are set once each."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.contents = 0
        self.last_content_ns = 0
        self.delays_ns: list[int] = []
        self.complete = False
        self.tail = b""
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.monotonic_ns()
        data = self.tail + data
        for stamp in (found := list(_STAMP.finditer(data))):
            self.delays_ns.append(now - int(stamp[1]))
        self.contents += len(found)
        done = b"[DONE]" in data
        # What may go on in the next piece: nothing that has been counted.
        self.tail = data[found[-1].end() if found else max(0, len(data) - 64) :][-64:]
        if found:
            self.begun.set()
        if done:
            self.complete = True
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.begun.set()
        self.ended.set()


class Crowd:
    """Opens streams of one kind against a gateway, a hundred at a time, and waits for them."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self.address = parts.hostname or "", parts.port or 80
        self._head = f"POST {parts.path}/chat/completions HTTP/1.1\r\nhost: bench\r\nconnection: close\r\n"
        self._head += "".join(f"{header}\r\n" for header in target.headers)

    def request(self, model: str, prompt: str | None = None) -> bytes:
        messages = MESSAGES if prompt is None else [{"role": "user", "content": prompt}]
        body = json.dumps({"model": model, "messages": messages, "stream": True, "max_tokens": 1000}).encode()
        return (self._head + f"content-length: {len(body)}\r\n\r\n").encode() + body

    async def open(self, request: bytes, number: int) -> list[Stream]:
        """So many streams, each with its first content there."""
        streams: list[Stream] = []
        loop = asyncio.get_running_loop()
        while len(streams) < number:
            batch = [Stream(request) for _ in range(min(OPENING_AT_ONCE, number - len(streams)))]
            await asyncio.gather(*(self._connect(loop, stream) for stream in batch))
            await asyncio.gather(*(stream.begun.wait() for stream in batch))
            streams += batch
        return streams

    async def _connect(self, loop: asyncio.AbstractEventLoop, stream: Stream) -> None:
        await loop.create_connection(lambda: stream, *self.address)


class Watched:
    """The gateway's process: its memory and its CPU time."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)

    def memory_mb(self) -> float:
        """Resident memory of its own, without pages of files: the journal is mapped, and as large as what it holds."""
        memory = self._process.memory_info()
        return float(memory.rss - memory.shared) / 1e6

    def cpu_s(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


class Figures:
    """Values by row, in the order in which they were first seen."""

    def __init__(self) -> None:
        self._values: dict[tuple[str, str, str], list[float]] = {}

    def note(self, metric: str, setting: str, unit: str, value: float) -> None:
        self._values.setdefault((metric, setting, unit), []).append(value)

    def of(self, metric: str, setting: str) -> list[float]:
        """The values so far."""
        return next((v for (name, where, _), v in self._values.items() if (name, where) == (metric, setting)), [])

    def rows(self) -> list[Row]:
        return [Row.of(metric, "tierline", setting, unit, v) for (metric, setting, unit), v in self._values.items()]


async def round_of(
    crowd: Crowd, watched: Watched, figures: Figures, upstream: str, idle: int, busy: int, rest_s: float
) -> None:
    """All idle streams open, then the busy ones beside them, then all of them to their end."""
    setting, both = f"idle={idle}", f"idle={idle} busy={busy}"
    before_mb = watched.memory_mb()
    began = time.monotonic()
    waiting = await crowd.open(crowd.request("idle"), idle)
    figures.note("open_time", setting, "s", time.monotonic() - began)
    await asyncio.sleep(2)
    figures.note("memory", f"{setting}, before", "MB", before_mb)
    figures.note("memory", f"{setting}, all open", "MB", watched.memory_mb())
    # Beyond what there was before the first round: what it took then, Python keeps for the next.
    first_mb = figures.of("memory", f"{setting}, before")[0]
    figures.note("memory_per_stream", setting, "kB", (watched.memory_mb() - first_mb) * 1000 / idle)
    cpu = watched.cpu_s()
    await asyncio.sleep(rest_s)
    cpu = watched.cpu_s() - cpu
    figures.note("cpu_of_idle_streams", setting, "% of a core", cpu / rest_s * 100)
    figures.note("cpu_per_idle_stream", setting, "us/s", cpu / rest_s / idle * 1e6)
    cpu = watched.cpu_s()
    running = await crowd.open(crowd.request("busy"), busy)
    await asyncio.gather(*(stream.ended.wait() for stream in running))
    delays = percentiles_us([delay for stream in running for delay in stream.delays_ns])
    figures.note("event_delay_p50", both, "ms", delays["p50"] / 1000)
    figures.note("event_delay_p99", both, "ms", delays["p99"] / 1000)
    figures.note("cpu_per_event", both, "us", (watched.cpu_s() - cpu) / max(1, busy * BUSY_CHUNKS) * 1e6)
    release(upstream)
    async with asyncio.timeout(300):
        await asyncio.gather(*(stream.ended.wait() for stream in waiting))
    lost = idle * IDLE_CHUNKS - sum(stream.contents for stream in waiting)
    lost += busy * BUSY_CHUNKS - sum(stream.contents for stream in running)
    figures.note("lost_events", both, "events", lost)
    figures.note("unfinished_streams", both, "streams", sum(not stream.complete for stream in (*waiting, *running)))
    await asyncio.sleep(3)
    figures.note("memory", f"{setting}, all ended", "MB", watched.memory_mb())


async def slow_reader(crowd: Crowd, watched: Watched, figures: Figures, database: Path) -> None:
    """A client that reads one byte a second of a stream that its upstream sends as fast as it can."""
    rows, before_mb, began, most_mb = cancelled(database), watched.memory_mb(), time.monotonic(), 0.0
    loop = asyncio.get_running_loop()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await loop.sock_connect(sock, crowd.address)
        await loop.sock_sendall(sock, crowd.request("fast"))
        with contextlib.suppress(ConnectionError):
            while cancelled(database) == rows and time.monotonic() - began < WRITE_TIMEOUT_S + 30:
                await loop.sock_recv(sock, 1)
                most_mb = max(most_mb, watched.memory_mb() - before_mb)
                await asyncio.sleep(1)
    figures.note("slow_reader_row_after", "1 byte/s, fast upstream, outcome=cancelled", "s", time.monotonic() - began)
    figures.note("slow_reader_memory", "1 byte/s, fast upstream", "MB", most_mb)
    if cancelled(database) == rows:
        raise RuntimeError("the stream of a client that reads one byte a second did not end")


async def large_prompts(crowd: Crowd, watched: Watched, figures: Figures, upstream: str) -> None:
    """Ten idle streams whose prompts have five megabytes each."""
    setting, number = "10 streams, prompts of 5 MB", 10
    request = crowd.request("idle", "river " * (PROMPT_BYTES // 6))
    before_mb, began = watched.memory_mb(), time.monotonic()
    streams = await crowd.open(request, number)
    figures.note("open_time", setting, "s", time.monotonic() - began)
    await asyncio.sleep(2)
    figures.note("memory_per_stream", setting, "kB", (watched.memory_mb() - before_mb) * 1000 / number)
    release(upstream)
    await asyncio.gather(*(stream.ended.wait() for stream in streams))
    figures.note("unfinished_streams", setting, "streams", sum(not stream.complete for stream in streams))


def release(upstream: str) -> None:
    """Let the mock send what it holds back."""
    with urllib.request.urlopen(upstream + "/__mock/release", timeout=30):
        pass


def cancelled(database: Path) -> int:
    """Ledger rows of streams that their client did not take to the end, each with an error that says so."""
    with contextlib.closing(sqlite3.connect(database)) as connection:
        query = "SELECT count(*) FROM ledger WHERE outcome = 'cancelled' AND error <> ''"
        return int(connection.execute(query).fetchone()[0])


def affordable(wanted: int, busy: int) -> int:
    """How many idle streams this machine allows the gateway beside `busy` ones: it has two open files for each."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = 2 * (wanted + busy) + FILES_BESIDE
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(hard, enough), max(hard, enough)))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return min(wanted, (hard - FILES_BESIDE) // 2 - busy)


@contextlib.contextmanager
def tierline(upstream: str, directory: Path) -> Iterator[Target]:
    """`tierline gateway` with everything on but the cache, in a data directory of its own."""
    import policies

    port = free_port()
    model = {"tier": "small", "backend": "mock", "price": yaml.safe_load(PRICE)}
    patient = {"first_token_s": 600, "between_tokens_s": 7200, "total_s": 7200}
    document = {
        "server": {"port": port, "write_timeout_seconds": WRITE_TIMEOUT_S, "log": {"level": "warning"}},
        "storage": {"data_dir": str(directory / "var")},
        "policies_dir": str(Path(policies.__file__).parent),
        "models": {
            name: {**model, "upstream_model": upstream_model, "context_length": 10_000_000}
            for name, upstream_model in MODELS.items()
        },
        "backends": {"mock": {"base_urls": [upstream + "/v1"], "max_outstanding": 100_000, "timeouts": patient}},
        "failover": {"total_s": 7200},
        "cache": {"enabled": False},
    }
    config = directory / "tierline.yaml"
    config.write_text(yaml.safe_dump(document), encoding="utf-8")
    create = [sys.executable, "-m", "gateway.cli", "keys", "create", "--config", str(config), "--json"]
    create += ["--rpm", "100000000", "--tpm", "2000000000", "--parallel", "100000", "--budget-usd", "1000000"]
    key = json.loads(subprocess.check_output(create, text=True))["key"]
    serve = [sys.executable, "-m", "gateway", "--config", str(config)]
    headers = [f"authorization: Bearer {key}"]
    with gateway("tierline", serve, f"http://127.0.0.1:{port}/v1", headers, {"plain": "plain"}) as target:
        yield target


async def measure(target: Target, upstream: str, directory: Path, idle: int, given: argparse.Namespace) -> list[Row]:
    assert target.pid is not None
    crowd, watched, figures = Crowd(target), Watched(target.pid), Figures()
    warm = await crowd.open(crowd.request("busy"), 50)
    await asyncio.gather(*(stream.ended.wait() for stream in warm))
    rounds, ends = 0, time.monotonic() + given.soak * 60
    while rounds < given.rounds or time.monotonic() < ends:
        await round_of(crowd, watched, figures, upstream, idle, given.busy, given.rest)
        rounds += 1
        print(f"round {rounds}: {watched.memory_mb():.0f} MB when all streams have ended", file=sys.stderr)
    await slow_reader(crowd, watched, figures, directory / "var" / "tierline.db")
    await large_prompts(crowd, watched, figures, upstream)
    ended = figures.of("memory", f"idle={idle}, all ended")
    if len(ended) > 1:
        figures.note(
            "memory_growth",
            f"after the first of {rounds} rounds, per round",
            "MB",
            (ended[-1] - ended[0]) / (rounds - 1),
        )
    return figures.rows()


def main() -> None:
    arguments = argparse.ArgumentParser(description="Thousands of streams at once through one gateway worker")
    arguments.add_argument("--idle", type=int, default=10_000, help="streams that wait for their last content")
    arguments.add_argument("--busy", type=int, default=1_000, help="streams beside them")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--rest", type=float, default=30.0, help="seconds in which only idle streams are open")
    arguments.add_argument("--soak", type=float, default=0.0, metavar="MINUTES", help="rounds for at least so long")
    given = arguments.parse_args()
    idle = affordable(given.idle, given.busy)
    if idle < given.idle:
        print(
            f"!! This machine allows too few open files for {given.idle} streams: measuring {idle} of them. "
            "Raise the hard limit (ulimit -Hn) for all.",
            file=sys.stderr,
        )
    cores = sorted(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as folder,
        process([sys.executable, "-m", "bench.mock_upstream"], len(cores) - 1, stdout=subprocess.PIPE) as mock,
    ):
        assert mock.stdout is not None
        upstream = mock.stdout.readline().strip().removesuffix("/v1")
        with tierline(upstream, Path(folder)) as target:
            os.sched_setaffinity(0, {cores[-1]})  # beside the mock, away from the gateway
            rows = uvloop.run(measure(target, upstream, Path(folder), idle, given))
    report("streams", rows)
    lost = sum(row.max for row in rows if row.metric in ("lost_events", "unfinished_streams"))
    if lost:
        sys.exit(f"{lost:.0f} events or streams were lost")


if __name__ == "__main__":
    main()
