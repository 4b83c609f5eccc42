"""What the engine tells Prometheus of its adapters. Their names are the operator's, so they may be labels."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class AdapterMetrics:
    """Adapters that serve, how loading them ended, and how many answers were asked of each."""

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._model = model
        self.serving = Gauge(
            "tierline_engine_adapters", "Adapters that are loaded and serve.", ["model"], registry=registry
        ).labels(model)
        loads = Counter(
            "tierline_engine_adapter_loads", "Adapters loaded, at the start too, by how that ended.",
            ["model", "outcome"], registry=registry,
        )  # fmt: skip
        self.loads = {outcome: loads.labels(model, outcome) for outcome in ("loaded", "failed")}
        self._named: set[str] = set()  # adapters with a series of their own
        self._requests = Counter(
            "tierline_engine_adapter_requests", "Answers asked of an adapter.", ["model", "adapter"], registry=registry
        )

    def asked(self, name: str) -> None:
        """An answer is asked of the adapter `name`."""
        self._named.add(name)
        self._requests.labels(self._model, name).inc()

    def forget(self, name: str) -> None:
        """An adapter serves no more: nor does its series. It may never have had one."""
        if name in self._named:
            self._named.remove(name)
            self._requests.remove(self._model, name)
