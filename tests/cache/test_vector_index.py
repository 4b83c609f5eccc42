"""The index against a plain dictionary: the same neighbours in every form, through removals and growth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.store.index import Vector, VectorIndex

DIMENSION = 16
_ROUNDING = 2e-3  # of numbers of 16 bits, in few dimensions


def unit(seed: int, dimension: int = DIMENSION) -> Vector:
    vector = np.random.default_rng(seed).normal(size=dimension).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def expected(vectors: dict[int, Vector], query: Vector, k: int) -> list[float]:
    return sorted((float(vector @ query) for vector in vectors.values()), reverse=True)[:k]


@given(
    start=st.integers(0, 40),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), max_size=150),
    faiss_from=st.sampled_from([1, 8, 10_000]),
    k=st.integers(1, 12),
)
@settings(deadline=None, max_examples=60)
def test_neighbours_are_those_of_a_plain_search(
    start: int, steps: list[tuple[bool, int]], faiss_from: int, k: int
) -> None:
    plain = {id: unit(1000 + id) for id in range(start)}
    vectors = np.stack(list(plain.values())) if plain else np.empty((0, DIMENSION), np.float32)
    index = VectorIndex.build(list(plain), vectors, faiss_from=faiss_from)
    for number, (adds, id) in enumerate(steps):
        if adds:
            plain[id] = unit(number)
            index.add(id, plain[id])
        else:
            assert index.remove(id) == (plain.pop(id, None) is not None)
            assert id not in index
    query = unit(10_000)
    found = index.search(query, k)
    assert len(index) == len(plain)
    assert [score for _, score in found] == pytest.approx(expected(plain, query, k), abs=_ROUNDING)
    assert len({id for id, _ in found}) == len(found)
    for id, score in found:
        assert score == pytest.approx(float(plain[id] @ query), abs=_ROUNDING)


def test_faiss_takes_over_as_it_grows() -> None:
    index = VectorIndex(DIMENSION, faiss_from=100)
    for id in range(150):
        assert index.form == ("matrix" if id < 100 else "flat")
        index.add(id, unit(id))
    assert [id for id, _ in index.search(unit(149), 1)] == [149]
    assert index.size_bytes < 150 * (DIMENSION * 2 + 200)


def test_an_index_that_does_not_fit_any_more_says_so() -> None:
    index = VectorIndex(DIMENSION, faiss_from=10, ivf_from=100)
    for id in range(99):
        index.add(id, unit(id))
    assert not index.stale
    index.add(99, unit(99))
    assert index.stale  # large enough for cells
    ids = list(range(100))
    cells = VectorIndex.build(ids, np.stack([unit(id) for id in ids]), faiss_from=10, ivf_from=100)
    assert (cells.form, cells.stale) == ("cells", False)
    for id in range(100, 401):
        cells.add(id, unit(id))
    assert cells.stale  # outgrown
    flat = VectorIndex.build(ids, np.stack([unit(id) for id in ids]), faiss_from=10)
    for id in range(20):
        flat.remove(id)
    assert not flat.stale
    flat.remove(20)
    assert flat.stale  # more than a fifth of it is dead


def test_tombstones_never_hide_the_living() -> None:
    """The nearest rows are all dead: the search must look past them."""
    index = VectorIndex(DIMENSION, faiss_from=10)
    query = unit(0)
    for id in range(100):
        nearness = 1.0 - id / 200
        rest = unit(id + 1)
        vector = nearness * query + 0.01 * rest
        index.add(id, np.asarray(vector / np.linalg.norm(vector), dtype=np.float32))
    for id, _ in index.search(query, 19):
        index.remove(id)
    assert index.form == "flat"
    assert len(index.search(query, 8)) == 8
    assert len(index.search(query, 1000)) == 81


def test_cells_that_are_searched_may_hold_fewer_than_asked_for() -> None:
    """FAISS fills up with row -1 then, which is nobody's."""
    ids = list(range(2000))
    index = VectorIndex.build(ids, np.stack([unit(id) for id in ids]), faiss_from=10, ivf_from=100)
    for id in ids[:1990]:
        index.remove(id)
    found = index.search(unit(1995), 50)
    assert found[0][0] == 1995
    assert {id for id, _ in found} <= set(range(1990, 2000))


def like_questions(count: int, dimension: int, seed: int) -> Vector:
    """Vectors that lie as questions do: in groups of about sixty around a topic, cosine about 0.7 within a group."""
    random = np.random.default_rng(seed)
    topics = random.normal(size=(count // 60, dimension))
    topics /= np.linalg.norm(topics, axis=1, keepdims=True)
    vectors = topics[random.integers(0, len(topics), count)] + random.normal(size=(count, dimension)) * (
        0.65 / np.sqrt(dimension)
    )
    return (vectors / np.linalg.norm(vectors, axis=1, keepdims=True)).astype(np.float32)


def test_cells_find_what_a_plain_search_finds() -> None:
    """Of the eight nearest at least 99 of 100, and every one that is near enough to matter."""
    vectors = like_questions(20_200, 384, 1)
    kept, queries = vectors[:20_000], vectors[20_000:]
    index = VectorIndex.build(range(len(kept)), kept)
    assert index.form == "cells"
    found = near = near_found = 0
    for query in queries:
        scores = kept @ query
        truth = set(np.argpartition(scores, -8)[-8:].tolist())
        got = {id for id, _ in index.search(query, 8)}
        found += len(truth & got)
        close = {id for id in truth if scores[id] >= 0.75}
        near, near_found = near + len(close), near_found + len(close & got)
    assert near > 100
    assert near_found == near
    assert found >= 0.99 * 8 * len(queries)


def test_an_empty_index_finds_nothing() -> None:
    assert VectorIndex(DIMENSION).search(unit(0), 5) == []
    assert VectorIndex.build([], np.empty((0, DIMENSION), np.float32)).search(unit(0), 5) == []


@pytest.mark.parametrize("bad", [np.zeros(3, np.float32), np.full(DIMENSION, np.nan, np.float32)])
def test_a_wrong_vector_is_refused(bad: Vector) -> None:
    index = VectorIndex(DIMENSION)
    with pytest.raises(ValueError, match="finite numbers"):
        index.add(1, bad)
    assert len(index) == 0


def test_no_id_comes_twice() -> None:
    with pytest.raises(ValueError, match="twice"):
        VectorIndex.build([1, 1], np.stack([unit(1), unit(2)]))
    index = VectorIndex(DIMENSION, faiss_from=1)
    index.add(1, unit(1))
    index.add(1, unit(2))
    assert [id for id, _ in index.search(unit(2), 5)] == [1]
