"""The store's bounds: what is worth least goes first, and neither memory, the file nor the indexes grow beyond them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cache.storing import Clock, MakeEntry, MakeKey, MakeStore, exact, flush, near, unit


def test_what_was_never_asked_again_goes_first(
    make_store: MakeStore, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    store = make_store(max_entries=3)
    for name in "abc":
        store.put(make_key(name), make_entry(name, now=clock.now), unit(ord(name)))
    for name in "ac":
        store.used(near(store, make_key(name), unit(ord(name)), 1)[0].answer_id)
    flush(store)
    store.put(make_key("d"), make_entry("d", now=clock.now), unit(4))
    flush(store)
    assert [name for name in "abcd" if exact(store, make_key(name))] == ["a", "c", "d"]
    assert (store.size().evictions, store.size().vectors) == (1, 3)


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [
        ({"cost_nanousd": 10_000_000}, {"cost_nanousd": 1_000_000}, "first"),
        ({"cost_nanousd": 1_000_000}, {"cost_nanousd": 10_000_000}, "second"),
        ({"answer": b"x" * 5000}, {"answer": b"x" * 50}, "second"),
        ({"answer": b"x" * 50}, {"answer": b"x" * 5000}, "first"),
    ],
)
def test_an_answer_is_worth_what_it_saves_per_byte(
    make_store: MakeStore,
    clock: Clock,
    make_key: MakeKey,
    make_entry: MakeEntry,
    first: dict[str, Any],
    second: dict[str, Any],
    stays: str,
) -> None:
    store = make_store(max_entries=2)
    store.put(make_key("first"), make_entry("first", now=clock.now, **first), None)
    store.put(make_key("second"), make_entry("second", now=clock.now, **second), None)
    flush(store)
    store.put(make_key("third"), make_entry("third", now=clock.now, cost_nanousd=10**9), None)
    flush(store)
    assert exact(store, make_key("third")) is not None
    assert [name for name in ("first", "second") if exact(store, make_key(name))] == [stays]


def test_what_was_worth_much_once_does_not_stay_for_ever(
    make_store: MakeStore, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    store = make_store(max_entries=10)
    hot = (
        store.put(make_key("hot"), make_entry("hot", now=clock.now, ttl_s=1e9, cost_nanousd=50_000), None).answer_id
        or 0
    )
    for _ in range(3):
        store.used(hot)
    flush(store)
    lived = 0
    while exact(store, make_key("hot")) and lived < 1000:
        lived += 1
        store.put(make_key(str(lived)), make_entry(str(lived), now=clock.now, ttl_s=1e9, cost_nanousd=50_000), None)
    assert 10 < lived < 100


@pytest.mark.parametrize("on_disk", [False, True])
def test_bytes_are_bounded(
    make_store: MakeStore, clock: Clock, make_key: MakeKey, make_entry: MakeEntry, tmp_path: Path, on_disk: bool
) -> None:
    bound = 2_000_000
    folder = tmp_path if on_disk else None
    store = make_store(folder, max_entries=10**6, max_bytes=2 * bound, max_disk_bytes=bound)
    for i in range(600):
        entry = make_entry(str(i), b"x" * 10_000, now=clock.now)
        assert store.put(make_key(str(i)), entry, unit(i)).reason is None
        if i % 50 == 0:
            flush(store)
    flush(store)
    size = store.size()
    assert (size.disk_bytes if on_disk else size.bytes - 200_000) <= bound
    assert 100 < size.answers < 200
    assert store.size().evictions == 600 - size.answers
    found = near(store, make_key("0"), unit(599), 1)
    assert [one.question for one in found] == ["599"]
    if on_disk:
        assert (tmp_path / "answers.db").stat().st_size <= bound + 600 * 8192


def test_a_smaller_bound_shrinks_the_file(
    make_store: MakeStore, clock: Clock, make_key: MakeKey, make_entry: MakeEntry, tmp_path: Path
) -> None:
    store = make_store(tmp_path, max_entries=10**6)
    for i in range(400):
        store.put(make_key(str(i)), make_entry(str(i), b"x" * 10_000, now=clock.now), None)
    store.close()
    before = (tmp_path / "answers.db").stat().st_size
    store = make_store(tmp_path, max_entries=10**6, max_disk_bytes=1_000_000)
    for _ in range(8):
        flush(store)
    store.close()
    assert (tmp_path / "answers.db").stat().st_size <= 1_000_000 < before


def test_indexes_are_bounded_and_come_back(
    make_store: MakeStore, clock: Clock, make_key: MakeKey, make_entry: MakeEntry, tmp_path: Path
) -> None:
    """Beyond the bound, the partition that was not used for longest leaves memory, and is read again when asked."""
    store = make_store(tmp_path, max_bytes=100_000)
    for tenant in range(40):
        key = make_key("a", scope=f"team:{tenant}")
        store.put(key, make_entry("a", now=clock.now, id=str(tenant)), unit(tenant))
        flush(store)
        assert store.size().bytes <= 60_000
    assert store.size().places < 40
    for tenant in range(40):
        (found,) = near(store, make_key("b", scope=f"team:{tenant}"), unit(tenant))
        assert found.entry.id == str(tenant)
        assert found.cosine == pytest.approx(1.0, abs=1e-3)
