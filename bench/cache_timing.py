"""What the speed of an answer tells about the cache: how well hits are told from misses, with and without jitter.

A whole gateway and cache process before a mock model that takes 200 to 600 ms, evenly spread. The observer sees one
answer and nothing but how long it took, knows both distributions, and guesses by the best threshold (of both kinds
equally many). `guessed_right` is 50 % where nothing is told; `caught` is the share of hits that are faster than every
miss, and so are certain.

    python -m bench.cache_timing [--requests 150]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import yaml

from bench.mock_upstream import MockUpstream
from bench.report import Row, report
from gateway import settings
from gateway.access.keys import create_key
from gateway.access.secret import load_secret
from gateway.app import App
from gateway.server import Server
from gateway.services import Services

FASTEST_MS, SLOWEST_MS = 200, 600
JITTERS_MS = (0, 100, 400, 800, 1600)
POLICY = "version: 1\nname: default\nowner: bench\nroutes: [{tier: small}]\ncache: {mode: exact}\n"
AT_ONCE = 16


async def measure(root: Path, jitter_ms: int, requests: int) -> tuple[list[float], list[float]]:
    """Milliseconds of as many hits and of as many misses, as a client sees them."""
    upstream = MockUpstream()
    await upstream.start()
    (root / "policies").mkdir()
    (root / "policies/default.yaml").write_text(POLICY)
    document = {
        "server": {"port": 0},
        "models": {"mock": {"tier": "small", "backend": "up"}},
        "backends": {"up": {"base_urls": [upstream.base_url]}},
        "cache": {"hit_jitter_ms": jitter_ms, "lookup_timeout_ms": 5000.0},
    }
    (root / "tierline.yaml").write_text(yaml.safe_dump(document))
    configured = settings.load(root / "tierline.yaml")
    app = App(lambda: Services.open(configured))
    server = Server(app, configured.server)
    serving = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    services = app.services
    assert services is not None
    assert services.cache is not None
    assert await services.cache.wait_connected(90)
    key = await create_key(services.database, load_secret(configured.storage.data_dir / "secret"), name="bench")
    port = server.servers[0].sockets[0].getsockname()[1]
    gate, order = asyncio.Semaphore(AT_ONCE), random.Random(1)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:

        async def ask(number: int) -> tuple[str, float]:
            delay = order.uniform(FASTEST_MS, SLOWEST_MS)
            body = {"model": "mock", "messages": [{"role": "user", "content": f"What is the number {number}?"}]}
            async with gate:
                upstream.override = f"answer,delay_ms={delay:.0f}"
                began = time.perf_counter()
                answer = await client.post(
                    "/v1/chat/completions", json=body, headers={"authorization": f"Bearer {key.token}"}
                )
            return answer.headers["x-tierline-cache"], (time.perf_counter() - began) * 1000

        seen = [*await asyncio.gather(*map(ask, range(requests))), *await asyncio.gather(*map(ask, range(requests)))]
    server.should_exit = True
    await serving
    await upstream.stop()
    return [ms for state, ms in seen if state == "exact"], [ms for state, ms in seen if state == "miss"]


def guessed_right(hits: list[float], misses: list[float]) -> float:
    """Of equally many hits and misses, how many the best threshold tells right, in per cent."""
    best = 0.5
    for threshold in sorted([*hits, *misses]):
        fast_hits = sum(ms <= threshold for ms in hits) / len(hits)
        fast_misses = sum(ms <= threshold for ms in misses) / len(misses)
        best = max(best, (fast_hits + 1 - fast_misses) / 2)
    return 100 * best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=150)
    requests = parser.parse_args().requests
    rows = []
    for jitter_ms in JITTERS_MS:
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            socket = root / "var/run/cache.sock"
            socket.parent.mkdir(parents=True)
            command = [sys.executable, "-m", "cache", "--socket", str(socket)]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            try:
                hits, misses = asyncio.run(measure(root, jitter_ms, requests))
            finally:
                process.terminate()
                process.wait()
        caught = 100 * sum(ms < min(misses) for ms in hits) / len(hits)
        setting = f"hit_jitter_ms={jitter_ms}, model {FASTEST_MS}-{SLOWEST_MS} ms"
        values = (("guessed_right", "%", guessed_right(hits, misses)), ("caught", "%", caught))
        rows += [Row.of(metric, "tierline", setting, unit, [value]) for metric, unit, value in values]
    report("cache_timing", rows)


if __name__ == "__main__":
    main()
