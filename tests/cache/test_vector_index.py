"""The index against a plain dictionary: same neighbours in both forms, through removals and rebuilds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.store.index import Vector, VectorIndex

DIMENSION = 16


def unit(seed: int) -> Vector:
    vector = np.random.default_rng(seed).normal(size=DIMENSION).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def expected(vectors: dict[int, Vector], query: Vector, k: int) -> list[int]:
    return sorted(vectors, key=lambda id: -float(vectors[id] @ query))[:k]


@given(
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 60)), min_size=1, max_size=150),
    faiss_from=st.sampled_from([1, 8, 10_000]),
    k=st.integers(1, 12),
)
@settings(deadline=None, max_examples=60)
def test_neighbours_are_those_of_a_plain_search(steps: list[tuple[bool, int]], faiss_from: int, k: int) -> None:
    index, plain = VectorIndex(DIMENSION, faiss_from=faiss_from), {}
    for number, (adds, id) in enumerate(steps):
        if adds:
            plain[id] = unit(number)
            index.add(id, plain[id])
        else:
            assert index.remove(id) == (plain.pop(id, None) is not None)
    query = unit(10_000)
    found = index.search(query, k)
    assert len(index) == len(plain)
    assert [id for id, _ in found] == expected(plain, query, k)
    for id, score in found:
        assert score == pytest.approx(float(plain[id] @ query), abs=1e-5)


def test_faiss_takes_over_and_gives_back() -> None:
    index = VectorIndex(DIMENSION, faiss_from=100)
    for id in range(150):
        index.add(id, unit(id))
    assert index.uses_faiss
    for id in range(149):
        index.remove(id)
    assert not index.uses_faiss
    assert [id for id, _ in index.search(unit(149), 5)] == [149]
    assert index.size_bytes < 100 * DIMENSION * 4


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
    assert index.uses_faiss
    assert len(index.search(query, 8)) == 8
    assert len(index.search(query, 1000)) == 81


def test_an_empty_index_finds_nothing() -> None:
    assert VectorIndex(DIMENSION).search(unit(0), 5) == []


@pytest.mark.parametrize("bad", [np.zeros(3, np.float32), np.full(DIMENSION, np.nan, np.float32)])
def test_a_wrong_vector_is_refused(bad: Vector) -> None:
    index = VectorIndex(DIMENSION)
    with pytest.raises(ValueError, match="finite numbers"):
        index.add(1, bad)
    assert len(index) == 0
