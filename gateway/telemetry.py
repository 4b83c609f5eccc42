"""Prometheus metrics of the front door, by the names that dashboards and alerts rely on.

One `Metrics` per process with a registry of its own. Label values come from configuration (models, tiers, policies),
never from what a client sends, so the number of series is bounded. Spans are in `tracing.py`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gateway.counts import Counts, Level, Spreads
from gateway.promise_metrics import PromiseMetrics
from gateway.replica_metrics import ReplicaMetrics

TTFT_BUCKETS = (0.1, 0.5, 1, 2, 5, 10)
TPOT_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.5)
OVERHEAD_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5)
DURATION_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60, 300)
QUEUE_BUCKETS = (0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 30, 60)
RATE_WINDOW_S = 10


class RateWindow:
    """How fast a total has grown over the last ten seconds, by looks at it once a second."""

    def __init__(self, total: Callable[[], float], seconds: int = RATE_WINDOW_S) -> None:
        self._total = total
        self._seconds = seconds
        self._seen: deque[tuple[float, float]] = deque([(time.monotonic(), 0.0)], maxlen=seconds + 1)

    def look(self) -> None:
        """Called once a second."""
        self._seen.append((time.monotonic(), self._total()))

    def per_second(self) -> float:
        since = time.monotonic() - self._seconds
        before = next((total for at, total in self._seen if at >= since), self._seen[-1][1])
        return (self._total() - before) / self._seconds


class _Rates(Collector):
    def __init__(self, requests: RateWindow, tokens: RateWindow) -> None:
        self._requests = requests
        self._tokens = tokens

    def collect(self) -> list[Metric]:
        return [
            GaugeMetricFamily(
                "llm_requests_per_second",
                f"Requests finished per second over {RATE_WINDOW_S} s.",
                value=self._requests.per_second(),
            ),
            GaugeMetricFamily(
                "llm_tokens_per_second",
                f"Output tokens per second over {RATE_WINDOW_S} s.",
                value=self._tokens.per_second(),
            ),
        ]


class ModelCounts:
    """The numbers of one model, which every attempt at it counts."""

    __slots__ = ("cached_input", "cost", "input", "output", "tpot", "ttft")

    def __init__(self, metrics: Metrics, model: str) -> None:
        self.input = metrics.tokens.labels(model, "input")
        self.cached_input = metrics.tokens.labels(model, "cached_input")
        self.output = metrics.tokens.labels(model, "output")
        self.cost = metrics.cost.labels(model)
        self.ttft = metrics.ttft.labels(model)
        self.tpot = metrics.tpot.labels(model)


class Metrics:
    """Everything that the front door counts."""

    def __init__(self) -> None:
        registry = self.registry = CollectorRegistry()
        self.ttft = Spreads("llm_ttft_seconds", "Time to first token.", ["model"], TTFT_BUCKETS, registry)
        self.tpot = Spreads(
            "llm_tpot_seconds", "Time per output token after the first.", ["model"], TPOT_BUCKETS, registry
        )
        self.requests = Counts(
            "tierline_requests_total",
            "Requests finished, by outcome and HTTP status.",
            ["route", "outcome", "status"],
            registry,
        )
        self.duration = Spreads(
            "tierline_request_duration_seconds", "Whole life of a request.", ["route"], DURATION_BUCKETS, registry
        )
        self.overhead = Spreads(
            "tierline_overhead_seconds",
            "From the request's last byte to the backend call: what the gateway itself adds before the model.",
            [],
            OVERHEAD_BUCKETS,
            registry,
        ).labels()
        self.attempts = Counts(
            "tierline_attempts_total", "Calls to backends.", ["backend", "model", "outcome"], registry
        )
        self.tokens = Counts(
            "tierline_tokens_total",
            "Tokens by model and kind (input, cached_input, output).",
            ["model", "kind"],
            registry,
        )
        self.cost = Counts("tierline_cost_usd_total", "Cost of attempts in US dollars.", ["model"], registry)
        self.saved = Counts("tierline_saved_usd_total", "Cost that the cache saved.", ["model"], registry)
        self.guardrails = Counts(
            "tierline_guardrail_findings_total",
            "Requests and answers in which a guardrail found something, by what was done; no_verdict: its service"
            " gave none.",
            ["policy", "rule", "when", "action"],
            registry,
        )
        self.prefixes_told = Counts(
            "tierline_placement_told_total",
            "Beginnings of prompts that were to be told to other gateways: told, shortened, dropped (too many bytes).",
            ["outcome"],
            registry,
        )
        self.embeddings = Counts(
            "tierline_routing_embeddings_total",
            "Requests whose vector the classifier was to see, by what became of it: used, words, or why there is none.",
            ["outcome"],
            registry,
        )
        self.cache = Counts(
            "tierline_cache_requests_total",
            "Cache outcomes: exact, semantic, audit, shadow, miss, bypass.",
            ["outcome"],
            registry,
        )
        self.judgements = Counts(
            "tierline_cache_judgements_total",
            "Answers that a model was to compare for the cache: same, different, unclear, failed, too_long, busy.",
            ["verdict"],
            registry,
        )
        self.responses_kept = Counts(
            "tierline_responses_kept_total",
            "Answers of /v1/responses put into the database: kept, failed (the client was told).",
            ["outcome"],
            registry,
        )
        self.batches = Gauge(
            "tierline_batches",
            "Batches that have not ended, of all processes, by status.",
            ["status"],
            registry=registry,
        )
        self.batch_oldest = Gauge(
            "tierline_batch_oldest_seconds", "Age of the oldest batch that has not ended.", registry=registry
        )
        self.batch_lines_running = Gauge(
            "tierline_batch_lines_running", "Lines of batches that this process is asking.", registry=registry
        )
        self.batch_lines_left = Gauge(
            "tierline_batch_lines_left", "Lines without a result, of batches that this process has.", registry=registry
        )
        self.batch_lines = Counts(
            "tierline_batch_lines_total",
            "Lines of batches by what came of them: completed, failed, asked_again (a server failed, or was away).",
            ["outcome"],
            registry,
        )
        self.idempotent = Counts(
            "tierline_idempotent_requests_total",
            "Requests with an idempotency key: first, local (first, Redis away), joined, replayed, reused, too_large.",
            ["result"],
            registry,
        )
        self.idempotent_answers = Gauge(
            "tierline_idempotent_answers", "Answers kept for their idempotency keys by this process.", registry=registry
        )
        self.idempotent_bytes = Gauge(
            "tierline_idempotent_bytes", "Memory that this process's answers take, running ones too.", registry=registry
        )
        self.idempotent_evicted = Counts(
            "tierline_idempotent_evicted_total",
            "Answers forgotten before their time to make room, in this process's memory or by it in Redis.",
            ["where"],
            registry,
        )
        self.decisions = Counts(
            "tierline_decisions_total", "Routing decisions.", ["policy", "rule", "tier", "fallback"], registry
        )
        self.outcomes = Counts(
            "tierline_outcomes_total",
            "What answers came to, as far as it is known: good, bad; dropped, while the database was away.",
            ["source", "outcome"],
            registry,
        )
        self.session_turns = Counts(
            "tierline_session_turns_total",
            "Turns of conversations that a policy keeps on their tier: new, kept, upgraded, downgraded, moved.",
            ["policy", "outcome"],
            registry,
        )
        self.escalations = Counts(
            "tierline_escalations_total",
            "Answers that failed a check of the policy: the tier that gave them, the check, and the tier asked next or"
            " what stood in the way: steps, tier, time, budget.",
            ["tier", "reason", "next"],
            registry,
        )
        self.limited = Counts("tierline_limited_total", "Requests refused by a limit or budget.", ["limit"], registry)
        self.drained = Counts(
            "tierline_drained_streams_total",
            "Streams read on after their client left, by what ended that: finished, time, tokens, cut, budget.",
            ["ended"],
            registry,
        )
        self.in_flight = Level(
            "tierline_requests_in_flight",
            "Requests with a valid key: their body is coming, or they are served.",
            registry,
        )
        self.body_bytes = Gauge(
            "tierline_held_body_bytes",
            "Memory set aside for the larger request bodies: coming, or of running requests.",
            registry=registry,
        )
        self.queued = Gauge(
            "tierline_queue_waiting",
            "Requests in the queue before admission: the process or their key runs as many as it may.",
            registry=registry,
        )
        self.waiting_for_money = Gauge(
            "tierline_budget_queue_waiting",
            "Requests that wait until a budget covers them.",
            registry=registry,
        )
        self.queue_wait = Spreads(
            "tierline_queue_wait_seconds",
            "How long requests that waited before admission did, those that waited in vain included.",
            [],
            QUEUE_BUCKETS,
            registry,
        ).labels()
        self.holds = Gauge("tierline_holds_open", "Holds not yet settled.", registry=registry)
        self.limiter_degraded = Gauge(
            "tierline_limiter_degraded",
            "1 while Redis is away and this process keeps to its share of the limits.",
            registry=registry,
        )
        self.journal_lag = Gauge(
            "tierline_ledger_lag_rows", "Rows in the journal that the database does not have yet.", registry=registry
        )
        self.backend_up = Gauge(
            "tierline_backend_up", "1 while at least one replica is healthy.", ["backend"], registry=registry
        )
        self.outstanding = Gauge(
            "tierline_backend_outstanding", "Requests running on a backend.", ["backend"], registry=registry
        )
        self.policy_problems = Gauge(
            "tierline_policy_problems", "Faults in the policy folder; the last good set is in force.", registry=registry
        )
        self.policy_reloads = Counts("tierline_policy_reloads_total", "Policy reloads.", ["result"], registry)
        self.rollout_percent = Gauge(
            "tierline_rollout_percent", "Share of the traffic that a tried policy has.", ["policy"], registry=registry
        )
        self.rolled_back = Gauge(
            "tierline_rollout_rolled_back",
            "1 where a tried policy was taken back because a guard was breached.",
            ["policy"],
            registry=registry,
        )
        self.shadow_decisions = Counts(
            "tierline_shadow_decisions_total",
            "Requests that a shadow decided as well, by the tier of both; same: tier, model and cache alike.",
            ["policy", "tier", "shadow_tier", "same"],
            registry,
        )
        self.shadow_cost = Counts(
            "tierline_shadow_cost_usd_total",
            "What these requests would cost by the decision of each side (old, new), for the tokens that were used.",
            ["policy", "side"],
            registry,
        )
        self.cache_connected = Gauge(
            "tierline_cache_connected", "1 while the cache process answers.", registry=registry
        )
        self.promises = PromiseMetrics(registry)
        self.replicas = ReplicaMetrics(registry)
        self.rates = (RateWindow(self.requests.total), RateWindow(partial(self.tokens.total, "output")))
        registry.register(_Rates(*self.rates))
        self._models: dict[str, ModelCounts] = {}

    def of_model(self, model: str) -> ModelCounts:
        """What is counted of a model."""
        found = self._models.get(model)
        if found is None:
            found = self._models[model] = ModelCounts(self, model)
        return found
