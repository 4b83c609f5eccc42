"""Replica pools: who is chosen, who is put out of rotation, how it comes back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection

import pytest

from backends.attempt import AttemptFailed
from backends.breaker import FAILURES_TO_OPEN, State
from backends.dispatch import NoBackend, StreamCut
from backends.pool import Pool
from backends.replica import Replica

URLS = ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1", "http://127.0.0.1:3/v1"]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cool-downs and probes of tenths of a second."""
    monkeypatch.setattr("backends.breaker.COOL_FIRST_S", 0.2)
    monkeypatch.setattr("backends.pool.PROBE_EVERY_S", 0.05)


def states(pool: Pool) -> list[State]:
    return [replica.state for replica in pool.snapshot()]


def pick(pool: Pool, tried: Collection[Replica] = ()) -> Replica | None:
    """The replica that a request would go to now."""
    replica = pool.acquire(tried)
    if replica is not None:
        pool.release(replica)
    return replica


def broken(kind: str = "upstream_error", **options: object) -> AttemptFailed:
    return AttemptFailed(kind, "broken", **options)  # type: ignore[arg-type]


# Choice.


async def test_the_replica_with_the_fewest_requests_is_chosen(client):
    pool = Pool("p", URLS, client=client, max_outstanding=5)
    taken = [pool.acquire() for _ in range(15)]
    assert [replica.outstanding for replica in pool.replicas] == [5, 5, 5]
    assert pool.acquire() is None
    assert pool.rank() == 1
    pool.release(pool.replicas[1])
    assert pool.acquire() is pool.replicas[1]
    for replica in taken:
        pool.release(replica)
    assert [replica.outstanding for replica in pool.replicas] == [0, 0, 0]


async def test_ties_are_broken_at_random(client):
    pool = Pool("p", URLS, client=client)
    assert {pick(pool).base_url for _ in range(200)} == set(URLS)


async def test_tried_replicas_come_last(client):
    pool = Pool("p", URLS, client=client)
    tried = pool.replicas[:2]
    for _ in range(50):
        assert pick(pool, tried) is pool.replicas[2]
    assert pool.fresh(tried)
    assert pick(pool, pool.replicas) in pool.replicas
    assert not pool.fresh(pool.replicas)


@pytest.mark.parametrize(
    ("urls", "options", "message"),
    [
        ([], {}, "no base URL"),
        (["127.0.0.1:80"], {}, "http://host:port/v1"),
        (URLS, {"attempts": 0}, "at least 1"),
        (URLS, {"max_outstanding": 0}, "at least 1"),
        (URLS, {"headers": {"Content-Length": "3"}}, "set by the gateway"),
        (URLS, {"headers": {"a b": "3"}}, "not a header name"),
        (URLS, {"headers": {"a": "3\r\nb: 4"}}, "line break"),
        (URLS, {"api_key": "3\n"}, "line break"),
    ],
)
def test_bad_configuration_is_refused(urls, options, message):
    with pytest.raises(ValueError, match=message):
        Pool("p", urls, client=None, **options)


# Passive health.


async def test_failures_in_a_row_cool_a_replica_down(client):
    pool = Pool("p", URLS, client=client)
    ill = pool.replicas[0]
    for _ in range(FAILURES_TO_OPEN - 1):
        pool.failed(ill, broken())
    assert states(pool) == ["healthy"] * 3
    pool.succeeded(ill)
    for _ in range(FAILURES_TO_OPEN - 1):
        pool.failed(ill, broken())
    assert states(pool) == ["healthy"] * 3
    pool.failed(ill, broken())
    assert states(pool) == ["cooling", "healthy", "healthy"]
    assert pool.snapshot()[0].back_in_s > 0.5
    assert pool.snapshot()[0].last_error == "broken"
    assert all(pick(pool) is not ill for _ in range(50))
    await pool.aclose()


async def test_a_refused_connection_cools_at_once(client):
    pool = Pool("p", URLS, client=client)
    pool.failed(pool.replicas[0], broken("connect", reached=False))
    assert states(pool)[0] == "cooling"
    await pool.aclose()


async def test_a_crowd_that_fails_together_counts_once(client):
    pool = Pool("p", URLS, client=client)
    for _ in range(64):
        pool.failed(pool.replicas[0], broken())
    assert pool.replicas[0].breaker.cool_downs == 1
    assert pool.snapshot()[0].back_in_s < 2
    assert pool.snapshot()[0].failures_total == 64
    await pool.aclose()


async def test_cool_downs_grow_and_never_get_shorter(client, mock, monkeypatch, eventually):
    monkeypatch.setattr("backends.breaker.COOL_FIRST_S", 0.1)
    pool = Pool("p", [mock.base_url], client=client)
    ill, pauses = pool.replicas[0], []
    for _ in range(3):
        for _ in range(FAILURES_TO_OPEN):
            pool.failed(ill, broken())
        pauses.append(ill.breaker.cooled_until - time.monotonic())
        await eventually(lambda: ill.breaker.state(time.monotonic()) == "trial")
    assert 0.07 < pauses[0] < 0.13 < pauses[1] < 0.25 < pauses[2] < 0.5
    await pool.aclose()


async def test_after_a_cool_down_one_request_goes_first(client, mock, second, fast, eventually):
    pool = Pool("p", [mock.base_url, second.base_url], client=client)
    ill = pool.replicas[0]
    for _ in range(FAILURES_TO_OPEN):
        pool.failed(ill, broken())
    await eventually(lambda: states(pool)[0] == "trial")
    taken = [pool.acquire() for _ in range(10)]
    assert taken.count(ill) == 1
    pool.release(ill)
    pool.failed(ill, broken())  # one more failure is enough now
    assert states(pool)[0] == "cooling"
    await eventually(lambda: states(pool)[0] == "trial")
    assert pool.acquire() is ill
    pool.succeeded(ill)
    assert states(pool) == ["healthy", "healthy"]
    assert pool.acquire() is ill
    await pool.aclose()


async def test_rate_limits_rest_a_replica_without_blaming_it(client):
    pool = Pool("p", URLS, client=client)
    for _ in range(10):
        pool.failed(pool.replicas[0], broken("rate_limited", retry_after=5))
    assert states(pool) == ["limited", "healthy", "healthy"]
    assert 4 < pool.snapshot()[0].back_in_s <= 5
    assert pool.snapshot()[0].failures == 0
    pool.failed(pool.replicas[0], broken("rate_limited", retry_after=1))  # never shortens the rest
    assert pool.snapshot()[0].back_in_s > 4
    pool.failed(pool.replicas[1], broken("rate_limited", retry_after=10_000))
    assert pool.snapshot()[1].back_in_s <= 60


async def test_a_rest_is_kept_to_even_if_all_rest(client):
    pool = Pool("p", URLS, client=client)
    for number, replica in enumerate(pool.replicas):
        pool.failed(replica, broken("rate_limited", retry_after=[9, 3, 6][number]))
    assert pool.rank() == 2
    assert pool.acquire() is None
    assert 2 < pool.rest_s() <= 3
    assert 2 < pool.back_in_s() <= 3


async def test_if_all_are_down_one_request_at_a_time_is_let_through(client):
    pool = Pool("p", URLS[:2], client=client)
    for replica in pool.replicas:
        pool.failed(replica, broken("connect"))
    pool.replicas[0].breaker.cooled_until += 5
    assert states(pool) == ["cooling", "cooling"]
    assert pool.acquire() is pool.replicas[1]  # the one that would return first
    assert pool.acquire() is pool.replicas[0]
    assert pool.acquire() is None
    pool.succeeded(pool.replicas[1])
    assert states(pool) == ["cooling", "healthy"]
    assert pool.acquire() is pool.replicas[1]
    await pool.aclose()


async def test_a_replica_that_is_down_is_not_tried_because_the_others_are_full(client):
    pool = Pool("p", URLS[:2], client=client, max_outstanding=1)
    pool.failed(pool.replicas[0], broken("connect"))
    assert pool.acquire() is pool.replicas[1]
    assert pool.acquire() is None
    assert pool.rank() == 1
    await pool.aclose()


# Active health.


async def test_a_replica_that_was_down_returns_when_it_answers(bench, mock, fast, monkeypatch, eventually):
    monkeypatch.setattr("backends.breaker.COOL_FIRST_S", 60.0)  # only the probe can bring it back in time
    pool = bench.pool("main", mock, attempts=1)
    port = mock.port
    await mock.stop()
    with pytest.raises(NoBackend):
        await bench.open(stream=False)
    assert states(pool) == ["cooling"]
    await mock.start(port)
    await eventually(lambda: states(pool) == ["trial"])
    await bench.open(stream=False)
    assert states(pool) == ["healthy"]
    assert not pool._probes


async def test_a_replica_that_is_not_ready_stays_out(bench, mock, fast, eventually):
    pool = bench.pool("main", mock, attempts=1)
    mock.healthy = False
    pool.failed(pool.replicas[0], broken("connect", reached=False))
    await asyncio.sleep(0.6)  # much longer than its cool-down
    assert states(pool) == ["cooling"]
    mock.healthy = True
    await eventually(lambda: states(pool) == ["trial"])


async def test_a_replica_that_answers_probes_but_fails_requests_serves_its_time(bench, mock, monkeypatch, eventually):
    monkeypatch.setattr("backends.breaker.COOL_FIRST_S", 0.5)
    monkeypatch.setattr("backends.pool.PROBE_EVERY_S", 0.05)
    pool = bench.pool("main", mock)
    began = time.monotonic()
    for _ in range(FAILURES_TO_OPEN):
        pool.failed(pool.replicas[0], broken())
    await eventually(lambda: states(pool) == ["trial"])
    assert time.monotonic() - began > 0.35


async def test_check_asks_every_replica(client, mock, second, refused_url):
    pool = Pool("p", [mock.base_url, second.base_url, refused_url], client=client)
    assert await pool.check() == 2
    second.healthy = False
    assert await pool.check() == 1


async def test_a_server_without_a_health_page_is_asked_for_its_models(client):
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        status = b"401 No" if b" /openai/v1/models " in request else b"404 No"
        writer.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    assert await Pool("p", [f"http://127.0.0.1:{port}/openai/v1"], client=client).check() == 1
    server.close()


# Through the dispatcher.


async def test_a_dead_replica_is_used_once_and_then_left_alone(bench, mock, refused_url):
    bench.pool("main", mock, refused_url, attempts=2)
    for _ in range(10):
        await bench.open(stream=False)
    assert sum(attempt.outcome == "error" for attempt in bench.observer.started) <= 1
    assert mock.requests == 10


async def test_a_dead_backend_costs_nothing_while_another_lives(bench, mock, refused_url):
    bench.pool("dead", refused_url, attempts=1)
    bench.pool("alive", mock)
    for _ in range(3):
        await bench.open("mock@dead", "mock@alive", stream=False)
    assert bench.outcomes() == ["error", "success", "success", "success"]


async def test_a_sole_dead_backend_is_still_tried(bench, mock):
    pool = bench.pool("main", mock, attempts=1)
    pool.failed(pool.replicas[0], broken("connect"))
    assert states(pool) == ["cooling"]
    await bench.open(stream=False)
    assert states(pool) == ["healthy"]


async def test_cut_streams_count_against_a_replica(bench, mock, second):
    pool = bench.pool("main", mock, second)
    mock.override = "cut,after=1"
    for _ in range(40):
        answer = await bench.open()
        with contextlib.suppress(StreamCut):
            async for _ in answer.events:
                pass
    assert 1 <= mock.requests <= FAILURES_TO_OPEN
    assert pool.snapshot()[0].failures_total == mock.requests
    assert second.requests == 40 - mock.requests
