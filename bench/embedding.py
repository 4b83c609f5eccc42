"""The embedding service: what a vector costs and is worth on each backend, and what a look-up adds to a request.

vectors    CPU time per text of each length, memory and start of a process, agreement of cosines with PyTorch's
decisions  hits and wrong hits on Banking77 and Clinc150 with the vectors of each backend
look-ups   through the socket and the gateway's client, with many entries in one partition
gateway    requests that do not use the cache, while others ask it what it has not seen

TIERLINE_DATA=FOLDER python -m bench.embedding [--parts vectors,decisions,look-ups,gateway] [--entries 50000]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil

from bench.cache import Remembering
from bench.embedding_gateway import measure_gateway
from bench.report import Row, report
from cache.client import CacheClient
from cache.embedding.embedder import BackendChoice, Embedder, choose
from cache.embedding.folder import MULTILINGUAL
from cache.embedding.probes import PROBES
from cache.entry import Entry
from cache.evaluation.stream import evaluate_stream
from cache.key import CacheKey, build_key
from cache.store.answers import Store
from cache.verifier.corpus import banking77, clinc150

MODEL = "all-MiniLM-L6-v2"
BACKENDS: tuple[BackendChoice, ...] = ("torch", "onnx", "onnx-int8")
LENGTHS = (10, 32, 50, 100, 200)
THRESHOLDS = (0.90, 0.95, 0.97)
PARTS = ("vectors", "decisions", "look-ups", "gateway")
WORDS = ["order", "card", "payment", "account", "street", "number", "window", "letter", "paper", "garden", "river"]
SCOPE = "team:bench"
START = """
import sys, time
import psutil
before = time.perf_counter()
from cache.embedding.embedder import Embedder
embedder = Embedder(sys.argv[1], backend=sys.argv[2])
embedder.embed(["ready"])
print(time.perf_counter() - before, psutil.Process().memory_info().rss / 2**20)
"""


def text_of(tokens: int, seed: int) -> str:
    """A text of that many tokens for MiniLM, the two special ones included: each word is one."""
    return " ".join(random.Random(seed).choices(WORDS, k=tokens - 2))


def measure_vectors(runs: int) -> Iterator[Row]:
    """CPU time, which other load on the machine disturbs less than the clock's."""
    wanted = np.empty(0)
    models: list[tuple[str, BackendChoice]] = [(MODEL, backend) for backend in BACKENDS]
    for name, backend in [*models, (MULTILINGUAL, "auto")]:
        system = backend if name == MODEL else name
        embedder = Embedder(name, backend=backend)
        for tokens, batch in [*((tokens, 1) for tokens in LENGTHS), (10, 8)]:
            texts = [text_of(tokens, seed) for seed in range(batch)]
            embedder.embed(texts)
            taken = []
            for _ in range(runs):
                before = time.process_time()
                for _ in range(10):
                    embedder.embed(texts)
                taken.append((time.process_time() - before) / 10 / batch * 1000)
            yield Row.of("cpu_per_text", system, f"{tokens} tokens, batch {batch}", "ms", taken)
        started = [_start(name, backend) for _ in range(runs)]
        yield Row.of("start", system, "model loaded", "s", [seconds for seconds, _ in started])
        yield Row.of("memory_rss", system, "model loaded", "MiB", [size for _, size in started])
        if name == MODEL:
            vectors = np.concatenate([embedder.embed([text]) for text in PROBES])
            cosines = vectors @ vectors.T
            wanted = cosines if backend == "torch" else wanted
            shift = float(np.abs(cosines - wanted).max())
            yield Row.of("cosine_shift", system, f"pairs of {len(PROBES)} texts", "", [shift])


def _start(name: str, backend: str) -> tuple[float, float]:
    printed = subprocess.check_output([sys.executable, "-c", START, name, backend], text=True)
    seconds, size = printed.split()[-2:]
    return float(seconds), float(size)


def measure_decisions(data: Path, runs: int, requests: int) -> Iterator[Row]:
    """The rule of thresholds on shuffled streams. PyTorch's vectors are those of `onnx` (see cosine_shift)."""
    choices: tuple[BackendChoice, ...] = ("onnx", "onnx-int8")
    embedders = {backend: Remembering(Embedder(MODEL, backend=backend)) for backend in choices}
    for name, stream in (("banking77", banking77(data)), ("clinc150", clinc150(data))):
        for threshold in THRESHOLDS:
            for backend, embedder in embedders.items():
                found = []
                for seed in range(runs):
                    shuffled = random.Random(seed).sample(stream, min(requests, len(stream)))
                    found.append(evaluate_stream(shuffled, embedder, threshold=threshold).summary)
                setting = f"{name} threshold={threshold:.2f}, {requests} requests"
                yield Row.of("hit_rate", backend, setting, "share", [one.hit_rate or 0.0 for one in found])
                yield Row.of("false_hit_rate", backend, setting, "share", [one.false_hit_rate or 0.0 for one in found])


def fill(folder: Path, entries: int) -> None:
    """Entries in one partition and context, with vectors scattered around those of texts."""
    embedder = Embedder(MODEL)
    centres = embedder.embed([text_of(20, seed) for seed in range(500)])
    noise = np.random.default_rng(0)
    store = Store(folder, choose(MODEL).fingerprint, max_entries=2 * entries, max_bytes=1 << 31)
    now = time.time()
    for i in range(entries):
        vector = centres[i % len(centres)] + noise.normal(0, 0.03, embedder.dimension)
        key = _key(f"What is written on page {i} of the book?")
        entry = Entry(str(i), b"x" * 600, "m", "small", 20, 100, 50_000, now, now + 1e6, key.text)
        store.put(key, entry, (vector / np.linalg.norm(vector)).astype(np.float32))
    store.close()


async def measure_lookups(socket: Path, process: psutil.Process, runs: int, entries: int, requests: int) -> list[Row]:
    """Questions that the cache has not seen: what a miss adds, which is the most that a semantic hit takes, too."""
    rows = []
    async with CacheClient(socket, timeout_ms=60_000) as client:
        if not await client.wait_ready(120) or client.state != "ready":
            raise RuntimeError("the cache process did not load its embedder")
        until = time.monotonic() + 60
        while (await client.stats()).vectors < entries and time.monotonic() < until:
            await client.lookup(_key("Which page is missing?"), "semantic", 0.95)  # loads the partition
            await asyncio.sleep(0.2)
        for tokens in LENGTHS:
            taken, spent = [], []
            for run in range(runs):
                keys = [_key(text_of(tokens, 1000 * run + i) + ".") for i in range(requests)]
                before = _cpu_s(process)
                taken.append(sorted([await _timed(client, key) for key in keys]))
                spent.append((_cpu_s(process) - before) / requests * 1000)
            setting = f"miss, {tokens + 1} tokens, {entries} entries, one at a time"
            rows.append(Row.of("lookup_cpu", "tierline", setting, "ms", spent))
            for share in (50, 95, 99):
                values = [one[round(share / 100 * (len(one) - 1))] for one in taken]
                rows.append(Row.of(f"lookup_p{share}", "tierline", setting, "ms", values))
        known = _key("What is written on page 7 of the book?")
        exact = sorted([await _timed(client, known) for _ in range(10 * requests)])
        rows.append(Row.of("lookup_p95", "tierline", "exact hit", "ms", [exact[round(0.95 * (len(exact) - 1))]]))
        gate = asyncio.Semaphore(32)

        async def one(key: CacheKey) -> None:
            async with gate:
                await client.lookup(key, "semantic", 0.95)

        rates = []
        for run in range(runs):
            keys = [_key(text_of(15, 10**6 + 1000 * run + i) + ".") for i in range(requests)]
            began = time.perf_counter()
            await asyncio.gather(*(one(key) for key in keys))
            rates.append(requests / (time.perf_counter() - began))
        rows.append(Row.of("lookups_per_second", "tierline", "miss, 16 tokens, 32 at a time", "1/s", rates))
    return rows


def _cpu_s(process: psutil.Process) -> float:
    """Of the cache process: what a look-up costs where other load on the machine makes it wait."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def _timed(client: CacheClient, key: CacheKey) -> float:
    began = time.perf_counter()
    await client.lookup(key, "semantic", 0.95)
    return (time.perf_counter() - began) * 1000


def _key(text: str) -> CacheKey:
    payload = {"model": "auto", "messages": [{"role": "user", "content": text}]}
    return build_key(payload, scope=SCOPE, model_group="auto")


def lookups(runs: int, entries: int, requests: int) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory) / "data"
        fill(folder, entries)
        socket = Path(directory) / "s"
        command = [sys.executable, "-m", "cache", "--socket", str(socket), "--data-dir", str(folder)]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
            try:
                yield from asyncio.run(measure_lookups(socket, psutil.Process(process.pid), runs, entries, requests))
            finally:
                process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=os.environ.get("TIERLINE_DATA"), help="or TIERLINE_DATA")
    parser.add_argument("--parts", default=",".join(PARTS), help="comma-separated; default: all")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--entries", type=int, default=50_000)
    parser.add_argument("--requests", type=int, default=200, help="look-ups of each length and run")
    parser.add_argument("--questions", type=int, default=5000, help="of each stream")
    options = parser.parse_args()
    parts = options.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    if "decisions" in parts and options.data is None:
        parser.error("name the folder of data sets with --data or TIERLINE_DATA")
    rows: list[Row] = []
    if "vectors" in parts:
        rows += measure_vectors(options.runs)
    if "decisions" in parts:
        rows += measure_decisions(options.data, options.runs, options.questions)
    if "look-ups" in parts:
        rows += lookups(options.runs, options.entries, options.requests)
    if "gateway" in parts:
        rows += measure_gateway(options.runs)
    report("embedding", rows)


if __name__ == "__main__":
    main()
