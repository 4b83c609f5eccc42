"""The store: isolation, absolute time limits, aliases, purging, vectors that come later."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.entry import Entry
from cache.key import CacheKey, build_key
from cache.store.answers import MAX_ALIASES, MAX_ALIASES_OF_AUTHOR, Store
from cache.store.changes import Purge, Vector
from tests.cache.storing import Clock, MakeEntry, MakeKey, exact, flush, near, purge, unit


def test_the_same_request_gets_its_answer(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    key, entry = make_key("a"), make_entry("a", b"1", now=clock.now)
    assert store.get_exact(key) is None
    assert store.get_folded(key) is None
    assert near(store, key, unit(1)) == []
    assert store.put(key, entry, unit(1)).reason is None
    for _ in range(2):  # before it is written, and after
        assert exact(store, key) == entry
        folded = store.get_folded(make_key("A "))
        assert folded is not None
        assert folded.entry == entry
        (found,) = near(store, key, unit(1))
        assert (found.entry, found.cosine) == (entry, 1.0)
        assert store.answer_of(entry.id) == found.answer_id
        flush(store)


@pytest.mark.parametrize("other", [{"scope": "team:2"}, {"model_group": "large"}, {"epoch": 1}, {"temperature": 0.3}])
def test_no_answer_crosses_a_partition_or_context(
    store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry, other: dict[str, object]
) -> None:
    answer_id = store.put(make_key("a"), make_entry("a", now=clock.now), unit(1)).answer_id or 0
    flush(store)
    elsewhere = make_key("a", **other)
    assert exact(store, elsewhere) is None
    assert store.get_folded(elsewhere) is None
    assert near(store, elsewhere, unit(1)) == []
    assert store.add_alias(make_key("b", **other), answer_id, unit(2), "key:1") == "unknown_answer"
    assert exact(store, make_key("b", **other)) is None


@given(tenants=st.lists(st.tuples(st.sampled_from("ABC"), st.integers(0, 5)), min_size=1, max_size=30))
@settings(deadline=None, max_examples=30)
def test_every_answer_found_is_the_tenants_own(tenants: list[tuple[str, int]]) -> None:
    store = Store(None, "f", max_entries=100, max_bytes=1 << 24, clock=lambda: 1e6)
    for tenant, number in tenants:
        text = f"question {number}"
        payload = {"messages": [{"role": "user", "content": text}]}
        key = build_key(payload, scope=tenant, model_group="auto")
        for found in near(store, key, unit(number), 8):
            assert found.entry.answer == tenant.encode()
        same = exact(store, key)
        assert same is None or same.answer == tenant.encode()
        store.put(key, Entry("i", tenant.encode(), "m", "small", 1, 1, 1, 1e6, 2e6, text), unit(number))
    store.close()


def test_a_key_whose_scope_is_another_gets_nothing(
    store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    """Even if the digests of two tenants were ever to be the same."""
    key = make_key("a")
    store.put(key, make_entry("a", now=clock.now), unit(1))
    forged = CacheKey("team:other", key.partition, key.context, key.text, key.exact)
    assert exact(store, forged) is None
    assert store.get_folded(forged) is None
    assert near(store, forged, unit(1)) == []


def test_the_time_limit_is_absolute(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    key = make_key("a")
    store.put(key, make_entry("a", now=clock.now, ttl_s=60), unit(1))
    for _ in range(5):
        clock.now += 11
        found = store.get_exact(key)
        assert found is not None
        store.used(found.answer_id)
        assert near(store, key, unit(1), 1)
    clock.now += 5
    assert exact(store, key) is None
    assert near(store, key, unit(1), 1) == []
    assert asyncio.run(store.expire()) == 1
    size = store.size()
    assert (size.answers, size.questions, size.places, size.vectors, store.size().expirations) == (0, 0, 0, 0, 1)


def test_the_asker_may_be_stricter(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    key = make_key("a")
    store.put(key, make_entry("a", now=clock.now, ttl_s=600), unit(1))
    clock.now += 30
    assert exact(store, key, ttl_s=30) is None
    assert store.get_folded(key, ttl_s=30) is None
    assert near(store, key, unit(1), ttl_s=30) == []
    assert exact(store, key, ttl_s=31) is not None


def test_what_is_not_kept(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    assert store.put(make_key("a"), make_entry("a", now=clock.now - 100, ttl_s=60), None).reason == "expired"
    assert store.put(make_key("a"), make_entry("a", b"x" * (1 << 24), now=clock.now), None).reason == "too_large"
    with pytest.raises(ValueError, match="NaN"):
        store.put(make_key("a"), make_entry("a", now=clock.now), np.full(8, np.nan, np.float32))
    assert exact(store, make_key("a")) is None
    flush(store)
    assert store.size().answers == 0


def test_a_newer_answer_takes_the_place_of_the_older(
    store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    key = make_key("a")
    store.put(key, make_entry("a", b"old", now=clock.now), unit(1))
    store.put(key, make_entry("a", b"new", now=clock.now), unit(1))
    assert [found.entry.answer for found in near(store, key, unit(1), 5)] == [b"new"]
    flush(store)
    size = store.size()
    assert (size.answers, size.questions, size.vectors) == (1, 1, 1)


# Questions of one answer.


def test_an_answer_is_found_by_every_question_it_is_known_to_answer(
    store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    first, other = make_key("a"), make_key("b")
    answer_id = store.put(first, make_entry("a", b"1", now=clock.now), unit(1), "key:1").answer_id
    assert answer_id is not None
    assert store.add_alias(other, answer_id, unit(2), "key:2") is None
    assert store.add_alias(other, answer_id, unit(2), "key:2") is None  # known already
    found = store.get_exact(other)
    assert found is not None
    assert (found.answer_id, found.question, found.entry.answer) == (answer_id, "b", b"1")
    nearest = [(one.answer_id, one.question) for one in near(store, first, unit(2))]
    assert nearest == [(answer_id, "b"), (answer_id, "a")]
    flush(store)
    assert (store.size().answers, store.size().questions, store.size().vectors) == (1, 2, 2)
    assert store.forget_question(found.question_id)
    assert exact(store, other) is None
    assert exact(store, first) is not None
    assert store.add_alias(other, answer_id, unit(2), "key:2") is None
    assert store.forget(answer_id)
    assert not store.forget(answer_id)
    assert store.add_alias(other, answer_id, unit(2), "key:2") == "unknown_answer"
    assert (exact(store, first), exact(store, other), near(store, first, unit(1))) == (None, None, [])
    flush(store)
    size = store.size()
    assert (size.answers, size.questions, size.vectors, size.places) == (0, 0, 0, 0)


def test_the_answers_own_question_takes_the_answer_along(
    store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    answer_id = store.put(make_key("a"), make_entry("a", now=clock.now), unit(1)).answer_id or 0
    store.add_alias(make_key("b"), answer_id, unit(2), "key:1")
    found = store.get_exact(make_key("a"))
    assert found is not None
    assert store.forget_question(found.question_id)
    assert exact(store, make_key("b")) is None


def test_no_author_and_no_crowd_fills_an_answer_with_questions(
    store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry
) -> None:
    answer_id = store.put(make_key("a"), make_entry("a", now=clock.now), None, "key:0").answer_id or 0
    reasons = [
        store.add_alias(make_key(f"one {i}"), answer_id, None, "key:1") for i in range(MAX_ALIASES_OF_AUTHOR + 2)
    ]
    assert reasons == [None] * MAX_ALIASES_OF_AUTHOR + ["too_many_questions"] * 2
    flush(store)
    reasons = [store.add_alias(make_key(f"all {i}"), answer_id, None, f"key:{i}") for i in range(2, MAX_ALIASES + 2)]
    assert reasons.count(None) == MAX_ALIASES - MAX_ALIASES_OF_AUTHOR
    flush(store)
    assert store.size().questions == MAX_ALIASES + 1


# Purging.


def test_purge_by_scope_model_and_age(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    store.put(make_key("a", scope="t1"), make_entry("a", now=clock.now, model="m1"), unit(1))
    store.put(make_key("a", scope="t2"), make_entry("a", now=clock.now, model="m1"), unit(1))
    clock.now += 50
    store.put(make_key("b", scope="t2"), make_entry("b", now=clock.now, model="m2"), None)
    assert purge(store, scope="t2", model="m1") == 1
    assert purge(store, older_than_s=50) == 1
    assert purge(store, scope="t1") == 0
    assert purge(store) == 1
    size = store.size()
    assert (size.answers, size.places, size.vectors, store.size().purged) == (0, 0, 0, 3)


def test_purge_by_tag_policy_and_question(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    ids = {}
    for name, tags, policy in (("a", ("docs", "v1"), "p"), ("b", ("docs",), "q"), ("c", (), "p"), ("d", (), "q")):
        entry = make_entry(name, now=clock.now, tags=tags, policy=policy)
        ids[name] = store.put(make_key(name), entry, None).answer_id or 0
    store.add_alias(make_key("d again"), ids["d"], None, "key:1")
    assert purge(store, tag="v1", policy="q") == 0
    assert purge(store, tag="v") == 0  # part of a tag is none
    assert purge(store, tag="v1") == 1
    assert purge(store, policy="p") == 1
    assert purge(store, exact=make_key("nobody asked").exact) == 0
    assert purge(store, exact=make_key("d again").exact) == 1
    assert exact(store, make_key("d")) is None
    entry = exact(store, make_key("b"))
    assert entry is not None
    assert purge(store, entry=entry.id, exact=make_key("d").exact) == 0
    assert purge(store, entry=entry.id, scope="team:other") == 0
    assert purge(store, entry=entry.id) == 1


# Vectors that come later.


def test_a_question_gets_its_vector_later(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    store.put(make_key("a"), make_entry("a", now=clock.now), None, vector_later=True)
    store.put(make_key("b"), make_entry("b", now=clock.now), None, vector_later=True)
    store.put(make_key("c"), make_entry("c", now=clock.now), None)
    assert near(store, make_key("x"), unit(1)) == []
    flush(store)
    assert store.size().waiting_vectors == 2
    for place, question_id, text in store.without_vector(10):
        store.set_vector(place, question_id, unit(1) if text == "a" else None)
    assert [found.question for found in near(store, make_key("x"), unit(1))] == ["a"]
    flush(store)
    assert store.without_vector(10) == []
    assert store.size().waiting_vectors == 0
    assert exact(store, make_key("b")) is not None


class Heard:
    """A listener that writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []

    def stored(self, key: CacheKey, entry: Entry, vector: Vector | None, author: str) -> None:
        self.told.append(("stored", key, entry, vector is not None, author))

    def aliased(self, key: CacheKey, entry_id: str, vector: Vector | None, author: str) -> None:
        self.told.append(("aliased", key, entry_id, vector is not None, author))

    def forgotten(self, entry_id: str) -> None:
        self.told.append(("forgotten", entry_id))

    def question_forgotten(self, exact: str, entry_id: str) -> None:
        self.told.append(("question_forgotten", exact, entry_id))

    def purged(self, purge: Purge) -> None:
        self.told.append(("purged", purge))


def test_whoever_listens_is_told(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    heard = Heard()
    store.listener = heard
    a, b, entry = make_key("a"), make_key("b"), make_entry("a", now=clock.now)
    answer_id = store.put(a, entry, None, "key:1", vector_later=True).answer_id or 0
    store.add_alias(b, answer_id, unit(2), "key:2")
    flush(store)
    ((place, question_id, _),) = store.without_vector(10)
    store.set_vector(place, question_id, unit(1))
    alias = store.get_exact(b)
    assert alias is not None
    store.forget_question(alias.question_id)
    store.forget(answer_id)
    purge(store, scope=a.scope)
    assert heard.told == [
        ("stored", a, entry, False, "key:1"),
        ("aliased", b, entry.id, True, "key:2"),
        ("stored", a, entry, True, "key:1"),
        ("question_forgotten", b.exact, entry.id),
        ("forgotten", entry.id),
        ("purged", Purge(scope=a.scope)),
    ]


async def test_a_search_reads_no_answer(store: Store, clock: Clock, make_key: MakeKey, make_entry: MakeEntry) -> None:
    """Answers of a megabyte beside a question would hold up every other look-up for tens of milliseconds."""
    long = b"x" * 1_000_000
    for text in ("a", "b", "c"):
        assert store.put(make_key(text), make_entry(text, long, now=clock.now), unit(1)).reason is None
    await store.flush()
    tracemalloc.start()
    found = await store.nearest(make_key("x"), unit(1), 3)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [one.question for one in found] == ["a", "b", "c"]
    assert most < 100_000
    answer = store.answer(found[0], make_key("x"))
    assert answer is not None
    assert answer.entry.answer == long
    assert store.answer(found[0], make_key("x", scope="team:2")) is None, "nor is it another tenant's"
    assert store.forget(found[0].answer_id)
    assert store.answer(found[0], make_key("x")) is None
