"""How a cache process shares its answers, on the page of metrics."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from cache.replicas.standing import ReplicaStats
from gateway.replica_metrics import ReplicaMetrics

STATS = ReplicaStats(
    connected=True,
    replicas=2,
    answers=30,
    bytes=4000,
    waiting=5,
    published=60,
    taken=70,
    retractions=8,
    rebuilds=1,
    dropped=9,
    refused=10,
    unreadable=11,
)


def test_the_latest_numbers_are_shown_and_no_old_ones() -> None:
    registry = CollectorRegistry()
    metrics = ReplicaMetrics(registry)
    assert "tierline_cache_shared " not in lines(registry)
    metrics.take(STATS)
    page = generate_latest(registry).decode()
    for line in (
        "tierline_cache_shared 1.0",
        "tierline_cache_replicas 2.0",
        "tierline_cache_shared_answers 30.0",
        "tierline_cache_shared_bytes 4000.0",
        "tierline_cache_shared_waiting 5.0",
        "tierline_cache_published_total 60.0",
        "tierline_cache_taken_total 70.0",
        "tierline_cache_retractions_total 8.0",
        "tierline_cache_rebuilds_total 1.0",
        'tierline_cache_unshared_total{reason="dropped"} 9.0',
        'tierline_cache_unshared_total{reason="no_room"} 10.0',
        'tierline_cache_unshared_total{reason="unreadable"} 11.0',
    ):
        assert line in page
    metrics.take(None)
    assert lines(registry) == ""


def lines(registry: CollectorRegistry) -> str:
    return "".join(line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#"))
