"""The store: isolation, absolute time limits, bounds, eviction, purging, and its file on disk."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entry import Entry
from cache.key import CacheKey, build_key
from cache.store.answers import MAX_ALIASES, MAX_ALIASES_OF_AUTHOR, Found, Purge, Store
from cache.store.disk import Disk
from cache.store.index import Vector

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]


def unit(seed: int) -> Vector:
    vector = np.random.default_rng(seed).normal(size=8).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def near(store: Store, key: CacheKey, vector: Vector, k: int = 3, ttl_s: float | None = None) -> list[Found]:
    return asyncio.run(store.nearest(key, vector, k, ttl_s=ttl_s))


def purge(store: Store, **conditions: object) -> int:
    return asyncio.run(store.purge(Purge(**conditions)))  # type: ignore[arg-type]


def exact(store: Store, key: CacheKey, ttl_s: float | None = None) -> Entry | None:
    found = store.get_exact(key, ttl_s=ttl_s)
    return None if found is None else found.entry


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def small(max_entries: int = 100, max_bytes: int = 1 << 20, disk: Disk | None = None) -> tuple[Store, Clock]:
    clock = Clock()
    return Store(max_entries=max_entries, max_bytes=max_bytes, disk=disk, clock=clock), clock


def test_the_same_request_gets_its_answer(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    key, entry = make_key("a"), make_entry("a", b"1", now=clock.now)
    assert exact(store, key) is None
    assert store.put(key, entry, unit(1)).reason is None
    assert exact(store, key) == entry
    assert near(store, key, unit(1), 3)[0].entry == entry


@pytest.mark.parametrize("other", [{"scope": "team:2"}, {"model_group": "large"}, {"epoch": 1}, {"temperature": 0.3}])
def test_no_answer_crosses_a_partition_or_context(
    make_key: MakeKey, make_entry: MakeEntry, other: dict[str, object]
) -> None:
    store, clock = small()
    store.put(make_key("a"), make_entry("a", now=clock.now), unit(1))
    assert exact(store, make_key("a", **other)) is None
    assert near(store, make_key("a", **other), unit(1), 3) == []


@given(tenants=st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 5)), min_size=1, max_size=30))
@settings(deadline=None, max_examples=50)
def test_every_answer_found_is_the_tenants_own(tenants: list[tuple[str, int]]) -> None:
    store, _ = small()
    for tenant, number in tenants:
        text = f"question {number}"
        key = build_key(
            {"messages": [{"role": "user", "content": text}]}, scope=tenant, model_group="auto", embedder="e"
        )
        for found in near(store, key, unit(number), 8):
            assert found.entry.answer == tenant.encode()
        same = exact(store, key)
        assert same is None or same.answer == tenant.encode()
        store.put(key, Entry("i", tenant.encode(), "m", "small", 1, 1, 1, 1e6, 2e6, text), unit(number))


def test_the_time_limit_is_absolute(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    key = make_key("a")
    store.put(key, make_entry("a", now=clock.now, ttl_s=60), unit(1))
    for _ in range(5):
        clock.now += 11
        assert exact(store, key) is not None
        assert near(store, key, unit(1), 1)
    clock.now += 5
    assert exact(store, key) is None
    assert near(store, key, unit(1), 1) == []
    assert store.expire() == 1
    assert (len(store), store.bytes, store.indexes) == (0, 0, 0)


def test_the_asker_may_be_stricter(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    key = make_key("a")
    store.put(key, make_entry("a", now=clock.now, ttl_s=600), unit(1))
    clock.now += 30
    assert exact(store, key, ttl_s=30) is None
    assert near(store, key, unit(1), 1, ttl_s=30) == []
    assert exact(store, key, ttl_s=31) is not None


def test_an_expired_answer_is_not_kept(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    assert store.put(make_key("a"), make_entry("a", now=clock.now - 100, ttl_s=60), None).reason == "expired"


def test_a_newer_answer_takes_the_place_of_the_older(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    key = make_key("a")
    store.put(key, make_entry("a", b"old", now=clock.now), unit(1))
    store.put(key, make_entry("a", b"new", now=clock.now), unit(1))
    assert len(store) == store.vectors == 1
    assert [found.entry.answer for found in near(store, key, unit(1), 5)] == [b"new"]


def test_the_least_recently_used_goes_first(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small(max_entries=3)
    keys = {name: make_key(name) for name in "abcd"}
    for name in "abc":
        store.put(keys[name], make_entry(name, now=clock.now), unit(ord(name)))
    for name in "ab":
        store.used(near(store, keys[name], unit(ord(name)), 1)[0].answer_id)
    store.put(keys["d"], make_entry("d", now=clock.now), unit(4))
    assert [name for name in "abcd" if exact(store, keys[name])] == ["a", "b", "d"]
    assert store.evictions == 1
    assert store.vectors == 3


def test_bytes_are_bounded(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small(max_bytes=20_000)
    for i in range(100):
        assert store.put(make_key(str(i)), make_entry(str(i), b"x" * 1000, now=clock.now), unit(i)).reason is None
        assert store.bytes <= 20_000
    assert 5 <= len(store) <= 19
    assert store.put(make_key("big"), make_entry("big", b"x" * 3000, now=clock.now), None).reason == "too_large"


def test_a_vector_may_come_later(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    disk = Disk(tmp_path, "f")
    store = Store(max_entries=9, max_bytes=1 << 20, disk=disk)
    store.put(make_key("a"), make_entry("a"), None)
    before = store.bytes
    assert store.add_vector(make_key("a"), unit(1))
    assert not store.add_vector(make_key("gone"), unit(1))
    assert (len(store), store.vectors) == (1, 1)
    assert store.bytes > before
    assert near(store, make_key("a"), unit(1), 1)[0].entry.question == "a"
    assert next(disk.rows()).vector is not None


def test_purge_by_scope_model_and_age(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    store.put(make_key("a", scope="t1"), make_entry("a", now=clock.now, model="m1"), unit(1))
    store.put(make_key("a", scope="t2"), make_entry("a", now=clock.now, model="m1"), unit(1))
    clock.now += 50
    store.put(make_key("b", scope="t2"), make_entry("b", now=clock.now, model="m2"), None)
    assert purge(store, scope="t2", model="m1") == 1
    assert purge(store, older_than_s=50) == 1
    assert purge(store, scope="t1") == 0
    assert purge(store) == 1
    assert (len(store), store.bytes, store.vectors, store.purged) == (0, 0, 0, 3)


def test_a_new_store_on_the_same_folder_is_warm(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    disk = Disk(tmp_path / "d", "f")
    store, _ = Store(max_entries=10, max_bytes=1 << 20, disk=disk), None
    kept, purged = make_key("kept"), make_key("purged", scope="t2")
    store.put(kept, make_entry("kept", b"1"), unit(1))
    store.put(purged, make_entry("purged", b"2"), None)
    purge(store, scope="t2")
    disk.close()

    again = Store(max_entries=10, max_bytes=1 << 20)
    for row in Disk(tmp_path / "d", "f").rows():
        again.restore(row)
    found = exact(again, kept)
    assert found is not None
    assert found.answer == b"1"
    assert exact(again, purged) is None
    assert near(again, kept, unit(1), 1)[0].cosine == pytest.approx(1.0, abs=1e-5)


def test_evicted_and_replaced_entries_leave_the_disk(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    disk = Disk(tmp_path, "f")
    store = Store(max_entries=2, max_bytes=1 << 20, disk=disk)
    for name in ("a", "b", "b", "c"):
        store.put(make_key(name), make_entry(name, name.encode()), unit(1))
    assert sorted(row.entry.answer for row in disk.rows()) == [b"b", b"c"]


def test_entries_of_another_embedder_and_expired_ones_are_dropped(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    disk = Disk(tmp_path, "f")
    store = Store(max_entries=9, max_bytes=1 << 20, disk=disk, clock=lambda: 0.0)
    store.put(make_key("a"), make_entry("a"), None)
    store.put(make_key("old"), make_entry("old", now=1.0), None)
    disk.close()
    assert [row.entry.question for row in Disk(tmp_path, "f").rows()] == ["a"]
    assert list(Disk(tmp_path, "another").rows()) == []


def test_entries_of_another_form_of_key_are_dropped(
    tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        earlier.setattr("cache.store.disk.VERSION", "an earlier form")
        disk = Disk(tmp_path, "f")
        Store(max_entries=9, max_bytes=1 << 20, disk=disk).put(make_key("a"), make_entry("a"), None)
        disk.close()
    assert list(Disk(tmp_path, "f").rows()) == []


def test_a_damaged_file_is_moved_aside(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    (tmp_path / "answers.db").write_bytes(b"this is no database at all" * 100)
    disk = Disk(tmp_path, "f")
    Store(max_entries=9, max_bytes=1 << 20, disk=disk).put(make_key("a"), make_entry("a"), None)
    assert len(list(disk.rows())) == 1
    assert len(list(tmp_path.glob("answers.damaged-*.db"))) == 1


def test_an_unreadable_entry_is_skipped(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    disk = Disk(tmp_path, "f")
    store = Store(max_entries=9, max_bytes=1 << 20, disk=disk)
    store.put(make_key("a"), make_entry("a"), None)
    store.put(make_key("b"), make_entry("b"), None)
    with sqlite3.connect(tmp_path / "answers.db") as database:
        database.execute("UPDATE entries SET entry = x'00' WHERE exact = ?", (make_key("a").exact,))
    assert [row.entry.question for row in disk.rows()] == ["b"]


def test_the_file_is_the_owners_alone(tmp_path: Path) -> None:
    Disk(tmp_path, "f")
    assert (tmp_path / "answers.db").stat().st_mode & 0o077 == 0


def test_an_answer_is_found_by_every_question_it_is_known_to_answer(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    first, other = make_key("a"), make_key("b")
    answer_id = store.put(first, make_entry("a", b"1", now=clock.now), unit(1), "key:1").answer_id
    assert answer_id is not None
    assert store.add_alias(other, answer_id, unit(2), "key:2") is None
    assert store.add_alias(other, answer_id, unit(2), "key:2") is None  # known already
    assert (len(store), store.questions, store.vectors) == (1, 2, 2)
    found = store.get_exact(other)
    assert found is not None
    assert (found.answer_id, found.question, found.entry.answer) == (answer_id, "b", b"1")
    assert [(near_by.answer_id, near_by.question) for near_by in near(store, first, unit(2))] == [
        (answer_id, "b"),
        (answer_id, "a"),
    ]
    assert store.forget_question(found.question_id)
    assert exact(store, other) is None
    assert exact(store, first) is not None
    assert store.add_alias(other, answer_id, unit(2), "key:2") is None
    assert store.forget(answer_id)
    assert not store.forget(answer_id)
    assert (len(store), store.questions, store.vectors, store.bytes, store.indexes) == (0, 0, 0, 0, 0)
    assert store.add_alias(other, answer_id, unit(2), "key:2") == "unknown_answer"


def test_no_author_and_no_crowd_fills_an_answer_with_questions(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    answer_id = store.put(make_key("a"), make_entry("a", now=clock.now), None, "key:0").answer_id or 0
    reasons = [
        store.add_alias(make_key(f"one {i}"), answer_id, None, "key:1") for i in range(MAX_ALIASES_OF_AUTHOR + 2)
    ]
    assert reasons == [None] * MAX_ALIASES_OF_AUTHOR + ["too_many_questions"] * 2
    reasons = [store.add_alias(make_key(f"all {i}"), answer_id, None, f"key:{i}") for i in range(2, MAX_ALIASES + 2)]
    assert reasons.count(None) == MAX_ALIASES - MAX_ALIASES_OF_AUTHOR
    assert store.questions == MAX_ALIASES + 1


@pytest.mark.parametrize("other", [{"scope": "team:2"}, {"model_group": "large"}, {"temperature": 0.3}])
def test_no_alias_crosses_a_partition_or_context(
    make_key: MakeKey, make_entry: MakeEntry, other: dict[str, object]
) -> None:
    store, clock = small()
    answer_id = store.put(make_key("a"), make_entry("a", now=clock.now), unit(1)).answer_id or 0
    assert store.add_alias(make_key("b", **other), answer_id, unit(2), "key:1") == "unknown_answer"
    assert exact(store, make_key("b", **other)) is None


def test_aliases_live_and_die_with_their_answer(tmp_path: Path, make_key: MakeKey, make_entry: MakeEntry) -> None:
    disk = Disk(tmp_path, "f")
    store = Store(max_entries=9, max_bytes=1 << 20, disk=disk)
    for text in ("a", "b"):
        answer_id = store.put(make_key(text), make_entry(text, text.encode()), unit(1)).answer_id or 0
        assert store.add_alias(make_key(f"{text} again"), answer_id, unit(2), "key:1") is None
    store.put(make_key("b"), make_entry("b", b"newer"), unit(1))
    disk.close()

    again = Store(max_entries=9, max_bytes=1 << 20)
    for row in Disk(tmp_path, "f").rows():
        again.restore(row)
    assert (len(again), again.questions) == (2, 3)
    assert exact(again, make_key("b again")) is None
    alias = again.get_exact(make_key("a again"))
    assert alias is not None
    assert (alias.question, alias.entry.answer) == ("a again", b"a")
    assert again.answer_of(alias.entry.id) == alias.answer_id


def test_purge_by_tag_policy_and_question(make_key: MakeKey, make_entry: MakeEntry) -> None:
    store, clock = small()
    for name, tags, policy in (("a", ("docs", "v1"), "p"), ("b", ("docs",), "q"), ("c", (), "p"), ("d", (), "q")):
        store.put(make_key(name), make_entry(name, now=clock.now, tags=tags, policy=policy), None)
    assert purge(store, tag="v1", policy="q") == 0
    assert purge(store, tag="v1") == 1
    assert purge(store, policy="p") == 1
    assert purge(store, exact=make_key("d").exact) == 1
    assert exact(store, make_key("b")) is not None
