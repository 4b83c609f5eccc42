"""The store's file: restarts, kill -9, a full disk, damage, other embedders, schemas and keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.answers import Store
from cache.store.changes import Purge, Vector
from cache.store.tables import SCHEMA_VERSION
from tests.cache.storing import near

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]
OLD, NEW = b"o" * 32, b"n" * 32
SECRET = "the very secret question of somebody"


def unit(seed: int) -> Vector:
    vector = np.random.default_rng(seed).normal(size=384).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def opened(folder: Path, fingerprint: str = "f", **options: Any) -> Store:
    return Store(folder, fingerprint, max_entries=100_000, max_bytes=1 << 26, **options)


def answer(store: Store, key: CacheKey) -> bytes | None:
    found = store.get_exact(key)
    return None if found is None else found.entry.answer


def nearest(store: Store, key: CacheKey, vector: Vector) -> list[str]:
    return [found.question for found in asyncio.run(store.nearest(key, vector, 3))]


def filled(folder: Path, make_key: MakeKey, make_entry: MakeEntry, texts: list[str], **options: Any) -> None:
    store = opened(folder, **options)
    for seed, text in enumerate(texts):
        store.put(make_key(text), make_entry(text, text.encode() * 20), unit(seed))
    store.close()


def test_a_store_that_is_opened_again_has_everything(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    filled(tmp_path, make_key, make_entry, ["a", "b"])
    store = opened(tmp_path)
    assert store.size().places == 0  # nothing is read until it is asked for
    assert answer(store, make_key("a")) == b"a" * 20
    assert nearest(store, make_key("x"), unit(1)) == ["b", "a"]
    store.close()
    for name in ("answers.db", "answers.lock"):
        assert (tmp_path / name).stat().st_mode & 0o077 == 0


def test_two_processes_never_share_a_file(tmp_path: Path) -> None:
    store = opened(tmp_path)
    with pytest.raises(OSError, match="in use by another process"):
        opened(tmp_path)
    store.close()
    opened(tmp_path).close()


_WRITES_FOR_EVER = """
import sys, time, numpy as np
from pathlib import Path
from cache.entry import Entry
from cache.key import CacheKey
from cache.store.answers import Store
from tests.cache.test_store_file import killed_entry, killed_key, unit

store = Store(Path(sys.argv[1]), "f", max_entries=300, max_bytes=1 << 26)
print("writing", flush=True)
number = int(sys.argv[2])
while True:
    number += 1
    kept = store.put(killed_key(number), killed_entry(number), unit(number % 50))
    store.add_alias(killed_key(-number), kept.answer_id, unit(number % 50 + 50), str(number))
    if number % 3 == 0:
        store.forget(kept.answer_id)
    if number % 50 == 0:
        time.sleep(0.001)
"""


def killed_key(number: int) -> CacheKey:
    return CacheKey("team:1", "partition", "context", f"question {number}", f"exact {number}")


def killed_entry(number: int) -> Entry:
    now = time.time()
    text = f"question {number}"
    return Entry(f"id {number}", text.encode() * 200, "m", "small", 1, 1, 1000, now, now + 600, text)


def test_a_killed_process_leaves_whole_answers_only(tmp_path: Path) -> None:
    held = 0
    for attempt in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path), str(attempt * 1_000_000)],
            stdout=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"writing\n"
            time.sleep(random.Random(attempt).uniform(0.1, 0.4))  # anywhere in the middle of writing
            process.send_signal(signal.SIGKILL)
        with contextlib.closing(sqlite3.connect(tmp_path / "answers.db")) as database:
            assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            rows = database.execute("SELECT a.id FROM answers a LEFT JOIN bodies b ON a.id = b.id WHERE b.id IS NULL")
            assert rows.fetchall() == []
            counts = [
                database.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in ("answers", "questions")
            ]
        store = opened(tmp_path)
        size = store.size()
        assert [size.answers, size.questions] == counts
        assert size.answers <= 300
        for found in near(store, killed_key(0), unit(7), 500):
            held += 1
            own = found.entry.question
            assert found.entry.answer == own.encode() * 200
            assert found.question in (own, own.replace("question ", "question -"))
        store.close()
    assert held > 100


_FULL_DISK = """
import asyncio, resource, sys, time
from pathlib import Path
from cache.store.answers import Store
from cache.store.changes import Purge
from tests.cache.test_store_file import killed_entry, killed_key, unit

folder = Path(sys.argv[1])
store = Store(folder, "f", max_entries=100_000, max_bytes=1 << 26)
for number in range(100):
    store.put(killed_key(number), killed_entry(number), unit(number))
asyncio.run(store.flush())
resource.setrlimit(resource.RLIMIT_FSIZE, (1, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for number in range(100, 200):
    store.put(killed_key(number), killed_entry(number), unit(number))
try:
    asyncio.run(store.flush())
    raise SystemExit("the disk was to be full")
except OSError:
    pass
try:
    asyncio.run(store.purge(Purge(entry="id 50")))
    raise SystemExit("the disk was to be full")
except OSError:
    pass
for number in range(200):  # from the file, and from memory; but not what was purged
    found = store.get_exact(killed_key(number))
    assert (found is None) == (number == 50), number
    assert found is None or found.entry.answer == b"question %d" % number * 200
assert asyncio.run(store.nearest(killed_key(0), unit(150), 1))[0].question == "question 150"
size = store.size()
assert size.error and size.unwritten >= 100, size
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
deadline = time.monotonic() + 30
while store.size().error:
    assert time.monotonic() < deadline
    time.sleep(0.02)
asyncio.run(store.flush())
assert store.size().unwritten == 0
store.close()
store = Store(folder, "f", max_entries=100_000, max_bytes=1 << 26)
assert len(store) == 199, len(store)
assert store.get_exact(killed_key(150)).entry.answer == b"question 150" * 200
assert store.get_exact(killed_key(50)) is None
"""


def test_a_full_disk_costs_no_answer(tmp_path: Path) -> None:
    """Writing anything fails, as on a full disk; what is there is served, new answers from memory, and kept later."""
    done = subprocess.run(
        [sys.executable, "-c", _FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be written") == 1
    assert done.stderr.count("is written again") == 1


def test_what_waits_for_a_full_disk_is_bounded(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    store = Store(tmp_path, "f", max_entries=100_000, max_bytes=8_000_000)
    with contextlib.closing(sqlite3.connect(tmp_path / "answers.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody else can write
        for number in range(2000):
            store.put(make_key(f"q {number}"), make_entry(f"q {number}", b"x" * 5000), None)
        assert store.size().bytes < 4_000_000
        assert answer(store, make_key("q 1999")) is not None
        assert answer(store, make_key("q 500")) is None  # a batch that is being tried keeps its place
        assert store.size().evictions > 1000
        other.execute("ROLLBACK")
    asyncio.run(store.flush())
    assert answer(store, make_key("q 1999")) is not None
    store.close()


@pytest.mark.parametrize("where", ["whole", "header", "middle"])
def test_a_damaged_file_is_moved_aside(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry, where: str, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path, make_key, make_entry, [str(i) for i in range(200)])
    path = tmp_path / "answers.db"
    data = bytearray(path.read_bytes())
    span = {"whole": slice(0, len(data)), "header": slice(0, 100), "middle": slice(8192, len(data))}[where]
    data[span] = b"\xa5" * len(data[span])
    path.write_bytes(data)
    store = opened(tmp_path)
    deadline = time.monotonic() + 20
    while not list(tmp_path.glob("answers.damaged-*.db")):  # at once, or when it is first read
        assert answer(store, make_key("1")) is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    store.put(make_key("new"), make_entry("new", b"new"), unit(1))
    asyncio.run(store.flush())
    assert answer(store, make_key("new")) == b"new"
    assert nearest(store, make_key("x"), unit(1)) == ["new"]
    assert caplog.text.count("is damaged") == 1
    store.close()
    store = opened(tmp_path)
    assert len(store) == 1
    store.close()


@pytest.mark.parametrize("keys", [(), (OLD,)])
def test_no_damage_makes_a_wrong_answer(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry, keys: tuple[bytes, ...]
) -> None:
    """Bytes change at random: what is found then is whole, or nothing is found."""
    texts = [f"text {i} " for i in range(60)]
    filled(tmp_path / "first", make_key, make_entry, texts, keys=keys)
    whole = (tmp_path / "first" / "answers.db").read_bytes()
    lost = 0
    for attempt in range(12):
        chance = random.Random(attempt)
        folder = tmp_path / str(attempt)
        folder.mkdir()
        data = bytearray(whole)
        for _ in range(40):
            data[chance.randrange(100, len(data))] ^= 1 << chance.randrange(8)
        (folder / "answers.db").write_bytes(data)
        store = opened(folder, keys=keys)
        for text in texts:
            found = answer(store, make_key(text))
            lost += found is None
            assert found in (None, text.encode() * 20)
        for one in near(store, make_key("x"), unit(3), 10):
            assert one.entry.answer == one.question.encode() * 20
        store.close()
    assert lost > 0


def test_another_embedder_leaves_the_same_words_and_gets_vectors_of_its_own(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    filled(tmp_path, make_key, make_entry, ["a", "b"])
    store = opened(tmp_path, "another")
    assert (store.size().waiting_vectors, store.size().vectors) == (2, 0)
    assert answer(store, make_key("a")) == b"a" * 20
    assert nearest(store, make_key("x"), unit(0)) == []
    place, question_id, text = store.without_vector(1)[0]
    store.set_vector(place, question_id, unit(77))
    assert nearest(store, make_key("x"), unit(77)) == [text]
    store.close()
    store = opened(tmp_path, "another")
    assert store.size().waiting_vectors == 1
    assert nearest(store, make_key("x"), unit(77)) == [text]
    store.close()
    store = opened(tmp_path)  # and back: what was not embedded anew is still right
    assert store.size().waiting_vectors == 1
    assert len(nearest(store, make_key("x"), unit(0))) == 1
    store.close()


def test_answers_under_another_form_of_key_are_dropped(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with monkeypatch.context() as earlier:
        earlier.setattr("cache.store.disk.VERSION", "an earlier form")
        filled(tmp_path, make_key, make_entry, ["a"])
    store = opened(tmp_path)
    assert len(store) == 0
    assert "another form of key: starting empty" in caplog.text
    store.close()


@pytest.mark.parametrize("version", [1, 2, SCHEMA_VERSION + 1])
def test_a_file_of_another_schema_is_dropped_and_said_so(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "answers.db", isolation_level=None)) as database:
        database.execute("CREATE TABLE entries (exact TEXT PRIMARY KEY, entry BLOB)")
        database.execute("INSERT INTO entries VALUES ('x', x'00')")
        database.execute(f"PRAGMA user_version = {version}")
    filled(tmp_path, make_key, make_entry, ["a"])
    assert f"has schema {version}, and this program writes {SCHEMA_VERSION}: starting empty" in caplog.text
    store = opened(tmp_path)
    assert answer(store, make_key("a")) == b"a" * 20
    store.close()


@pytest.mark.parametrize("everything", [False, True])
def test_what_was_purged_is_nowhere_on_disk(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry, everything: bool
) -> None:
    filled(tmp_path, make_key, make_entry, [SECRET, "a", "b"])
    assert SECRET.encode() in everything_in(tmp_path)
    store = opened(tmp_path)
    purge = Purge() if everything else Purge(exact=make_key(SECRET).exact)
    assert asyncio.run(store.purge(purge)) == (3 if everything else 1)
    assert SECRET.encode() not in everything_in(tmp_path)
    store.close()


# Encryption.


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in folder.iterdir())


def test_nothing_can_be_read_without_the_key(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    key, vector = make_key(SECRET), unit(0).astype(np.float16).tobytes()
    filled(tmp_path / "plain", make_key, make_entry, [SECRET])
    filled(tmp_path / "sealed", make_key, make_entry, [SECRET], keys=[NEW])
    plain, sealed = everything_in(tmp_path / "plain"), everything_in(tmp_path / "sealed")
    for part in (SECRET.encode(), vector, key.exact.encode(), key.partition.encode(), key.context.encode()):
        assert part in plain
        assert part not in sealed
        assert bytes.fromhex(key.exact) not in sealed
    store = opened(tmp_path / "sealed", keys=[NEW])
    assert answer(store, key) == SECRET.encode() * 20
    assert nearest(store, key, unit(0)) == [SECRET]
    store.close()


def test_keys_are_changed_without_losing_answers(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    filled(tmp_path, make_key, make_entry, ["old"], keys=[OLD])
    filled(tmp_path, make_key, make_entry, ["new"], keys=[NEW, OLD])
    store = opened(tmp_path, keys=[NEW, OLD])
    assert (answer(store, make_key("old")), answer(store, make_key("new"))) == (b"old" * 20, b"new" * 20)
    store.close()
    store = opened(tmp_path, keys=[NEW])  # the old key is taken away: what it closed stays closed
    assert (answer(store, make_key("old")), answer(store, make_key("new"))) == (None, b"new" * 20)
    assert store.size().unreadable > 0
    store.close()


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ((OLD,), (NEW,), "not encrypted with any of the keys"),
        ((OLD,), (), "no key is configured"),
        ((), (NEW,), "not encrypted with any of the keys"),
    ],
)
def test_a_file_under_other_keys_is_dropped_and_said_so(
    tmp_path: Path,
    make_key: MakeKey,
    make_entry: MakeEntry,
    before: tuple[bytes, ...],
    after: tuple[bytes, ...],
    told: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    filled(tmp_path, make_key, make_entry, [SECRET], keys=before)
    store = opened(tmp_path, keys=after)
    assert len(store) == 0
    assert answer(store, make_key(SECRET)) is None
    assert caplog.text.count("starting empty") == 1
    assert told in caplog.text
    assert SECRET.encode() not in everything_in(tmp_path)
    store.put(make_key("a"), make_entry("a", b"1"), unit(1))
    asyncio.run(store.flush())
    store.close()
    store = opened(tmp_path, keys=after)
    assert answer(store, make_key("a")) == b"1"
    store.close()
