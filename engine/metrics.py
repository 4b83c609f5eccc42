"""What the engine tells Prometheus, in a registry of its own (the HTTP process exposes it at `/metrics`).

Counters grow by the differences between the core's snapshots, so they survive a restart of the core. Latencies are
measured where a user would: from the arrival of the request at the HTTP process to the arrival of tokens there.
"""

from __future__ import annotations

import math
import time
from collections import deque

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.adapters.metrics import AdapterMetrics
from engine.gpu import GpuMetrics, find_source
from engine.kv.prefix_metrics import PrefixMetrics
from engine.messages import Stats

TTFT_BUCKETS = (0.1, 0.5, 1.0, 2.0, 5.0, 10.0)
TPOT_BUCKETS = (0.01, 0.05, 0.1, 0.2, 0.5)
_STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_RATE_WINDOW_SECONDS = 10.0
_HIT_RATE_WINDOW_SECONDS = 300.0


class _Window:
    """Sums of (a, b) over the last `seconds`, in slices of a fiftieth of the window."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._slices: deque[list[float]] = deque()  # [start, a, b]

    def add(self, a: float, b: float) -> None:
        now = time.monotonic()
        if not self._slices or now - self._slices[-1][0] > self._seconds / 50:
            self._drop_old(now)
            self._slices.append([now, 0.0, 0.0])
        self._slices[-1][1] += a
        self._slices[-1][2] += b

    def sums(self) -> tuple[float, float]:
        self._drop_old(time.monotonic())
        return sum(s[1] for s in self._slices), sum(s[2] for s in self._slices)

    def _drop_old(self, now: float) -> None:
        while self._slices and now - self._slices[0][0] > self._seconds:
            self._slices.popleft()


class EngineMetrics:
    """All metrics of one engine, labelled with the model's served name."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()
        self.gpus = GpuMetrics(self.registry, find_source())
        self._last = Stats()
        self._tokens_window = _Window(_RATE_WINDOW_SECONDS)
        self._hit_window = _Window(_HIT_RATE_WINDOW_SECONDS)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(name, text, ["model"], registry=self.registry).labels(model)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, ["model"], registry=self.registry).labels(model)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, ["model"], buckets=buckets, registry=self.registry).labels(model)

        pages = Gauge("tierline_engine_pages", "Pages of the KV cache by state.", ["model", "state"],
                      registry=self.registry)  # fmt: skip
        self._pages = {state: pages.labels(model, state) for state in ("total", "free", "cached", "used")}
        tokens = Counter("tierline_engine_tokens", "Tokens through the model: prompts and recomputation (prefill), "
                         "answers (generated).", ["model", "kind"], registry=self.registry)  # fmt: skip
        self._prefill_tokens = tokens.labels(model, "prefill")
        self._generated_tokens = tokens.labels(model, "generated")
        finished = Counter("tierline_engine_requests", "Answers by how they ended.", ["model", "finish_reason"],
                           registry=self.registry)  # fmt: skip
        self._finished = {
            reason: finished.labels(model, reason)
            for reason in ("stop", "length", "abort", "error", "deadline", "rejected")
        }
        self.up = gauge("tierline_engine_up", "1 while the core is loaded and answers.")
        self._running = gauge("tierline_engine_running_requests", "Requests that take part in the steps.")
        self._waiting = gauge("tierline_engine_waiting_requests", "Requests that wait for a place or for pages.")
        self._step_budget = gauge(
            "tierline_engine_step_token_budget", "Tokens of a step in which answers are being written, at most."
        )
        self._step = histogram("tierline_engine_step_seconds", "Duration of one step.", _STEP_BUCKETS)
        self._preemptions = counter("tierline_engine_preemptions", "Requests that gave up their pages to older ones.")
        self._recomputed = counter("tierline_engine_recomputed_tokens", "Tokens thrown away by preemptions.")
        self._queried = counter("tierline_engine_prefix_cache_queried_tokens", "Prompt tokens looked up.")
        self._hits = counter("tierline_engine_prefix_cache_hit_tokens", "Prompt tokens found and not computed.")
        self._evicted = counter("tierline_engine_prefix_cache_evicted_pages", "Cached pages given to others.")
        self._prefix = PrefixMetrics(self.registry, model)
        self.adapters = AdapterMetrics(self.registry, model)
        self._aborts = counter("tierline_engine_aborts", "Requests given up by their client.")
        self._step_failures = counter("tierline_engine_step_failures", "Steps that failed as a whole.")
        self._late_kernels = counter("tierline_engine_late_kernels", "GPU kernels compiled while requests waited.")
        drafts = Counter("tierline_engine_draft_tokens", "Proposed tokens by what the model said to them.",
                         ["model", "outcome"], registry=self.registry)  # fmt: skip
        self._accepted_drafts = drafts.labels(model, "accepted")
        self._rejected_drafts = drafts.labels(model, "rejected")
        self._draft_runs = counter("tierline_engine_draft_runs", "Steps of one request in which drafts were checked.")
        self.core_restarts = counter("tierline_engine_core_restarts", "How often the core was started again.")
        reloads = Counter("tierline_engine_weight_reloads", "Exchanges of weights by how they ended.",
                          ["model", "outcome"], registry=self.registry)  # fmt: skip
        self.weight_reloads = {outcome: reloads.labels(model, outcome) for outcome in ("loaded", "failed")}
        self._ttft = histogram("llm_ttft_seconds", "Time to first token.", TTFT_BUCKETS)
        self._tpot = histogram("llm_tpot_seconds", "Time per output token after the first.", TPOT_BUCKETS)
        self._tokens_per_second = gauge("llm_tokens_per_second", "Generated tokens, mean of the last 10 seconds.")
        self._hit_rate = gauge(
            "llm_prefix_cache_hit_rate", "Share of prompt tokens found, last 5 minutes; NaN without a prompt."
        )

    def on_core_start(self) -> None:
        """A new core counts from zero."""
        self._last = Stats()

    def on_step(self, stats: Stats, step_seconds: float | None) -> None:
        """Take over a snapshot of the core."""
        last, self._last = self._last, stats
        for metric, now, before in (
            (self._prefill_tokens, stats.prefill_tokens, last.prefill_tokens),
            (self._generated_tokens, stats.generated_tokens, last.generated_tokens),
            (self._preemptions, stats.preemptions, last.preemptions),
            (self._recomputed, stats.recomputed_tokens, last.recomputed_tokens),
            (self._queried, stats.prefix_queried_tokens, last.prefix_queried_tokens),
            (self._hits, stats.prefix_hit_tokens, last.prefix_hit_tokens),
            (self._evicted, stats.prefix_evicted_pages, last.prefix_evicted_pages),
            (self._aborts, stats.aborts, last.aborts),
            (self._step_failures, stats.step_failures, last.step_failures),
            (self._late_kernels, stats.late_kernels, last.late_kernels),
            (self._draft_runs, stats.draft_runs, last.draft_runs),
            (self._accepted_drafts, stats.accepted_draft_tokens, last.accepted_draft_tokens),
            (self._rejected_drafts, stats.rejected_draft_tokens, last.rejected_draft_tokens),
        ):
            if now != before:
                metric.inc(now - before)
        self._prefix.on_step(stats, last)
        self._tokens_window.add(stats.generated_tokens - last.generated_tokens, 0)
        queried = stats.prefix_queried_tokens - last.prefix_queried_tokens
        if queried:
            self._hit_window.add(queried, stats.prefix_hit_tokens - last.prefix_hit_tokens)
        if step_seconds is not None:
            self._step.observe(step_seconds)

    def on_first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def on_finish(self, reason: str, seconds_per_token: float | None) -> None:
        """An answer ended. `seconds_per_token` is None when it had fewer than two tokens."""
        self._finished[reason].inc()
        if seconds_per_token is not None:
            self._tpot.observe(seconds_per_token)

    def render(self) -> bytes:
        """The text exposition of this moment."""
        stats = self._last
        for state, pages in self._pages.items():
            pages.set(getattr(stats, f"pages_{state}"))
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._step_budget.set(stats.step_token_budget)
        self._tokens_per_second.set(self._tokens_window.sums()[0] / _RATE_WINDOW_SECONDS)
        queried, hits = self._hit_window.sums()
        self._hit_rate.set(hits / queried if queried else math.nan)
        return generate_latest(self.registry)
