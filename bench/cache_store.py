"""The store of the cache with many answers: how fast it opens, finds, takes in and gives up, and what memory it takes.

One partition has 50,000 answers, the others ten each. Vectors lie in groups as those of questions do (cosine about 0.7
within a group); an answer has 600 bytes. Beside the index, FAISS's plain search of the same vectors (IndexFlatIP).

    python -m bench.cache_store [--entries 1000000] [--large 50000] [--key] [--folder FOLDER]

With `--key` everything is encrypted. A folder that holds such a store from an earlier run is used as it is; without one
the large partition is purged at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import faiss
import numpy as np
import psutil

from bench.report import Row, report
from cache.entry import Entry
from cache.key import CacheKey
from cache.store.answers import Store
from cache.store.changes import Purge, Vector
from cache.store.index import VectorIndex

DIMENSION = 384
SMALL = 10  # answers of each small partition
ANSWER = b"x" * 600
PEER = "FAISS, searched whole"


def key_of(number: int, large: int) -> CacheKey:
    tenant = 0 if number < large else 1 + (number - large) // SMALL
    name = hashlib.sha256(b"%d" % tenant).hexdigest()
    exact = hashlib.sha256(b"question %d" % number).hexdigest()
    return CacheKey(f"team:{tenant}", name, name[::-1], f"What is the answer to question number {number}?", exact)


def vectors_of(first: int, count: int) -> Vector:
    """The vectors of questions `first` and on, [count, dimension]; the same for the same numbers."""
    topics = np.random.default_rng(0).normal(size=(1000, DIMENSION))
    topics /= np.linalg.norm(topics, axis=1, keepdims=True)
    random = np.random.default_rng(first + 1)
    vectors = topics[random.integers(0, len(topics), count)]
    vectors = vectors + random.normal(size=(count, DIMENSION)) * (0.65 / np.sqrt(DIMENSION))
    return np.asarray(vectors / np.linalg.norm(vectors, axis=1, keepdims=True), dtype=np.float32)


def opened(folder: Path, options: argparse.Namespace) -> Store:
    return Store(
        folder,
        "bench",
        max_entries=2 * options.entries,
        max_bytes=512 * 1024 * 1024,
        max_disk_bytes=1 << 40,
        keys=[b"k" * 32] if options.key else (),
    )


async def fill(store: Store, options: argparse.Namespace) -> float:
    """Put what is missing; returns seconds per answer."""
    chunk = 5000
    begun, before = time.perf_counter(), len(store)
    for first in range(before, options.entries, chunk):
        now = time.time()
        for number, vector in enumerate(vectors_of(first, min(chunk, options.entries - first)), first):
            key = key_of(number, options.large)
            entry = Entry(f"id {number}", ANSWER, "model", "small", 20, 100, 50_000, now, now + 1e6, key.text)
            store.put(key, entry, vector, "key:1")
        await store.flush()
    put: int = options.entries - before
    return (time.perf_counter() - begun) / max(1, put)


async def timed(work: Callable[[int], Awaitable[object]], numbers: list[int]) -> list[float]:
    """Milliseconds of each."""
    taken = []
    for number in numbers:
        begun = time.perf_counter()
        await work(number)
        taken.append((time.perf_counter() - begun) * 1000)
    return sorted(taken)


def percentiles(metric: str, setting: str, taken: list[float]) -> list[Row]:
    return [
        Row.of(f"{metric}_p{share}", "tierline", setting, "ms", [taken[round(share / 100 * (len(taken) - 1))]])
        for share in (50, 95, 99)
    ]


def rss_mib() -> float:
    used = int(psutil.Process().memory_info().rss)
    return used / 2**20


async def measure(folder: Path, options: argparse.Namespace) -> list[Row]:
    store = opened(folder, options)
    size = f"{options.entries:,} answers" + (", encrypted" if options.key else "")
    missing = options.entries - len(store)
    per_answer = await fill(store, options)
    rows = [Row.of("insertion", "tierline", size, "ms", [per_answer * 1000])] if missing > 0 else []
    store.close()

    before, begun = rss_mib(), time.perf_counter()
    store = opened(folder, options)
    rows.append(Row.of("opening", "tierline", size, "s", [time.perf_counter() - begun]))
    rows.append(Row.of("file", "tierline", size, "MiB", [store.size().disk_bytes / 2**20]))
    random = np.random.default_rng(7)

    async def exact(number: int) -> None:
        assert store.get_exact(key_of(number, options.large)) is not None

    async def unknown(number: int) -> None:
        assert store.get_exact(key_of(number + 10 * options.entries, options.large)) is None

    numbers = random.integers(0, options.entries, 3000).tolist()
    rows += percentiles("exact_look_up", f"{size}, each asked for the first time", await timed(exact, numbers))
    rows += percentiles("exact_miss", size, await timed(unknown, numbers))
    rows.append(Row.of("memory_added", "tierline", f"{size}, opened, 3,000 looked up", "MiB", [rss_mib() - before]))

    queries = vectors_of(10**9, 2000)

    async def small(number: int) -> None:
        assert await store.nearest(key_of(number, options.large), queries[number % len(queries)], 8)

    numbers = (options.large + random.integers(0, options.entries - options.large, 500)).tolist()
    rows += percentiles("first_search", "a partition of 10, read from the file", await timed(small, numbers))

    async def large(number: int) -> None:
        found = await store.nearest(key_of(0, options.large), queries[number % len(queries)], 8)
        assert store.answer(found[0], key_of(0, options.large)) is not None
        assert len(found) == 8

    setting = f"a partition of {options.large:,}"
    (first,) = await timed(large, [0])
    rows.append(Row.of("first_search", "tierline", f"{setting}, read from the file", "ms", [first]))
    rows += percentiles("search", f"{setting}, its cells being made", await timed(large, list(range(200))))
    while store.size().loading:  # noqa: ASYNC110 - the thread that builds tells nobody
        await asyncio.sleep(0.05)
    rows += percentiles(
        "search", f"{setting}, with the texts of eight and the answer of one", await timed(large, list(range(2000)))
    )
    rows.append(Row.of("memory_added", "tierline", f"{size}, {setting} in use", "MiB", [rss_mib() - before]))

    async def put(number: int) -> None:
        now = time.time()
        key = key_of(number, options.large)
        entry = Entry(f"id {number}", ANSWER, "model", "small", 20, 100, 50_000, now, now + 1e6, key.text)
        store.put(key, entry, queries[number % len(queries)], "key:1")

    rows += percentiles(
        "insertion_in_place_of", f"{setting}, what the event loop waits", await timed(put, list(range(2000)))
    )
    await store.flush()
    if options.folder is None:  # one that is kept is to be as it was
        rows += await measure_purge(store, setting)
    store.close()
    return rows


async def measure_purge(store: Store, setting: str) -> list[Row]:
    """Forget the large partition: how long it takes, when it is out of the file, and how look-ups fare meanwhile."""
    scope, others = key_of(0, 1).scope, [key_of(number, 0) for number in range(100, 300)]
    waits: list[float] = []
    begun = time.perf_counter()
    removed = await store.purge(Purge(scope=scope))
    returned = time.perf_counter() - begun
    while store.size().erasing:
        asked = time.perf_counter()
        store.get_exact(others[len(waits) % len(others)])
        waits.append((time.perf_counter() - asked) * 1000)
        await asyncio.sleep(0.001)
    erased = time.perf_counter() - begun
    setting = f"{setting}, {removed:,} forgotten"
    return [
        Row.of("purge", "tierline", setting, "ms", [returned * 1000]),
        Row.of("erased_from_the_file", "tierline", setting, "s", [erased]),
        *percentiles("exact_look_up_meanwhile", setting, sorted(waits)),
    ]


def measure_index(count: int) -> list[Row]:
    """The index alone, beside a plain search, one thread: time, recall of the eight nearest, memory."""
    faiss.omp_set_num_threads(1)
    vectors, queries = vectors_of(0, count), vectors_of(10**9, 300)
    begun = time.perf_counter()
    index = VectorIndex.build(range(count), vectors)
    built = time.perf_counter() - begun
    plain = faiss.IndexFlatIP(DIMENSION)
    plain.add(vectors)
    ours, theirs, hits = [], [], 0
    for query in queries:
        begun = time.perf_counter()
        found = index.search(query, 8)
        middle = time.perf_counter()
        _, rows = plain.search(query.reshape(1, -1), 8)
        theirs.append((time.perf_counter() - middle) * 1000)
        ours.append((middle - begun) * 1000)
        hits += len({id for id, _ in found} & set(rows[0].tolist()))
    setting = f"{count:,} vectors ({index.form})"
    return [
        Row.of("index_search_p50", "tierline", setting, "ms", [float(np.median(ours))]),
        Row.of("index_search_p50", PEER, setting, "ms", [float(np.median(theirs))]),
        Row.of("index_recall", "tierline", setting, "share", [hits / 8 / len(queries)]),
        Row.of("index_memory", "tierline", setting, "MiB", [index.size_bytes / 2**20]),
        Row.of("index_memory", PEER, setting, "MiB", [count * DIMENSION * 4 / 2**20]),
        Row.of("index_building", "tierline", setting, "s", [built]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=1_000_000)
    parser.add_argument("--large", type=int, default=50_000, help="answers of the one large partition")
    parser.add_argument("--key", action="store_true", help="encrypted")
    parser.add_argument("--folder", type=Path, help="keep the store here; default: a folder that is removed")
    options = parser.parse_args()
    rows = [row for count in (1_000, 10_000, 50_000, 100_000) for row in measure_index(count)]
    with tempfile.TemporaryDirectory() as scratch:
        rows += asyncio.run(measure(options.folder or Path(scratch), options))
    report("cache_store", rows)


if __name__ == "__main__":
    main()
