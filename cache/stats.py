"""What the cache process counts: hits, misses and why, evictions, entries, bytes, latencies."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

import msgspec

from cache.entry import Entry
from cache.promise.rule import Standing
from cache.replicas.standing import ReplicaStats

_WINDOW = 2048


class Latency(msgspec.Struct, frozen=True):
    """Of the last 2,048 observations, in milliseconds; zeros when there is none."""

    count: int = 0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    max_ms: float = 0.0


class CacheStats(msgspec.Struct, frozen=True):
    """Totals since the process started, and what it holds now.

    `misses` counts reasons: no_entry, below_threshold, a guard's name, warming, too_long ... `refused_stores` likewise.
    `saved_nanousd` adds up what the answers given again had cost. `audits` and `shadow_hits` are hits that were found
    and not given. `judged` counts comparisons of answers by judge and verdict, such as `embedding same`; `unjudged`
    those that came to nothing, by reason: lost, gone, too_long, no_verdict ... `promises`: how each stands.

    `bytes` are in memory, `disk_bytes` in the file. `indexes` and `vectors` are those in memory; `waiting_vectors`
    counts questions that the embedder is yet to see; `unwritten` changes that are not in the
    file yet; `unreadable` values damaged or under another key; `storage_error` says why the file cannot be written.
    """

    state: str
    embedder: str
    fingerprint: str
    uptime_s: float
    entries: int
    bytes: int
    max_entries: int
    max_bytes: int
    indexes: int
    vectors: int
    lookups: int
    exact_hits: int
    semantic_hits: int
    misses: dict[str, int]
    stores: int
    refused_stores: dict[str, int]
    evictions: int
    expirations: int
    purged: int
    embedded_texts: int
    embedded_batches: int
    saved_nanousd: int
    lookup: Latency
    embedding: Latency
    audits: int = 0
    shadow_hits: int = 0
    judged: dict[str, int] = {}
    unjudged: dict[str, int] = {}
    feedback: dict[str, int] = {}
    aliases_made: int = 0
    promises: list[Standing] = []
    questions: int = 0
    disk_bytes: int = 0
    max_disk_bytes: int = 0  # 0: there is no file
    waiting_vectors: int = 0
    unwritten: int = 0
    unreadable: int = 0
    storage_error: str | None = None
    replication: ReplicaStats | None = None  # None: this process shares its answers with nobody

    @property
    def hit_rate(self) -> float:
        """Hits per look-up, 0 when there was none."""
        return (self.exact_hits + self.semantic_hits) / self.lookups if self.lookups else 0.0


@dataclass
class Recorder:
    """The running counts of one process; not thread-safe."""

    lookups: int = 0
    exact_hits: int = 0
    semantic_hits: int = 0
    misses: Counter[str] = field(default_factory=Counter)
    stores: int = 0
    refused_stores: Counter[str] = field(default_factory=Counter)
    saved_nanousd: int = 0
    audits: int = 0
    shadow_hits: int = 0
    judged: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    feedback: Counter[str] = field(default_factory=Counter)
    aliases_made: int = 0
    lookup_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def looked_up(self, outcome: str, reason: str | None, entry: Entry | None) -> None:
        """Count a look-up. A hit that was found and not given is neither a hit nor a miss here."""
        self.lookups += 1
        if entry is not None:
            self.saved_nanousd += entry.cost_nanousd
        if outcome == "exact":
            self.exact_hits += 1
        elif outcome == "semantic":
            self.semantic_hits += 1
        elif outcome == "audit":
            self.audits += 1
        elif outcome == "shadow":
            self.shadow_hits += 1
        else:
            self.misses[reason or "no_entry"] += 1


def latency(observations_ms: deque[float]) -> Latency:
    """Nearest-rank quantiles of the observations."""
    if not observations_ms:
        return Latency()
    ordered = sorted(observations_ms)
    last = len(ordered) - 1
    return Latency(len(ordered), ordered[round(0.50 * last)], ordered[round(0.99 * last)], ordered[last])
