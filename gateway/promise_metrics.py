"""How the cache keeps its promises, as Prometheus metrics. The cache process counts; a gateway asks it now and then."""

from __future__ import annotations

from collections.abc import Iterable
from typing import get_args

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from cache.promise.rule import Standing, State
from cache.stats import CacheStats

# Name, what it says, and the field of a standing. A bound that nobody has yet is left out.
_GAUGES = (
    ("tierline_cache_promised_false_hit_rate", "Most wrong hits per hit that the policy allows.", "max_false_hit_rate"),
    ("tierline_cache_false_hit_rate", "Wrong hits per audit since the regime began.", "false_hit_rate"),
    ("tierline_cache_false_hit_rate_lower", "Lower bound of the false-hit rate.", "lower"),
    ("tierline_cache_false_hit_rate_upper", "Upper bound of the false-hit rate.", "upper"),
    ("tierline_cache_promise_audits", "Hits compared with a fresh answer since the regime began.", "audits"),
    ("tierline_cache_promise_errors", "Of these, the wrong ones.", "errors"),
)


class PromiseMetrics(Collector):
    """The metrics of the latest answer; none before the first and after `forget`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stats: CacheStats | None = None
        registry.register(self)

    def take(self, stats: CacheStats) -> None:
        self._stats = stats

    def forget(self) -> None:
        """The cache process does not answer: old numbers would pass for present ones."""
        self._stats = None

    def collect(self) -> Iterable[Metric]:
        # A policy that was changed has an earlier promise as well: the one used last counts, which stands last.
        latest = {standing.policy: standing for standing in (self._stats.promises if self._stats else ())}
        standings: list[Standing] = list(latest.values())
        for name, text, field in _GAUGES:
            gauge = GaugeMetricFamily(name, text, labels=["policy"])
            for standing in standings:
                if (value := getattr(standing, field)) is not None:
                    gauge.add_metric([standing.policy], value)
            yield gauge
        states = GaugeMetricFamily(
            "tierline_cache_promise_state", "1 for the state that a promise is in.", labels=["policy", "state"]
        )
        breaches = CounterMetricFamily(
            "tierline_cache_promise_breaches_total", "How often a promise was found broken.", labels=["policy"]
        )
        for standing in standings:
            for state in get_args(State):
                states.add_metric([standing.policy, state], float(standing.state == state))
            breaches.add_metric([standing.policy], standing.breaches)
        yield states
        yield breaches
        unjudged = CounterMetricFamily(
            "tierline_cache_unjudged_total", "Fresh answers that were to be compared and were not.", labels=["reason"]
        )
        judged = CounterMetricFamily(
            "tierline_cache_judged_total", "Fresh answers that were compared, by judge.", labels=["judge", "verdict"]
        )
        if self._stats is not None:
            for reason, count in self._stats.unjudged.items():
                unjudged.add_metric([reason], count)
            for words, count in self._stats.judged.items():
                judged.add_metric(words.split(), count)
        yield unjudged
        yield judged
