"""How much output a hold expects."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.holds import OutputEstimator


class TestEstimator:
    """How much output to expect."""

    def test_without_history_a_default_capped_by_the_request(self) -> None:
        estimator = OutputEstimator(default_tokens=512)
        assert estimator.estimate("k", "m") == 512
        assert estimator.estimate("k", "m", 20) == 20
        assert estimator.estimate("k", "m", 100_000) == 512

    def test_it_follows_the_key_and_never_a_strangers_history(self) -> None:
        estimator = OutputEstimator()
        for _ in range(50):
            estimator.observe("short", "m", 10)
            estimator.observe("long", "m", 2000)
        assert 10 <= estimator.estimate("short", "m") < 15
        assert 2000 <= estimator.estimate("long", "m") < 2100
        assert estimator.estimate("new", "m") == 512
        assert estimator.estimate("short", "other") == 512

    def test_few_answers_are_longer_than_expected(self) -> None:
        estimator, lengths = OutputEstimator(), random.Random(1)
        longer = 0
        for _ in range(2000):
            length = round(lengths.lognormvariate(5, 0.5))
            longer += length > estimator.estimate("k", "m")
            estimator.observe("k", "m", length)
        assert longer / 2000 < 0.15

    @given(st.lists(st.integers(0, 10**6), max_size=30), st.one_of(st.none(), st.integers(1, 10**6)))
    def test_never_more_than_a_ceiling_never_nothing(self, seen: list[int], max_tokens: int | None) -> None:
        estimator = OutputEstimator(ceiling_tokens=4096)
        for length in seen:
            estimator.observe("k", "m", length)
        expected = estimator.estimate("k", "m", max_tokens)
        assert 1 <= expected <= min(4096, max_tokens or 4096)

    def test_its_memory_is_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("gateway.access.holds._MAX_HISTORIES", 10)
        estimator = OutputEstimator()
        for n in range(100):
            estimator.observe(str(n), "m", 7)
        assert len(estimator._history) == 10
        assert estimator.estimate("99", "m") < 512

    def test_nonsense_is_refused(self) -> None:
        with pytest.raises(ValueError, match="default_tokens"):
            OutputEstimator(default_tokens=0)
