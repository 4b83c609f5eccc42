"""What the cache's work costs the gateway's other traffic: the third part of `bench/embedding.py`.

A steady stream of questions that nobody asked before goes through a gateway, once with the cache (each is looked up by
meaning, missed and kept) and once around it. Beside it run requests that never use the cache, and these are measured:
what they lose between the two is the cache's doing. Nothing is pinned, as in `tierline up`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from bench.gateway import PRICE, free_port
from bench.report import Row

CONFIG = """\
version: 1
server: {{host: 127.0.0.1, port: {port}, log: {{level: warning}}}}
storage: {{data_dir: {folder}/var}}
policies_dir: {folder}/policies
models: {{mock: {{tier: small, backend: mock, price: {price}}}}}
backends: {{mock: {{base_urls: ["{upstream}"], max_outstanding: 1000}}}}
"""
POLICY = """\
version: 1
name: default
owner: bench
default: small
quality_target: 0.8
cache: {mode: semantic, ttl: 24h, share: team}
"""
ASKED_PER_S, MEASURED_PER_S, SECONDS = 50, 100, 8.0


def measure_gateway(runs: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        mock = stack.enter_context(_process([sys.executable, "-m", "bench.mock_upstream"], stdout=subprocess.PIPE))
        assert mock.stdout is not None
        port, folder = free_port(), Path(directory)
        config = folder / "tierline.yaml"
        (folder / "policies").mkdir()
        (folder / "policies" / "default.yaml").write_text(POLICY)
        upstream = mock.stdout.readline().strip()
        config.write_text(CONFIG.format(port=port, folder=folder, upstream=upstream, price=PRICE))
        cli = [sys.executable, "-c", "from gateway.cli import main; main()"]
        create = [
            *cli,
            "keys",
            "create",
            "--config",
            str(config),
            "--json",
            "--rpm",
            "100000000",
            "--tpm",
            "2000000000",
        ]
        key = json.loads(subprocess.check_output(create, text=True))["key"]
        stack.enter_context(_process([*cli, "cache", "--config", str(config)]))
        stack.enter_context(_process([sys.executable, "-m", "gateway", "--config", str(config)]))
        found: dict[str, list[tuple[float, float]]] = {"cache": [], "no cache": []}
        semantic = asyncio.run(_measure(f"http://127.0.0.1:{port}/v1/chat/completions", key, runs, found))
        for system, values in found.items():
            setting = f"{MEASURED_PER_S}/s beside {ASKED_PER_S} questions/s"
            yield Row.of("other_requests_p50", f"tierline, {system}", setting, "ms", [one for one, _ in values])
            yield Row.of("other_requests_p99", f"tierline, {system}", setting, "ms", [one for _, one in values])
        yield Row.of("question_p50", "tierline, cache", "a miss, whole request", "ms", semantic)


async def _measure(url: str, key: str, runs: int, found: dict[str, list[tuple[float, float]]]) -> list[float]:
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {key}"}, timeout=30) as client:
        await _wait(client, url)
        medians = []
        for run in range(runs + 1):  # the first warms up
            for system, temperature in (("cache", 0.0), ("no cache", 0.7)):
                others: list[float] = []
                asked: list[float] = []
                await asyncio.gather(
                    _send(client, url, ASKED_PER_S, temperature, f"{run}", asked),
                    _send(client, url, MEASURED_PER_S, 0.7, "other", others),
                )
                if run:
                    others.sort()
                    p99 = others[round(0.99 * (len(others) - 1))]
                    found[system].append((others[len(others) // 2], p99))
                    if system == "cache":
                        medians.append(sorted(asked)[len(asked) // 2])
        return medians


async def _wait(client: httpx.AsyncClient, url: str) -> None:
    """Until a question that the cache has not seen is a miss of the semantic cache."""
    until = time.monotonic() + 90
    while time.monotonic() < until:
        with contextlib.suppress(httpx.TransportError):
            answer = await client.post(url, json=_body(f"What is the name of star {time.monotonic():.0f}?", 0.0))
            if answer.headers.get("x-tierline-cache-reason") in ("no_entry", "below_threshold", "numbers"):
                return
        await asyncio.sleep(0.5)
    raise RuntimeError("the gateway and its cache did not get ready")


async def _send(
    client: httpx.AsyncClient, url: str, per_s: float, temperature: float, name: str, taken: list[float]
) -> None:
    """Requests at a steady rate, however long their answers take; milliseconds of each into `taken`."""

    async def one(i: int) -> None:
        began = time.perf_counter()
        text = f"Which part of machine {name} {i} should a mechanic look at first when it stops in the middle of work?"
        answer = await client.post(url, json=_body(text, temperature))
        answer.raise_for_status()
        taken.append((time.perf_counter() - began) * 1000)

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for i in range(int(per_s * SECONDS)):
            await asyncio.sleep(max(0.0, began + i / per_s - time.perf_counter()))
            group.create_task(one(i))


def _body(text: str, temperature: float) -> dict[str, object]:
    return {"model": "mock", "temperature": temperature, "messages": [{"role": "user", "content": text}]}


@contextlib.contextmanager
def _process(command: list[str], stdout: int | None = None) -> Iterator[subprocess.Popen[str]]:
    started = subprocess.Popen(command, text=True, stdout=stdout, stderr=subprocess.DEVNULL)
    try:
        yield started
    finally:
        started.terminate()
        started.wait(20)
        if started.stdout is not None:
            started.stdout.close()
