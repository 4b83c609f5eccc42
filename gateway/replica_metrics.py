"""How the cache process of this host shares its answers with others, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.replicas.standing import ReplicaStats

# Name, what it says, and the field.
_GAUGES = (
    ("tierline_cache_shared", "1 while answers are shared through Redis.", "connected"),
    ("tierline_cache_replicas", "Cache processes that were heard of lately, this one included.", "replicas"),
    ("tierline_cache_shared_answers", "Answers in Redis.", "answers"),
    ("tierline_cache_shared_bytes", "What they take there.", "bytes"),
    ("tierline_cache_shared_waiting", "Changes that Redis does not have yet.", "waiting"),
)
_COUNTERS = (
    ("tierline_cache_published_total", "Answers and questions that this process gave to others.", "published"),
    ("tierline_cache_taken_total", "Answers that it took from others.", "taken"),
    ("tierline_cache_retractions_total", "What others forgot and it forgot with them.", "retractions"),
    ("tierline_cache_rebuilds_total", "How often it read the answers in Redis anew.", "rebuilds"),
)
_UNSHARED = {"dropped": "dropped", "refused": "no_room", "unreadable": "unreadable"}


class ReplicaMetrics(Collector):
    """The metrics of the latest answer; none where answers are not shared, and none after `take(None)`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stats: ReplicaStats | None = None
        registry.register(self)

    def take(self, stats: ReplicaStats | None) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text)
            if stats is not None:
                gauge.add_metric([], float(getattr(stats, field)))
            yield gauge
        for name, text, field in _COUNTERS:
            counter = CounterMetricFamily(name, text)
            if stats is not None:
                counter.add_metric([], getattr(stats, field))
            yield counter
        unshared = CounterMetricFamily(
            "tierline_cache_unshared_total",
            "Answers that were not shared: too many waited for Redis, it had no room, or their key is another.",
            labels=["reason"],
        )
        if stats is not None:
            for field, reason in _UNSHARED.items():
                unshared.add_metric([reason], getattr(stats, field))
        yield unshared
