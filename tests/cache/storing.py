"""Stores of a test, with a clock of its own, and what is asked of them, without waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from cache.entry import Entry
from cache.key import CacheKey
from cache.store.answers import Store
from cache.store.changes import Purge, Vector
from cache.store.found import Found

MakeKey = Callable[..., CacheKey]
MakeEntry = Callable[..., Entry]
MakeStore = Callable[..., Store]


def unit(seed: int) -> Vector:
    vector = np.random.default_rng(seed).normal(size=8).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector), dtype=np.float32)


def near(store: Store, key: CacheKey, vector: Vector, k: int = 3, ttl_s: float | None = None) -> list[Found]:
    """The nearest questions with their answers."""
    found = asyncio.run(store.nearest(key, vector, k, ttl_s=ttl_s))
    return [answer for one in found if (answer := store.answer(one, key, ttl_s=ttl_s)) is not None]


def purge(store: Store, **conditions: Any) -> int:
    return asyncio.run(store.purge(Purge(**conditions)))


def flush(store: Store) -> None:
    asyncio.run(store.flush())


def exact(store: Store, key: CacheKey, ttl_s: float | None = None) -> Entry | None:
    found = store.get_exact(key, ttl_s=ttl_s)
    return None if found is None else found.entry


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now
