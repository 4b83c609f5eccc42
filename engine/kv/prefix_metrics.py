"""What the engine tells Prometheus of its prefix cache: why prompts were computed, and pages that travelled."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine.kv.prefix_history import Absence
from engine.messages import Stats

_LOADS = ("whole", "part", "none", "late", "skipped", "unknown_peer")


class PrefixMetrics:
    """Counters that grow by the differences between the core's snapshots."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"tierline_engine_{name}", text, ["model", *labels], registry=registry)

        self._missed = counter("prefix_cache_missed_tokens", "Prompt tokens computed, by why.", "reason")
        self._loads = counter("kv_loads", "Requests that could have pages elsewhere, by what came.", "outcome")
        self._pages = counter("kv_tier_pages", "Pages to and from a tier.", "tier", "outcome")
        self._failures = counter("kv_tier_failures", "Times that a tier failed or was too slow.", "tier")
        self._queued = Gauge(
            "tierline_engine_kv_tier_queued_bytes", "Pages that wait to be saved.", ["model", "tier"], registry=registry
        )
        self._up = Gauge("tierline_engine_kv_tier_up", "1 while a tier is asked.", ["model", "tier"], registry=registry)
        for reason in Absence:
            self._missed.labels(model, reason)
        for outcome in _LOADS:
            self._loads.labels(model, outcome)

    def on_step(self, stats: Stats, last: Stats) -> None:
        """The core's snapshot, and the one before it."""
        for reason, tokens in stats.prefix_missed_tokens.items():
            _grow(self._missed.labels(self._model, reason), tokens, last.prefix_missed_tokens.get(reason, 0))
        for outcome, loads in stats.kv_loads.items():
            _grow(self._loads.labels(self._model, outcome), loads, last.kv_loads.get(outcome, 0))
        for tier, counts in stats.kv_tiers.items():
            before = last.kv_tiers.get(tier, {})
            for name, count in counts.items():
                if name == "up":
                    self._up.labels(self._model, tier).set(count)
                elif name == "queued":
                    self._queued.labels(self._model, tier).set(count)
                elif name == "failures":
                    _grow(self._failures.labels(self._model, tier), count, before.get(name, 0))
                else:
                    _grow(self._pages.labels(self._model, tier, name), count, before.get(name, 0))


def _grow(metric: Counter, now: int, before: int) -> None:
    if now != before:
        metric.inc(now - before)
