"""Counters and histograms of the hot path: plain numbers in one event loop, Prometheus metrics when they are asked for.

The client library guards every number by a lock and finds it anew by its labels, which a gateway would pay a dozen
times per request. These are counted in one thread only; exposition is the library's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Count:
    """One number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        self.value += amount


class Level:
    """One number that goes up and down."""

    __slots__ = ("value",)

    def __init__(self, name: str, text: str, registry: CollectorRegistry) -> None:
        self.value = 0
        Gauge(name, text, registry=registry).set_function(lambda: self.value)

    def inc(self) -> None:
        self.value += 1

    def dec(self) -> None:
        self.value -= 1


class Spread:
    """How many observations fell into each bucket, and their sum."""

    __slots__ = ("_bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Upper bound and number of observations up to it, as Prometheus has them."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Counts(Collector):
    """A counter with labels. `labels` gives the number of one combination; keep it or ask again, both are cheap."""

    def __init__(self, name: str, text: str, labels: Sequence[str], registry: CollectorRegistry) -> None:
        self._name, self._text, self._labels = name, text, labels
        self._children: dict[tuple[str, ...], Count] = {}
        registry.register(self)

    def labels(self, *values: str) -> Count:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Count()
        return child

    def total(self, last: str | None = None) -> float:
        """The sum of all combinations, or of those with this value of the last label."""
        return sum(child.value for values, child in self._children.items() if last is None or values[-1] == last)

    def describe(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = CounterMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in list(self._children.items()):
            family.add_metric(values, child.value)
        return [family]


class Spreads(Collector):
    """A histogram with labels; without, `labels()` is its only one."""

    def __init__(
        self, name: str, text: str, labels: Sequence[str], bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name, self._text, self._labels, self._bounds = name, text, labels, bounds
        self._children: dict[tuple[str, ...], Spread] = {}
        if not labels:
            self.labels()
        registry.register(self)

    def labels(self, *values: str) -> Spread:
        child = self._children.get(values)
        if child is None:
            child = self._children[values] = Spread(self._bounds)
        return child

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._text, labels=self._labels)]

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=self._labels)
        for values, child in list(self._children.items()):
            family.add_metric(values, child.buckets(), child.sum)
        return [family]
