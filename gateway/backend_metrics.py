"""What pools of backends know of themselves, as Prometheus metrics: read when asked for, at no request's cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from backends.breaker import STATES
from backends.placement.placer import WHYS
from backends.pool import Pool
from backends.prefilling import LEG_OUTCOMES


class BackendCollector(Collector):
    """Queues, replicas by state, retries, hedges and continuations of every backend."""

    def __init__(self, pools: Mapping[str, Pool]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        queued = GaugeMetricFamily(
            "tierline_backend_queued", "Requests that wait for a replica to be free.", labels=["backend"]
        )
        replicas = GaugeMetricFamily(
            "tierline_backend_replicas", "Replicas by the state of their breaker.", labels=["backend", "state"]
        )
        retries = CounterMetricFamily(
            "tierline_backend_retries",
            "Attempts after the first at a backend; refused: the share of retries was used up.",
            labels=["backend", "result"],
        )
        hedges = CounterMetricFamily(
            "tierline_backend_hedges",
            "Second requests beside slow ones; refused: the share of hedges was used up.",
            labels=["backend", "result"],
        )
        continued = CounterMetricFamily(
            "tierline_backend_continuations", "Broken streams that the backend continued.", labels=["backend"]
        )
        for name, pool in self._pools.items():
            queued.add_metric([name], pool.queued)
            states: list[str] = [replica.state for replica in pool.snapshot()]
            for state in (*STATES, "closed"):
                replicas.add_metric([name, state], states.count(state))
            retries.add_metric([name, "made"], pool.retries.spent)
            retries.add_metric([name, "refused"], pool.retries.refused)
            if pool.hedging is not None:
                hedges.add_metric([name, "made"], pool.hedging.share.spent)
                hedges.add_metric([name, "refused"], pool.hedging.share.refused)
            continued.add_metric([name], pool.continued)
        yield from (queued, replicas, retries, hedges, continued)
        yield from self._placement()
        yield from self._prefilling()

    def _prefilling(self) -> Iterator[Metric]:
        """Of the backends where some replicas compute prompts for others."""
        legs = CounterMetricFamily(
            "tierline_prefills", "Prompts that a replica was to compute for another.", labels=["backend", "outcome"]
        )
        tokens = CounterMetricFamily(
            "tierline_prefill_tokens", "Tokens of prompts computed for another replica.", labels=["backend"]
        )
        replicas = GaugeMetricFamily(
            "tierline_prefill_replicas", "Replicas that compute prompts, by state.", labels=["backend", "state"]
        )
        for name, pool in self._pools.items():
            if (prefilling := pool.prefilling) is None:
                continue
            for outcome in LEG_OUTCOMES:
                legs.add_metric([name, outcome], prefilling.legs[outcome])
            tokens.add_metric([name], prefilling.tokens)
            states: list[str] = [replica.state for replica in prefilling.pool.snapshot()]
            for state in (*STATES, "closed"):
                replicas.add_metric([name, state], states.count(state))
        yield from (legs, tokens, replicas)

    def _placement(self) -> Iterator[Metric]:
        """Of the backends that have several replicas."""
        chosen = CounterMetricFamily(
            "tierline_placement", "Choices between replicas, by their reason.", labels=["backend", "reason"]
        )
        expected = CounterMetricFamily(
            "tierline_placement_expected_hit_tokens",
            "Tokens of prompts that the chosen replicas were believed to hold.",
            labels=["backend"],
        )
        actual = CounterMetricFamily(
            "tierline_placement_hit_tokens",
            "Tokens of prompts that they did hold, as their answers say.",
            labels=["backend"],
        )
        imbalance = GaugeMetricFamily(
            "tierline_placement_imbalance", "The most work on a replica, in multiples of the mean.", labels=["backend"]
        )
        pages = GaugeMetricFamily(
            "tierline_placement_pages", "Pages that replicas have told that they hold.", labels=["backend"]
        )
        telling = GaugeMetricFamily("tierline_placement_telling", "Replicas that tell their pages.", labels=["backend"])
        for name, pool in self._pools.items():
            placer = pool.placer
            if placer is None:
                continue
            for reason in WHYS:
                chosen.add_metric([name, reason], placer.chosen[reason])
            expected.add_metric([name], placer.expected_hit_tokens)
            actual.add_metric([name], placer.hit_tokens)
            imbalance.add_metric([name], placer.imbalance())
            if pool.feeds is not None and placer.index is not None:
                pages.add_metric([name], placer.index.pages)
                telling.add_metric([name], pool.feeds.listening)
        yield from (chosen, expected, actual, imbalance, pages, telling)
