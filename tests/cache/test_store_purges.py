"""Purges of many answers: made in one small transaction, taken out of the file in pieces, whatever happens between."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.answers import Store
from cache.store.changes import Purge, Vector
from cache.store.purges import AT_ONCE

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]
MANY = 2 * AT_ONCE + 200
SECRET = "the very secret question number"


def unit(seed: int) -> Vector:
    vector = np.random.default_rng(seed).normal(size=16).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def opened(folder: Path | None) -> Store:
    return Store(folder, "f", max_entries=100_000, max_bytes=1 << 26)


def fill(store: Store, make_key: MakeKey, make_entry: MakeEntry, **fields: str) -> list[CacheKey]:
    keys = [make_key(f"{SECRET} {number}") for number in range(MANY)]
    for number, key in enumerate(keys):
        store.put(key, make_entry(key.text, key.text.encode(), **fields), unit(number))
    return keys


def erased(store: Store) -> None:
    deadline = time.monotonic() + 30
    while store.size().erasing:
        assert time.monotonic() < deadline
        time.sleep(0.002)


def nothing_is_readable(folder: Path) -> bool:
    return not any(SECRET.encode() in path.read_bytes() for path in folder.iterdir())


def in_file(folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(folder / "answers.db")) as database:
        tables = ("answers", "bodies", "questions", "vectors")
        counts = [database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]
        assert database.execute("SELECT count(*) FROM purges").fetchone() == (0,)
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert len(set(counts)) == 1, counts
    return int(counts[0])


@pytest.fixture(params=[True, False], ids=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = opened(tmp_path if request.param else None)
    yield made
    made.close()


async def test_many_are_forgotten_in_one_row_and_taken_out_in_pieces(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    store = opened(tmp_path)
    keys = fill(store, make_key, make_entry, policy="p")
    await store.flush()
    statements: list[str] = []
    store._writer._db.set_trace_callback(statements.append)
    assert await store.purge(Purge(policy="p")) == MANY
    assert (len(store), store.size().purged) == (0, MANY)
    assert all(store.get_exact(key) is None for key in keys)
    assert await store.nearest(keys[0], unit(0), 8) == []
    erased(store)
    store._writer._db.set_trace_callback(None)
    transactions: list[list[str]] = [[]]
    for statement in statements:
        transactions[-1].append(statement)
        if statement == "COMMIT":
            transactions.append([])
    deletes = [sum("DELETE FROM answers" in one for one in group) for group in transactions]
    assert deletes[:4] == [0, 1, 1, 1]  # 500 answers each
    assert not any(deletes[4:])
    store.close()
    assert in_file(tmp_path) == 0
    assert nothing_is_readable(tmp_path)


async def test_what_comes_after_a_purge_stays_and_nothing_counts_twice(
    store: Store, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    keys = fill(store, make_key, make_entry, policy="p", model="m")
    await store.flush()
    purging = asyncio.gather(store.purge(Purge(policy="p")), store.purge(Purge(model="m")), store.purge(Purge(tag="t")))
    await asyncio.sleep(0)  # all are made by now
    store.put(keys[3], make_entry("again", b"again", policy="p", model="m"), unit(3))
    assert list(await purging) == [MANY, 0, 0]
    for _ in range(2):  # while the rest is taken out, and afterwards
        assert [found.question for found in await store.nearest(keys[3], unit(3), 8)] == [keys[3].text]
        assert len(store) == 1
        erased(store)
    found = store.get_exact(keys[3])
    assert found is not None
    assert found.entry.answer == b"again"
    assert await store.purge(Purge(policy="p")) == 1


async def test_everything_is_forgotten_also_what_an_earlier_purge_has_left(
    store: Store, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    fill(store, make_key, make_entry, policy="p")
    other = make_key("of another policy")
    store.put(other, make_entry("other", policy="q"), unit(1))
    counts = await asyncio.gather(store.purge(Purge(policy="p")), store.purge(Purge()))
    assert list(counts) == [MANY, 1]
    assert (len(store), store.size().questions, store.size().erasing) == (0, 0, 0)
    assert store.get_exact(other) is None


_KILLED = """
import asyncio, os, sys, time
from pathlib import Path
from cache.entry import Entry
from cache.key import CacheKey
from cache.store.changes import Purge
from tests.cache.test_store_purges import MANY, SECRET, opened, unit

store = opened(Path(sys.argv[1]))
for number in range(MANY):
    text = f"{SECRET} {number}"
    entry = Entry(text, text.encode(), "m", "small", 1, 1, 1, time.time(), time.time() + 1e6, text, policy="p")
    store.put(CacheKey("team:a", "partition", "context", text, text), entry, unit(number))
asyncio.run(store.flush())
assert asyncio.run(store.purge(Purge(policy="p"))) == MANY
os._exit(9)
"""


def test_a_purge_outlasts_a_kill_and_is_finished_by_the_next_process(tmp_path: Path) -> None:
    assert subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], check=False).returncode == 9
    store = opened(tmp_path)
    assert len(store) == 0
    for number in range(MANY):
        text = f"{SECRET} {number}"
        assert store.get_exact(CacheKey("team:a", "partition", "context", text, text)) is None
    erased(store)
    store.close()
    assert in_file(tmp_path) == 0
    assert nothing_is_readable(tmp_path)
